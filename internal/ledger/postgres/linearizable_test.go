package postgres

import (
	"context"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/token-lease/operator/internal/ledger"
	"github.com/token-lease/operator/internal/ledger/ledgertest"
)

// linearizable runs the check on two stores, and looks for what they leave behind.
// The stores reach the database at the given URL.
func (d *database) linearizable(url string, disturb func(context.Context)) {
	d.t.Helper()
	goroutines := runtime.NumGoroutine()
	d.holdClock(start)
	at := func(o *Options) { o.ConnString = func(context.Context) (string, error) { return url, nil } }
	stores := []*Store{d.store(at), d.store(at)}
	ledgertest.Linearizable(d.t, ledgertest.Concurrent{
		Stores: []ledger.Store{stores[0], stores[1]},
		Start:  start,
		SetClock: func(ctx context.Context, now time.Time) error {
			_, err := d.conn.Exec(ctx, `UPDATE public.test_clock SET at = $1`, now)
			return err
		},
		Disturb: disturb,
	})
	d.wantInvariants()
	for _, s := range stores {
		s.Close()
	}
	if d.pooler == nil {
		// A pooler keeps its sessions.
		eventually(d.t, "the end of the stores' sessions", func() bool {
			return value[int](d, `SELECT count(*) FROM pg_stat_activity
				WHERE datname = current_database() AND application_name = $1`, DefaultApplicationName) == 0
		})
	}
	eventually(d.t, "the end of the stores' goroutines", func() bool { return runtime.NumGoroutine() <= goroutines })
}

// Goal: what concurrent callers of two processes are answered could have been
// answered to one after the other.
func TestLinearizable(t *testing.T) {
	d := newDatabase(t)
	d.linearizable(d.url, nil)
}

// killOneAtWork ends one session of an application that is not idle, and counts it.
const killOneAtWork = `
SELECT count(pg_terminate_backend(pid)) FROM (
	SELECT pid FROM pg_stat_activity
	WHERE datname = current_database() AND application_name = $1 AND state <> 'idle'
	ORDER BY random() LIMIT 1) AS one`

// Goal: so it is while sessions are killed in the middle of what they do; nobody is
// told of success that was lost, and nothing is done twice. Method: an administrator
// who ends a session of the callers now and again.
func TestLinearizableWhileSessionsAreKilled(t *testing.T) {
	d := newDatabase(t)
	killed := 0
	d.linearizable(d.url, func(ctx context.Context) {
		admin, err := pgx.Connect(ctx, d.url)
		if err != nil {
			t.Error(err)
			return
		}
		defer func() { _ = admin.Close(context.WithoutCancel(ctx)) }()
		// The pause is how often trouble comes; nothing is waited for.
		for ticker := time.NewTicker(20 * time.Millisecond); ctx.Err() == nil; <-ticker.C {
			var ended int
			err := admin.QueryRow(ctx, killOneAtWork, DefaultApplicationName).Scan(&ended)
			if err != nil && ctx.Err() == nil {
				t.Error(err)
				return
			}
			killed += ended
		}
	})
	if killed == 0 {
		t.Error("no session was killed")
	}
}

// Goal: so it is while connections break, in either direction and whatever was on its
// way. Method: a proxy that cuts one in so many pieces of the stream.
func TestLinearizableWhileConnectionsBreak(t *testing.T) {
	const oneIn = 60
	d := newDatabase(t)
	p := newProxy(d)
	var mutex sync.Mutex
	cut := 0
	judge := func([]byte) verdict {
		mutex.Lock()
		defer mutex.Unlock()
		if rand.IntN(oneIn) != 0 {
			return forward
		}
		cut++
		return sever
	}
	d.linearizable(p.url, func(ctx context.Context) {
		p.hook(judge, judge)
		<-ctx.Done()
		p.hook(nil, nil)
	})
	mutex.Lock()
	defer mutex.Unlock()
	if cut == 0 {
		t.Error("no connection was cut")
	}
}
