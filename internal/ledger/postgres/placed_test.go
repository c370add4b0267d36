package postgres

import (
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/token-lease/operator/internal/ledger"
)

// lastAudit answers the latest line of evidence.
func lastAudit(t *testing.T, store *Store) ledger.AuditRow {
	t.Helper()
	rows, err := store.Audit(t.Context(), bucketKey, 0, 1000)
	if err != nil || len(rows) == 0 {
		t.Fatalf("Audit = %d rows, %v", len(rows), err)
	}
	return rows[len(rows)-1]
}

const (
	takeBackup    = `CREATE TABLE public.backup AS SELECT * FROM tokenlease.buckets`
	restoreBackup = `INSERT INTO tokenlease.buckets SELECT * FROM public.backup`
)

// Goal: a row that another hand brings back from a backup works again, behind the
// audit that went on without it, and admits nothing under a raise that is over.
// Method: the row is copied during a raise, and brought back an hour after it.
func TestRowFromBackup(t *testing.T) {
	for name, request := range map[string]ledger.Request{
		"reserve":   ledger.Reserve{Key: bucketKey, RequestKey: "1", Fingerprint: "f", Tokens: 100},
		"declare":   declared(testOwner(), 2, 180),
		"set limit": ledger.SetLimit{Key: bucketKey, ExpectedLimit: 100, Limit: 260},
		"close":     ledger.CloseBucket{Key: bucketKey, Owner: testOwner(), Deletion: ledger.DeletionRetain},
		"raise":     raised("raise-2", testOwner(), 100, 300, hour, at(3*hour)),
	} {
		t.Run(name, func(t *testing.T) {
			d := newDatabase(t)
			d.holdClock(start)
			store := d.store(nil)
			do(t, store, declared(testOwner(), 1, 100))
			do(t, store, raised("raise-1", testOwner(), 100, 300, hour, &start))
			d.exec(takeBackup)
			d.setClock(start.Add(2 * hour))
			epoch := do(t, store, ledger.Inspect{Key: bucketKey}).Snapshot.LimitEpoch
			last := lastAudit(t, store).Sequence
			d.exec(`DELETE FROM tokenlease.buckets`)
			d.setClock(start.Add(3 * hour))
			d.exec(`SET application_name = 'psql'`)
			d.exec(restoreBackup)

			row := lastAudit(t, store)
			if row.Event != ledger.AuditBucketInserted || row.Sequence != last+1 || row.Actor != "postgres" || row.Worker != "psql" ||
				*row.EffectiveLimit != 100 || row.LimitEpoch <= epoch || row.OwnerName != testOwner().Name || !row.At.Equal(start.Add(3*hour)) {
				t.Errorf("the audit says %+v", row)
			}
			if result := ledger.New(store, nil).Do(t.Context(), ledger.Reserve{
				Key: bucketKey, RequestKey: "2", Fingerprint: "f", Tokens: 101,
			})[0]; !ledger.HasCode(result.Err, ledger.CodeBudgetExceeded) {
				t.Errorf("reserving under the raise that is over: %+v, want budget_exceeded", result)
			}
			do(t, store, request)
			d.wantInvariants()
		})
	}
}

func at(after time.Duration) *time.Time {
	instant := start.Add(after)
	return &instant
}

// Goal: a row that is brought back while its raise is in force goes on under it,
// and the raise ends in time. Method: the row is gone for a moment.
func TestRowBackDuringItsRaise(t *testing.T) {
	d := newDatabase(t)
	d.holdClock(start)
	store := d.store(nil)
	do(t, store, declared(testOwner(), 1, 100))
	do(t, store, raised("raise-1", testOwner(), 100, 300, hour, &start))
	d.exec(takeBackup)
	d.exec(`DELETE FROM tokenlease.buckets`)
	d.exec(restoreBackup)
	if s := do(t, store, ledger.Inspect{Key: bucketKey}).Snapshot; s.Limit != 300 || s.ActiveRaise == nil {
		t.Errorf("the bucket is %+v, want the raise in force", s)
	}
	d.wantInvariants()
	// Another hand's limit, which the row from the backup does not know of, is newer.
	d.exec(`UPDATE tokenlease.buckets SET limit_tokens = 250`)
	d.exec(`DELETE FROM tokenlease.buckets`)
	d.exec(restoreBackup)
	if s := do(t, store, ledger.Inspect{Key: bucketKey}).Snapshot; s.Limit != 100 || s.ActiveRaise != nil {
		t.Errorf("the bucket is %+v, want the normal limit and no raise", s)
	}
	raise, err := store.Raise(t.Context(), testOwner().Cluster, "raise-1")
	if err != nil || raise.State != ledger.RaiseFailed || raise.Reason != ledger.ReasonLimitChanged {
		t.Errorf("the raise is %+v, %v; want failed/LimitChanged", raise, err)
	}
	d.wantInvariants()
}

// Goal: a row from a backup counts what was spent and reserved since, in the period
// that has begun since, so that nothing is admitted twice and its leases settle.
// Method: the row alone is lost, and brought back without a period, within its period,
// and periods after it.
func TestRowFromBackupBesideItsLeases(t *testing.T) {
	for name, test := range map[string]struct {
		period ledger.PeriodSpec
		later  time.Duration
		used   int64
		rolls  bool
	}{
		"without periods":    {ledger.PeriodSpec{}, 2 * hour, 30, false},
		"in the same period": {ledger.PeriodSpec{Every: ledger.CadenceDay, TimeZone: "Etc/UTC"}, 2 * hour, 30, false},
		"periods later":      {ledger.PeriodSpec{Every: ledger.CadenceHour, TimeZone: "Asia/Kolkata"}, 3 * hour, 20, true},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDatabase(t)
			d.holdClock(start)
			store := d.store(nil)
			declaration := declared(testOwner(), 1, 100)
			declaration.Declaration.Period = test.period
			do(t, store, declaration)
			reserve := func(key string, tokens int64) *ledger.Lease {
				return do(t, store, ledger.Reserve{Key: bucketKey, RequestKey: key, Fingerprint: "f", Tokens: tokens, TTL: hour}).Lease
			}
			first, held := reserve("first", 10), reserve("held", 5)
			d.exec(takeBackup)
			do(t, store, ledger.Commit{Key: bucketKey, LeaseID: first.ID, ActualTokens: 10})
			d.setClock(start.Add(test.later))
			do(t, store, ledger.Commit{Key: bucketKey, LeaseID: reserve("second", 20).ID, ActualTokens: 20})
			open := reserve("open", 7)
			before := do(t, store, ledger.Inspect{Key: bucketKey}).Snapshot
			d.exec(`DELETE FROM tokenlease.buckets`)
			d.setClock(start.Add(test.later + time.Second))
			d.exec(restoreBackup)

			s := do(t, store, ledger.Inspect{Key: bucketKey}).Snapshot
			if s.UsedTokens != test.used || s.ReservedTokens != 7 || s.LeaseRecords != before.LeaseRecords {
				t.Errorf("the bucket reads %+v, it was %+v", s, before)
			}
			if (s.CurrentPeriod == nil) != (before.CurrentPeriod == nil) || s.CurrentPeriod != nil && *s.CurrentPeriod != *before.CurrentPeriod {
				t.Errorf("its period is %+v, it was %+v", s.CurrentPeriod, before.CurrentPeriod)
			}
			if n := value[int64](d, `SELECT count(*) FROM tokenlease.periods`); (n > 0) != test.rolls {
				t.Errorf("%d periods have ended", n)
			}
			do(t, store, ledger.Release{Key: bucketKey, LeaseID: held.ID})
			do(t, store, ledger.Commit{Key: bucketKey, LeaseID: open.ID, ActualTokens: 7})
			d.wantInvariants()
			d.setClock(start.Add(test.later + 100*hour))
			do(t, store, ledger.Inspect{Key: bucketKey})
			d.wantInvariants()
		})
	}
}

// Goal: an INSERT that finds the row leaves nothing behind, and the ledger's own
// rows are not taken for another hand's.
func TestRowIsNotPlacedTwice(t *testing.T) {
	d := newDatabase(t)
	store := d.store(nil)
	do(t, store, ledger.OpenBucket{Key: bucketKey, Limit: 100})
	d.exec(takeBackup)
	d.exec(restoreBackup + ` ON CONFLICT DO NOTHING`)
	if n := value[int64](d, `SELECT count(*) FROM tokenlease.audit WHERE event = 'BucketInsertedOutsideLedger'`); n != 0 {
		t.Errorf("%d rows count as another hand's, want 0", n)
	}
	do(t, store, ledger.SetLimit{Key: bucketKey, ExpectedLimit: 100, Limit: 120})
	d.wantInvariants()
}

// Goal: an audit that is out of step for good is reported as such, not as something
// to be repeated.
func TestAuditOutOfStep(t *testing.T) {
	d := newDatabase(t)
	store := d.store(nil)
	do(t, store, ledger.OpenBucket{Key: bucketKey, Limit: 100})
	d.exec(`UPDATE tokenlease.buckets SET audit_sequence = 0`)
	result := ledger.New(store, nil).Do(t.Context(), ledger.SetLimit{Key: bucketKey, ExpectedLimit: 100, Limit: 120})[0]
	if !ledger.HasCode(result.Err, ledger.CodeStateCorrupt) {
		t.Errorf("SetLimit = %+v, want state_corrupt", result)
	}
}

// Goal: the raise that a bucket points at cannot be removed, also not by the owner
// of the tables, and can be once it has ended.
func TestRaiseInForceCannotBeRemoved(t *testing.T) {
	d := newDatabase(t)
	d.holdClock(start)
	store := d.store(nil)
	do(t, store, declared(testOwner(), 1, 100))
	do(t, store, raised("raise-1", testOwner(), 100, 300, hour, &start))
	const foreignKeyViolation = "23503"
	if _, err := d.conn.Exec(t.Context(), `DELETE FROM tokenlease.raises`); sqlState(err) != foreignKeyViolation {
		t.Errorf("removing the raise in force: %v, want %s", err, foreignKeyViolation)
	}
	d.setClock(start.Add(hour))
	if s := do(t, store, ledger.Inspect{Key: bucketKey}).Snapshot; s.Limit != 100 {
		t.Errorf("the limit is %d, want 100", s.Limit)
	}
	d.exec(`DELETE FROM tokenlease.raises`)
}

// Goal: the schema holds what the rules hold. Method: one statement against each
// constraint, by another hand.
func TestConstraints(t *testing.T) {
	d := newDatabase(t)
	d.holdClock(start)
	store := d.store(nil)
	owner := testOwner()
	do(t, store, declared(owner, 1, 100))
	do(t, store, raised("active", owner, 100, 300, hour, &start))
	do(t, store, raised("pending", owner, 100, 300, hour, at(2*hour)))
	do(t, store, ledger.Reserve{Key: bucketKey, RequestKey: "1", Fingerprint: "f", Tokens: 10})
	second := do(t, store, ledger.Reserve{Key: bucketKey, RequestKey: "2", Fingerprint: "f", Tokens: 10}).Lease
	do(t, store, ledger.Release{Key: bucketKey, LeaseID: second.ID})
	for sql, constraint := range map[string]string{
		`UPDATE tokenlease.raises SET expires_at = starts_at - interval '1 second'`:                                          "raises_window",
		`UPDATE tokenlease.raises SET limit_epoch = 0 WHERE raise_id = 'active'`:                                             "raises_applied",
		`UPDATE tokenlease.raises SET limit_epoch = 7 WHERE raise_id = 'pending'`:                                            "raises_applied",
		`UPDATE tokenlease.raises SET mismatch_since = now() WHERE raise_id = 'active'`:                                      "raises_mismatch",
		`UPDATE tokenlease.raises SET review_required = true WHERE raise_id = 'active'`:                                      "raises_review",
		`UPDATE tokenlease.raises SET current_uid = 'one'`:                                                                   "raises_current_key",
		`UPDATE tokenlease.leases SET settled_at = expires_at WHERE state = 'released'`:                                      "leases_settled_in_time",
		`UPDATE tokenlease.leases SET state = 'expired', settled_at = created_at WHERE state = 'reserved'`:                   "leases_settled_in_time",
		`UPDATE tokenlease.buckets SET active_raise_id = 'nobody'`:                                                           "buckets_active_raise",
		`UPDATE tokenlease.buckets SET used_tokens = 9007199254740991, reserved_tokens = 1`:                                  "buckets_reserved_range",
		`UPDATE tokenlease.raises SET state = 'restoring', activated_at = NULL WHERE raise_id = 'active'`:                    "raises_applied",
		`UPDATE tokenlease.raises SET state = 'failed', review_required = true, ended_at = now() WHERE raise_id = 'pending'`: "raises_review",
	} {
		_, err := d.conn.Exec(t.Context(), sql)
		if found := constraintOf(err); found != constraint {
			t.Errorf("%s: %v, want %s broken", sql, err, constraint)
		}
	}
	d.wantInvariants()
}

func constraintOf(err error) string {
	var reply *pgconn.PgError
	if errors.As(err, &reply) {
		return reply.ConstraintName
	}
	return ""
}

// Goal: what is unique begins with the bucket key, so that a bucket with all its
// rows can live on one shard; approvals, which belong to no bucket, are the one
// exception.
func TestUniqueKeysBeginWithTheBucket(t *testing.T) {
	d := newDatabase(t)
	rows, err := d.conn.Query(t.Context(), `
		SELECT i.indexrelid::regclass::text
		FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indrelid
		JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
		WHERE c.relnamespace = 'tokenlease'::regnamespace AND i.indisunique AND a.attname <> 'bucket_key'
			AND c.relname NOT IN ('approvals', 'schema_version', 'schema_lock')`)
	if err != nil {
		t.Fatal(err)
	}
	found, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || len(found) != 0 {
		t.Errorf("unique without the bucket key first: %v, %v", found, err)
	}
}
