package postgres

import (
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/token-lease/operator/internal/ledger"
)

const bucketColumns = `
	b.bucket_key, b.owner_cluster, b.owner_namespace, b.owner_name, b.owner_uid, b.owner_created_at,
	b.retired_uid, b.tenant_id, b.scoped_key_id,
	b.limit_tokens, b.used_tokens, b.reserved_tokens, b.declared_limit_tokens, b.declared_generation,
	b.conflict_policy, b.default_ttl_ms, b.max_ttl_ms, b.max_records,
	b.raise_mode, b.raise_max_limit_tokens, b.raise_max_duration_ms,
	b.active_raise_id, b.limit_epoch, b.lease_records, b.audit_sequence, b.revision,
	b.expired_through, b.next_transition_at, b.closed_at, b.created_at, b.updated_at, b.settlement_policy,
	b.period_every, b.period_time_zone, b.period_start, b.period_end, b.retention_ms, b.purged_through`

// bucketRow is where bucketColumns are read into.
type bucketRow struct {
	bucket ledger.Bucket
	owner  ledger.Owner
}

func (r *bucketRow) targets() []any {
	b, owner := &r.bucket, &r.owner
	return []any{
		&b.Key, into(&owner.Cluster), into(&owner.Namespace), into(&owner.Name), into(&owner.UID), instant{&owner.CreatedAt},
		into(&b.RetiredUID), into(&b.TenantID), into(&b.ScopedKeyID),
		&b.Limit, &b.UsedTokens, &b.ReservedTokens, &b.DeclaredLimit, &b.DeclaredGeneration,
		into(&b.ConflictPolicy), milliseconds{&b.Settings.DefaultTTL}, milliseconds{&b.Settings.MaxTTL}, &b.Settings.MaxRecords,
		into(&b.RaisePolicy.Mode), &b.RaisePolicy.MaxLimit, milliseconds{&b.RaisePolicy.MaxDuration},
		into(&b.ActiveRaiseID), &b.LimitEpoch, &b.LeaseRecords, &b.AuditSequence, &b.Revision,
		instant{&b.ExpiredThrough}, instant{&b.NextTransitionAt}, optionalInstant{&b.ClosedAt}, instant{&b.CreatedAt}, instant{&b.UpdatedAt},
		into(&b.Settings.Settlement),
		into(&b.Period.Every), into(&b.Period.TimeZone), instant{&b.PeriodStart}, instant{&b.PeriodEnd},
		milliseconds{&b.Settings.Retention}, instant{&b.PurgedThrough},
	}
}

func (r *bucketRow) value() *ledger.Bucket {
	if r.owner.Name != "" {
		r.bucket.Owner = &r.owner
	}
	return &r.bucket
}

func scanBucket(row pgx.Row) (*ledger.Bucket, error) {
	var r bucketRow
	if err := row.Scan(r.targets()...); err != nil {
		return nil, err
	}
	return r.value(), nil
}

// lockBuckets locks the rows of the given keys in byte order, so that two
// transactions never wait for each other.
const lockBuckets = selectBuckets + `
FOR UPDATE`

// lockFreeBuckets is lockBuckets without those that somebody else has locked.
const lockFreeBuckets = selectBuckets + `
FOR UPDATE SKIP LOCKED`

const selectBuckets = `
SELECT` + bucketColumns + `
FROM tokenlease.buckets AS b
WHERE b.bucket_key = ANY ($1::text[])
ORDER BY b.bucket_key`

// bucketOfOwner finds the bucket that an object declares.
const bucketOfOwner = `
SELECT b.bucket_key
FROM tokenlease.buckets AS b
WHERE b.owner_namespace = $1::text AND b.owner_name = $2::text AND b.owner_cluster = $3::text
ORDER BY b.closed_at IS NOT NULL, b.created_at DESC, b.bucket_key
LIMIT 1`

// lockDueBuckets locks due rows that nobody else works on. The clock stands in a
// sub-select, without which the index could not be used.
const lockDueBuckets = `
SELECT` + bucketColumns + `
FROM tokenlease.buckets AS b
WHERE b.next_transition_at <= (SELECT tokenlease.ledger_now())
  AND b.next_transition_at < 'infinity'
  AND b.bucket_key <> ALL ($1::text[])
ORDER BY b.next_transition_at
LIMIT $2::bigint
FOR UPDATE SKIP LOCKED`

// nextDue answers how long, in milliseconds, until the next transition of a
// bucket that is not set aside; 0 when it is due. A day is as good as any longer
// time. Another hand may have written -infinity, which cannot be subtracted from.
const nextDue = `
SELECT (extract(epoch FROM
	least(greatest(b.next_transition_at, clock.now) - clock.now, interval '1 day')) * 1000)::bigint
FROM tokenlease.buckets AS b CROSS JOIN (SELECT tokenlease.ledger_now() AS now) AS clock
WHERE b.next_transition_at < 'infinity'
  AND b.bucket_key <> ALL ($1::text[])
ORDER BY b.next_transition_at
LIMIT 1`

// newBuckets are the rows to write, $1 to $38, in the order of bucketArguments.
const newBuckets = `
	unnest(
		$1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::timestamptz[],
		$7::text[], $8::text[], $9::text[],
		$10::bigint[], $11::bigint[], $12::bigint[], $13::bigint[],
		$14::text[], $15::bigint[], $16::bigint[], $17::bigint[],
		$18::text[], $19::bigint[], $20::bigint[],
		$21::text[], $22::bigint[], $23::bigint[], $24::bigint[], $25::bigint[],
		$26::timestamptz[], $27::timestamptz[], $28::timestamptz[], $29::timestamptz[], $30::timestamptz[], $31::bigint[],
		$32::text[], $33::text[], $34::text[], $35::timestamptz[], $36::timestamptz[],
		$37::bigint[], $38::timestamptz[])
	AS new (` + newBucketColumns + `)`

const newBucketColumns = `
		bucket_key, owner_cluster, owner_namespace, owner_name, owner_uid, owner_created_at,
		retired_uid, tenant_id, scoped_key_id,
		used_tokens, reserved_tokens, declared_limit_tokens, declared_generation,
		conflict_policy, default_ttl_ms, max_ttl_ms, max_records,
		raise_mode, raise_max_limit_tokens, raise_max_duration_ms,
		active_raise_id, limit_epoch, lease_records, audit_sequence, revision,
		expired_through, next_transition_at, closed_at, created_at, updated_at, limit_tokens,
		settlement_policy, period_every, period_time_zone, period_start, period_end, retention_ms, purged_through`

// changedColumns are all that can change but the limit.
const changedColumns = `
		owner_cluster = new.owner_cluster, owner_namespace = new.owner_namespace, owner_name = new.owner_name,
		owner_uid = new.owner_uid, owner_created_at = new.owner_created_at,
		retired_uid = new.retired_uid, tenant_id = new.tenant_id, scoped_key_id = new.scoped_key_id,
		used_tokens = new.used_tokens, reserved_tokens = new.reserved_tokens,
		declared_limit_tokens = new.declared_limit_tokens, declared_generation = new.declared_generation,
		conflict_policy = new.conflict_policy, default_ttl_ms = new.default_ttl_ms,
		max_ttl_ms = new.max_ttl_ms, max_records = new.max_records,
		raise_mode = new.raise_mode, raise_max_limit_tokens = new.raise_max_limit_tokens,
		raise_max_duration_ms = new.raise_max_duration_ms,
		active_raise_id = new.active_raise_id, limit_epoch = new.limit_epoch,
		lease_records = new.lease_records, audit_sequence = new.audit_sequence, revision = new.revision,
		expired_through = new.expired_through, next_transition_at = new.next_transition_at,
		closed_at = new.closed_at, updated_at = new.updated_at, settlement_policy = new.settlement_policy,
		period_every = new.period_every, period_time_zone = new.period_time_zone,
		period_start = new.period_start, period_end = new.period_end,
		retention_ms = new.retention_ms, purged_through = new.purged_through`

// insertBuckets refuses to write what would be due already: see updateBuckets.
const insertBuckets = `
WITH written AS (
	INSERT INTO tokenlease.buckets (` + newBucketColumns + `)
	SELECT * FROM ` + newBuckets + `
	WHERE new.next_transition_at > tokenlease.ledger_now()
	RETURNING 1)
SELECT tokenlease.require((SELECT count(*) FROM written), cardinality($1::text[]), 'buckets inserted')`

// updateBuckets writes rows without naming the limit, which would make the
// database take it for another hand's. A row that became due after the clock was
// read ($39), or that would be due as it is written, was decided too long ago: it
// is not written, and is decided again.
const updateBuckets = `
WITH written AS (
	UPDATE tokenlease.buckets AS b SET` + changedColumns + `
	FROM` + newBuckets + `
	WHERE b.bucket_key = new.bucket_key
	  AND b.limit_epoch = new.limit_epoch
	  AND (b.next_transition_at <= greatest(b.updated_at, $39::timestamptz)
		OR b.next_transition_at > tokenlease.ledger_now())
	  AND new.next_transition_at > tokenlease.ledger_now()
	RETURNING 1)
SELECT tokenlease.require((SELECT count(*) FROM written), cardinality($1::text[]), 'buckets updated')`

// updateBucketLimits is updateBuckets for those whose limit the ledger writes,
// and the only statement that names the limit.
const updateBucketLimits = `
WITH written AS (
	UPDATE tokenlease.buckets AS b SET` + changedColumns + `,
		limit_tokens = new.limit_tokens
	FROM` + newBuckets + `
	WHERE b.bucket_key = new.bucket_key
	  AND b.limit_epoch < new.limit_epoch
	  AND (b.next_transition_at <= greatest(b.updated_at, $39::timestamptz)
		OR b.next_transition_at > tokenlease.ledger_now())
	  AND new.next_transition_at > tokenlease.ledger_now()
	RETURNING 1)
SELECT tokenlease.require((SELECT count(*) FROM written), cardinality($1::text[]), 'bucket limits written')`

// updateCounters is updateBuckets for what reserving and settling change, which is
// nearly all that is ever written. The timer stays as it is, so it has to lie in
// the future still.
const updateCounters = `
WITH written AS (
	UPDATE tokenlease.buckets AS b SET
		used_tokens = new.used_tokens, reserved_tokens = new.reserved_tokens, lease_records = new.lease_records,
		revision = new.revision, expired_through = new.expired_through, updated_at = new.updated_at
	FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::timestamptz[], $7::timestamptz[])
		AS new (bucket_key, used_tokens, reserved_tokens, lease_records, revision, expired_through, updated_at)
	WHERE b.bucket_key = new.bucket_key
	  AND b.next_transition_at > tokenlease.ledger_now()
	RETURNING 1)
SELECT tokenlease.require((SELECT count(*) FROM written), cardinality($1::text[]), 'bucket counters updated')`

// deleteBuckets holds to the same condition as updateBuckets, with the clock in $2.
const deleteBuckets = `
WITH gone AS (
	DELETE FROM tokenlease.buckets AS b
	WHERE b.bucket_key = ANY ($1::text[])
	  AND (b.next_transition_at <= greatest(b.updated_at, $2::timestamptz)
		OR b.next_transition_at > tokenlease.ledger_now())
	RETURNING 1)
SELECT tokenlease.require((SELECT count(*) FROM gone), cardinality($1::text[]), 'buckets deleted')`

// bucketArguments are the columns of newBuckets.
func bucketArguments(buckets []*ledger.Bucket) []any {
	ownerField := func(field func(*ledger.Owner) string) []*string {
		return column(buckets, func(b *ledger.Bucket) *string {
			if b.Owner == nil {
				return nil
			}
			value := field(b.Owner)
			return &value
		})
	}
	return []any{
		column(buckets, func(b *ledger.Bucket) string { return b.Key }),
		ownerField(func(o *ledger.Owner) string { return o.Cluster }),
		ownerField(func(o *ledger.Owner) string { return o.Namespace }),
		ownerField(func(o *ledger.Owner) string { return o.Name }),
		ownerField(func(o *ledger.Owner) string { return o.UID }),
		column(buckets, func(b *ledger.Bucket) *time.Time {
			if b.Owner == nil {
				return nil
			}
			return &b.Owner.CreatedAt
		}),
		column(buckets, func(b *ledger.Bucket) *string { return optional(b.RetiredUID) }),
		column(buckets, func(b *ledger.Bucket) *string { return optional(b.TenantID) }),
		column(buckets, func(b *ledger.Bucket) *string { return optional(b.ScopedKeyID) }),
		column(buckets, func(b *ledger.Bucket) int64 { return b.UsedTokens }),
		column(buckets, func(b *ledger.Bucket) int64 { return b.ReservedTokens }),
		column(buckets, func(b *ledger.Bucket) *int64 { return b.DeclaredLimit }),
		column(buckets, func(b *ledger.Bucket) int64 { return b.DeclaredGeneration }),
		column(buckets, func(b *ledger.Bucket) *string { return optional(b.ConflictPolicy) }),
		column(buckets, func(b *ledger.Bucket) int64 { return b.Settings.DefaultTTL.Milliseconds() }),
		column(buckets, func(b *ledger.Bucket) int64 { return b.Settings.MaxTTL.Milliseconds() }),
		column(buckets, func(b *ledger.Bucket) int64 { return b.Settings.MaxRecords }),
		column(buckets, func(b *ledger.Bucket) *string { return optional(b.RaisePolicy.Mode) }),
		column(buckets, func(b *ledger.Bucket) int64 { return b.RaisePolicy.MaxLimit }),
		column(buckets, func(b *ledger.Bucket) int64 { return b.RaisePolicy.MaxDuration.Milliseconds() }),
		column(buckets, func(b *ledger.Bucket) *string { return optional(b.ActiveRaiseID) }),
		column(buckets, func(b *ledger.Bucket) int64 { return b.LimitEpoch }),
		column(buckets, func(b *ledger.Bucket) int64 { return b.LeaseRecords }),
		column(buckets, func(b *ledger.Bucket) int64 { return b.AuditSequence }),
		column(buckets, func(b *ledger.Bucket) int64 { return b.Revision }),
		column(buckets, func(b *ledger.Bucket) time.Time { return b.ExpiredThrough }),
		column(buckets, func(b *ledger.Bucket) pgtype.Timestamptz { return orInfinity(b.NextTransitionAt) }),
		column(buckets, func(b *ledger.Bucket) *time.Time { return b.ClosedAt }),
		column(buckets, func(b *ledger.Bucket) time.Time { return b.CreatedAt }),
		column(buckets, func(b *ledger.Bucket) time.Time { return b.UpdatedAt }),
		column(buckets, func(b *ledger.Bucket) int64 { return b.Limit }),
		column(buckets, func(b *ledger.Bucket) string { return string(b.Settings.Settlement) }),
		column(buckets, func(b *ledger.Bucket) *string { return optional(b.Period.Every) }),
		column(buckets, func(b *ledger.Bucket) *string { return optional(b.Period.TimeZone) }),
		column(buckets, func(b *ledger.Bucket) *time.Time { return optionalTime(b.PeriodStart) }),
		column(buckets, func(b *ledger.Bucket) *time.Time { return optionalTime(b.PeriodEnd) }),
		column(buckets, func(b *ledger.Bucket) int64 { return b.Settings.Retention.Milliseconds() }),
		column(buckets, func(b *ledger.Bucket) *time.Time { return optionalTime(b.PurgedThrough) }),
	}
}

// bucketWrites sorts bucket rows by the statement that writes them.
type bucketWrites struct {
	insert, update, updateLimit []*ledger.Bucket
	counters                    counterWrites
	delete                      []string
}

// add takes the bucket as it was read, and as it shall be.
func (w *bucketWrites) add(before *ledger.Bucket, view *ledger.View, effects *ledger.Effects) {
	switch effects.Row {
	case ledger.RowUnchanged:
	case ledger.RowInsert:
		w.insert = append(w.insert, view.Bucket)
	case ledger.RowUpdate:
		switch {
		case effects.LimitWritten:
			w.updateLimit = append(w.updateLimit, view.Bucket)
		case onlyCountersDiffer(before, view.Bucket):
			w.counters.add(view.Bucket)
		default:
			w.update = append(w.update, view.Bucket)
		}
	case ledger.RowDelete:
		w.delete = append(w.delete, view.Key)
	}
}

// queue takes the clock at which the writes were decided.
func (w *bucketWrites) queue(batch *pgx.Batch, clock time.Time) {
	if len(w.delete) > 0 {
		batch.Queue(deleteBuckets, w.delete, clock)
	}
	if len(w.insert) > 0 {
		batch.Queue(insertBuckets, bucketArguments(w.insert)...)
	}
	if len(w.update) > 0 {
		batch.Queue(updateBuckets, append(bucketArguments(w.update), clock)...)
	}
	if len(w.updateLimit) > 0 {
		batch.Queue(updateBucketLimits, append(bucketArguments(w.updateLimit), clock)...)
	}
	w.counters.queue(batch)
}

// counterWrites are the columns of updateCounters.
type counterWrites struct {
	keys                                               []string
	usedTokens, reservedTokens, leaseRecords, revision []int64
	expiredThrough, updatedAt                          []time.Time
}

// onlyCountersDiffer reports whether updateCounters writes all that has changed.
func onlyCountersDiffer(before, after *ledger.Bucket) bool {
	b := *before
	b.UsedTokens, b.ReservedTokens, b.LeaseRecords = after.UsedTokens, after.ReservedTokens, after.LeaseRecords
	b.Revision, b.ExpiredThrough, b.UpdatedAt = after.Revision, after.ExpiredThrough, after.UpdatedAt
	return b == *after
}

func (w *counterWrites) add(b *ledger.Bucket) {
	w.keys = append(w.keys, b.Key)
	w.usedTokens = append(w.usedTokens, b.UsedTokens)
	w.reservedTokens = append(w.reservedTokens, b.ReservedTokens)
	w.leaseRecords = append(w.leaseRecords, b.LeaseRecords)
	w.revision = append(w.revision, b.Revision)
	w.expiredThrough = append(w.expiredThrough, b.ExpiredThrough)
	w.updatedAt = append(w.updatedAt, b.UpdatedAt)
}

func (w *counterWrites) queue(batch *pgx.Batch) {
	if len(w.keys) > 0 {
		batch.Queue(updateCounters, w.keys, w.usedTokens, w.reservedTokens, w.leaseRecords, w.revision,
			w.expiredThrough, w.updatedAt)
	}
}
