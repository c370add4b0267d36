package main

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/token-lease/operator/internal/ledger/postgres"
)

// raw writes the rows that the ledger writes and decides nothing: on one connection,
// prepared, one round trip a transaction, half of the operations making leases and
// half settling those of the transaction before. It is what the ledger could reach
// at the same batch size if its reads and its rules took no time.
type raw struct {
	conn  *pgx.Conn
	batch int
	// lookUps has each transaction begin with what a ledger cannot leave out that
	// recognises repetitions: it locks the bucket, reads the clock, and looks for the
	// lease of each request.
	lookUps bool
	made    [][]byte
}

const rawSchema = `
CREATE SCHEMA raw;
CREATE TABLE raw.buckets (LIKE tokenlease.buckets INCLUDING ALL) WITH (fillfactor = 60);
CREATE TABLE raw.leases (LIKE tokenlease.leases INCLUDING ALL) WITH (fillfactor = 60);
INSERT INTO raw.buckets (bucket_key, limit_tokens, used_tokens, reserved_tokens, declared_generation,
	default_ttl_ms, max_ttl_ms, max_records, raise_max_limit_tokens, raise_max_duration_ms,
	limit_epoch, lease_records, audit_sequence, revision, created_at, updated_at)
VALUES ('bench/0000', 1000000000, 0, 0, 0, 60000, 3600000, 0, 0, 0, 0, 0, 0, 1, now(), now())`

const (
	rawLock   = `SELECT * FROM raw.buckets WHERE bucket_key = 'bench/0000' FOR UPDATE`
	rawClock  = `SELECT clock_timestamp()`
	rawLookUp = `SELECT found.* FROM unnest($1::bytea[]) AS asked (request_hash)
CROSS JOIN LATERAL (SELECT * FROM raw.leases AS l
	WHERE l.bucket_key = 'bench/0000' AND l.request_hash = asked.request_hash OFFSET 0) AS found`
	rawBucket = `UPDATE raw.buckets SET used_tokens = used_tokens + 1, lease_records = lease_records + 1,
	revision = revision + 1, updated_at = clock_timestamp() WHERE bucket_key = 'bench/0000'`
	rawInsert = `INSERT INTO raw.leases (bucket_key, lease_id, request_hash, fingerprint_hash, state,
	reserved_tokens, ttl_ms, created_at, expires_at)
SELECT * FROM unnest($1::text[], $2::text[], $3::bytea[], $4::bytea[], $5::text[],
	$6::bigint[], $7::bigint[], $8::timestamptz[], $9::timestamptz[])`
	rawSettle = `UPDATE raw.leases AS l SET state = 'committed', actual_tokens = 7, settled_at = new.settled_at
FROM unnest($1::text[], $2::bytea[], $3::timestamptz[]) AS new (bucket_key, request_hash, settled_at)
WHERE l.bucket_key = new.bucket_key AND l.request_hash = new.request_hash`
)

func openRaw(ctx context.Context, url string, batch int, lookUps bool) (*raw, error) {
	if _, err := postgres.Migrate(ctx, url); err != nil {
		return nil, err
	}
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return nil, err
	}
	c := &raw{conn: conn, batch: max(2, batch/2*2), lookUps: lookUps}
	if _, err := conn.Exec(ctx, rawSchema); err != nil {
		return nil, err
	}
	// As the ledger has it: rows are looked up through an index.
	_, err = conn.Exec(ctx, `SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off;
		SET plan_cache_mode = force_generic_plan; SET jit = off`)
	return c, err
}

func (c *raw) prepare(context.Context, load, time.Duration) error { return nil }

func (c *raw) close() error { return c.conn.Close(context.Background()) }

func (c *raw) measure(ctx context.Context, _ load, warmUp, window time.Duration) (sample, error) {
	// Leases of an earlier measurement have expired.
	c.made = nil
	started := time.Now()
	begin, end := started.Add(warmUp), started.Add(warmUp+window)
	var seen tally
	for asked := time.Now(); !asked.After(end); asked = time.Now() {
		n, err := c.write(ctx)
		if err != nil {
			return sample{}, err
		}
		seen.add(int64(n), asked, time.Now(), begin, end)
	}
	return seen.sample(window), nil
}

// write is one transaction.
func (c *raw) write(ctx context.Context) (operations int, err error) {
	made := c.batch / 2
	now := time.Now()
	expires := now.Add(time.Minute)
	keys, ids, states := make([]string, made), make([]string, made), make([]string, made)
	hashes := make([][]byte, made)
	tokens, ttls := make([]int64, made), make([]int64, made)
	created, expiring := make([]time.Time, made), make([]time.Time, made)
	for i := range made {
		var seed [8]byte
		binary.LittleEndian.PutUint64(seed[:], uint64(sequence.Add(1)))
		hash := sha256.Sum256(seed[:])
		keys[i], states[i], hashes[i] = "bench/0000", "reserved", hash[:]
		ids[i] = strconv.FormatInt(now.UnixMilli(), 36) + "." + base64.RawURLEncoding.EncodeToString(hash[:])
		tokens[i], ttls[i], created[i], expiring[i] = tokensReserved, 60_000, now, expires
	}
	batch := &pgx.Batch{}
	batch.Queue(`BEGIN`)
	if c.lookUps {
		batch.Queue(rawLock)
		batch.Queue(rawClock)
		batch.Queue(rawLookUp, slices.Concat(hashes, c.made))
		// The writes depend on what is found.
		if err := c.conn.SendBatch(ctx, batch).Close(); err != nil {
			return 0, err
		}
		batch = &pgx.Batch{}
	}
	batch.Queue(rawBucket)
	batch.Queue(rawInsert, keys, ids, hashes, hashes, states, tokens, ttls, created, expiring)
	if len(c.made) > 0 {
		batch.Queue(rawSettle, keys, c.made, created)
	}
	batch.Queue(`COMMIT`)
	operations = made + len(c.made)
	c.made = hashes
	return operations, c.conn.SendBatch(ctx, batch).Close()
}
