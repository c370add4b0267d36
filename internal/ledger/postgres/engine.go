package postgres

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/token-lease/operator/internal/ledger"
)

const (
	// maxCommitters bounds the transactions of several buckets at a time. While one
	// waits for the disk, another can use the processor.
	maxCommitters = 3

	// maxWaiting and maxWaitingInAll bound the requests that wait, of a bucket and of
	// the process.
	maxWaiting      = 8_192
	maxWaitingInAll = 65_536

	// maxShare is how many requests a bucket has served in one transaction while
	// other buckets wait.
	maxShare = maxRequests / 4
)

// call is some requests of one caller on one bucket.
type call struct {
	requests []ledger.Request
	// needs are what the requests need, in the same order.
	needs   []ledger.Needs
	results []ledger.Result
	// done is closed once results are there.
	done  chan struct{}
	stage atomic.Int32
	// unknown is set once an attempt may have been carried out. It belongs to whoever
	// serves the call.
	unknown bool
}

// Stages of a call. Until the rules have been asked, its caller can give it up.
const (
	stageWaiting int32 = iota
	stageDecided
	stageGivenUp
)

func newCall(requests []ledger.Request) *call {
	c := &call{requests: requests, results: make([]ledger.Result, len(requests)), done: make(chan struct{})}
	c.needs = make([]ledger.Needs, len(requests))
	for i, request := range requests {
		c.needs[i] = request.Needs()
	}
	return c
}

// closes reports whether the call closes its bucket.
func (c *call) closes() bool {
	return slices.ContainsFunc(c.requests, func(r ledger.Request) bool { return r.Operation() == ledger.OpCloseBucket })
}

// decide keeps the caller from giving the call up, and reports whether it already
// has.
func (c *call) decide() bool {
	return c.stage.CompareAndSwap(stageWaiting, stageDecided) || c.stage.Load() == stageDecided
}

// wait returns the results once the call is answered, or its caller gives up.
func (c *call) wait(ctx context.Context) []ledger.Result {
	select {
	case <-c.done:
		return c.results
	case <-ctx.Done():
	}
	if c.stage.CompareAndSwap(stageWaiting, stageGivenUp) {
		return refusals(len(c.requests), &failure{certainty: unreachable, err: ctx.Err()})
	}
	select {
	case <-c.done:
		return c.results
	default:
		return refusals(len(c.requests), &failure{certainty: ambiguous, err: ctx.Err()})
	}
}

// line is the calls that wait for one bucket, in the order in which they came. A
// line that is empty and not served is forgotten.
type line struct {
	key      string
	calls    []*call
	requests int
	// served is set while the line stands in a queue or its bucket is in a
	// transaction: there is one at a time.
	served bool
	// alone is set when the bucket was locked, absent or in the way of others: until
	// the line is empty, it has transactions of its own.
	alone bool
	// expired are the leases that were expired before those who wait could be served.
	expired []string
}

// engine gathers the calls of this process into transactions. While one is being
// committed the next one gathers; a lone call waits for nobody.
type engine struct {
	store *Store
	// committers serve lines together, lanes serve them one by one.
	committers, lanes crew

	mutex   sync.Mutex
	lines   map[string]*line
	waiting int
	closed  bool
	working sync.WaitGroup
}

// crew is a queue of lines and how many goroutines may work on it.
type crew struct {
	size, working int
	queue         []*line
}

func newEngine(s *Store, connections int) *engine {
	committers := max(1, min(maxCommitters, connections/2))
	return &engine{
		store: s, lines: map[string]*line{},
		committers: crew{size: committers}, lanes: crew{size: max(1, connections-committers)},
	}
}

var errClosed = errors.New("the store is closed")

// enter takes a call in.
func (e *engine) enter(key string, c *call) error {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	if e.closed {
		return &failure{certainty: unreachable, err: errClosed}
	}
	l := e.lines[key]
	if l == nil {
		l = &line{key: key}
	}
	if l.requests >= maxWaiting || e.waiting >= maxWaitingInAll {
		return ledger.Errorf(ledger.CodeUnavailable, "Too many requests wait for the ledger. Repeat later.")
	}
	e.lines[key] = l
	l.calls = append(l.calls, c)
	l.requests += len(c.requests)
	e.waiting += len(c.requests)
	if !l.served {
		e.serveNext(l)
	}
	return nil
}

// serveNext puts a line at the end of its queue.
func (e *engine) serveNext(l *line) {
	l.served = true
	crew, work := &e.committers, e.commit
	if l.alone {
		crew, work = &e.lanes, e.lane
	}
	crew.queue = append(crew.queue, l)
	if crew.working < crew.size {
		crew.working++
		e.working.Go(work)
	}
}

// next takes lines from the head of a crew's queue, each with some of its calls. It
// returns none, and counts the worker out, when there are none.
func (e *engine) next(c *crew, buckets int) []*group {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	var groups []*group
	requests := 0
	share := maxShare
	if len(c.queue) == 1 || buckets == 1 {
		share = maxRequests
	}
	for len(c.queue) > 0 && len(groups) < buckets && requests < maxRequests {
		l := c.queue[0]
		c.queue[0] = nil
		c.queue = c.queue[1:]
		g := e.take(l, min(share, maxRequests-requests))
		if len(g.calls) == 0 {
			e.leave(l)
			continue
		}
		requests += g.count()
		groups = append(groups, g)
	}
	if len(groups) == 0 {
		c.working--
	}
	return groups
}

// take removes calls from the head of a line: at least one, and as many as have no
// more than the given number of requests. One that closes the bucket is by itself: a
// transaction either makes a bucket or removes it.
func (e *engine) take(l *line, requests int) *group {
	g := &group{key: l.key, expired: l.expired}
	l.expired = nil
	taken := 0
	n := 0
	for _, c := range l.calls {
		if len(g.calls) > 0 && (taken+len(c.requests) > requests || c.closes() || g.calls[len(g.calls)-1].closes()) {
			break
		}
		n++
		l.requests -= len(c.requests)
		e.waiting -= len(c.requests)
		if c.stage.Load() == stageGivenUp {
			continue
		}
		taken += len(c.requests)
		g.calls = append(g.calls, c)
	}
	clear(l.calls[:n])
	l.calls = l.calls[n:]
	return g
}

// leave ends the service of a line for now.
func (e *engine) leave(l *line) {
	l.served = false
	if len(l.calls) > 0 {
		e.serveNext(l)
	} else {
		delete(e.lines, l.key)
	}
}

// answered ends the service of groups that were answered. Those who wait behind them
// come first: while their transaction is begun, the callers are told.
func (e *engine) answered(groups ...*group) {
	e.mutex.Lock()
	for _, g := range groups {
		e.leave(e.lines[g.key])
	}
	e.mutex.Unlock()
	for _, g := range groups {
		for _, c := range g.calls {
			close(c.done)
		}
	}
}

// putBack returns the calls of a group to the head of their line, which is served
// alone from now on.
func (e *engine) putBack(g *group) {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	l := e.lines[g.key]
	l.calls = append(g.calls, l.calls...)
	l.requests += g.count()
	e.waiting += g.count()
	l.alone, l.expired = true, g.expired
	e.leave(l)
}

// commit is a goroutine that serves lines together, for as long as there are any.
func (e *engine) commit() {
	for {
		groups := e.next(&e.committers, maxBuckets)
		if len(groups) == 0 {
			return
		}
		left, err := e.store.answerTogether(groups)
		answered := make([]*group, 0, len(groups))
		for _, g := range groups {
			if left[g] && err == nil {
				e.putBack(g)
				continue
			}
			if left[g] {
				g.refuse(err)
			}
			answered = append(answered, g)
		}
		e.answered(answered...)
	}
}

// lane is a goroutine that serves lines one by one, for as long as there are any.
func (e *engine) lane() {
	for {
		groups := e.next(&e.lanes, 1)
		if len(groups) == 0 {
			return
		}
		e.store.answerAlone(groups[0])
		e.answered(groups[0])
	}
}

// close takes in no more calls and returns once all that were taken in are answered.
func (e *engine) close() {
	e.mutex.Lock()
	e.closed = true
	e.mutex.Unlock()
	e.working.Wait()
}
