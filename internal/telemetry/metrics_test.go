package telemetry

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/token-lease/operator/internal/ledger"
)

// Goal: the names that dashboards rest on, with the figures behind them. Method:
// a few observations, compared with the exposition text.
func TestNamesAndFigures(t *testing.T) {
	m := New(logr.Discard())
	due := time.Unix(1000, 0)
	m.ObserveTransition(ledger.Transition{
		Kind: ledger.TransitionRestore, Outcome: ledger.OutcomeApplied, Reason: ledger.ReasonExpired,
		DueAt: due, At: due.Add(30 * time.Millisecond),
	}, 10*time.Millisecond)
	m.ObserveTransition(ledger.Transition{
		Kind: ledger.TransitionRestore, Outcome: ledger.OutcomeKept, Reason: ledger.ReasonLimitChanged, DueAt: due, At: due,
	}, 0)
	m.ObserveOperation(ledger.OpReserve, ledger.CodeBudgetExceeded, time.Millisecond)
	m.ObserveOperation(ledger.OpReserve, "", time.Millisecond)
	m.SetWritable(true)

	want := `
# HELP budget_lease_limit_conflicts_total Decisions on a raise that found another limit than the expected one and left it alone.
# TYPE budget_lease_limit_conflicts_total counter
budget_lease_limit_conflicts_total{reason="LimitChanged"} 1
budget_lease_limit_conflicts_total{reason="LimitMismatch"} 0
# HELP budget_lease_transitions_total Steps of raises performed by this process, by kind and outcome.
# TYPE budget_lease_transitions_total counter
budget_lease_transitions_total{outcome="applied",transition="activate"} 0
budget_lease_transitions_total{outcome="applied",transition="restore"} 1
budget_lease_transitions_total{outcome="applied",transition="revoke"} 0
budget_lease_transitions_total{outcome="kept",transition="restore"} 1
# HELP tokenlease_ledger_operations_total Requests to the ledger by operation and code; the code of success is ok.
# TYPE tokenlease_ledger_operations_total counter
tokenlease_ledger_operations_total{code="budget_exceeded",operation="reserve"} 1
tokenlease_ledger_operations_total{code="ok",operation="reserve"} 1
# HELP tokenlease_ledger_writable 1 while the ledger's database accepts writes from this process, else 0.
# TYPE tokenlease_ledger_writable gauge
tokenlease_ledger_writable 1
`
	if err := testutil.CollectAndCompare(m, strings.NewReader(want),
		"budget_lease_limit_conflicts_total", "budget_lease_transitions_total",
		"tokenlease_ledger_operations_total", "tokenlease_ledger_writable"); err != nil {
		t.Error(err)
	}
	lag := histogram(t, m, "budget_lease_restore_lag_seconds")
	if lag.count != 1 || lag.sum < 0.0399 || lag.sum > 0.0401 {
		t.Errorf("restore lag: %+v; want one observation of 40 ms", lag)
	}
	if n := histogram(t, m, "tokenlease_ledger_operation_duration_seconds").count; n != 2 {
		t.Errorf("%d durations", n)
	}
}

type summary struct {
	count uint64
	sum   float64
}

func histogram(t *testing.T, c prometheus.Collector, name string) summary {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(c)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var s summary
	for _, family := range families {
		if family.GetName() == name {
			for _, metric := range family.GetMetric() {
				s.count += metric.GetHistogram().GetSampleCount()
				s.sum += metric.GetHistogram().GetSampleSum()
			}
		}
	}
	return s
}

// pastExpiry answers only the one question that the collector asks.
type pastExpiry struct {
	ledger.Store
	count int64
	err   error
}

func (p pastExpiry) ActivePastExpiry(context.Context) (int64, error) { return p.count, p.err }
func (p pastExpiry) OpenReviews(context.Context) (int64, error)      { return p.count, p.err }

// Goal: the figure comes from the store at each scrape, and a store that does not
// answer makes it absent, not zero.
func TestPastExpiry(t *testing.T) {
	if n := testutil.CollectAndCount(NewPastExpiry(pastExpiry{count: 3})); n != 1 {
		t.Errorf("%d metrics", n)
	}
	if v := testutil.ToFloat64(NewPastExpiry(pastExpiry{count: 3})); v != 3 {
		t.Errorf("got %v", v)
	}
	if n := testutil.CollectAndCount(NewPastExpiry(pastExpiry{err: errors.New("down")})); n != 0 {
		t.Errorf("%d metrics although the store did not answer", n)
	}
	if v := testutil.ToFloat64(NewOpenReviews(pastExpiry{count: 2})); v != 2 {
		t.Errorf("got %v open reviews", v)
	}
}
