package postgres

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/token-lease/operator/internal/ledger"
	"github.com/token-lease/operator/internal/ledger/ledgertest"
)

func TestConformance(t *testing.T) {
	all := &databases{parent: t}
	ledgertest.Exercise(t, func(t *testing.T) ledgertest.Harness {
		d := all.take(t)
		return &harness{
			database: d,
			store:    d.store(func(o *Options) { o.Worker = ledgertest.WorkerName }),
			clock:    &databaseClock{ManualClock: ledgertest.NewClock(), database: d},
		}
	})
}

// databases are used by one test after the other, because making one takes longer
// than most tests.
type databases struct {
	parent *testing.T
	mutex  sync.Mutex
	free   []*database
}

// take lends an empty database to a test.
func (a *databases) take(t *testing.T) *database {
	t.Helper()
	a.mutex.Lock()
	defer a.mutex.Unlock()
	if len(a.free) == 0 {
		made := newDatabase(a.parent)
		made.holdClock(ledgertest.Epoch)
		a.free = append(a.free, made)
	}
	taken := a.free[len(a.free)-1]
	a.free = a.free[:len(a.free)-1]
	t.Cleanup(func() {
		// Not even a superuser empties the audit, unless triggers are off.
		if _, err := taken.conn.Exec(context.Background(), emptyDatabase); err != nil {
			t.Error(err)
			return
		}
		a.mutex.Lock()
		defer a.mutex.Unlock()
		a.free = append(a.free, taken)
	})
	lent := *taken
	lent.t = t
	lent.setClock(ledgertest.Epoch)
	return &lent
}

const emptyDatabase = `
SET session_replication_role = replica;
TRUNCATE tokenlease.buckets, tokenlease.leases, tokenlease.raises,
	tokenlease.approvals, tokenlease.operations, tokenlease.audit;
RESET session_replication_role`

// harness plays time and another hand through a session of its own.
type harness struct {
	database *database
	store    *Store
	clock    *databaseClock
}

func (h *harness) Store() ledger.Store     { return h.store }
func (h *harness) Clock() ledgertest.Clock { return h.clock }

func (h *harness) OverrideLimit(ctx context.Context, key string, limit int64) error {
	_, err := h.database.conn.Exec(ctx, `UPDATE tokenlease.buckets SET limit_tokens = $2 WHERE bucket_key = $1`, key, limit)
	return err
}

func (h *harness) DropBucket(ctx context.Context, key string) error {
	return pgx.BeginFunc(ctx, h.database.conn, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `DELETE FROM tokenlease.leases WHERE bucket_key = $1`, key)
		if err == nil {
			_, err = tx.Exec(ctx, `DELETE FROM tokenlease.periods WHERE bucket_key = $1`, key)
		}
		if err == nil {
			_, err = tx.Exec(ctx, `DELETE FROM tokenlease.rollups WHERE bucket_key = $1`, key)
		}
		if err == nil {
			_, err = tx.Exec(ctx, `DELETE FROM tokenlease.buckets WHERE bucket_key = $1`, key)
		}
		return err
	})
}

// violations lists what does not hold, one line each.
const violations = `
SELECT format('bucket %s: counts (used, reserved, records) are (%s, %s, %s), its leases say (%s, %s, %s)', b.bucket_key,
	b.used_tokens, b.reserved_tokens, b.lease_records, l.used, l.reserved, l.records)
FROM tokenlease.buckets AS b
CROSS JOIN LATERAL (
	SELECT coalesce(sum(actual_tokens) FILTER (WHERE state = 'committed' AND current), 0) + (
			SELECT coalesce(sum(r.used_tokens), 0) FROM tokenlease.rollups AS r
			WHERE r.bucket_key = b.bucket_key AND r.period_start = coalesce(b.period_start, '-infinity')) AS used,
		coalesce(sum(reserved_tokens) FILTER (WHERE state = 'reserved' AND current), 0) AS reserved, count(*) AS records
	FROM (SELECT *, period_start IS NOT DISTINCT FROM b.period_start AS current FROM tokenlease.leases) AS all_leases
	WHERE bucket_key = b.bucket_key) AS l
WHERE (b.used_tokens, b.reserved_tokens, b.lease_records) IS DISTINCT FROM (l.used, l.reserved, l.records)
UNION ALL
SELECT format('period %s of bucket %s: counts (used, reserved) are (%s, %s), its leases say (%s, %s)', p.started_at, p.bucket_key,
	p.used_tokens, p.reserved_tokens, l.used, l.reserved)
FROM tokenlease.periods AS p
CROSS JOIN LATERAL (
	SELECT coalesce(sum(actual_tokens) FILTER (WHERE state = 'committed'), 0) + (
			SELECT coalesce(sum(r.used_tokens), 0) FROM tokenlease.rollups AS r
			WHERE r.bucket_key = p.bucket_key AND r.period_start = p.started_at) AS used,
		coalesce(sum(reserved_tokens) FILTER (WHERE state = 'reserved'), 0) AS reserved
	FROM tokenlease.leases WHERE bucket_key = p.bucket_key AND coalesce(period_start, '-infinity') = p.started_at) AS l
WHERE (p.used_tokens, p.reserved_tokens) IS DISTINCT FROM (l.used, l.reserved)
UNION ALL
SELECT format('lease %s of bucket %s is of a period that is not there: %s', l.lease_id, l.bucket_key, l.period_start)
FROM tokenlease.leases AS l JOIN tokenlease.buckets AS b ON b.bucket_key = l.bucket_key
WHERE l.period_start IS DISTINCT FROM b.period_start AND NOT EXISTS (
	SELECT FROM tokenlease.periods AS p
	WHERE p.bucket_key = l.bucket_key AND p.started_at = coalesce(l.period_start, '-infinity'))
UNION ALL
SELECT format('lease %s of bucket %s has no bucket', l.lease_id, l.bucket_key)
FROM tokenlease.leases AS l
WHERE NOT EXISTS (SELECT FROM tokenlease.buckets AS b WHERE b.bucket_key = l.bucket_key)
UNION ALL
SELECT format('bucket %s: a count is out of range', b.bucket_key)
FROM tokenlease.buckets AS b
WHERE least(b.limit_tokens, b.used_tokens, b.reserved_tokens) < 0
	OR greatest(b.limit_tokens, b.used_tokens + b.reserved_tokens) > 9007199254740991
UNION ALL
SELECT format('bucket %s points at raise %s, which is not its active one with its epoch and limit', b.bucket_key, b.active_raise_id)
FROM tokenlease.buckets AS b
WHERE b.active_raise_id IS NOT NULL AND NOT EXISTS (
	SELECT FROM tokenlease.raises AS r
	WHERE r.bucket_key = b.bucket_key AND r.raise_id = b.active_raise_id AND r.state = 'active'
		AND r.limit_epoch = b.limit_epoch AND r.applied_limit_tokens = b.limit_tokens)
UNION ALL
SELECT format('bucket %s has %s active raises', r.bucket_key, count(*))
FROM tokenlease.raises AS r WHERE r.state = 'active' GROUP BY r.bucket_key HAVING count(*) > 1
UNION ALL
SELECT format('audit of bucket %s is not numbered 1..%s: %s rows up to %s', a.bucket_key, b.audit_sequence, count(*), max(a.sequence))
FROM tokenlease.audit AS a LEFT JOIN tokenlease.buckets AS b ON b.bucket_key = a.bucket_key
GROUP BY a.bucket_key, b.bucket_key, b.audit_sequence
HAVING count(*) <> max(a.sequence) OR min(a.sequence) <> 1 OR max(a.sequence) <> coalesce(b.audit_sequence, max(a.sequence))
UNION ALL
SELECT format('bucket %s counts %s audit rows and has none', b.bucket_key, b.audit_sequence)
FROM tokenlease.buckets AS b
WHERE b.audit_sequence > 0 AND NOT EXISTS (SELECT FROM tokenlease.audit AS a WHERE a.bucket_key = b.bucket_key)
UNION ALL
SELECT format('bucket %s: the next transition is %s, later than the expiry of raise %s', b.bucket_key, b.next_transition_at, r.raise_id)
FROM tokenlease.buckets AS b JOIN tokenlease.raises AS r ON r.bucket_key = b.bucket_key
WHERE r.state IN ('pending', 'active') AND b.next_transition_at > r.expires_at`

func (h *harness) Invariants(ctx context.Context) error {
	rows, err := h.database.conn.Query(ctx, violations)
	if err != nil {
		return err
	}
	found, err := pgx.CollectRows(rows, pgx.RowTo[string])
	for _, violation := range found {
		err = errors.Join(err, fmt.Errorf("%s", violation))
	}
	return err
}

// databaseClock moves the clock of the database along with the one in this
// process.
type databaseClock struct {
	*ledgertest.ManualClock
	database *database
}

func (c *databaseClock) Set(now time.Time) {
	c.ManualClock.Set(now)
	c.database.setClock(c.Now())
}

func (c *databaseClock) Advance(d time.Duration) {
	c.ManualClock.Advance(d)
	c.database.setClock(c.Now())
}
