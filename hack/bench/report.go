package main

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strings"
	"text/tabwriter"
	"time"
)

// setting is one of a server, as the server reports it.
type setting struct{ Name, Value string }

// setup is what was measured on. Redis is empty where it was left out.
type setup struct {
	CPUs              int
	Platform          string
	Rounds            int
	Window            time.Duration
	PostgreSQL, Redis []setting
}

// point is what is measured once a round.
type point struct {
	subject string
	load    load
}

func (p point) String() string { return p.subject + " " + p.load.String() }

// report collects the samples of all rounds.
type report struct {
	setup   setup
	order   []point
	samples map[point][]sample
}

func newReport() report { return report{samples: map[point][]sample{}} }

func (r *report) add(p point, s sample) {
	if r.samples[p] == nil {
		r.order = append(r.order, p)
	}
	r.samples[p] = append(r.samples[p], s)
}

// spread is a figure of a point over the rounds; NaN if it was not measured.
func (r *report) spread(p point, of func(sample) float64) (median, least, most float64) {
	var values []float64
	for _, s := range r.samples[p] {
		values = append(values, of(s))
	}
	return spreadOf(values)
}

// batch is how many operations the ledger put into a transaction under the load at
// which it is compared with the row writes alone.
func (r *report) batch() int {
	const unknown = 128
	if b, _, _ := r.spread(point{theLedger, hot}, batch); b > 0 {
		return int(math.Round(b))
	}
	return unknown
}

// The figures of a sample.
func perSecond(s sample) float64 { return s.PerSecond }
func p50(s sample) float64       { return s.P50 }
func p95(s sample) float64       { return s.P95 }
func p99(s sample) float64       { return s.P99 }
func wal(s sample) float64       { return s.WAL }
func aof(s sample) float64       { return s.AOF }
func allocated(s sample) float64 { return s.Allocated }
func batch(s sample) float64     { return s.Batch }

// ratioKinds are the figures that this ledger is held to.
var ratioKinds = []struct {
	name        string
	of, against point
	figure      func(sample) float64
	// difference has the one taken from the other instead.
	difference bool
}{
	{"hot256_vs_package", point{theLedger, hot}, point{thePackage, hot}, perSecond, false},
	{"hot256_vs_for_update", point{theLedger, hot}, point{byHand, hot}, perSecond, false},
	{"hot_share_of_raw", point{theLedger, hot}, point{rawWrites, hot}, perSecond, false},
	{"hot_share_of_raw_with_lookups", point{theLedger, hot}, point{rawLookUps, hot}, perSecond, false},
	{"spread256_vs_for_update", point{theLedger, spread}, point{byHand, spread}, perSecond, false},
	{"hot256_vs_redis", point{theLedger, hot}, point{theRedis, hot}, perSecond, false},
	{"lone_p50_vs_for_update", point{theLedger, lone}, point{byHand, lone}, p50, false},
	{"purge_vs_none", point{withPurge, load{1_000_000, hot.callers}}, point{withLeases, load{1_000_000, hot.callers}}, perSecond, false},
	{"growth_1m_vs_empty", point{withLeases, load{1_000_000, hot.callers}}, point{withLeases, load{0, hot.callers}}, perSecond, false},
	{"api256_vs_inprocess", point{dataPlane, hot}, point{theLedger, hot}, perSecond, false},
	{"api_lone_added_ms", point{dataPlane, lone}, point{theLedger, lone}, p50, true},
}

// ratio is one of them over the rounds.
type ratio struct {
	name                string
	median, least, most float64
}

// ratios are those whose points were measured. The ratios of each round, whose
// measurements lie close together, drift less than the figures do.
func (r *report) ratios() []ratio {
	var all []ratio
	for _, kind := range ratioKinds {
		a, b := r.samples[kind.of], r.samples[kind.against]
		var rounds []float64
		for i := range min(len(a), len(b)) {
			if kind.figure(a[i]) > 0 && kind.figure(b[i]) > 0 {
				if kind.difference {
					rounds = append(rounds, kind.figure(a[i])-kind.figure(b[i]))
					continue
				}
				rounds = append(rounds, kind.figure(a[i])/kind.figure(b[i]))
			}
		}
		if median, least, most := spreadOf(rounds); len(rounds) > 0 {
			all = append(all, ratio{kind.name, median, least, most})
		}
	}
	return all
}

// What the figures are, for the head of the table and for the JSON.
const (
	aboutThroughput = "operations per second; a reserve and a commit are two operations; median, least and most of the rounds"
	aboutLatency    = "milliseconds for a reserve and its commit together, of all that were under way within the window; " +
		"of raw: for a transaction; medians of the rounds"
	aboutWAL = "bytes of PostgreSQL's log per operation, warm-up included; each measurement begins with a checkpoint, " +
		"so the full pages that follow one are in it"
	aboutAOF    = "bytes by which Redis's append-only file grew, per operation, warm-up included"
	aboutMemory = "bytes that this process allocated per operation, freed or not, its own bookkeeping included; the servers' memory is not in it; " +
		"none for the package, which runs in a process of its own that does not tell"
	aboutBatch  = "operations for each transaction that wrote"
	aboutRatios = "each round's ratio: their median, least and most; api_lone_added_ms is a difference, for a reserve and a commit together"
	aboutPlane  = "this ledger behind the data plane, over loopback with TLS, with the Go client on 16 connections, in the same process"
	aboutRaw    = "the ledger's rows, written by one connection at the ledger's batch size, without reading or deciding; " +
		"raw+look-ups: the same after locking the bucket and looking for the lease of each request, without which no repetition is recognised"
)

// print writes the table and, as the last line, the JSON.
func (r *report) print(w io.Writer) error {
	r.printHead(w)
	if err := r.printTable(w); err != nil {
		return err
	}
	line, err := json.Marshal(r.line())
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, "bench: %s\n", line)
	return err
}

func (r *report) printHead(w io.Writer) {
	fmt.Fprintf(w, "measured on %d CPUs, %s; %d rounds, windows of %s, servers and callers on the same machine\n",
		r.setup.CPUs, r.setup.Platform, r.setup.Rounds, r.setup.Window)
	for _, server := range []struct {
		name     string
		settings []setting
	}{{"PostgreSQL", r.setup.PostgreSQL}, {"Redis", r.setup.Redis}} {
		told := "not measured"
		for i, s := range server.settings {
			if i == 0 {
				told = s.Name + " " + s.Value
				continue
			}
			told += ", " + s.Name + " " + s.Value
		}
		fmt.Fprintf(w, "%s, as it reports itself: %s\n", server.name, told)
	}
	for _, about := range []struct{ column, text string }{
		{"operations/s", aboutThroughput}, {"p50, p95, p99", aboutLatency}, {"WAL bytes", aboutWAL}, {"AOF bytes", aboutAOF},
		{"memory bytes", aboutMemory}, {"batch", aboutBatch}, {"raw", aboutRaw}, {"data-plane", aboutPlane}, {"ratios", aboutRatios},
	} {
		fmt.Fprintf(w, "  %s: %s\n", about.column, about.text)
	}
	fmt.Fprintln(w)
}

func (r *report) printTable(w io.Writer) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "buckets/callers\toperations/s\tleast\tmost\tp50 ms\tp95 ms\tp99 ms\tWAL bytes\tAOF bytes\tmemory bytes\tbatch\t")
	for _, p := range r.order {
		median, least, most := r.spread(p, perSecond)
		cells := []string{p.String(), cell(median, 0), cell(least, 0), cell(most, 0)}
		for _, column := range []struct {
			figure   func(sample) float64
			decimals int
		}{{p50, 2}, {p95, 2}, {p99, 2}, {wal, 0}, {aof, 0}, {allocated, 0}, {batch, 0}} {
			median, _, _ := r.spread(p, column.figure)
			cells = append(cells, cell(median, column.decimals))
		}
		fmt.Fprintln(table, strings.Join(cells, "\t")+"\t")
	}
	if err := table.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(w)
	fmt.Fprintln(table, "ratio\tmedian\tleast\tmost\t")
	for _, ratio := range r.ratios() {
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\t\n", ratio.name, cell(ratio.median, 3), cell(ratio.least, 3), cell(ratio.most, 3))
	}
	return table.Flush()
}

// cell is a figure in the table.
func cell(value float64, decimals int) string {
	if math.IsNaN(value) {
		return "-"
	}
	return fmt.Sprintf("%.*f", decimals, value)
}
