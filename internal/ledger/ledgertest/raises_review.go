package ledgertest

import (
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

var reviewStories = []story{
	{"a review is acknowledged once", reviewAcknowledgedOnce},
	{"only what asks for review is acknowledged", acknowledgesNothingElse},
	{"a review outlives its bucket and its object", reviewOutlives},
	{"no raise is longer than all may be", longestRaise},
	{"who shortened is not who asked", shortenedBySomebody},
	{"a claim stands beside the actor", claimBesideActor},
}

const reviewer = "reviewer@example.com"

func (w *world) acknowledge(uid, actor string) *ledger.Raise {
	w.Helper()
	return w.must(ledger.AcknowledgeReview{Key: key, UID: uid, Actor: actor}).Raise
}

func (w *world) wantOpenReviews(want int64) {
	w.Helper()
	if got, err := w.Store().OpenReviews(w.ctx); err != nil || got != want {
		w.Errorf("%d reviews are open (%v), want %d", got, err, want)
	}
}

// Goal: a review stays open until somebody acknowledges it; who and when stand in the
// audit, once; the limit and how the raise ended stay what they are.
func reviewAcknowledgedOnce(w *world) {
	raise := w.raised()
	w.wantOpenReviews(0)
	w.setLimit(temporaryLimit, 180)
	w.wantReview(raise.ID)
	w.wantOpenReviews(1)
	w.Clock().Advance(time.Hour)
	done := w.acknowledge(raise.ID, reviewer)
	if done.ReviewRequired || !done.Reviewed() || done.State != ledger.RaiseFailed || done.Reason != ledger.ReasonLimitChanged {
		w.Errorf("acknowledged, the raise is %+v", done)
	}
	rows := w.audit()
	if last := rows[len(rows)-1]; last.Event != ledger.AuditRaiseReviewed || last.Actor != reviewer || last.RaiseID != raise.ID ||
		last.Outcome != ledger.OutcomeApplied || last.Reason != ledger.ReasonLimitChanged || !last.At.Equal(w.now()) ||
		last.RaiseVersion != done.Version || last.Trigger != string(ledger.OpAcknowledgeReview) {
		w.Errorf("the audit says %+v", last)
	}
	w.wantOpenReviews(0)
	w.wantLimit(180)
	revision := w.stored(key).Revision
	if again := w.acknowledge(raise.ID, "another"); again.Version != done.Version {
		w.Errorf("acknowledged again, the raise is %+v", again)
	}
	w.wantEvents(ledger.AuditRaiseReviewed, raise.ID, 1)
	if got := w.stored(key).Revision; got != revision {
		w.Errorf("acknowledging again moved the revision from %d to %d", revision, got)
	}
}

// Goal: a raise that asks for no review is answered unchanged, in each state, and one
// that nobody asked for is not found.
func acknowledgesNothingElse(w *world) {
	w.refuse(ledger.AcknowledgeReview{Key: key, UID: "unknown", Actor: reviewer}, ledger.CodeRaiseNotFound, map[string]any{"uid": "unknown"})
	raise := w.raised()
	w.store(w.raiseFrom("waiting", 0, time.Minute))
	for _, uid := range []string{raise.ID, "waiting"} {
		before := w.raise(uid)
		if after := w.acknowledge(uid, reviewer); after.Version != before.Version || after.State != before.State {
			w.Errorf("raise %q became %+v", uid, after)
		}
	}
	w.touchAt(raise.ExpiresAt)
	if after := w.acknowledge(raise.ID, reviewer); after.State != ledger.RaiseRestored || after.Reviewed() {
		w.Errorf("the restored raise became %+v", after)
	}
	for _, uid := range []string{raise.ID, "waiting"} {
		w.wantEvents(ledger.AuditRaiseReviewed, uid, 0)
	}
}

// Goal: neither the end of the bucket nor another incarnation of the lease closes a
// review; whoever stands for the raise now can.
func reviewOutlives(w *world) {
	raise := w.raised()
	w.setLimit(temporaryLimit, 180)
	w.wantReview(raise.ID)
	again := w.raiseFrom("raise-2", 0, 30*time.Minute)
	again.Grant.Name, again.Grant.ApprovalID = raise.Name, raise.ApprovalID
	again.Grant.StartsAt, again.Grant.ExpiresAt = &raise.StartsAt, raise.ExpiresAt
	if linked := w.store(again); linked.ID != raise.ID || !linked.ReviewRequired {
		w.Fatalf("the same grant gives %+v", linked)
	}
	if after := w.acknowledge(raise.ID, reviewer); !after.ReviewRequired {
		w.Errorf("the object that is gone acknowledged: %+v", after)
	}
	w.must(ledger.CloseBucket{Key: key, Owner: w.owner, Deletion: ledger.DeletionDelete, Actor: requester})
	w.wantOpenReviews(1)
	if after := w.acknowledge("raise-2", reviewer); !after.Reviewed() {
		w.Errorf("the object that stands for the raise did not acknowledge: %+v", after)
	}
	w.wantOpenReviews(0)
	w.wantEvents(ledger.AuditRaiseReviewed, raise.ID, 1)
}

// Goal: the bound of all raises refuses at intent what the bucket's own policy would
// let through, to the millisecond.
func longestRaise(w *world) {
	w.declare(normalLimit)
	bounded := func(uid string, to time.Duration) {
		w.store(w.raiseFrom(uid, 0, to, func(r *ledger.StoreRaise) { r.MaxDuration = time.Hour }))
	}
	bounded("long", time.Hour+time.Millisecond)
	w.wantRaise("long", ledger.RaiseFailed, ledger.ReasonPolicyRefused)
	w.wantLimit(normalLimit)
	bounded("short", time.Hour)
	w.wantRaise("short", ledger.RaiseActive, ledger.ReasonNone)
}

// Goal: the audit tells who shortened from who asked.
func shortenedBySomebody(w *world) {
	w.declare(normalLimit)
	request := w.raiseFrom("raise-1", 0, 30*time.Minute)
	raise := w.store(request)
	request.Grant.ExpiresAt = raise.ExpiresAt.Add(-time.Minute)
	request.ShortenedBy = reviewer
	w.store(request)
	for _, row := range w.audit() {
		want := requester
		if row.Event == ledger.AuditRaiseShortened {
			want = reviewer
		}
		if row.RaiseID == raise.ID && row.Actor != want {
			w.Errorf("%s was done by %q, want %q", row.Event, row.Actor, want)
		}
	}
	w.wantEvents(ledger.AuditRaiseShortened, raise.ID, 1)
}

// Goal: whom the actor claims to ask for stands beside the actor in each row of the
// raise, takes nobody's place, and survives that the record is changed.
func claimBesideActor(w *world) {
	const somebody = "ada@example.com"
	raise := w.raised(func(r *ledger.StoreRaise) { r.Grant.OnBehalfOf = somebody })
	w.touchAt(raise.ExpiresAt)
	if ended := w.wantRaise(raise.ID, ledger.RaiseRestored, ledger.ReasonExpired); ended.OnBehalfOf != somebody || ended.Actor != requester {
		w.Errorf("the raise was asked for by %q on behalf of %q", ended.Actor, ended.OnBehalfOf)
	}
	for _, row := range w.audit() {
		want := ""
		if row.RaiseID == raise.ID {
			want = somebody
		}
		if row.OnBehalfOf != want {
			w.Errorf("%s is on behalf of %q, want %q", row.Event, row.OnBehalfOf, want)
		}
	}
}
