package postgres

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/token-lease/operator/internal/ledger"
	"github.com/token-lease/operator/internal/ledger/ledgertest"
)

// Goal: what concurrent callers of two processes are answered could have been
// answered to one after the other.
func TestLinearizable(t *testing.T) {
	d := newDatabase(t)
	ledgertest.Linearizable(t, []ledger.Store{d.store(nil), d.store(nil)}, nil)
	d.wantInvariants()
}

// Goal: so it is while sessions are killed in the middle of what they do; nobody is
// told of success that was lost, and nothing is done twice. Method: an administrator
// who ends a session of the callers now and again.
func TestLinearizableWhileSessionsAreKilled(t *testing.T) {
	d := newDatabase(t)
	killed := 0
	ledgertest.Linearizable(t, []ledger.Store{d.store(nil), d.store(nil)}, func(ctx context.Context) {
		admin, err := pgx.Connect(ctx, d.url)
		if err != nil {
			t.Error(err)
			return
		}
		defer func() { _ = admin.Close(context.WithoutCancel(ctx)) }()
		// The pause is how often trouble comes; nothing is waited for.
		for ticker := time.NewTicker(20 * time.Millisecond); ctx.Err() == nil; <-ticker.C {
			var ended int
			err := admin.QueryRow(ctx, `SELECT count(pg_terminate_backend(pid)) FROM (
				SELECT pid FROM pg_stat_activity
				WHERE datname = current_database() AND application_name = $1 AND state <> 'idle'
				ORDER BY random() LIMIT 1) AS one`, DefaultApplicationName).Scan(&ended)
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
	d.wantInvariants()
}
