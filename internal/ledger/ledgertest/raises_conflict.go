package ledgertest

import (
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

var conflictStories = []story{
	{"a pointer lost to SetLimit", lostToSetLimit},
	{"a pointer lost to another hand", lostToAnotherHand},
	{"a pointer lost to a declaration", lostToDeclaration},
	{"away and back again", awayAndBack},
	{"a lost raise lets the next one start", lostRaiseFreesBucket},
	{"rebase", rebase},
	{"rebase follows every declaration", rebaseTwice},
	{"rebase and another hand", rebaseAndAnotherHand},
	{"a mismatch is waited for", mismatchWaits},
	{"a mismatch that heals", mismatchHeals},
	{"a mismatch and a closing window", mismatchAndWindow},
	{"a mismatch after waiting", mismatchAfterWaiting},
	{"a mismatch and then a wait", mismatchThenWaiting},
}

// wantKept checks that a raise which lost its pointer ended for review and that
// the limit stays what the other writer made it, now and past the expiry.
func (w *world) wantKept(raise *ledger.Raise, limit int64) {
	w.Helper()
	w.wantReview(raise.ID)
	w.wantLimit(limit)
	if s := w.stored(key); s.ActiveRaise != nil || s.BaseLimit != limit {
		w.Errorf("the bucket still shows the raise: %+v", s)
	}
	if ended := w.raise(raise.ID); ended.ObservedLimit == nil || *ended.ObservedLimit != limit || ended.EndedAt == nil {
		w.Errorf("the raise found %+v", ended)
	}
	w.wantIdle(2)
	w.touchAt(raise.ExpiresAt.Add(time.Hour))
	w.wantLimit(limit)
	w.wantEvents(ledger.AuditRaiseFailed, raise.ID, 1)
	w.wantEvents(ledger.AuditRaiseRestored, raise.ID, 0)
}

// Goal: promise 2: SetLimit during a raise is kept, with a new value and with an
// equal one.
func lostToSetLimit(w *world) {
	for _, limit := range []int64{180, temporaryLimit, normalLimit} {
		w.startOver()
		w.declare(normalLimit)
		raise := w.store(w.raiseFrom(w.next("raise"), 0, 30*time.Minute))
		w.setLimit(temporaryLimit, limit)
		w.wantKept(raise, limit)
	}
}

// startOver gives the bucket up and opens a new life of the key, so that one test
// can tell a story several times.
func (w *world) startOver() {
	w.Helper()
	w.must(ledger.CloseBucket{Key: key, Owner: w.owner, Deletion: ledger.DeletionDelete, Actor: requester})
	if w.raw(key) != nil {
		w.Fatalf("the bucket is still there")
	}
	w.owner.UID = w.next("bucket-uid")
	w.owner.CreatedAt = w.now()
	w.generation = 0
}

// Goal: plain SQL during a raise is kept, also when it writes the equal value
// (ABA), and shows in the audit as not the ledger's.
func lostToAnotherHand(w *world) {
	for i, limit := range []int64{250, temporaryLimit, normalLimit} {
		w.startOver()
		w.declare(normalLimit)
		raise := w.store(w.raiseFrom(w.next("raise"), 0, 30*time.Minute))
		w.override(limit)
		if sweep := w.sweep(10); len(sweep.Touched) != 1 || sweep.Touched[0] != key {
			w.Errorf("a limit written by another hand is not due at once: %+v", sweep)
		}
		w.wantKept(raise, limit)
		w.wantEvents(ledger.AuditLimitTaken, "", i+1)
	}
}

// Goal: under Review a declared limit applies at once and ends the raise.
func lostToDeclaration(w *world) {
	for _, limit := range []int64{180, temporaryLimit, 400, 50} {
		w.startOver()
		w.declare(normalLimit)
		raise := w.store(w.raiseFrom(w.next("raise"), 0, 30*time.Minute))
		w.declare(limit)
		w.wantKept(raise, limit)
	}
}

// Goal: a declaration that does not change the limit leaves the raise alone, and
// one that goes away and comes back does not.
func awayAndBack(w *world) {
	raise := w.raised()
	w.declare(normalLimit)
	w.declare(normalLimit, withPolicy(900, time.Hour), overwriting)
	w.wantRaise(raise.ID, ledger.RaiseActive, ledger.ReasonNone)
	w.wantLimit(temporaryLimit)
	w.override(200)
	w.override(temporaryLimit)
	w.touch()
	w.wantKept(raise, temporaryLimit)
}

// Goal: a raise that lost its limit does not hold up the next one.
func lostRaiseFreesBucket(w *world) {
	w.declare(normalLimit)
	w.store(w.raiseFrom("first", 0, 30*time.Minute))
	w.store(w.raiseFrom("second", time.Minute, 20*time.Minute, to(500)))
	w.touchAt(Epoch.Add(time.Minute))
	w.wantRaise("second", ledger.RaisePending, ledger.ReasonBucketAlreadyRaised)
	w.override(normalLimit)
	w.touch()
	w.wantReview("first")
	w.wantRaise("second", ledger.RaiseActive, ledger.ReasonNone)
	w.wantLimit(500)
	w.touchAt(Epoch.Add(20 * time.Minute))
	w.wantLimit(normalLimit)
}

// Goal: under Rebase a declared limit stays under the raise, and the expiry
// returns to it without a conflict.
func rebase(w *world) {
	for _, c := range []struct{ declared, during int64 }{
		{180, temporaryLimit}, {50, temporaryLimit}, {400, 400}, {temporaryLimit, temporaryLimit},
	} {
		w.startOver()
		w.declare(normalLimit)
		raise := w.store(w.raiseFrom(w.next("raise"), 0, 30*time.Minute, rebasing))
		w.declare(c.declared)
		w.wantLimit(c.during)
		rebased := w.wantRaise(raise.ID, ledger.RaiseActive, ledger.ReasonNone)
		if *rebased.RestoreTo != c.declared || *rebased.AppliedLimit != c.during {
			w.Errorf("declared %d: the raise reads %+v", c.declared, rebased)
		}
		if s := w.stored(key); s.BaseLimit != c.declared || *s.DeclaredLimit != c.declared {
			w.Errorf("declared %d: the bucket reads %+v", c.declared, s)
		}
		w.wantEvents(ledger.AuditRaiseRebased, raise.ID, 1)
		w.wantIdle(2)
		w.touchAt(raise.ExpiresAt)
		if ended := w.wantRaise(raise.ID, ledger.RaiseRestored, ledger.ReasonExpired); ended.ReviewRequired {
			w.Errorf("declared %d: a rebased raise asks for review", c.declared)
		}
		w.wantLimit(c.declared)
	}
}

// Goal: each further declaration moves the base, up and down again.
func rebaseTwice(w *world) {
	raise := w.raised(rebasing)
	for _, c := range []struct{ declared, during int64 }{{180, 300}, {400, 400}, {350, 350}, {100, 300}} {
		w.declare(c.declared)
		w.wantLimit(c.during)
	}
	w.touchAt(raise.ExpiresAt)
	w.wantRaise(raise.ID, ledger.RaiseRestored, ledger.ReasonExpired)
	w.wantLimit(100)
}

// Goal: Rebase is about the declared limit only; another hand is still kept.
func rebaseAndAnotherHand(w *world) {
	raise := w.raised(rebasing)
	w.declare(180)
	w.override(temporaryLimit)
	w.touch()
	w.wantKept(raise, temporaryLimit)
	w.declare(200)
	w.wantLimit(temporaryLimit)
	w.wantEvents(ledger.AuditLimitKept, "", 1)
}

// Goal: a raise that finds another limit waits a grace, then ends for good.
func mismatchWaits(w *world) {
	w.declare(120)
	w.store(w.raiseFrom("raise-1", 0, time.Hour))
	waiting := w.wantRaise("raise-1", ledger.RaisePending, ledger.ReasonLimitMismatch)
	if waiting.ObservedLimit == nil || *waiting.ObservedLimit != 120 {
		w.Errorf("the waiting raise does not tell what it found: %+v", waiting)
	}
	w.wantEvents(ledger.AuditRaiseWaiting, "raise-1", 1)
	w.touchAt(Epoch.Add(ledger.MismatchGrace - time.Millisecond))
	w.wantRaise("raise-1", ledger.RaisePending, ledger.ReasonLimitMismatch)
	w.wantIdle(3)
	if sweep := w.sweep(1); sweep.NextIn != time.Millisecond {
		w.Errorf("the grace is over in %v by the timer", sweep.NextIn)
	}
	w.touchAt(Epoch.Add(ledger.MismatchGrace))
	ended := w.wantRaise("raise-1", ledger.RaiseFailed, ledger.ReasonLimitChanged)
	if ended.Ran() || ended.ReviewRequired {
		w.Errorf("a raise that never ran reads %+v", ended)
	}
	w.wantLimit(120)
	w.wantIdle(2)
}

// Goal: the bucket and its lease may arrive in one apply, in either order.
func mismatchHeals(w *world) {
	w.declare(120)
	w.store(w.raiseFrom("raise-1", 0, time.Hour))
	w.Clock().Advance(ledger.MismatchGrace - time.Millisecond)
	w.declare(normalLimit)
	w.wantRaise("raise-1", ledger.RaiseActive, ledger.ReasonNone)
	w.wantLimit(temporaryLimit)
	w.Clock().Advance(time.Hour)
	w.touch()
	w.wantLimit(normalLimit)

	w.override(120)
	w.store(w.raiseFrom("raise-2", 0, time.Hour))
	w.wantRaise("raise-2", ledger.RaisePending, ledger.ReasonLimitMismatch)
	w.override(normalLimit)
	w.touch()
	w.wantRaise("raise-2", ledger.RaiseActive, ledger.ReasonNone)
}

// Goal: a window shorter than the grace ends with the window.
func mismatchAndWindow(w *world) {
	w.declare(120)
	w.store(w.raiseFrom("raise-1", 0, 30*time.Second))
	w.touchAt(Epoch.Add(30 * time.Second))
	w.wantRaise("raise-1", ledger.RaiseFailed, ledger.ReasonWindowMissed)
	w.wantIdle(2)
}

// Goal: a raise that waited its turn has its own grace once the turn comes.
func mismatchAfterWaiting(w *world) {
	w.declare(normalLimit)
	w.store(w.raiseFrom("first", 0, 10*time.Minute))
	w.store(w.raiseFrom("second", time.Minute, time.Hour, func(r *ledger.StoreRaise) { r.Grant.NormalLimit = 180 }))
	w.touchAt(Epoch.Add(10 * time.Minute))
	w.wantRaise("second", ledger.RaisePending, ledger.ReasonLimitMismatch)
	w.touchAt(Epoch.Add(10*time.Minute + ledger.MismatchGrace - time.Millisecond))
	w.wantRaise("second", ledger.RaisePending, ledger.ReasonLimitMismatch)
	w.declare(180)
	w.wantRaise("second", ledger.RaiseActive, ledger.ReasonNone)
	w.touchAt(Epoch.Add(time.Hour))
	w.wantLimit(180)
}

// Goal: the grace does not run while another raise is in force: what the raise
// waits for then is its turn.
func mismatchThenWaiting(w *world) {
	w.declare(120)
	w.store(w.raiseFrom("early", 0, time.Hour))
	w.Clock().Advance(ledger.MismatchGrace / 2)
	w.store(w.raiseFrom("fits", 0, 10*time.Minute, func(r *ledger.StoreRaise) { r.Grant.NormalLimit = 120 }))
	w.wantRaise("fits", ledger.RaiseActive, ledger.ReasonNone)
	w.wantRaise("early", ledger.RaisePending, ledger.ReasonBucketAlreadyRaised)
	w.Clock().Advance(ledger.MismatchGrace)
	w.touch()
	w.wantRaise("early", ledger.RaisePending, ledger.ReasonBucketAlreadyRaised)
	w.touchAt(Epoch.Add(ledger.MismatchGrace/2 + 10*time.Minute))
	w.wantRaise("early", ledger.RaisePending, ledger.ReasonLimitMismatch)
	w.Clock().Advance(ledger.MismatchGrace)
	w.touch()
	w.wantRaise("early", ledger.RaiseFailed, ledger.ReasonLimitChanged)
	w.wantLimit(120)
}
