package postgres

import (
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
	// maxExpiries bounds how many transactions are spent on leases that expired in a
	// pile, before those who wait are answered.
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
	parts := partsOf(requests)
	for len(parts) > 0 {
		// A bucket with more requests than one transaction takes has its next part
		// served after this one.
		var later []*part
		for _, p := range parts {
			if rest := p.start(s.engine); rest != nil {
				later = append(later, rest)
			}
		}
		for _, p := range parts {
			for i, result := range p.call.wait(ctx) {
				results[p.positions[i]] = result
			}
		}
		parts = later
	}
	return results
}

// part is the requests of one call of Do on one bucket.
type part struct {
	key      string
	requests []ledger.Request
	// positions are where the results belong.
	positions []int
	call      *call
}

// partsOf divides requests by bucket, keeping the order of each bucket's requests.
func partsOf(requests []ledger.Request) []*part {
	byKey := map[string]*part{}
	var parts []*part
	for i, request := range requests {
		p := byKey[request.Bucket()]
		if p == nil {
			p = &part{key: request.Bucket()}
			byKey[p.key] = p
			parts = append(parts, p)
		}
		p.requests = append(p.requests, request)
		p.positions = append(p.positions, i)
	}
	return parts
}

// start hands as many requests to the engine as one transaction takes, and returns
// what is left.
func (p *part) start(e *engine) *part {
	var rest *part
	if len(p.requests) > maxRequests {
		rest = &part{key: p.key, requests: p.requests[maxRequests:], positions: p.positions[maxRequests:]}
		p.requests, p.positions = p.requests[:maxRequests], p.positions[:maxRequests]
	}
	p.call = newCall(p.requests)
	if err := e.enter(p.key, p.call); err != nil {
		p.call.results = refusals(len(p.requests), err)
		close(p.call.done)
	}
	return rest
}

// refusals answers n requests with an error.
func refusals(n int, err error) []ledger.Result {
	results := make([]ledger.Result, n)
	for i := range results {
		results[i] = ledger.Result{Err: domainError(err)}
	}
	return results
}

// group is the calls on one bucket that are served in one transaction.
type group struct {
	key   string
	calls []*call
	// expired are the leases that were expired before the calls could be served.
	expired []string
}

// touching is a group that performs what is due and asks for nothing.
func touching(key string) *group {
	return &group{key: key, calls: []*call{newCall([]ledger.Request{ledger.Touch{Key: key}})}}
}

// count is the number of requests.
func (g *group) count() int {
	n := 0
	for _, c := range g.calls {
		n += len(c.requests)
	}
	return n
}

// decide returns the calls that are decided on now and their requests. Where more
// leases are overdue than one transaction settles, that is only a touch.
func (g *group) decide(piled bool) ([]*call, []ledger.Request) {
	if piled {
		return nil, []ledger.Request{ledger.Touch{Key: g.key}}
	}
	calls := make([]*call, 0, len(g.calls))
	requests := make([]ledger.Request, 0, len(g.calls))
	for _, c := range g.calls {
		if c.decide() {
			calls = append(calls, c)
			requests = append(requests, c.requests...)
		}
	}
	return calls, requests
}

// undecide lets callers give up calls again of which it is certain that nothing was
// done.
func (g *group) undecide() {
	for _, c := range g.calls {
		if !c.unknown {
			c.stage.CompareAndSwap(stageDecided, stageWaiting)
		}
	}
}

// setUnknown notes that the calls that were decided on may have been carried out.
func (g *group) setUnknown() {
	for _, c := range g.calls {
		if c.stage.Load() == stageDecided {
			c.unknown = true
		}
	}
}

func (g *group) unknown() bool {
	for _, c := range g.calls {
		if c.unknown {
			return true
		}
	}
	return false
}

// report gives the calls their answers. It returns false when they are still to be
// served.
func (g *group) report(a answer) bool {
	if a.piled {
		if err := a.results[0].Err; err != nil {
			g.refuse(err)
			return true
		}
		g.expired = append(g.expired, a.results[0].ExpiredLeaseIDs...)
		return false
	}
	results := a.results
	for _, c := range a.calls {
		n := copy(c.results, results)
		results = results[n:]
		g.reportExpired(c)
	}
	return true
}

// reportExpired tells the first who asked for it which leases were expired.
func (g *group) reportExpired(c *call) {
	for i, request := range c.requests {
		if request.Operation() == ledger.OpReapExpired && c.results[i].Err == nil && len(g.expired) > 0 {
			ids := append(g.expired, c.results[i].ExpiredLeaseIDs...)
			slices.Sort(ids)
			c.results[i].ExpiredLeaseIDs, g.expired = ids, nil
		}
	}
}

// refuse answers all calls with an error.
func (g *group) refuse(err error) {
	for _, c := range g.calls {
		cause := err
		if c.unknown {
			// Whatever the last attempt met, an earlier one may have been carried out.
			cause = &failure{certainty: ambiguous, err: err}
		}
		if c.decide() {
			copy(c.results, refusals(len(c.requests), cause))
		}
	}
}

// answerTogether answers groups in one transaction. It returns those that are left:
// with an error they can have no other answer, without one each needs a transaction
// of its own.
func (s *Store) answerTogether(groups []*group) (left map[*group]bool, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), s.options.CallTimeout)
	defer cancel()
	var answers map[string]answer
	err = s.attempt(ctx, batchAttempts, groups, func() (err error) {
		answers, err = s.serveTogether(ctx, groups)
		return err
	})
	left = map[*group]bool{}
	for _, g := range groups {
		a, served := answers[g.key]
		if !served || !g.report(a) {
			left[g] = true
		}
	}
	var f *failure
	if errors.As(err, &f) && (f.certainty == aborted || f.certainty == timedOut) {
		err = nil
	}
	return left, err
}

// answerAlone answers one bucket's group, in one transaction after as many as it
// takes to settle what expired in a pile. If that keeps being refused each request
// has a transaction of its own, so that whatever is in the way affects only what it
// belongs to.
func (s *Store) answerAlone(g *group) {
	ctx, cancel := context.WithTimeout(context.Background(), s.options.CallTimeout)
	defer cancel()
	limit := singleAttempts
	if g.count() > 1 {
		limit = batchAttempts
	}
	for range maxExpiries {
		var answers map[string]answer
		err := s.attempt(ctx, limit, []*group{g}, func() (err error) {
			answers, err = s.serveAlone(ctx, g)
			return err
		})
		var f *failure
		switch {
		case err == nil:
			if g.report(answers[g.key]) {
				return
			}
			continue
		case errors.As(err, &f) && f.certainty == aborted && g.count() > 1:
			s.answerSingly(g)
		default:
			g.refuse(err)
		}
		return
	}
	g.refuse(ledger.Errorf(ledger.CodeUnavailable,
		"More leases of the bucket have expired than are settled at once. Repeat later."))
}

// answerSingly answers each request in a transaction of its own.
func (s *Store) answerSingly(g *group) {
	for _, c := range g.calls {
		if !c.decide() {
			continue
		}
		for i := range c.requests {
			single := newCall(c.requests[i : i+1])
			single.unknown = c.unknown
			s.answerAlone(&group{key: g.key, calls: []*call{single}})
			c.results[i] = single.results[0]
		}
	}
}

// attempt runs a transaction until it succeeds or running it again does not help.
// The bounds are limit for one that the server refuses, and connectionAttempts
// for lost connections. If any attempt's outcome stayed unknown, so does the
// outcome of them all, unless a later one succeeds.
func (s *Store) attempt(ctx context.Context, limit int, groups []*group, run func() error) error {
	refusals, losses := 0, 0
	unknown := slices.ContainsFunc(groups, (*group).unknown)
	for {
		err := run()
		var f *failure
		if err == nil || !errors.As(err, &f) {
			return err
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
			for _, g := range groups {
				g.setUnknown()
			}
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
		for _, g := range groups {
			g.undecide()
		}
		if !again || !pause(ctx, refusals+losses) {
			if unknown && (f.certainty == disconnected || f.certainty == unreachable) {
				return &failure{certainty: ambiguous, err: err}
			}
			return err
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
