package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/token-lease/operator/internal/ledger"
)

// growthContender is this ledger with leases that are kept. Its loads name as many
// leases as others name buckets.
type growthContender struct {
	*ledgerContender
}

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

func openGrowth(ctx context.Context, url string, kept []int) (*growthContender, error) {
	c, err := openLedger(ctx, url)
	if err != nil {
		return nil, err
	}
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close(ctx) }()
	for _, leases := range kept {
		key := growthBucket(leases)
		if _, err := c.ledger.OpenBucket(ctx, ledger.OpenBucket{Key: key, Limit: plenty}); err != nil {
			return nil, err
		}
		if leases == 0 {
			continue
		}
		if _, err := conn.Exec(ctx, fill, key, leases); err != nil {
			return nil, err
		}
		_, err := conn.Exec(ctx, `UPDATE tokenlease.buckets SET lease_records = $2::bigint, used_tokens = 7 * $2::bigint WHERE bucket_key = $1`, key, leases)
		if err != nil {
			return nil, err
		}
	}
	if _, err := conn.Exec(ctx, `VACUUM ANALYZE`); err != nil {
		return nil, err
	}
	return &growthContender{c}, nil
}

func growthBucket(leases int) string { return fmt.Sprintf("growth/%d", leases) }

func (c *growthContender) measure(ctx context.Context, l load, warmUp, window time.Duration) (sample, error) {
	key := growthBucket(l.buckets)
	return spend(ctx, load{1, l.callers}, warmUp, window, func(ctx context.Context, _ string, n int64) error {
		return c.spend(ctx, key, n)
	})
}
