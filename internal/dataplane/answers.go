package dataplane

import (
	"context"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"
	"k8s.io/apimachinery/pkg/util/cache"

	"github.com/token-lease/operator/internal/ledger"
)

const (
	// keepYes and keepNo are how long an answer of the API server is relied on: for so
	// long a right that was taken away still holds, and one that was given does not yet.
	keepYes = 30 * time.Second
	keepNo  = 10 * time.Second
	// maxAnswers bounds each cache. Yes and no have one each, so that nobody drives the
	// callers that are known out with made-up tokens.
	maxAnswers = 8192
	// reviewTimeout bounds one question to the API server.
	reviewTimeout = 5 * time.Second
	// maxReviews of a kind are asked at a time; maxTokensWaiting and maxAccessWaiting are
	// how many may wait for their turn. One caller may have half of what is about access, so
	// that one who draws from a thousand buckets gets through when its answers are too old.
	maxReviews       = 32
	maxTokensWaiting = 256
	maxAccessWaiting = 2048 - maxReviews
)

// lane bounds how many questions of one kind are asked at a time, and how many wait. One
// caller may have half of each.
type lane struct {
	places, turns chan struct{}

	mutex sync.Mutex
	// shares are of those who have asked and not been answered; the others have none.
	shares map[string]*share
}

// share is what one caller may have of a lane.
type share struct {
	places int
	turns  chan struct{}
}

func newLane(turns, waiting int) *lane {
	return &lane{places: make(chan struct{}, turns+waiting), turns: make(chan struct{}, turns), shares: map[string]*share{}}
}

// ask puts one question, in its turn. It is about the caller that is named; nobody has a
// name before its token was reviewed.
func (l *lane) ask(ctx context.Context, caller string, question func(context.Context) error) error {
	select {
	case l.places <- struct{}{}:
		defer func() { <-l.places }()
	default:
		return ledger.Errorf(codeOverloaded, "Too many callers wait for an answer to this.")
	}
	if caller != "" {
		own := l.enter(caller)
		if own == nil {
			return ledger.Errorf(codeOverloaded, "Too many requests of this caller wait for an answer to this.")
		}
		defer l.exit(caller, own)
		// Its own turn comes first, so that who waits for a turn of all waits for few of
		// each caller's.
		if err := take(ctx, own.turns); err != nil {
			return err
		}
		defer func() { <-own.turns }()
	}
	if err := take(ctx, l.turns); err != nil {
		return err
	}
	defer func() { <-l.turns }()
	return question(ctx)
}

func take(ctx context.Context, turns chan struct{}) error {
	select {
	case turns <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// enter gives a caller a place of its share; nil means that it has none left.
func (l *lane) enter(caller string) *share {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	own := l.shares[caller]
	if own == nil {
		own = &share{turns: make(chan struct{}, max(1, cap(l.turns)/2))}
		l.shares[caller] = own
	}
	if own.places >= max(1, cap(l.places)/2) {
		return nil
	}
	own.places++
	return own
}

func (l *lane) exit(caller string, own *share) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	if own.places--; own.places == 0 {
		delete(l.shares, caller)
	}
}

// answers keeps what the API server said to a question Q; the zero T stands for no.
type answers[Q, T comparable] struct {
	lane *lane
	// observer is told of each question that was put, under the name.
	observer Observer
	name     string
	now      func() time.Time
	yes, no  *cache.LRUExpireCache
	flights  singleflight.Group
}

func newAnswers[Q, T comparable](observer Observer, name string, waiting int, now func() time.Time) *answers[Q, T] {
	return &answers[Q, T]{
		lane: newLane(maxReviews, waiting), observer: observer, name: name, now: now,
		yes: cache.NewLRUExpireCacheWithClock(maxAnswers, clock(now)),
		no:  cache.NewLRUExpireCacheWithClock(maxAnswers, clock(now)),
	}
}

// clock lets a cache go by a function.
type clock func() time.Time

// Now implements cache.Clock.
func (c clock) Now() time.Time { return c() }

// get returns the answer to a question about a caller: one that is kept, or a new one. A
// yes is kept no longer than until the given instant, if there is one. Those who ask the same at the
// same time share one question, which goes on when the first of them gives up.
func (a *answers[Q, T]) get(ctx context.Context, caller string, q Q, until time.Time, ask func(context.Context) (T, error)) (T, error) {
	var none T
	if kept, ok := a.kept(q); ok {
		return kept, nil
	}
	arrived := a.flights.DoChan(fmt.Sprintf("%v", q), func() (any, error) {
		if kept, ok := a.kept(q); ok { // another flight has just landed
			return kept, nil
		}
		asking, cancel := context.WithTimeout(context.WithoutCancel(ctx), reviewTimeout)
		defer cancel()
		var said T
		err := a.lane.ask(asking, caller, func(ctx context.Context) (err error) {
			said, err = ask(ctx)
			return err
		})
		a.observe(said, err)
		if err != nil {
			return none, err
		}
		a.keep(q, said, until)
		return said, nil
	})
	select {
	case <-ctx.Done():
		return none, ledger.Errorf(codeReviewUnavailable, "The API server did not say in time who the caller is and what it may do.")
	case flight := <-arrived:
		if flight.Err != nil {
			if code := codeOf(flight.Err); code == codeOverloaded {
				return none, flight.Err
			}
			return none, ledger.Errorf(codeReviewUnavailable, "The API server did not say who the caller is and what it may do.").WithCause(flight.Err)
		}
		said, _ := flight.Val.(T)
		return said, nil
	}
}

func (a *answers[Q, T]) kept(q Q) (said T, ok bool) {
	if said, ok := a.keptYes(q); ok {
		return said, ok
	}
	_, ok = a.no.Get(q)
	return said, ok
}

func (a *answers[Q, T]) keptYes(q Q) (said T, ok bool) {
	found, ok := a.yes.Get(q)
	if !ok {
		return said, false
	}
	said, ok = found.(T)
	return said, ok
}

func (a *answers[Q, T]) keep(q Q, said T, until time.Time) {
	var none T
	if said == none {
		a.no.Add(q, struct{}{}, keepNo)
		return
	}
	ttl := keepYes
	if !until.IsZero() {
		ttl = min(ttl, until.Sub(a.now()))
	}
	if ttl > 0 {
		a.yes.Add(q, said, ttl)
	}
}

func (a *answers[Q, T]) observe(said T, err error) {
	var none T
	switch {
	case err != nil:
		a.observer.ObserveReview(a.name, "error")
	case said == none:
		a.observer.ObserveReview(a.name, "no")
	default:
		a.observer.ObserveReview(a.name, "yes")
	}
}
