package telemetry

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// DataPlane observes what the data plane serves. It implements dataplane.Observer and
// prometheus.Collector. Its labels come from fixed sets, whatever callers send.
type DataPlane struct {
	requests  *prometheus.CounterVec
	durations *prometheus.HistogramVec
	reviews   *prometheus.CounterVec
}

// NewDataPlane returns the metrics of one data plane.
func NewDataPlane() *DataPlane {
	return &DataPlane{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "tokenlease_dataplane_requests_total",
			Help: "Requests to the data plane by procedure and code; the code of success is ok.",
		}, []string{"procedure", "code"}),
		durations: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "tokenlease_dataplane_request_duration_seconds",
			Help:    "Time from a request's header to its answer.",
			Buckets: []float64{0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10},
		}, []string{"procedure"}),
		reviews: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "tokenlease_dataplane_reviews_total",
			Help: "Questions to the API server about tokens and access, by outcome: yes, no or error. What a cache answers is no question.",
		}, []string{"review", "outcome"}),
	}
}

func (d *DataPlane) collectors() []prometheus.Collector {
	return []prometheus.Collector{d.requests, d.durations, d.reviews}
}

// Describe implements prometheus.Collector.
func (d *DataPlane) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range d.collectors() {
		c.Describe(ch)
	}
}

// Collect implements prometheus.Collector.
func (d *DataPlane) Collect(ch chan<- prometheus.Metric) {
	for _, c := range d.collectors() {
		c.Collect(ch)
	}
}

// ObserveRequest implements dataplane.Observer.
func (d *DataPlane) ObserveRequest(procedure, code string, duration time.Duration) {
	d.requests.WithLabelValues(procedure, code).Inc()
	d.durations.WithLabelValues(procedure).Observe(duration.Seconds())
}

// ObserveReview implements dataplane.Observer.
func (d *DataPlane) ObserveReview(review, outcome string) {
	d.reviews.WithLabelValues(review, outcome).Inc()
}
