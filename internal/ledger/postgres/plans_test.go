package postgres

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/token-lease/operator/internal/ledger"
)

// Goal: statements use indexes, whether or not the server knows anything of the
// tables. Method: their plans on full tables, before and after these are analysed;
// those of transactions under the settings of a transaction, as they are run.
func TestPlansWithoutStatistics(t *testing.T) {
	d := newDatabase(t)
	for _, table := range []string{"buckets", "leases", "periods", "rollups", "raises", "approvals", "operations", "audit"} {
		d.exec(`ALTER TABLE tokenlease.` + table + ` SET (autovacuum_enabled = false)`)
	}
	d.exec(`
		INSERT INTO tokenlease.buckets (bucket_key, limit_tokens, used_tokens, reserved_tokens, declared_generation,
			default_ttl_ms, max_ttl_ms, max_records, raise_max_limit_tokens, raise_max_duration_ms,
			limit_epoch, lease_records, audit_sequence, revision, created_at, updated_at)
		SELECT 'b' || n, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1, now(), now() FROM generate_series(1, 2000) AS n`)
	d.exec(`
		INSERT INTO tokenlease.leases (bucket_key, lease_id, request_hash, fingerprint_hash, state,
			reserved_tokens, ttl_ms, created_at, expires_at, settled_at)
		SELECT 'b1', 'l' || n, sha256(n::text::bytea), sha256(n::text::bytea), CASE WHEN n % 100 = 0 THEN 'reserved' ELSE 'released' END,
			1, 1000, now(), now() + interval '1 second' * n, CASE WHEN n % 100 > 0 THEN now() END FROM generate_series(1, 20000) AS n`)
	d.exec(`
		INSERT INTO tokenlease.audit (bucket_key, sequence, event, outcome, used_tokens, reserved_tokens, limit_epoch, recorded_at)
		SELECT 'b1', n, 'LimitSet', 'applied', 0, 0, 0, now() FROM generate_series(2, 20001) AS n`)
	d.exec(`
		INSERT INTO tokenlease.raises (bucket_key, raise_id, cluster, namespace, name, current_uid, tenant_id, scoped_key_id,
			normal_limit_tokens, temporary_limit_tokens, limit_epoch, starts_at, expires_at, approval_id, grant_hash,
			on_base_change, state, review_required, version, stored_at, ended_at, current_created_at)
		SELECT 'b' || n % 2000, 'r' || n, 'c', 'ns', 'n' || n, 'r' || n, 't', 'k', 1, 2, 0, now(), now(), 'a' || n, 'h' || n,
			'Review', 'failed', false, 1, now(), now(), now() FROM generate_series(1, 20000) AS n`)
	d.exec(`
		INSERT INTO tokenlease.approvals (cluster, namespace, tenant_id, approval_id, raise_id, bucket_key, spent_at)
		SELECT 'c', 'ns', 't', 'a' || n, 'r' || n, 'b' || n % 2000, now() FROM generate_series(1, 20000) AS n`)
	d.exec(`
		INSERT INTO tokenlease.operations (bucket_key, operation_id, inputs, recorded_at)
		SELECT 'b1', 'o' || n, '', now() FROM generate_series(1, 20000) AS n`)
	d.exec(`
		INSERT INTO tokenlease.rollups (bucket_key, period_start, hour, cluster, namespace, tenant_id, scoped_key_id, raise_id, late,
			used_tokens, committed_leases, released_leases, expired_leases)
		SELECT 'b' || n % 2000, '-infinity', now() - interval '1 hour' * n, '', '', '', '', '', false, 1, 1, 0, 0 FROM generate_series(1, 20000) AS n`)
	d.exec(`
		INSERT INTO tokenlease.periods (bucket_key, started_at, ended_at, limit_tokens, used_tokens, reserved_tokens)
		SELECT 'b1', now() - interval '1 hour' * n, now() - interval '1 hour' * (n - 1), 1, 0, 0 FROM generate_series(1, 20000) AS n`)
	t.Run("never analysed", func(t *testing.T) { checkPlans(t, d) })
	d.exec(`ANALYZE`)
	t.Run("analysed", func(t *testing.T) { checkPlans(t, d) })
}

func checkPlans(t *testing.T, d *database) {
	now := time.Now()
	one := []string{"b1"}
	bucket := &ledger.Bucket{Key: "b1", CreatedAt: now, UpdatedAt: now}
	lease := &ledger.Lease{BucketKey: "b1", ID: "l1", CreatedAt: now, ExpiresAt: now}
	raise := &ledger.Raise{BucketKey: "b1", ID: "r1", StartsAt: now, ExpiresAt: now, StoredAt: now}
	var written counterWrites
	var counters pgx.Batch
	written.add(bucket)
	written.queue(&counters)
	var leases leaseWrites
	leases.update, leases.extend = []*ledger.Lease{lease}, []*ledger.Lease{lease}
	var batch pgx.Batch
	leases.queue(&batch)
	periods := periodWrites{update: []*ledger.Period{{BucketKey: "b1"}}}
	periods.queue(&batch)
	retention := retentionWrites{
		leases: []*ledger.Lease{lease}, operationKeys: one, operationIDs: one, usageKeys: one, usage: []ledger.Usage{{Hour: now}},
	}
	retention.queue(&batch)
	statements := []*pgx.QueuedQuery{
		{SQL: lockBuckets, Arguments: []any{one}},
		{SQL: lockDueBuckets, Arguments: []any{[]string{}, 100}},
		{SQL: clockAndOverdueLeases, Arguments: []any{one, 10}},
		{SQL: lockFreeBuckets, Arguments: []any{one}},
		{SQL: importedLeases, Arguments: []any{one, one}},
		{SQL: leasesByRequest, Arguments: []any{one, [][]byte{{1}}}},
		{SQL: liveRaises, Arguments: []any{one}},
		{SQL: raisesByUID, Arguments: []any{one, one}},
		{SQL: raisesByGrant, Arguments: []any{one, one, one, one, one, one}},
		{SQL: neededOperations, Arguments: []any{one, one}},
		{SQL: neededApprovals, Arguments: []any{one, one, one, one}},
		{SQL: histories, Arguments: []any{one, lifeCycleEvents}},
		{SQL: neededPeriods, Arguments: []any{one, []time.Time{now}, one}},
		{SQL: oldestLeases, Arguments: []any{one, []int64{10}}},
		{SQL: oldestOperations, Arguments: []any{one, []int64{10}}},
		{SQL: updateCounters, Arguments: counters.QueuedQueries[0].Arguments},
		{SQL: updateBuckets, Arguments: append(bucketArguments([]*ledger.Bucket{bucket}), now)},
		{SQL: updateBucketLimits, Arguments: append(bucketArguments([]*ledger.Bucket{bucket}), now)},
		{SQL: updateRaises, Arguments: raiseArguments([]*ledger.Raise{raise})},
	}
	reads := []*pgx.QueuedQuery{
		{SQL: nextDue, Arguments: []any{[]string{}}},
		{SQL: purgeable, Arguments: []any{"b1", 10, 1000}},
		{SQL: bucketOfOwner, Arguments: []any{"n", "b", "c"}},
		{SQL: listLeases, Arguments: []any{"b1", now, "", 10}},
		{SQL: listAudit, Arguments: []any{"b1", 5, 10}},
		{SQL: listLiveRaises, Arguments: []any{"c", "", "", 10}},
		{SQL: raiseByUID, Arguments: []any{"c", "u"}},
		{SQL: changedBuckets, Arguments: []any{one, []int64{1}, []time.Time{{}}}},
	}
	wantLookUps(t, d, reads)
	d.exec(`BEGIN`)
	d.exec(setBounds, d.store(nil).bounds(time.Second, true)...)
	wantLookUps(t, d, append(statements, batch.QueuedQueries...))
	d.exec(`ROLLBACK`)
}

// wantLookUps looks at the plans of statements.
func wantLookUps(t *testing.T, d *database, statements []*pgx.QueuedQuery) {
	t.Helper()
	for _, s := range statements {
		rows, err := d.conn.Query(t.Context(), "EXPLAIN "+s.SQL, append([]any{pgx.QueryExecModeExec}, s.Arguments...)...)
		if err != nil {
			t.Fatal(err)
		}
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatalf("%s: %v", s.SQL, err)
		}
		if plan := strings.Join(lines, "\n"); strings.Contains(plan, "Seq Scan") {
			t.Errorf("a table is read from end to end:\n%s\n%s", s.SQL, plan)
		}
	}
}

// Goal: a plan that is made while the tables are empty looks rows up, too; it may be
// kept while they grow. Method: the plans of reserving and settling, under the
// settings of a transaction, on tables that the server knows to be empty.
func TestPlansOfEmptyTables(t *testing.T) {
	d := newDatabase(t)
	store := d.store(nil)
	d.exec(`VACUUM ANALYZE`)
	now := time.Now()
	one, figure, figures := []string{"b1"}, []*int64{nil}, []int64{1}
	d.exec(`BEGIN`)
	d.exec(setBounds, store.bounds(time.Second, true)...)
	for _, s := range []pgx.QueuedQuery{
		{SQL: lockFreeBuckets, Arguments: []any{one}},
		{SQL: leasesByRequest, Arguments: []any{one, [][]byte{{1}}}},
		{SQL: importedLeases, Arguments: []any{one, one}},
		{SQL: lookUpByBitmap},
		{SQL: updateCounters, Arguments: []any{one, figures, figures, figures, figures, []time.Time{now}, []time.Time{now}}},
		{SQL: updateLeases, Arguments: []any{one, [][]byte{{1}}, one, figure, []*time.Time{nil}, figure, figures, []bool{false}}},
		{SQL: extendLeases, Arguments: []any{one, [][]byte{{1}}, []time.Time{now}}},
		{SQL: updateBuckets, Arguments: append(bucketArguments([]*ledger.Bucket{{Key: "b1", CreatedAt: now, UpdatedAt: now}}), now)},
	} {
		if s.SQL == lookUpByBitmap {
			d.exec(s.SQL)
			continue
		}
		rows, err := d.conn.Query(t.Context(), "EXPLAIN "+s.SQL, append([]any{pgx.QueryExecModeExec}, s.Arguments...)...)
		if err != nil {
			t.Fatal(err)
		}
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatalf("%s: %v", s.SQL, err)
		}
		plan := strings.Join(lines, "\n")
		if strings.Contains(plan, "Seq Scan") || strings.Count(plan, "Index Scan") != strings.Count(plan, "Index Cond:") {
			t.Errorf("a table or an index is read from end to end:\n%s\n%s", s.SQL, plan)
		}
	}
	d.exec(`ROLLBACK`)
}

// Goal: ordinary operations update a bucket's row in place. Method: reservations
// on a bucket with an active raise, counted by the server.
func TestBucketUpdatesStayOnTheirPage(t *testing.T) {
	d := newDatabase(t)
	store := d.store(nil)
	owner := testOwner()
	do(t, store, declared(owner, 1, 100_000))
	do(t, store, raised("raise-1", owner, 100_000, 300_000, hour, nil))
	const updates = `SELECT pg_stat_get_tuples_updated(c) || '/' || pg_stat_get_tuples_hot_updated(c)
		FROM (SELECT 'tokenlease.buckets'::regclass::oid AS c) AS t`
	read := func() (all, hot int64) {
		d.exec(`SELECT pg_stat_clear_snapshot()`)
		if _, err := fmt.Sscanf(value[string](d, updates), "%d/%d", &all, &hot); err != nil {
			t.Fatal(err)
		}
		return all, hot
	}
	const reservations = 200
	for i := range reservations {
		do(t, store, ledger.Reserve{Key: bucketKey, RequestKey: fmt.Sprint(i), Fingerprint: "f", Tokens: 1})
	}
	// Backends report their counts when they have nothing else to do, or end.
	store.pool.Reset()
	eventually(t, "the server's count of the updates", func() bool { all, _ := read(); return all >= reservations })
	if all, hot := read(); all-hot > 3 {
		t.Errorf("%d of %d updates left the page, want no more than those of the raise", all-hot, all)
	}
}
