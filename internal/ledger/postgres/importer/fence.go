package importer

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// createFence puts a table of the buckets that have moved beside the package's table,
// and a trigger that refuses to write those. What the package kept stays as it was.
const createFence = `
DO $fence$
DECLARE
	place text := (SELECT n.nspname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
		WHERE c.oid = to_regclass('token_lease_buckets'));
BEGIN
	-- Two runs at once would both replace the function.
	PERFORM pg_advisory_xact_lock(hashtextextended('token_lease_moved', 0));
	EXECUTE format('CREATE TABLE IF NOT EXISTS %I.token_lease_moved (
		bucket_key text PRIMARY KEY, revision bigint NOT NULL, moved_at timestamptz NOT NULL DEFAULT clock_timestamp())', place);
	EXECUTE format($function$
		CREATE OR REPLACE FUNCTION %I.token_lease_refuse_moved() RETURNS trigger
			LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
		DECLARE
			key text := CASE WHEN TG_OP = 'INSERT' THEN NEW.bucket_key ELSE OLD.bucket_key END;
		BEGIN
			IF EXISTS (SELECT FROM %I.token_lease_moved AS m WHERE m.bucket_key = key) THEN
				RAISE EXCEPTION 'bucket %% was moved to the ledger of the token-lease operator; write it there', key;
			END IF;
			RETURN CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
		END
		$body$ $function$, place, place);
	EXECUTE format('CREATE OR REPLACE TRIGGER token_lease_moved BEFORE INSERT OR UPDATE OR DELETE ON %I.token_lease_buckets
		FOR EACH ROW EXECUTE FUNCTION %I.token_lease_refuse_moved()', place, place);
END
$fence$`

const (
	lockBucket = `SELECT pg_advisory_xact_lock($1::integer, $2::integer)`
	readBucket = `SELECT revision, state::text FROM token_lease_buckets WHERE bucket_key = $1`
	// holdRow waits for whoever writes the row without the lock, and makes a writer
	// fail whose snapshot is older than the fence. It changes nothing.
	holdRow = `UPDATE token_lease_buckets SET revision = revision WHERE bucket_key = $1
		AND NOT EXISTS (SELECT FROM token_lease_moved AS m WHERE m.bucket_key = $1)`
	putFence  = `INSERT INTO token_lease_moved (bucket_key, revision) VALUES ($1, $2) ON CONFLICT (bucket_key) DO NOTHING`
	takeFence = `DELETE FROM token_lease_moved WHERE bucket_key = $1`
	listKeys  = `SELECT bucket_key FROM token_lease_buckets WHERE bucket_key > $1 ORDER BY bucket_key LIMIT $2`
)

// advisoryKeys are the two numbers by which the package locks a bucket.
func advisoryKeys(bucket string) (first, second int32) {
	digest := sha256.Sum256([]byte("token-lease\x00" + bucket))
	return int32(binary.BigEndian.Uint32(digest[0:4])), int32(binary.BigEndian.Uint32(digest[4:8])) //nolint:gosec // The bits are meant.
}

// fence reads a bucket under the package's own lock, has check look at it, and keeps
// writers out from then on. Who waited for the lock is refused, too.
func fence(ctx context.Context, source *pgx.Conn, key string, check func(*document) error) (d *document, err error) {
	// Each statement must see what was committed while the one before it waited.
	options := pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}
	err = pgx.BeginTxFunc(ctx, source, options, func(tx pgx.Tx) error {
		first, second := advisoryKeys(key)
		if _, err := tx.Exec(ctx, lockBucket, first, second); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, holdRow, key); err != nil {
			return err
		}
		if d, err = read(ctx, tx, key); err != nil {
			return err
		}
		if err := check(d); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, putFence, key, d.revision)
		return err
	})
	return d, err
}

// querier is a connection or a transaction.
type querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

func read(ctx context.Context, source querier, key string) (*document, error) {
	var revision int64
	var state string
	if err := source.QueryRow(ctx, readBucket, key).Scan(&revision, &state); err != nil {
		return nil, err
	}
	d, err := decode(key, revision, state)
	if err != nil {
		return nil, &refusal{fmt.Errorf("its document is damaged: %w", err)}
	}
	return d, nil
}
