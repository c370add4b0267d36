package main

import (
	"encoding/json"
	"math"
)

// figure is a number in the JSON; what was not measured is null.
type figure float64

// MarshalJSON rounds to what a measurement can mean.
func (f figure) MarshalJSON() ([]byte, error) {
	if math.IsNaN(float64(f)) {
		return []byte("null"), nil
	}
	return json.Marshal(math.Round(1000*float64(f)) / 1000)
}

// span is a figure over the rounds.
type span struct {
	Median figure `json:"median"`
	Least  figure `json:"min"`
	Most   figure `json:"max"`
}

// pointLine is a point in the JSON.
type pointLine struct {
	Subject string `json:"subject"`
	Callers int    `json:"callers"`
	Buckets int    `json:"buckets"`
	// LeasesKept is how many the bucket had in the beginning, where that is measured.
	LeasesKept *int `json:"leases_kept,omitempty"`
	Rounds     int  `json:"rounds"`
	PerSecond  span `json:"operations_per_second"`
	Latency    struct {
		P50 figure `json:"p50"`
		P95 figure `json:"p95"`
		P99 figure `json:"p99"`
	} `json:"latency_ms"`
	WAL       figure `json:"wal_bytes_per_operation"`
	AOF       figure `json:"aof_bytes_per_operation"`
	Allocated figure `json:"memory_bytes_per_operation"`
	Batch     figure `json:"operations_per_transaction"`
}

func (r *report) pointLine(p point) pointLine {
	median := func(of func(sample) float64) figure {
		m, _, _ := r.spread(p, of)
		return figure(m)
	}
	l := pointLine{Subject: p.subject, Callers: p.load.callers, Buckets: p.load.buckets, Rounds: len(r.samples[p])}
	switch p.subject {
	case withLeases, withPurge:
		l.Buckets, l.LeasesKept = 1, &p.load.buckets
	case rawWrites, rawLookUps: // It stands beside a load, and has one connection.
		l.Callers = 1
	}
	middle, least, most := r.spread(p, perSecond)
	l.PerSecond = span{figure(middle), figure(least), figure(most)}
	l.Latency.P50, l.Latency.P95, l.Latency.P99 = median(p50), median(p95), median(p99)
	l.WAL, l.AOF, l.Allocated, l.Batch = median(wal), median(aof), median(allocated), median(batch)
	return l
}

// line is the JSON: the ratios by their names, and what they come from.
func (r *report) line() map[string]any {
	points := make([]pointLine, len(r.order))
	for i, p := range r.order {
		points[i] = r.pointLine(p)
	}
	ranges := map[string]span{}
	line := map[string]any{
		"cpus": r.setup.CPUs, "platform": r.setup.Platform, "rounds": r.setup.Rounds, "window_seconds": r.setup.Window.Seconds(),
		"postgresql": byName(r.setup.PostgreSQL), "redis": byName(r.setup.Redis),
		"points": points, "ratio_ranges": ranges,
		"about": map[string]string{
			"operations_per_second": aboutThroughput, "latency_ms": aboutLatency,
			"wal_bytes_per_operation": aboutWAL, "aof_bytes_per_operation": aboutAOF,
			"memory_bytes_per_operation": aboutMemory, "operations_per_transaction": aboutBatch, "ratio_ranges": aboutRatios, "raw": aboutRaw, "data-plane": aboutPlane,
		},
	}
	for _, ratio := range r.ratios() {
		line[ratio.name] = figure(ratio.median)
		ranges[ratio.name] = span{figure(ratio.median), figure(ratio.least), figure(ratio.most)}
	}
	return line
}

// byName is nil, null in the JSON, where a server was left out.
func byName(settings []setting) map[string]string {
	var named map[string]string
	for _, s := range settings {
		if named == nil {
			named = map[string]string{}
		}
		named[s.Name] = s.Value
	}
	return named
}
