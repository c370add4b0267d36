package ledgertest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

var batchStories = []story{
	{"several requests on one bucket", severalOnOneBucket},
	{"reserve and commit in one call", reserveAndCommitInOneCall},
	{"several buckets in one call", severalBuckets},
	{"nothing asked", nothingAsked},
	{"a canceled call", canceledCall},
	{"one bucket's whole life in one call", wholeLifeInOneCall},
	{"parallel reserves never pass the limit", parallelReserves},
	{"finishers race for one lease", finishersRace},
	{"one request key in flight twice", oneKeyInFlightTwice},
	{"buckets in opposite order", oppositeOrder},
}

// Goal: requests on one bucket are applied in their order, each sees what those
// before it did, and a refusal takes nothing from the others.
func severalOnOneBucket(w *world) {
	w.open(100)
	results := w.do(w.reservation(60), w.reservation(60), w.reservation(40), w.reservation(1), ledger.Inspect{Key: key})
	for i, refused := range []bool{false, true, false, true, false} {
		if refused {
			w.wantRefusal(results[i], ledger.CodeBudgetExceeded, nil)
		} else if results[i].Err != nil {
			w.Errorf("request %d was refused: %v", i, results[i].Err)
		}
	}
	if got := results[1].Err.Details["availableTokens"]; got != int64(40) {
		w.Errorf("the second request was told that %v are available", got)
	}
	if got := results[4].Snapshot; got.ReservedTokens != 100 || got.Revision != w.stored(key).Revision {
		w.Errorf("the last request saw %+v", got)
	}
	if first := results[0].Snapshot; first.ReservedTokens != 60 {
		w.Errorf("the first request's answer shows %d reserved: later requests changed it", first.ReservedTokens)
	}
	w.wantCounters(0, 100)
}

// Goal: a lease may be made and settled, replayed and refused in one call.
func reserveAndCommitInOneCall(w *world) {
	w.open(100)
	reserve := ledger.Reserve{Key: key, RequestKey: "k", Fingerprint: "f", Tokens: 50}
	first, second := w.leaseID(key, "k"), w.leaseID(key, "l")
	results := w.do(
		reserve,
		reserve,
		ledger.Commit{Key: key, LeaseID: first, ActualTokens: 101},
		ledger.Commit{Key: key, LeaseID: first, ActualTokens: 30},
		ledger.Commit{Key: key, LeaseID: first, ActualTokens: 30},
		ledger.Release{Key: key, LeaseID: first},
		ledger.Reserve{Key: key, RequestKey: "l", Fingerprint: "f", Tokens: 70},
		ledger.Release{Key: key, LeaseID: second},
	)
	for i, code := range []ledger.Code{"", "", ledger.CodeCommitExceedsBudget, "", "", ledger.CodeLeaseCommitted, "", ""} {
		if code != "" {
			w.wantRefusal(results[i], code, nil)
		} else if results[i].Err != nil {
			w.Fatalf("request %d was refused: %v", i, results[i].Err)
		}
	}
	if results[0].Lease.State != ledger.LeaseReserved || results[1].Lease.ID != first || results[3].Lease.State != ledger.LeaseCommitted {
		w.Errorf("the answers show leases %+v, %+v, %+v", results[0].Lease, results[1].Lease, results[3].Lease)
	}
	stored := w.wantLease(first, ledger.LeaseCommitted)
	if stored.RefusedTokens == nil || *stored.RefusedTokens != 101 {
		w.Errorf("the refused figure was lost: %+v", stored)
	}
	w.wantLease(second, ledger.LeaseReleased)
	w.wantCounters(30, 0)
}

// Goal: one call may name many buckets in any order; answers keep the order of
// the requests, and each bucket is on its own.
func severalBuckets(w *world) {
	names := []string{"c", "a", "b", "Z"}
	var requests []ledger.Request
	for i, name := range names {
		requests = append(requests, ledger.OpenBucket{Key: name, Limit: int64(i + 1)})
	}
	for i, name := range names {
		requests = append(requests, ledger.Reserve{Key: name, RequestKey: "k", Fingerprint: "f", Tokens: int64(i + 1)})
	}
	requests = append(requests, ledger.Inspect{Key: "absent"})
	for _, name := range names {
		requests = append(requests, ledger.Reserve{Key: name, RequestKey: "l", Fingerprint: "f", Tokens: 1})
	}
	results := w.do(requests...)
	for i, name := range names {
		if r := results[i]; r.Err != nil || r.Snapshot.Key != name || r.Snapshot.Limit != int64(i+1) {
			w.Errorf("opening %q was answered %+v", name, r)
		}
		if r := results[len(names)+i]; r.Err != nil || r.Lease.BucketKey != name || r.Lease.ReservedTokens != int64(i+1) {
			w.Errorf("reserving on %q was answered %+v", name, r)
		}
		w.wantRefusal(results[2*len(names)+1+i], ledger.CodeBudgetExceeded, nil)
	}
	w.wantRefusal(results[2*len(names)], ledger.CodeBucketNotFound, map[string]any{"bucket": "absent"})
}

// Goal: an empty call is answered with nothing.
func nothingAsked(w *world) {
	if results := w.Store().Do(w.ctx, nil); len(results) != 0 {
		w.Errorf("nothing was answered with %+v", results)
	}
	if sweep := w.sweep(10); len(sweep.Touched) != 0 || sweep.NextIn >= 0 {
		w.Errorf("sweeping an empty ledger gives %+v", sweep)
	}
}

// Goal: a call that was given up before it began does nothing and says so, in a
// way that invites to a retry.
func canceledCall(w *world) {
	w.open(100)
	canceled, cancel := context.WithCancel(w.ctx)
	cancel()
	results := w.Store().Do(canceled, []ledger.Request{w.complete(w.reservation(1)), ledger.Inspect{Key: key}})
	for _, result := range results {
		w.wantRefusal(result, ledger.CodeUnavailable, nil)
		if !result.Err.Retryable() || !errors.Is(result.Err, context.Canceled) {
			w.Errorf("a canceled call answers %v, caused by %v", result.Err, errors.Unwrap(result.Err))
		}
	}
	if _, err := w.Store().Sweep(canceled, ledger.SweepRequest{Limit: 1}); err == nil {
		w.Errorf("a canceled sweep succeeds")
	}
	w.wantCounters(0, 0)
}

// Goal: opening, raising, reserving and shortening in one transaction end in the
// state of the last of them.
func wholeLifeInOneCall(w *world) {
	declare := w.declaration(normalLimit)
	raise := w.raiseFrom("raise-1", 0, time.Hour)
	raise.BucketGeneration = w.generation
	results := w.do(
		declare,
		raise,
		ledger.Reserve{Key: key, RequestKey: "k", Fingerprint: "f", Tokens: temporaryLimit},
		ledger.RevokeRaise{Key: key, UID: "raise-1", Actor: requester},
		ledger.Reserve{Key: key, RequestKey: "l", Fingerprint: "f", Tokens: 1},
		ledger.Commit{Key: key, LeaseID: w.leaseID(key, "k"), ActualTokens: 250},
	)
	for i, result := range results {
		if i == 4 {
			w.wantRefusal(result, ledger.CodeBudgetExceeded, map[string]any{"availableTokens": int64(0)})
		} else if result.Err != nil {
			w.Fatalf("request %d was refused: %v", i, result.Err)
		}
	}
	if r := results[1].Raise; r.State != ledger.RaiseActive {
		w.Errorf("storing the raise answered %s/%s", r.State, r.Reason)
	}
	w.wantRaise("raise-1", ledger.RaiseRestored, ledger.ReasonRevoked)
	if s := w.stored(key); s.Limit != normalLimit || s.UsedTokens != 250 || s.OverLimitTokens != 150 {
		w.Errorf("the bucket ends as %+v", s)
	}
	w.wantIdle(2)
}

// Goal: parallel tasks never pass the limit together.
// Method: rounds of concurrent reserves on the last tokens; exactly one fits.
func parallelReserves(w *world) {
	const rounds, callers = 10, 16
	w.open(1000)
	w.use(950)
	for round := range rounds {
		results := make([]ledger.Result, callers)
		requests := make([]ledger.Request, callers)
		for i := range callers {
			requests[i] = w.complete(w.reservation(40))
		}
		var barrier, done sync.WaitGroup
		barrier.Add(1)
		for i := range callers {
			done.Go(func() {
				barrier.Wait()
				results[i] = w.ledger.Do(w.ctx, requests[i])[0]
			})
		}
		barrier.Done()
		done.Wait()
		var winner *ledger.Lease
		for _, result := range results {
			switch {
			case result.Err != nil:
				w.wantRefusal(result, ledger.CodeBudgetExceeded, map[string]any{"availableTokens": int64(10)})
			case winner != nil:
				w.Fatalf("round %d: leases %s and %s were both admitted", round, winner.ID, result.Lease.ID)
			default:
				winner = result.Lease
			}
		}
		if winner == nil {
			w.Fatalf("round %d: nobody was admitted", round)
		}
		w.must(ledger.Release{Key: key, LeaseID: winner.ID})
	}
	w.wantCounters(950, 0)
}

// Goal: of several finishers of one lease one wins, and the counters follow it.
// Method: rounds of commit, release, reap and inspect at the instant of expiry and
// one millisecond before it.
func finishersRace(w *world) {
	const rounds = 15
	w.openWith(10_000, ledger.ReservationSettings{DefaultTTL: time.Second, MaxTTL: time.Minute})
	var used int64
	for round := range rounds {
		lease := w.reserve(50)
		w.Clock().Advance(time.Second - time.Millisecond*time.Duration(round%2))
		requests := []ledger.Request{
			ledger.Commit{Key: key, LeaseID: lease.ID, ActualTokens: 30},
			ledger.Release{Key: key, LeaseID: lease.ID},
			ledger.ReapExpired{Key: key},
			ledger.Inspect{Key: key},
		}
		results := make([]ledger.Result, len(requests))
		var done sync.WaitGroup
		for i, request := range requests {
			done.Go(func() { results[i] = w.ledger.Do(w.ctx, request)[0] })
		}
		done.Wait()
		state := w.lease(lease.ID).State
		w.wantFinishers(state, round, results)
		if state == ledger.LeaseCommitted {
			used += 30
		}
		w.wantCounters(used, 0)
		w.invariants()
	}
}

// wantFinishers checks that the answers to commit, release, reap and inspect agree
// with the state in which the lease ended.
func (w *world) wantFinishers(state ledger.LeaseState, round int, results []ledger.Result) {
	w.Helper()
	want := map[ledger.LeaseState][2]ledger.Code{
		ledger.LeaseCommitted: {"", ledger.CodeLeaseCommitted},
		ledger.LeaseReleased:  {ledger.CodeLeaseReleased, ""},
		ledger.LeaseExpired:   {ledger.CodeLeaseExpired, ""},
	}
	codes, possible := want[state]
	if !possible || (round%2 == 0) != (state == ledger.LeaseExpired) {
		w.Fatalf("round %d: the lease ended %s", round, state)
	}
	for i, code := range []ledger.Code{codes[0], codes[1], "", ""} {
		var got ledger.Code
		if results[i].Err != nil {
			got = results[i].Err.Code
		}
		if got != code {
			w.Fatalf("round %d: the lease ended %s, and finisher %d was answered %q, want %q", round, state, i, got, code)
		}
	}
}

// Goal: a different payload is a conflict also while the first is in flight.
func oneKeyInFlightTwice(w *world) {
	w.open(1000)
	for round := range 10 {
		requestKey := fmt.Sprintf("shared-%d", round)
		results := make([]ledger.Result, 8)
		var done sync.WaitGroup
		for i := range results {
			done.Go(func() {
				results[i] = w.ledger.Do(w.ctx, ledger.Reserve{
					Key: key, RequestKey: requestKey, Fingerprint: "f", Tokens: int64(10 + i%2),
				})[0]
			})
		}
		done.Wait()
		var lease *ledger.Lease
		for _, result := range results {
			switch {
			case result.Err != nil:
				w.wantRefusal(result, ledger.CodeIdempotencyConflict, nil)
			case lease == nil:
				lease = result.Lease
			case lease.ID != result.Lease.ID:
				w.Fatalf("one request key made leases %s and %s", lease.ID, result.Lease.ID)
			}
		}
		if lease == nil {
			w.Fatalf("nobody was admitted")
		}
		w.must(ledger.Release{Key: key, LeaseID: lease.ID})
	}
	w.wantCounters(0, 0)
}

// Goal: calls that name buckets in opposite order do not block each other for
// good.
func oppositeOrder(w *world) {
	names := []string{"a", "b", "c"}
	for _, name := range names {
		w.must(ledger.OpenBucket{Key: name, Limit: 1000})
	}
	var done sync.WaitGroup
	for caller := range 4 {
		done.Go(func() {
			for round := range 10 {
				var requests []ledger.Request
				for i := range names {
					name := names[i]
					if caller%2 == 1 {
						name = names[len(names)-1-i]
					}
					requests = append(requests, ledger.Reserve{
						Key: name, RequestKey: fmt.Sprintf("%d-%d", caller, round), Fingerprint: "f", Tokens: 1,
					})
				}
				for _, result := range w.ledger.Do(w.ctx, requests...) {
					if result.Err != nil {
						w.Errorf("caller %d was refused: %v", caller, result.Err)
					}
				}
			}
		})
	}
	done.Wait()
	for _, name := range names {
		if got := w.stored(name).ReservedTokens; got != 40 {
			w.Errorf("bucket %q has %d reserved, want 40", name, got)
		}
	}
}
