package postgres

import (
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/token-lease/operator/internal/ledger"
)

const listAudit = `
SELECT
	a.bucket_key, a.sequence, a.event, a.outcome, a.reason, a.operation_id, a.raise_id, a.raise_version,
	a.cluster, a.namespace, a.owner_name, a.tenant_id, a.scoped_key_id, a.bucket_scoped_key_id, a.approval_id,
	a.actor, a.worker, a.trigger_operation,
	a.requested_limit_tokens, a.prior_limit_tokens, a.effective_limit_tokens, a.declared_limit_tokens,
	a.used_tokens, a.reserved_tokens, a.limit_epoch, a.due_at, a.recorded_at, a.lease_id, a.tokens, a.on_behalf_of
FROM tokenlease.audit AS a
WHERE a.bucket_key = $1::text AND a.sequence > $2::bigint
ORDER BY a.sequence
LIMIT $3::bigint`

func scanAudit(row pgx.Row) (ledger.AuditRow, error) {
	var a ledger.AuditRow
	err := row.Scan(
		&a.BucketKey, &a.Sequence, into(&a.Event), into(&a.Outcome), into(&a.Reason), into(&a.OperationID),
		into(&a.RaiseID), &a.RaiseVersion,
		into(&a.Cluster), into(&a.Namespace), into(&a.OwnerName), into(&a.TenantID), into(&a.ScopedKeyID),
		into(&a.BucketScopedKeyID), into(&a.ApprovalID),
		into(&a.Actor), into(&a.Worker), into(&a.Trigger),
		&a.RequestedLimit, &a.PriorLimit, &a.EffectiveLimit, &a.DeclaredLimit,
		&a.UsedTokens, &a.ReservedTokens, &a.LimitEpoch, optionalInstant{&a.DueAt}, instant{&a.At}, into(&a.LeaseID), &a.Tokens,
		into(&a.OnBehalfOf))
	return a, err
}

// histories answers the number of the latest audit row of buckets without a row,
// their latest life-cycle event, and whether a row has appeared since: one
// statement sees all as they are at one moment, so a bucket that is just being
// opened is not taken for one that vanished.
const histories = `
SELECT missing.bucket_key,
	EXISTS (SELECT FROM tokenlease.buckets AS b WHERE b.bucket_key = missing.bucket_key),
	coalesce((SELECT max(a.sequence) FROM tokenlease.audit AS a WHERE a.bucket_key = missing.bucket_key), 0),
	latest.event, latest.cluster, latest.namespace, latest.owner_name
FROM unnest($1::text[]) AS missing (bucket_key)
LEFT JOIN LATERAL (
	SELECT a.event, a.cluster, a.namespace, a.owner_name
	FROM tokenlease.audit AS a
	WHERE a.bucket_key = missing.bucket_key AND a.event = ANY ($2::text[])
	ORDER BY a.sequence DESC
	LIMIT 1) AS latest ON true`

var lifeCycleEvents = column(ledger.LifeCycleEvents(), func(e ledger.AuditEvent) string { return string(e) })

const insertAudit = `
INSERT INTO tokenlease.audit (
	bucket_key, sequence, event, outcome, reason, operation_id, raise_id, raise_version,
	cluster, namespace, owner_name, tenant_id, scoped_key_id, bucket_scoped_key_id, approval_id,
	actor, worker, trigger_operation,
	requested_limit_tokens, prior_limit_tokens, effective_limit_tokens, declared_limit_tokens,
	used_tokens, reserved_tokens, limit_epoch, due_at, recorded_at, lease_id, tokens, on_behalf_of)
SELECT * FROM unnest(
	$1::text[], $2::bigint[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::bigint[],
	$9::text[], $10::text[], $11::text[], $12::text[], $13::text[], $14::text[], $15::text[],
	$16::text[], $17::text[], $18::text[],
	$19::bigint[], $20::bigint[], $21::bigint[], $22::bigint[],
	$23::bigint[], $24::bigint[], $25::bigint[], $26::timestamptz[], $27::timestamptz[],
	$28::text[], $29::bigint[], $30::text[])`

func queueAudit(batch *pgx.Batch, rows []ledger.AuditRow) {
	if len(rows) == 0 {
		return
	}
	nullable := func(field func(ledger.AuditRow) string) []*string {
		return column(rows, func(a ledger.AuditRow) *string { return optional(field(a)) })
	}
	batch.Queue(insertAudit,
		column(rows, func(a ledger.AuditRow) string { return a.BucketKey }),
		column(rows, func(a ledger.AuditRow) int64 { return a.Sequence }),
		column(rows, func(a ledger.AuditRow) string { return string(a.Event) }),
		column(rows, func(a ledger.AuditRow) string { return string(a.Outcome) }),
		nullable(func(a ledger.AuditRow) string { return string(a.Reason) }),
		nullable(func(a ledger.AuditRow) string { return a.OperationID }),
		nullable(func(a ledger.AuditRow) string { return a.RaiseID }),
		column(rows, func(a ledger.AuditRow) int64 { return a.RaiseVersion }),
		nullable(func(a ledger.AuditRow) string { return a.Cluster }),
		nullable(func(a ledger.AuditRow) string { return a.Namespace }),
		nullable(func(a ledger.AuditRow) string { return a.OwnerName }),
		nullable(func(a ledger.AuditRow) string { return a.TenantID }),
		nullable(func(a ledger.AuditRow) string { return a.ScopedKeyID }),
		nullable(func(a ledger.AuditRow) string { return a.BucketScopedKeyID }),
		nullable(func(a ledger.AuditRow) string { return a.ApprovalID }),
		nullable(func(a ledger.AuditRow) string { return a.Actor }),
		nullable(func(a ledger.AuditRow) string { return a.Worker }),
		nullable(func(a ledger.AuditRow) string { return a.Trigger }),
		column(rows, func(a ledger.AuditRow) *int64 { return a.RequestedLimit }),
		column(rows, func(a ledger.AuditRow) *int64 { return a.PriorLimit }),
		column(rows, func(a ledger.AuditRow) *int64 { return a.EffectiveLimit }),
		column(rows, func(a ledger.AuditRow) *int64 { return a.DeclaredLimit }),
		column(rows, func(a ledger.AuditRow) int64 { return a.UsedTokens }),
		column(rows, func(a ledger.AuditRow) int64 { return a.ReservedTokens }),
		column(rows, func(a ledger.AuditRow) int64 { return a.LimitEpoch }),
		column(rows, func(a ledger.AuditRow) *time.Time { return a.DueAt }),
		column(rows, func(a ledger.AuditRow) time.Time { return a.At }),
		nullable(func(a ledger.AuditRow) string { return a.LeaseID }),
		column(rows, func(a ledger.AuditRow) *int64 { return a.Tokens }),
		nullable(func(a ledger.AuditRow) string { return a.OnBehalfOf }))
}
