package postgres

import (
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/token-lease/operator/internal/ledger"
)

const raiseColumns = `
	r.bucket_key, r.raise_id, r.cluster, r.namespace, r.name, r.current_uid, r.current_created_at, r.tenant_id, r.scoped_key_id,
	r.normal_limit_tokens, r.temporary_limit_tokens, r.applied_limit_tokens, r.restore_to_tokens, r.limit_epoch,
	r.starts_at, r.expires_at, r.approval_id, r.actor, r.purpose, r.grant_hash, r.on_base_change,
	r.state, r.reason, r.review_required, r.observed_limit_tokens, r.version,
	r.stored_at, r.activated_at, r.ended_at, r.mismatch_since, r.observed_at, r.on_behalf_of`

func raiseTargets(r *ledger.Raise) []any {
	return []any{
		&r.BucketKey, &r.ID, &r.Cluster, &r.Namespace, &r.Name, &r.CurrentUID, instant{&r.CurrentCreatedAt}, &r.TenantID, &r.ScopedKeyID,
		&r.NormalLimit, &r.TemporaryLimit, &r.AppliedLimit, &r.RestoreTo, &r.Epoch,
		instant{&r.StartsAt}, instant{&r.ExpiresAt}, &r.ApprovalID, into(&r.Actor), into(&r.Purpose), &r.GrantHash, into(&r.OnBaseChange),
		into(&r.State), into(&r.Reason), &r.ReviewRequired, &r.ObservedLimit, &r.Version,
		instant{&r.StoredAt}, optionalInstant{&r.ActivatedAt}, optionalInstant{&r.EndedAt},
		optionalInstant{&r.MismatchSince}, optionalInstant{&r.ObservedAt}, into(&r.OnBehalfOf),
	}
}

func scanRaise(row pgx.Row) (*ledger.Raise, error) {
	var r ledger.Raise
	if err := row.Scan(raiseTargets(&r)...); err != nil {
		return nil, err
	}
	return &r, nil
}

// liveRaises answers the buckets' raises that have not ended, each with the raise
// that spent its approval.
const liveRaises = `
SELECT` + raiseColumns + `, a.raise_id
FROM tokenlease.raises AS r
LEFT JOIN tokenlease.approvals AS a
	ON a.cluster = r.cluster AND a.namespace = r.namespace
	AND a.tenant_id = r.tenant_id AND a.approval_id = r.approval_id
WHERE r.bucket_key = ANY ($1::text[])
  AND r.state IN ('pending', 'active', 'restoring')
ORDER BY r.bucket_key, r.raise_id`

const raisesByUID = `
SELECT` + raiseColumns + `
FROM unnest($1::text[], $2::text[]) AS needed (bucket_key, uid)
JOIN tokenlease.raises AS r
	ON r.bucket_key = needed.bucket_key AND r.raise_id = needed.uid
UNION ALL
SELECT` + raiseColumns + `
FROM unnest($1::text[], $2::text[]) AS needed (bucket_key, uid)
JOIN tokenlease.raises AS r
	ON r.bucket_key = needed.bucket_key AND r.current_uid = needed.uid AND r.raise_id <> needed.uid
ORDER BY bucket_key, raise_id`

const raisesByGrant = `
SELECT` + raiseColumns + `
FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[])
	AS needed (bucket_key, cluster, namespace, name, approval_id, grant_hash)
JOIN tokenlease.raises AS r
	ON r.bucket_key = needed.bucket_key AND r.grant_hash = needed.grant_hash
	AND r.cluster = needed.cluster AND r.namespace = needed.namespace
	AND r.name = needed.name AND r.approval_id = needed.approval_id
ORDER BY r.bucket_key, r.raise_id`

// raiseByUID prefers the record that the UID names to one that it stands for now.
const raiseByUID = `
SELECT * FROM (
	SELECT` + raiseColumns + `
	FROM tokenlease.raises AS r
	WHERE r.cluster = $1::text AND r.raise_id = $2::text
	UNION ALL
	SELECT` + raiseColumns + `
	FROM tokenlease.raises AS r
	WHERE r.cluster = $1::text AND r.current_uid = $2::text) AS found
ORDER BY found.raise_id = $2::text DESC, found.stored_at DESC
LIMIT 1`

const listLiveRaises = `
SELECT` + raiseColumns + `
FROM tokenlease.raises AS r
WHERE r.cluster = $1::text
  AND r.state IN ('pending', 'active', 'restoring')
  AND (r.bucket_key, r.raise_id) > ($2::text, $3::text)
ORDER BY r.bucket_key, r.raise_id
LIMIT $4::bigint`

const activePastExpiry = `
SELECT count(*)
FROM tokenlease.raises AS r
WHERE r.state IN ('active', 'restoring')
  AND r.expires_at <= (SELECT tokenlease.ledger_now())`

const openReviews = `
SELECT count(*)
FROM tokenlease.raises AS r
WHERE r.review_required`

const insertRaises = `
INSERT INTO tokenlease.raises (
	bucket_key, raise_id, cluster, namespace, name, current_uid, current_created_at, tenant_id, scoped_key_id,
	normal_limit_tokens, temporary_limit_tokens, applied_limit_tokens, restore_to_tokens, limit_epoch,
	starts_at, expires_at, approval_id, actor, purpose, grant_hash, on_base_change,
	state, reason, review_required, observed_limit_tokens, version,
	stored_at, activated_at, ended_at, mismatch_since, observed_at, on_behalf_of)
SELECT * FROM unnest(
	$1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::timestamptz[], $8::text[], $9::text[],
	$10::bigint[], $11::bigint[], $12::bigint[], $13::bigint[], $14::bigint[],
	$15::timestamptz[], $16::timestamptz[], $17::text[], $18::text[], $19::text[], $20::text[], $21::text[],
	$22::text[], $23::text[], $24::boolean[], $25::bigint[], $26::bigint[],
	$27::timestamptz[], $28::timestamptz[], $29::timestamptz[], $30::timestamptz[], $31::timestamptz[], $32::text[])`

const updateRaises = `
WITH written AS (
	UPDATE tokenlease.raises AS r SET
		namespace = new.namespace, name = new.name,
		current_uid = new.current_uid, current_created_at = new.current_created_at,
		tenant_id = new.tenant_id, scoped_key_id = new.scoped_key_id,
		normal_limit_tokens = new.normal_limit_tokens, temporary_limit_tokens = new.temporary_limit_tokens,
		applied_limit_tokens = new.applied_limit_tokens, restore_to_tokens = new.restore_to_tokens,
		limit_epoch = new.limit_epoch, starts_at = new.starts_at, expires_at = new.expires_at,
		approval_id = new.approval_id, actor = new.actor, purpose = new.purpose, grant_hash = new.grant_hash,
		on_base_change = new.on_base_change, state = new.state, reason = new.reason,
		review_required = new.review_required, observed_limit_tokens = new.observed_limit_tokens,
		version = new.version, stored_at = new.stored_at, activated_at = new.activated_at,
		ended_at = new.ended_at, mismatch_since = new.mismatch_since, observed_at = new.observed_at,
		on_behalf_of = new.on_behalf_of
	FROM unnest(
		$1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::timestamptz[], $8::text[], $9::text[],
		$10::bigint[], $11::bigint[], $12::bigint[], $13::bigint[], $14::bigint[],
		$15::timestamptz[], $16::timestamptz[], $17::text[], $18::text[], $19::text[], $20::text[], $21::text[],
		$22::text[], $23::text[], $24::boolean[], $25::bigint[], $26::bigint[],
		$27::timestamptz[], $28::timestamptz[], $29::timestamptz[], $30::timestamptz[], $31::timestamptz[], $32::text[])
		AS new (bucket_key, raise_id, cluster, namespace, name, current_uid, current_created_at, tenant_id, scoped_key_id,
			normal_limit_tokens, temporary_limit_tokens, applied_limit_tokens, restore_to_tokens, limit_epoch,
			starts_at, expires_at, approval_id, actor, purpose, grant_hash, on_base_change,
			state, reason, review_required, observed_limit_tokens, version,
			stored_at, activated_at, ended_at, mismatch_since, observed_at, on_behalf_of)
	WHERE r.bucket_key = new.bucket_key AND r.raise_id = new.raise_id AND r.version < new.version
	RETURNING 1)
SELECT tokenlease.require((SELECT count(*) FROM written), cardinality($1::text[]), 'raises updated')`

func raiseArguments(raises []*ledger.Raise) []any {
	return []any{
		column(raises, func(r *ledger.Raise) string { return r.BucketKey }),
		column(raises, func(r *ledger.Raise) string { return r.ID }),
		column(raises, func(r *ledger.Raise) string { return r.Cluster }),
		column(raises, func(r *ledger.Raise) string { return r.Namespace }),
		column(raises, func(r *ledger.Raise) string { return r.Name }),
		column(raises, func(r *ledger.Raise) string { return r.CurrentUID }),
		column(raises, func(r *ledger.Raise) time.Time { return r.CurrentCreatedAt }),
		column(raises, func(r *ledger.Raise) string { return r.TenantID }),
		column(raises, func(r *ledger.Raise) string { return r.ScopedKeyID }),
		column(raises, func(r *ledger.Raise) int64 { return r.NormalLimit }),
		column(raises, func(r *ledger.Raise) int64 { return r.TemporaryLimit }),
		column(raises, func(r *ledger.Raise) *int64 { return r.AppliedLimit }),
		column(raises, func(r *ledger.Raise) *int64 { return r.RestoreTo }),
		column(raises, func(r *ledger.Raise) int64 { return r.Epoch }),
		column(raises, func(r *ledger.Raise) time.Time { return r.StartsAt }),
		column(raises, func(r *ledger.Raise) time.Time { return r.ExpiresAt }),
		column(raises, func(r *ledger.Raise) string { return r.ApprovalID }),
		column(raises, func(r *ledger.Raise) *string { return optional(r.Actor) }),
		column(raises, func(r *ledger.Raise) *string { return optional(r.Purpose) }),
		column(raises, func(r *ledger.Raise) string { return r.GrantHash }),
		column(raises, func(r *ledger.Raise) string { return string(r.OnBaseChange) }),
		column(raises, func(r *ledger.Raise) string { return string(r.State) }),
		column(raises, func(r *ledger.Raise) *string { return optional(r.Reason) }),
		column(raises, func(r *ledger.Raise) bool { return r.ReviewRequired }),
		column(raises, func(r *ledger.Raise) *int64 { return r.ObservedLimit }),
		column(raises, func(r *ledger.Raise) int64 { return r.Version }),
		column(raises, func(r *ledger.Raise) time.Time { return r.StoredAt }),
		column(raises, func(r *ledger.Raise) *time.Time { return r.ActivatedAt }),
		column(raises, func(r *ledger.Raise) *time.Time { return r.EndedAt }),
		column(raises, func(r *ledger.Raise) *time.Time { return r.MismatchSince }),
		column(raises, func(r *ledger.Raise) *time.Time { return r.ObservedAt }),
		column(raises, func(r *ledger.Raise) *string { return optional(r.OnBehalfOf) }),
	}
}

// raiseWrites collects the raises of all buckets of a transaction.
type raiseWrites struct {
	// updateFirst are those that are not active: a raise must have ended before
	// the next one of its bucket may be written as active.
	updateFirst, insert, update []*ledger.Raise
}

func (w *raiseWrites) add(effects *ledger.Effects) {
	w.insert = append(w.insert, effects.InsertRaises...)
	for _, r := range effects.UpdateRaises {
		if r.State == ledger.RaiseActive {
			w.update = append(w.update, r)
		} else {
			w.updateFirst = append(w.updateFirst, r)
		}
	}
}

func (w *raiseWrites) queue(batch *pgx.Batch) {
	if len(w.updateFirst) > 0 {
		batch.Queue(updateRaises, raiseArguments(w.updateFirst)...)
	}
	if len(w.insert) > 0 {
		batch.Queue(insertRaises, raiseArguments(w.insert)...)
	}
	if len(w.update) > 0 {
		batch.Queue(updateRaises, raiseArguments(w.update)...)
	}
}
