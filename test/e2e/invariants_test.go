package e2e_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/token-lease/operator/internal/ledger"
)

// maxFaultsShown bounds what a broken invariant prints.
const maxFaultsShown = 20

// invariant is a statement about a ledger that holds at every moment, whatever
// was done to it and whoever runs. Its query finds the rows that contradict it.
type invariant struct {
	name string
	// query may read from the tables of limitChain.
	query string
}

// limitChain prepares the audit for the invariants: chain is each row with the
// row before it; writers are the rows that wrote a limit; owners says for each row
// which row wrote the limit last before it.
const limitChain = `
WITH chain AS (
	SELECT a.*,
		a.event IN ('RaiseActivated', 'RaiseRestored', 'RaiseRebased', 'LimitDeclared', 'LimitChangedOutsideLedger')
			OR (a.event = 'LimitSet' AND a.outcome = 'applied') AS writes,
		a.event = 'BucketOpened' AS begins,
		row_number() OVER w AS number,
		lag(a.event) OVER w AS event_before,
		lag(a.effective_limit_tokens) OVER w AS limit_before,
		lag(a.limit_epoch) OVER w AS epoch_before,
		lag(a.recorded_at) OVER w AS recorded_before,
		lead(a.sequence) OVER w IS NULL AS is_last
	FROM tokenlease.audit AS a
	WINDOW w AS (PARTITION BY a.bucket_key ORDER BY a.sequence)
), owners AS (
	SELECT c.bucket_key, c.sequence, o.event, o.raise_id
	FROM chain AS c
	LEFT JOIN LATERAL (
		SELECT p.event, p.raise_id FROM chain AS p
		WHERE p.bucket_key = c.bucket_key AND p.sequence < c.sequence AND (p.writes OR p.begins)
		ORDER BY p.sequence DESC LIMIT 1) AS o ON true
)`

// invariants are the ledger's promises: counters, evidence, promise 1 and 2. They are
// written without any of the product's own code.
var invariants = []invariant{
	{"used, reserved and the number of leases are the sums over the leases and rollups", `
		SELECT b.bucket_key, b.used_tokens, b.reserved_tokens, b.lease_records, l.*
		FROM tokenlease.buckets AS b, LATERAL (
			SELECT coalesce(sum(actual_tokens) FILTER (WHERE state = 'committed' AND current), 0) + (
			         SELECT coalesce(sum(r.used_tokens), 0) FROM tokenlease.rollups AS r
			         WHERE r.bucket_key = b.bucket_key AND r.period_start = coalesce(b.period_start, '-infinity')) AS used_by_leases,
			       coalesce(sum(reserved_tokens) FILTER (WHERE state = 'reserved' AND current), 0) AS reserved_by_leases,
			       count(*) AS leases
			FROM (SELECT *, period_start IS NOT DISTINCT FROM b.period_start AS current FROM tokenlease.leases) AS of_any_period
			WHERE bucket_key = b.bucket_key) AS l
		WHERE (b.used_tokens, b.reserved_tokens, b.lease_records) IS DISTINCT FROM (l.used_by_leases, l.reserved_by_leases, l.leases)`},
	{"used and reserved of an ended period are the sums over the leases that were reserved in it", `
		SELECT p.bucket_key, p.started_at, p.used_tokens, p.reserved_tokens, l.*
		FROM tokenlease.periods AS p, LATERAL (
			SELECT coalesce(sum(actual_tokens) FILTER (WHERE state = 'committed'), 0) + (
			         SELECT coalesce(sum(r.used_tokens), 0) FROM tokenlease.rollups AS r
			         WHERE r.bucket_key = p.bucket_key AND r.period_start = p.started_at) AS used_by_leases,
			       coalesce(sum(reserved_tokens) FILTER (WHERE state = 'reserved'), 0) AS reserved_by_leases
			FROM tokenlease.leases WHERE bucket_key = p.bucket_key AND coalesce(period_start, '-infinity') = p.started_at) AS l
		WHERE (p.used_tokens, p.reserved_tokens) IS DISTINCT FROM (l.used_by_leases, l.reserved_by_leases)`},
	{"audit rows are numbered without gaps, up to the bucket's own number", `
		SELECT bucket_key, sequence, number FROM chain WHERE sequence <> number
		UNION ALL
		SELECT b.bucket_key, b.audit_sequence, coalesce(max(a.sequence), 0)
		FROM tokenlease.buckets AS b LEFT JOIN tokenlease.audit AS a USING (bucket_key)
		GROUP BY b.bucket_key, b.audit_sequence HAVING b.audit_sequence <> coalesce(max(a.sequence), 0)`},
	{"time does not run backwards in a bucket's audit", `
		SELECT bucket_key, sequence, event, recorded_at, recorded_before FROM chain WHERE recorded_at < recorded_before`},
	{"a bucket is opened only where none was", `
		SELECT bucket_key, sequence, event_before FROM chain
		WHERE begins AND event_before NOT IN ('BucketDeleted', 'BucketForgotten')`},
	{"every change of a limit is in the audit: each row finds the limit that the row before it left", `
		SELECT bucket_key, sequence, event, outcome, prior_limit_tokens, limit_before, event_before FROM chain
		WHERE NOT begins AND effective_limit_tokens IS NOT NULL AND prior_limit_tokens IS DISTINCT FROM limit_before`},
	{"only rows that write a limit change it, and they count its epoch on", `
		SELECT bucket_key, sequence, event, outcome, prior_limit_tokens, effective_limit_tokens, limit_epoch, epoch_before FROM chain
		WHERE NOT begins AND effective_limit_tokens IS NOT NULL
		  AND (limit_epoch <> epoch_before + writes::int OR (NOT writes AND effective_limit_tokens <> prior_limit_tokens))`},
	{"the limit is the one that the audit ends with", `
		SELECT b.bucket_key, b.limit_tokens, c.effective_limit_tokens, b.limit_epoch, c.limit_epoch AS audited_epoch, c.event
		FROM tokenlease.buckets AS b LEFT JOIN chain AS c ON c.bucket_key = b.bucket_key AND c.is_last
		WHERE (b.limit_tokens, b.limit_epoch) IS DISTINCT FROM (c.effective_limit_tokens, c.limit_epoch)`},
	{"a raise starts on the limit that it expects", `
		SELECT c.bucket_key, c.sequence, c.raise_id, c.prior_limit_tokens, c.effective_limit_tokens, r.normal_limit_tokens, r.temporary_limit_tokens
		FROM chain AS c LEFT JOIN tokenlease.raises AS r USING (bucket_key, raise_id)
		WHERE c.event = 'RaiseActivated' AND (c.prior_limit_tokens, c.effective_limit_tokens, c.recorded_at)
			IS DISTINCT FROM (r.normal_limit_tokens, r.temporary_limit_tokens, r.activated_at)`},
	{"promise 2: only the raise that wrote the limit last moves it or takes it back, to where it belongs", `
		SELECT c.bucket_key, c.sequence, c.event, c.raise_id, o.event AS written_by, o.raise_id AS written_for,
			c.effective_limit_tokens, r.restore_to_tokens
		FROM chain AS c JOIN owners AS o USING (bucket_key, sequence)
		LEFT JOIN tokenlease.raises AS r ON r.bucket_key = c.bucket_key AND r.raise_id = c.raise_id
		WHERE c.event IN ('RaiseRestored', 'RaiseRebased')
		  AND (o.event NOT IN ('RaiseActivated', 'RaiseRebased') OR o.raise_id IS DISTINCT FROM c.raise_id
			OR (c.event = 'RaiseRestored' AND (c.effective_limit_tokens, c.recorded_at) IS DISTINCT FROM (r.restore_to_tokens, r.ended_at)))`},
	{"a raise that still owned the limit at its end has given it back", `
		SELECT c.bucket_key, c.sequence, c.reason, c.raise_id, o.event AS written_by
		FROM chain AS c JOIN owners AS o USING (bucket_key, sequence)
		WHERE c.event = 'RaiseFailed' AND c.effective_limit_tokens IS NOT NULL
		  AND o.event IN ('RaiseActivated', 'RaiseRebased') AND o.raise_id = c.raise_id`},
	{"a raise starts and ends at most once, and its record says what the audit says", `
		SELECT r.bucket_key, r.raise_id, r.state, r.reason, r.review_required, a.*
		FROM tokenlease.raises AS r, LATERAL (
			SELECT count(*) FILTER (WHERE event = 'RaiseActivated') AS activated,
			       count(*) FILTER (WHERE event = 'RaiseRestored') AS restored,
			       count(*) FILTER (WHERE event = 'RaiseFailed') AS failed,
			       count(*) FILTER (WHERE event = 'RaiseObserved' AND operation_id LIKE '%:observe-restore') AS observed
			FROM tokenlease.audit WHERE bucket_key = r.bucket_key AND raise_id = r.raise_id) AS a
		WHERE a.activated <> (r.activated_at IS NOT NULL)::int
		   OR a.restored <> (r.state = 'restored')::int
		   OR a.failed + a.observed <> (r.state = 'failed')::int
		   OR r.review_required <> (r.state = 'failed' AND r.activated_at IS NOT NULL AND r.reason = 'LimitChanged')`},
	{"a raise is in force within its window only", `
		SELECT bucket_key, raise_id, state, reason, starts_at, activated_at, expires_at, ended_at FROM tokenlease.raises AS r
		WHERE activated_at < starts_at OR (state = 'restored' AND reason = 'Expired' AND ended_at < expires_at)
		   OR (activated_at >= expires_at AND NOT EXISTS (
				SELECT FROM tokenlease.audit AS a WHERE a.bucket_key = r.bucket_key AND a.raise_id = r.raise_id
				AND a.event = 'RaiseShortened' AND a.recorded_at >= r.activated_at))`},
	{"the bucket points at the raise that is active, as long as that owns the limit", `
		SELECT b.bucket_key, b.active_raise_id, b.limit_epoch, b.limit_tokens, r.raise_id, r.state, r.limit_epoch AS raise_epoch, r.applied_limit_tokens
		FROM tokenlease.buckets AS b LEFT JOIN tokenlease.raises AS r ON r.bucket_key = b.bucket_key AND r.raise_id = b.active_raise_id
		WHERE b.active_raise_id IS NOT NULL
		  AND (r.state, r.limit_epoch, r.applied_limit_tokens) IS DISTINCT FROM ('active', b.limit_epoch, b.limit_tokens)`},
	{"the bucket's row is the timer of its raises", `
		SELECT b.bucket_key, b.next_transition_at, r.raise_id, r.state, r.starts_at, r.expires_at
		FROM tokenlease.buckets AS b JOIN tokenlease.raises AS r USING (bucket_key)
		WHERE r.state IN ('pending', 'active') AND b.next_transition_at > r.expires_at`},
	{"an approval is spent by one raise that ran", `
		SELECT r.cluster, r.namespace, r.tenant_id, r.approval_id, array_agg(r.raise_id) AS raises, min(a.raise_id) AS spent_by
		FROM tokenlease.raises AS r LEFT JOIN tokenlease.approvals AS a USING (cluster, namespace, tenant_id, approval_id)
		WHERE r.activated_at IS NOT NULL
		GROUP BY r.cluster, r.namespace, r.tenant_id, r.approval_id
		HAVING count(*) > 1 OR min(r.raise_id) IS DISTINCT FROM min(a.raise_id)`},
	{"promise 1: what was admitted under a raise was admitted within it", `
		SELECT l.bucket_key, l.lease_id, l.created_at, r.raise_id, r.activated_at, r.expires_at, r.ended_at
		FROM tokenlease.leases AS l
		JOIN tokenlease.buckets AS b ON b.bucket_key = l.bucket_key
		LEFT JOIN tokenlease.raises AS r ON r.bucket_key = l.bucket_key AND r.raise_id = l.raise_id
		WHERE l.raise_id IS NOT NULL AND (r.activated_at IS NULL OR l.created_at < r.activated_at OR l.created_at > r.ended_at
			OR (l.created_at >= r.expires_at AND NOT EXISTS (
				SELECT FROM tokenlease.audit AS a WHERE a.bucket_key = r.bucket_key AND a.raise_id = r.raise_id
				AND a.event = 'RaiseShortened' AND a.recorded_at >= l.created_at)))`},
	// What was certainly allocated before, since two things of one millisecond have
	// no order, must fit the limit of that instant together with the lease.
	{"promise 1: what was admitted fitted the limit of its instant", `
		SELECT l.bucket_key, l.lease_id, l.created_at, l.reserved_tokens, s.allocated, m.allowed
		FROM tokenlease.leases AS l
		JOIN tokenlease.buckets AS b ON b.bucket_key = l.bucket_key AND l.created_at >= b.created_at
		CROSS JOIN LATERAL (
			SELECT coalesce(sum(CASE
				WHEN o.settled_at IS NULL OR o.settled_at > l.created_at THEN o.reserved_tokens
				WHEN o.state = 'committed' AND o.settled_at < l.created_at THEN o.actual_tokens
				ELSE 0 END), 0) AS allocated
			FROM tokenlease.leases AS o
			WHERE o.bucket_key = l.bucket_key AND o.period_start IS NOT DISTINCT FROM l.period_start AND o.created_at < l.created_at) AS s
		CROSS JOIN LATERAL (
			SELECT max(a.effective_limit_tokens) AS allowed FROM tokenlease.audit AS a
			WHERE a.bucket_key = l.bucket_key AND a.recorded_at <= l.created_at AND a.recorded_at >= (
				SELECT max(recorded_at) FROM tokenlease.audit
				WHERE bucket_key = l.bucket_key AND recorded_at < l.created_at)) AS m
		WHERE m.allowed IS NOT NULL AND s.allocated + l.reserved_tokens > m.allowed`},
}

// checkInvariants checks every invariant of the ledger in one snapshot, so it may
// be called at any moment, also while managers and workloads run.
func (in *installation) checkInvariants(t *testing.T) {
	t.Helper()
	faults, err := in.db.brokenInvariants(call(t))
	if err != nil {
		t.Fatalf("check the invariants: %v", err)
	}
	for _, fault := range faults {
		t.Error(fault)
	}
}

// brokenInvariants tells what contradicts the invariants; nothing if all hold.
func (d *database) brokenInvariants(ctx context.Context) (faults []string, err error) {
	snapshot := pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}
	err = pgx.BeginTxFunc(ctx, d.sql, snapshot, func(tx pgx.Tx) (err error) {
		faults, err = brokenIn(ctx, tx)
		return err
	})
	return faults, err
}

func brokenIn(ctx context.Context, tx pgx.Tx) (faults []string, err error) {
	for _, i := range invariants {
		rows, err := tx.Query(ctx, limitChain+" SELECT to_jsonb(fault)::text FROM ("+i.query+fmt.Sprintf(") AS fault LIMIT %d", maxFaultsShown))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", i.name, err)
		}
		found, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			return nil, fmt.Errorf("%s: %w", i.name, err)
		}
		for _, row := range found {
			faults = append(faults, "broken: "+i.name+": "+row)
		}
	}
	return faults, nil
}

// Goal: a ledger that contradicts an invariant is noticed, each time by the
// invariant that it contradicts; one that has lived through a raise is not.
// Method: break a ledger by SQL behind its triggers, in transactions that are
// rolled back.
func TestInvariantsNotice(t *testing.T) {
	t.Parallel()
	in := install(t)
	in.liveThroughRaises(t)
	in.checkInvariants(t)
	for _, c := range []struct{ statement, broken string }{
		{`UPDATE buckets SET used_tokens = used_tokens + 1`, "used, reserved and the number of leases"},
		{`UPDATE buckets SET lease_records = lease_records + 1`, "used, reserved and the number of leases"},
		{`INSERT INTO periods SELECT bucket_key, '-infinity', now(), 1, 5, 0 FROM buckets LIMIT 1`, "used and reserved of an ended period"},
		{`DELETE FROM audit WHERE sequence = 2`, "audit rows are numbered"},
		{`UPDATE audit SET recorded_at = recorded_at - interval '1 hour' WHERE sequence = 3`, "time does not run backwards"},
		{`UPDATE audit SET event = 'BucketOpened' WHERE sequence = 3`, "a bucket is opened only"},
		{`UPDATE audit SET prior_limit_tokens = 1 WHERE sequence = 3`, "every change of a limit is in the audit"},
		{`UPDATE audit SET limit_epoch = limit_epoch + 5 WHERE sequence = 3`, "only rows that write a limit"},
		{`UPDATE buckets SET limit_tokens = 1`, "the limit is the one that the audit ends with"},
		{`UPDATE raises SET normal_limit_tokens = 1 WHERE raise_id = 'first'`, "a raise starts on the limit"},
		{`UPDATE raises SET restore_to_tokens = 1 WHERE raise_id = 'first'`, "promise 2"},
		{`UPDATE audit SET event = 'LimitChangedOutsideLedger' WHERE event = 'RaiseActivated' AND raise_id = 'first'`, "promise 2"},
		{`UPDATE audit SET event = 'RaiseFailed' WHERE event = 'RaiseRestored'`, "a raise that still owned the limit"},
		{`UPDATE audit SET raise_id = 'nobody' WHERE event = 'RaiseRestored'`, "a raise starts and ends at most once"},
		{`UPDATE raises SET starts_at = activated_at + interval '1 second'`, "a raise is in force within its window"},
		{`UPDATE raises SET expires_at = activated_at`, "a raise is in force within its window"},
		{`UPDATE buckets SET active_raise_id = 'first'`, "the bucket points at"},
		{`UPDATE buckets SET next_transition_at = 'infinity'`, "the bucket's row is the timer"},
		{`UPDATE raises SET approval_id = 'CHG-1'`, "an approval is spent by one raise"},
		{`UPDATE leases SET created_at = '2000-01-01Z'`, "promise 1: what was admitted under a raise"},
		{`UPDATE leases SET raise_id = 'first'`, "promise 1: what was admitted under a raise"},
		{`UPDATE leases SET reserved_tokens = 1000000`, "promise 1: what was admitted fitted"},
	} {
		if faults := in.db.brokenAfter(t, c.statement); !strings.Contains(strings.Join(faults, "\n"), "broken: "+c.broken) {
			t.Errorf("%s is not noticed as %q, but as %v", c.statement, c.broken, faults)
		}
	}
}

// brokenAfter tells what is broken after a statement, and takes it back.
func (d *database) brokenAfter(t *testing.T, statement string) (faults []string) {
	t.Helper()
	ctx := call(t)
	tx, err := d.sql.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(ctx) }()
	for _, sql := range []string{"SET LOCAL search_path = tokenlease", "SET LOCAL session_replication_role = replica", statement} {
		if _, err := tx.Exec(ctx, sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	if faults, err = brokenIn(ctx, tx); err != nil {
		t.Fatalf("after %s: %v", statement, err)
	}
	return faults
}

// liveThroughRaises gives the ledger a bucket with one raise that was revoked and
// one that is active, and leases from both, without any manager.
func (in *installation) liveThroughRaises(t *testing.T) {
	t.Helper()
	key, now := in.key(bucketName), in.db.now(t)
	_, err := in.db.ledger.ApplyDeclared(call(t), ledger.ApplyDeclared{
		Key: key, Generation: 1, Actor: requestedBy,
		Owner: ledger.Owner{Cluster: in.clusterID, Namespace: in.namespace, Name: bucketName, UID: "bucket", CreatedAt: now},
		Declaration: ledger.Declaration{
			Limit: normal, TenantID: tenantID, ScopedKeyID: scopedKeyID, Settings: ledger.DefaultSettings(),
			ConflictPolicy: ledger.ConflictReview,
			Raises:         ledger.RaisePolicy{Mode: ledger.ModeEnforce, MaxLimit: 400_000, MaxDuration: 2 * farAway},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	for i, uid := range []string{"first", "second"} {
		grant := ledger.Grant{
			UID: uid, CreatedAt: now, Cluster: in.clusterID, Namespace: in.namespace, Name: uid, TenantID: tenantID, ScopedKeyID: scopedKeyID,
			NormalLimit: normal, TemporaryLimit: temporary, ExpiresAt: now.Add(farAway),
			ApprovalID: fmt.Sprintf("CHG-%d", i+1), Actor: requestedBy, OnBaseChange: ledger.BaseChangeReview,
		}
		raise, err := in.db.ledger.StoreRaise(call(t), ledger.StoreRaise{Key: key, Grant: grant, BucketUID: "bucket", BucketGeneration: 1})
		if err != nil || raise.State != ledger.RaiseActive {
			t.Fatalf("raise %s: %+v, %v", uid, raise, err)
		}
		in.mustCommit(t, in.mustReserve(t, uid, 50_000), 40_000)
		if i == 0 {
			if _, err := in.db.ledger.RevokeRaise(call(t), ledger.RevokeRaise{Key: key, UID: uid, Actor: requestedBy}); err != nil {
				t.Fatal(err)
			}
		}
	}
}
