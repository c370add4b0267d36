package ledger

// perform carries out one due step.
func (u *unit) perform(s step) {
	switch s.kind {
	case stepLostPointer:
		u.failRaise(s, TransitionRestore, ReasonLimitChanged, OutcomeKept)
	case stepRestore:
		u.restore(s, TransitionRestore, ReasonExpired, s.raise.RestoreOperation())
	case stepCloseWindow:
		u.closeWindow(s)
	case stepGraceOver:
		u.failRaise(s, TransitionActivate, ReasonLimitChanged, OutcomeKept)
	case stepRoll:
		u.roll()
	case stepStart:
		u.start(s)
	}
}

// start puts a raise in force, or notes why it cannot be yet, or refuses it.
func (u *unit) start(s step) {
	b, r := u.view.Bucket, s.raise
	raised := u.activeRaise() != nil
	switch mode := u.effectiveMode(); {
	case mode == ModeObserveOnly:
		u.observeStart(s, raised)
	case mode != ModeEnforce:
		u.failRaise(s, TransitionActivate, ReasonRaisesDisabled, OutcomeRefused)
	case !u.policyAllows(r):
		u.failRaise(s, TransitionActivate, ReasonPolicyRefused, OutcomeRefused)
	case !u.spendApproval(r):
		u.failRaise(s, TransitionActivate, ReasonApprovalAlreadyUsed, OutcomeRefused)
	case raised:
		r.MismatchSince = nil
		u.wait(s, ReasonBucketAlreadyRaised)
	case b.Limit != r.NormalLimit:
		r.MismatchSince = pointer(u.now)
		u.wait(s, ReasonLimitMismatch)
	default:
		u.activate(s)
	}
}

// activate is the compare-and-set of a raise: start has found the limit to be
// the normal one and no raise in force. What undoes the change is stored with
// it.
func (u *unit) activate(s step) {
	b, r := u.view.Bucket, s.raise
	prior := b.Limit
	r.State, r.Reason, r.MismatchSince = RaiseActive, ReasonNone, nil
	r.AppliedLimit, r.RestoreTo = pointer(r.TemporaryLimit), pointer(r.NormalLimit)
	r.ActivatedAt, r.ObservedLimit = pointer(u.now), pointer(prior)
	u.writeLimit(r.TemporaryLimit, r)
	u.changeRaise(r)
	u.recordOperation(OperationRecord{ID: r.ActivateOperation(), Inputs: r.GrantHash})
	u.report(s, TransitionActivate, AuditRaiseActivated, OutcomeApplied, ReasonNone, r.ActivateOperation(), prior)
}

// restore returns the limit to what it was, if it is still the one that the raise
// set; otherwise a newer decision stands, and the raise ends for review. Usage
// never holds it up.
func (u *unit) restore(s step, kind TransitionKind, reason Reason, operationID string) {
	r := s.raise
	if !u.holdsPointer(r) {
		u.failRaise(s, kind, ReasonLimitChanged, OutcomeKept)
		return
	}
	prior := u.view.Bucket.Limit
	r.State, r.Reason = RaiseRestored, reason
	r.EndedAt, r.ObservedLimit = pointer(u.now), pointer(prior)
	u.writeLimit(*r.RestoreTo, nil)
	u.changeRaise(r)
	u.recordOperation(OperationRecord{ID: operationID, Inputs: r.GrantHash})
	u.report(s, kind, AuditRaiseRestored, OutcomeApplied, reason, operationID, prior)
}

// closeWindow ends a raise whose window passed before it could start.
func (u *unit) closeWindow(s step) {
	r := s.raise
	if r.ObservedAt == nil || u.effectiveMode() != ModeObserveOnly {
		u.failRaise(s, TransitionActivate, ReasonWindowMissed, OutcomeRefused)
		return
	}
	u.endRaise(r, ReasonObserveOnly)
	u.recordOperation(OperationRecord{ID: r.observeRestoreOperation(), Inputs: r.GrantHash})
	u.report(s, TransitionObserve, AuditRaiseObserved, OutcomeObserved, ReasonObserveOnly,
		r.observeRestoreOperation(), u.view.Bucket.Limit)
}

// observeStart notes what would have been done; the reason says what would have
// stood in the way.
func (u *unit) observeStart(s step, raised bool) {
	r := s.raise
	again := r.ObservedAt != nil
	r.Reason, r.MismatchSince = ReasonObserveOnly, nil
	u.changeRaise(r)
	if again {
		// The mode went away and came back; what would have been done is noted.
		return
	}
	r.ObservedAt, r.ObservedLimit = pointer(u.now), pointer(u.view.Bucket.Limit)
	reason := ReasonObserveOnly
	switch {
	case !u.policyAllows(r):
		reason = ReasonPolicyRefused
	case u.approvalSpentByOther(r):
		reason = ReasonApprovalAlreadyUsed
	case raised:
		reason = ReasonBucketAlreadyRaised
	case u.view.Bucket.Limit != r.NormalLimit:
		reason = ReasonLimitMismatch
	}
	u.recordOperation(OperationRecord{ID: r.observeActivateOperation(), Inputs: r.GrantHash})
	u.report(s, TransitionObserve, AuditRaiseObserved, OutcomeObserved, reason,
		r.observeActivateOperation(), u.view.Bucket.Limit)
}

// wait notes once that a raise cannot start yet.
func (u *unit) wait(s step, reason Reason) {
	r := s.raise
	r.Reason, r.ObservedLimit = reason, pointer(u.view.Bucket.Limit)
	u.changeRaise(r)
	u.report(s, TransitionWait, AuditRaiseWaiting, OutcomeWaiting, reason, "", u.view.Bucket.Limit)
}

// failRaise ends a raise without touching the limit.
func (u *unit) failRaise(s step, kind TransitionKind, reason Reason, outcome AuditOutcome) {
	r := s.raise
	operationID := r.ActivateOperation()
	if r.Ran() {
		operationID = r.RestoreOperation()
		r.ReviewRequired = reason == ReasonLimitChanged
	}
	if kind == TransitionRevoke {
		operationID = r.RevokeOperation()
	}
	// A pointer that other hands have taken may still stand on the row when only
	// the value differs; the raise is over, so it goes.
	if b := u.view.Bucket; b.ActiveRaiseID == r.ID {
		b.ActiveRaiseID = ""
	}
	u.endRaise(r, reason)
	u.report(s, kind, AuditRaiseFailed, outcome, reason, operationID, u.view.Bucket.Limit)
}

func (u *unit) endRaise(r *Raise, reason Reason) {
	r.State, r.Reason, r.MismatchSince = RaiseFailed, reason, nil
	r.EndedAt, r.ObservedLimit = pointer(u.now), pointer(u.view.Bucket.Limit)
	u.changeRaise(r)
	if !r.Ran() && u.effectiveMode() == ModeObserveOnly {
		u.freeApproval(r)
	}
}

// report writes the audit row of a step and tells the metrics.
func (u *unit) report(s step, kind TransitionKind, event AuditEvent, outcome AuditOutcome, reason Reason, operationID string, prior int64) {
	row := u.raiseRow(s.raise, event, outcome, reason)
	row.OperationID = operationID
	row.PriorLimit = pointer(prior)
	if s.actor != "" {
		row.Actor = s.actor
	}
	transition := Transition{
		BucketKey: u.view.Key, RaiseID: s.raise.ID, Kind: kind, Outcome: outcome, Reason: reason, DueAt: u.now, At: u.now,
	}
	if !s.dueAt.IsZero() {
		row.DueAt = pointer(s.dueAt)
		transition.DueAt = s.dueAt
	}
	u.audit(row)
	u.fx.Transitions = append(u.fx.Transitions, transition)
}

// raiseRow is an audit row about a raise.
func (u *unit) raiseRow(r *Raise, event AuditEvent, outcome AuditOutcome, reason Reason) AuditRow {
	row := AuditRow{
		Event: event, Outcome: outcome, Reason: reason, RaiseID: r.ID, RaiseVersion: r.Version,
		TenantID: r.TenantID, ScopedKeyID: r.ScopedKeyID, ApprovalID: r.ApprovalID, Actor: r.Actor, OnBehalfOf: r.OnBehalfOf,
		RequestedLimit: pointer(r.TemporaryLimit),
	}
	if u.view.Bucket != nil {
		row.PriorLimit = pointer(u.view.Bucket.Limit)
	}
	return row
}

// policyAllows judges a raise by the bucket's policy as it is now. The duration is
// that of the window as it was stored.
func (u *unit) policyAllows(r *Raise) bool {
	p := u.view.Bucket.RaisePolicy
	return r.TemporaryLimit <= p.MaxLimit && r.ExpiresAt.Sub(r.StartsAt) <= p.MaxDuration
}

func (u *unit) approvalSpentByOther(r *Raise) bool {
	holder, spent := u.view.Approvals[r.approval()]
	return spent && holder != r.ID
}

// spendApproval spends the raise's approval unless it has done so already. It
// reports false when another raise spent it.
func (u *unit) spendApproval(r *Raise) bool {
	key := r.approval()
	if holder, spent := u.view.Approvals[key]; spent {
		return holder == r.ID
	}
	u.view.Approvals[key] = r.ID
	u.fx.SpendApprovals = append(u.fx.SpendApprovals,
		SpentApproval{Approval: key, RaiseID: r.ID, BucketKey: u.view.Key, At: u.now})
	u.changed = true
	return true
}

// freeApproval gives an approval back that was not used after all.
func (u *unit) freeApproval(r *Raise) {
	key := r.approval()
	if u.view.Approvals[key] != r.ID {
		return
	}
	delete(u.view.Approvals, key)
	u.fx.FreeApprovals = append(u.fx.FreeApprovals,
		SpentApproval{Approval: key, RaiseID: r.ID, BucketKey: u.view.Key, At: u.now})
}
