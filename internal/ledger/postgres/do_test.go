package postgres

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/token-lease/operator/internal/ledger"
)

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
		do(t, stores[0], ledger.Release{Key: bucketKey, LeaseID: value[string](d, `SELECT lease_id FROM tokenlease.leases WHERE state = 'reserved'`)})
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
