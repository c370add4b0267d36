package postgres

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	devenv "github.com/token-lease/operator/hack/devenv/postgres"
	"github.com/token-lease/operator/hack/devenv/postgres/postgrestest"
	"github.com/token-lease/operator/internal/ledger"
)

const (
	benchConnections = 32
	benchLimit       = 1 << 50
)

// spender reserves some tokens of a bucket and then commits them, durably. n is
// unique.
type spender func(ctx context.Context, bucket string, n int64) error

// BenchmarkReserveCommit measures reserve and commit, beside the code that one
// would write by hand, in one run: absolute figures depend on the machine, their
// ratio hardly does.
func BenchmarkReserveCommit(b *testing.B) {
	url := durableDatabase(b)
	for _, load := range []struct {
		name             string
		buckets, callers int
	}{
		{"buckets=1/callers=1", 1, 1},
		{"buckets=1/callers=32", 1, 32},
		{"buckets=1000/callers=32", 1000, 32},
	} {
		for _, way := range []struct {
			name string
			open func(*testing.B, string, int) spender
		}{
			{"ledger", ledgerSpender}, {"by-hand", handWrittenSpender},
		} {
			b.Run(load.name+"/"+way.name, func(b *testing.B) {
				spend := way.open(b, url, load.buckets)
				var next atomic.Int64
				var callers sync.WaitGroup
				b.ResetTimer()
				for range load.callers {
					callers.Go(func() {
						for {
							n := next.Add(1)
							if n > int64(b.N) {
								return
							}
							if err := spend(context.Background(), benchBucket(int(n)%load.buckets), runs.Add(1)); err != nil {
								b.Error(err)
								return
							}
						}
					})
				}
				callers.Wait()
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "pairs/s")
			})
		}
	}
}

// runs makes request keys unique across the rounds of a benchmark.
var runs atomic.Int64

func benchBucket(i int) string { return fmt.Sprintf("bench/%04d", i) }

// durableDatabase makes a database on a server that writes to the disk: figures
// without fsync would say nothing.
func durableDatabase(b *testing.B) string {
	b.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	server, err := devenv.Start(ctx, devenv.Options{Own: true, Log: os.Stderr})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
		defer cancel()
		if err := server.Stop(ctx); err != nil {
			b.Error(err)
		}
	})
	url := postgrestest.NewDatabaseOn(b, server)
	if _, err := Migrate(b.Context(), url); err != nil {
		b.Fatal(err)
	}
	return url
}

func ledgerSpender(b *testing.B, url string, buckets int) spender {
	b.Helper()
	store, err := Open(Options{
		ConnString:     func(context.Context) (string, error) { return url, nil },
		Worker:         "bench",
		MaxConnections: benchConnections,
	})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(store.Close)
	l := ledger.New(store, nil)
	var requests []ledger.Request
	for i := range buckets {
		requests = append(requests, ledger.OpenBucket{Key: benchBucket(i), Limit: benchLimit})
	}
	for _, result := range l.Do(b.Context(), requests...) {
		if result.Err != nil {
			b.Fatal(result.Err)
		}
	}
	return func(ctx context.Context, bucket string, n int64) error {
		reserved, err := l.Reserve(ctx, ledger.Reserve{Key: bucket, RequestKey: fmt.Sprint(n), Fingerprint: "f", Tokens: 10})
		if err != nil {
			return err
		}
		_, err = l.Commit(ctx, ledger.Commit{Key: bucket, LeaseID: reserved.Lease.ID, ActualTokens: 7})
		return err
	}
}

const handWrittenSchema = `
CREATE TABLE IF NOT EXISTS public.hand_buckets (
	bucket_key text PRIMARY KEY, limit_tokens bigint NOT NULL, used bigint NOT NULL, reserved bigint NOT NULL);
CREATE TABLE IF NOT EXISTS public.hand_leases (
	bucket_key text, lease_id bigint, tokens bigint NOT NULL, actual bigint, created_at timestamptz NOT NULL,
	PRIMARY KEY (bucket_key, lease_id))`

// handWrittenSpender is what one writes without a ledger: lock, look, change. It
// knows no raise, no expiry, no idempotency, no audit.
func handWrittenSpender(b *testing.B, url string, buckets int) spender {
	b.Helper()
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		b.Fatal(err)
	}
	config.MaxConns = benchConnections
	pool, err := pgxpool.NewWithConfig(b.Context(), config)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(pool.Close)
	if _, err := pool.Exec(b.Context(), handWrittenSchema); err != nil {
		b.Fatal(err)
	}
	for i := range buckets {
		if _, err := pool.Exec(b.Context(), `INSERT INTO hand_buckets VALUES ($1, $2, 0, 0) ON CONFLICT DO NOTHING`, benchBucket(i), benchLimit); err != nil {
			b.Fatal(err)
		}
	}
	return func(ctx context.Context, bucket string, n int64) error {
		err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			var limit, used, reserved int64
			err := tx.QueryRow(ctx, `SELECT limit_tokens, used, reserved FROM hand_buckets WHERE bucket_key = $1 FOR UPDATE`, bucket).
				Scan(&limit, &used, &reserved)
			if err != nil || limit-used-reserved < 10 {
				return errors.Join(err, ctx.Err())
			}
			if _, err := tx.Exec(ctx, `INSERT INTO hand_leases VALUES ($1, $2, 10, NULL, clock_timestamp())`, bucket, n); err != nil {
				return err
			}
			_, err = tx.Exec(ctx, `UPDATE hand_buckets SET reserved = reserved + 10 WHERE bucket_key = $1`, bucket)
			return err
		})
		if err != nil {
			return err
		}
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			var used int64
			err := tx.QueryRow(ctx, `SELECT used FROM hand_buckets WHERE bucket_key = $1 FOR UPDATE`, bucket).Scan(&used)
			if err != nil {
				return err
			}
			if _, err := tx.Exec(ctx, `UPDATE hand_leases SET actual = 7 WHERE bucket_key = $1 AND lease_id = $2`, bucket, n); err != nil {
				return err
			}
			_, err = tx.Exec(ctx, `UPDATE hand_buckets SET used = used + 7, reserved = reserved - 10 WHERE bucket_key = $1`, bucket)
			return err
		})
	}
}
