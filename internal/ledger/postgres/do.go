package postgres

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

const (
	// maxBuckets and maxRequests bound one transaction.
	maxBuckets  = 256
	maxRequests = 1024

	// batchAttempts bounds how often a transaction that can be split is run as a
	// whole, singleAttempts how often one that cannot.
	batchAttempts  = 2
	singleAttempts = 5
	// doomedAttempts bounds it for what the server refuses whoever else is at work.
	doomedAttempts = 2
	// maxExpiries bounds how many transactions a call spends on leases that expired
	// in a pile, before its own.
	maxExpiries = 1000
	// connectionAttempts bounds how often a lost connection is replaced.
	connectionAttempts = 5

	firstPause = 10 * time.Millisecond
	lastPause  = 500 * time.Millisecond
)

// Do implements ledger.Store.
func (s *Store) Do(ctx context.Context, requests []ledger.Request) []ledger.Result {
	ctx, cancel := context.WithTimeout(ctx, s.options.CallTimeout)
	defer cancel()
	results := make([]ledger.Result, len(requests))
	for _, chunk := range chunks(grouped(requests)) {
		s.resolve(ctx, chunk, false, results)
	}
	return results
}

// grouped sorts requests by bucket, in byte order of the keys, keeping the order
// of each bucket's requests.
func grouped(requests []ledger.Request) []*group {
	byKey := map[string]*group{}
	var groups []*group
	for i, request := range requests {
		g := byKey[request.Bucket()]
		if g == nil {
			g = &group{key: request.Bucket()}
			byKey[g.key] = g
			groups = append(groups, g)
		}
		g.requests = append(g.requests, request)
		g.positions = append(g.positions, i)
	}
	slices.SortFunc(groups, func(a, b *group) int { return cmp.Compare(a.key, b.key) })
	return groups
}

// chunks divides groups into transactions of bounded size. A bucket with more
// requests than one transaction takes continues in the next one.
func chunks(groups []*group) [][]*group {
	var all [][]*group
	var chunk []*group
	count := 0
	flush := func() {
		if len(chunk) > 0 {
			all = append(all, chunk)
		}
		chunk, count = nil, 0
	}
	for _, g := range groups {
		for len(g.requests) > 0 {
			if len(chunk) == maxBuckets || count == maxRequests {
				flush()
			}
			n := min(len(g.requests), maxRequests-count)
			chunk = append(chunk, &group{key: g.key, requests: g.requests[:n], positions: g.positions[:n]})
			count += n
			g = &group{key: g.key, requests: g.requests[n:], positions: g.positions[n:]}
			if len(g.requests) > 0 {
				flush()
			}
		}
	}
	flush()
	return all
}

// resolve answers groups of different buckets: those that no other call works on
// at once, the others each when its turn comes, so that no bucket waits for
// another one's. unknown says that an earlier attempt may have been carried out.
func (s *Store) resolve(ctx context.Context, groups []*group, unknown bool, results []ledger.Result) {
	var free, taken []*group
	for _, g := range groups {
		if s.turns.tryTake(g.key) {
			free = append(free, g)
		} else {
			taken = append(taken, g)
		}
	}
	if len(free) > 0 {
		s.resolveInTurn(ctx, free, unknown, results)
	}
	for _, g := range taken {
		if err := s.turns.take(ctx, g.key); err != nil {
			refuse([]*group{g}, unknown, err, results)
			continue
		}
		s.resolveInTurn(ctx, []*group{g}, unknown, results)
	}
}

// resolveInTurn answers groups whose turns were taken, and gives the turns back:
// in one transaction, or if that keeps failing bucket by bucket, then request by
// request, so that whatever is in the way affects only what it belongs to.
func (s *Store) resolveInTurn(ctx context.Context, groups []*group, unknown bool, results []ledger.Result) {
	rest, unknown, err := s.serveInTurn(ctx, groups, unknown, results)
	switch {
	case err == nil:
	case ctx.Err() == nil && worthSplitting(err, rest):
		for _, part := range split(rest) {
			s.resolve(ctx, part, unknown, results)
		}
	default:
		refuse(rest, unknown, err, results)
	}
}

// serveInTurn answers groups in one transaction, after as many as it takes to
// settle what expired in a pile, and gives their turns back. It returns the groups
// that it could not answer, with the reason.
func (s *Store) serveInTurn(ctx context.Context, groups []*group, unknown bool, results []ledger.Result) ([]*group, bool, error) {
	defer func(groups []*group) {
		for _, g := range groups {
			s.turns.give(g.key)
		}
	}(groups)
	for range maxExpiries {
		limit := singleAttempts
		if splittable(groups) {
			limit = batchAttempts
		}
		var answers map[string]answer
		var err error
		unknown, err = s.attempt(ctx, limit, unknown, func() (err error) {
			answers, err = s.serve(ctx, groups)
			return err
		})
		if err != nil {
			return groups, unknown, err
		}
		if groups = report(groups, answers, results); len(groups) == 0 {
			return nil, unknown, nil
		}
	}
	return groups, unknown, ledger.Errorf(ledger.CodeUnavailable,
		"More leases of the bucket have expired than one call settles. Repeat later.")
}

// report writes answers where they belong and returns the groups that are still
// to be served.
func report(groups []*group, answers map[string]answer, results []ledger.Result) []*group {
	var left []*group
	for _, g := range groups {
		a := answers[g.key]
		if a.piled && a.results[0].Err == nil {
			left = append(left, g)
			continue
		}
		for i, position := range g.positions {
			// The touch of a pile that is refused stands for them all.
			results[position] = a.results[min(i, len(a.results)-1)]
		}
	}
	return left
}

// refuse answers groups with an error.
func refuse(groups []*group, unknown bool, err error, results []ledger.Result) {
	if unknown {
		// Whatever the last attempt met, the first one may have been carried out.
		err = &failure{certainty: ambiguous, err: err}
	}
	for _, g := range groups {
		for _, position := range g.positions {
			results[position] = ledger.Result{Err: domainError(err)}
		}
	}
}

func splittable(groups []*group) bool { return len(groups) > 1 || len(groups[0].requests) > 1 }

// split divides groups into smaller transactions: one for each bucket, or for a
// single bucket one for each request.
func split(groups []*group) [][]*group {
	var parts [][]*group
	switch {
	case len(groups) > 1:
		for _, g := range groups {
			parts = append(parts, []*group{g})
		}
	case len(groups[0].requests) > 1:
		g := groups[0]
		for i := range g.requests {
			parts = append(parts, []*group{{key: g.key, requests: g.requests[i : i+1], positions: g.positions[i : i+1]}})
		}
	}
	return parts
}

// worthSplitting reports whether a part may succeed where the whole did not: all
// requests of one bucket wait for the same lock, and without a connection none
// can be served.
func worthSplitting(err error, groups []*group) bool {
	var f *failure
	if !errors.As(err, &f) {
		return false
	}
	return splittable(groups) && (f.certainty == aborted || f.certainty == timedOut && len(groups) > 1)
}

// attempt runs a transaction until it succeeds or running it again does not help.
// The bounds are limit for one that the server refuses, and connectionAttempts
// for lost connections. If any attempt's outcome stayed unknown, so does the
// outcome of them all, unless a later one succeeds.
func (s *Store) attempt(ctx context.Context, limit int, unknown bool, run func() error) (bool, error) {
	refusals, losses := 0, 0
	for {
		err := run()
		var f *failure
		if err == nil || !errors.As(err, &f) {
			return unknown, err
		}
		again := false
		switch f.certainty {
		case aborted:
			refusals++
			if !mayChange(err) {
				limit = min(limit, doomedAttempts)
			}
			again = refusals < limit
		case timedOut:
		case ambiguous:
			unknown = true
			losses++
			again = losses < connectionAttempts
		case disconnected:
			losses++
			again = losses < connectionAttempts
		case unreachable:
			// Only a caller whose outcome is unknown gains by waiting for the server.
			losses++
			again = unknown && losses < connectionAttempts
		}
		if !again || !pause(ctx, refusals+losses) {
			return unknown, err
		}
	}
}

// pause waits a little longer each time. It returns false when the caller has
// given up.
func pause(ctx context.Context, attempt int) bool {
	if ctx.Err() != nil {
		return false
	}
	longest := min(lastPause, firstPause<<min(attempt, 10))
	timer := time.NewTimer(longest/2 + rand.N(longest/2+1))
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
