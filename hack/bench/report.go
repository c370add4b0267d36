package main

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"runtime"
	"text/tabwriter"
)

// report collects the samples of all rounds.
type report struct {
	PostgreSQL string
	order      []string
	samples    map[string][]sample
}

func newReport() report { return report{samples: map[string][]sample{}} }

func point(name string, l load) string { return name + " " + l.String() }

func (r *report) add(name string, l load, s sample) {
	key := point(name, l)
	if r.samples[key] == nil {
		r.order = append(r.order, key)
	}
	r.samples[key] = append(r.samples[key], s)
}

// value is the median of one figure of a point, 0 if it was not measured.
func (r *report) value(key string, of func(sample) float64) float64 {
	var values []float64
	for _, s := range r.samples[key] {
		values = append(values, of(s))
	}
	return median(values)
}

// batch is how many operations the ledger put into a transaction under the load at
// which it is compared with the row writes alone.
func (r *report) batch() int {
	const unknown = 128
	if b := r.value(point(theLedger, hot), func(s sample) float64 { return s.Batch }); b > 0 {
		return int(math.Round(b))
	}
	return unknown
}

func perSecond(s sample) float64 { return s.PerSecond }

// ratios are the figures that this ledger is held to.
func (r *report) ratios() map[string]float64 {
	most := 0
	for key := range r.samples {
		var leases, callers int
		if n, _ := fmt.Sscanf(key, withLeases+" %d/%d", &leases, &callers); n == 2 {
			most = max(most, leases)
		}
	}
	ratios := map[string]float64{}
	// The ratios of each round, whose measurements lie close together, drift less than
	// the figures do.
	add := func(name, of, against string, figure func(sample) float64) {
		a, b := r.samples[of], r.samples[against]
		var rounds []float64
		for i := range min(len(a), len(b)) {
			if figure(a[i]) > 0 && figure(b[i]) > 0 {
				rounds = append(rounds, figure(a[i])/figure(b[i]))
			}
		}
		if len(rounds) > 0 {
			ratios[name] = math.Round(1000*median(rounds)) / 1000
		}
	}
	add("hot256_vs_package", point(theLedger, hot), point(thePackage, hot), perSecond)
	add("hot256_vs_for_update", point(theLedger, hot), point(byHand, hot), perSecond)
	add("hot_share_of_raw", point(theLedger, hot), point(rawWrites, hot), perSecond)
	add("spread256_vs_for_update", point(theLedger, spread), point(byHand, spread), perSecond)
	add("hot256_vs_redis", point(theLedger, hot), point(theRedis, hot), perSecond)
	add("lone_p50_vs_for_update", point(theLedger, lone), point(byHand, lone), func(s sample) float64 { return s.P50 })
	add("growth_1m_vs_empty", point(withLeases, load{most, hot.callers}), point(withLeases, load{0, hot.callers}), perSecond)
	if most != 1_000_000 {
		delete(ratios, "growth_1m_vs_empty")
	}
	return ratios
}

func (r *report) print(w io.Writer) error {
	fmt.Fprintf(w, "PostgreSQL %s with %v, %d CPUs; operations/s are medians, with the least and the most\n",
		r.PostgreSQL, serverSettings, runtime.NumCPU())
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "buckets/callers\toperations/s\tleast\tmost\tp50 ms\tp95 ms\tp99 ms\tWAL bytes\tallocated\tbatch\t")
	for _, key := range r.order {
		least, most := math.Inf(1), 0.0
		for _, s := range r.samples[key] {
			least, most = min(least, s.PerSecond), max(most, s.PerSecond)
		}
		fmt.Fprintf(table, "%s\t%.0f\t%.0f\t%.0f\t%.2f\t%.2f\t%.2f\t%.0f\t%.0f\t%.0f\t\n", key,
			r.value(key, perSecond), least, most,
			r.value(key, func(s sample) float64 { return s.P50 }), r.value(key, func(s sample) float64 { return s.P95 }),
			r.value(key, func(s sample) float64 { return s.P99 }), r.value(key, func(s sample) float64 { return s.WAL }),
			r.value(key, func(s sample) float64 { return s.Allocated }), r.value(key, func(s sample) float64 { return s.Batch }))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	line := map[string]any{"postgresql": r.PostgreSQL, "cpus": runtime.NumCPU()}
	for name, ratio := range r.ratios() {
		line[name] = ratio
	}
	for _, key := range r.order {
		line[key] = math.Round(r.value(key, perSecond))
	}
	encoded, err := json.Marshal(line)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, "bench: %s\n", encoded)
	return err
}
