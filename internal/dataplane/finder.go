package dataplane

import (
	"context"
	"time"

	"golang.org/x/sync/singleflight"
	"k8s.io/apimachinery/pkg/util/cache"

	"github.com/token-lease/operator/internal/ledger"
)

const (
	// keepKey is how long the key of an owner's bucket is relied on. It changes only
	// when a TokenBucket is created anew with another key, and each look costs a query,
	// so a second spares a busy bucket nearly all of them.
	keepKey = time.Second
	maxKeys = 8192
	// findTimeout bounds one look, which others may share.
	findTimeout = 5 * time.Second
)

// finder finds the bucket that a TokenBucket declares.
type finder struct {
	bucketOf func(ctx context.Context, owner ledger.Owner) (string, error)
	cluster  func(ctx context.Context) (string, error)
	keys     *cache.LRUExpireCache
	flights  singleflight.Group
}

func newFinder(bucketOf func(context.Context, ledger.Owner) (string, error), cluster func(context.Context) (string, error), now func() time.Time) *finder {
	return &finder{bucketOf: bucketOf, cluster: cluster, keys: cache.NewLRUExpireCacheWithClock(maxKeys, clock(now))}
}

// key returns the key of the bucket. It refuses with bucket_not_found.
func (f *finder) key(ctx context.Context, namespace, name string) (string, error) {
	object := namespace + "/" + name
	if known, ok := f.keys.Get(object); ok {
		key, _ := known.(string)
		return key, nil
	}
	arrived := f.flights.DoChan(object, func() (any, error) {
		asking, cancel := context.WithTimeout(context.WithoutCancel(ctx), findTimeout)
		defer cancel()
		cluster, err := f.cluster(asking)
		if err != nil {
			return nil, ledger.Errorf(codeReviewUnavailable, "The API server did not say which cluster this is.").WithCause(err)
		}
		key, err := f.bucketOf(asking, ledger.Owner{Cluster: cluster, Namespace: namespace, Name: name})
		if err != nil {
			return nil, err
		}
		f.keys.Add(object, key, keepKey)
		return key, nil
	})
	select {
	case <-ctx.Done():
		return "", ledger.Errorf(ledger.CodeUnavailable, "The ledger did not answer in time.")
	case found := <-arrived:
		key, _ := found.Val.(string)
		return key, found.Err
	}
}

// forget lets the next request look again.
func (f *finder) forget(namespace, name string) { f.keys.Remove(namespace + "/" + name) }
