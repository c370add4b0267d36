package importer

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// createFence puts a table of the buckets that have moved beside the package's table,
// and triggers that refuse to write those, whoever does. What the package kept stays
// as it was. The triggers are made once, and an open transaction on the table is
// waited for only shortly, since all its writers would queue behind.
const createFence = `
DO $fence$
DECLARE
	source regclass := to_regclass('token_lease_buckets');
	place text := (SELECT n.nspname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = source);
BEGIN
	-- Two runs at once would both make the same.
	PERFORM pg_advisory_xact_lock(hashtextextended('token_lease_moved', 0));
	IF EXISTS (SELECT FROM pg_trigger WHERE tgrelid = source AND tgname = 'token_lease_not_emptied') THEN
		RETURN;
	END IF;
	PERFORM set_config('lock_timeout', '2s', true);
	EXECUTE format('CREATE TABLE %I.token_lease_moved (
		bucket_key text PRIMARY KEY,
		revision bigint NOT NULL,
		move_id uuid NOT NULL DEFAULT gen_random_uuid(),
		ledger_id text NOT NULL,
		fenced_at timestamptz NOT NULL DEFAULT clock_timestamp(),
		imported_at timestamptz)', place);
	EXECUTE format($function$
		CREATE FUNCTION %I.token_lease_refuse_moved() RETURNS trigger
			LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
		DECLARE
			key text := CASE WHEN TG_OP = 'INSERT' THEN NEW.bucket_key WHEN TG_LEVEL = 'ROW' THEN OLD.bucket_key END;
		BEGIN
			IF EXISTS (SELECT FROM %I.token_lease_moved AS m WHERE m.bucket_key = key OR TG_LEVEL = 'STATEMENT') THEN
				RAISE EXCEPTION 'bucket %% was moved to the ledger of the token-lease operator; write it there', coalesce(key, '(some)');
			END IF;
			RETURN CASE WHEN TG_OP IN ('INSERT', 'UPDATE') THEN NEW ELSE OLD END;
		END
		$body$ $function$, place, place);
	EXECUTE format('CREATE TRIGGER token_lease_moved BEFORE INSERT OR UPDATE OR DELETE ON %s
		FOR EACH ROW EXECUTE FUNCTION %I.token_lease_refuse_moved()', source, place);
	EXECUTE format('CREATE TRIGGER token_lease_not_emptied BEFORE TRUNCATE ON %s
		FOR EACH STATEMENT EXECUTE FUNCTION %I.token_lease_refuse_moved()', source, place);
END
$fence$`

const (
	lockBucket = `SELECT pg_advisory_xact_lock($1::integer, $2::integer)`
	readBucket = `SELECT revision, state::text FROM token_lease_buckets WHERE bucket_key = $1`
	// holdRow waits for whoever writes the row without the lock, and makes a writer
	// fail whose snapshot is older than the fence. It changes nothing.
	holdRow   = `UPDATE token_lease_buckets SET revision = revision WHERE bucket_key = $1`
	putFence  = `INSERT INTO token_lease_moved (bucket_key, revision, ledger_id) VALUES ($1, $2, $3) RETURNING move_id::text`
	takeFence = `DELETE FROM token_lease_moved WHERE bucket_key = $1 AND imported_at IS NULL`
	endMove   = `UPDATE token_lease_moved SET imported_at = clock_timestamp() WHERE bucket_key = $1 AND imported_at IS NULL`
	fenceIs   = `SELECT to_regclass('token_lease_moved') IS NOT NULL`
	readFence = `SELECT move_id::text, revision, ledger_id, fenced_at, imported_at IS NOT NULL FROM token_lease_moved WHERE bucket_key = $1`
	listKeys  = `SELECT bucket_key FROM token_lease_buckets WHERE $1::text IS NULL OR bucket_key > $1
		ORDER BY bucket_key LIMIT $2`
)

// move is what a fence says of a bucket; the zero value means that there is none.
type move struct {
	id       string
	revision int64
	// ledger is the only one that the bucket may be written to; see ledgerID.
	ledger   string
	fencedAt time.Time
	// imported is set once the ledger was known to have the bucket.
	imported bool
}

// querier is a connection or a transaction.
type querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// moveOf reads the fence of a bucket. A dry run may come before there is any.
func moveOf(ctx context.Context, source querier, key string) (m move, err error) {
	var there bool
	if err := source.QueryRow(ctx, fenceIs).Scan(&there); err != nil || !there {
		return m, err
	}
	err = source.QueryRow(ctx, readFence, key).Scan(&m.id, &m.revision, &m.ledger, &m.fencedAt, &m.imported)
	if errors.Is(err, pgx.ErrNoRows) {
		return move{}, nil
	}
	return m, err
}

// advisoryKeys are the two numbers by which the package locks a bucket.
func advisoryKeys(bucket string) (first, second int32) {
	digest := sha256.Sum256([]byte("token-lease\x00" + bucket))
	return int32(binary.BigEndian.Uint32(digest[0:4])), int32(binary.BigEndian.Uint32(digest[4:8])) //nolint:gosec // The bits are meant.
}

// fence reads a bucket under the package's own lock, has check look at it, and keeps
// writers out from then on: those who waited for the lock, too. It names the ledger
// that the bucket goes to, before that can have it. fresh tells that it did so, and
// not an earlier run.
func fence(ctx context.Context, source *pgx.Conn, key, ledgerID string, check func(*document, move) error) (d *document, m move, fresh bool, err error) {
	// Each statement must see what was committed while the one before it waited.
	options := pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}
	err = pgx.BeginTxFunc(ctx, source, options, func(tx pgx.Tx) error {
		first, second := advisoryKeys(key)
		if _, err := tx.Exec(ctx, lockBucket, first, second); err != nil {
			return err
		}
		if m, err = moveOf(ctx, tx, key); err != nil {
			return err
		}
		if m.id == "" {
			if _, err := tx.Exec(ctx, holdRow, key); err != nil {
				return err
			}
		}
		if d, err = read(ctx, tx, key); err != nil {
			return err
		}
		if err := check(d, m); err != nil || m.id != "" {
			return err
		}
		fresh, m.revision, m.ledger = true, d.revision, ledgerID
		return tx.QueryRow(ctx, putFence, key, d.revision, ledgerID).Scan(&m.id)
	})
	return d, m, fresh, err
}

func read(ctx context.Context, source querier, key string) (*document, error) {
	var revision int64
	var state string
	err := source.QueryRow(ctx, readBucket, key).Scan(&revision, &state)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, refuse("the package has no such bucket")
	}
	if err != nil {
		return nil, err
	}
	d, err := decode(key, revision, state)
	if err != nil {
		return nil, refuse("its document is damaged: %w", err)
	}
	return d, nil
}

// check refuses a bucket whose fence does not fit its row or the ledger.
func (m move) check(d *document, ledgerID string) error {
	switch {
	case m.id == "":
		return nil
	case m.revision != d.revision:
		return refuse("it was moved at revision %d, and its row is at %d now: somebody has written it past the fence; decide which one holds",
			m.revision, d.revision)
	case m.imported && m.ledger != ledgerID:
		return refuse("it was moved to another ledger (%s) at %s", m.ledger, m.fencedAt.Format(time.RFC3339))
	case m.imported:
		return refuse("it was moved to this ledger at %s, which does not have it any more: bring it back from a backup of the ledger, "+
			"or, to give up what was spent since, delete its row of token_lease_moved and import again", m.fencedAt.Format(time.RFC3339))
	case m.ledger != ledgerID:
		return refuse("its move to another ledger (%s; this one is %s) began at %s and may have come to its end: "+
			"finish it by importing into that ledger; if that one does not have the bucket and never will, delete its row of token_lease_moved, and import here",
			m.ledger, ledgerID, m.fencedAt.Format(time.RFC3339))
	default:
		return nil
	}
}

// hint says how to let the package's writers in again, where a fence stands.
func (m move) hint() string {
	if m.id == "" {
		return ""
	}
	return fmt.Sprintf("; the package's writers have been kept out since %s: if no ledger has taken it over, delete its row of token_lease_moved",
		m.fencedAt.Format(time.RFC3339))
}
