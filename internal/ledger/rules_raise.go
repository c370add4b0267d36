package ledger

import "cmp"

func (r StoreRaise) apply(u *unit) Result {
	grant := r.Grant
	grant.ExpiresAt = Truncate(grant.ExpiresAt)
	if existing := u.raiseFor(grant.UID); existing != nil {
		if existing.GrantHash != grant.hash(r.Key) {
			return Result{Err: Errorf(CodeRaiseConflict,
				"The raise is recorded with other inputs; the recorded ones stand. Create a new lease for other values.").
				WithDetails(map[string]any{"raiseId": existing.ID})}
		}
		if existing.CurrentUID == grant.UID {
			u.shorten(existing, grant, r.ShortenedBy)
		}
		return Result{Raise: existing}
	}
	if existing := u.raiseForGrant(grant.key(r.Key)); existing != nil {
		// Within one second both stand for it in turn, until one of them is gone.
		if !grant.CreatedAt.Before(existing.CurrentCreatedAt) {
			u.link(existing, grant)
			u.shorten(existing, grant, r.ShortenedBy)
		}
		return Result{Raise: existing}
	}
	if err := r.ready(u); err != nil {
		return Result{Err: err}
	}
	return Result{Raise: u.storeIntent(r, grant)}
}

// ready checks that the bucket is there, belongs to the grant's namespace, and
// has been declared at least as far as the grant was written against.
func (r StoreRaise) ready(u *unit) *Error {
	b := u.view.Bucket
	switch {
	case b == nil:
		return u.notFound()
	case b.Owner == nil:
		return notReady(b)
	case b.Owner.Cluster != r.Grant.Cluster || b.Owner.Namespace != r.Grant.Namespace:
		return ownerConflict(b)
	case b.Owner.UID != r.BucketUID || b.DeclaredGeneration < r.BucketGeneration || b.TenantID != r.Grant.TenantID:
		return notReady(b)
	case b.ClosedAt != nil:
		return closedError(b.Key)
	case u.liveRaises() >= MaxLiveRaises:
		return Errorf(CodeRaiseLimit, "The bucket has as many raises that have not ended as it may have; wait for one to end, or delete one.").
			WithDetails(map[string]any{"bucket": b.Key, "maxLiveRaises": int64(MaxLiveRaises)})
	default:
		return nil
	}
}

func (u *unit) liveRaises() int {
	n := 0
	for _, r := range u.view.Raises {
		if !r.State.Ended() {
			n++
		}
	}
	return n
}

func notReady(b *Bucket) *Error {
	return Errorf(CodeBucketNotReady, "The bucket's current generation has not reached the ledger yet.").
		WithDetails(map[string]any{"bucket": b.Key})
}

func (u *unit) raiseForGrant(key GrantKey) *Raise {
	for _, r := range u.view.Raises {
		if r.Cluster == key.Cluster && r.Namespace == key.Namespace && r.Name == key.Name &&
			r.ApprovalID == key.ApprovalID && r.GrantHash == key.GrantHash {
			return r
		}
	}
	return nil
}

// link makes a new incarnation of the object stand for the record that exists,
// in whatever state it is: the same grant is not raised twice.
func (u *unit) link(r *Raise, grant Grant) {
	r.CurrentUID, r.CurrentCreatedAt = grant.UID, Truncate(grant.CreatedAt)
	u.changeRaise(r)
	row := u.raiseRow(r, AuditRaiseLinked, OutcomeApplied, r.Reason)
	row.Actor = grant.Actor
	u.audit(row)
}

// shorten moves the expiry of a raise that has not ended to an earlier instant,
// never before its start. A later one is ignored.
func (u *unit) shorten(r *Raise, grant Grant, by string) {
	expiresAt := later(grant.ExpiresAt, r.StartsAt)
	if r.State.Ended() || !expiresAt.Before(r.ExpiresAt) {
		return
	}
	r.ExpiresAt = expiresAt
	u.changeRaise(r)
	row := u.raiseRow(r, AuditRaiseShortened, OutcomeApplied, ReasonNone)
	row.Actor, row.DueAt = cmp.Or(by, grant.Actor), pointer(expiresAt)
	u.audit(row)
}

// storeIntent writes the record before anything is done about it. What the
// policy refuses is recorded as refused.
func (u *unit) storeIntent(request StoreRaise, grant Grant) *Raise {
	key, longest := request.Key, request.MaxDuration
	r := &Raise{
		ID: grant.UID, BucketKey: key, Cluster: grant.Cluster, Namespace: grant.Namespace, Name: grant.Name,
		CurrentUID: grant.UID, CurrentCreatedAt: Truncate(grant.CreatedAt), TenantID: grant.TenantID, ScopedKeyID: grant.ScopedKeyID,
		NormalLimit: grant.NormalLimit, TemporaryLimit: grant.TemporaryLimit,
		StartsAt: u.now, ExpiresAt: grant.ExpiresAt, ApprovalID: grant.ApprovalID, Actor: grant.Actor, OnBehalfOf: grant.OnBehalfOf, Purpose: grant.Purpose,
		GrantHash: grant.hash(key), OnBaseChange: grant.OnBaseChange,
		State: RaisePending, Version: 1, StoredAt: u.now,
	}
	if grant.StartsAt != nil {
		r.StartsAt = Truncate(*grant.StartsAt)
	}
	if r.ExpiresAt.Before(r.StartsAt) {
		r.StartsAt = r.ExpiresAt
	}
	s := step{raise: r, dueAt: u.now}
	over := !u.now.Before(r.ExpiresAt)
	mode := u.effectiveMode()
	switch {
	case mode == ModeDisabled:
		u.refuseIntent(s, ReasonRaisesDisabled)
	case !u.policyAllows(r) || longest > 0 && r.ExpiresAt.Sub(r.StartsAt) > longest:
		u.refuseIntent(s, ReasonPolicyRefused)
	case mode == ModeEnforce && !over && !u.spendApproval(r):
		u.refuseIntent(s, ReasonApprovalAlreadyUsed)
	default:
		u.addRaise(r)
		row := u.raiseRow(r, AuditRaiseStored, OutcomeApplied, ReasonNone)
		row.DueAt = pointer(r.StartsAt)
		u.audit(row)
	}
	return r
}

func (u *unit) refuseIntent(s step, reason Reason) {
	u.addRaise(s.raise)
	u.failRaise(s, TransitionActivate, reason, OutcomeRefused)
}

func (r RevokeRaise) apply(u *unit) Result {
	raise := u.raiseFor(r.UID)
	if raise == nil {
		return Result{Err: Errorf(CodeRaiseNotFound, "No raise is recorded for the object.").
			WithDetails(map[string]any{"uid": r.UID})}
	}
	if raise.State.Ended() || raise.CurrentUID != r.UID {
		return Result{Raise: raise}
	}
	s := step{raise: raise, dueAt: u.now, actor: r.Actor}
	switch {
	case u.view.Bucket == nil:
		u.endWithoutBucket(raise, ReasonRevoked, r.Actor)
	case raise.State == RaiseActive:
		u.restore(s, TransitionRevoke, ReasonRevoked, raise.RevokeOperation())
	default:
		u.failRaise(s, TransitionRevoke, ReasonRevoked, OutcomeApplied)
	}
	return Result{Raise: raise}
}

func (r AcknowledgeReview) apply(u *unit) Result {
	raise := u.raiseFor(r.UID)
	if raise == nil {
		return Result{Err: Errorf(CodeRaiseNotFound, "No raise is recorded for the object.").
			WithDetails(map[string]any{"uid": r.UID})}
	}
	if !raise.ReviewRequired || raise.CurrentUID != r.UID {
		return Result{Raise: raise}
	}
	raise.ReviewRequired = false
	u.changeRaise(raise)
	row := u.raiseRow(raise, AuditRaiseReviewed, OutcomeApplied, raise.Reason)
	row.Actor = r.Actor
	u.audit(row)
	return Result{Raise: raise}
}

// endWithoutBucket ends a raise whose bucket's row has vanished: there is no
// limit left to restore.
func (u *unit) endWithoutBucket(r *Raise, reason Reason, actor string) {
	r.State, r.Reason, r.MismatchSince, r.EndedAt = RaiseFailed, reason, nil, pointer(u.now)
	u.changeRaise(r)
	row := u.raiseRow(r, AuditRaiseFailed, OutcomeApplied, reason)
	row.Actor = actor
	u.audit(row)
	u.fx.Transitions = append(u.fx.Transitions, Transition{
		BucketKey: u.view.Key, RaiseID: r.ID, Kind: TransitionFail, Outcome: OutcomeApplied, Reason: reason, DueAt: u.now, At: u.now,
	})
}
