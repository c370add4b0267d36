package postgres

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/token-lease/operator/internal/ledger"
)

// Goal: transactions are bounded, keep the order of a bucket's requests, lock in
// byte order, and hold each request once.
func TestChunks(t *testing.T) {
	var requests []ledger.Request
	for i := range 3000 {
		requests = append(requests, ledger.Inspect{Key: "busy"}, ledger.Inspect{Key: fmt.Sprintf("k%d", i%700)})
	}
	seen := map[int]bool{}
	last := map[string]int{}
	for _, chunk := range chunks(grouped(requests)) {
		count := 0
		for i, g := range chunk {
			if i > 0 && chunk[i-1].key >= g.key {
				t.Errorf("%q is locked before %q", chunk[i-1].key, g.key)
			}
			for j, position := range g.positions {
				if seen[position] || requests[position].Bucket() != g.key || g.requests[j] != requests[position] {
					t.Fatalf("request %d is out of place", position)
				}
				if before, found := last[g.key]; found && before >= position {
					t.Fatalf("request %d comes after %d", position, before)
				}
				seen[position], last[g.key] = true, position
			}
			count += len(g.requests)
		}
		if len(chunk) > maxBuckets || count > maxRequests {
			t.Errorf("a transaction has %d buckets and %d requests", len(chunk), count)
		}
	}
	if len(seen) != len(requests) {
		t.Errorf("%d of %d requests are served", len(seen), len(requests))
	}
}

// Goal: parallel callers of several processes never pass the limit together.
// Method: two stores, forty callers at a barrier, room for one of them.
func TestParallelReservations(t *testing.T) {
	d := newDatabase(t)
	stores := []*Store{d.store(nil), d.store(nil)}
	do(t, stores[0], ledger.OpenBucket{Key: bucketKey, Limit: 1000})
	for round := range 5 {
		var admitted atomic.Int64
		var group sync.WaitGroup
		barrier := make(chan struct{})
		for caller := range 40 {
			group.Go(func() {
				<-barrier
				result := ledger.New(stores[caller%2], nil).Do(context.Background(), ledger.Reserve{
					Key: bucketKey, RequestKey: fmt.Sprint(round, "/", caller), Fingerprint: "f", Tokens: 600,
				})[0]
				switch {
				case result.Err == nil:
					admitted.Add(1)
					do(t, stores[0], ledger.Inspect{Key: bucketKey})
				case !ledger.HasCode(result.Err, ledger.CodeBudgetExceeded):
					t.Errorf("caller %d: %v", caller, result.Err)
				}
			})
		}
		close(barrier)
		group.Wait()
		if n := admitted.Load(); n != 1 {
			t.Fatalf("round %d: %d callers were admitted, want 1", round, n)
		}
		leases, err := stores[0].Leases(t.Context(), bucketKey, ledger.LeasePosition{}, 100)
		if err != nil {
			t.Fatal(err)
		}
		do(t, stores[0], ledger.Release{Key: bucketKey, LeaseID: leases[len(leases)-1].ID})
	}
}

// Goal: callers that open the same new buckets at once all succeed. Method: the
// losers of the race find the row when they run again.
func TestParallelOpening(t *testing.T) {
	d := newDatabase(t)
	store := d.store(nil)
	var group sync.WaitGroup
	for range 16 {
		group.Go(func() {
			for _, result := range ledger.New(store, nil).Do(context.Background(),
				ledger.OpenBucket{Key: "b", Limit: 100}, ledger.OpenBucket{Key: "a", Limit: 100}) {
				if result.Err != nil {
					t.Error(result.Err)
				}
			}
		})
	}
	group.Wait()
	if n := value[int64](d, `SELECT count(*) FROM tokenlease.audit WHERE event = 'BucketOpened'`); n != 2 {
		t.Errorf("%d buckets were opened, want 2", n)
	}
}
