package postgres

import (
	"context"
	"testing"
	"time"

	"github.com/token-lease/operator/hack/devenv/postgres/postgrestest"
	"github.com/token-lease/operator/internal/ledger"
)

// Goal: a COMMIT that a synchronous standby has not confirmed is not answered as
// done, also when the repetition finds its rows: locking a row writes to the log,
// so that its COMMIT waits as well. Method: a standby that never answers; the first
// attempt is given up, which makes the server keep it locally.
func TestUnconfirmedByStandby(t *testing.T) {
	server := postgrestest.Own(t)
	d := &database{t: t, url: postgrestest.NewDatabaseOn(t, server)}
	if _, err := Migrate(t.Context(), d.url); err != nil {
		t.Fatal(err)
	}
	d.conn = d.connect()
	store := d.store(func(o *Options) {
		o.LockTimeout, o.StatementTimeout = 100*time.Millisecond, 100*time.Millisecond
	})
	do(t, store, ledger.OpenBucket{Key: bucketKey, Limit: 100})
	d.loseStandby()
	request := ledger.SetLimit{Key: bucketKey, ExpectedLimit: 100, Limit: 200, OperationID: "op-1"}
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Second)
	defer cancel()
	result := ledger.New(store, nil).Do(ctx, request)[0]
	if !ledger.HasCode(result.Err, ledger.CodeOutcomeUnknown) {
		t.Errorf("SetLimit = %+v, want outcome_unknown", result)
	}
	d.exec(`ALTER SYSTEM RESET synchronous_standby_names`)
	d.exec(`SELECT pg_reload_conf()`)
	eventually(t, "the answer once no standby is asked for", func() bool {
		result := ledger.New(store, nil).Do(t.Context(), request)[0]
		return result.Err == nil && result.Snapshot.Limit == 200
	})
	if n := value[int64](d, `SELECT count(*) FROM tokenlease.audit WHERE operation_id = 'op-1'`); n != 1 {
		t.Errorf("%d rows tell of SetLimit, want 1", n)
	}
}

// loseStandby has the server wait for a standby that never answers. Returns once it
// does: sessions and the server itself take note of a new setting at times of their
// own.
func (d *database) loseStandby() {
	d.t.Helper()
	d.exec(`ALTER SYSTEM SET synchronous_standby_names = 'nobody'`)
	d.exec(`SELECT pg_reload_conf()`)
	writer := d.connect()
	eventually(d.t, "a COMMIT that waits for the standby", func() bool {
		committed := make(chan error, 1)
		go func() {
			_, err := writer.Exec(d.t.Context(), writeToLog)
			committed <- err
		}()
		for {
			select {
			case err := <-committed:
				if err != nil {
					d.t.Error(err)
				}
				return false
			default:
			}
			pid := writer.PgConn().PID()
			if value[bool](d, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1 AND wait_event = 'SyncRep')`, pid) {
				d.exec(`SELECT pg_cancel_backend($1)`, pid)
				if err := <-committed; err != nil {
					d.t.Error(err)
				}
				return true
			}
		}
	})
}

// Goal: a caller who gives up costs the others nothing. Method: one of two idle
// connections waits for a lock until its caller's deadline; the other one stays.
func TestImpatientCaller(t *testing.T) {
	d := newDatabase(t)
	store := d.store(nil)
	do(t, store, ledger.OpenBucket{Key: bucketKey, Limit: 100})
	first, err := store.pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	second, err := store.pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	first.Release()
	second.Release()
	opened := store.pool.Stat().NewConnsCount()
	d.exec(`BEGIN`)
	d.exec(`SELECT FROM tokenlease.buckets FOR UPDATE`)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	result := ledger.New(store, nil).Do(ctx, ledger.Reserve{Key: bucketKey, RequestKey: "1", Fingerprint: "f", Tokens: 1})[0]
	if !ledger.HasCode(result.Err, ledger.CodeUnavailable) {
		t.Errorf("Reserve = %v, want ledger_unavailable", result.Err)
	}
	d.exec(`ROLLBACK`)
	do(t, store, ledger.Inspect{Key: bucketKey})
	if now := store.pool.Stat().NewConnsCount(); now != opened {
		t.Errorf("%d connections had to be opened anew", now-opened)
	}
}

// Goal: what another hand has locked beside a bucket's row holds up that bucket
// alone. Method: a raise of one of three due buckets is locked in a session.
func TestSweepBesideAnotherHand(t *testing.T) {
	d := newDatabase(t)
	d.holdClock(start)
	store := d.store(nil)
	for _, key := range []string{"a", "b", "c"} {
		owner := testOwner()
		owner.Name = key
		declaration, raise := declared(owner, 1, 100), raised("raise-"+key, owner, 100, 300, time.Minute, &start)
		declaration.Key, raise.Key = key, key
		do(t, store, declaration)
		do(t, store, raise)
	}
	d.setClock(start.Add(time.Minute))
	d.exec(`BEGIN`)
	d.exec(`SELECT FROM tokenlease.raises WHERE raise_id = 'raise-b' FOR UPDATE`)
	swept, err := store.Sweep(t.Context(), ledger.SweepRequest{Limit: 10})
	if err != nil || len(swept.Touched) != 2 || len(swept.Failed) != 1 || !ledger.HasCode(swept.Failed["b"], ledger.CodeUnavailable) {
		t.Errorf("Sweep = %+v, %v; want a and c touched, and b failed", swept, err)
	}
	if n := value[int64](d, `SELECT count(*) FROM tokenlease.buckets WHERE limit_tokens = 100`); n != 2 {
		t.Errorf("%d buckets have their normal limit again, want 2", n)
	}
	d.exec(`ROLLBACK`)
	d.wantSweep(store, 1, -1)
}
