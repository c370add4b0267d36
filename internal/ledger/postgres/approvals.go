package postgres

import (
	"cmp"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/token-lease/operator/internal/ledger"
)

const neededApprovals = `
SELECT a.cluster, a.namespace, a.tenant_id, a.approval_id, a.raise_id
FROM unnest($1::text[], $2::text[], $3::text[], $4::text[]) AS needed (cluster, namespace, tenant_id, approval_id)
JOIN tokenlease.approvals AS a
	ON a.cluster = needed.cluster AND a.namespace = needed.namespace
	AND a.tenant_id = needed.tenant_id AND a.approval_id = needed.approval_id`

const freeApprovals = `
WITH gone AS (
	DELETE FROM tokenlease.approvals AS a
	USING unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[])
		AS freed (cluster, namespace, tenant_id, approval_id, raise_id)
	WHERE a.cluster = freed.cluster AND a.namespace = freed.namespace
	  AND a.tenant_id = freed.tenant_id AND a.approval_id = freed.approval_id
	  AND a.raise_id = freed.raise_id
	RETURNING 1)
SELECT tokenlease.require((SELECT count(*) FROM gone), cardinality($1::text[]), 'approvals freed')`

// spendApprovals fails when another bucket's raise has spent one of them in the
// meantime; the requests are then decided again.
const spendApprovals = `
INSERT INTO tokenlease.approvals (cluster, namespace, tenant_id, approval_id, raise_id, bucket_key, spent_at)
SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::timestamptz[])`

// approvalKeys are the columns of the primary key.
func approvalKeys[Row any](rows []Row, key func(Row) ledger.ApprovalKey) []any {
	return []any{
		column(rows, func(r Row) string { return key(r).Cluster }),
		column(rows, func(r Row) string { return key(r).Namespace }),
		column(rows, func(r Row) string { return key(r).TenantID }),
		column(rows, func(r Row) string { return key(r).ApprovalID }),
	}
}

// approvalWrites collects the approvals of all buckets of a transaction. They
// are the only rows that two buckets may contend for, so they are written in one
// order.
type approvalWrites struct {
	free, spend []ledger.SpentApproval
}

func (w *approvalWrites) add(effects *ledger.Effects) {
	w.free = append(w.free, effects.FreeApprovals...)
	w.spend = append(w.spend, effects.SpendApprovals...)
}

func (w *approvalWrites) queue(batch *pgx.Batch) {
	key := func(s ledger.SpentApproval) ledger.ApprovalKey { return s.Approval }
	raiseID := func(s ledger.SpentApproval) string { return s.RaiseID }
	if len(w.free) > 0 {
		slices.SortFunc(w.free, compareApprovals)
		batch.Queue(freeApprovals, append(approvalKeys(w.free, key), column(w.free, raiseID))...)
	}
	if len(w.spend) > 0 {
		slices.SortFunc(w.spend, compareApprovals)
		batch.Queue(spendApprovals, append(approvalKeys(w.spend, key),
			column(w.spend, raiseID),
			column(w.spend, func(s ledger.SpentApproval) string { return s.BucketKey }),
			column(w.spend, func(s ledger.SpentApproval) time.Time { return s.At }))...)
	}
}

func compareApprovals(a, b ledger.SpentApproval) int {
	return cmp.Or(
		cmp.Compare(a.Approval.Cluster, b.Approval.Cluster),
		cmp.Compare(a.Approval.Namespace, b.Approval.Namespace),
		cmp.Compare(a.Approval.TenantID, b.Approval.TenantID),
		cmp.Compare(a.Approval.ApprovalID, b.Approval.ApprovalID))
}
