package ledger

import "time"

func (r OpenBucket) apply(u *unit) Result {
	if b := u.view.Bucket; b != nil {
		if base := u.baseLimit(); base != r.Limit {
			return Result{Err: Errorf(CodeBucketLimitConflict, "Bucket already exists with a different limit.").
				WithDetails(map[string]any{"expectedLimit": r.Limit, "actualLimit": base})}
		}
		return Result{}
	}
	if u.view.History.vanished() {
		return Result{Err: vanishedError(r.Key)}
	}
	if u.fx.Row == RowDelete {
		return Result{Err: errSameBatch("deleted")}
	}
	settings := r.Settings
	if settings == (ReservationSettings{}) {
		settings = DefaultSettings()
	}
	u.createBucket(r.Limit, settings)
	u.audit(AuditRow{Event: AuditBucketOpened, Outcome: OutcomeApplied, RequestedLimit: pointer(r.Limit)})
	return Result{}
}

// createBucket makes the row; its audit goes on where the key's history ended.
func (u *unit) createBucket(limit int64, settings ReservationSettings) {
	u.view.Bucket = &Bucket{
		Key: u.view.Key, Limit: limit, Settings: settings.stored(), ConflictPolicy: ConflictReview,
		RaisePolicy: RaisePolicy{Mode: ModeDisabled}, AuditSequence: u.view.History.LastSequence,
		ExpiredThrough: u.now, CreatedAt: u.now, UpdatedAt: u.now,
	}
	// What a bucket left behind whose row had vanished is none of this one's.
	u.view.Leases, u.view.Operations, u.view.Periods, u.overdue = nil, nil, nil, nil
	clear(u.leaseByID)
	clear(u.leaseByHash)
	u.fx.LimitWritten = true
	u.changed = true
}

// errSameBatch refuses to create and delete one bucket in one transaction.
func errSameBatch(done string) *Error {
	return Errorf(CodeUnavailable, "The bucket was %s by another request of the same batch; repeat the request.", done)
}

func vanishedError(key string) *Error {
	return Errorf(CodeBucketRowMissing,
		"Bucket existed and its row is gone without having been deleted through the ledger; restore it from a backup, or delete its TokenBucket to give the usage up.").
		WithDetails(map[string]any{"bucket": key})
}

func (u *unit) notFound() *Error {
	return Errorf(CodeBucketNotFound, "Bucket does not exist.").WithDetails(map[string]any{"bucket": u.view.Key})
}

// baseLimit is the limit without the active raise.
func (u *unit) baseLimit() int64 {
	if r := u.activeRaise(); r != nil && u.holdsPointer(r) {
		return *r.RestoreTo
	}
	return u.view.Bucket.Limit
}

func (r Reserve) apply(u *unit) Result {
	b := u.view.Bucket
	if b == nil {
		return Result{Err: u.notFound()}
	}
	hash := requestHash(r.Key, r.RequestKey)
	if existing := u.leaseByHash[hash]; existing != nil {
		ttl := r.TTL
		if ttl == 0 {
			ttl = existing.TTL
		}
		if existing.FingerprintHash != fingerprintHash(r.Key, r.Tokens, ttl, r.Fingerprint) || existing.foreignTo(r.Holder) {
			return Result{Err: Errorf(CodeIdempotencyConflict, "requestKey was already used with different reservation inputs.")}
		}
		return Result{Lease: existing}
	}
	ttl := r.TTL
	if ttl == 0 {
		ttl = b.Settings.DefaultTTL
	}
	if err := r.checkAge(u); err != nil {
		return Result{Err: err}
	}
	if err := r.admit(u, ttl); err != nil {
		return Result{Err: err}
	}
	lease := &Lease{
		ID: leaseID(u.now, hash), BucketKey: r.Key, RequestHash: hash,
		FingerprintHash: fingerprintHash(r.Key, r.Tokens, ttl, r.Fingerprint),
		State:           LeaseReserved, ReservedTokens: r.Tokens, TTL: ttl,
		CreatedAt: u.now, ExpiresAt: u.now.Add(ttl), ScopedKeyID: b.ScopedKeyID, RaiseID: b.ActiveRaiseID,
		Holder: r.Holder, PeriodStart: b.PeriodStart,
	}
	u.addLease(lease)
	b.ReservedTokens += r.Tokens
	return Result{Lease: lease}
}

// checkAge refuses a request of which it cannot be known whether it was carried out.
func (r Reserve) checkAge(u *unit) *Error {
	b := u.view.Bucket
	if r.FirstAttemptAt == nil {
		return nil
	}
	known := b.PurgedThrough
	if b.Settings.Retention > 0 {
		known = later(known, u.now.Add(-b.Settings.Retention))
	}
	if !r.FirstAttemptAt.Before(known) {
		return nil
	}
	return Errorf(CodeRequestTooOld,
		"The request was first made before the time from which the bucket's leases are kept; whether it was carried out then is not known any more.").
		WithDetails(map[string]any{"firstAttemptAtMs": r.FirstAttemptAt.UnixMilli(), "keptFromMs": known.UnixMilli()})
}

// admit decides whether a new lease fits, in the package's order of precedence.
func (r Reserve) admit(u *unit, ttl time.Duration) *Error {
	b := u.view.Bucket
	if err := u.checkTTL(ttl); err != nil {
		return err
	}
	switch {
	case b.ClosedAt != nil:
		return closedError(b.Key)
	case b.ActiveRaiseID != "" && u.activeRaise() == nil:
		return corrupt("bucket %q points at the raise %s, of which the ledger has no active record, so nobody would end it; set the limit to decide which one holds",
			b.Key, b.ActiveRaiseID)
	case b.Settings.MaxRecords > 0 && b.LeaseRecords >= b.Settings.MaxRecords:
		return Errorf(CodeBucketRecordLimit, "Bucket reached its retained lease record limit.").
			WithDetails(map[string]any{"maxLeasesPerBucket": b.Settings.MaxRecords})
	case r.Tokens > b.available():
		return budgetExceeded(b, r.Tokens)
	default:
		return nil
	}
}

// budgetExceeded tells of the end of the bucket's period, too, as there may be more
// from then on.
func budgetExceeded(b *Bucket, requested int64) *Error {
	details := map[string]any{"requestedTokens": requested, "availableTokens": b.available()}
	if !b.PeriodEnd.IsZero() {
		details["periodEndsAtMs"] = b.PeriodEnd.UnixMilli()
	}
	return Errorf(CodeBudgetExceeded, "Requested tokens exceed available capacity.").WithDetails(details)
}

// checkTTL refuses a lifetime that the bucket does not grant.
func (u *unit) checkTTL(ttl time.Duration) *Error {
	maximum := u.view.Bucket.Settings.MaxTTL
	switch {
	case ttl > maximum:
		return Errorf(CodeInvalidInput, "ttl exceeds the bucket's maximum.").WithDetails(map[string]any{
			"ttlMs": ttl.Milliseconds(), "maxTtlMs": maximum.Milliseconds(),
		})
	case u.now.Add(ttl).After(maxInstant):
		return Errorf(CodeInvalidInput, "Lease expiration would exceed the range of instants.")
	default:
		return nil
	}
}

func closedError(key string) *Error {
	return Errorf(CodeBucketClosed, "Bucket is closed: its TokenBucket was deleted. Leases that exist can still be settled.").
		WithDetails(map[string]any{"bucket": key})
}

func (r Commit) apply(u *unit) Result {
	b := u.view.Bucket
	if b == nil {
		return Result{Err: u.notFound()}
	}
	lease, err := u.lease(r.LeaseID, r.Holder)
	if err != nil {
		return Result{Err: err}
	}
	switch lease.State {
	case LeaseReserved:
		return r.settle(u, lease, lease.ReservedTokens)
	case LeaseCommitted:
		if *lease.ActualTokens != r.ActualTokens {
			return Result{Err: Errorf(CodeCommitConflict, "Lease was already committed with different actual usage.").
				WithDetails(map[string]any{"actualTokens": *lease.ActualTokens})}
		}
		return Result{Lease: lease}
	case LeaseExpired:
		if b.Settings.Settlement == SettlementRecordActual {
			// Its reservation went back when it expired.
			return r.settle(u, lease, 0)
		}
		u.noteRefused(lease, r.ActualTokens, ReasonLeaseExpired)
		return Result{Err: Errorf(CodeLeaseExpired, "Lease expired before it was committed.").
			WithDetails(map[string]any{"leaseId": r.LeaseID})}
	case LeaseReleased:
		return Result{Err: Errorf(CodeLeaseReleased, "Released lease cannot be committed.").
			WithDetails(map[string]any{"leaseId": r.LeaseID})}
	default:
		return Result{Err: corrupt("lease %s is in the unknown state %q", lease.ID, lease.State)}
	}
}

// settle books the actual figure. A holder may always commit up to what it
// reserved, also on a bucket that is over its limit; more only as far as the
// bucket has room, or whatever was spent, as the policy says. All that is counted in
// the period in which the lease was reserved. held is what the lease holds of it.
func (r Commit) settle(u *unit, lease *Lease, held int64) Result {
	a, found := u.accountOf(lease)
	if !found {
		return Result{Err: periodMissing(lease)}
	}
	otherReserved := *a.reserved - held
	maximum := max(a.limit-*a.used-otherReserved, lease.ReservedTokens)
	if u.view.Bucket.Settings.Settlement == SettlementRecordActual {
		maximum = MaxTokens - *a.used - otherReserved
	}
	if r.ActualTokens > maximum {
		u.noteRefused(lease, r.ActualTokens, ReasonExceedsBudget)
		return Result{Err: Errorf(CodeCommitExceedsBudget, "Actual usage cannot be committed without exceeding the bucket limit.").
			WithDetails(map[string]any{
				"actualTokens": r.ActualTokens, "maximumCommit": maximum, "reservedTokens": lease.ReservedTokens,
			})}
	}
	u.book(a, r.ActualTokens, -held)
	lease.Late = lease.State == LeaseExpired
	lease.State, lease.ActualTokens, lease.SettledAt = LeaseCommitted, pointer(r.ActualTokens), pointer(u.now)
	u.changeLease(lease)
	return Result{Lease: lease}
}

// noteRefused keeps the highest figure that a commit was refused: the tokens are
// spent, so they must stay visible. The bucket itself does not change, so a
// repeated figure changes nothing but the count. The audit tells of the first ones.
func (u *unit) noteRefused(lease *Lease, tokens int64, reason Reason) {
	if lease.RefusedTokens == nil || *lease.RefusedTokens < tokens {
		lease.RefusedTokens = pointer(tokens)
		if lease.RefusedCommits < maxRefusalsAudited {
			u.audit(AuditRow{
				Event: AuditCommitRefused, Outcome: OutcomeRefused, Reason: reason,
				LeaseID: lease.ID, Tokens: pointer(tokens), RaiseID: lease.RaiseID, ScopedKeyID: lease.ScopedKeyID,
				Actor: lease.Holder, PriorLimit: pointer(u.view.Bucket.Limit),
			})
		}
	}
	lease.RefusedCommits = min(lease.RefusedCommits+1, MaxTokens)
	u.dirtyLeases[lease] = true
	u.noted = true
}

// maxRefusalsAudited bounds the audit rows that one lease can lead to.
const maxRefusalsAudited = 10

// lease finds a lease that is the holder's to settle.
func (u *unit) lease(id, holder string) (*Lease, *Error) {
	lease := u.leaseByID[id]
	if lease == nil || lease.foreignTo(holder) {
		return nil, leaseNotFound(id)
	}
	return lease, nil
}

func leaseNotFound(id string) *Error {
	return Errorf(CodeLeaseNotFound, "Lease does not exist.").WithDetails(map[string]any{"leaseId": id})
}

func (r Release) apply(u *unit) Result {
	b := u.view.Bucket
	if b == nil {
		return Result{Err: u.notFound()}
	}
	lease, err := u.lease(r.LeaseID, r.Holder)
	if err != nil {
		return Result{Err: err}
	}
	switch lease.State {
	case LeaseCommitted:
		return Result{Err: Errorf(CodeLeaseCommitted, "Committed usage cannot be released.").
			WithDetails(map[string]any{"leaseId": r.LeaseID})}
	case LeaseReleased, LeaseExpired:
		return Result{Lease: lease}
	case LeaseReserved:
		a, found := u.accountOf(lease)
		if !found {
			return Result{Err: periodMissing(lease)}
		}
		u.book(a, 0, -lease.ReservedTokens)
		lease.State, lease.SettledAt = LeaseReleased, pointer(u.now)
		u.changeLease(lease)
		return Result{Lease: lease}
	default:
		return Result{Err: corrupt("lease %s is in the unknown state %q", lease.ID, lease.State)}
	}
}

func (r Extend) apply(u *unit) Result {
	b := u.view.Bucket
	if b == nil {
		return Result{Err: u.notFound()}
	}
	ttl := r.TTL
	if ttl == 0 {
		ttl = b.Settings.DefaultTTL
	}
	if err := u.checkTTL(ttl); err != nil {
		return Result{Err: err}
	}
	lease, err := u.lease(r.LeaseID, r.Holder)
	if err != nil {
		return Result{Err: err}
	}
	details := map[string]any{"leaseId": r.LeaseID}
	switch lease.State {
	case LeaseCommitted:
		return Result{Err: Errorf(CodeLeaseCommitted, "Committed lease cannot be extended.").WithDetails(details)}
	case LeaseReleased:
		return Result{Err: Errorf(CodeLeaseReleased, "Released lease cannot be extended.").WithDetails(details)}
	case LeaseExpired:
		return Result{Err: Errorf(CodeLeaseExpired, "Lease expired before it was extended; reserve anew.").WithDetails(details)}
	case LeaseReserved:
	default:
		return Result{Err: corrupt("lease %s is in the unknown state %q", lease.ID, lease.State)}
	}
	if b.ClosedAt != nil {
		return Result{Err: closedError(b.Key)}
	}
	if until := u.now.Add(ttl); until.After(lease.ExpiresAt) {
		lease.ExpiresAt = until
		u.changeLease(lease)
		if !u.newLeases[lease] {
			u.extended[lease] = true
		}
	}
	return Result{Lease: lease}
}

func (r ReapExpired) apply(u *unit) Result {
	if u.view.Bucket == nil {
		return Result{Err: u.notFound()}
	}
	return Result{}
}

func (r Inspect) apply(u *unit) Result {
	if u.view.Bucket == nil {
		return Result{Err: u.notFound()}
	}
	return Result{}
}

func (r Touch) apply(*unit) Result { return Result{} }
