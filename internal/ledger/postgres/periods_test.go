package postgres

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

// Goal: whoever comes first at the end of a period ends it, once: no period admits more
// than its limit, nobody is refused who fits, and what was reserved before is settled
// where it was reserved. Method: callers of two processes reserve and commit without a
// pause while the clock passes from hour to hour, and sweepers of both come by.
func TestPeriodsOfTwoProcesses(t *testing.T) {
	const limit, hours, callers, maxRounds = 100, 6, 8, 100_000
	d := newDatabase(t)
	first := start.Truncate(hour)
	d.holdClock(first)
	stores := []*Store{d.store(nil), d.store(nil)}
	declaration := declared(testOwner(), 1, limit)
	declaration.Declaration.Settings.MaxTTL = 24 * hour
	declaration.Declaration.Period = ledger.PeriodSpec{Every: ledger.CadenceHour, TimeZone: "Etc/UTC"}
	do(t, stores[0], declaration)

	var work sync.WaitGroup
	var over atomic.Bool
	end := func() {
		over.Store(true)
		work.Wait()
	}
	defer end()
	for caller := range callers {
		work.Go(func() {
			store := stores[caller%len(stores)]
			l := ledger.New(store, nil)
			for round := 0; round < maxRounds && !over.Load(); round++ {
				if round%10 == 0 {
					if _, err := store.Sweep(t.Context(), ledger.SweepRequest{Limit: 10}); err != nil {
						t.Errorf("Sweep: %v", err)
					}
				}
				reserved, err := l.Reserve(t.Context(), ledger.Reserve{
					Key: bucketKey, RequestKey: fmt.Sprint(caller, "/", round), Fingerprint: "f", Tokens: 7, TTL: 12 * hour,
				})
				if ledger.HasCode(err, ledger.CodeBudgetExceeded) {
					continue
				}
				if err != nil {
					t.Errorf("Reserve: %v", err)
					return
				}
				if round%3 == 0 {
					continue // It stays reserved, across the next roll.
				}
				if _, err := l.Commit(t.Context(), ledger.Commit{Key: bucketKey, LeaseID: reserved.Lease.ID, ActualTokens: 7}); err != nil {
					t.Errorf("Commit: %v", err)
				}
			}
		})
	}
	clock := d.connect()
	for n := range hours {
		// Each hour is left once something was reserved in it; what comes at the very
		// instant is of the next one.
		eventually(t, "a reservation of the hour", func() bool {
			return value[bool](d, `SELECT EXISTS (SELECT FROM tokenlease.leases WHERE period_start = $1)`, first.Add(time.Duration(n)*hour))
		})
		if n == hours-1 {
			break
		}
		if _, err := clock.Exec(t.Context(), `UPDATE public.test_clock SET at = $1`, first.Add(time.Duration(n+1)*hour)); err != nil {
			t.Fatal(err)
		}
	}
	end()
	d.wantInvariants()
	if n := value[int](d, `SELECT count(*) FROM tokenlease.periods`); n != hours-1 {
		t.Errorf("%d periods have ended, want %d", n, hours-1)
	}
	if n := value[int](d, `SELECT count(*) FROM (
		SELECT sum(reserved_tokens) AS tokens FROM tokenlease.leases GROUP BY period_start) AS periods WHERE tokens > $1`, limit); n != 0 {
		t.Errorf("%d periods admitted more than the limit", n)
	}
}
