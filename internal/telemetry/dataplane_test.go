package telemetry

import (
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
)

// Goal: the names that dashboards rest on, with the figures behind them.
func TestDataPlaneNames(t *testing.T) {
	d := NewDataPlane()
	d.ObserveRequest("Reserve", "ok", time.Millisecond)
	d.ObserveRequest("Reserve", "budget_exceeded", time.Millisecond)
	d.ObserveReview("token", "no")
	want := `
# HELP tokenlease_dataplane_requests_total Requests to the data plane by procedure and code; the code of success is ok.
# TYPE tokenlease_dataplane_requests_total counter
tokenlease_dataplane_requests_total{code="budget_exceeded",procedure="Reserve"} 1
tokenlease_dataplane_requests_total{code="ok",procedure="Reserve"} 1
# HELP tokenlease_dataplane_reviews_total Questions to the API server about tokens and access, by outcome: yes, no or error. What a cache answers is no question.
# TYPE tokenlease_dataplane_reviews_total counter
tokenlease_dataplane_reviews_total{outcome="no",review="token"} 1
`
	if err := testutil.CollectAndCompare(d, strings.NewReader(want), "tokenlease_dataplane_requests_total", "tokenlease_dataplane_reviews_total"); err != nil {
		t.Error(err)
	}
	if n := testutil.CollectAndCount(d, "tokenlease_dataplane_request_duration_seconds"); n != 1 {
		t.Errorf("%d series of durations, want one for the procedure", n)
	}
}
