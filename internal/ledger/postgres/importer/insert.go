package importer

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/token-lease/operator/internal/ledger"
)

const (
	// ledgerID tells a ledger from others: its database, by name and number, and its
	// server's cluster. A copy that is restored elsewhere is another one; what such a
	// copy has is known by the operation in its audit.
	ledgerID = `
SELECT format('database %s, %s of the PostgreSQL system %s', d.datname, d.oid, s.system_identifier)
FROM pg_database AS d, pg_control_system() AS s WHERE d.datname = current_database()`

	// targetOf answers the clock, whether the ledger knows a key, and by which
	// operation it was imported.
	targetOf = `
SELECT tokenlease.ledger_now(), EXISTS (SELECT FROM tokenlease.buckets WHERE bucket_key = $1)
	OR EXISTS (SELECT FROM tokenlease.audit WHERE bucket_key = $1),
	coalesce((SELECT a.operation_id FROM tokenlease.audit AS a
		WHERE a.bucket_key = $1 AND a.event = $2 ORDER BY a.sequence DESC LIMIT 1), '')`

	// The schema takes the writer for the ledger, which puts the row in its place.
	becomeWriter = `SELECT set_config('tokenlease.writer', 'ledger', true)`

	insertBucket = `
INSERT INTO tokenlease.buckets (
	bucket_key, limit_tokens, used_tokens, reserved_tokens, declared_generation, conflict_policy,
	default_ttl_ms, max_ttl_ms, max_records, raise_mode, raise_max_limit_tokens, raise_max_duration_ms,
	limit_epoch, lease_records, audit_sequence, revision, created_at, updated_at)
VALUES ($1, $2, $3, $4, 0, $5, $6, $7, 0, $8, 0, 0, 0, $9, 1, $10, $11, $12)`

	insertLeases = `
INSERT INTO tokenlease.leases (
	bucket_key, lease_id, request_hash, fingerprint_hash, state, reserved_tokens, actual_tokens,
	ttl_ms, created_at, expires_at, settled_at, imported_at)
SELECT $1::text, l.*, tokenlease.ledger_now()
FROM unnest($2::text[], $3::bytea[], $4::bytea[], $5::text[], $6::bigint[], $7::bigint[],
	$8::bigint[], $9::timestamptz[], $10::timestamptz[], $11::timestamptz[]) AS l`

	insertAudit = `
INSERT INTO tokenlease.audit (
	bucket_key, sequence, event, outcome, operation_id, worker, trigger_operation,
	requested_limit_tokens, effective_limit_tokens, used_tokens, reserved_tokens, limit_epoch, recorded_at)
VALUES ($1, 1, $2, $3, $7, 'import', 'import', $4, $4, $5, $6, 0, tokenlease.ledger_now())`
)

// insert writes a bucket with its leases and its evidence. It belongs to nobody until
// a TokenBucket of the same limit adopts it, and has the settings that the package
// has unless it was told others; a replay without a TTL takes the original's.
func insert(ctx context.Context, tx pgx.Tx, d *document, m move) error {
	if _, err := tx.Exec(ctx, becomeWriter); err != nil {
		return err
	}
	settings := ledger.DefaultSettings()
	_, err := tx.Exec(ctx, insertBucket, d.bucket, d.limit, d.used, d.reserved, string(ledger.ConflictReview),
		settings.DefaultTTL.Milliseconds(), settings.MaxTTL.Milliseconds(), string(ledger.ModeDisabled),
		int64(len(d.leases)), d.revision, instantOf(d.createdAt), instantOf(d.updatedAt))
	if err != nil {
		return err
	}
	if err := insertLeasesOf(ctx, tx, d); err != nil {
		return err
	}
	_, err = tx.Exec(ctx, insertAudit, d.bucket, string(ledger.AuditBucketImported), string(ledger.OutcomeApplied),
		d.limit, d.used, d.reserved, operationOf(m))
	return err
}

// operationOf names the effect of a move.
func operationOf(m move) string { return "import:" + m.id }

// insertLeasesOf writes all leases at once: the package keeps at most some ten
// thousand.
func insertLeasesOf(ctx context.Context, tx pgx.Tx, d *document) error {
	var ids, states []string
	var requests, fingerprints [][]byte
	var reserved, ttls []int64
	var actual []*int64
	var created, expires []time.Time
	var settled []*time.Time
	for _, l := range d.leases {
		ids, states = append(ids, l.id), append(states, string(l.state))
		requests, fingerprints = append(requests, l.requestHash), append(fingerprints, l.fingerprintHash)
		reserved, actual = append(reserved, l.reserved), append(actual, l.actual)
		ttls = append(ttls, l.expiresAt-l.createdAt)
		created, expires = append(created, instantOf(l.createdAt)), append(expires, instantOf(l.expiresAt))
		var at *time.Time
		if l.settledAt != nil {
			instant := instantOf(*l.settledAt)
			at = &instant
		}
		settled = append(settled, at)
	}
	_, err := tx.Exec(ctx, insertLeases, d.bucket, ids, requests, fingerprints, states, reserved, actual, ttls, created, expires, settled)
	return err
}
