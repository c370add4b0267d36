package sweeper

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"

	"github.com/token-lease/operator/hack/devenv/postgres/postgrestest"
	"github.com/token-lease/operator/internal/ledger"
	"github.com/token-lease/operator/internal/ledger/postgres"
)

// purgeCounts is a PurgeObserver.
type purgeCounts struct{ leases atomic.Int64 }

func (p *purgeCounts) ObservePurge(leases, _ int64) { p.leases.Add(leases) }

// fillOld gives a bucket leases that were settled 30 days ago; each used 7 tokens.
func (c *cluster) fillOld(key string, leases int) {
	c.Helper()
	c.exec(`
		INSERT INTO tokenlease.leases (bucket_key, lease_id, request_hash, fingerprint_hash, state,
			reserved_tokens, actual_tokens, ttl_ms, created_at, expires_at, settled_at)
		SELECT $1, 'old-' || n, sha256(n::text::bytea), sha256(n::text::bytea), 'committed', 10, 7, 60000, at, at + interval '1 minute', at
		FROM generate_series(1, $2) AS n, LATERAL (SELECT now() - interval '30 days' + n * interval '1 second' AS at) AS t`, key, leases)
	c.exec(`UPDATE tokenlease.buckets SET lease_records = lease_records + $2, used_tokens = used_tokens + 7 * $2, retention_ms = 86400000
		WHERE bucket_key = $1`, key, leases)
}

// wantUsage checks that what was used is in the counter, in the usage, and in leases
// and rollups together.
func (c *cluster) wantUsage(store ledger.Store, key string, kept int64) {
	c.Helper()
	used := c.count(`SELECT used_tokens FROM tokenlease.buckets WHERE bucket_key = $1`, key)
	if sum := c.count(`SELECT (SELECT coalesce(sum(actual_tokens), 0) FROM tokenlease.leases WHERE bucket_key = $1 AND state = 'committed')
		+ (SELECT coalesce(sum(used_tokens), 0) FROM tokenlease.rollups WHERE bucket_key = $1)`, key); sum != used {
		c.Errorf("leases and rollups add up to %d, the bucket says %d", sum, used)
	}
	lines, err := store.Usage(context.Background(), ledger.UsageQuery{BucketKey: key, Limit: 1000})
	if err != nil {
		c.Fatal(err)
	}
	var sum int64
	for _, x := range lines {
		sum += x.UsedTokens
	}
	if sum != used {
		c.Errorf("the usage adds up to %d, the bucket says %d", sum, used)
	}
	if records := c.count(`SELECT lease_records FROM tokenlease.buckets WHERE bucket_key = $1`, key); records != kept ||
		records != c.count(`SELECT count(*) FROM tokenlease.leases WHERE bucket_key = $1`, key) {
		c.Errorf("the bucket counts %d leases, want %d", records, kept)
	}
}

// Goal: a bucket with many old leases is purged while callers reserve and commit on it,
// by several replicas whose sessions are killed meanwhile; each lease is counted once,
// and no caller is told anything but that it may ask again.
func TestPurgeBesideTraffic(t *testing.T) {
	const old, callers, key = 6_000, 6, "bucket"
	c := newCluster(t, postgrestest.NewDatabase(t))
	stores := []*postgres.Store{c.store("replica-0", nil), c.store("replica-1", nil)}
	c.do(stores[0], []ledger.Request{ledger.OpenBucket{Key: key, Limit: 1 << 40}})
	c.fillOld(key, old)

	ctx, cancel := context.WithCancel(t.Context())
	var purging, calling sync.WaitGroup
	defer func() {
		cancel()
		calling.Wait()
		purging.Wait()
	}()
	seen := &purgeCounts{}
	for _, store := range stores {
		purger := NewPurger(ledger.New(store, nil), seen, logr.Discard())
		purger.rest = 10 * time.Millisecond
		purging.Go(func() { purger.Run(ctx) })
	}
	var done atomic.Int64
	for caller := range callers {
		calling.Go(func() {
			l := ledger.New(stores[caller%len(stores)], nil)
			for n := 0; ctx.Err() == nil; n++ {
				reserved, err := l.Reserve(t.Context(), ledger.Reserve{Key: key, RequestKey: fmt.Sprint(caller, "/", n), Fingerprint: "f", Tokens: 5})
				if err == nil {
					_, err = l.Commit(t.Context(), ledger.Commit{Key: key, LeaseID: reserved.Lease.ID, ActualTokens: 5})
				}
				switch {
				case err == nil:
					done.Add(1)
				case ledger.HasCode(err, ledger.CodeUnavailable), ledger.HasCode(err, ledger.CodeOutcomeUnknown):
				default:
					t.Errorf("a caller was told: %v", err)
				}
			}
		})
	}
	killed := int64(0)
	deadline := time.Now().Add(waitTimeout)
	for left := int64(old); left > 0; left = c.count(`SELECT count(*) FROM tokenlease.leases WHERE lease_id LIKE 'old-%'`) {
		if time.Now().After(deadline) {
			t.Fatalf("%d old leases are left", left)
		}
		killed += c.count(`SELECT count(pg_terminate_backend(pid)) FROM (
			SELECT pid FROM pg_stat_activity
			WHERE datname = current_database() AND application_name = $1 AND state <> 'idle' ORDER BY random() LIMIT 1) AS one`,
			postgres.DefaultApplicationName)
		time.Sleep(20 * time.Millisecond) // how often trouble comes; what ends the test is the count
	}
	cancel()
	calling.Wait()
	purging.Wait()
	if killed == 0 || done.Load() == 0 {
		t.Errorf("%d sessions were killed, %d callers succeeded", killed, done.Load())
	}
	c.wantUsage(stores[0], key, c.count(`SELECT count(*) FROM tokenlease.leases`))
	if seen.leases.Load() > old {
		t.Errorf("%d leases were said to be purged, there were %d", seen.leases.Load(), old)
	}
}

// Goal: a round finds every bucket that has something old, whatever their number, and
// leaves the others alone; a bucket that somebody holds is left for another time.
func TestPurgeRound(t *testing.T) {
	const buckets = 120
	c := newCluster(t, postgrestest.NewDatabase(t))
	store := c.store("replica-0", nil)
	var open []ledger.Request
	for i := range buckets {
		open = append(open, ledger.OpenBucket{Key: fmt.Sprintf("bucket-%03d", i), Limit: 1 << 40})
	}
	c.do(store, append(open, ledger.OpenBucket{Key: "kept", Limit: 1 << 40}))
	for i := range buckets {
		c.fillOld(fmt.Sprintf("bucket-%03d", i), 2)
	}
	c.fillOld("kept", 3)
	c.exec(`UPDATE tokenlease.buckets SET retention_ms = 0 WHERE bucket_key = 'kept'`)
	c.exec(`BEGIN`)
	c.exec(`SELECT FROM tokenlease.buckets WHERE bucket_key = 'bucket-007' FOR UPDATE`)
	seen := &purgeCounts{}
	purger := NewPurger(ledger.New(store, nil), seen, logr.Discard())
	if err := purger.round(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.exec(`ROLLBACK`)
	if left := c.count(`SELECT count(*) FROM tokenlease.leases`); left != 3+2 || seen.leases.Load() != 2*(buckets-1) {
		t.Errorf("%d leases are left and %d were purged, want those of the held bucket and of the one that keeps them", left, seen.leases.Load())
	}
	if err := purger.round(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.wantUsage(store, "bucket-007", 0)
	c.wantUsage(store, "kept", 3)
}
