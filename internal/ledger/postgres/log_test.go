package postgres

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/token-lease/operator/hack/devenv/postgres/postgrestest"
	"github.com/token-lease/operator/internal/ledger"
)

// Goal: an answer that rests on the absence of a row waits for the log like any
// other, and a ledger whose COMMITs are never confirmed does not count as writable.
// Method: a bucket is deleted; then a synchronous standby is asked for that never
// comes, and the deletion is repeated.
func TestNoAnswerBeforeTheLog(t *testing.T) {
	server := postgrestest.Own(t)
	d := &database{t: t, url: postgrestest.NewDatabaseOn(t, server)}
	if _, err := Migrate(t.Context(), d.url); err != nil {
		t.Fatal(err)
	}
	d.conn = d.connect()
	direct := d.store(nil)
	owner := testOwner()
	do(t, direct, declared(owner, 1, 100))
	request := ledger.CloseBucket{Key: bucketKey, Owner: owner, Deletion: ledger.DeletionDelete}
	do(t, direct, request)
	d.loseStandby()
	store := d.store(func(o *Options) {
		o.LockTimeout, o.StatementTimeout = 100*time.Millisecond, 100*time.Millisecond
		o.CallTimeout = 3 * time.Second
	})
	if result := ledger.New(store, nil).Do(t.Context(), request)[0]; !ledger.HasCode(result.Err, ledger.CodeOutcomeUnknown) {
		t.Errorf("CloseBucket = %+v, want outcome_unknown", result)
	}
	if err := store.Writable(t.Context()); !ledger.HasCode(err, ledger.CodeUnavailable) {
		t.Errorf("Writable = %v, want ledger_unavailable", err)
	}
	// A sweep that finds nothing due rests on nothing.
	if _, err := direct.Sweep(t.Context(), ledger.SweepRequest{Limit: 10}); err != nil {
		t.Errorf("Sweep: %v", err)
	}
	d.exec(`ALTER SYSTEM RESET synchronous_standby_names`)
	d.exec(`SELECT pg_reload_conf()`)
	eventually(t, "the answer once no standby is asked for", func() bool {
		return ledger.New(direct, nil).Do(t.Context(), request)[0].Err == nil
	})
}

// Goal: what the server refuses whoever else is at work is not asked for again and
// again, and what others may change is.
func TestAttempts(t *testing.T) {
	store := &Store{}
	for _, c := range []struct {
		code, constraint string
		want             int
	}{
		{codeConditionFailed, "", singleAttempts},
		{codeDeadlock, "", singleAttempts},
		{codeUniqueViolation, "buckets_pkey", singleAttempts},
		{codeUniqueViolation, "approvals_pkey", singleAttempts},
		{codeUniqueViolation, "audit_pkey", singleAttempts},
		{codeUniqueViolation, "leases_request_key", doomedAttempts},
		{codeUniqueViolation, "operations_pkey", doomedAttempts},
		{"23514", "buckets_used_range", doomedAttempts},
		{"22003", "", doomedAttempts},
		{codeQueryCanceled, "", 1},
	} {
		attempts := 0
		refused := &pgconn.PgError{Code: c.code, ConstraintName: c.constraint}
		err := store.attempt(t.Context(), singleAttempts, nil, func() error {
			attempts++
			return &failure{certainty: judge(refused, true), err: refused}
		})
		if err == nil || attempts != c.want {
			t.Errorf("%s %s: %d attempts, want %d", c.code, c.constraint, attempts, c.want)
		}
	}
}
