package ledgertest

import (
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

var declarationStories = []story{
	{"a declaration opens the bucket", declarationOpens},
	{"a declaration is idempotent", declarationIsIdempotent},
	{"newer and older generations", generations},
	{"a lower limit applies at once", lowerAppliesAtOnce},
	{"another owner", anotherOwner},
	{"adoption", adoption},
	{"a recreated owner", recreatedOwner},
	{"two incarnations within one second", sameSecond},
	{"review keeps another hand's limit", reviewKeeps},
	{"overwrite sets the declared limit", overwriteSets},
	{"in sync again when the values agree", inSyncAgain},
	{"overwrite during a raise", overwriteDuringRaise},
	{"a vanished row", vanishedRow},
	{"a vanished row with a raise", vanishedWithRaise},
}

func declarationOpens(w *world) {
	s := w.declare(normalLimit)
	if s.Owner == nil || s.Owner.Name != bucketName || s.Owner.UID != bucketUID || !s.Owner.CreatedAt.Equal(Epoch) ||
		s.TenantID != tenantID || s.ScopedKeyID != scopedKeyID {
		w.Errorf("the new bucket is named %+v (owner %+v)", s, s.Owner)
	}
	if s.Limit != normalLimit || *s.DeclaredLimit != normalLimit || s.DeclaredGeneration != 1 || s.Revision != 1 || s.Closed ||
		s.RaisePolicy != (ledger.RaisePolicy{Mode: ledger.ModeEnforce, MaxLimit: 1000, MaxDuration: 2 * time.Hour}) {
		w.Errorf("the new bucket reads %+v", s)
	}
	w.wantEvents(ledger.AuditBucketOpened, "", 1)
	w.wantIdle(2)
}

// Goal: repeating a declaration writes nothing.
func declarationIsIdempotent(w *world) {
	request := w.declaration(normalLimit)
	w.must(request)
	before, rows := w.stored(key), len(w.audit())
	for range 5 {
		w.must(request)
	}
	request.ExpectExisting = true
	w.must(request)
	if after := w.stored(key); after.Revision != before.Revision || len(w.audit()) != rows {
		w.Errorf("repetitions made revision %d of %d and %d audit rows of %d", after.Revision, before.Revision, len(w.audit()), rows)
	}
}

// Goal: only a newer generation is accepted, so that a thawed leader cannot bring
// an old decision back.
func generations(w *world) {
	old := w.declaration(normalLimit)
	w.must(old)
	w.declare(200)
	w.refuse(old, ledger.CodeStaleGeneration, map[string]any{"generation": int64(1), "appliedGeneration": int64(2)})
	w.wantLimit(200)
	w.generation = 9
	s := w.declare(300, func(r *ledger.ApplyDeclared) {
		r.Declaration.ScopedKeyID = "key_v4"
		r.Declaration.Settings.MaxRecords = 5
	})
	if s.Limit != 300 || s.DeclaredGeneration != 10 || s.ScopedKeyID != "key_v4" || s.Settings.MaxRecords != 5 {
		w.Errorf("the newer declaration gave %+v", s)
	}
	w.wantEvents(ledger.AuditLimitDeclared, "", 2)
}

// Goal: a lower declared limit applies at once, also below what is allocated.
func lowerAppliesAtOnce(w *world) {
	w.declare(normalLimit)
	w.use(60)
	lease := w.reserve(30)
	s := w.declare(50)
	if s.Limit != 50 || s.AvailableTokens != 0 || s.OverLimitTokens != 40 {
		w.Errorf("after lowering the bucket reads %+v", s)
	}
	w.refuse(w.reservation(1), ledger.CodeBudgetExceeded, map[string]any{"availableTokens": int64(0)})
	w.commit(lease, 30)
	w.wantCounters(90, 0)
}

// Goal: the first owner keeps the row.
func anotherOwner(w *world) {
	w.declare(normalLimit)
	before := w.stored(key)
	for _, change := range []func(*ledger.Owner){
		func(o *ledger.Owner) { o.Name = "another" },
		func(o *ledger.Owner) { o.Namespace = "another" },
		func(o *ledger.Owner) { o.Cluster = "another" },
	} {
		request := w.declaration(1_000_000_000)
		request.Owner.UID, request.Owner.CreatedAt = "stranger", w.now().Add(time.Hour)
		change(&request.Owner)
		w.refuse(request, ledger.CodeOwnerConflict, nil)
		closing := w.must(ledger.CloseBucket{Key: key, Owner: request.Owner, Deletion: ledger.DeletionDelete}).Closing
		if !closing.Done {
			w.Errorf("closing a stranger's bucket is not done")
		}
	}
	if after := w.stored(key); after.Revision != before.Revision || after.Closed || after.Limit != normalLimit {
		w.Errorf("strangers changed the bucket from %+v to %+v", before, after)
	}
}

// Goal: a bucket without owner is adopted with its usage, if the limit agrees.
func adoption(w *world) {
	w.open(normalLimit)
	w.use(40)
	w.refuse(w.declaration(normalLimit+1), ledger.CodeOwnerConflict,
		map[string]any{"actualLimit": int64(normalLimit), "declaredLimit": int64(normalLimit + 1)})
	if s := w.stored(key); s.Owner != nil {
		w.Errorf("a refused adoption left an owner: %+v", s)
	}
	s := w.declare(normalLimit)
	if s.Owner == nil || s.Owner.UID != bucketUID || s.UsedTokens != 40 || *s.DeclaredLimit != normalLimit || s.TenantID != tenantID {
		w.Errorf("the adopted bucket reads %+v", s)
	}
	w.wantEvents(ledger.AuditBucketAdopted, "", 1)
	w.declare(200)
	w.wantLimit(200)
}

// Goal: an owner created anew takes its bucket over with its usage; the thawed
// old incarnation is refused, to declare and to close.
func recreatedOwner(w *world) {
	old := w.declaration(normalLimit)
	w.must(old)
	w.use(30)
	for range 3 {
		w.declare(normalLimit)
	}
	before := w.owner
	w.Clock().Advance(time.Minute)
	w.owner.UID, w.owner.CreatedAt, w.generation = "bucket-uid-2", w.now(), 0
	s := w.declare(150)
	if s.Owner.UID != "bucket-uid-2" || s.UsedTokens != 30 || s.Limit != 150 || s.DeclaredGeneration != 1 {
		w.Errorf("the new incarnation's bucket reads %+v", s)
	}
	w.wantEvents(ledger.AuditBucketReopened, "", 1)
	old.Generation = 99
	w.refuse(old, ledger.CodeStaleGeneration, nil)
	closing := w.must(ledger.CloseBucket{Key: key, Owner: before, Deletion: ledger.DeletionDelete}).Closing
	if !closing.Done || w.stored(key).Closed {
		w.Errorf("the old incarnation's deletion closed the new one's bucket")
	}
	w.wantLimit(150)
}

// Goal: creation timestamps have whole seconds; within one, the UID that was
// retired does not come back.
func sameSecond(w *world) {
	old := w.declaration(normalLimit)
	w.must(old)
	w.owner.UID, w.generation = "bucket-uid-0", 0
	w.declare(150)
	old.Generation = 99
	w.refuse(old, ledger.CodeStaleGeneration, nil)
	w.wantLimit(150)
}

// Goal: under Review another hand's limit is kept, however often the owner
// declares, and shown once for each declaration.
func reviewKeeps(w *world) {
	request := w.declaration(normalLimit)
	w.must(request)
	w.override(250)
	for range 3 {
		w.must(request)
	}
	w.wantLimit(250)
	w.wantIdle(2)
	s := w.declare(180)
	if s.Limit != 250 || *s.DeclaredLimit != 180 {
		w.Errorf("the bucket reads %+v", s)
	}
	w.wantEvents(ledger.AuditLimitKept, "", 1)
	w.wantIdle(2)
	w.setLimit(250, 260)
	w.declare(190)
	w.wantLimit(260)
}

// Goal: under Overwrite the declared limit comes back, once, also without a new
// generation.
func overwriteSets(w *world) {
	request := w.declaration(normalLimit, overwriting)
	w.must(request)
	w.override(250)
	w.must(request)
	w.wantLimit(normalLimit)
	revision := w.stored(key).Revision
	w.must(request)
	if got := w.stored(key).Revision; got != revision {
		w.Errorf("a repaired bucket is repaired again")
	}
	w.setLimit(normalLimit, 120)
	w.declare(180, overwriting)
	w.wantLimit(180)
}

// Goal: once the values agree, whoever made them, the next declaration applies.
func inSyncAgain(w *world) {
	w.declare(normalLimit)
	w.override(250)
	w.declare(250)
	w.declare(180)
	w.wantLimit(180)
	w.setLimit(180, 90)
	w.setLimit(90, 180)
	w.declare(200)
	w.wantLimit(200)
}

// Goal: Overwrite never takes a temporary limit for another hand's, and never
// sets one.
func overwriteDuringRaise(w *world) {
	request := w.declaration(normalLimit, overwriting)
	w.must(request)
	raise := w.store(w.raiseFrom("raise-1", 0, 30*time.Minute))
	for range 5 {
		w.must(request)
	}
	w.wantLimit(temporaryLimit)
	w.wantRaise(raise.ID, ledger.RaiseActive, ledger.ReasonNone)
	w.override(250)
	w.must(request)
	w.wantReview(raise.ID)
	w.wantLimit(normalLimit)
	w.wantIdle(2)
}

// Goal: a row that vanished is never opened again with used = 0, until its owner
// is deleted.
func vanishedRow(w *world) {
	request := w.declaration(normalLimit)
	w.must(request)
	w.use(90)
	rows := len(w.audit())
	w.drop()
	for _, refused := range []ledger.Request{request, ledger.OpenBucket{Key: key, Limit: normalLimit}} {
		w.refuse(refused, ledger.CodeBucketRowMissing, map[string]any{"bucket": key})
	}
	w.refuse(w.reservation(1), ledger.CodeBucketNotFound, nil)
	w.touch()
	if w.raw(key) != nil {
		w.Fatalf("the bucket came back")
	}
	stranger := w.owner
	stranger.Name = "another"
	w.must(ledger.CloseBucket{Key: key, Owner: stranger, Deletion: ledger.DeletionDelete})
	w.refuse(request, ledger.CodeBucketRowMissing, nil)

	closing := w.must(ledger.CloseBucket{Key: key, Owner: w.owner, Deletion: ledger.DeletionRetain, Actor: requester}).Closing
	if !closing.Done {
		w.Errorf("closing a vanished bucket is not done: %+v", closing)
	}
	w.wantEvents(ledger.AuditBucketForgotten, "", 1)
	w.owner.UID, w.owner.CreatedAt = "bucket-uid-2", w.now().Add(time.Second)
	w.generation = 0
	w.declare(normalLimit)
	if got := w.audit(); len(got) != rows+2 || got[rows+1].Event != ledger.AuditBucketOpened {
		w.Errorf("the audit went on as %v", w.eventNames())
	}

	expected := w.declaration(normalLimit)
	expected.Key, expected.ExpectExisting = "never-seen", true
	w.refuse(expected, ledger.CodeBucketRowMissing, nil)
}

// Goal: raises of a vanished bucket can be found, stored again, revoked and
// ended; none is left live. One that is in force ends at the next look, since it
// is without effect.
func vanishedWithRaise(w *world) {
	w.declare(normalLimit)
	request := w.raiseFrom("active", 0, 30*time.Minute)
	w.store(request)
	w.store(w.raiseFrom("planned", time.Hour, 2*time.Hour))
	w.store(w.raiseFrom("other", time.Hour, 2*time.Hour))
	w.store(w.raiseFrom("missed", time.Hour, 2*time.Hour))
	w.drop()
	if live := w.liveRaises(); len(live) != 4 {
		w.Errorf("%d raises are live", len(live))
	}
	if r := w.store(request); r.State != ledger.RaiseFailed || r.Reason != ledger.ReasonLimitChanged || !r.ReviewRequired {
		w.Errorf("storing again on a vanished bucket answers %+v", r)
	}
	request.Grant.UID, request.Grant.ExpiresAt = "active-2", w.now().Add(time.Minute)
	if r := w.store(request); r.ID != "active" || r.CurrentUID != "active-2" {
		w.Errorf("linking on a vanished bucket answers %+v", r)
	}
	w.refuse(w.raiseFrom("new", 0, time.Hour), ledger.CodeBucketNotFound, nil)
	w.touch()
	if r := w.revoke("planned"); r.State != ledger.RaiseFailed || r.Reason != ledger.ReasonRevoked {
		w.Errorf("revoking on a vanished bucket answers %+v", r)
	}
	w.must(ledger.CloseBucket{Key: key, Owner: w.owner, Deletion: ledger.DeletionDelete, Actor: requester})
	w.wantRaise("missed", ledger.RaiseFailed, ledger.ReasonBucketClosed)
	w.wantRaise("other", ledger.RaiseFailed, ledger.ReasonBucketClosed)
	if live := w.liveRaises(); len(live) != 0 {
		w.Errorf("%d raises are live after their bucket was forgotten", len(live))
	}
	w.audit()
}
