package ledgertest

import (
	"fmt"
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

// What comes back: buckets and grants that existed before, modes that change and
// change again, clocks that step back.
var returningStories = []story{
	{"a deleted bucket and its grant come back, the grant first", grantComesBackFirst},
	{"a vanished bucket without an owner", vanishedWithoutOwner},
	{"leftovers of a vanished bucket", leftovers},
	{"an older object does not take a raise over", olderObject},
	{"a mode that comes back", modeComesBack},
	{"an approval under a mode that spends none", approvalUnderObservation},
	{"a clock that steps back", clockStepsBack},
	{"operation IDs of raises", operationIDsOfRaises},
	{"as many raises as a bucket may have", raiseLimit},
}

// Goal: a bucket that was deleted through the ledger is no loss, whatever else is
// written about its key. Method: a GitOps tool brings bucket and lease back, and
// the lease arrives first.
func grantComesBackFirst(w *world) {
	w.declare(normalLimit)
	request := w.raiseFrom("launch", 0, time.Minute)
	w.store(request)
	w.revoke("launch")
	w.close(ledger.DeletionDelete)

	request.Grant.UID, request.Grant.CreatedAt = "launch-2", w.now().Add(time.Second)
	if r := w.store(request); r.ID != "launch" || r.CurrentUID != "launch-2" || r.Reason != ledger.ReasonRevoked {
		w.Errorf("the grant that came back answers %+v", r)
	}
	w.owner.UID, w.owner.CreatedAt, w.generation = "bucket-uid-2", w.now().Add(time.Second), 0
	w.declare(normalLimit)
}

// Goal: a vanished bucket that nobody owned can be given up by whoever claims its
// key; until then it is not opened again.
func vanishedWithoutOwner(w *world) {
	w.open(100)
	w.drop()
	w.refuse(ledger.OpenBucket{Key: key, Limit: 100}, ledger.CodeBucketRowMissing, nil)
	w.refuse(w.declaration(100), ledger.CodeBucketRowMissing, nil)
	w.close(ledger.DeletionRetain)
	w.declare(100)
}

// Goal: a lease or an operation of a bucket that vanished answers for no other
// bucket. Method: opening the key anew and repeating an old request, in one call.
func leftovers(w *world) {
	w.declare(normalLimit)
	reserve := ledger.Reserve{Key: key, RequestKey: "k", Fingerprint: "f", Tokens: 10}
	w.must(reserve)
	w.must(ledger.SetLimit{Key: key, ExpectedLimit: normalLimit, Limit: 150, OperationID: "op-1"})
	w.drop()
	w.close(ledger.DeletionRetain)
	w.owner.UID, w.owner.CreatedAt, w.generation = "bucket-uid-2", w.now().Add(time.Second), 0
	results := w.do(w.declaration(normalLimit), reserve,
		ledger.SetLimit{Key: key, ExpectedLimit: normalLimit, Limit: 150, OperationID: "op-1"})
	for i, result := range results {
		if result.Err != nil {
			w.Fatalf("request %d was refused: %v", i, result.Err)
		}
	}
	if lease := results[1].Lease; lease.ID != w.leaseID(key, "k") || lease.State != ledger.LeaseReserved {
		w.Errorf("the reservation on the new bucket answers %+v", lease)
	}
	w.wantCounters(0, 10)
	w.wantLimit(150)
}

// Goal: a raise is handed on to newer objects only: a leader that was frozen
// cannot take it back to one that is gone.
func olderObject(w *world) {
	w.declare(normalLimit)
	request := w.raiseFrom("launch", 0, time.Hour)
	w.store(request)
	for i, uid := range []string{"launch-2", "launch-3"} {
		request.Grant.UID, request.Grant.CreatedAt = uid, w.now().Add(time.Duration(i+1)*time.Second)
		if r := w.store(request); r.CurrentUID != uid {
			w.Errorf("a newer object answers %+v", r)
		}
	}
	late := request
	late.Grant.UID, late.Grant.CreatedAt = "launch-2", w.now().Add(time.Second)
	late.Grant.ExpiresAt = w.now().Add(time.Minute)
	if r := w.store(late); r.CurrentUID != "launch-3" || !r.ExpiresAt.Equal(request.Grant.ExpiresAt) {
		w.Errorf("an older object answers %+v", r)
	}
	if r := w.revoke("launch-3"); r.State != ledger.RaiseRestored {
		w.Errorf("the newest object's deletion answers %+v", r)
	}
}

// Goal: a raise that was observed, then tried in earnest, then only observed
// again ends as observed, and nothing is noted twice.
func modeComesBack(w *world) {
	w.declare(normalLimit, withMode(ledger.ModeObserveOnly))
	mismatched := w.raiseFrom("launch", 0, 10*time.Minute, underApproval(approvalID))
	mismatched.Grant.NormalLimit = normalLimit - 1
	w.store(mismatched)
	w.declare(normalLimit)
	w.wantRaise("launch", ledger.RaisePending, ledger.ReasonLimitMismatch)
	w.declare(normalLimit, withMode(ledger.ModeObserveOnly))
	w.wantRaise("launch", ledger.RaisePending, ledger.ReasonObserveOnly)
	w.touchAt(Epoch.Add(5 * time.Minute))
	w.wantRaise("launch", ledger.RaisePending, ledger.ReasonObserveOnly)
	w.wantIdle(3)
	w.touchAt(Epoch.Add(10 * time.Minute))
	w.wantRaise("launch", ledger.RaiseFailed, ledger.ReasonObserveOnly)
	w.wantEvents(ledger.AuditRaiseObserved, "launch", 2)
	w.store(w.raiseFrom("another", 0, time.Hour, underApproval(approvalID)))
	w.wantRaise("another", ledger.RaisePending, ledger.ReasonObserveOnly)
}

// Goal: an observe-only bucket spends no approval, however the raise ends.
func approvalUnderObservation(w *world) {
	w.declare(normalLimit)
	w.store(w.raiseFrom("first", time.Hour, 2*time.Hour, underApproval(approvalID)))
	w.declare(normalLimit, withMode(ledger.ModeObserveOnly))
	w.revoke("first")
	w.declare(normalLimit)
	w.store(w.raiseFrom("second", 0, time.Hour, underApproval(approvalID)))
	w.wantRaise("second", ledger.RaiseActive, ledger.ReasonNone)
}

// Goal: the evidence of a bucket never runs backwards, also of decisions that
// changed nothing.
func clockStepsBack(w *world) {
	w.declare(normalLimit)
	w.Clock().Advance(time.Minute)
	w.refuse(ledger.SetLimit{Key: key, ExpectedLimit: 1, Limit: 2, OperationID: "op-1"}, ledger.CodeLimitChanged, nil)
	w.Clock().Advance(-time.Minute)
	w.setLimit(normalLimit, 120)
	rows := w.audit()
	for i := 1; i < len(rows); i++ {
		if rows[i].At.Before(rows[i-1].At) {
			w.Errorf("audit row %d is dated %s, after row %d of %s", i+1, rows[i].At, i, rows[i-1].At)
		}
	}
}

// Goal: nobody can occupy the operation ID of a raise's effect, which would block
// the raise for ever.
func operationIDsOfRaises(w *world) {
	raise := w.raised()
	for _, suffix := range []string{":activate", ":restore", ":revoke", ":observe-activate", ":observe-restore"} {
		w.refuse(ledger.SetLimit{Key: key, ExpectedLimit: temporaryLimit, Limit: temporaryLimit, OperationID: raise.ID + suffix},
			ledger.CodeInvalidInput, map[string]any{"field": "operationId"})
	}
	w.touchAt(raise.ExpiresAt)
	w.wantRaise(raise.ID, ledger.RaiseRestored, ledger.ReasonExpired)
}

// Goal: the raises that each request looks at are bounded, and one that ends makes
// room.
func raiseLimit(w *world) {
	w.declare(normalLimit)
	for i := range ledger.MaxLiveRaises {
		w.store(w.raiseFrom(fmt.Sprintf("raise-%d", i), time.Hour, 2*time.Hour))
	}
	more := w.raiseFrom("one-more", time.Hour, 2*time.Hour)
	if err := w.refuse(more, ledger.CodeRaiseLimit, nil); !err.Retryable() {
		w.Errorf("the refusal is final")
	}
	w.revoke("raise-7")
	w.store(more)
}
