package main

import (
	"math"
	"testing"
	"time"
)

// Goal: percentiles and medians are what their names say, and nothing measured is not
// 0. Method: values whose percentiles are plain.
func TestStatistics(t *testing.T) {
	var hundred tally
	for i := 100; i >= 1; i-- {
		hundred.latencies = append(hundred.latencies, time.Duration(i)*time.Millisecond)
	}
	hundred.inWindow = 200
	s := hundred.sample(2 * time.Second)
	if s.PerSecond != 100 || s.P50 != 50 || s.P95 != 95 || s.P99 != 99 {
		t.Errorf("of 1 to 100 ms within 2 s: %+v", s)
	}
	if s := new(tally).sample(time.Second); s.PerSecond != 0 || !math.IsNaN(s.P99) {
		t.Errorf("of nothing: %+v", s)
	}
	nan := math.NaN()
	for _, c := range []struct{ values, want []float64 }{
		{nil, []float64{nan, nan, nan}}, {[]float64{nan}, []float64{nan, nan, nan}}, {[]float64{3}, []float64{3, 3, 3}},
		{[]float64{5, 1, nan, 3}, []float64{3, 1, 5}}, {[]float64{4, 1, 2, 3}, []float64{2.5, 1, 4}},
	} {
		median, least, most := spreadOf(c.values)
		for i, got := range []float64{median, least, most} {
			if got != c.want[i] && !(math.IsNaN(got) && math.IsNaN(c.want[i])) {
				t.Errorf("median, least and most of %v: %v, %v, %v, want %v", c.values, median, least, most, c.want)
			}
		}
	}
}

// Goal: throughput counts what was answered within the window, and latencies hide
// nobody who was still waiting at its end. Method: pairs around a window.
func TestWindow(t *testing.T) {
	started := time.Now()
	at := func(seconds int) time.Time { return started.Add(time.Duration(seconds) * time.Second) }
	var seen tally
	for _, pair := range []struct{ asked, answered int }{
		{0, 5}, // in the warm-up
		{5, 15},
		{15, 20},
		{20, 90}, // still under way at the end
	} {
		seen.add(2, at(pair.asked), at(pair.answered), at(10), at(30))
	}
	s := seen.sample(20 * time.Second)
	if s.PerSecond != 0.2 || s.operations != 8 || s.P99 != 70_000 || s.P50 != 10_000 {
		t.Errorf("%+v, want 0.2 operations a second of 8 in all, p50 of 10 s and p99 of 70 s", s)
	}
}

// Goal: what an operation took is told of those who took it, and of no others.
// Method: the same gauges for each contender.
func TestGauges(t *testing.T) {
	after := gauges{wal: 1000, transactions: 5, aof: 3000, allocated: 2000}
	for name, want := range map[string][]float64{
		theLedger: {100, math.NaN(), 200, 2}, thePackage: {100, math.NaN(), math.NaN(), 2}, theRedis: {math.NaN(), 300, 200, math.NaN()},
	} {
		s := (&tally{all: 10}).sample(time.Second)
		s.addGauges(gauges{}, after, name)
		for i, got := range []float64{s.WAL, s.AOF, s.Allocated, s.Batch} {
			if got != want[i] && !(math.IsNaN(got) && math.IsNaN(want[i])) {
				t.Errorf("%s: %+v, want WAL, AOF, memory and batch of %v", name, s, want)
			}
		}
	}
}
