package postgres

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/token-lease/operator/internal/ledger"
)

// Goal: a process that stops between its decision and its write cannot act late.
// Method: a reservation is decided while a raise is active; before its write
// reaches the server, the clock passes the raise's expiry.
func TestDecidedTooLongAgo(t *testing.T) {
	d := newDatabase(t)
	d.holdClock(start)
	owner := testOwner()
	direct := d.store(nil)
	do(t, direct, declared(owner, 1, 100))
	do(t, direct, raised("raise-1", owner, 100, 300, time.Minute, &start))

	p := newProxy(d)
	store := d.store(func(o *Options) { o.ConnString = func(context.Context) (string, error) { return p.url, nil } })
	stopped := 0
	p.hook(func(piece []byte) verdict {
		if bytes.Contains(piece, []byte("UPDATE tokenlease.buckets")) {
			if stopped++; stopped == 1 {
				d.setClock(start.Add(time.Minute))
			}
		}
		return forward
	}, nil)
	results := ledger.New(store, nil).Do(t.Context(), ledger.Reserve{Key: bucketKey, RequestKey: "1", Fingerprint: "f", Tokens: 200})
	if !ledger.HasCode(results[0].Err, ledger.CodeBudgetExceeded) {
		t.Errorf("Reserve = %v, want budget_exceeded: the raise is over", results[0].Err)
	}
	if stopped != 2 {
		t.Errorf("the bucket was written %d times, want 2: once in vain", stopped)
	}
	bucket := do(t, direct, ledger.Inspect{Key: bucketKey}).Snapshot
	if bucket.Limit != 100 || bucket.ReservedTokens != 0 {
		t.Errorf("the bucket is %+v, want limit 100 and nothing reserved", bucket)
	}
}

// Goal: a bucket that somebody else holds costs only its own requests. Method:
// another session locks one of three.
func TestLockedBucket(t *testing.T) {
	d := newDatabase(t)
	store := d.store(func(o *Options) { o.LockTimeout = 100 * time.Millisecond })
	keys := []string{"a", "b", "c"}
	for _, key := range keys {
		do(t, store, ledger.OpenBucket{Key: key, Limit: 100})
	}
	d.exec(`BEGIN`)
	d.exec(`SELECT FROM tokenlease.buckets WHERE bucket_key = 'b' FOR UPDATE`)
	var requests []ledger.Request
	for _, key := range keys {
		requests = append(requests, ledger.Reserve{Key: key, RequestKey: "1", Fingerprint: "f", Tokens: 1})
	}
	for i, result := range ledger.New(store, nil).Do(t.Context(), requests...) {
		want := ledger.Code("")
		if keys[i] == "b" {
			want = ledger.CodeUnavailable
		}
		if got := codeOf(result); got != want {
			t.Errorf("bucket %s: %q, want %q", keys[i], got, want)
		}
	}
	d.exec(`ROLLBACK`)
	do(t, store, requests[1])
}

func codeOf(result ledger.Result) ledger.Code {
	if result.Err == nil {
		return ""
	}
	return result.Err.Code
}

// Goal: a row that breaks a constraint costs only its own bucket, in Do and in
// Sweep. Method: a constraint that one bucket can never satisfy again.
func TestPoisonedBucket(t *testing.T) {
	d := newDatabase(t)
	d.holdClock(start)
	store := d.store(nil)
	for _, key := range []string{"a", "b", "c"} {
		do(t, store, ledger.OpenBucket{Key: key, Limit: 100})
	}
	d.exec(`ALTER TABLE tokenlease.buckets ADD CONSTRAINT poison CHECK (bucket_key <> 'b' OR revision = 1)`)
	results := ledger.New(store, nil).Do(t.Context(),
		ledger.Reserve{Key: "a", RequestKey: "1", Fingerprint: "f", Tokens: 1},
		ledger.Reserve{Key: "b", RequestKey: "1", Fingerprint: "f", Tokens: 1},
		ledger.Inspect{Key: "b"},
		ledger.Reserve{Key: "c", RequestKey: "1", Fingerprint: "f", Tokens: 1})
	for i, want := range []ledger.Code{"", ledger.CodeStateCorrupt, "", ""} {
		if got := codeOf(results[i]); got != want {
			t.Errorf("request %d: %q, want %q (%v)", i, got, want, results[i].Err)
		}
	}
	d.exec(`ALTER TABLE tokenlease.buckets DROP CONSTRAINT poison`)
	d.exec(`UPDATE tokenlease.buckets SET next_transition_at = $1`, start)
	d.exec(`ALTER TABLE tokenlease.buckets ADD CONSTRAINT poison CHECK (bucket_key <> 'b' OR next_transition_at < 'infinity')`)
	swept, err := store.Sweep(t.Context(), ledger.SweepRequest{Limit: 10})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(swept.Touched)
	if !slices.Equal(swept.Touched, []string{"a", "c"}) || !ledger.HasCode(swept.Failed["b"], ledger.CodeStateCorrupt) || swept.NextIn != 0 {
		t.Errorf("Sweep = %+v, want a and c touched, b failed, and b still due", swept)
	}
	swept, err = store.Sweep(t.Context(), ledger.SweepRequest{Limit: 10, SetAside: []string{"b"}})
	if err != nil || len(swept.Touched)+len(swept.Failed) != 0 || swept.NextIn >= 0 {
		t.Errorf("Sweep without b = %+v, %v; want nothing", swept, err)
	}
}

// Goal: a backend that is ended from outside costs nothing but a repetition.
// Method: the backend waits for a lock when it is terminated.
func TestTerminatedBackend(t *testing.T) {
	d := newDatabase(t)
	store := d.store(func(o *Options) { o.LockTimeout = testTimeout; o.StatementTimeout = testTimeout })
	do(t, store, ledger.OpenBucket{Key: bucketKey, Limit: 100})
	holder := d.connect()
	tx, err := holder.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `SELECT FROM tokenlease.buckets FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	answered := make(chan ledger.Result, 1)
	go func() {
		answered <- ledger.New(store, nil).Do(context.Background(),
			ledger.Reserve{Key: bucketKey, RequestKey: "1", Fingerprint: "f", Tokens: 5})[0]
	}()
	terminate := `SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
		WHERE datname = current_database() AND application_name = 'tokenlease' AND wait_event_type = 'Lock'`
	eventually(t, "a backend waiting for the lock", func() bool { return value[int64](d, terminate) > 0 })
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if result := <-answered; result.Err != nil || result.Snapshot.ReservedTokens != 5 {
		t.Errorf("Reserve = %+v, want 5 tokens reserved", result)
	}
}

// Goal: a transaction that stands still lets go of its locks by itself, and its
// process finds out. Method: the idle bound passes between the two pipelines.
func TestFrozenTransaction(t *testing.T) {
	d := newDatabase(t)
	do(t, d.store(nil), ledger.OpenBucket{Key: bucketKey, Limit: 100})
	p := newProxy(d)
	store := d.store(func(o *Options) {
		o.ConnString = func(context.Context) (string, error) { return p.url, nil }
		o.IdleInTransactionTimeout = 20 * time.Millisecond
	})
	frozen := false
	p.hook(func(piece []byte) verdict {
		if !frozen && bytes.Contains(piece, []byte("UPDATE tokenlease.buckets")) {
			frozen = true
			eventually(t, "the end of the frozen transaction", func() bool {
				return value[int64](d, `SELECT count(*) FROM pg_stat_activity
					WHERE datname = current_database() AND state = 'idle in transaction'`) == 0
			})
		}
		return forward
	}, nil)
	result := do(t, store, ledger.Reserve{Key: bucketKey, RequestKey: "1", Fingerprint: "f", Tokens: 5})
	if !frozen || result.Snapshot.ReservedTokens != 5 {
		t.Errorf("frozen = %v, %+v; want 5 tokens reserved by a second run", frozen, result.Snapshot)
	}
}

// Goal: the number of statements does not grow with what is overdue. Method: one
// touch with 1 overdue lease and one with 1,000, counted on the wire.
func TestOverdueLeasesAreASet(t *testing.T) {
	d := newDatabase(t)
	d.holdClock(start)
	p := newProxy(d)
	store := d.store(func(o *Options) { o.ConnString = func(context.Context) (string, error) { return p.url, nil } })
	do(t, store, ledger.OpenBucket{Key: bucketKey, Limit: 1_000_000})
	now := start
	measure := func(leases int) int {
		var requests []ledger.Request
		for i := range leases {
			requests = append(requests, ledger.Reserve{
				Key: bucketKey, RequestKey: fmt.Sprint(leases, "/", i), Fingerprint: "f", Tokens: 3,
				TTL: time.Duration(1+i) * time.Millisecond,
			})
		}
		for _, result := range ledger.New(store, nil).Do(t.Context(), requests...) {
			if result.Err != nil {
				t.Fatal(result.Err)
			}
		}
		now = now.Add(time.Hour)
		d.setClock(now)
		count := p.countStatements(t)
		if snapshot := do(t, store, ledger.Inspect{Key: bucketKey}).Snapshot; snapshot.ReservedTokens != 0 {
			t.Errorf("%d tokens stay reserved", snapshot.ReservedTokens)
		}
		statements := count()
		if n := value[int64](d, `SELECT count(*) FROM tokenlease.leases WHERE state = 'reserved'`); n != 0 {
			t.Errorf("%d leases stay reserved", n)
		}
		return statements
	}
	one, thousand := measure(1), measure(1000)
	if one == 0 || one != thousand {
		t.Errorf("%d statements for one overdue lease, %d for a thousand", one, thousand)
	}
}

// Goal: statements are prepared and a session is bounded where a connection leads
// straight to the server.
func TestSessionState(t *testing.T) {
	sessionState(t, newDatabase(t), len(hotStatements), inMilliseconds(longestSharedWait))
}

// sessionState looks at what the session behind a used connection knows.
func sessionState(t *testing.T, d *database, wantPrepared int, wantTimeout string) {
	store := d.store(nil)
	do(t, store, ledger.OpenBucket{Key: bucketKey, Limit: 100})
	do(t, store, ledger.Reserve{Key: bucketKey, RequestKey: "1", Fingerprint: "f", Tokens: 5})
	conn, err := store.pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	var prepared, locks int
	var lockTimeout string
	err = conn.QueryRow(t.Context(), `SELECT
		(SELECT count(*) FROM pg_prepared_statements),
		(SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'),
		current_setting('lock_timeout')`, pgx.QueryExecModeExec).Scan(&prepared, &locks, &lockTimeout)
	if err != nil || prepared != wantPrepared || locks != 0 || lockTimeout != wantTimeout {
		t.Errorf("prepared %d, advisory locks %d, lock_timeout %s, %v; want %d, 0 and %s", prepared, locks, lockTimeout, err, wantPrepared, wantTimeout)
	}
}
