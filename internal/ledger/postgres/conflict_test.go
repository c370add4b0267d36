package postgres

import (
	"context"
	"testing"
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

// Goal: another payload under a request key that is in flight is a conflict, not a
// second lease and not the first one's answer. Method: another hand holds the bucket;
// two reservations with one key stand behind it, in one process or in two; then it
// lets go.
func TestKeyInFlightWithAnotherPayload(t *testing.T) {
	for name, processes := range map[string]int{"one process": 1, "two processes": 2} {
		t.Run(name, func(t *testing.T) {
			d := newDatabase(t)
			var stores []*Store
			for range processes {
				stores = append(stores, d.store(func(o *Options) { o.LockTimeout, o.StatementTimeout = testTimeout, testTimeout }))
			}
			first, second := stores[0], stores[processes-1]
			do(t, first, ledger.OpenBucket{Key: bucketKey, Limit: 100})
			request := ledger.Reserve{Key: bucketKey, RequestKey: "k", Fingerprint: "f", Tokens: 10}
			other := request
			other.Tokens = 20
			d.exec(`BEGIN`)
			d.exec(`SELECT FROM tokenlease.buckets FOR UPDATE`)
			ask := func(store *Store, request ledger.Request) <-chan ledger.Result {
				answered := make(chan ledger.Result, 1)
				go func() { answered <- ledger.New(store, nil).Do(context.Background(), request)[0] }()
				return answered
			}
			ofFirst := ask(first, request)
			d.awaitLockWaits(1)
			ofSecond := ask(second, other)
			if processes == 1 {
				eventually(t, "the second one standing in line", func() bool { return second.engine.inLine(bucketKey) == 1 })
			} else {
				d.awaitLockWaits(2)
			}
			d.exec(`ROLLBACK`)
			won, lost := <-ofFirst, <-ofSecond
			if codeOf(won) != "" {
				// Who waits for a lock has no right to a place in line.
				request, other, won, lost = other, request, lost, won
			}
			if codeOf(won) != "" || codeOf(lost) != ledger.CodeIdempotencyConflict {
				t.Fatalf("they were answered %q and %q, want success and idempotency_conflict", codeOf(won), codeOf(lost))
			}
			d.wantReplays(stores, request, other, won.Lease)
			do(t, first, ledger.Commit{Key: bucketKey, LeaseID: won.Lease.ID, ActualTokens: 5})
			won.Lease.State = ledger.LeaseCommitted
			d.wantReplays(stores, request, other, won.Lease)
			d.wantCounts(5, 0)
			d.wantInvariants()
		})
	}
}

// wantReplays repeats a reservation that has made a lease: as it was, with another
// payload, and with other lifetimes, of which only the bucket's default is the same.
func (d *database) wantReplays(stores []*Store, request, other ledger.Reserve, lease *ledger.Lease) {
	d.t.Helper()
	longer, spelledOut, anotherPrint := request, request, request
	longer.TTL = ledger.DefaultSettings().DefaultTTL + time.Millisecond
	spelledOut.TTL = ledger.DefaultSettings().DefaultTTL
	anotherPrint.Fingerprint = "g"
	for _, store := range stores {
		before := do(d.t, store, ledger.Inspect{Key: bucketKey}).Snapshot
		for _, same := range []ledger.Reserve{request, spelledOut} {
			if got := do(d.t, store, same); got.Lease.ID != lease.ID || got.Lease.State != lease.State ||
				got.Lease.ReservedTokens != request.Tokens || got.Snapshot.Revision != before.Revision {
				d.t.Errorf("%+v is answered with %+v at revision %d; want lease %s, %s, at %d",
					same, got.Lease, got.Snapshot.Revision, lease.ID, lease.State, before.Revision)
			}
		}
		for _, different := range []ledger.Reserve{other, longer, anotherPrint} {
			if got := codeOf(ledger.New(store, nil).Do(d.t.Context(), different)[0]); got != ledger.CodeIdempotencyConflict {
				d.t.Errorf("%+v is answered %q, want idempotency_conflict", different, got)
			}
		}
	}
	if n := value[int](d, `SELECT count(*) FROM tokenlease.leases`); n != 1 {
		d.t.Errorf("one request key has made %d leases", n)
	}
}
