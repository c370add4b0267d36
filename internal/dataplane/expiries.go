package dataplane

import (
	"context"
	"time"

	"k8s.io/apimachinery/pkg/util/cache"

	"github.com/token-lease/operator/internal/ledger"
)

const (
	// lookAhead is how many leases are looked at for the next one to expire.
	lookAhead = 64
	// keepExpiry is how long what was found is told to others: a bucket that refuses
	// many asks the database once in this time.
	keepExpiry  = time.Second
	maxExpiries = 4096
	// lookTimeout bounds the look: it is a courtesy, and must not hold an answer up.
	lookTimeout = 500 * time.Millisecond
)

// expiries knows when a full bucket gets tokens back at the latest: when its next lease
// expires, or its period ends.
type expiries struct {
	store ledger.Store
	now   func() time.Time
	next  *cache.LRUExpireCache
}

func newExpiries(store ledger.Store, now func() time.Time) *expiries {
	return &expiries{store: store, now: now, next: cache.NewLRUExpireCacheWithClock(maxExpiries, clock(now))}
}

// tell adds to a refusal for lack of tokens how long it is until then, where that is
// known.
func (e *expiries) tell(ctx context.Context, key string, err error) error {
	if !ledger.HasCode(err, ledger.CodeBudgetExceeded) {
		return err
	}
	at, ok := e.at(ctx, key)
	if wait := at.Sub(e.now()); ok && wait > 0 {
		return &waiting{error: err, atLeast: (wait + time.Millisecond - 1).Truncate(time.Millisecond)}
	}
	return err
}

func (e *expiries) at(ctx context.Context, key string) (time.Time, bool) {
	if known, ok := e.next.Get(key); ok {
		at, ok := known.(time.Time)
		return at, ok && !at.IsZero()
	}
	// What is not known yet is not looked for by everybody at once.
	e.next.Add(key, time.Time{}, keepExpiry)
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	at, err := e.look(ctx, key)
	if err != nil || at.IsZero() {
		return time.Time{}, false
	}
	e.next.Add(key, at, keepExpiry)
	return at, true
}

// look reads the instant; the zero time means that there is none in sight.
func (e *expiries) look(ctx context.Context, key string) (time.Time, error) {
	var at time.Time
	changes, err := e.store.Changes(ctx, []ledger.KnownRevision{{Key: key}})
	if err != nil || len(changes) == 0 || changes[0].Snapshot == nil {
		return at, err
	}
	bucket := changes[0].Snapshot
	if bucket.CurrentPeriod != nil {
		at = bucket.CurrentPeriod.EndsAt
	}
	if bucket.ReservedTokens == 0 {
		return at, nil
	}
	leases, err := e.store.Leases(ctx, key, ledger.LeasePosition{ExpiresAt: e.now()}, lookAhead)
	if err != nil {
		return time.Time{}, err
	}
	for _, lease := range leases {
		if !at.IsZero() && !lease.ExpiresAt.Before(at) {
			return at, nil
		}
		if lease.State == ledger.LeaseReserved && ofCurrentPeriod(lease, bucket) {
			return lease.ExpiresAt, nil
		}
	}
	if len(leases) == lookAhead {
		return time.Time{}, nil // the one that stands is further on
	}
	return at, nil
}

// ofCurrentPeriod reports whether the tokens of a lease go back to the period that is
// running. The first one of a bucket has no start, and is shown from its creation on.
func ofCurrentPeriod(lease *ledger.Lease, bucket *ledger.Snapshot) bool {
	current := bucket.CurrentPeriod
	return current == nil || lease.PeriodStart.Equal(current.StartedAt) ||
		lease.PeriodStart.IsZero() && current.StartedAt.Equal(bucket.CreatedAt)
}
