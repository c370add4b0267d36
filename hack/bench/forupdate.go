package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// forUpdate is what one would write by hand: each operation is a transaction that
// locks the bucket's row. pgx prepares its statements.
type forUpdate struct {
	pools  map[int32]*pgxpool.Pool
	best   map[load]*pgxpool.Pool
	opened int
}

const forUpdateSchema = `
CREATE TABLE buckets (
	bucket_key text PRIMARY KEY, limit_tokens bigint NOT NULL, used_tokens bigint NOT NULL, reserved_tokens bigint NOT NULL,
	CHECK (used_tokens + reserved_tokens <= limit_tokens)
) WITH (fillfactor = 60);
CREATE TABLE leases (
	bucket_key text NOT NULL, lease_id bigint NOT NULL, request_key text NOT NULL, state text NOT NULL,
	tokens bigint NOT NULL, actual bigint, created_at timestamptz NOT NULL, expires_at timestamptz NOT NULL, settled_at timestamptz,
	PRIMARY KEY (bucket_key, lease_id), UNIQUE (bucket_key, request_key)
) WITH (fillfactor = 60)`

// The sizes of pools that are tried; the best one for a load is taken.
var poolSizes = []int32{8, 16, 32, 64}

func openForUpdate(ctx context.Context, url string) (*forUpdate, error) {
	c := &forUpdate{pools: map[int32]*pgxpool.Pool{}, best: map[load]*pgxpool.Pool{}}
	for _, size := range poolSizes {
		config, err := pgxpool.ParseConfig(url)
		if err != nil {
			return nil, err
		}
		config.MaxConns = size
		if c.pools[size], err = pgxpool.NewWithConfig(ctx, config); err != nil {
			return nil, err
		}
	}
	_, err := c.pools[poolSizes[0]].Exec(ctx, forUpdateSchema)
	return c, err
}

func (c *forUpdate) close() error {
	for _, pool := range c.pools {
		pool.Close()
	}
	return nil
}

func (c *forUpdate) prepare(ctx context.Context, l load, warmUp time.Duration) error {
	for ; c.opened < l.buckets; c.opened++ {
		_, err := c.pools[poolSizes[0]].Exec(ctx, `INSERT INTO buckets VALUES ($1, $2, 0, 0)`, bucketName(c.opened), int64(plenty))
		if err != nil {
			return err
		}
	}
	if c.best[l] == nil {
		return c.findBest(ctx, l, warmUp)
	}
	return nil
}

func (c *forUpdate) measure(ctx context.Context, l load, warmUp, window time.Duration) (sample, error) {
	return spend(ctx, l, warmUp, window, spendForUpdate(c.best[l]))
}

func (c *forUpdate) findBest(ctx context.Context, l load, window time.Duration) error {
	fastest := -1.0
	for _, size := range poolSizes {
		s, err := spend(ctx, l, window/2, window, spendForUpdate(c.pools[size]))
		if err != nil {
			return err
		}
		if s.PerSecond > fastest {
			fastest, c.best[l] = s.PerSecond, c.pools[size]
		}
	}
	fmt.Fprintf(os.Stderr, "bench: %s at %s is fastest with %d connections\n", byHand, l, c.best[l].Config().MaxConns)
	return nil
}

var errNoRoom = errors.New("the bucket has no room")

func spendForUpdate(pool *pgxpool.Pool) spender {
	return func(ctx context.Context, bucket string, n int64) error {
		if err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return reserveForUpdate(ctx, tx, bucket, n) }); err != nil {
			return err
		}
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return commitForUpdate(ctx, tx, bucket, n) })
	}
}

func reserveForUpdate(ctx context.Context, tx pgx.Tx, bucket string, n int64) error {
	var limit, used, reserved int64
	err := tx.QueryRow(ctx, `SELECT limit_tokens, used_tokens, reserved_tokens FROM buckets WHERE bucket_key = $1 FOR UPDATE`,
		bucket).Scan(&limit, &used, &reserved)
	if err != nil {
		return err
	}
	if limit-used-reserved < tokensReserved {
		return errNoRoom
	}
	_, err = tx.Exec(ctx, `INSERT INTO leases VALUES ($1, $2, $3, 'reserved', $4, NULL, clock_timestamp(), clock_timestamp() + interval '1 minute')`,
		bucket, n, fmt.Sprint(n), int64(tokensReserved))
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, `UPDATE buckets SET reserved_tokens = $2 WHERE bucket_key = $1`, bucket, reserved+tokensReserved)
	return err
}

func commitForUpdate(ctx context.Context, tx pgx.Tx, bucket string, n int64) error {
	var used, reserved int64
	err := tx.QueryRow(ctx, `SELECT used_tokens, reserved_tokens FROM buckets WHERE bucket_key = $1 FOR UPDATE`, bucket).Scan(&used, &reserved)
	if err != nil {
		return err
	}
	var tokens int64
	err = tx.QueryRow(ctx, `UPDATE leases SET state = 'committed', actual = $3, settled_at = clock_timestamp()
		WHERE bucket_key = $1 AND lease_id = $2 AND state = 'reserved' RETURNING tokens`, bucket, n, int64(tokensUsed)).Scan(&tokens)
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, `UPDATE buckets SET used_tokens = $2, reserved_tokens = $3 WHERE bucket_key = $1`,
		bucket, used+tokensUsed, reserved-tokens)
	return err
}
