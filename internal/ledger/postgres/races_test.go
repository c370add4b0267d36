package postgres

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

// atOnce has all callers begin together, and returns once they have ended.
func atOnce(callers ...func()) {
	var ready, done sync.WaitGroup
	ready.Add(len(callers))
	for _, caller := range callers {
		done.Go(func() {
			ready.Done()
			ready.Wait()
			caller()
		})
	}
	done.Wait()
}

// watch keeps an eye on the committed rows, in a session of its own, until the
// returned function is called. The query counts what must never be seen.
func (d *database) watch(what, sql string) (stop func()) {
	d.t.Helper()
	conn := d.connect()
	ctx, cancel := context.WithCancel(d.t.Context())
	var watching sync.WaitGroup
	looks := 0
	watching.Go(func() {
		for ctx.Err() == nil {
			var n int
			if err := conn.QueryRow(context.WithoutCancel(ctx), sql).Scan(&n); err != nil {
				d.t.Error(err)
				return
			}
			if looks++; n != 0 {
				d.t.Errorf("%d %s were seen", n, what)
				return
			}
		}
	})
	end := func() {
		cancel()
		watching.Wait()
	}
	d.t.Cleanup(end)
	return func() {
		end()
		if looks == 0 {
			d.t.Error("nobody watched")
		}
	}
}

// Goal: callers of several processes never pass the limit together, not even for a
// moment. Method: rounds in which callers of two stores reserve at once what fits for
// one of them alone, while somebody else watches the rows.
func TestParallelReservesOfTwoProcesses(t *testing.T) {
	const rounds, callers, limit, used, tokens = 100, 40, 1000, 950, 40
	d := newDatabase(t)
	stores := []*Store{d.store(nil), d.store(nil)}
	do(t, stores[0], ledger.OpenBucket{Key: bucketKey, Limit: limit})
	first := do(t, stores[0], ledger.Reserve{Key: bucketKey, RequestKey: "used", Fingerprint: "f", Tokens: used}).Lease
	do(t, stores[0], ledger.Commit{Key: bucketKey, LeaseID: first.ID, ActualTokens: used})
	stop := d.watch("buckets above their limit", `SELECT count(*) FROM tokenlease.buckets WHERE used_tokens + reserved_tokens > limit_tokens`)
	winners := map[int]int{}
	for round := range rounds {
		results := make([]ledger.Result, callers)
		requests := make([]func(), callers)
		for i := range callers {
			request := ledger.Reserve{Key: bucketKey, RequestKey: fmt.Sprintf("%d-%d", round, i), Fingerprint: "f", Tokens: tokens}
			requests[i] = func() { results[i] = ledger.New(stores[i%len(stores)], nil).Do(t.Context(), request)[0] }
		}
		atOnce(requests...)
		var admitted []string
		for i, result := range results {
			switch {
			case result.Err == nil:
				admitted = append(admitted, result.Lease.ID)
				winners[i%len(stores)]++
			case !ledger.HasCode(result.Err, ledger.CodeBudgetExceeded):
				t.Errorf("round %d: %v, want budget_exceeded", round, result.Err)
			case result.Err.Details["availableTokens"] != int64(limit-used-tokens):
				t.Errorf("round %d: the refusal says %v, want %d available", round, result.Err.Details, limit-used-tokens)
			}
		}
		if len(admitted) != 1 {
			t.Fatalf("round %d: %d reservations were admitted, want 1", round, len(admitted))
		}
		d.wantCounts(used, tokens)
		do(t, stores[round%len(stores)], ledger.Release{Key: bucketKey, LeaseID: admitted[0]})
		d.wantCounts(used, 0)
		d.wantInvariants()
	}
	stop()
	t.Logf("admitted by store: %v", winners)
}

// wantCounts looks at the rows of the one bucket.
func (d *database) wantCounts(used, reserved int64) {
	d.t.Helper()
	want := fmt.Sprintf("used %d, reserved %d", used, reserved)
	if got := value[string](d, `SELECT format('used %s, reserved %s', used_tokens, reserved_tokens)
		FROM tokenlease.buckets WHERE bucket_key = $1`, bucketKey); got != want {
		d.t.Fatalf("the bucket has %s; want %s", got, want)
	}
}

const (
	finishersRounds = 300
	// finishersRepeats bounds how often a caller repeats what it got no answer to.
	finishersRepeats = 50
	// finishersTokens is the lease of a round, beside one of finishersOther tokens that
	// lives on: what is given back twice is taken from that.
	finishersTokens, finishersActual, finishersOther = 50, 30, 100
)

// finishers are those who can end one lease, at the same time.
type finishers struct {
	*database
	stores []*Store
	random *rand.Rand
	// disturb makes trouble until a round is over; nil makes none.
	disturb func(over <-chan struct{})
	now     time.Time
	// used is what the rounds so far have committed.
	used int64
	ends map[ledger.LeaseState]int
}

// Goal: of those who can end one lease at its expiry one does, and all others learn
// how it ended. Method: rounds in which commit, release, reap and inspect arrive at
// once on two stores, before the expiry, at it, or while the clock passes it.
func TestFinishersOfTwoProcesses(t *testing.T) {
	newDatabase(t).finishersRace(nil)
}

// Goal: so it is while sessions are killed in the middle of a statement. Method: an
// administrator who ends a session that is at work, in each round.
func TestFinishersWhileSessionsAreKilled(t *testing.T) {
	d := newDatabase(t)
	admin, killed := d.connect(), 0
	d.finishersRace(func(over <-chan struct{}) {
		for ended := 0; ended == 0; killed += ended {
			select {
			case <-over:
				return
			default:
			}
			if err := admin.QueryRow(context.Background(), killOneAtWork, DefaultApplicationName).Scan(&ended); err != nil {
				t.Error(err)
				return
			}
		}
	})
	t.Logf("%d sessions were killed", killed)
	if killed < finishersRounds/10 {
		t.Errorf("only %d sessions were killed in %d rounds", killed, finishersRounds)
	}
}

func (d *database) finishersRace(disturb func(over <-chan struct{})) {
	d.t.Helper()
	seed := rand.Uint64()
	d.t.Logf("seed %d", seed)
	d.holdClock(start)
	f := &finishers{
		database: d, stores: []*Store{d.store(nil), d.store(nil)}, random: rand.New(rand.NewPCG(seed, 0)),
		disturb: disturb, now: start, ends: map[ledger.LeaseState]int{},
	}
	do(d.t, f.stores[0], ledger.OpenBucket{Key: bucketKey, Limit: 1_000_000, Settings: ledger.ReservationSettings{DefaultTTL: time.Second, MaxTTL: 24 * hour}})
	do(d.t, f.stores[0], ledger.Reserve{Key: bucketKey, RequestKey: "other", Fingerprint: "f", Tokens: finishersOther, TTL: 24 * hour})
	for round := range finishersRounds {
		f.round(round)
		if d.t.Failed() {
			d.t.Fatalf("in round %d", round)
		}
	}
	d.t.Logf("the leases ended %v", f.ends)
	for _, state := range []ledger.LeaseState{ledger.LeaseCommitted, ledger.LeaseReleased, ledger.LeaseExpired} {
		if f.ends[state] == 0 {
			d.t.Errorf("no lease ended %s: the finishers did not meet", state)
		}
	}
}

// round lets the finishers of one lease loose on each other. Of three rounds the
// expiry comes before they do, while they are at it, and not at all.
func (f *finishers) round(round int) {
	lease := do(f.t, f.stores[round%2], ledger.Reserve{
		Key: bucketKey, RequestKey: fmt.Sprint(round), Fingerprint: "f", Tokens: finishersTokens, TTL: time.Second,
	}).Lease
	before, during := round%3 == 0, round%3 == 1
	f.now = lease.ExpiresAt
	if before {
		f.setClock(f.now)
	} else {
		f.setClock(f.now.Add(-time.Millisecond))
	}
	requests := []ledger.Request{
		ledger.Commit{Key: bucketKey, LeaseID: lease.ID, ActualTokens: finishersActual},
		ledger.Release{Key: bucketKey, LeaseID: lease.ID},
		ledger.ReapExpired{Key: bucketKey},
		ledger.Inspect{Key: bucketKey},
	}
	results := make([]ledger.Result, len(requests))
	var callers []func()
	over := make(chan struct{})
	var busy sync.WaitGroup
	for n, i := range f.random.Perm(len(requests)) {
		busy.Add(1)
		callers = append(callers, func() {
			defer busy.Done()
			results[i] = f.answer(f.stores[n%len(f.stores)], requests[i])
		})
	}
	callers = append(callers, func() { busy.Wait(); close(over) })
	if during {
		callers = append(callers, func() {
			if _, err := f.conn.Exec(f.t.Context(), `UPDATE public.test_clock SET at = $1`, f.now); err != nil {
				f.t.Error(err)
			}
		})
	}
	if f.disturb != nil {
		callers = append(callers, func() { f.disturb(over) })
	}
	atOnce(callers...)
	f.setClock(f.now)

	state := ledger.LeaseState(value[string](f.database, `SELECT state FROM tokenlease.leases WHERE bucket_key = $1 AND lease_id = $2`, bucketKey, lease.ID))
	f.ends[state]++
	if expired := state == ledger.LeaseExpired; before && !expired || !before && !during && expired {
		f.t.Errorf("the lease ended %s", state)
	}
	f.compare(lease.ID, state, results)
	if state == ledger.LeaseCommitted {
		f.used += finishersActual
	}
	f.wantCounts(f.used, finishersOther)
	f.wantInvariants()
}

// answer asks until it is answered. Without trouble the first answer counts.
func (f *finishers) answer(store *Store, request ledger.Request) (result ledger.Result) {
	for range finishersRepeats {
		result = ledger.New(store, nil).Do(context.Background(), request)[0]
		if f.disturb == nil || result.Err == nil || !result.Err.Retryable() {
			break
		}
	}
	return result
}

// compare holds the answers to commit, release, reap and inspect against how the
// lease ended.
func (f *finishers) compare(id string, state ledger.LeaseState, results []ledger.Result) {
	f.t.Helper()
	want := map[ledger.LeaseState][]ledger.Code{
		ledger.LeaseCommitted: {"", ledger.CodeLeaseCommitted, "", ""},
		ledger.LeaseReleased:  {ledger.CodeLeaseReleased, "", "", ""},
		ledger.LeaseExpired:   {ledger.CodeLeaseExpired, "", "", ""},
	}[state]
	for i, code := range want {
		if got := codeOf(results[i]); got != code {
			f.t.Errorf("the lease ended %s, and finisher %d was answered %q, want %q", state, i, got, code)
		}
	}
	if want == nil || f.t.Failed() {
		f.t.Fatalf("the lease ended %s", state)
	}
	settled := [2]int64{f.used, finishersOther}
	if state == ledger.LeaseCommitted {
		settled[0] += finishersActual
	}
	still := [2]int64{f.used, finishersOther + finishersTokens}
	for i, result := range results {
		if result.Err != nil {
			continue
		}
		seen := [2]int64{result.Snapshot.UsedTokens, result.Snapshot.ReservedTokens}
		// Who reaps or looks may have come before the end.
		if seen != settled && (result.Lease != nil || seen != still) {
			f.t.Errorf("the lease ended %s, and finisher %d saw used and reserved as %v", state, i, seen)
		}
		if result.Lease != nil && result.Lease.State != state {
			f.t.Errorf("the lease ended %s, and finisher %d saw it %s", state, i, result.Lease.State)
		}
	}
	if reaped := results[2].ExpiredLeaseIDs; len(reaped) > 0 && (state != ledger.LeaseExpired || !slices.Equal(reaped, []string{id})) {
		f.t.Errorf("the lease %s ended %s, and %v were reaped", id, state, reaped)
	}
	actual := value[int64](f.database, `SELECT coalesce(actual_tokens, refused_tokens, 0) FROM tokenlease.leases WHERE bucket_key = $1 AND lease_id = $2`, bucketKey, id)
	if wantActual := int64(finishersActual); (actual == wantActual) != (state != ledger.LeaseReleased) {
		f.t.Errorf("the lease ended %s, and %d tokens show on it", state, actual)
	}
}
