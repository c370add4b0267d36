package ledgertest

import (
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

var intentStories = []story{
	{"an intent is stored before anything is done", intentFirst},
	{"an intent is stored once", intentIsIdempotent},
	{"an expiry moves only earlier", expiryMovesOnlyEarlier},
	{"an active raise is shortened", activeIsShortened},
	{"an expiry never comes before a start that was left out", expiryNeverBeforeStart},
	{"an intent needs its bucket", intentNeedsBucket},
	{"hostile grants", hostileGrants},
	{"a policy refuses at intent", policyAtIntent},
	{"a policy refuses at activation", policyAtActivation},
	{"a window that is over", windowIsOver},
	{"an empty window", emptyWindow},
}

// Goal: the record exists, complete, before its start, and changes nothing yet.
func intentFirst(w *world) {
	w.declare(normalLimit)
	before := w.stored(key)
	request := w.raiseFrom("raise-1", time.Minute, 31*time.Minute)
	r := w.store(request)
	g := request.Grant
	if r.ID != "raise-1" || r.CurrentUID != "raise-1" || r.BucketKey != key || r.Cluster != cluster || r.Namespace != namespace ||
		r.Name != g.Name || r.TenantID != tenantID || r.ScopedKeyID != scopedKeyID || r.ApprovalID != g.ApprovalID ||
		r.Actor != requester || r.Purpose != g.Purpose || r.OnBaseChange != ledger.BaseChangeReview || len(r.GrantHash) != 64 {
		w.Errorf("the record names %+v", r)
	}
	if r.State != ledger.RaisePending || r.NormalLimit != normalLimit || r.TemporaryLimit != temporaryLimit ||
		r.AppliedLimit != nil || r.RestoreTo != nil || r.Ran() || r.EndedAt != nil || r.Version != 1 ||
		!r.StartsAt.Equal(*g.StartsAt) || !r.ExpiresAt.Equal(g.ExpiresAt) || !r.StoredAt.Equal(w.now()) {
		w.Errorf("the record reads %+v", r)
	}
	after := w.stored(key)
	if after.Limit != normalLimit || after.PendingRaises != 1 || after.ActiveRaise != nil || after.Revision != before.Revision+1 {
		w.Errorf("the bucket reads %+v", after)
	}
	if sweep := w.sweep(10); sweep.NextIn != time.Minute {
		w.Errorf("the next transition is due in %v, want the start in a minute", sweep.NextIn)
	}
	w.wantEvents(ledger.AuditRaiseStored, "raise-1", 1)
	w.wantIdle(3)
}

// Goal: storing an intent again is harmless; other inputs under its UID are
// refused and the record stands.
func intentIsIdempotent(w *world) {
	w.declare(normalLimit)
	request := w.raiseFrom("raise-1", time.Minute, time.Hour)
	first := w.store(request)
	revision := w.stored(key).Revision
	for range 3 {
		if again := w.store(request); again.Version != first.Version || again.GrantHash != first.GrantHash {
			w.Errorf("storing again answers %+v", again)
		}
	}
	for name, change := range map[string]func(*ledger.Grant){
		"normal limit":    func(g *ledger.Grant) { g.NormalLimit++ },
		"temporary limit": func(g *ledger.Grant) { g.TemporaryLimit++ },
		"approval":        func(g *ledger.Grant) { g.ApprovalID = "another" },
		"scoped key":      func(g *ledger.Grant) { g.ScopedKeyID = "another" },
		"on base change":  func(g *ledger.Grant) { g.OnBaseChange = ledger.BaseChangeRebase },
		"start":           func(g *ledger.Grant) { s := g.StartsAt.Add(time.Second); g.StartsAt = &s },
		"no start":        func(g *ledger.Grant) { g.StartsAt = nil },
	} {
		changed := request
		change(&changed.Grant)
		if err := w.refuse(changed, ledger.CodeRaiseConflict, map[string]any{"raiseId": "raise-1"}); err.Retryable() {
			w.Errorf("another %s invites to a retry", name)
		}
	}
	if got := w.stored(key).Revision; got != revision {
		w.Errorf("repetitions moved the revision from %d to %d", revision, got)
	}
	w.wantEvents(ledger.AuditRaiseStored, "", 1)

	w.touchAt(request.Grant.ExpiresAt)
	ended := w.wantRaise("raise-1", ledger.RaiseFailed, ledger.ReasonWindowMissed)
	if again := w.store(request); again.State != ended.State || again.Version != ended.Version {
		w.Errorf("storing a finished raise again answers %+v", again)
	}
	w.wantLimit(normalLimit)
}

// Goal: a repetition can shorten, never lengthen, and never to before the start.
func expiryMovesOnlyEarlier(w *world) {
	w.declare(normalLimit)
	request := w.raiseFrom("raise-1", 10*time.Minute, time.Hour)
	first := w.store(request)
	move := func(to, want time.Time, version int64) {
		w.Helper()
		request.Grant.ExpiresAt = to
		if r := w.store(request); !r.ExpiresAt.Equal(want) || r.Version != version {
			w.Errorf("moving the expiry to %v gave %v in version %d, want %v in %d", to, r.ExpiresAt, r.Version, want, version)
		}
	}
	start, end := first.StartsAt, first.ExpiresAt
	move(end.Add(time.Hour), end, 1)
	move(end.Add(-time.Minute), end.Add(-time.Minute), 2)
	move(end, end.Add(-time.Minute), 2)
	move(end.Add(-time.Minute-time.Nanosecond), end.Add(-time.Minute-time.Millisecond), 3)
	w.wantEvents(ledger.AuditRaiseShortened, "raise-1", 2)

	move(start, start, 4)
	if sweep := w.sweep(1); sweep.NextIn != 10*time.Minute {
		w.Errorf("the next transition is due in %v", sweep.NextIn)
	}
	w.touchAt(start)
	w.wantRaise("raise-1", ledger.RaiseFailed, ledger.ReasonWindowMissed)
	w.wantLimit(normalLimit)
}

// Goal: a shortened expiry of an active raise is applied at the next touch, at
// once when it has passed already.
func activeIsShortened(w *world) {
	w.declare(normalLimit)
	request := w.raiseFrom("raise-1", 0, time.Hour)
	w.store(request)
	w.wantLimit(temporaryLimit)
	w.Clock().Advance(10 * time.Minute)
	request.Grant.ExpiresAt = w.now().Add(5 * time.Minute)
	w.store(request)
	w.touchAt(request.Grant.ExpiresAt.Add(-time.Millisecond))
	w.wantLimit(temporaryLimit)
	request.Grant.ExpiresAt = w.now().Add(-time.Minute)
	raise := w.store(request)
	if raise.State != ledger.RaiseRestored || raise.Reason != ledger.ReasonExpired {
		w.Errorf("shortened into the past, the raise is %s/%s", raise.State, raise.Reason)
	}
	w.wantLimit(normalLimit)
	w.wantIdle(2)
}

// Goal: a start that was left out is the time of storage, and no expiry comes
// before it, so that the window never has a negative length.
func expiryNeverBeforeStart(w *world) {
	w.declare(normalLimit)
	request := w.raiseFrom("raise-1", 0, time.Hour, func(r *ledger.StoreRaise) { r.Grant.StartsAt = nil })
	startsAt := w.store(request).StartsAt
	w.Clock().Advance(time.Minute)
	request.Grant.ExpiresAt = startsAt.Add(-time.Hour)
	if r := w.store(request); !r.ExpiresAt.Equal(startsAt) || r.State != ledger.RaiseRestored {
		w.Errorf("shortened to before its start %v, the raise is %s and expires at %v", startsAt, r.State, r.ExpiresAt)
	}
	w.wantLimit(normalLimit)
}

// Goal: an intent waits for its bucket, and for the bucket's generation; it is
// refused where it does not belong.
func intentNeedsBucket(w *world) {
	request := w.raiseFrom("raise-1", 0, time.Hour)
	if err := w.refuse(request, ledger.CodeBucketNotFound, nil); err == nil {
		return
	}
	w.declare(normalLimit)
	newer := w.raiseFrom("raise-1", 0, time.Hour)
	newer.BucketGeneration = w.generation + 1
	if err := w.refuse(newer, ledger.CodeBucketNotReady, nil); !err.Retryable() {
		w.Errorf("waiting for the bucket's generation does not invite to a retry")
	}
	stranger := newer
	stranger.BucketGeneration, stranger.BucketUID = w.generation, "bucket-uid-2"
	w.refuse(stranger, ledger.CodeBucketNotReady, nil)
	for _, change := range []func(*ledger.Grant){
		func(g *ledger.Grant) { g.Namespace = "another" },
		func(g *ledger.Grant) { g.Cluster = "another" },
	} {
		foreign := w.raiseFrom("raise-1", 0, time.Hour)
		change(&foreign.Grant)
		w.refuse(foreign, ledger.CodeOwnerConflict, nil)
	}
	if _, err := w.Store().Raise(w.ctx, cluster, "raise-1"); !ledger.HasCode(err, ledger.CodeRaiseNotFound) {
		w.Errorf("a refused intent left a record: %v", err)
	}
	w.declare(normalLimit)
	w.store(newer)
	w.wantLimit(temporaryLimit)

	w.must(ledger.OpenBucket{Key: "unowned", Limit: normalLimit})
	unowned := w.raiseFrom("raise-2", 0, time.Hour)
	unowned.Key = "unowned"
	w.refuse(unowned, ledger.CodeBucketNotReady, nil)
}

// Goal: a grant that makes no sense does not reach the ledger.
func hostileGrants(w *world) {
	w.declare(normalLimit)
	for field, change := range map[string]func(*ledger.Grant){
		"temporaryLimit": func(g *ledger.Grant) { g.TemporaryLimit = g.NormalLimit },
		"normalLimit":    func(g *ledger.Grant) { g.NormalLimit = -1 },
		"approvalID":     func(g *ledger.Grant) { g.ApprovalID = "" },
		"scopedKeyID":    func(g *ledger.Grant) { g.ScopedKeyID = " x" },
		"uid":            func(g *ledger.Grant) { g.UID = "" },
		"name":           func(g *ledger.Grant) { g.Name = "a\nb" },
		"onBaseChange":   func(g *ledger.Grant) { g.OnBaseChange = "Ignore" },
		"expiresAt":      func(g *ledger.Grant) { g.ExpiresAt = time.Time{} },
		"startsAt":       func(g *ledger.Grant) { s := time.Date(-1, 1, 1, 0, 0, 0, 0, time.UTC); g.StartsAt = &s },
	} {
		request := w.raiseFrom("raise-1", 0, time.Hour)
		change(&request.Grant)
		w.refuse(request, ledger.CodeInvalidInput, map[string]any{"field": field})
	}
	backwards := w.raiseFrom("raise-1", time.Minute, 0)
	w.refuse(backwards, ledger.CodeInvalidInput, map[string]any{"field": "expiresAt"})
	far := w.raiseFrom("raise-1", 0, 0)
	far.Grant.ExpiresAt = time.Date(9999, time.December, 31, 23, 59, 59, 0, time.UTC)
	w.declare(normalLimit, withPolicy(1000, 290*365*24*time.Hour))
	far.BucketGeneration = w.generation
	w.store(far)
	w.wantRaise("raise-1", ledger.RaiseFailed, ledger.ReasonPolicyRefused)
}

// Goal: what the policy refuses is recorded as refused, changes nothing and
// spends no approval; a missing policy refuses.
func policyAtIntent(w *world) {
	w.declare(normalLimit, withPolicy(temporaryLimit-1, time.Hour))
	w.store(w.raiseFrom("too-high", 0, time.Hour, underApproval("A")))
	w.wantRaise("too-high", ledger.RaiseFailed, ledger.ReasonPolicyRefused)
	w.declare(normalLimit, withPolicy(temporaryLimit, time.Hour-time.Millisecond))
	w.store(w.raiseFrom("too-long", time.Minute, 61*time.Minute, underApproval("A")))
	w.wantRaise("too-long", ledger.RaiseFailed, ledger.ReasonPolicyRefused)
	w.declare(normalLimit, func(r *ledger.ApplyDeclared) { r.Declaration.Raises = ledger.RaisePolicy{} })
	w.store(w.raiseFrom("no-policy", 0, time.Hour, underApproval("A")))
	if raise := w.wantRaise("no-policy", ledger.RaiseFailed, ledger.ReasonRaisesDisabled); raise.ReviewRequired || raise.Ran() {
		w.Errorf("a refused raise reads %+v", raise)
	}
	w.wantLimit(normalLimit)
	w.wantIdle(2)

	w.declare(normalLimit, withPolicy(temporaryLimit, time.Hour))
	w.store(w.raiseFrom("exact", 0, time.Hour, underApproval("A")))
	w.wantRaise("exact", ledger.RaiseActive, ledger.ReasonNone)
}

// Goal: a policy that was tightened after the intent counts at activation; what
// is active is not affected.
func policyAtActivation(w *world) {
	w.declare(normalLimit)
	w.store(w.raiseFrom("running", 0, 10*time.Minute))
	w.store(w.raiseFrom("high", 10*time.Minute, 20*time.Minute))
	w.store(w.raiseFrom("long", 20*time.Minute, 60*time.Minute, to(temporaryLimit-1)))
	w.declare(normalLimit, withPolicy(temporaryLimit-1, 30*time.Minute))
	w.wantRaise("running", ledger.RaiseActive, ledger.ReasonNone)
	w.touchAt(Epoch.Add(10 * time.Minute))
	w.wantRaise("running", ledger.RaiseRestored, ledger.ReasonExpired)
	w.wantRaise("high", ledger.RaiseFailed, ledger.ReasonPolicyRefused)
	w.touchAt(Epoch.Add(20 * time.Minute))
	w.wantRaise("long", ledger.RaiseFailed, ledger.ReasonPolicyRefused)
	w.wantLimit(normalLimit)
	w.wantIdle(2)
}

// Goal: an old manifest ends WindowMissed and spends no approval.
func windowIsOver(w *world) {
	w.declare(normalLimit)
	w.Clock().Advance(time.Hour)
	for name, request := range map[string]ledger.StoreRaise{
		"with-start": w.raiseFrom("with-start", -30*time.Minute, -time.Minute, underApproval("A")),
		"ends-now":   w.raiseFrom("ends-now", -30*time.Minute, 0, underApproval("A")),
		"no-start": w.raiseFrom("no-start", 0, -time.Minute, underApproval("A"),
			func(r *ledger.StoreRaise) { r.Grant.StartsAt = nil }),
	} {
		w.store(request)
		if raise := w.wantRaise(name, ledger.RaiseFailed, ledger.ReasonWindowMissed); raise.ReviewRequired {
			w.Errorf("a missed window asks for review")
		}
	}
	w.wantLimit(normalLimit)
	w.wantIdle(2)
	w.store(w.raiseFrom("in-time", 0, time.Minute, underApproval("A")))
	w.wantRaise("in-time", ledger.RaiseActive, ledger.ReasonNone)
}

// Goal: a window of no length never raises.
func emptyWindow(w *world) {
	w.declare(normalLimit)
	w.store(w.raiseFrom("empty", time.Minute, time.Minute))
	w.touchAt(Epoch.Add(time.Minute))
	w.wantRaise("empty", ledger.RaiseFailed, ledger.ReasonWindowMissed)
	w.wantLimit(normalLimit)
}
