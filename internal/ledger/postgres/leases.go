package postgres

import (
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/token-lease/operator/internal/ledger"
)

const leaseColumns = `
	l.bucket_key, l.lease_id, l.request_hash, l.fingerprint_hash, l.state,
	l.reserved_tokens, l.actual_tokens, l.ttl_ms, l.created_at, l.expires_at, l.settled_at,
	l.scoped_key_id, l.raise_id, l.refused_tokens, l.refused_commits, l.imported_at, l.late, l.holder, l.period_start`

// leaseRow is where leaseColumns are read into.
type leaseRow struct {
	lease                    ledger.Lease
	requestHash, fingerprint []byte
}

func (r *leaseRow) targets() []any {
	l := &r.lease
	return []any{
		&l.BucketKey, &l.ID, &r.requestHash, &r.fingerprint, into(&l.State),
		&l.ReservedTokens, &l.ActualTokens, milliseconds{&l.TTL},
		instant{&l.CreatedAt}, instant{&l.ExpiresAt}, optionalInstant{&l.SettledAt},
		into(&l.ScopedKeyID), into(&l.RaiseID), &l.RefusedTokens, &l.RefusedCommits, optionalInstant{&l.ImportedAt},
		&l.Late, into(&l.Holder), instant{&l.PeriodStart},
	}
}

func (r *leaseRow) value() *ledger.Lease {
	copy(r.lease.RequestHash[:], r.requestHash)
	copy(r.lease.FingerprintHash[:], r.fingerprint)
	return &r.lease
}

func scanLease(row pgx.Row) (*ledger.Lease, error) {
	var r leaseRow
	if err := row.Scan(r.targets()...); err != nil {
		return nil, err
	}
	return r.value(), nil
}

// The needed keys are joined through LATERAL, which has no other plan than one
// look-up in the index for each key.
const leasesByRequest = `
SELECT` + leaseColumns + `
FROM unnest($1::text[], $2::bytea[]) AS needed (bucket_key, request_hash)
CROSS JOIN LATERAL (
	SELECT * FROM tokenlease.leases AS one
	WHERE one.bucket_key = needed.bucket_key AND one.request_hash = needed.request_hash
	OFFSET 0) AS l`

// importedLeases finds leases by the IDs that they were imported with.
const importedLeases = `
SELECT` + leaseColumns + `
FROM unnest($1::text[], $2::text[]) AS needed (bucket_key, lease_id)
CROSS JOIN LATERAL (
	SELECT * FROM tokenlease.leases AS one
	WHERE one.bucket_key = needed.bucket_key AND one.lease_id = needed.lease_id AND one.imported_at IS NOT NULL
	OFFSET 0) AS l`

// clockAndOverdueLeases reads the clock, once the buckets are locked, and looks
// through the leases of each bucket whose expiry has come since the last search, $2
// of them and those that expire with the last of these. It answers the clock, and
// beside it the reserved leases, and the last ones when there may be more. A settled
// lease is looked at once; in exchange no index has to be kept of what is reserved,
// and settling a lease changes no index at all.
const clockAndOverdueLeases = `
SELECT clock.now, l.number,` + leaseColumns + `
FROM (SELECT tokenlease.ledger_now() AS now OFFSET 0) AS clock
LEFT JOIN LATERAL (
	SELECT passed.*
	FROM tokenlease.buckets AS b
	CROSS JOIN LATERAL (
		SELECT row_number() OVER () AS number, first.*
		FROM (
			SELECT * FROM tokenlease.leases AS one
			WHERE one.bucket_key = b.bucket_key
			  AND one.expires_at > b.expired_through
			  AND one.expires_at <= greatest(b.updated_at, clock.now)
			ORDER BY one.expires_at
			FETCH FIRST ($2::bigint) ROWS WITH TIES) AS first) AS passed
	WHERE b.bucket_key = ANY ($1::text[])
	  AND (passed.state = 'reserved' OR passed.number >= $2::bigint)) AS l ON true`

const listLeases = `
SELECT` + leaseColumns + `
FROM tokenlease.leases AS l
WHERE l.bucket_key = $1::text
  AND l.expires_at >= $2::timestamptz
  AND (l.expires_at, l.lease_id) > ($2::timestamptz, $3::text)
ORDER BY l.expires_at, l.lease_id
LIMIT $4::bigint`

// insertLeases makes leases as they are made; what more there is to one that was
// settled in the same transaction, updateLeases adds.
const insertLeases = `
INSERT INTO tokenlease.leases (
	bucket_key, lease_id, request_hash, fingerprint_hash, state,
	reserved_tokens, ttl_ms, created_at, expires_at, scoped_key_id, raise_id, holder, period_start)
SELECT new.bucket_key, new.lease_id, new.request_hash, new.fingerprint_hash, 'reserved',
	new.reserved_tokens, new.ttl_ms, new.created_at, new.expires_at, new.scoped_key_id, new.raise_id, new.holder, new.period_start
FROM unnest(
	$1::text[], $2::text[], $3::bytea[], $4::bytea[],
	$5::bigint[], $6::bigint[], $7::timestamptz[], $8::timestamptz[], $9::text[], $10::text[], $11::text[], $12::timestamptz[])
	AS new (bucket_key, lease_id, request_hash, fingerprint_hash,
		reserved_tokens, ttl_ms, created_at, expires_at, scoped_key_id, raise_id, holder, period_start)`

// updateLeases names the columns that can change after a lease was made, but for
// its expiry. None of them is in an index.
const updateLeases = `
WITH written AS (
	UPDATE tokenlease.leases AS l SET
		state = new.state, actual_tokens = new.actual_tokens, settled_at = new.settled_at,
		refused_tokens = new.refused_tokens, refused_commits = new.refused_commits, late = new.late
	FROM unnest(
		$1::text[], $2::bytea[], $3::text[], $4::bigint[], $5::timestamptz[], $6::bigint[], $7::bigint[],
		$8::boolean[])
		AS new (bucket_key, request_hash, state, actual_tokens, settled_at, refused_tokens, refused_commits, late)
	WHERE l.bucket_key = new.bucket_key AND l.request_hash = new.request_hash
	RETURNING 1)
SELECT tokenlease.require((SELECT count(*) FROM written), cardinality($1::text[]), 'leases updated')`

// extendLeases moves the expiry, which is in an index, of leases that stay reserved.
const extendLeases = `
WITH written AS (
	UPDATE tokenlease.leases AS l SET expires_at = new.expires_at
	FROM unnest($1::text[], $2::bytea[], $3::timestamptz[]) AS new (bucket_key, request_hash, expires_at)
	WHERE l.bucket_key = new.bucket_key AND l.request_hash = new.request_hash
	RETURNING 1)
SELECT tokenlease.require((SELECT count(*) FROM written), cardinality($1::text[]), 'leases extended')`

// deleteLeases removes what a bucket leaves behind, or left when its row was
// removed by another hand.
const deleteLeases = `DELETE FROM tokenlease.leases WHERE bucket_key = ANY ($1::text[])`

// leaseWrites collects the leases of all buckets of a transaction.
type leaseWrites struct {
	clear                  []string
	insert, update, extend []*ledger.Lease
}

func (w *leaseWrites) add(view *ledger.View, effects *ledger.Effects) {
	switch effects.Row {
	case ledger.RowDelete, ledger.RowInsert:
		w.clear = append(w.clear, view.Key)
	case ledger.RowUnchanged, ledger.RowUpdate:
	}
	w.insert = append(w.insert, effects.InsertLeases...)
	for _, lease := range effects.InsertLeases {
		if lease.State != ledger.LeaseReserved || lease.RefusedCommits > 0 {
			w.update = append(w.update, lease)
		}
	}
	w.update = append(w.update, effects.UpdateLeases...)
	w.extend = append(w.extend, effects.ExtendLeases...)
}

func (w *leaseWrites) queue(batch *pgx.Batch) {
	if len(w.clear) > 0 {
		batch.Queue(deleteLeases, w.clear)
	}
	if len(w.insert) > 0 {
		batch.Queue(insertLeases,
			column(w.insert, func(l *ledger.Lease) string { return l.BucketKey }),
			column(w.insert, func(l *ledger.Lease) string { return l.ID }),
			column(w.insert, func(l *ledger.Lease) []byte { return l.RequestHash[:] }),
			column(w.insert, func(l *ledger.Lease) []byte { return l.FingerprintHash[:] }),
			column(w.insert, func(l *ledger.Lease) int64 { return l.ReservedTokens }),
			column(w.insert, func(l *ledger.Lease) int64 { return l.TTL.Milliseconds() }),
			column(w.insert, func(l *ledger.Lease) time.Time { return l.CreatedAt }),
			column(w.insert, func(l *ledger.Lease) time.Time { return l.ExpiresAt }),
			column(w.insert, func(l *ledger.Lease) *string { return optional(l.ScopedKeyID) }),
			column(w.insert, func(l *ledger.Lease) *string { return optional(l.RaiseID) }),
			column(w.insert, func(l *ledger.Lease) *string { return optional(l.Holder) }),
			column(w.insert, func(l *ledger.Lease) *time.Time { return optionalTime(l.PeriodStart) }))
	}
	if len(w.extend) > 0 {
		batch.Queue(extendLeases,
			column(w.extend, func(l *ledger.Lease) string { return l.BucketKey }),
			column(w.extend, func(l *ledger.Lease) []byte { return l.RequestHash[:] }),
			column(w.extend, func(l *ledger.Lease) time.Time { return l.ExpiresAt }))
	}
	if len(w.update) > 0 {
		batch.Queue(updateLeases,
			column(w.update, func(l *ledger.Lease) string { return l.BucketKey }),
			column(w.update, func(l *ledger.Lease) []byte { return l.RequestHash[:] }),
			column(w.update, func(l *ledger.Lease) string { return string(l.State) }),
			column(w.update, func(l *ledger.Lease) *int64 { return l.ActualTokens }),
			column(w.update, func(l *ledger.Lease) *time.Time { return l.SettledAt }),
			column(w.update, func(l *ledger.Lease) *int64 { return l.RefusedTokens }),
			column(w.update, func(l *ledger.Lease) int64 { return l.RefusedCommits }),
			column(w.update, func(l *ledger.Lease) bool { return l.Late }))
	}
}
