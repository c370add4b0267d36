package postgres

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

// Goal: a bucket that somebody holds keeps no other raise from ending, and whoever
// asks for it is told, within the bounds of a call, that it can be repeated. Method:
// the bucket that is due first is locked in a session for the whole test, in which 30
// others are restored by passes that take a few each.
func TestHeldBucketBesideDueOnes(t *testing.T) {
	const others, lot = 30, 10
	d := newDatabase(t)
	d.holdClock(start)
	store := d.store(func(o *Options) { o.LockTimeout = 100 * time.Millisecond })
	held := turmoilDeclaration(0).Key
	for i := range others + 1 {
		declaration := turmoilDeclaration(i)
		do(t, store, declaration)
		raise := raised(fmt.Sprintf("raise-%d", i), declaration.Owner, turmoilLimit, 2*turmoilLimit, time.Minute+time.Duration(i)*time.Millisecond, &start)
		raise.Key = declaration.Key
		do(t, store, raise)
	}
	d.setClock(start.Add(hour))
	d.exec(`BEGIN`)
	d.exec(`SELECT FROM tokenlease.buckets WHERE bucket_key = $1 FOR UPDATE`, held)
	touched := 0
	for range others / lot {
		swept, err := store.Sweep(t.Context(), ledger.SweepRequest{Limit: lot})
		if err != nil || len(swept.Touched) != lot || len(swept.Failed) != 0 || swept.NextIn != 0 {
			t.Errorf("Sweep = %+v, %v; want %d touched, none failed, and the held one still due", swept, err, lot)
		}
		touched += len(swept.Touched)
		for _, request := range []ledger.Request{
			ledger.Reserve{Key: held, RequestKey: fmt.Sprint(touched), Fingerprint: "f", Tokens: 1},
			ledger.SetLimit{Key: held, ExpectedLimit: turmoilLimit, Limit: 1},
			ledger.Inspect{Key: held},
		} {
			if got := codeOf(ledger.New(store, nil).Do(t.Context(), request)[0]); got != ledger.CodeUnavailable {
				t.Errorf("%s of the held bucket is answered %q, want ledger_unavailable", request.Operation(), got)
			}
		}
	}
	for what, want := range map[string]int64{
		`state = 'restored' AND reason = 'Expired' AND raise_id <> 'raise-0'`: others,
		`state = 'active' AND raise_id = 'raise-0'`:                           1,
	} {
		if n := value[int64](d, `SELECT count(*) FROM tokenlease.raises WHERE `+what); n != want {
			t.Errorf("%d raises are as in %s, want %d", n, what, want)
		}
	}
	if swept, err := store.Sweep(t.Context(), ledger.SweepRequest{Limit: lot}); err != nil || len(swept.Touched)+len(swept.Failed) != 0 || swept.NextIn != 0 {
		t.Errorf("Sweep = %+v, %v; want nothing touched, and the held one still due", swept, err)
	}
	d.exec(`ROLLBACK`)
	d.wantSweep(store, 1, -1)
	if limit := do(t, store, ledger.Inspect{Key: held}).Snapshot.Limit; limit != turmoilLimit {
		t.Errorf("the held bucket has the limit %d, want %d again", limit, turmoilLimit)
	}
	d.wantInvariants()
}

// sameHash finds two keys of buckets to which PostgreSQL gives the same hash: among so
// many there are dozens of pairs.
const sameHash = `
SELECT array_agg(key ORDER BY key) FROM (
	SELECT 'tenants/stranger-' || n AS key FROM generate_series(1, 400000) AS n) AS keys
GROUP BY hashtext(key) HAVING count(*) = 2
LIMIT 1`

// Goal: buckets of strangers never wait for one another, even if their keys have one
// hash: not when one is locked or only coming to be, and not for good when both are
// used in opposite order. Method: two keys that PostgreSQL's own hash takes for one,
// each kind of lock that a bucket can be under in a session of another hand, and the
// locks that hashes of keys are commonly used for.
func TestKeysWithOneHash(t *testing.T) {
	d := newDatabase(t)
	pair := value[[]string](d, sameHash)
	held, used := pair[0], pair[1]
	t.Logf("%q have the hash %d", pair, value[int32](d, `SELECT hashtext($1)`, held))
	patient := func(o *Options) { o.LockTimeout, o.StatementTimeout = testTimeout, testTimeout }
	stores := []*Store{d.store(patient), d.store(patient)}
	do(t, stores[0], ledger.OpenBucket{Key: "template", Limit: 1})

	// One is coming to be in another session: whoever opens it waits for that. The
	// other one is opened meanwhile.
	d.exec(`BEGIN`)
	d.exec(`SELECT pg_advisory_xact_lock(hashtext($1))`, held)
	d.exec(`SELECT pg_advisory_xact_lock(hashtext($1), 0), pg_advisory_xact_lock(0, hashtext($1))`, held)
	d.exec(`INSERT INTO tokenlease.buckets
		SELECT (jsonb_populate_record(b, jsonb_build_object('bucket_key', $1::text))).* FROM tokenlease.buckets AS b`, held)
	waits := d.waitFor(stores[0], ledger.OpenBucket{Key: held, Limit: 1000})
	d.awaitLockWaits(1)
	for _, store := range stores {
		do(t, store, ledger.OpenBucket{Key: used, Limit: 1000})
	}
	d.exec(`ROLLBACK`)
	<-waits

	// One is locked, and a caller of this process waits for it.
	d.exec(`BEGIN`)
	d.exec(`SELECT FROM tokenlease.buckets WHERE bucket_key = $1 FOR UPDATE`, held)
	waits = d.waitFor(stores[0], ledger.Reserve{Key: held, RequestKey: "waits", Fingerprint: "f", Tokens: 1})
	d.awaitLockWaits(1)
	for i, store := range stores {
		lease := do(t, store, ledger.Reserve{Key: used, RequestKey: fmt.Sprint("beside-", i), Fingerprint: "f", Tokens: 1}).Lease
		do(t, store, ledger.Commit{Key: used, LeaseID: lease.ID, ActualTokens: 1})
	}
	d.exec(`ROLLBACK`)
	<-waits

	// Both are used by two processes in opposite order, in one call and in two.
	const rounds = 100
	var processes sync.WaitGroup
	for p, store := range stores {
		processes.Go(func() {
			for round := range rounds {
				reserve := func(i int) ledger.Request {
					return ledger.Reserve{Key: pair[(i+p)%2], RequestKey: fmt.Sprintf("%d-%d-%d", p, round, i), Fingerprint: "f", Tokens: 1}
				}
				l := ledger.New(store, nil)
				results := l.Do(t.Context(), reserve(0), reserve(1))
				results = append(results, l.Do(t.Context(), reserve(2))[0], l.Do(t.Context(), reserve(3))[0])
				for _, result := range results {
					if result.Err != nil {
						t.Errorf("process %d, round %d: %v", p, round, result.Err)
					}
				}
			}
		})
	}
	processes.Wait()
	for key, want := range map[string]string{held: "0 401", used: "2 400"} {
		if got := value[string](d, `SELECT used_tokens || ' ' || reserved_tokens FROM tokenlease.buckets WHERE bucket_key = $1`, key); got != want {
			t.Errorf("%s has used and reserved %s, want %s", key, got, want)
		}
	}
	for _, store := range stores {
		// A session counts its deadlocks at its end, if not before.
		store.Close()
	}
	if n := value[int64](d, `SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()`); n != 0 {
		t.Errorf("%d deadlocks", n)
	}
	d.wantInvariants()
}

// waitFor has something asked that cannot be answered yet; the returned channel is
// closed once it is.
func (d *database) waitFor(store *Store, request ledger.Request) <-chan struct{} {
	d.t.Helper()
	answered := make(chan struct{})
	d.t.Cleanup(func() { <-answered })
	go func() {
		defer close(answered)
		if result := ledger.New(store, nil).Do(d.t.Context(), request)[0]; result.Err != nil {
			d.t.Errorf("%s: %v", request.Operation(), result.Err)
		}
	}()
	return answered
}
