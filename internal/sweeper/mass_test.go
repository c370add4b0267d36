package sweeper

import (
	"slices"
	"testing"
	"time"

	"github.com/token-lease/operator/hack/devenv/postgres/postgrestest"
	"github.com/token-lease/operator/internal/ledger"
)

// Goal: 500 raises that expire in one second are all restored, each once, by
// several replicas at a time, while as many others are being stored; a bucket that
// somebody holds in psql the whole time holds up nobody. Method: the database's
// clock jumps over the expiry once all are active; one bucket's row is locked by a
// session of its own from before until all others have ended.
func TestMassExpiry(t *testing.T) {
	const n = 500
	c := newCluster(t, postgrestest.NewDatabase(t))
	c.shiftClock(0)
	store := c.store("setup", nil)
	ending, starting := numbered("ending", 0, n), numbered("starting", 0, n)
	c.do(store, declarations(slices.Concat(ending, starting)))
	expiry := time.Now().Add(time.Hour).Truncate(time.Second)
	c.do(store, raises(ending, func(i int) time.Time { return expiry.Add(time.Duration(2*i) * time.Millisecond) }))
	c.waitFor("active raises", n, `SELECT count(*) FROM tokenlease.buckets WHERE limit_tokens = 300 AND active_raise_id IS NOT NULL`)

	held, err := c.connect().Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := held.Exec(t.Context(), `SELECT FROM tokenlease.buckets WHERE bucket_key = 'tenants/ending-0250' FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	c.replicas(3, nil)
	c.shiftClock(time.Hour + time.Second)
	stored := make(chan struct{})
	go func() {
		defer close(stored)
		for some := range slices.Chunk(starting, 20) {
			c.do(store, raises(some, func(int) time.Time { return expiry.Add(10 * time.Hour) }))
		}
	}()
	c.waitFor("restored raises beside the held one", n-1, `SELECT count(*) FROM tokenlease.raises WHERE state = 'restored' AND reason = 'Expired'`)
	<-stored
	c.waitFor("raises stored meanwhile", n, `SELECT count(*) FROM tokenlease.raises WHERE state = 'active' AND bucket_key LIKE 'tenants/starting-%'`)
	if limit := c.count(`SELECT limit_tokens FROM tokenlease.buckets WHERE bucket_key = 'tenants/ending-0250'`); limit != temporaryLimit {
		t.Errorf("the held bucket has the limit %d: its row was not held", limit)
	}
	if err := held.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.waitFor("restored raises", n, `SELECT count(*) FROM tokenlease.raises WHERE state = 'restored' AND reason = 'Expired'`)

	c.shiftClock(12 * time.Hour)
	c.waitFor("restored raises, all", 2*n, `SELECT count(*) FROM tokenlease.raises WHERE state = 'restored' AND reason = 'Expired'`)
	for what, sql := range map[string]string{
		"buckets without the normal limit": `SELECT count(*) FROM tokenlease.buckets
			WHERE limit_tokens <> 100 OR active_raise_id IS NOT NULL OR next_transition_at < 'infinity'`,
		"raises without exactly one activation and one restore": `SELECT count(*) FROM (
			SELECT r.raise_id FROM tokenlease.raises AS r
			LEFT JOIN tokenlease.operations AS o ON o.bucket_key = r.bucket_key
			GROUP BY r.raise_id
			HAVING array_agg(o.operation_id ORDER BY o.operation_id) IS DISTINCT FROM
				ARRAY[r.raise_id || ':activate', r.raise_id || ':restore']) AS wrong`,
		"raises whose audit is not stored, activated, restored": `SELECT count(*) FROM (
			SELECT r.raise_id FROM tokenlease.raises AS r
			LEFT JOIN tokenlease.audit AS a ON a.bucket_key = r.bucket_key AND a.raise_id = r.raise_id
			GROUP BY r.raise_id
			HAVING array_agg(a.event ORDER BY a.sequence) IS DISTINCT FROM
				ARRAY['RaiseStored', 'RaiseActivated', 'RaiseRestored']) AS wrong`,
		"restores before their instant": `SELECT count(*) FROM tokenlease.audit WHERE event = 'RaiseRestored' AND recorded_at < due_at`,
	} {
		if wrong := c.count(sql); wrong != 0 {
			t.Errorf("%d %s", wrong, what)
		}
	}
	if _, err := ledger.New(store, nil).Inspect(t.Context(), "tenants/ending-0250"); err != nil {
		t.Error(err)
	}
}
