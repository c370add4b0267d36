package ledger

import "strconv"

func (r SetLimit) inputs() string {
	return strconv.FormatInt(r.ExpectedLimit, 10) + ">" + strconv.FormatInt(r.Limit, 10)
}

func (r SetLimit) apply(u *unit) Result {
	b := u.view.Bucket
	if b == nil {
		return Result{Err: u.notFound()}
	}
	if done := u.operation(r.OperationID); done != nil {
		switch {
		case done.Inputs != r.inputs():
			return Result{Err: Errorf(CodeOperationConflict, "The operation ID was already used with other inputs.").
				WithDetails(map[string]any{"operationId": r.OperationID})}
		case done.Code != "":
			return Result{Err: &Error{Code: done.Code, Message: done.Message, Details: done.Details}}
		default:
			return Result{}
		}
	}
	record := OperationRecord{ID: r.OperationID, Inputs: r.inputs()}
	row := AuditRow{
		Event: AuditLimitSet, Outcome: OutcomeApplied, OperationID: r.OperationID, Actor: r.Actor,
		RequestedLimit: pointer(r.Limit), PriorLimit: pointer(b.Limit),
	}
	refusal := r.refusal(b)
	switch {
	case refusal != nil:
		record.Code, record.Message, record.Details = refusal.Code, refusal.Message, refusal.Details
		row.Outcome, row.Reason = OutcomeRefused, refusalReason(refusal)
		u.audit(row)
	case r.Limit != b.Limit || b.ActiveRaiseID != "":
		u.writeLimit(r.Limit, nil)
		u.audit(row)
	}
	u.recordOperation(record)
	return Result{Err: refusal}
}

func (r SetLimit) refusal(b *Bucket) *Error {
	if b.Limit != r.ExpectedLimit {
		return Errorf(CodeLimitChanged, "Bucket limit no longer matches expectedLimit.").
			WithDetails(map[string]any{"expectedLimit": r.ExpectedLimit, "actualLimit": b.Limit})
	}
	if allocated := b.UsedTokens + b.ReservedTokens; r.Limit < allocated {
		return Errorf(CodeLimitBelowAllocated, "New limit cannot be lower than committed and reserved usage.").
			WithDetails(map[string]any{"limit": r.Limit, "allocated": allocated})
	}
	return nil
}

// refusalReason says in the audit's words why a limit was not set.
func refusalReason(refusal *Error) Reason {
	if refusal.Code == CodeLimitChanged {
		return ReasonLimitChanged
	}
	return ReasonLimitBelowAllocated
}

func (r ApplyDeclared) apply(u *unit) Result {
	if u.view.Bucket == nil {
		return Result{Err: r.open(u)}
	}
	if err := r.claim(u); err != nil {
		return Result{Err: err}
	}
	r.change(u)
	return Result{}
}

// open creates the bucket, unless it existed before and vanished: its usage would
// be forgotten.
func (r ApplyDeclared) open(u *unit) *Error {
	if u.view.History.vanished() || r.ExpectExisting {
		return vanishedError(r.Key)
	}
	if u.fx.Row == RowDelete {
		return errSameBatch("deleted")
	}
	d := r.Declaration
	u.createBucket(d.Limit, d.Settings)
	b := u.view.Bucket
	b.Owner, b.TenantID, b.ScopedKeyID = clonePointer(&r.Owner), d.TenantID, d.ScopedKeyID
	b.DeclaredLimit, b.DeclaredGeneration = pointer(d.Limit), r.Generation
	b.ConflictPolicy, b.RaisePolicy, b.Period = d.ConflictPolicy, d.Raises.stored(), d.Period
	u.beginFirstPeriod(true)
	u.audit(AuditRow{Event: AuditBucketOpened, Outcome: OutcomeApplied, RequestedLimit: pointer(d.Limit), Actor: r.Actor})
	return nil
}

// claim decides whether the declaration comes from the bucket's owner and is not
// older than the one applied.
func (r ApplyDeclared) claim(u *unit) *Error {
	b := u.view.Bucket
	switch {
	case b.Owner == nil:
		return r.adopt(u)
	case !b.Owner.sameObject(r.Owner):
		return ownerConflict(b)
	case b.Owner.UID != r.Owner.UID:
		if !succeeds(b, r.Owner) {
			return r.stale(b)
		}
		b.RetiredUID, b.Owner = b.Owner.UID, clonePointer(&r.Owner)
		b.ClosedAt, b.DeclaredGeneration = nil, 0
		u.changed = true
		u.audit(AuditRow{Event: AuditBucketReopened, Outcome: OutcomeApplied, Actor: r.Actor,
			RequestedLimit: pointer(r.Declaration.Limit), PriorLimit: pointer(b.Limit)})
	case b.ClosedAt != nil:
		return closedError(b.Key)
	case r.Generation < b.DeclaredGeneration:
		return r.stale(b)
	}
	return nil
}

// succeeds reports whether the claimant is a later incarnation of the bucket's
// owner. Creation timestamps have whole seconds, so within one second the UID
// that was retired last is what must not come back.
func succeeds(b *Bucket, claimant Owner) bool {
	if c := claimant.CreatedAt.Compare(b.Owner.CreatedAt); c != 0 {
		return c > 0
	}
	return claimant.UID != b.RetiredUID
}

// adopt gives a bucket without an owner to the first object that declares the
// limit that it has.
func (r ApplyDeclared) adopt(u *unit) *Error {
	b := u.view.Bucket
	if b.Limit != r.Declaration.Limit {
		return Errorf(CodeOwnerConflict,
			"The ledger holds a bucket with this key that no TokenBucket owns, with the limit %d; declare that limit to adopt it.", b.Limit).
			WithDetails(map[string]any{"actualLimit": b.Limit, "declaredLimit": r.Declaration.Limit})
	}
	b.Owner = clonePointer(&r.Owner)
	b.TenantID, b.ScopedKeyID = r.Declaration.TenantID, r.Declaration.ScopedKeyID
	u.changed = true
	u.audit(AuditRow{Event: AuditBucketAdopted, Outcome: OutcomeApplied, Actor: r.Actor,
		RequestedLimit: pointer(r.Declaration.Limit), PriorLimit: pointer(b.Limit)})
	return nil
}

func ownerConflict(b *Bucket) *Error {
	return Errorf(CodeOwnerConflict, "The bucket belongs to another object; choose another bucketKey.").
		WithDetails(map[string]any{"bucket": b.Key})
}

func (r ApplyDeclared) stale(b *Bucket) *Error {
	return Errorf(CodeStaleGeneration, "A newer declaration of this bucket has been applied.").
		WithDetails(map[string]any{"generation": r.Generation, "appliedGeneration": b.DeclaredGeneration})
}

// change brings the bucket to what is declared; nothing is written when it is
// there already.
func (r ApplyDeclared) change(u *unit) {
	b, d := u.view.Bucket, r.Declaration
	base := u.baseLimit()
	mine := b.DeclaredLimit == nil || *b.DeclaredLimit == base
	isNew := b.DeclaredLimit == nil || *b.DeclaredLimit != d.Limit || b.DeclaredGeneration < r.Generation

	policy := d.Raises.stored()
	policyChanged := b.RaisePolicy != policy
	if isNew || policyChanged || b.ScopedKeyID != d.ScopedKeyID || b.Settings != d.Settings.stored() ||
		b.ConflictPolicy != d.ConflictPolicy || b.TenantID != d.TenantID || b.Period != d.Period {
		b.DeclaredLimit, b.DeclaredGeneration = pointer(d.Limit), r.Generation
		b.TenantID, b.ScopedKeyID, b.Settings = d.TenantID, d.ScopedKeyID, d.Settings.stored()
		b.ConflictPolicy, b.RaisePolicy, b.Period = d.ConflictPolicy, policy, d.Period
		u.beginFirstPeriod(false)
		u.changed = true
	}
	if policyChanged {
		u.audit(AuditRow{Event: AuditPolicyChanged, Outcome: OutcomeApplied, Reason: Reason(policy.Mode),
			Actor: r.Actor, PriorLimit: pointer(b.Limit)})
	}
	row := AuditRow{Event: AuditLimitDeclared, Outcome: OutcomeApplied, Actor: r.Actor,
		RequestedLimit: pointer(d.Limit), PriorLimit: pointer(b.Limit)}
	switch {
	case d.Limit == base:
	case mine || d.ConflictPolicy == ConflictOverwrite:
		u.setBase(d.Limit, row)
	case isNew:
		row.Event, row.Outcome, row.Reason = AuditLimitKept, OutcomeKept, ReasonLimitChanged
		u.audit(row)
	}
}

// setBase sets the declared limit. Under an active raise, the raise says whether
// it stays over the new limit or ends.
func (u *unit) setBase(limit int64, row AuditRow) {
	raise := u.activeRaise()
	if raise == nil || !u.holdsPointer(raise) || raise.OnBaseChange != BaseChangeRebase {
		u.writeLimit(limit, nil)
		u.audit(row)
		return
	}
	applied := max(raise.TemporaryLimit, limit)
	raise.RestoreTo, raise.AppliedLimit = pointer(limit), pointer(applied)
	u.writeLimit(applied, raise)
	u.changeRaise(raise)
	row.Event, row.RaiseID, row.RaiseVersion = AuditRaiseRebased, raise.ID, raise.Version
	row.ScopedKeyID, row.ApprovalID = raise.ScopedKeyID, raise.ApprovalID
	u.audit(row)
}

func (r CloseBucket) apply(u *unit) Result {
	b := u.view.Bucket
	if b == nil {
		r.forget(u)
		return Result{Closing: &Closing{Done: true}}
	}
	if b.Owner == nil || !b.Owner.sameObject(r.Owner) ||
		(b.Owner.UID != r.Owner.UID && !succeeds(b, r.Owner)) {
		return Result{Closing: &Closing{Done: true}}
	}
	if b.ClosedAt == nil {
		r.close(u)
	}
	if r.Deletion != DeletionDelete {
		return Result{Closing: &Closing{Done: true}}
	}
	reserved := b.ReservedTokens
	for _, p := range u.view.Periods {
		reserved += p.ReservedTokens
	}
	if reserved > 0 {
		return Result{Closing: &Closing{ReservedTokens: reserved}}
	}
	if !u.rowExisted {
		return Result{Err: errSameBatch("created")}
	}
	u.audit(AuditRow{Event: AuditBucketDeleted, Outcome: OutcomeApplied, Actor: r.Actor, PriorLimit: pointer(b.Limit)})
	u.fx.Row = RowDelete
	u.view.Bucket = nil
	u.view.History = History{
		LastSequence: b.AuditSequence, LastEvent: AuditBucketDeleted,
		Cluster: b.Owner.Cluster, Namespace: b.Owner.Namespace, OwnerName: b.Owner.Name,
	}
	return Result{Closing: &Closing{Done: true}}
}

// close restores what is raised, ends what waits, and admits nothing more.
func (r CloseBucket) close(u *unit) {
	b := u.view.Bucket
	for _, raise := range u.view.Raises {
		s := step{raise: raise, dueAt: u.now, actor: r.Actor}
		switch raise.State {
		case RaiseActive:
			u.restore(s, TransitionRestore, ReasonBucketClosed, raise.RestoreOperation())
		case RaisePending:
			u.failRaise(s, TransitionFail, ReasonBucketClosed, OutcomeApplied)
		case RaiseRestoring, RaiseRestored, RaiseFailed:
		}
	}
	if b.Owner.UID != r.Owner.UID {
		b.RetiredUID, b.Owner = b.Owner.UID, clonePointer(&r.Owner)
	}
	b.ClosedAt = pointer(u.now)
	u.changed = true
	u.audit(AuditRow{Event: AuditBucketClosed, Outcome: OutcomeApplied, Actor: r.Actor, PriorLimit: pointer(b.Limit)})
}

// forget ends the history of a bucket whose row had vanished, when its own owner
// is deleted: a person has decided to give the usage up.
func (r CloseBucket) forget(u *unit) {
	if !u.view.History.vanished() || !u.view.History.belongedTo(r.Owner) {
		return
	}
	for _, raise := range u.view.Raises {
		if !raise.State.Ended() {
			u.endWithoutBucket(raise, ReasonBucketClosed, r.Actor)
		}
	}
	u.audit(AuditRow{Event: AuditBucketForgotten, Outcome: OutcomeApplied, Actor: r.Actor})
}
