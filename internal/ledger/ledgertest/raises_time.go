package ledgertest

import (
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

var raiseTimeStories = []story{
	{"the window is half-open", windowIsHalfOpen},
	{"a reserve at expiry sees the normal limit", reserveAtExpiry},
	{"every operation touches first", everyOperationTouches},
	{"one late touch does everything in order", lateTouch},
	{"a start that nobody touched", lateStart},
	{"a start left out is now", startLeftOut},
	{"restore under usage", restoreUnderUsage},
	{"open bucket on a raised bucket", openRaisedBucket},
	{"leases carry the raise of their admission", leasesCarryRaise},
	{"back to back", backToBack},
	{"the next raise waits its turn", nextWaits},
	{"a window closes while waiting", windowClosesWhileWaiting},
	{"two raises at one instant", twoAtOneInstant},
	{"overlap in every order of ending", overlapInEveryOrder},
	{"reaping tells leases that a restore expired", reapTellsAll},
}

// Goal: a raise is in force exactly in [startsAt, expiresAt), and each step is
// recorded with what undoes it.
func windowIsHalfOpen(w *world) {
	w.declare(normalLimit)
	w.store(w.raiseFrom("raise-1", time.Minute, 31*time.Minute))
	w.touchAt(Epoch.Add(time.Minute - time.Millisecond))
	w.wantRaise("raise-1", ledger.RaisePending, ledger.ReasonNone)
	w.wantLimit(normalLimit)
	epoch := w.stored(key).LimitEpoch

	w.touchAt(Epoch.Add(time.Minute))
	active := w.wantRaise("raise-1", ledger.RaiseActive, ledger.ReasonNone)
	s := w.stored(key)
	if *active.AppliedLimit != temporaryLimit || *active.RestoreTo != normalLimit || active.Epoch != s.LimitEpoch || s.LimitEpoch <= epoch ||
		!active.ActivatedAt.Equal(w.now()) || *active.ObservedLimit != normalLimit {
		w.Errorf("the active raise reads %+v over epoch %d", active, s.LimitEpoch)
	}
	if s.Limit != temporaryLimit || s.BaseLimit != normalLimit || s.ActiveRaise == nil || s.ActiveRaise.ID != "raise-1" || s.PendingRaises != 0 {
		w.Errorf("the raised bucket reads %+v", s)
	}
	if sweep := w.sweep(1); sweep.NextIn != 30*time.Minute {
		w.Errorf("the next transition is due in %v", sweep.NextIn)
	}

	w.touchAt(Epoch.Add(31*time.Minute - time.Millisecond))
	w.wantLimit(temporaryLimit)
	w.touchAt(Epoch.Add(31 * time.Minute))
	restored := w.wantRaise("raise-1", ledger.RaiseRestored, ledger.ReasonExpired)
	if !restored.EndedAt.Equal(w.now()) || restored.ReviewRequired || *restored.ObservedLimit != temporaryLimit || restored.Version <= active.Version {
		w.Errorf("the restored raise reads %+v", restored)
	}
	if s := w.stored(key); s.Limit != normalLimit || s.ActiveRaise != nil || s.LimitEpoch <= active.Epoch {
		w.Errorf("the restored bucket reads %+v", s)
	}
	w.wantIdle(3)
}

// Goal: promise 1: an expired raise admits nothing more, whoever comes first.
func reserveAtExpiry(w *world) {
	raise := w.raised()
	w.use(normalLimit)
	w.Clock().Set(raise.ExpiresAt.Add(-time.Millisecond))
	w.reserve(50)
	w.Clock().Advance(time.Millisecond)
	w.refuse(w.reservation(1), ledger.CodeBudgetExceeded, map[string]any{"availableTokens": int64(0)})
	w.wantRaise(raise.ID, ledger.RaiseRestored, ledger.ReasonExpired)
	w.wantLimit(normalLimit)
	rows := w.audit()
	if last := rows[len(rows)-1]; last.Event != ledger.AuditRaiseRestored || last.Trigger != string(ledger.OpReserve) || last.Worker != WorkerName {
		w.Errorf("the audit does not show that the refused reserve restored: %+v", last)
	}
}

// Goal: whatever operation comes first after expiry restores, also when it is
// refused.
func everyOperationTouches(w *world) {
	for _, operation := range []ledger.Operation{
		ledger.OpOpenBucket, ledger.OpSetLimit, ledger.OpReserve, ledger.OpCommit, ledger.OpRelease, ledger.OpReapExpired,
		ledger.OpInspect, ledger.OpTouch, ledger.OpApplyDeclare, ledger.OpStoreRaise, ledger.OpRevokeRaise, ledger.OpCloseBucket,
		ledger.OpAcknowledgeReview,
	} {
		raise := w.next("raise")
		w.declare(normalLimit)
		w.store(w.raiseFrom(raise, 0, time.Minute))
		w.wantRaise(raise, ledger.RaiseActive, ledger.ReasonNone)
		w.Clock().Advance(time.Minute)
		stranger := w.owner
		stranger.Name = "another"
		var request ledger.Request
		switch operation {
		case ledger.OpOpenBucket:
			request = ledger.OpenBucket{Key: key, Limit: 7}
		case ledger.OpSetLimit:
			request = ledger.SetLimit{Key: key, ExpectedLimit: temporaryLimit, Limit: temporaryLimit}
		case ledger.OpReserve:
			request = w.reservation(temporaryLimit)
		case ledger.OpCommit:
			request = ledger.Commit{Key: key, LeaseID: "unknown"}
		case ledger.OpRelease:
			request = ledger.Release{Key: key, LeaseID: "unknown"}
		case ledger.OpReapExpired:
			request = ledger.ReapExpired{Key: key}
		case ledger.OpInspect:
			request = ledger.Inspect{Key: key}
		case ledger.OpTouch:
			request = ledger.Touch{Key: key}
		case ledger.OpApplyDeclare:
			declaration := w.declaration(7)
			declaration.Owner = stranger
			request = declaration
		case ledger.OpStoreRaise:
			foreign := w.raiseFrom("foreign", 0, time.Minute)
			foreign.Grant.Namespace = "another"
			request = foreign
		case ledger.OpRevokeRaise:
			request = ledger.RevokeRaise{Key: key, UID: "unknown"}
		case ledger.OpAcknowledgeReview:
			request = ledger.AcknowledgeReview{Key: key, UID: "unknown"}
		case ledger.OpCloseBucket:
			request = ledger.CloseBucket{Key: key, Owner: stranger, Deletion: ledger.DeletionRetain}
		}
		w.do(request)
		w.wantRaise(raise, ledger.RaiseRestored, ledger.ReasonExpired)
		w.wantLimit(normalLimit)
		for _, row := range w.audit() {
			if row.Event == ledger.AuditRaiseRestored && row.RaiseID == raise && row.Trigger != string(operation) {
				w.Errorf("%s restored, and the audit says %+v", operation, row)
			}
		}
		w.wantNothingDue()
	}
}

// Goal: steps that became due while nobody looked run in the order of their
// instants: expiry of leases, restore, close of windows, next start.
func lateTouch(w *world) {
	w.declare(normalLimit)
	w.store(w.raiseFrom("first", 0, 10*time.Minute))
	w.store(w.raiseFrom("second", 10*time.Minute, 20*time.Minute, to(250)))
	w.store(w.raiseFrom("missed", 5*time.Minute, 15*time.Minute))
	w.store(w.raiseFrom("third", 20*time.Minute, 40*time.Minute, to(200)))
	lease := w.reserveFor(50, 10*time.Minute)
	w.touchAt(Epoch.Add(30 * time.Minute))

	w.wantRaise("first", ledger.RaiseRestored, ledger.ReasonExpired)
	w.wantRaise("missed", ledger.RaiseFailed, ledger.ReasonWindowMissed)
	w.wantRaise("second", ledger.RaiseFailed, ledger.ReasonWindowMissed)
	w.wantRaise("third", ledger.RaiseActive, ledger.ReasonNone)
	w.wantLimit(200)
	w.wantLease(lease.ID, ledger.LeaseExpired)
	var due []time.Time
	for _, row := range w.audit() {
		switch row.Event {
		case ledger.AuditRaiseRestored, ledger.AuditRaiseFailed, ledger.AuditRaiseActivated:
			due = append(due, *row.DueAt)
			if row.Event == ledger.AuditRaiseRestored && row.ReservedTokens != 0 {
				w.Errorf("the restore was counted before the lease that expired with it: %+v", row)
			}
		}
	}
	for i := 1; i < len(due); i++ {
		if due[i].Before(due[i-1]) {
			w.Errorf("steps ran out of order: %v", due)
		}
	}
	w.wantIdle(3)
}

// Goal: a start that nobody touched in time takes effect at the next touch within
// the window, with the audit telling when it was due.
func lateStart(w *world) {
	w.declare(normalLimit)
	w.store(w.raiseFrom("raise-1", time.Minute, time.Hour))
	w.Clock().Set(Epoch.Add(20 * time.Minute))
	w.reserve(temporaryLimit)
	active := w.wantRaise("raise-1", ledger.RaiseActive, ledger.ReasonNone)
	if !active.ActivatedAt.Equal(w.now()) {
		w.Errorf("activated at %v, want the instant of the touch", active.ActivatedAt)
	}
	rows := w.audit()
	if last := rows[len(rows)-1]; last.DueAt == nil || !last.DueAt.Equal(Epoch.Add(time.Minute)) || !last.At.Equal(w.now()) {
		w.Errorf("the audit row of a late start reads %+v", last)
	}
}

// Goal: an omitted start is the time of first storage, and stays it.
func startLeftOut(w *world) {
	w.declare(normalLimit)
	w.Clock().Advance(time.Second)
	atOnce := func(r *ledger.StoreRaise) { r.Grant.StartsAt = nil }
	request := w.raiseFrom("raise-1", 0, time.Hour, atOnce)
	stored := w.now()
	if raise := w.store(request); raise.State != ledger.RaiseActive || !raise.StartsAt.Equal(stored) {
		w.Errorf("without a start the raise is %s and starts at %v", raise.State, raise.StartsAt)
	}
	w.Clock().Advance(time.Minute)
	if raise := w.store(request); !raise.StartsAt.Equal(stored) {
		w.Errorf("storing again moved the start to %v", raise.StartsAt)
	}
}

// Goal: usage never holds a restore up; over the limit nothing is admitted, and
// holders settle.
func restoreUnderUsage(w *world) {
	raise := w.raised()
	w.use(180)
	kept, settled := w.reserveFor(20, time.Hour), w.reserveFor(30, time.Hour)
	w.touchAt(raise.ExpiresAt)
	s := w.stored(key)
	if s.Limit != normalLimit || s.AvailableTokens != 0 || s.OverLimitTokens != 130 || s.UsedTokens != 180 || s.ReservedTokens != 50 {
		w.Errorf("after the restore the bucket reads %+v", s)
	}
	w.refuse(w.reservation(1), ledger.CodeBudgetExceeded, map[string]any{"availableTokens": int64(0)})
	w.refuse(ledger.Commit{Key: key, LeaseID: settled.ID, ActualTokens: 31}, ledger.CodeCommitExceedsBudget,
		map[string]any{"maximumCommit": int64(30)})
	w.commit(settled, 30)
	w.refuse(ledger.SetLimit{Key: key, ExpectedLimit: normalLimit, Limit: 229}, ledger.CodeLimitBelowAllocated,
		map[string]any{"allocated": int64(230)})
	w.must(ledger.Release{Key: key, LeaseID: kept.ID})
	if s := w.stored(key); s.AvailableTokens != 0 || s.OverLimitTokens != 110 {
		w.Errorf("after settling the bucket reads %+v", s)
	}
	w.refuse(w.reservation(1), ledger.CodeBudgetExceeded, nil)
	w.declare(250)
	if s := w.stored(key); s.AvailableTokens != 40 || s.OverLimitTokens != 0 {
		w.Errorf("once it fits the bucket reads %+v", s)
	}
	w.reserve(40)
}

// Goal: opening compares with the limit that the restore will return to.
func openRaisedBucket(w *world) {
	w.raised()
	if s := w.must(ledger.OpenBucket{Key: key, Limit: normalLimit}).Snapshot; s.Limit != temporaryLimit {
		w.Errorf("opening a raised bucket answers %+v", s)
	}
	w.refuse(ledger.OpenBucket{Key: key, Limit: temporaryLimit}, ledger.CodeBucketLimitConflict,
		map[string]any{"expectedLimit": int64(temporaryLimit), "actualLimit": int64(normalLimit)})
	w.wantLimit(temporaryLimit)
}

// Goal: a lease says which raise and which scoped key it was admitted under.
func leasesCarryRaise(w *world) {
	w.declare(normalLimit)
	before := w.reserve(1)
	w.store(w.raiseFrom("raise-1", 0, time.Minute))
	during := w.reserve(1)
	w.Clock().Advance(time.Minute)
	w.declare(normalLimit, func(r *ledger.ApplyDeclared) { r.Declaration.ScopedKeyID = "key_v4" })
	after := w.reserve(1)
	for _, want := range []struct{ lease, raise, scopedKey string }{
		{before.ID, "", scopedKeyID}, {during.ID, "raise-1", scopedKeyID}, {after.ID, "", "key_v4"},
	} {
		if got := w.lease(want.lease); got.RaiseID != want.raise || got.ScopedKeyID != want.scopedKey {
			w.Errorf("lease %s carries raise %q and key %q, want %q and %q", got.ID, got.RaiseID, got.ScopedKeyID, want.raise, want.scopedKey)
		}
	}
}

// Goal: raises that touch end to start hand over in one transaction.
func backToBack(w *world) {
	w.declare(normalLimit)
	w.store(w.raiseFrom("first", 0, 10*time.Minute))
	w.store(w.raiseFrom("second", 10*time.Minute, 20*time.Minute, to(200)))
	revision := w.stored(key).Revision
	w.touchAt(Epoch.Add(10 * time.Minute))
	w.wantRaise("first", ledger.RaiseRestored, ledger.ReasonExpired)
	second := w.wantRaise("second", ledger.RaiseActive, ledger.ReasonNone)
	if *second.RestoreTo != normalLimit {
		w.Errorf("the second raise will return to %d", *second.RestoreTo)
	}
	if s := w.stored(key); s.Limit != 200 || s.Revision != revision+1 {
		w.Errorf("the hand-over took %d revisions and left the limit %d", s.Revision-revision, s.Limit)
	}
	w.wantEvents(ledger.AuditRaiseWaiting, "", 0)
	w.touchAt(Epoch.Add(20 * time.Minute))
	w.wantLimit(normalLimit)
}

// Goal: one raise at a time; a due one waits, audited once, and takes over while
// its window is open.
func nextWaits(w *world) {
	w.declare(normalLimit)
	w.store(w.raiseFrom("first", 0, 10*time.Minute))
	w.store(w.raiseFrom("second", 5*time.Minute, 20*time.Minute, to(500)))
	w.touchAt(Epoch.Add(5 * time.Minute))
	for range 5 {
		w.Clock().Advance(time.Second)
		w.touch()
	}
	w.wantRaise("second", ledger.RaisePending, ledger.ReasonBucketAlreadyRaised)
	w.wantEvents(ledger.AuditRaiseWaiting, "second", 1)
	w.wantLimit(temporaryLimit)
	w.wantIdle(5)
	w.touchAt(Epoch.Add(10 * time.Minute))
	second := w.wantRaise("second", ledger.RaiseActive, ledger.ReasonNone)
	if *second.RestoreTo != normalLimit {
		w.Errorf("the second raise will return to %d: it took the first one's limit for the normal one", *second.RestoreTo)
	}
	w.wantLimit(500)
	w.touchAt(Epoch.Add(20 * time.Minute))
	w.wantLimit(normalLimit)
	w.wantIdle(2)
}

// Goal: a window that closes unused is missed, not prolonged.
func windowClosesWhileWaiting(w *world) {
	w.declare(normalLimit)
	w.store(w.raiseFrom("first", 0, 20*time.Minute))
	w.store(w.raiseFrom("second", 5*time.Minute, 10*time.Minute, to(500)))
	w.store(w.raiseFrom("same-end", 5*time.Minute, 20*time.Minute, to(400)))
	w.wantNothingDue()
	w.touchAt(Epoch.Add(10 * time.Minute))
	w.wantRaise("second", ledger.RaiseFailed, ledger.ReasonWindowMissed)
	w.wantLimit(temporaryLimit)
	w.touchAt(Epoch.Add(20 * time.Minute))
	w.wantRaise("first", ledger.RaiseRestored, ledger.ReasonExpired)
	w.wantRaise("same-end", ledger.RaiseFailed, ledger.ReasonWindowMissed)
	w.wantLimit(normalLimit)
}

// Goal: raises created at one instant are ordered: one is active, the other
// waits.
func twoAtOneInstant(w *world) {
	w.declare(normalLimit)
	results := w.do(
		w.raiseFrom("b", time.Minute, 10*time.Minute),
		w.raiseFrom("a", time.Minute, 20*time.Minute, to(200)),
	)
	for _, result := range results {
		if result.Err != nil || result.Raise.State != ledger.RaisePending {
			w.Fatalf("storing was answered %+v", result)
		}
	}
	w.touchAt(Epoch.Add(time.Minute))
	w.wantRaise("a", ledger.RaiseActive, ledger.ReasonNone)
	w.wantRaise("b", ledger.RaisePending, ledger.ReasonBucketAlreadyRaised)
	w.wantLimit(200)
	w.touchAt(Epoch.Add(10 * time.Minute))
	w.wantRaise("b", ledger.RaiseFailed, ledger.ReasonWindowMissed)
	w.touchAt(Epoch.Add(20 * time.Minute))
	w.wantLimit(normalLimit)
}

// Goal: after overlapping raises the limit is the normal one, in every order of
// their ends, touched often or once.
func overlapInEveryOrder(w *world) {
	w.declare(normalLimit)
	for _, ends := range [][2]time.Duration{
		{time.Minute, 2 * time.Minute}, {2 * time.Minute, time.Minute}, {time.Minute, time.Minute},
	} {
		for _, often := range []bool{true, false} {
			start := w.now()
			w.store(w.raiseFrom(w.next("raise"), 0, ends[0]))
			w.store(w.raiseFrom(w.next("raise"), 0, ends[1], to(500)))
			w.wantLimit(temporaryLimit)
			if often {
				for range 6 {
					w.Clock().Advance(20 * time.Second)
					w.touch()
					if s := w.stored(key); (s.ActiveRaise == nil) != (s.Limit == normalLimit) {
						w.Fatalf("the limit is %d while the active raise is %+v", s.Limit, s.ActiveRaise)
					}
				}
			}
			w.touchAt(start.Add(2 * time.Minute))
			w.wantLimit(normalLimit)
			if s := w.stored(key); s.ActiveRaise != nil || s.PendingRaises != 0 {
				w.Errorf("after the last end the bucket reads %+v", s)
			}
		}
	}
}

// Goal: leases that expired before a raise's end are told by the reap that
// performs both.
func reapTellsAll(w *world) {
	w.raised()
	early, late := w.reserveFor(10, 10*time.Minute), w.reserveFor(10, 40*time.Minute)
	w.Clock().Advance(35 * time.Minute)
	got := w.must(ledger.ReapExpired{Key: key}).ExpiredLeaseIDs
	if len(got) != 1 || got[0] != early.ID {
		w.Errorf("reaping told %v, want %s", got, early.ID)
	}
	w.Clock().Advance(5 * time.Minute)
	got = w.must(ledger.ReapExpired{Key: key}).ExpiredLeaseIDs
	if len(got) != 1 || got[0] != late.ID {
		w.Errorf("reaping told %v, want %s", got, late.ID)
	}
}
