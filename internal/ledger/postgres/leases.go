package postgres

import (
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/token-lease/operator/internal/ledger"
)

const leaseColumns = `
	l.bucket_key, l.lease_id, l.request_hash, l.fingerprint_hash, l.state,
	l.reserved_tokens, l.actual_tokens, l.ttl_ms, l.created_at, l.expires_at, l.settled_at,
	l.scoped_key_id, l.raise_id, l.refused_tokens, l.refused_commits`

func scanLease(row pgx.Row) (*ledger.Lease, error) {
	var l ledger.Lease
	err := row.Scan(
		&l.BucketKey, &l.ID, &l.RequestHash, &l.FingerprintHash, into(&l.State),
		&l.ReservedTokens, &l.ActualTokens, milliseconds{&l.TTL},
		instant{&l.CreatedAt}, instant{&l.ExpiresAt}, optionalInstant{&l.SettledAt},
		into(&l.ScopedKeyID), into(&l.RaiseID), &l.RefusedTokens, &l.RefusedCommits)
	return &l, err
}

// The needed keys are joined through LATERAL, which has no other plan than one
// look-up in the index for each key.
const leasesByID = `
SELECT` + leaseColumns + `
FROM unnest($1::text[], $2::text[]) AS needed (bucket_key, lease_id)
CROSS JOIN LATERAL (
	SELECT * FROM tokenlease.leases AS one
	WHERE one.bucket_key = needed.bucket_key AND one.lease_id = needed.lease_id
	OFFSET 0) AS l`

const leasesByRequest = `
SELECT` + leaseColumns + `
FROM unnest($1::text[], $2::text[]) AS needed (bucket_key, request_hash)
CROSS JOIN LATERAL (
	SELECT * FROM tokenlease.leases AS one
	WHERE one.bucket_key = needed.bucket_key AND one.request_hash = needed.request_hash
	OFFSET 0) AS l`

// overdueLeases sums up what is overdue at each bucket's own instant, of those that
// expired first.
const overdueLeases = `
SELECT b.bucket_key, overdue.expires_at, count(*), sum(overdue.reserved_tokens)::bigint
FROM tokenlease.buckets AS b
CROSS JOIN LATERAL (
	SELECT l.expires_at, l.reserved_tokens
	FROM tokenlease.leases AS l
	WHERE l.bucket_key = b.bucket_key
	  AND l.state = 'reserved'
	  AND l.expires_at <= greatest(b.updated_at, (SELECT tokenlease.ledger_now()))
	ORDER BY l.expires_at, l.lease_id
	LIMIT $2::bigint) AS overdue
WHERE b.bucket_key = ANY ($1::text[])
GROUP BY b.bucket_key, overdue.expires_at`

const overdueLeaseIDs = `
SELECT b.bucket_key, overdue.expires_at, overdue.lease_id
FROM tokenlease.buckets AS b
CROSS JOIN LATERAL (
	SELECT l.expires_at, l.lease_id
	FROM tokenlease.leases AS l
	WHERE l.bucket_key = b.bucket_key
	  AND l.state = 'reserved'
	  AND l.expires_at <= greatest(b.updated_at, (SELECT tokenlease.ledger_now()))
	ORDER BY l.expires_at, l.lease_id
	LIMIT $2::bigint) AS overdue
WHERE b.bucket_key = ANY ($1::text[])`

const listLeases = `
SELECT` + leaseColumns + `
FROM tokenlease.leases AS l
WHERE l.bucket_key = $1::text
  AND (l.created_at, l.lease_id) > ($2::timestamptz, $3::text)
ORDER BY l.created_at, l.lease_id
LIMIT $4::bigint`

// expireLeases settles overdue leases of each bucket at its instant, those first
// that expired first and as many as it is allowed: of a pile as many as were
// summed up, otherwise one more, which would be one too many.
const expireLeases = `
WITH written AS (
	UPDATE tokenlease.leases AS l SET state = 'expired', settled_at = overdue.at
	FROM (
		SELECT due.bucket_key, due.at, first.lease_id
		FROM unnest($1::text[], $2::timestamptz[], $3::bigint[]) AS due (bucket_key, at, allowed)
		CROSS JOIN LATERAL (
			SELECT o.lease_id FROM tokenlease.leases AS o
			WHERE o.bucket_key = due.bucket_key AND o.state = 'reserved' AND o.expires_at <= due.at
			ORDER BY o.expires_at, o.lease_id
			LIMIT due.allowed) AS first) AS overdue
	WHERE l.bucket_key = overdue.bucket_key AND l.lease_id = overdue.lease_id
	RETURNING 1)
SELECT tokenlease.require((SELECT count(*) FROM written), $4::bigint, 'leases expired')`

const insertLeases = `
INSERT INTO tokenlease.leases (
	bucket_key, lease_id, request_hash, fingerprint_hash, state,
	reserved_tokens, actual_tokens, ttl_ms, created_at, expires_at, settled_at,
	scoped_key_id, raise_id, refused_tokens, refused_commits)
SELECT * FROM unnest(
	$1::text[], $2::text[], $3::text[], $4::text[], $5::text[],
	$6::bigint[], $7::bigint[], $8::bigint[], $9::timestamptz[], $10::timestamptz[], $11::timestamptz[],
	$12::text[], $13::text[], $14::bigint[], $15::bigint[])`

// updateLeases names the columns that can change after a lease was made.
const updateLeases = `
WITH written AS (
	UPDATE tokenlease.leases AS l SET
		state = new.state, actual_tokens = new.actual_tokens,
		expires_at = new.expires_at, settled_at = new.settled_at,
		refused_tokens = new.refused_tokens, refused_commits = new.refused_commits
	FROM unnest(
		$1::text[], $2::text[], $3::text[], $4::bigint[],
		$5::timestamptz[], $6::timestamptz[], $7::bigint[], $8::bigint[])
		AS new (bucket_key, lease_id, state, actual_tokens, expires_at, settled_at, refused_tokens, refused_commits)
	WHERE l.bucket_key = new.bucket_key AND l.lease_id = new.lease_id
	RETURNING 1)
SELECT tokenlease.require((SELECT count(*) FROM written), cardinality($1::text[]), 'leases updated')`

// deleteLeases removes what a bucket leaves behind, or left when its row was
// removed by another hand.
const deleteLeases = `DELETE FROM tokenlease.leases WHERE bucket_key = ANY ($1::text[])`

// leaseWrites collects the leases of all buckets of a transaction.
type leaseWrites struct {
	expireKeys     []string
	expireAt       []time.Time
	expireAllowed  []int64
	expireCount    int64
	clear          []string
	insert, update []*ledger.Lease
}

func (w *leaseWrites) add(view *ledger.View, effects *ledger.Effects, piled bool) {
	switch effects.Row {
	case ledger.RowDelete:
		w.clear = append(w.clear, view.Key)
		return
	case ledger.RowInsert:
		w.clear = append(w.clear, view.Key)
	case ledger.RowUnchanged, ledger.RowUpdate:
	}
	if e := effects.Expire; e != nil {
		w.expireKeys = append(w.expireKeys, view.Key)
		w.expireAt = append(w.expireAt, e.At)
		allowed := e.Count
		if !piled {
			allowed++
		}
		w.expireAllowed = append(w.expireAllowed, allowed)
		w.expireCount += e.Count
	}
	w.insert = append(w.insert, effects.InsertLeases...)
	w.update = append(w.update, effects.UpdateLeases...)
}

func (w *leaseWrites) queue(batch *pgx.Batch) {
	if len(w.clear) > 0 {
		batch.Queue(deleteLeases, w.clear)
	}
	// Expiry comes first: the rules may say more about a lease that expired.
	if len(w.expireKeys) > 0 {
		batch.Queue(expireLeases, w.expireKeys, w.expireAt, w.expireAllowed, w.expireCount)
	}
	if len(w.insert) > 0 {
		batch.Queue(insertLeases,
			column(w.insert, func(l *ledger.Lease) string { return l.BucketKey }),
			column(w.insert, func(l *ledger.Lease) string { return l.ID }),
			column(w.insert, func(l *ledger.Lease) string { return l.RequestHash }),
			column(w.insert, func(l *ledger.Lease) string { return l.FingerprintHash }),
			column(w.insert, func(l *ledger.Lease) string { return string(l.State) }),
			column(w.insert, func(l *ledger.Lease) int64 { return l.ReservedTokens }),
			column(w.insert, func(l *ledger.Lease) *int64 { return l.ActualTokens }),
			column(w.insert, func(l *ledger.Lease) int64 { return l.TTL.Milliseconds() }),
			column(w.insert, func(l *ledger.Lease) time.Time { return l.CreatedAt }),
			column(w.insert, func(l *ledger.Lease) time.Time { return l.ExpiresAt }),
			column(w.insert, func(l *ledger.Lease) *time.Time { return l.SettledAt }),
			column(w.insert, func(l *ledger.Lease) *string { return optional(l.ScopedKeyID) }),
			column(w.insert, func(l *ledger.Lease) *string { return optional(l.RaiseID) }),
			column(w.insert, func(l *ledger.Lease) *int64 { return l.RefusedTokens }),
			column(w.insert, func(l *ledger.Lease) int64 { return l.RefusedCommits }))
	}
	if len(w.update) > 0 {
		batch.Queue(updateLeases,
			column(w.update, func(l *ledger.Lease) string { return l.BucketKey }),
			column(w.update, func(l *ledger.Lease) string { return l.ID }),
			column(w.update, func(l *ledger.Lease) string { return string(l.State) }),
			column(w.update, func(l *ledger.Lease) *int64 { return l.ActualTokens }),
			column(w.update, func(l *ledger.Lease) time.Time { return l.ExpiresAt }),
			column(w.update, func(l *ledger.Lease) *time.Time { return l.SettledAt }),
			column(w.update, func(l *ledger.Lease) *int64 { return l.RefusedTokens }),
			column(w.update, func(l *ledger.Lease) int64 { return l.RefusedCommits }))
	}
}
