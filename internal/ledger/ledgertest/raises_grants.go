package ledgertest

import (
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

var grantStories = []story{
	{"revoke in each state", revokeInEachState},
	{"revoke finds another limit", revokeFindsAnotherLimit},
	{"a superseded object revokes nothing", supersededRevokesNothing},
	{"one grant under a new UID, in each state", newUIDInEachState},
	{"a revoked grant stays revoked", revokedStaysRevoked},
	{"a new UID can shorten", newUIDShortens},
	{"an approval is spent once", approvalSpentOnce},
	{"an approval spent on another bucket", approvalAcrossBuckets},
	{"observe only", observeOnly},
	{"observe only says what stands in the way", observeOnlyObstacles},
	{"an observed approval is not spent", observedApproval},
	{"disabled", disabled},
	{"from enforce to observe only", enforceToObserve},
	{"from enforce to disabled", enforceToDisabled},
	{"from observe only to enforce", observeToEnforce},
	{"from observe only to disabled", observeToDisabled},
	{"from disabled to enforce", disabledToEnforce},
}

// Goal: deleting the object ends its raise, by the same conditional restore; a
// finished one is answered unchanged.
func revokeInEachState(w *world) {
	w.declare(normalLimit)
	w.store(w.raiseFrom("active", 0, 10*time.Minute))
	w.store(w.raiseFrom("waiting", 0, 20*time.Minute))
	w.store(w.raiseFrom("planned", 30*time.Minute, 40*time.Minute))
	w.refuse(ledger.RevokeRaise{Key: key, UID: "unknown"}, ledger.CodeRaiseNotFound, map[string]any{"uid": "unknown"})

	for _, uid := range []string{"planned", "waiting"} {
		if r := w.revoke(uid); r.State != ledger.RaiseFailed || r.Reason != ledger.ReasonRevoked || r.ReviewRequired || r.Ran() {
			w.Errorf("revoking a pending raise answers %+v", r)
		}
	}
	w.wantLimit(temporaryLimit)
	r := w.revoke("active")
	if r.State != ledger.RaiseRestored || r.Reason != ledger.ReasonRevoked || r.ReviewRequired || !r.EndedAt.Equal(w.now()) {
		w.Errorf("revoking the active raise answers %+v", r)
	}
	w.wantLimit(normalLimit)
	revision := w.stored(key).Revision
	for _, uid := range []string{"active", "waiting", "planned"} {
		before := w.raise(uid)
		if again := w.revoke(uid); again.Version != before.Version || again.State != before.State {
			w.Errorf("revoking again answers %+v", again)
		}
	}
	if got := w.stored(key).Revision; got != revision {
		w.Errorf("revoking again moved the revision from %d to %d", revision, got)
	}
	operations := map[string]string{}
	for _, row := range w.audit() {
		if row.Reason == ledger.ReasonRevoked {
			operations[row.RaiseID] = row.OperationID
			if row.Actor != requester {
				w.Errorf("the audit of a revocation names the actor %q", row.Actor)
			}
		}
	}
	for _, uid := range []string{"active", "waiting", "planned"} {
		if operations[uid] != uid+":revoke" {
			w.Errorf("revoking %q was recorded as %q", uid, operations[uid])
		}
	}
	w.wantIdle(3)
	w.touchAt(Epoch.Add(time.Hour))
	w.wantLimit(normalLimit)
}

// Goal: a revocation never overwrites another hand's limit either.
func revokeFindsAnotherLimit(w *world) {
	raise := w.raised()
	w.override(250)
	if r := w.revoke(raise.ID); r.State != ledger.RaiseFailed || r.Reason != ledger.ReasonLimitChanged || !r.ReviewRequired {
		w.Errorf("revoking after another hand answers %+v", r)
	}
	w.wantKept(raise, 250)
}

// Goal: the deletion of an object that another one replaced does nothing.
func supersededRevokesNothing(w *world) {
	w.declare(normalLimit)
	request := w.raiseFrom("uid-1", 0, time.Hour)
	w.store(request)
	request.Grant.UID = "uid-2"
	w.store(request)
	if r := w.revoke("uid-1"); r.State != ledger.RaiseActive || r.CurrentUID != "uid-2" {
		w.Errorf("the superseded object's revocation answers %+v", r)
	}
	w.wantLimit(temporaryLimit)
	if r := w.revoke("uid-2"); r.State != ledger.RaiseRestored {
		w.Errorf("the current object's revocation answers %+v", r)
	}
	w.wantLimit(normalLimit)
}

// Goal: the same grant is not raised twice: a new UID is linked to the record in
// whatever state it is.
func newUIDInEachState(w *world) {
	w.declare(normalLimit)
	request := w.raiseFrom("uid-1", time.Minute, 10*time.Minute, func(r *ledger.StoreRaise) { r.Grant.Name = raiseName })
	w.store(request)
	relink := func(uid string, state ledger.RaiseState) {
		w.Helper()
		before := w.raise("uid-1")
		request.Grant.UID = uid
		r := w.store(request)
		if r.ID != "uid-1" || r.CurrentUID != uid || r.State != state || r.Version != before.Version+1 {
			w.Fatalf("stored under %s: %+v", uid, r)
		}
		if found := w.raise(uid); found.ID != "uid-1" {
			w.Errorf("looking up %s finds %+v", uid, found)
		}
		if again := w.store(request); again.Version != r.Version {
			w.Errorf("storing again under %s made version %d of %d", uid, again.Version, r.Version)
		}
		w.wantEvents(ledger.AuditRaiseStored, "", 1)
		w.wantIdle(1)
	}
	relink("uid-2", ledger.RaisePending)
	w.touchAt(Epoch.Add(time.Minute))
	w.wantLimit(temporaryLimit)
	relink("uid-3", ledger.RaiseActive)
	w.wantLimit(temporaryLimit)
	w.touchAt(Epoch.Add(5 * time.Minute))

	thawed := request
	thawed.Grant.UID = "uid-1"
	thawed.Grant.ExpiresAt = w.now()
	if r := w.store(thawed); r.CurrentUID != "uid-3" || r.State != ledger.RaiseActive {
		w.Errorf("a superseded object shortened the raise: %+v", r)
	}
	w.touchAt(Epoch.Add(10 * time.Minute))
	relink("uid-4", ledger.RaiseRestored)
	w.wantLimit(normalLimit)
	w.wantEvents(ledger.AuditRaiseActivated, "", 1)
	w.wantEvents(ledger.AuditRaiseLinked, "uid-1", 3)
}

// Goal: deleting and re-creating an object does not bring its raise back.
func revokedStaysRevoked(w *world) {
	w.declare(normalLimit)
	for i, start := range []time.Duration{0, time.Minute} {
		name := w.next("name")
		request := w.raiseFrom(w.next("uid"), start, time.Hour, underApproval(name),
			func(r *ledger.StoreRaise) { r.Grant.Name = name })
		w.store(request)
		state := w.revoke(request.Grant.UID).State
		request.Grant.UID = w.next("uid")
		if r := w.store(request); r.State != state || r.Reason != ledger.ReasonRevoked {
			w.Errorf("case %d: re-created after a revocation: %+v", i, r)
		}
		w.wantLimit(normalLimit)
	}
	w.touchAt(Epoch.Add(2 * time.Minute))
	w.wantLimit(normalLimit)
	w.wantEvents(ledger.AuditRaiseActivated, "", 1)
}

// Goal: the object that stands for a raise now may move its expiry earlier.
func newUIDShortens(w *world) {
	w.declare(normalLimit)
	request := w.raiseFrom("uid-1", 0, time.Hour)
	w.store(request)
	request.Grant.UID, request.Grant.ExpiresAt = "uid-2", w.now().Add(10*time.Minute)
	if r := w.store(request); !r.ExpiresAt.Equal(w.now().Add(10 * time.Minute)) {
		w.Errorf("the new object's expiry was not taken: %+v", r)
	}
	w.touchAt(Epoch.Add(10 * time.Minute))
	w.wantLimit(normalLimit)
}

// Goal: one approval is for one grant; another grant with it is refused, for good.
func approvalSpentOnce(w *world) {
	w.declare(normalLimit)
	w.store(w.raiseFrom("first", 0, 10*time.Minute, underApproval(approvalID)))
	for name, change := range map[string]func(*ledger.Grant){
		"other-name":  func(*ledger.Grant) {},
		"other-limit": func(g *ledger.Grant) { g.Name, g.TemporaryLimit = "first", temporaryLimit+1 },
		"other-key":   func(g *ledger.Grant) { g.Name, g.ScopedKeyID = "first", "another" },
	} {
		request := w.raiseFrom(name, 20*time.Minute, 30*time.Minute, underApproval(approvalID))
		change(&request.Grant)
		w.store(request)
		if r := w.wantRaise(name, ledger.RaiseFailed, ledger.ReasonApprovalAlreadyUsed); r.ReviewRequired {
			w.Errorf("a refused approval asks for review")
		}
	}
	w.revoke("first")
	w.store(w.raiseFrom("after-revoke", 0, 10*time.Minute, underApproval(approvalID)))
	w.wantRaise("after-revoke", ledger.RaiseFailed, ledger.ReasonApprovalAlreadyUsed)
	w.wantLimit(normalLimit)
	w.wantIdle(2)
	w.store(w.raiseFrom("approved", 0, 10*time.Minute, underApproval("another")))
	w.wantLimit(temporaryLimit)
}

// Goal: an approval is spent within its cluster, namespace and tenant, whatever
// the bucket; the same word elsewhere is another approval.
func approvalAcrossBuckets(w *world) {
	type place struct{ key, cluster, namespace, tenant string }
	declareAt := func(p place) {
		w.Helper()
		request := w.declaration(normalLimit)
		request.Key, request.Generation, request.Declaration.TenantID = p.key, 1, p.tenant
		request.Owner.Cluster, request.Owner.Namespace, request.Owner.Name = p.cluster, p.namespace, p.key
		w.must(request)
	}
	storeAt := func(p place, uid string) *ledger.Raise {
		w.Helper()
		request := w.raiseFrom(uid, 0, time.Hour, underApproval(approvalID))
		request.Key, request.BucketGeneration = p.key, 1
		request.Grant.Cluster, request.Grant.Namespace, request.Grant.TenantID = p.cluster, p.namespace, p.tenant
		return w.store(request)
	}
	first := place{"bucket-1", cluster, namespace, tenantID}
	declareAt(first)
	if r := storeAt(first, "raise-1"); r.State != ledger.RaiseActive {
		w.Fatalf("the first raise is %s/%s", r.State, r.Reason)
	}
	same := place{"bucket-2", cluster, namespace, tenantID}
	declareAt(same)
	if r := storeAt(same, "raise-2"); r.Reason != ledger.ReasonApprovalAlreadyUsed {
		w.Errorf("on another bucket of the tenant the approval gives %s/%s", r.State, r.Reason)
	}
	for i, other := range []place{
		{"bucket-3", cluster, "another", tenantID},
		{"bucket-4", "another", namespace, tenantID},
		{"bucket-5", cluster, namespace, "another"},
	} {
		declareAt(other)
		if r := storeAt(other, w.next("elsewhere")); r.State != ledger.RaiseActive {
			w.Errorf("place %d: the same word gives %s/%s", i, r.State, r.Reason)
		}
	}
}

// Goal: an observe-only bucket notes what it would have done, when, and does
// nothing.
func observeOnly(w *world) {
	w.declare(normalLimit, withMode(ledger.ModeObserveOnly))
	w.store(w.raiseFrom("raise-1", time.Minute, 31*time.Minute))
	w.wantRaise("raise-1", ledger.RaisePending, ledger.ReasonNone)
	w.wantIdle(1)
	w.touchAt(Epoch.Add(time.Minute))
	if r := w.wantRaise("raise-1", ledger.RaisePending, ledger.ReasonObserveOnly); r.ObservedAt == nil || !r.ObservedAt.Equal(w.now()) {
		w.Errorf("the observed raise reads %+v", r)
	}
	w.wantIdle(3)
	w.touchAt(Epoch.Add(31 * time.Minute))
	if r := w.wantRaise("raise-1", ledger.RaiseFailed, ledger.ReasonObserveOnly); r.ReviewRequired || r.Ran() {
		w.Errorf("the ended raise reads %+v", r)
	}
	w.wantIdle(2)
	var operations []string
	for _, row := range w.audit() {
		if row.Event == ledger.AuditRaiseObserved {
			operations = append(operations, row.OperationID)
			if row.Outcome != ledger.OutcomeObserved || row.EffectiveLimit == nil || *row.EffectiveLimit != normalLimit || row.DueAt == nil {
				w.Errorf("an observation reads %+v", row)
			}
		}
	}
	if len(operations) != 2 || operations[0] != "raise-1:observe-activate" || operations[1] != "raise-1:observe-restore" {
		w.Errorf("observed %v", operations)
	}
	if s := w.stored(key); s.Limit != normalLimit || s.LimitEpoch != 0 {
		w.Errorf("observing wrote the limit: %+v", s)
	}
}

// Goal: an observation says what would have stood in the way.
func observeOnlyObstacles(w *world) {
	w.declare(120, withMode(ledger.ModeObserveOnly))
	w.store(w.raiseFrom("mismatch", 0, time.Minute))
	rows := w.audit()
	if last := rows[len(rows)-1]; last.Event != ledger.AuditRaiseObserved || last.Reason != ledger.ReasonLimitMismatch {
		w.Errorf("the observation of a mismatch reads %+v", last)
	}
	w.wantIdle(2)
	w.touchAt(Epoch.Add(ledger.MismatchGrace))
	w.wantRaise("mismatch", ledger.RaiseFailed, ledger.ReasonObserveOnly)
}

// Goal: what was only observed may be done in earnest under the same approval.
func observedApproval(w *world) {
	w.declare(normalLimit, withMode(ledger.ModeObserveOnly))
	w.store(w.raiseFrom("observed", 0, time.Minute, underApproval(approvalID)))
	w.touchAt(Epoch.Add(time.Minute))
	w.declare(normalLimit)
	w.store(w.raiseFrom("earnest", 0, time.Minute, underApproval(approvalID)))
	w.wantRaise("earnest", ledger.RaiseActive, ledger.ReasonNone)
}

// Goal: a bucket without raises refuses them, at once and without review.
func disabled(w *world) {
	w.declare(normalLimit, withMode(ledger.ModeDisabled))
	w.store(w.raiseFrom("raise-1", time.Hour, 2*time.Hour, underApproval(approvalID)))
	if r := w.wantRaise("raise-1", ledger.RaiseFailed, ledger.ReasonRaisesDisabled); r.ReviewRequired {
		w.Errorf("a refused raise asks for review")
	}
	w.wantIdle(2)
}

// Goal: mode gates activation only: what is active is restored, what is pending
// is observed from now on, and its approval is free again.
func enforceToObserve(w *world) {
	w.declare(normalLimit)
	w.store(w.raiseFrom("active", 0, 10*time.Minute))
	w.store(w.raiseFrom("waiting", 0, 20*time.Minute, underApproval("W")))
	w.store(w.raiseFrom("planned", 15*time.Minute, 25*time.Minute))
	w.declare(normalLimit, withMode(ledger.ModeObserveOnly))
	w.wantRaise("active", ledger.RaiseActive, ledger.ReasonNone)
	w.wantRaise("waiting", ledger.RaisePending, ledger.ReasonObserveOnly)
	w.wantRaise("planned", ledger.RaisePending, ledger.ReasonNone)
	w.wantLimit(temporaryLimit)
	w.wantIdle(2)
	w.touchAt(Epoch.Add(10 * time.Minute))
	w.wantRaise("active", ledger.RaiseRestored, ledger.ReasonExpired)
	w.wantLimit(normalLimit)
	w.touchAt(Epoch.Add(15 * time.Minute))
	w.wantRaise("planned", ledger.RaisePending, ledger.ReasonObserveOnly)
	w.touchAt(Epoch.Add(25 * time.Minute))
	w.wantRaise("waiting", ledger.RaiseFailed, ledger.ReasonObserveOnly)
	w.wantRaise("planned", ledger.RaiseFailed, ledger.ReasonObserveOnly)
	w.wantEvents(ledger.AuditRaiseActivated, "", 1)
	w.wantIdle(2)
	w.declare(normalLimit)
	w.store(w.raiseFrom("again", 0, time.Minute, underApproval("W")))
	w.wantRaise("again", ledger.RaiseActive, ledger.ReasonNone)
}

// Goal: switching raises off leaves the active one to be restored and refuses
// what would start.
func enforceToDisabled(w *world) {
	w.declare(normalLimit)
	w.store(w.raiseFrom("active", 0, 10*time.Minute))
	w.store(w.raiseFrom("waiting", 0, 20*time.Minute))
	w.store(w.raiseFrom("planned", 15*time.Minute, 25*time.Minute))
	w.declare(normalLimit, withMode(ledger.ModeDisabled))
	w.wantRaise("active", ledger.RaiseActive, ledger.ReasonNone)
	w.wantRaise("waiting", ledger.RaiseFailed, ledger.ReasonRaisesDisabled)
	w.wantLimit(temporaryLimit)
	w.touchAt(Epoch.Add(10 * time.Minute))
	w.wantRaise("active", ledger.RaiseRestored, ledger.ReasonExpired)
	w.wantLimit(normalLimit)
	w.touchAt(Epoch.Add(15 * time.Minute))
	w.wantRaise("planned", ledger.RaiseFailed, ledger.ReasonRaisesDisabled)
	w.wantIdle(2)
}

// Goal: a raise whose window is still open is put in force once the mode allows.
func observeToEnforce(w *world) {
	w.declare(normalLimit, withMode(ledger.ModeObserveOnly))
	w.store(w.raiseFrom("observed", 0, 10*time.Minute))
	w.store(w.raiseFrom("planned", 20*time.Minute, 30*time.Minute))
	w.wantRaise("observed", ledger.RaisePending, ledger.ReasonObserveOnly)
	w.declare(normalLimit)
	w.wantRaise("observed", ledger.RaiseActive, ledger.ReasonNone)
	w.wantLimit(temporaryLimit)
	w.touchAt(Epoch.Add(10 * time.Minute))
	w.wantRaise("observed", ledger.RaiseRestored, ledger.ReasonExpired)
	w.touchAt(Epoch.Add(20 * time.Minute))
	w.wantRaise("planned", ledger.RaiseActive, ledger.ReasonNone)
	w.store(w.raiseFrom("reuses", 0, time.Hour, underApproval("approval-planned")))
	w.wantRaise("reuses", ledger.RaiseFailed, ledger.ReasonApprovalAlreadyUsed)
}

// Goal: what is observed ends when raises are switched off.
func observeToDisabled(w *world) {
	w.declare(normalLimit, withMode(ledger.ModeObserveOnly))
	w.store(w.raiseFrom("observed", 0, 10*time.Minute))
	w.store(w.raiseFrom("planned", 20*time.Minute, 30*time.Minute))
	w.declare(normalLimit, withMode(ledger.ModeDisabled))
	w.wantRaise("observed", ledger.RaiseFailed, ledger.ReasonRaisesDisabled)
	w.touchAt(Epoch.Add(20 * time.Minute))
	w.wantRaise("planned", ledger.RaiseFailed, ledger.ReasonRaisesDisabled)
	w.wantLimit(normalLimit)
	w.wantIdle(2)
}

// Goal: what was refused stays refused; what comes later is raised.
func disabledToEnforce(w *world) {
	w.declare(normalLimit, withMode(ledger.ModeDisabled))
	request := w.raiseFrom("refused", 0, time.Hour)
	w.store(request)
	w.declare(normalLimit)
	w.store(request)
	w.wantRaise("refused", ledger.RaiseFailed, ledger.ReasonRaisesDisabled)
	w.wantLimit(normalLimit)
	w.store(w.raiseFrom("later", 0, time.Hour))
	w.wantRaise("later", ledger.RaiseActive, ledger.ReasonNone)
	w.wantEvents(ledger.AuditPolicyChanged, "", 1)
}
