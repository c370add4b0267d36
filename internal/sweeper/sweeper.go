// Package sweeper touches due buckets that nobody else touches. It runs on every
// replica, needs the database and nothing else, and holds no schedule of its own:
// the rows are the schedule, and the database's clock says when the next is due.
package sweeper

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/go-logr/logr"

	"github.com/token-lease/operator/internal/ledger"
)

// Bounds of the loop. A pass is retried well inside any restore-lag objective.
const (
	// DefaultBatch is how many buckets one pass touches.
	DefaultBatch = 100
	// maxSleep bounds the wait for the next due instant: a transition stored
	// meanwhile by another process may be due sooner.
	maxSleep = time.Second
	// heldSleep bounds the rate when all that is due is locked by somebody else.
	heldSleep = 50 * time.Millisecond
	// gatherSleep bounds the rate when one thing falls due after the other, so that a
	// pass finds several.
	gatherSleep = 5 * time.Millisecond
	// passTimeout bounds one pass.
	passTimeout = 30 * time.Second
	// The back-off after a pass that failed as a whole.
	minBackOff, maxBackOff = 100 * time.Millisecond, time.Second
	// The back-off of one bucket whose touch failed. A fault that ends must not hold
	// up its restore for long.
	minAside, maxAside = time.Second, 5 * time.Second
	// maxSetAside bounds how many buckets are remembered as failing.
	maxSetAside = 10_000
)

// Observer is told what each pass did.
type Observer interface {
	ObserveSweep(touched, setAside int)
}

// Sweeper is the loop.
type Sweeper struct {
	store    ledger.Store
	observer Observer
	log      logr.Logger
	now      func() time.Time
	// aside are buckets whose touch failed. The passes leave them out until a retry
	// beside the passes succeeds, so that a slow one costs the others nothing.
	aside map[string]asideBucket
	// retrying tells what became of a retry; nil while there is none.
	retrying chan map[string]*ledger.Error
}

// New returns a sweeper over a store.
func New(store ledger.Store, observer Observer, log logr.Logger) *Sweeper {
	return &Sweeper{store: store, observer: observer, log: log, aside: map[string]asideBucket{}, now: time.Now}
}

// Run sweeps until the context ends. It never gives up: a database that is away
// comes back.
func (s *Sweeper) Run(ctx context.Context) {
	defer s.awaitRetry()
	backOff := minBackOff
	for ctx.Err() == nil {
		wait, err := s.pass(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			s.log.Error(err, "sweep failed; it is tried again", "in", backOff.String())
			wait = backOff
			backOff = min(2*backOff, maxBackOff)
		default:
			backOff = minBackOff
		}
		sleep(ctx, wait)
	}
}

// pass touches what is due and says how long to wait before the next pass.
func (s *Sweeper) pass(ctx context.Context) (time.Duration, error) {
	s.noteRetry()
	s.startRetry(ctx)
	ctx, cancel := context.WithTimeout(ctx, passTimeout)
	defer cancel()
	result, err := s.store.Sweep(ctx, ledger.SweepRequest{Limit: DefaultBatch, SetAside: slices.Collect(maps.Keys(s.aside))})
	// A pass that ended early tells what it did and met nevertheless. Without that
	// the same slow buckets would end the next pass as well.
	progress := len(result.Touched)
	for _, key := range result.Touched {
		delete(s.aside, key)
	}
	for key, reason := range result.Failed {
		if s.putAside(key, reason) {
			progress++
		}
	}
	if err == nil || progress > 0 {
		s.observer.ObserveSweep(len(result.Touched), len(s.aside))
	}
	switch {
	case err != nil && progress == 0:
		return 0, err
	case err != nil:
		s.log.Error(err, "a sweep ended early; the next one goes on")
		return heldSleep, nil
	case len(result.Touched)+len(result.Failed) >= DefaultBatch && progress == 0:
		return maxSleep, nil
	case len(result.Touched)+len(result.Failed) >= DefaultBatch:
		return 0, nil
	case result.NextIn < 0:
		return maxSleep, nil
	case result.NextIn == 0 && len(result.Touched) == 0:
		return heldSleep, nil
	default:
		return min(max(result.NextIn, gatherSleep), maxSleep), nil
	}
}

func sleep(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}
