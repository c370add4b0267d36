package main

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// sample is what one measurement told.
type sample struct {
	// PerSecond is in operations: a reserve and a commit are two.
	PerSecond float64 `json:"operationsPerSecond"`
	// P50, P95 and P99 are milliseconds for a reserve and a commit together.
	P50 float64 `json:"p50Ms"`
	P95 float64 `json:"p95Ms"`
	P99 float64 `json:"p99Ms"`
	// WAL is bytes of the server's log per operation, Allocated bytes of this
	// process's memory, Batch operations per transaction.
	WAL       float64 `json:"walBytes,omitempty"`
	Allocated float64 `json:"allocatedBytes,omitempty"`
	Batch     float64 `json:"batch,omitempty"`

	// operations counts those of the warm-up, too.
	operations int64
}

func (s *sample) addGauges(before, after gauges, name string) {
	if s.operations == 0 {
		return
	}
	n := float64(s.operations)
	if name != theRedis {
		s.WAL = float64(after.wal-before.wal) / n
		if transactions := after.transactions - before.transactions; transactions > 0 {
			s.Batch = n / float64(transactions)
		}
	}
	if name != thePackage && name != rawWrites {
		s.Allocated = float64(after.allocated-before.allocated) / n
	}
}

// spender reserves and commits. n is unique.
type spender func(ctx context.Context, bucket string, n int64) error

// sequence makes request keys unique across all measurements.
var sequence atomic.Int64

func bucketName(i int) string { return fmt.Sprintf("bench/%04d", i) }

// spend has callers spend for a time, and tells what happened after the warm-up.
func spend(ctx context.Context, l load, warmUp, window time.Duration, spend spender) (sample, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	latencies := make([][]time.Duration, l.callers)
	var all atomic.Int64
	var callers sync.WaitGroup
	var once sync.Once
	var failure error
	started := time.Now()
	begin, end := started.Add(warmUp), started.Add(warmUp+window)
	for i := range l.callers {
		callers.Go(func() {
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
				answered := time.Now()
				all.Add(2)
				if answered.After(begin) && !answered.After(end) {
					latencies[i] = append(latencies[i], answered.Sub(asked))
				}
			}
		})
	}
	callers.Wait()
	if failure != nil {
		return sample{}, failure
	}
	s := sampleOf(slices.Concat(latencies...), window)
	s.operations = all.Load()
	return s, ctx.Err()
}

// sampleOf sums up the latencies of pairs of operations within a window.
func sampleOf(latencies []time.Duration, window time.Duration) sample {
	slices.Sort(latencies)
	return sample{
		PerSecond: 2 * float64(len(latencies)) / window.Seconds(),
		P50:       milliseconds(percentile(latencies, 50)),
		P95:       milliseconds(percentile(latencies, 95)),
		P99:       milliseconds(percentile(latencies, 99)),
	}
}

// percentile is the smallest value that at least so many percent of the sorted ones
// do not exceed.
func percentile(sorted []time.Duration, percent int) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[max(0, (len(sorted)*percent+99)/100-1)]
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// median is the middle value, or the mean of the two in the middle.
func median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	middle := len(sorted) / 2
	if len(sorted)%2 == 1 {
		return sorted[middle]
	}
	return (sorted[middle-1] + sorted[middle]) / 2
}
