package sweeper

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/go-logr/logr"

	"github.com/token-lease/operator/hack/devenv/postgres/postgrestest"
	"github.com/token-lease/operator/internal/ledger/postgres"
)

// Goal: buckets whose restore does not end in time starve no other one, and are
// restored once the fault is gone. Method: more slow buckets than one pass has time
// for, all due before a good one.
func TestSlowBucketsStarveNobody(t *testing.T) {
	c := newCluster(t, postgrestest.NewDatabase(t))
	slow, good := numbered("slow", 0, 6), numbered("good", 0, 1)
	all := slices.Concat(slow, good)
	direct := c.store("direct", nil)
	expiry := time.Now().Add(time.Hour)
	c.do(direct, declarations(all))
	c.do(direct, raises(all, func(i int) time.Time { return expiry.Add(time.Duration(i) * time.Millisecond) }))
	c.exec(`CREATE FUNCTION public.slow() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN IF NEW.bucket_key LIKE 'tenants/slow-%' AND NEW.state = 'restored' THEN PERFORM pg_sleep(600); END IF; RETURN NEW; END $$`)
	c.exec(`CREATE TRIGGER slow BEFORE UPDATE ON tokenlease.raises FOR EACH ROW EXECUTE FUNCTION public.slow()`)
	c.shiftClock(2 * time.Hour)

	store, err := postgres.Open(postgres.Options{
		ConnString:       func(context.Context) (string, error) { return c.url, nil },
		Worker:           "worker",
		StatementTimeout: time.Second,
		CallTimeout:      4 * time.Second,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		New(store, &counts{}, logr.Discard()).Run(ctx)
	}()
	const active = `SELECT count(*) FROM tokenlease.raises WHERE state = 'active'`
	c.waitFor("raises in force besides the slow ones", int64(len(slow)), active)
	c.exec(`DROP TRIGGER slow ON tokenlease.raises`)
	c.waitFor("raises in force", 0, active)
	cancel()
	<-ended
}
