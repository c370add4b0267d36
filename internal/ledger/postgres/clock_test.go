package postgres

import (
	"fmt"
	"testing"
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

// Goal: only the database's clock counts, however wrong it is to this process.
// Method: the database's clock stands an hour ahead of this process and ten
// minutes behind; every instant that is stored or answered must be its own.
func TestProcessClockIsIrrelevant(t *testing.T) {
	for _, skew := range []time.Duration{hour, -10 * time.Minute} {
		t.Run(fmt.Sprint(skew), func(t *testing.T) {
			d := newDatabase(t)
			now := ledger.Truncate(time.Now().Add(skew))
			d.holdClock(now)
			store := d.store(nil)
			owner := testOwner()
			do(t, store, declared(owner, 1, 100))
			starts := now.Add(time.Minute)
			pending := do(t, store, raised("raise-1", owner, 100, 300, time.Minute, &starts)).Raise
			if pending.State != ledger.RaisePending || !pending.StoredAt.Equal(now) {
				t.Errorf("a raise of the next minute is %s, stored at %v", pending.State, pending.StoredAt)
			}
			lease := do(t, store, ledger.Reserve{Key: bucketKey, RequestKey: "1", Fingerprint: "f", Tokens: 60, TTL: 90 * time.Second}).Lease
			if !lease.CreatedAt.Equal(now) || !lease.ExpiresAt.Equal(now.Add(90*time.Second)) {
				t.Errorf("a lease of 90 s runs from %v to %v", lease.CreatedAt, lease.ExpiresAt)
			}
			d.wantSweep(store, 0, time.Minute)

			d.setClock(starts)
			d.wantSweep(store, 1, time.Minute)
			active := do(t, store, ledger.Reserve{Key: bucketKey, RequestKey: "2", Fingerprint: "f", Tokens: 200})
			if active.Snapshot.Limit != 300 || active.Lease.RaiseID != "raise-1" {
				t.Errorf("at the start the bucket is %+v", active.Snapshot)
			}
			d.setClock(starts.Add(time.Minute))
			result := ledger.New(store, nil).Do(t.Context(), ledger.Reserve{Key: bucketKey, RequestKey: "3", Fingerprint: "f", Tokens: 101})[0]
			if !ledger.HasCode(result.Err, ledger.CodeBudgetExceeded) {
				t.Errorf("at the expiry: %v, want budget_exceeded", result.Err)
			}
			raise, err := store.Raise(t.Context(), owner.Cluster, "raise-1")
			if err != nil || raise.State != ledger.RaiseRestored || !raise.ActivatedAt.Equal(starts) || !raise.EndedAt.Equal(starts.Add(time.Minute)) {
				t.Errorf("the raise is %+v, %v", raise, err)
			}
			if wrong := value[int64](d, `SELECT count(*) FROM tokenlease.audit WHERE recorded_at NOT BETWEEN $1 AND $2`, now, starts.Add(time.Minute)); wrong != 0 {
				t.Errorf("%d audit rows show another clock's time", wrong)
			}
			d.wantInvariants()
		})
	}
}

// wantSweep runs a pass of the sweeper.
func (d *database) wantSweep(store *Store, touched int, nextIn time.Duration) {
	d.t.Helper()
	swept, err := store.Sweep(d.t.Context(), ledger.SweepRequest{Limit: 10})
	if err != nil || len(swept.Touched) != touched || len(swept.Failed) != 0 || swept.NextIn != nextIn {
		d.t.Errorf("Sweep = %+v, %v; want %d touched and the next in %v", swept, err, touched, nextIn)
	}
}

// Goal: a clock that jumps back, as after a failover to another machine, takes back
// nothing, lets no raise in that is over, and holds up nothing for longer than the
// jump. Method: a bucket with a lease, an active and a planned raise is used at
// minute 15; then the clock shows minute 5 and goes on from there.
func TestClockJumpsBack(t *testing.T) {
	d := newDatabase(t)
	d.holdClock(start)
	store := d.store(nil)
	minute := func(n int) time.Time { return start.Add(time.Duration(n) * time.Minute) }
	owner := testOwner()
	plan := func(uid string, from, to int) *ledger.Raise {
		starts := minute(from)
		return do(t, store, raised(uid, owner, 100, 300, minute(to).Sub(starts), &starts)).Raise
	}
	do(t, store, declared(owner, 1, 100))
	plan("over", 0, 10)
	plan("active", 12, 20)
	plan("planned", 21, 30)
	d.setClock(minute(15))
	lease := do(t, store, ledger.Reserve{Key: bucketKey, RequestKey: "1", Fingerprint: "f", Tokens: 60, TTL: 2 * time.Minute}).Lease

	d.setClock(minute(5))
	d.wantSweep(store, 0, 15*time.Minute)
	late := plan("late", 6, 14)
	if late.State != ledger.RaiseFailed || late.Reason != ledger.ReasonWindowMissed {
		t.Errorf("a raise whose window the bucket has left behind is %s/%s", late.State, late.Reason)
	}
	second := do(t, store, ledger.Reserve{Key: bucketKey, RequestKey: "2", Fingerprint: "f", Tokens: 40, TTL: time.Minute})
	if !second.Lease.CreatedAt.Equal(minute(15)) || second.Snapshot.UpdatedAt.Before(minute(15)) || second.Snapshot.Limit != 300 {
		t.Errorf("after the jump a lease begins at %v in %+v", second.Lease.CreatedAt, second.Snapshot)
	}
	for range 3 {
		d.wantSweep(store, 0, 15*time.Minute)
	}
	// Another hand makes the bucket due at the clock's time, which lies before the
	// bucket's own.
	d.exec(`UPDATE tokenlease.buckets SET next_transition_at = tokenlease.ledger_now()`)
	d.wantSweep(store, 1, 15*time.Minute)

	d.setClock(minute(17))
	if bucket := do(t, store, ledger.Inspect{Key: bucketKey}).Snapshot; bucket.ReservedTokens != 0 {
		t.Errorf("at minute 17 %d tokens are still reserved by leases until then", bucket.ReservedTokens)
	}
	result := ledger.New(store, nil).Do(t.Context(), ledger.Commit{Key: bucketKey, LeaseID: lease.ID, ActualTokens: 1})[0]
	if !ledger.HasCode(result.Err, ledger.CodeLeaseExpired) {
		t.Errorf("committing it = %v, want lease_expired", result.Err)
	}
	d.setClock(minute(20))
	d.wantSweep(store, 1, time.Minute)
	d.setClock(minute(21))
	d.wantSweep(store, 1, 9*time.Minute)
	d.setClock(minute(30))
	d.wantSweep(store, 1, -1)
	raises := value[string](d, `SELECT string_agg(raise_id || ' ' || state || '/' || coalesce(reason, ''), ', ' ORDER BY raise_id) FROM tokenlease.raises`)
	if want := "active restored/Expired, late failed/WindowMissed, over restored/Expired, planned restored/Expired"; raises != want {
		t.Errorf("the raises end as %q, want %q", raises, want)
	}
	if back := value[int64](d, `SELECT count(*) FROM tokenlease.audit AS a JOIN tokenlease.audit AS b USING (bucket_key)
		WHERE b.sequence = a.sequence + 1 AND b.recorded_at < a.recorded_at`); back != 0 {
		t.Errorf("the audit goes back in time %d times", back)
	}
	d.wantInvariants()
}

// Goal: instants that other hands wrote beyond all time stop nobody. Method: one
// bucket due since minus infinity, locked so that nobody can put it right, beside
// one that is due later.
func TestTimerBeforeAllTime(t *testing.T) {
	d := newDatabase(t)
	d.holdClock(start)
	store := d.store(nil)
	for _, key := range []string{"a", "b"} {
		do(t, store, ledger.OpenBucket{Key: key, Limit: 100})
	}
	d.exec(`UPDATE tokenlease.buckets SET next_transition_at = '-infinity' WHERE bucket_key = 'a'`)
	d.exec(`UPDATE tokenlease.buckets SET next_transition_at = $1 WHERE bucket_key = 'b'`, start)
	d.exec(`BEGIN`)
	d.exec(`SELECT FROM tokenlease.buckets WHERE bucket_key = 'a' FOR UPDATE`)
	d.wantSweep(store, 1, 0)
	d.exec(`ROLLBACK`)
	d.wantSweep(store, 1, -1)
}
