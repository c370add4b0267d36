package sweeper

import (
	"fmt"
	"testing"
	"time"

	"github.com/token-lease/operator/hack/devenv/postgres/postgrestest"
)

// Goal: raises start and end by the database's clock, however wrong this process's
// clock is, without any traffic. Method: the database's clock runs an hour
// ahead of the process and ten minutes behind it; a raise is planned by it.
func TestSkewedClock(t *testing.T) {
	for _, skew := range []time.Duration{time.Hour, -10 * time.Minute} {
		t.Run(fmt.Sprint(skew), func(t *testing.T) {
			c := newCluster(t, postgrestest.NewDatabase(t))
			c.shiftClock(skew)
			store := c.store("setup", nil)
			buckets := numbered("bucket", 0, 3)
			c.do(store, declarations(buckets))
			c.replicas(2, nil)
			starts := time.Now().Add(skew + 500*time.Millisecond)
			c.do(store, planned(buckets, starts, starts.Add(time.Second)))
			c.waitFor("restored raises", 3, `SELECT count(*) FROM tokenlease.raises WHERE state = 'restored' AND reason = 'Expired'`)
			if early := c.count(`SELECT count(*) FROM tokenlease.raises WHERE activated_at < starts_at OR ended_at < expires_at`); early != 0 {
				t.Errorf("%d raises started or ended before their time", early)
			}
			if late := c.count(`SELECT count(*) FROM tokenlease.audit WHERE recorded_at > tokenlease.ledger_now()`); late != 0 {
				t.Errorf("%d audit rows lie in the future of the database", late)
			}
		})
	}
}

// Goal: a database whose clock falls back, as after a failover, is swept on: what
// was planned by the clock before happens once the clock has caught up, no later.
// Method: the clock falls back by two seconds under an active raise and sweepers
// that sleep.
func TestClockFallsBack(t *testing.T) {
	c := newCluster(t, postgrestest.NewDatabase(t))
	c.shiftClock(2 * time.Second)
	store := c.store("setup", nil)
	buckets := numbered("bucket", 0, 3)
	c.do(store, declarations(buckets))
	c.replicas(2, nil)
	now := time.Now().Add(2 * time.Second)
	c.do(store, planned(buckets, now, now.Add(1500*time.Millisecond)))
	c.shiftClock(0)
	c.waitFor("restored raises", 3, `SELECT count(*) FROM tokenlease.raises WHERE state = 'restored' AND reason = 'Expired'`)
	if early := c.count(`SELECT count(*) FROM tokenlease.raises WHERE ended_at < expires_at`); early != 0 {
		t.Errorf("%d raises ended before their time", early)
	}
}
