package ledgertest

import (
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

var closingStories = []story{
	{"retain", retain},
	{"reopened with its usage", reopened},
	{"delete waits for reservations", deleteWaits},
	{"delete forgets nothing that is evidence", deleteKeepsEvidence},
	{"closing ends raises", closingEndsRaises},
	{"closing what is not there", closingNothing},
	{"closing by a newer incarnation", closingByNewer},
}

func (w *world) close(deletion ledger.DeletionPolicy) *ledger.Closing {
	w.Helper()
	return w.must(ledger.CloseBucket{Key: key, Owner: w.owner, Deletion: deletion, Actor: requester}).Closing
}

// Goal: a closed bucket admits nothing, keeps its usage, and lets holders settle.
func retain(w *world) {
	w.declare(normalLimit)
	w.use(20)
	first, second := w.reserve(30), w.reserve(10)
	replay := ledger.Reserve{Key: key, RequestKey: "k", Fingerprint: "f", Tokens: 5}
	w.must(replay)
	if closing := w.close(ledger.DeletionRetain); !closing.Done {
		w.Errorf("closing is not done: %+v", closing)
	}
	revision := w.stored(key).Revision
	w.close(ledger.DeletionRetain)
	if s := w.stored(key); !s.Closed || s.Revision != revision || s.UsedTokens != 20 || s.ReservedTokens != 45 {
		w.Errorf("the closed bucket reads %+v", s)
	}
	w.wantEvents(ledger.AuditBucketClosed, "", 1)
	if err := w.refuse(w.reservation(1), ledger.CodeBucketClosed, map[string]any{"bucket": key}); err.Retryable() {
		w.Errorf("a closed bucket invites to a retry")
	}
	w.must(replay)
	w.commit(first, 25)
	w.must(ledger.Release{Key: key, LeaseID: second.ID})
	w.refuse(w.declaration(normalLimit), ledger.CodeBucketClosed, nil)
	w.refuse(w.raiseFrom("raise-1", 0, time.Hour), ledger.CodeBucketNotReady, nil)
	late := w.raiseFrom("raise-1", 0, time.Hour)
	late.BucketGeneration = 1
	w.refuse(late, ledger.CodeBucketClosed, nil)
	w.wantCounters(45, 5)
	w.wantIdle(2)
}

// Goal: a recreated owner reopens its bucket with what was used.
func reopened(w *world) {
	w.declare(normalLimit)
	w.use(60)
	w.close(ledger.DeletionRetain)
	w.Clock().Advance(time.Minute)
	w.owner.UID, w.owner.CreatedAt, w.generation = "bucket-uid-2", w.now(), 0
	s := w.declare(80)
	if s.Closed || s.UsedTokens != 60 || s.Limit != 80 || s.AvailableTokens != 20 {
		w.Errorf("the reopened bucket reads %+v", s)
	}
	w.reserve(20)
	w.wantEvents(ledger.AuditBucketReopened, "", 1)
}

// Goal: a deletion waits until nothing is reserved, by settling or by expiry.
func deleteWaits(w *world) {
	w.declare(normalLimit)
	w.use(20)
	settled, expiring := w.reserve(30), w.reserveFor(10, 10*time.Minute)
	if closing := w.close(ledger.DeletionDelete); closing.Done || closing.ReservedTokens != 40 {
		w.Errorf("with reservations, deleting answers %+v", closing)
	}
	if !w.stored(key).Closed {
		w.Errorf("a deletion that waits has not closed the bucket")
	}
	w.commit(settled, 30)
	if closing := w.close(ledger.DeletionDelete); closing.Done || closing.ReservedTokens != 10 {
		w.Errorf("with one reservation left, deleting answers %+v", closing)
	}
	w.Clock().Set(expiring.ExpiresAt)
	if closing := w.close(ledger.DeletionDelete); !closing.Done {
		w.Errorf("with nothing reserved, deleting answers %+v", closing)
	}
	if w.raw(key) != nil || len(w.leases()) != 0 {
		w.Errorf("the deleted bucket is still there")
	}
	if closing := w.close(ledger.DeletionDelete); !closing.Done {
		w.Errorf("deleting again answers %+v", closing)
	}
	w.wantEvents(ledger.AuditBucketDeleted, "", 1)
	w.wantEvents(ledger.AuditBucketForgotten, "", 0)
	if sweep := w.sweep(10); len(sweep.Touched) != 0 || sweep.NextIn >= 0 {
		w.Errorf("after the deletion sweeping gives %+v", sweep)
	}
}

// Goal: audit, raises and spent approvals outlive the bucket; the key's numbering
// goes on, and its leases and operations do not come back.
func deleteKeepsEvidence(w *world) {
	raise := w.raised(underApproval(approvalID))
	w.commit(w.must(ledger.Reserve{Key: key, RequestKey: "k", Fingerprint: "f", Tokens: 5}).Lease, 5)
	w.must(ledger.SetLimit{Key: key, ExpectedLimit: temporaryLimit, Limit: 200, OperationID: "op-1"})
	known := w.known(key)
	w.close(ledger.DeletionDelete)
	changes, err := w.Store().Changes(w.ctx, []ledger.KnownRevision{known})
	if err != nil || len(changes) != 1 || changes[0].Snapshot != nil {
		w.Errorf("the deletion shows as %+v (%v)", changes, err)
	}
	rows := len(w.audit())
	w.wantReview(raise.ID)

	w.Clock().Advance(time.Minute)
	w.owner.UID, w.owner.CreatedAt, w.generation = "bucket-uid-2", w.now(), 0
	s := w.declare(normalLimit)
	if s.UsedTokens != 0 || s.LeaseRecords != 0 {
		w.Errorf("the bucket opened anew reads %+v", s)
	}
	known.Revision = s.Revision
	if changes, err := w.Store().Changes(w.ctx, []ledger.KnownRevision{known}); err != nil || len(changes) != 1 {
		w.Errorf("a bucket opened anew at a known revision is not told as a change: %+v (%v)", changes, err)
	}
	if got := w.audit(); len(got) != rows+1 || got[rows].Event != ledger.AuditBucketOpened {
		w.Errorf("the audit went on as %v", w.eventNames())
	}
	w.store(w.raiseFrom("raise-2", 0, time.Hour, underApproval(approvalID)))
	w.wantRaise("raise-2", ledger.RaiseFailed, ledger.ReasonApprovalAlreadyUsed)
	w.must(ledger.Reserve{Key: key, RequestKey: "k", Fingerprint: "g", Tokens: 1})
	w.must(ledger.SetLimit{Key: key, ExpectedLimit: normalLimit, Limit: 120, OperationID: "op-1"})
}

// Goal: closing restores what is raised and ends what waits, for good.
func closingEndsRaises(w *world) {
	for _, deletion := range []ledger.DeletionPolicy{ledger.DeletionRetain, ledger.DeletionDelete} {
		w.startOver()
		w.declare(normalLimit)
		active, waiting, planned := w.next("active"), w.next("waiting"), w.next("planned")
		w.store(w.raiseFrom(active, 0, 30*time.Minute))
		w.store(w.raiseFrom(waiting, 0, time.Hour))
		w.store(w.raiseFrom(planned, time.Hour, 2*time.Hour))
		lease := w.reserve(temporaryLimit)
		w.close(deletion)
		w.wantLimit(normalLimit)
		if r := w.wantRaise(active, ledger.RaiseRestored, ledger.ReasonBucketClosed); r.ReviewRequired {
			w.Errorf("a raise restored by closing asks for review")
		}
		for _, uid := range []string{waiting, planned} {
			if r := w.wantRaise(uid, ledger.RaiseFailed, ledger.ReasonBucketClosed); r.ReviewRequired {
				w.Errorf("a pending raise ended by closing asks for review")
			}
		}
		w.wantIdle(2)
		w.commit(lease, 0)
	}
}

// Goal: not found counts as done.
func closingNothing(w *world) {
	if closing := w.close(ledger.DeletionDelete); !closing.Done {
		w.Errorf("closing an absent bucket answers %+v", closing)
	}
	if len(w.audit()) != 0 {
		w.Errorf("closing an absent bucket wrote %v", w.eventNames())
	}
	w.open(normalLimit)
	if closing := w.close(ledger.DeletionDelete); !closing.Done {
		w.Errorf("closing a bucket without owner answers %+v", closing)
	}
	if s := w.stored(key); s.Closed {
		w.Errorf("a bucket without owner was closed")
	}
}

// Goal: an incarnation that was deleted before it ever declared still closes the
// bucket that its predecessor left.
func closingByNewer(w *world) {
	w.declare(normalLimit)
	w.Clock().Advance(time.Minute)
	old := w.owner
	w.owner.UID, w.owner.CreatedAt = "bucket-uid-2", w.now()
	w.close(ledger.DeletionRetain)
	if !w.stored(key).Closed {
		w.Errorf("the bucket is open")
	}
	w.owner = old
	w.generation = 99
	w.refuse(w.declaration(normalLimit), ledger.CodeStaleGeneration, nil)
}
