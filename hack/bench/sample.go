package main

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// sample is what one measurement told. What it could not tell is NaN.
type sample struct {
	// PerSecond is in operations: a reserve and a commit are two.
	PerSecond float64
	// P50, P95 and P99 are milliseconds for a reserve and a commit together, and for
	// the row writes alone those of a transaction.
	P50, P95, P99 float64
	// WAL is bytes of PostgreSQL's log per operation, AOF bytes of Redis's append-only
	// file. Allocated is bytes of this process's memory, Batch operations per transaction.
	WAL, AOF, Allocated, Batch float64

	// operations counts those of the warm-up, too.
	operations int64
}

// addGauges tells what a contender's operations took, as far as it is theirs: Redis
// writes no WAL, and the package allocates in a process of its own.
func (s *sample) addGauges(before, after gauges, name string) {
	if s.operations == 0 {
		return
	}
	n := float64(s.operations)
	if name == theRedis {
		s.AOF = float64(after.aof-before.aof) / n
	} else {
		s.WAL = float64(after.wal-before.wal) / n
		if transactions := after.transactions - before.transactions; transactions > 0 {
			s.Batch = n / float64(transactions)
		}
	}
	if name != thePackage {
		s.Allocated = float64(after.allocated-before.allocated) / n
	}
}

// spender reserves and commits. n is unique.
type spender func(ctx context.Context, bucket string, n int64) error

// sequence makes request keys unique across all measurements.
var sequence atomic.Int64

func bucketName(i int) string { return fmt.Sprintf("bench/%04d", i) }

// tally is what one caller saw.
type tally struct {
	latencies []time.Duration
	// all counts operations, inWindow those whose pair was answered within the window.
	all, inWindow int64
}

// spend has callers spend for a time, and tells what happened after the warm-up.
func spend(ctx context.Context, l load, warmUp, window time.Duration, spend spender) (sample, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	tallies := make([]tally, l.callers)
	var callers sync.WaitGroup
	var once sync.Once
	var failure error
	started := time.Now()
	begin, end := started.Add(warmUp), started.Add(warmUp+window)
	for i := range l.callers {
		callers.Go(func() {
			var seen tally
			defer func() { tallies[i] = seen }()
			// Callers of many buckets go through them at their own places.
			for at := i; ctx.Err() == nil; at += l.callers + 1 {
				asked := time.Now()
				if asked.After(end) {
					return
				}
				if err := spend(ctx, bucketName(at%l.buckets), sequence.Add(1)); err != nil {
					once.Do(func() { failure = err })
					cancel()
					return
				}
				seen.add(2, asked, time.Now(), begin, end)
			}
		})
	}
	callers.Wait()
	if failure != nil {
		return sample{}, failure
	}
	var whole tally
	for _, seen := range tallies {
		whole.latencies = append(whole.latencies, seen.latencies...)
		whole.all += seen.all
		whole.inWindow += seen.inWindow
	}
	return whole.sample(window), ctx.Err()
}

// add counts operations that were asked for together, before the end. Their latency
// counts if they were under way within the window at all: to leave out those that
// outlast it would hide the slow ones.
func (t *tally) add(operations int64, asked, answered, begin, end time.Time) {
	t.all += operations
	if !answered.After(begin) {
		return
	}
	t.latencies = append(t.latencies, answered.Sub(asked))
	if !answered.After(end) {
		t.inWindow += operations
	}
}

// sample sums up what was seen around a window.
func (t *tally) sample(window time.Duration) sample {
	slices.Sort(t.latencies)
	return sample{
		PerSecond: float64(t.inWindow) / window.Seconds(),
		P50:       percentile(t.latencies, 50), P95: percentile(t.latencies, 95), P99: percentile(t.latencies, 99),
		WAL: math.NaN(), AOF: math.NaN(), Allocated: math.NaN(), Batch: math.NaN(),
		operations: t.all,
	}
}

// percentile is the smallest of the sorted values that at least so many percent do not
// exceed, in milliseconds; NaN if there is none.
func percentile(sorted []time.Duration, percent int) float64 {
	if len(sorted) == 0 {
		return math.NaN()
	}
	return milliseconds(sorted[max(0, (len(sorted)*percent+99)/100-1)])
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// spreadOf sums up the values that are not NaN: all three are NaN if there is none. The
// median is the middle value, or the mean of the two in the middle.
func spreadOf(values []float64) (median, least, most float64) {
	var sorted []float64
	for _, value := range values {
		if !math.IsNaN(value) {
			sorted = append(sorted, value)
		}
	}
	if len(sorted) == 0 {
		return math.NaN(), math.NaN(), math.NaN()
	}
	slices.Sort(sorted)
	last := len(sorted) - 1
	return (sorted[last/2] + sorted[(last+1)/2]) / 2, sorted[0], sorted[last]
}
