package sweeper

import (
	"context"
	"time"

	"github.com/go-logr/logr"

	"github.com/token-lease/operator/internal/ledger"
)

// Bounds of purging. It has all the time in the world: nobody waits for it.
const (
	// purgeChunk is how many leases one transaction removes: few enough that who waits
	// for the bucket meanwhile hardly notices.
	purgeChunk = 250
	// purgeBuckets is how many buckets one look goes through.
	purgeBuckets = 500
	// purgeTurn is how many chunks one bucket has of a round.
	purgeTurn = 40
	// purgeRest is the time between two rounds, unless one left something.
	purgeRest = time.Minute
	// purgePause bounds the rest between two chunks from below, and purgeShare is how
	// many times as long as a chunk took it is.
	purgePause, purgeShare = 5 * time.Millisecond, 4
	// purgeTimeout bounds one step.
	purgeTimeout = 30 * time.Second
)

// PurgeObserver is told what purging did.
type PurgeObserver interface {
	ObservePurge(leases, operations int64)
}

// Purger removes what is older than the retention of its bucket, on every replica,
// beside the sweeper and without anything in common with it: a purge holds up no
// restore. Two purgers on one bucket do not hurt each other.
type Purger struct {
	ledger   *ledger.Ledger
	observer PurgeObserver
	log      logr.Logger
	rest     time.Duration
	look     int
}

// NewPurger returns a purger.
func NewPurger(l *ledger.Ledger, observer PurgeObserver, log logr.Logger) *Purger {
	return &Purger{ledger: l, observer: observer, log: log, rest: purgeRest, look: purgeBuckets}
}

// Run purges until the context ends.
func (p *Purger) Run(ctx context.Context) {
	for ctx.Err() == nil {
		more, err := p.round(ctx)
		if err != nil && ctx.Err() == nil {
			p.log.Error(err, "purging failed; it is tried again", "in", p.rest.String())
		}
		if err != nil || !more {
			sleep(ctx, p.rest)
		}
	}
}

// round goes through all buckets that have something old, once, and reports whether it
// left more of that.
func (p *Purger) round(ctx context.Context) (more bool, err error) {
	after := ""
	for ctx.Err() == nil {
		step, cancel := context.WithTimeout(ctx, purgeTimeout)
		keys, next, err := p.ledger.Store().Purgeable(step, after, p.look)
		cancel()
		if err != nil {
			return more, err
		}
		for _, key := range keys {
			more = p.purge(ctx, key) || more
		}
		if next == "" {
			break
		}
		after = next
	}
	return more, nil
}

// purge rids one bucket of what is old, chunk by chunk, and reports whether it left
// more: others have their turn even if a bucket's leases grow old as fast as they are
// purged. Between two chunks whoever else wants the bucket has most of the time.
func (p *Purger) purge(ctx context.Context, key string) (more bool) {
	for range purgeTurn {
		started := time.Now()
		step, cancel := context.WithTimeout(ctx, purgeTimeout)
		result := p.ledger.Do(step, ledger.Purge{Key: key, Limit: purgeChunk})[0]
		cancel()
		if result.Err != nil {
			// It is found again in the next round.
			if ctx.Err() == nil && result.Err.Code != ledger.CodeBucketNotFound {
				p.log.Error(result.Err, "a bucket could not be purged; it is tried again", "bucket", key)
			}
			return false
		}
		p.observer.ObservePurge(result.Purged.Leases, result.Purged.Operations)
		if !result.Purged.More {
			return false
		}
		sleep(ctx, max(purgePause, purgeShare*time.Since(started)))
	}
	return true
}
