// Package telemetry turns what the ledger did into metrics and log lines. Metric
// names are part of the product's contract; dashboards and alerts rest on them.
package telemetry

import (
	"context"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/token-lease/operator/internal/ledger"
)

// scrapeTimeout bounds the one query that a scrape makes.
const scrapeTimeout = 2 * time.Second

// codeOK is the code label of a request that succeeded.
const codeOK = "ok"

// Metrics observes a ledger. It implements ledger.Observer and
// prometheus.Collector.
type Metrics struct {
	log logr.Logger

	restoreLag     prometheus.Histogram
	limitConflicts *prometheus.CounterVec
	transitions    *prometheus.CounterVec
	operations     *prometheus.CounterVec
	durations      *prometheus.HistogramVec
	writable       prometheus.Gauge
	swept          prometheus.Counter
	setAside       prometheus.Gauge
	purged         *prometheus.CounterVec
}

var _ ledger.Observer = (*Metrics)(nil)

// New returns metrics that also write a log line for each transition.
func New(log logr.Logger) *Metrics {
	m := &Metrics{
		log: log,
		restoreLag: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "budget_lease_restore_lag_seconds",
			Help:    "Time from the instant at which a raise was due to end to the confirmed restore of the limit.",
			Buckets: []float64{0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 3600},
		}),
		limitConflicts: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "budget_lease_limit_conflicts_total",
			Help: "Decisions on a raise that found another limit than the expected one and left it alone.",
		}, []string{"reason"}),
		transitions: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "budget_lease_transitions_total",
			Help: "Steps of raises performed by this process, by kind and outcome.",
		}, []string{"transition", "outcome"}),
		operations: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "tokenlease_ledger_operations_total",
			Help: "Requests to the ledger by operation and code; the code of success is ok.",
		}, []string{"operation", "code"}),
		durations: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "tokenlease_ledger_operation_duration_seconds",
			Help:    "Time from a request to its confirmed answer.",
			Buckets: []float64{0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10},
		}, []string{"operation"}),
		writable: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "tokenlease_ledger_writable",
			Help: "1 while the ledger's database accepts writes from this process, else 0.",
		}),
		swept: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "tokenlease_sweeper_touched_buckets_total",
			Help: "Buckets on which the sweeper of this process performed something due.",
		}),
		setAside: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "tokenlease_sweeper_set_aside_buckets",
			Help: "Buckets that the sweeper of this process has set aside because touching them failed.",
		}),
		purged: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "tokenlease_purged_records_total",
			Help: "Leases and operations that this process removed because their bucket's retention was over.",
		}, []string{"kind"}),
	}
	for _, reason := range []ledger.Reason{ledger.ReasonLimitChanged, ledger.ReasonLimitMismatch} {
		m.limitConflicts.WithLabelValues(string(reason))
	}
	for _, kind := range []ledger.TransitionKind{ledger.TransitionActivate, ledger.TransitionRestore, ledger.TransitionRevoke} {
		m.transitions.WithLabelValues(string(kind), string(ledger.OutcomeApplied))
	}
	return m
}

func (m *Metrics) collectors() []prometheus.Collector {
	return []prometheus.Collector{
		m.restoreLag, m.limitConflicts, m.transitions, m.operations, m.durations, m.writable, m.swept, m.setAside, m.purged,
	}
}

// Describe implements prometheus.Collector.
func (m *Metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range m.collectors() {
		c.Describe(ch)
	}
}

// Collect implements prometheus.Collector.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	for _, c := range m.collectors() {
		c.Collect(ch)
	}
}

// ObserveOperation implements ledger.Observer.
func (m *Metrics) ObserveOperation(operation ledger.Operation, code ledger.Code, duration time.Duration) {
	label := string(code)
	if label == "" {
		label = codeOK
	}
	m.operations.WithLabelValues(string(operation), label).Inc()
	m.durations.WithLabelValues(string(operation)).Observe(duration.Seconds())
}

// ObserveTransition implements ledger.Observer.
func (m *Metrics) ObserveTransition(t ledger.Transition, confirmed time.Duration) {
	m.transitions.WithLabelValues(string(t.Kind), string(t.Outcome)).Inc()
	if t.Reason == ledger.ReasonLimitChanged || t.Reason == ledger.ReasonLimitMismatch {
		m.limitConflicts.WithLabelValues(string(t.Reason)).Inc()
	}
	lag := max(0, t.At.Sub(t.DueAt)+confirmed)
	if t.Kind == ledger.TransitionRestore && t.Outcome == ledger.OutcomeApplied && t.Reason == ledger.ReasonExpired {
		m.restoreLag.Observe(lag.Seconds())
	}
	m.log.Info("raise transition", "bucket", t.BucketKey, "raise", t.RaiseID, "transition", t.Kind,
		"outcome", t.Outcome, "reason", t.Reason, "dueAt", t.DueAt, "at", t.At, "lagMilliseconds", lag.Milliseconds())
}

// SetWritable records whether the ledger accepts writes.
func (m *Metrics) SetWritable(writable bool) {
	if writable {
		m.writable.Set(1)
		return
	}
	m.writable.Set(0)
}

// ObserveSweep records what a pass of the sweeper did.
func (m *Metrics) ObserveSweep(touched, setAside int) {
	m.swept.Add(float64(touched))
	m.setAside.Set(float64(setAside))
}

// ObservePurge records what a step of purging removed.
func (m *Metrics) ObservePurge(leases, operations int64) {
	m.purged.WithLabelValues("lease").Add(float64(leases))
	m.purged.WithLabelValues("operation").Add(float64(operations))
}

// Counted is a metric that is read from the database at each scrape, by every
// replica, so that it shows what a dead worker missed. While the database does not
// answer it is absent, and tokenlease_ledger_writable says why.
type Counted struct {
	count func(context.Context) (int64, error)
	desc  *prometheus.Desc
}

// NewPastExpiry returns the collector of budget_lease_active_past_expiry.
func NewPastExpiry(store ledger.Store) *Counted {
	return &Counted{count: store.ActivePastExpiry, desc: prometheus.NewDesc("budget_lease_active_past_expiry",
		"Raises whose record is still active although their expiry has passed, as the database has it.", nil, nil)}
}

// NewOpenReviews returns the collector of budget_lease_reviews_open.
func NewOpenReviews(store ledger.Store) *Counted {
	return &Counted{count: store.OpenReviews, desc: prometheus.NewDesc("budget_lease_reviews_open",
		"Raises that found another limit at their end and that nobody has acknowledged, as the database has it.", nil, nil)}
}

// Describe implements prometheus.Collector.
func (c *Counted) Describe(ch chan<- *prometheus.Desc) { ch <- c.desc }

// Collect implements prometheus.Collector.
func (c *Counted) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTimeout)
	defer cancel()
	count, err := c.count(ctx)
	if err != nil {
		return
	}
	ch <- prometheus.MustNewConstMetric(c.desc, prometheus.GaugeValue, float64(count))
}
