package postgres

import (
	"testing"
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

// Goal: whoever writes a limit without the ledger takes it away from the active
// raise, also with an equal value, and leaves evidence. Method: plain SQL on a
// raised bucket, then one pass of the sweeper.
func TestOtherHand(t *testing.T) {
	for _, c := range []struct {
		name  string
		limit int64
	}{{"another value", 250}, {"the same value", 300}} {
		t.Run(c.name, func(t *testing.T) {
			d := newDatabase(t)
			d.holdClock(start)
			store := d.store(nil)
			owner := testOwner()
			do(t, store, declared(owner, 1, 100))
			do(t, store, raised("raise-1", owner, 100, 300, hour, &start))
			d.setClock(start.Add(time.Minute))
			d.exec(`SET application_name = 'psql'`)
			d.exec(`UPDATE tokenlease.buckets SET limit_tokens = $1`, c.limit)

			rows, err := store.Audit(t.Context(), bucketKey, 0, 100)
			if err != nil {
				t.Fatal(err)
			}
			row := rows[len(rows)-1]
			if row.Event != ledger.AuditLimitTaken || row.Outcome != ledger.OutcomeApplied || row.RaiseID != "raise-1" ||
				*row.PriorLimit != 300 || *row.EffectiveLimit != c.limit || *row.DeclaredLimit != 100 ||
				row.Actor != "postgres" || row.Worker != "psql" || row.ApprovalID != "CHG-raise-1" ||
				row.OwnerName != owner.Name || !row.At.Equal(start.Add(time.Minute)) {
				t.Errorf("the audit says %+v", row)
			}
			swept, err := store.Sweep(t.Context(), ledger.SweepRequest{Limit: 10})
			if err != nil || len(swept.Touched) != 1 || len(swept.Failed) != 0 || swept.NextIn >= 0 {
				t.Errorf("Sweep = %+v, %v; want one bucket touched and nothing due", swept, err)
			}
			raise, err := store.Raise(t.Context(), owner.Cluster, "raise-1")
			if err != nil {
				t.Fatal(err)
			}
			if raise.State != ledger.RaiseFailed || raise.Reason != ledger.ReasonLimitChanged || !raise.ReviewRequired {
				t.Errorf("the raise is %s/%s, review %v; want failed/LimitChanged with review", raise.State, raise.Reason, raise.ReviewRequired)
			}
			if limit := do(t, store, ledger.Inspect{Key: bucketKey}).Snapshot.Limit; limit != c.limit {
				t.Errorf("the limit is %d, want %d", limit, c.limit)
			}
		})
	}
}

// Goal: what does not name the limit is no change of it, and the ledger's own
// writes are not taken for another hand's.
func TestLedgerIsNotAnotherHand(t *testing.T) {
	d := newDatabase(t)
	store := d.store(nil)
	do(t, store, ledger.OpenBucket{Key: bucketKey, Limit: 100})
	do(t, store, ledger.SetLimit{Key: bucketKey, ExpectedLimit: 100, Limit: 100})
	do(t, store, ledger.SetLimit{Key: bucketKey, ExpectedLimit: 100, Limit: 101})
	do(t, store, ledger.Reserve{Key: bucketKey, RequestKey: "1", Fingerprint: "f", Tokens: 1})
	d.exec(`UPDATE tokenlease.buckets SET scoped_key_id = 'other'`)
	if n := value[int64](d, `SELECT count(*) FROM tokenlease.audit WHERE event = 'LimitChangedOutsideLedger'`); n != 0 {
		t.Errorf("%d changes count as another hand's, want 0", n)
	}
	if _, err := d.conn.Exec(t.Context(), `UPDATE tokenlease.buckets SET limit_tokens = 1, limit_epoch = limit_epoch - 1`); sqlState(err) != codeEpochBack {
		t.Errorf("setting the epoch back: %v, want %s", err, codeEpochBack)
	}
}

// Goal: evidence cannot be changed, not even by the owner of the tables.
func TestAuditIsAppendOnly(t *testing.T) {
	d := newDatabase(t)
	do(t, d.store(nil), ledger.OpenBucket{Key: bucketKey, Limit: 100})
	for _, sql := range []string{
		`UPDATE tokenlease.audit SET actor = 'x'`,
		`DELETE FROM tokenlease.audit`,
		`TRUNCATE tokenlease.audit`,
	} {
		if _, err := d.conn.Exec(t.Context(), sql); sqlState(err) != codeAppendOnly {
			t.Errorf("%s: %v, want %s", sql, err, codeAppendOnly)
		}
	}
}

// Goal: leases that outlived their bucket's row do not turn up in a new bucket of
// that name. Method: another hand deletes the row only.
func TestLeftoversOfAVanishedRow(t *testing.T) {
	d := newDatabase(t)
	store := d.store(nil)
	owner := testOwner()
	do(t, store, declared(owner, 1, 100))
	reserve := ledger.Reserve{Key: bucketKey, RequestKey: "1", Fingerprint: "f", Tokens: 60}
	before := do(t, store, reserve).Lease
	d.exec(`DELETE FROM tokenlease.buckets`)
	result := ledger.New(store, nil).Do(t.Context(), declared(owner, 1, 100))[0]
	if !ledger.HasCode(result.Err, ledger.CodeBucketRowMissing) {
		t.Fatalf("declaring a vanished bucket = %v, want bucket_row_missing", result.Err)
	}
	do(t, store, ledger.CloseBucket{Key: bucketKey, Owner: owner, Deletion: ledger.DeletionDelete})
	do(t, store, declared(owner, 1, 100))
	after := do(t, store, reserve)
	if after.Lease.ID == before.ID || after.Snapshot.ReservedTokens != 60 || after.Snapshot.LeaseRecords != 1 {
		t.Errorf("the new bucket answers lease %s (before: %s) and %+v", after.Lease.ID, before.ID, after.Snapshot)
	}
}
