package ledger

func (r OpenBucket) validate() error {
	if err := ValidateBucketKey(r.Key); err != nil {
		return err
	}
	if err := counter("limit", r.Limit); err != nil {
		return err
	}
	if r.Settings == (ReservationSettings{}) {
		return nil
	}
	return r.Settings.validate()
}

func (r SetLimit) validate() error {
	if err := ValidateBucketKey(r.Key); err != nil {
		return err
	}
	if err := counter("expectedLimit", r.ExpectedLimit); err != nil {
		return err
	}
	if err := counter("limit", r.Limit); err != nil {
		return err
	}
	if err := identifier("operationId", r.OperationID, MaxOperationIDLength); err != nil {
		return err
	}
	if IsRaiseOperation(r.OperationID) {
		return invalid("operationId", "operationId must not end in one of %q, which name the effects of a raise.", raiseOperationSuffixes)
	}
	return optionalIdentifier("actor", r.Actor, MaxActorLength)
}

func (r Reserve) validate() error {
	if err := ValidateBucketKey(r.Key); err != nil {
		return err
	}
	if err := identifier("requestKey", r.RequestKey, MaxRequestKeyLength); err != nil {
		return err
	}
	if err := boundedSecret("fingerprint", r.Fingerprint, MaxFingerprintLength); err != nil {
		return err
	}
	if err := positive("tokens", r.Tokens); err != nil {
		return err
	}
	if r.TTL != 0 {
		if err := milliseconds("ttlMs", r.TTL); err != nil {
			return err
		}
	}
	if r.FirstAttemptAt != nil {
		if err := instant("firstAttemptAt", *r.FirstAttemptAt); err != nil {
			return err
		}
	}
	return optionalIdentifier("holder", r.Holder, MaxActorLength)
}

func (r Purge) validate() error {
	if err := ValidateBucketKey(r.Key); err != nil {
		return err
	}
	if r.Limit < 1 || r.Limit > MaxPurge {
		return invalid("limit", "limit must be from 1 to %d.", MaxPurge)
	}
	return nil
}

func (r Commit) validate() error {
	if err := ValidateBucketKey(r.Key); err != nil {
		return err
	}
	if err := validateLeaseID(r.LeaseID); err != nil {
		return err
	}
	if err := counter("actualTokens", r.ActualTokens); err != nil {
		return err
	}
	return optionalIdentifier("holder", r.Holder, MaxActorLength)
}

func (r Release) validate() error {
	if err := ValidateBucketKey(r.Key); err != nil {
		return err
	}
	if err := validateLeaseID(r.LeaseID); err != nil {
		return err
	}
	return optionalIdentifier("holder", r.Holder, MaxActorLength)
}

func (r Extend) validate() error {
	if err := ValidateBucketKey(r.Key); err != nil {
		return err
	}
	if err := validateLeaseID(r.LeaseID); err != nil {
		return err
	}
	if r.TTL != 0 {
		if err := milliseconds("ttlMs", r.TTL); err != nil {
			return err
		}
	}
	return optionalIdentifier("holder", r.Holder, MaxActorLength)
}

func (r ReapExpired) validate() error { return ValidateBucketKey(r.Key) }
func (r Inspect) validate() error     { return ValidateBucketKey(r.Key) }
func (r Touch) validate() error       { return ValidateBucketKey(r.Key) }

func (o Owner) validate() error {
	for _, f := range []struct{ name, value string }{
		{"owner.cluster", o.Cluster}, {"owner.namespace", o.Namespace}, {"owner.name", o.Name}, {"owner.uid", o.UID},
	} {
		if err := identifier(f.name, f.value, MaxNameLength); err != nil {
			return err
		}
	}
	return instant("owner.createdAt", o.CreatedAt)
}

func (r ApplyDeclared) validate() error {
	if err := ValidateBucketKey(r.Key); err != nil {
		return err
	}
	if err := r.Owner.validate(); err != nil {
		return err
	}
	if r.Generation < 1 {
		return invalid("generation", "generation must be at least 1.")
	}
	d := r.Declaration
	if err := counter("limit", d.Limit); err != nil {
		return err
	}
	if err := identifier("tenantID", d.TenantID, MaxIdentifierLength); err != nil {
		return err
	}
	if err := optionalIdentifier("scopedKeyID", d.ScopedKeyID, MaxIdentifierLength); err != nil {
		return err
	}
	if d.ConflictPolicy != ConflictReview && d.ConflictPolicy != ConflictOverwrite {
		return invalid("conflictPolicy", "conflictPolicy must be Review or Overwrite, not %q.", d.ConflictPolicy)
	}
	if err := d.Settings.validate(); err != nil {
		return err
	}
	if err := d.Raises.validate(); err != nil {
		return err
	}
	if err := d.Period.validate(); err != nil {
		return err
	}
	return optionalIdentifier("actor", r.Actor, MaxActorLength)
}

func (r CloseBucket) validate() error {
	if err := ValidateBucketKey(r.Key); err != nil {
		return err
	}
	if err := r.Owner.validate(); err != nil {
		return err
	}
	if r.Deletion != DeletionRetain && r.Deletion != DeletionDelete {
		return invalid("deletionPolicy", "deletionPolicy must be Retain or Delete, not %q.", r.Deletion)
	}
	return optionalIdentifier("actor", r.Actor, MaxActorLength)
}

func (r StoreRaise) validate() error {
	if err := ValidateBucketKey(r.Key); err != nil {
		return err
	}
	if err := identifier("bucketUID", r.BucketUID, MaxNameLength); err != nil {
		return err
	}
	return r.Grant.validate()
}

func (r RevokeRaise) validate() error {
	if err := ValidateBucketKey(r.Key); err != nil {
		return err
	}
	if err := identifier("uid", r.UID, MaxNameLength); err != nil {
		return err
	}
	return optionalIdentifier("actor", r.Actor, MaxActorLength)
}
