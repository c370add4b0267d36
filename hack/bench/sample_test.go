package main

import (
	"encoding/json"
	"strings"
	"testing"
	"time"
)

// Goal: percentiles and medians are what their names say. Method: values whose
// percentiles are plain.
func TestStatistics(t *testing.T) {
	var hundred []time.Duration
	for i := 100; i >= 1; i-- {
		hundred = append(hundred, time.Duration(i)*time.Millisecond)
	}
	s := sampleOf(hundred, 2*time.Second)
	if s.PerSecond != 100 || s.P50 != 50 || s.P95 != 95 || s.P99 != 99 {
		t.Errorf("of 1 to 100 ms within 2 s: %+v", s)
	}
	if s := sampleOf(nil, time.Second); s.PerSecond != 0 || s.P99 != 0 {
		t.Errorf("of nothing: %+v", s)
	}
	for _, c := range []struct {
		values []float64
		want   float64
	}{{nil, 0}, {[]float64{3}, 3}, {[]float64{5, 1, 3}, 3}, {[]float64{4, 1, 2, 3}, 2.5}} {
		if got := median(c.values); got != c.want {
			t.Errorf("median of %v is %v, want %v", c.values, got, c.want)
		}
	}
}

// Goal: the last line of a report is JSON with every ratio. Method: a report in
// which the ledger is twice as fast as anything else.
func TestReport(t *testing.T) {
	r := newReport()
	for _, l := range []load{lone, hot, spread} {
		for _, name := range []string{thePackage, byHand, rawWrites, theRedis} {
			r.add(name, l, sample{PerSecond: 100, P50: 4})
		}
		r.add(theLedger, l, sample{PerSecond: 200, P50: 2, Batch: 31.6})
	}
	r.add(withLeases, load{0, hot.callers}, sample{PerSecond: 100})
	r.add(withLeases, load{1_000_000, hot.callers}, sample{PerSecond: 90})
	if r.batch() != 32 {
		t.Errorf("the batch is %d, want 32", r.batch())
	}
	var out strings.Builder
	if err := r.print(&out); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	var told map[string]any
	if err := json.Unmarshal([]byte(strings.TrimPrefix(lines[len(lines)-1], "bench: ")), &told); err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]float64{
		"hot256_vs_package": 2, "hot256_vs_for_update": 2, "hot_share_of_raw": 2, "spread256_vs_for_update": 2,
		"hot256_vs_redis": 2, "lone_p50_vs_for_update": 0.5, "growth_1m_vs_empty": 0.9,
	} {
		if told[key] != want {
			t.Errorf("%s is %v, want %v", key, told[key], want)
		}
	}
}
