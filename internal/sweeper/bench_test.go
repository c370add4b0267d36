package sweeper

import (
	"context"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	devenv "github.com/token-lease/operator/hack/devenv/postgres"
	"github.com/token-lease/operator/hack/devenv/postgres/postgrestest"
	"github.com/token-lease/operator/internal/ledger"
)

// durableDatabase makes a database on a server that writes to the disk: figures
// without fsync would say nothing.
func durableDatabase(b *testing.B) string {
	b.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), waitTimeout)
	defer cancel()
	server, err := devenv.Start(ctx, devenv.Options{Own: true, Log: os.Stderr})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), waitTimeout)
		defer cancel()
		if err := server.Stop(ctx); err != nil {
			b.Error(err)
		}
	})
	return postgrestest.NewDatabaseOn(b, server)
}

// lags collects, for each restore, the time from its due instant to the
// confirmation of its COMMIT.
type lags struct {
	ledger.NopObserver
	mutex sync.Mutex
	all   []time.Duration
	done  chan struct{}
	want  int
}

// ObserveTransition implements ledger.Observer.
func (l *lags) ObserveTransition(t ledger.Transition, confirmed time.Duration) {
	if t.Kind != ledger.TransitionRestore {
		return
	}
	l.mutex.Lock()
	defer l.mutex.Unlock()
	l.all = append(l.all, t.At.Sub(t.DueAt)+confirmed)
	if len(l.all) == l.want {
		close(l.done)
	}
}

// BenchmarkRestoreLag measures how late 500 raises on different buckets end, with
// nothing but sweepers looking after them: due at one instant, which is the worst,
// and at instants spread over one second.
func BenchmarkRestoreLag(b *testing.B) {
	const n = 500
	c := newCluster(b, durableDatabase(b))
	setup := c.store("setup", nil)
	round := 0
	for _, due := range []struct {
		name   string
		spread time.Duration
	}{{"one-instant", 0}, {"one-second", time.Second}} {
		for _, sweepers := range []int{1, 2} {
			b.Run(fmt.Sprintf("due=%s/sweepers=%d", due.name, sweepers), func(b *testing.B) {
				c := &cluster{TB: b, url: c.url, conn: c.conn}
				var all []time.Duration
				for b.Loop() {
					all = append(all, c.measureLags(setup, numbered("bucket", round*n, n), due.spread, sweepers)...)
					round++
				}
				slices.Sort(all)
				milliseconds := func(quantile float64) float64 {
					return float64(all[int(quantile*float64(len(all)-1))].Microseconds()) / 1000
				}
				b.ReportMetric(0, "ns/op") // of which most is waiting for the raises to fall due
				b.ReportMetric(milliseconds(0.5), "p50-ms")
				b.ReportMetric(milliseconds(0.99), "p99-ms")
				b.ReportMetric(milliseconds(1), "max-ms")
				if due.spread == 0 {
					b.ReportMetric(1000*n/milliseconds(1), "buckets/s")
				}
			})
		}
	}
}

// measureLags raises buckets for a while that ends for all of them within spread,
// and waits until sweepers have restored them.
func (c *cluster) measureLags(setup ledger.Store, buckets []string, spread time.Duration, sweepers int) []time.Duration {
	c.Helper()
	seen := &lags{done: make(chan struct{}), want: len(buckets)}
	c.do(setup, declarations(buckets))
	expiry := time.Now().Add(4 * time.Second).Truncate(time.Millisecond)
	c.do(setup, raises(buckets, func(i int) time.Time {
		return expiry.Add(spread * time.Duration(i) / time.Duration(len(buckets)))
	}))
	defer c.replicas(sweepers, seen)()
	if !time.Now().Before(expiry) {
		c.Fatal("the raises were due before they were all stored: this machine is too slow to tell")
	}
	<-seen.done
	return seen.all
}
