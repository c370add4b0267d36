package postgres

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/token-lease/operator/internal/ledger"
)

// keptFrom are the buckets of which something old is asked for, and the instant from
// which their records are kept; those that keep everything are left out.
const keptFrom = `
FROM unnest($1::text[], $2::bigint[]) AS needed (bucket_key, limit_records)
CROSS JOIN LATERAL (
	SELECT greatest(b.updated_at, (SELECT tokenlease.ledger_now())) - b.retention_ms * interval '1 millisecond' AS instant
	FROM tokenlease.buckets AS b
	WHERE b.bucket_key = needed.bucket_key AND b.retention_ms > 0
	OFFSET 0) AS kept`

// oldestLeases reads the first leases by expiry whose expiry is older than their
// bucket's retention. Which of them may be purged, the rules decide; by expiry they are
// found without an index of their own, which each settling would have to write.
const oldestLeases = `
SELECT` + leaseColumns + keptFrom + `
CROSS JOIN LATERAL (
	SELECT * FROM tokenlease.leases AS one
	WHERE one.bucket_key = needed.bucket_key AND one.expires_at <= kept.instant
	ORDER BY one.expires_at
	LIMIT needed.limit_records) AS l`

// oldestOperations does so for operations. Those of raises are few, and stay.
const oldestOperations = `
SELECT` + operationColumns + keptFrom + `
CROSS JOIN LATERAL (
	SELECT * FROM tokenlease.operations AS one
	WHERE one.bucket_key = needed.bucket_key AND one.recorded_at <= kept.instant AND NOT one.of_raise
	ORDER BY one.recorded_at
	LIMIT needed.limit_records) AS o`

const deletePurgedLeases = `
WITH gone AS (
	DELETE FROM tokenlease.leases AS l
	USING unnest($1::text[], $2::bytea[]) AS old (bucket_key, request_hash)
	WHERE l.bucket_key = old.bucket_key AND l.request_hash = old.request_hash
	RETURNING 1)
SELECT tokenlease.require((SELECT count(*) FROM gone), cardinality($1::text[]), 'leases purged')`

const deletePurgedOperations = `
DELETE FROM tokenlease.operations AS o
USING unnest($1::text[], $2::text[]) AS old (bucket_key, operation_id)
WHERE o.bucket_key = old.bucket_key AND o.operation_id = old.operation_id`

const rollupColumns = `
	bucket_key, period_start, hour, cluster, namespace, tenant_id, scoped_key_id, raise_id, late,
	used_tokens, committed_leases, released_leases, expired_leases`

const addUsage = `
INSERT INTO tokenlease.rollups AS r (` + rollupColumns + `)
SELECT * FROM unnest(
	$1::text[], $2::timestamptz[], $3::timestamptz[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[], $9::boolean[],
	$10::bigint[], $11::bigint[], $12::bigint[], $13::bigint[])
ON CONFLICT (bucket_key, period_start, hour, cluster, namespace, tenant_id, scoped_key_id, raise_id, late) DO UPDATE SET
	used_tokens = r.used_tokens + excluded.used_tokens, committed_leases = r.committed_leases + excluded.committed_leases,
	released_leases = r.released_leases + excluded.released_leases, expired_leases = r.expired_leases + excluded.expired_leases`

const deleteRollups = `DELETE FROM tokenlease.rollups WHERE bucket_key = ANY ($1::text[])`

// lookForOld looks through $2 buckets for records that are older than their retention.
// A lease that is overdue since then has to be expired first, which Purge does.
const lookForOld = `
SELECT b.bucket_key, b.retention_ms > 0
  AND (EXISTS (
		SELECT FROM (
			SELECT * FROM tokenlease.leases AS one
			WHERE one.bucket_key = b.bucket_key AND one.expires_at <= kept.cutoff
			ORDER BY one.expires_at
			LIMIT $3::bigint) AS l
		WHERE l.state = 'reserved' OR greatest(l.settled_at, l.imported_at) <= kept.cutoff)
	OR (
		SELECT count(*) FROM (
			SELECT FROM tokenlease.operations AS o
			WHERE o.bucket_key = b.bucket_key AND o.recorded_at <= kept.cutoff AND NOT o.of_raise
			ORDER BY o.recorded_at
			LIMIT 1) AS first) > 0)
FROM tokenlease.buckets AS b
CROSS JOIN LATERAL (
	SELECT (SELECT tokenlease.ledger_now()) - b.retention_ms * interval '1 millisecond' AS cutoff) AS kept
WHERE b.bucket_key > $1::text
ORDER BY b.bucket_key
LIMIT $2::bigint`

// usageLines adds up rollups and what the leases that are still there have used. A
// lease expires after it was admitted, so its expiry bounds the search from below.
const usageLines = `
SELECT x.period_start, x.hour, x.cluster, x.namespace, x.tenant_id, x.scoped_key_id, x.raise_id, x.late,
	sum(x.used_tokens)::bigint, sum(x.committed_leases)::bigint, sum(x.released_leases)::bigint, sum(x.expired_leases)::bigint
FROM (
	SELECT r.period_start, r.hour, r.cluster, r.namespace, r.tenant_id, r.scoped_key_id, r.raise_id, r.late,
		r.used_tokens, r.committed_leases, r.released_leases, r.expired_leases
	FROM tokenlease.rollups AS r
	WHERE r.bucket_key = $1::text
	UNION ALL
	SELECT coalesce(l.period_start, '-infinity'), date_trunc('hour', l.created_at, 'UTC'),
		coalesce(b.owner_cluster, ''), coalesce(b.owner_namespace, ''), coalesce(b.tenant_id, ''),
		coalesce(l.scoped_key_id, ''), coalesce(l.raise_id, ''), l.late,
		coalesce(l.actual_tokens, 0), (l.state = 'committed')::int, (l.state = 'released')::int, (l.state = 'expired')::int
	FROM tokenlease.leases AS l
	JOIN tokenlease.buckets AS b ON b.bucket_key = l.bucket_key
	WHERE l.bucket_key = $1::text AND l.state <> 'reserved' AND l.expires_at > $2::timestamptz) AS x
WHERE x.hour >= $2::timestamptz AND x.hour < $3::timestamptz
  AND ($4::timestamptz IS NULL
	OR (x.period_start, x.hour, x.cluster, x.namespace, x.tenant_id, x.scoped_key_id, x.raise_id, x.late)
		> ($4::timestamptz, $5::timestamptz, $6::text, $7::text, $8::text, $9::text, $10::text, $11::boolean))
GROUP BY x.period_start, x.hour, x.cluster, x.namespace, x.tenant_id, x.scoped_key_id, x.raise_id, x.late
ORDER BY x.period_start, x.hour, x.cluster, x.namespace, x.tenant_id, x.scoped_key_id, x.raise_id, x.late
LIMIT $12::bigint`

// queueOldest queues what may be older than its bucket's retention.
func (l *loader) queueOldest(batch *pgx.Batch) {
	if len(l.needed.oldestKeys) == 0 {
		return
	}
	each(batch.Queue(oldestLeases, l.needed.oldestKeys, l.needed.oldest), l.readLease)
	each(batch.Queue(oldestOperations, l.needed.oldestKeys, l.needed.oldest), l.readOperation)
}

// retentionWrites collects what all buckets of a transaction forget.
type retentionWrites struct {
	clear         []string
	leases        []*ledger.Lease
	operationKeys []string
	operationIDs  []string
	usageKeys     []string
	usage         []ledger.Usage
}

func (w *retentionWrites) add(view *ledger.View, effects *ledger.Effects) {
	switch effects.Row {
	case ledger.RowDelete, ledger.RowInsert:
		w.clear = append(w.clear, view.Key)
	case ledger.RowUnchanged, ledger.RowUpdate:
	}
	w.leases = append(w.leases, effects.DeleteLeases...)
	for _, id := range effects.DeleteOperations {
		w.operationKeys, w.operationIDs = append(w.operationKeys, view.Key), append(w.operationIDs, id)
	}
	for _, usage := range effects.Usage {
		w.usageKeys, w.usage = append(w.usageKeys, view.Key), append(w.usage, usage)
	}
}

func (w *retentionWrites) queue(batch *pgx.Batch) {
	if len(w.clear) > 0 {
		batch.Queue(deleteRollups, w.clear)
	}
	if len(w.leases) > 0 {
		batch.Queue(deletePurgedLeases,
			column(w.leases, func(l *ledger.Lease) string { return l.BucketKey }),
			column(w.leases, func(l *ledger.Lease) []byte { return l.RequestHash[:] }))
	}
	if len(w.operationIDs) > 0 {
		batch.Queue(deletePurgedOperations, w.operationKeys, w.operationIDs)
	}
	if len(w.usage) > 0 {
		text := func(of func(ledger.Usage) string) []string { return column(w.usage, of) }
		count := func(of func(ledger.Usage) int64) []int64 { return column(w.usage, of) }
		batch.Queue(addUsage, w.usageKeys,
			column(w.usage, func(x ledger.Usage) pgtype.Timestamptz { return periodStart(x.PeriodStart) }),
			column(w.usage, func(x ledger.Usage) time.Time { return x.Hour }),
			text(func(x ledger.Usage) string { return x.Cluster }), text(func(x ledger.Usage) string { return x.Namespace }),
			text(func(x ledger.Usage) string { return x.TenantID }), text(func(x ledger.Usage) string { return x.ScopedKeyID }),
			text(func(x ledger.Usage) string { return x.RaiseID }),
			column(w.usage, func(x ledger.Usage) bool { return x.Late }),
			count(func(x ledger.Usage) int64 { return x.UsedTokens }), count(func(x ledger.Usage) int64 { return x.Committed }),
			count(func(x ledger.Usage) int64 { return x.Released }), count(func(x ledger.Usage) int64 { return x.Expired }))
	}
}

// Purgeable implements ledger.Store.
func (s *Store) Purgeable(ctx context.Context, after string, limit int) (keys []string, next string, err error) {
	limit = page(limit)
	looked, err := list(ctx, s, s.reads, lookForOld, pgx.RowToStructByPos[lookedAt], after, limit, ledger.MaxPurge)
	for _, bucket := range looked {
		if bucket.HasOld {
			keys = append(keys, bucket.Key)
		}
	}
	if len(looked) == limit && limit > 0 {
		next = looked[limit-1].Key
	}
	return keys, next, err
}

// lookedAt is a row of lookForOld.
type lookedAt struct {
	Key    string
	HasOld bool
}

// Usage implements ledger.Store.
func (s *Store) Usage(ctx context.Context, query ledger.UsageQuery) ([]ledger.Usage, error) {
	from := pgtype.Timestamptz{InfinityModifier: pgtype.NegativeInfinity, Valid: true}
	if !query.From.IsZero() {
		from = pgtype.Timestamptz{Time: query.From, Valid: true}
	}
	var after ledger.UsagePosition
	var afterPeriod *pgtype.Timestamptz
	if query.After != nil {
		after = *query.After
		start := periodStart(after.PeriodStart)
		afterPeriod = &start
	}
	return list(ctx, s, s.reads, usageLines, toUsage, query.BucketKey, from, orInfinity(query.To),
		afterPeriod, after.Hour, after.Cluster, after.Namespace, after.TenantID, after.ScopedKeyID, after.RaiseID, after.Late,
		page(query.Limit))
}

func toUsage(row pgx.CollectableRow) (ledger.Usage, error) {
	var x ledger.Usage
	var start pgtype.Timestamptz
	err := row.Scan(&start, instant{&x.Hour}, &x.Cluster, &x.Namespace, &x.TenantID, &x.ScopedKeyID, &x.RaiseID, &x.Late,
		&x.UsedTokens, &x.Committed, &x.Released, &x.Expired)
	if err == nil && start.InfinityModifier == pgtype.Finite {
		x.PeriodStart = start.Time.UTC()
	}
	return x, err
}
