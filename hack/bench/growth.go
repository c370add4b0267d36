package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/jackc/pgx/v5"

	"github.com/token-lease/operator/hack/devenv/postgres"
	"github.com/token-lease/operator/internal/ledger"
	"github.com/token-lease/operator/internal/sweeper"
)

// growth is this ledger with leases that are kept, each number of them in a database
// of its own. Its loads name as many leases as others name buckets.
type growth struct {
	server *postgres.Server
	sizes  map[int]*ledgerContender
	// purged has the leases purged meanwhile, as if most of them were older than what is
	// kept.
	purged bool
}

const retainWeek = `UPDATE tokenlease.buckets SET retention_ms = 7 * 86400000`

// noCounts is a sweeper.PurgeObserver.
type noCounts struct{}

func (noCounts) ObservePurge(int64, int64) {}

// fill makes settled leases as they are after a month of use.
const fill = `
INSERT INTO tokenlease.leases (
	bucket_key, lease_id, request_hash, fingerprint_hash, state,
	reserved_tokens, actual_tokens, ttl_ms, created_at, expires_at, settled_at, refused_commits)
SELECT $1, 'mfyz' || lpad(n::text, 4, '0') || '.' || substr(encode(sha256(n::text::bytea), 'base64'), 1, 43),
	sha256((n || 'request')::bytea), sha256((n || 'fingerprint')::bytea), 'committed',
	10, 7, 60000, at, at + interval '1 minute', at + interval '1 second', 0
FROM generate_series(1, $2::bigint) AS n,
LATERAL (SELECT now() - interval '30 days' + n * (interval '29 days' / $2::bigint) AS at) AS t`

// empty takes away what the last measurement has left.
const empty = `
TRUNCATE tokenlease.leases`

const settle = `
UPDATE tokenlease.buckets SET reserved_tokens = 0, lease_records = $1::bigint, used_tokens = 7 * $1::bigint`

func (g *growth) prepare(ctx context.Context, l load, _ time.Duration) error {
	kept := l.buckets
	database := fmt.Sprint("bench_growth_", kept)
	if g.purged {
		database = fmt.Sprint("bench_purged_", kept)
	}
	c := g.sizes[kept]
	if c == nil {
		err := g.server.CreateDatabase(ctx, database)
		if err != nil {
			return err
		}
		if c, err = openLedger(ctx, g.server.URL(database)); err != nil {
			return err
		}
		g.sizes[kept] = c
		if _, err := c.ledger.OpenBucket(ctx, ledger.OpenBucket{Key: bucketName(0), Limit: plenty}); err != nil {
			return err
		}
	}
	conn, err := pgx.Connect(ctx, g.server.URL(database))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(ctx) }()
	if _, err := conn.Exec(ctx, empty); err != nil {
		return err
	}
	if kept > 0 {
		if _, err := conn.Exec(ctx, fill, bucketName(0), kept); err != nil {
			return err
		}
	}
	if _, err := conn.Exec(ctx, settle, kept); err != nil {
		return err
	}
	if g.purged {
		if _, err := conn.Exec(ctx, retainWeek); err != nil {
			return err
		}
	}
	_, err = conn.Exec(ctx, `VACUUM ANALYZE`)
	return err
}

func (g *growth) measure(ctx context.Context, l load, warmUp, window time.Duration) (sample, error) {
	c := g.sizes[l.buckets]
	if g.purged {
		purging, cancel := context.WithCancel(ctx)
		var done sync.WaitGroup
		done.Go(func() { sweeper.NewPurger(c.ledger, noCounts{}, logr.Discard()).Run(purging) })
		defer done.Wait()
		defer cancel()
	}
	return c.measure(ctx, load{1, l.callers}, warmUp, window)
}

func (g *growth) close() error {
	var errs []error
	for _, c := range g.sizes {
		errs = append(errs, c.close())
	}
	return errors.Join(errs...)
}
