package postgres

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/token-lease/operator/internal/ledger"
)

const (
	// maxKnown bounds how many buckets one query compares.
	maxKnown = 5000
	// maxPage bounds a page of rows.
	maxPage = 10000

	// readAttempts bounds how often a read is repeated: a read-only statement can
	// always be.
	readAttempts = 2
)

// changedBuckets answers the buckets that are not as the caller knows them, each
// with its active raise and the number of those that are pending.
const changedBuckets = `
SELECT known.bucket_key, coalesce(pending.raises, 0),` + bucketColumns + `,` + raiseColumns + `
FROM unnest($1::text[], $2::bigint[], $3::timestamptz[]) AS known (bucket_key, revision, created_at)
LEFT JOIN tokenlease.buckets AS b ON b.bucket_key = known.bucket_key
LEFT JOIN tokenlease.raises AS r
	ON r.bucket_key = b.bucket_key AND r.raise_id = b.active_raise_id AND r.state = 'active'
LEFT JOIN LATERAL (
	SELECT count(*) AS raises FROM tokenlease.raises AS p
	WHERE p.bucket_key = b.bucket_key AND p.state = 'pending') AS pending ON true
WHERE b.revision IS DISTINCT FROM known.revision OR b.created_at <> known.created_at OR known.revision = 0`

// scanChange reads a row of changedBuckets; a bucket or a raise that is not there
// has NULL for its key.
func scanChange(row pgx.CollectableRow) (ledger.Change, error) {
	var change ledger.Change
	var pending int64
	var bucket bucketRow
	var raise ledger.Raise
	intoBucket, intoRaise := bucket.targets(), raiseTargets(&raise)
	const bucketAt = 2
	raiseAt := bucketAt + len(intoBucket)
	raw := row.RawValues()
	targets := []any{&change.Key, &pending}
	targets = append(targets, targetsUnlessNull(raw[bucketAt], intoBucket)...)
	targets = append(targets, targetsUnlessNull(raw[raiseAt], intoRaise)...)
	hasBucket, hasRaise := raw[bucketAt] != nil, raw[raiseAt] != nil
	if err := row.Scan(targets...); err != nil || !hasBucket {
		return change, err
	}
	var active []*ledger.Raise
	if hasRaise {
		active = append(active, &raise)
	}
	snapshot := ledger.NewSnapshot(bucket.value(), active)
	snapshot.PendingRaises = pending
	change.Snapshot = &snapshot
	return change, nil
}

// targetsUnlessNull returns as many nils, which skip columns, if the first column
// is NULL.
func targetsUnlessNull(first []byte, targets []any) []any {
	if first == nil {
		return make([]any, len(targets))
	}
	return targets
}

// list runs a query outside a transaction and reads its rows.
func list[T any](
	ctx context.Context, s *Store, pool *pgxpool.Pool,
	query string, scan func(pgx.CollectableRow) (T, error), arguments ...any,
) ([]T, error) {
	ctx, cancel := context.WithTimeout(ctx, s.options.CallTimeout)
	defer cancel()
	var found []T
	err := s.attempt(ctx, readAttempts, nil, func() error {
		found = nil
		return s.readOnce(ctx, pool, func(ctx context.Context, conn *pgx.Conn) error {
			rows, err := conn.Query(ctx, query, arguments...)
			if err != nil {
				return err
			}
			found, err = pgx.CollectRows(rows, scan)
			return err
		})
	})
	if err != nil {
		return nil, domainError(err)
	}
	return found, nil
}

// readOnce lends a connection to a read. This process bounds it, because outside
// a transaction the server's bounds would outlive it.
func (s *Store) readOnce(ctx context.Context, pool *pgxpool.Pool, read func(context.Context, *pgx.Conn) error) error {
	caller := ctx
	ctx, cancel := context.WithTimeout(ctx, s.transactionBound())
	defer cancel()
	conn, err := s.acquire(ctx, pool)
	if err != nil {
		return s.failed(caller, err, false)
	}
	defer conn.Release()
	if err := read(ctx, conn.Conn()); err != nil {
		return s.failed(caller, err, false)
	}
	return nil
}

func page(limit int) int { return max(0, min(limit, maxPage)) }

// Changes implements ledger.Store.
func (s *Store) Changes(ctx context.Context, known []ledger.KnownRevision) ([]ledger.Change, error) {
	var changes []ledger.Change
	for start := 0; start < len(known); start += maxKnown {
		part := known[start:min(start+maxKnown, len(known))]
		found, err := list(ctx, s, s.reads, changedBuckets, scanChange,
			column(part, func(k ledger.KnownRevision) string { return k.Key }),
			column(part, func(k ledger.KnownRevision) int64 { return k.Revision }),
			column(part, func(k ledger.KnownRevision) time.Time { return k.CreatedAt }))
		if err != nil {
			return nil, err
		}
		changes = append(changes, found...)
	}
	return changes, nil
}

// BucketOf implements ledger.Store.
func (s *Store) BucketOf(ctx context.Context, owner ledger.Owner) (string, error) {
	found, err := list(ctx, s, s.reads, bucketOfOwner, pgx.RowTo[string], owner.Namespace, owner.Name, owner.Cluster)
	if err != nil {
		return "", err
	}
	if len(found) == 0 {
		return "", ledger.Errorf(ledger.CodeBucketNotFound, "Bucket does not exist.").
			WithDetails(map[string]any{"namespace": owner.Namespace, "name": owner.Name})
	}
	return found[0], nil
}

// Raise implements ledger.Store.
func (s *Store) Raise(ctx context.Context, cluster, uid string) (*ledger.Raise, error) {
	found, err := list(ctx, s, s.reads, raiseByUID, toRaise, cluster, uid)
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, ledger.Errorf(ledger.CodeRaiseNotFound, "No raise is recorded for the object with UID %q.", uid)
	}
	return found[0], nil
}

// LiveRaises implements ledger.Store.
func (s *Store) LiveRaises(ctx context.Context, cluster string, after ledger.RaisePosition, limit int) ([]*ledger.Raise, error) {
	return list(ctx, s, s.reads, listLiveRaises, toRaise,
		cluster, after.BucketKey, after.RaiseID, page(limit))
}

// Leases implements ledger.Store.
func (s *Store) Leases(ctx context.Context, bucketKey string, after ledger.LeasePosition, limit int) ([]*ledger.Lease, error) {
	return list(ctx, s, s.reads, listLeases, toLease, bucketKey, after.ExpiresAt, after.LeaseID, page(limit))
}

// Audit implements ledger.Store.
func (s *Store) Audit(ctx context.Context, bucketKey string, afterSequence int64, limit int) ([]ledger.AuditRow, error) {
	return list(ctx, s, s.reads, listAudit, toAudit, bucketKey, afterSequence, page(limit))
}

// ActivePastExpiry implements ledger.Store.
func (s *Store) ActivePastExpiry(ctx context.Context) (int64, error) {
	return s.count(ctx, activePastExpiry)
}

// OpenReviews implements ledger.Store.
func (s *Store) OpenReviews(ctx context.Context) (int64, error) { return s.count(ctx, openReviews) }

func (s *Store) count(ctx context.Context, query string) (int64, error) {
	found, err := list(ctx, s, s.reads, query, pgx.RowTo[int64])
	if err != nil {
		return 0, err
	}
	return found[0], nil
}

func toRaise(row pgx.CollectableRow) (*ledger.Raise, error)   { return scanRaise(row) }
func toLease(row pgx.CollectableRow) (*ledger.Lease, error)   { return scanLease(row) }
func toAudit(row pgx.CollectableRow) (ledger.AuditRow, error) { return scanAudit(row) }
