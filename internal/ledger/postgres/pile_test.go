package postgres

import (
	"slices"
	"testing"
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

// overdue puts leases into a bucket that expired at as many instants, or all at
// one.
func (d *database) overdue(prefix string, leases int, instants int, before time.Time) {
	d.t.Helper()
	d.exec(`
		INSERT INTO tokenlease.leases (bucket_key, lease_id, request_hash, fingerprint_hash, state,
			reserved_tokens, ttl_ms, created_at, expires_at)
		SELECT $1::text, $2::text || n, sha256(convert_to($2::text || n, 'UTF8')), sha256('f'), 'reserved',
			1 + n % 3, 1000, $5::timestamptz - interval '1 hour', $5::timestamptz - interval '1 millisecond' * (1 + n % $4::int)
		FROM generate_series(1, $3::int) AS n`, bucketKey, prefix, leases, instants, before)
	d.exec(`
		UPDATE tokenlease.buckets AS b SET reserved_tokens = l.tokens, lease_records = l.leases
		FROM (SELECT sum(reserved_tokens) FILTER (WHERE state = 'reserved') AS tokens, count(*) AS leases FROM tokenlease.leases) AS l`)
}

// Goal: a pile of overdue leases holds up no restore, and what is asked for is
// served once it is settled. Method: a pile that takes several transactions, half of it
// expired at one instant and half at many, as does the raise.
func TestPileOfOverdueLeases(t *testing.T) {
	const leases = 3 * maxOverdue / 2
	d := newDatabase(t)
	d.holdClock(start)
	store := d.store(func(o *Options) { o.CallTimeout = 4 * testTimeout })
	owner := testOwner()
	do(t, store, declared(owner, 1, 400_000))
	do(t, store, raised("raise-1", owner, 400_000, 500_000, hour, &start))
	d.overdue("same-", leases, 1, start.Add(hour))
	d.overdue("many-", leases, leases, start.Add(hour))
	d.setClock(start.Add(hour))

	swept, err := store.Sweep(t.Context(), ledger.SweepRequest{Limit: 10})
	if err != nil || len(swept.Touched) != 1 || len(swept.Failed) != 0 || swept.NextIn >= 0 {
		t.Errorf("Sweep = %+v, %v; want one bucket touched and nothing due", swept, err)
	}
	if limit := value[int64](d, `SELECT limit_tokens FROM tokenlease.buckets`); limit != 400_000 {
		t.Errorf("the limit is %d, want 400000 again", limit)
	}
	if left := value[int64](d, `SELECT count(*) FROM tokenlease.leases WHERE state = 'reserved'`); left != 2*leases-maxOverdue {
		t.Errorf("%d leases are still to be settled, want all but %d of them", left, maxOverdue)
	}
	d.wantInvariants()

	reserved := do(t, store, ledger.Reserve{Key: bucketKey, RequestKey: "1", Fingerprint: "f", Tokens: 400_000})
	if s := reserved.Snapshot; s.ReservedTokens != 400_000 || s.LeaseRecords != 2*leases+1 {
		t.Errorf("the reservation answers %+v", s)
	}
	d.wantInvariants()
}

// Goal: leases at one bound of what is settled at once are neither lost nor
// settled twice, and a batch on many buckets goes on in order.
func TestPileAtTheBound(t *testing.T) {
	for _, leases := range []int{maxOverdue - 1, maxOverdue} {
		d := newDatabase(t)
		d.holdClock(start)
		store := d.store(nil)
		do(t, store, ledger.OpenBucket{Key: bucketKey, Limit: 10})
		d.overdue("l-", leases, 7, start)
		results := ledger.New(store, nil).Do(t.Context(),
			ledger.Reserve{Key: bucketKey, RequestKey: "1", Fingerprint: "f", Tokens: 4},
			ledger.OpenBucket{Key: "other", Limit: 10},
			ledger.Reserve{Key: bucketKey, RequestKey: "2", Fingerprint: "f", Tokens: 6},
			ledger.Reserve{Key: bucketKey, RequestKey: "3", Fingerprint: "f", Tokens: 1})
		for i, want := range []ledger.Code{"", "", "", ledger.CodeBudgetExceeded} {
			if got := codeOf(results[i]); got != want {
				t.Errorf("%d overdue, request %d: %q, want %q (%v)", leases, i, got, want, results[i].Err)
			}
		}
		d.wantInvariants()
	}
}

// Goal: reaping names every lease that expired, also those that took transactions of
// their own.
func TestReapingAPileNamesAll(t *testing.T) {
	d := newDatabase(t)
	d.holdClock(start)
	store := d.store(func(o *Options) { o.CallTimeout = 4 * testTimeout })
	do(t, store, ledger.OpenBucket{Key: bucketKey, Limit: 10})
	const leases = 2*maxOverdue + 3
	d.overdue("l-", leases, leases, start)
	ids := do(t, store, ledger.ReapExpired{Key: bucketKey}).ExpiredLeaseIDs
	if len(ids) != leases || !slices.IsSorted(ids) || len(slices.Compact(slices.Clone(ids))) != leases {
		t.Errorf("%d IDs are named, want %d, each once and in order", len(ids), leases)
	}
	d.wantInvariants()
}
