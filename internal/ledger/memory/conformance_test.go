package memory

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/token-lease/operator/internal/ledger"
	"github.com/token-lease/operator/internal/ledger/ledgertest"
)

func TestConformance(t *testing.T) {
	ledgertest.Exercise(t, func(*testing.T) ledgertest.Harness {
		clock := ledgertest.NewClock()
		return &harness{
			clock: clock,
			store: New(Options{Clock: clock.Now, Worker: ledgertest.WorkerName}),
		}
	})
}

type harness struct {
	clock *ledgertest.ManualClock
	store *Store
}

func (h *harness) Store() ledger.Store     { return h.store }
func (h *harness) Clock() ledgertest.Clock { return h.clock }

func (h *harness) OverrideLimit(_ context.Context, key string, limit int64) error {
	return h.store.OverrideLimit(key, limit)
}

func (h *harness) DropBucket(_ context.Context, key string) error {
	h.store.DropBucket(key)
	return nil
}

// Invariants implements ledgertest.Harness on the stored rows themselves.
func (h *harness) Invariants(context.Context) error {
	h.store.mutex.Lock()
	defer h.store.mutex.Unlock()
	var faults []error
	for key, bucket := range h.store.rows.buckets {
		faults = append(faults, h.store.rows.countersAgree(bucket), h.store.rows.raisesAgree(bucket))
		if log := h.store.rows.audit[key]; int64(len(log)) != bucket.AuditSequence {
			faults = append(faults, violation("bucket %q counts %d audit rows, not %d", key, bucket.AuditSequence, len(log)))
		}
	}
	for key, log := range h.store.rows.audit {
		for i, row := range log {
			if row.Sequence != int64(i)+1 {
				faults = append(faults, violation("audit row %d of bucket %q is numbered %d", i+1, key, row.Sequence))
			}
		}
	}
	return errors.Join(faults...)
}

func (r *rows) countersAgree(b *ledger.Bucket) error {
	var used, reserved int64
	for _, lease := range r.leases[b.Key] {
		if !lease.PeriodStart.Equal(b.PeriodStart) {
			continue
		}
		switch lease.State {
		case ledger.LeaseReserved:
			reserved += lease.ReservedTokens
		case ledger.LeaseCommitted:
			used += *lease.ActualTokens
		case ledger.LeaseReleased, ledger.LeaseExpired:
		}
	}
	for position, usage := range r.rollups[b.Key] {
		if position.PeriodStart.Equal(b.PeriodStart) {
			used += usage.UsedTokens
		}
	}
	if err := r.periodsAgree(b); err != nil {
		return err
	}
	records := len(r.leases[b.Key])
	if used != b.UsedTokens || reserved != b.ReservedTokens || int64(records) != b.LeaseRecords {
		return violation("bucket %q counts used %d, reserved %d, records %d; its leases say %d, %d, %d",
			b.Key, b.UsedTokens, b.ReservedTokens, b.LeaseRecords, used, reserved, records)
	}
	if !tokens(b.Limit) || !tokens(used) || !tokens(reserved) || !tokens(used+reserved) {
		return violation("bucket %q holds figures out of range: %+v", b.Key, b)
	}
	return nil
}

// periodsAgree checks the ended periods against the leases that were reserved in them.
func (r *rows) periodsAgree(b *ledger.Bucket) error {
	used, reserved := map[time.Time]int64{}, map[time.Time]int64{}
	for _, lease := range r.leases[b.Key] {
		switch lease.State {
		case ledger.LeaseReserved:
			reserved[lease.PeriodStart] += lease.ReservedTokens
		case ledger.LeaseCommitted:
			used[lease.PeriodStart] += *lease.ActualTokens
		case ledger.LeaseReleased, ledger.LeaseExpired:
		}
		if !lease.PeriodStart.Equal(b.PeriodStart) && r.periods[b.Key][lease.PeriodStart] == nil {
			return violation("lease %q of bucket %q is of a period that is not there: %s", lease.ID, b.Key, lease.PeriodStart)
		}
	}
	for position, usage := range r.rollups[b.Key] {
		used[position.PeriodStart] += usage.UsedTokens
	}
	for start, period := range r.periods[b.Key] {
		if period.UsedTokens != used[start] || period.ReservedTokens != reserved[start] {
			return violation("the period %+v of bucket %q counts otherwise than its leases: %d, %d",
				*period, b.Key, used[start], reserved[start])
		}
	}
	return nil
}

func (r *rows) raisesAgree(b *ledger.Bucket) error {
	var active []*ledger.Raise
	for _, raise := range r.raises[b.Key] {
		if raise.State.Ended() {
			continue
		}
		if b.NextTransitionAt.IsZero() || b.NextTransitionAt.After(raise.ExpiresAt) {
			return violation("bucket %q is due at %s, its raise %q expires at %s", b.Key, b.NextTransitionAt, raise.ID, raise.ExpiresAt)
		}
		if raise.State == ledger.RaiseActive {
			active = append(active, raise)
		}
	}
	if len(active) > 1 {
		return violation("bucket %q has %d active raises", b.Key, len(active))
	}
	if b.ActiveRaiseID == "" {
		return nil
	}
	if len(active) == 0 || active[0].ID != b.ActiveRaiseID || active[0].Epoch != b.LimitEpoch || *active[0].AppliedLimit != b.Limit {
		return violation("bucket %q points at raise %q, its active ones are %+v", b.Key, b.ActiveRaiseID, active)
	}
	return nil
}

// Goal: what concurrent callers are answered could have been answered to one after
// the other.
func TestLinearizable(t *testing.T) {
	clock := ledgertest.NewClock()
	ledgertest.Linearizable(t, ledgertest.Concurrent{
		Stores: []ledger.Store{New(Options{Clock: clock.Now})},
		Start:  clock.Now(),
		SetClock: func(_ context.Context, at time.Time) error {
			clock.Set(at)
			return nil
		},
	})
}
