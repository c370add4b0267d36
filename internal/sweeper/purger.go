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
	// purgeBuckets is how many buckets are looked at with one query.
	purgeBuckets = 1000
	// purgeRest is how long a look is left alone that found nothing more.
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
}

// NewPurger returns a purger.
func NewPurger(l *ledger.Ledger, observer PurgeObserver, log logr.Logger) *Purger {
	return &Purger{ledger: l, observer: observer, log: log, rest: purgeRest}
}

// Run purges until the context ends.
func (p *Purger) Run(ctx context.Context) {
	for ctx.Err() == nil {
		if err := p.round(ctx); err != nil && ctx.Err() == nil {
			p.log.Error(err, "purging failed; it is tried again", "in", p.rest.String())
		}
		sleep(ctx, p.rest)
	}
}

// round goes through all buckets that have something old, once.
func (p *Purger) round(ctx context.Context) error {
	after := ""
	for ctx.Err() == nil {
		step, cancel := context.WithTimeout(ctx, purgeTimeout)
		keys, next, err := p.ledger.Store().Purgeable(step, after, purgeBuckets)
		cancel()
		if err != nil {
			return err
		}
		for _, key := range keys {
			p.purge(ctx, key)
		}
		if next == "" {
			return nil
		}
		after = next
	}
	return nil
}

// purge empties one bucket of what is old, chunk by chunk. Between two of them whoever
// else wants the bucket has most of the time.
func (p *Purger) purge(ctx context.Context, key string) {
	for ctx.Err() == nil {
		started := time.Now()
		step, cancel := context.WithTimeout(ctx, purgeTimeout)
		result := p.ledger.Do(step, ledger.Purge{Key: key, Limit: purgeChunk})[0]
		cancel()
		if result.Err != nil {
			// It is found again in the next round.
			if ctx.Err() == nil && result.Err.Code != ledger.CodeBucketNotFound {
				p.log.Error(result.Err, "a bucket could not be purged; it is tried again", "bucket", key)
			}
			return
		}
		p.observer.ObservePurge(result.Purged.Leases, result.Purged.Operations)
		if !result.Purged.More {
			return
		}
		sleep(ctx, max(purgePause, purgeShare*time.Since(started)))
	}
}
