package memory

import "github.com/token-lease/operator/internal/ledger"

// OverrideLimit writes a bucket's limit without the ledger, as another hand would
// do with plain SQL, and does what the database's trigger then does: the bucket
// points at no raise any more, is due at once, and its audit says so. Tests use
// it.
func (s *Store) OverrideLimit(key string, limit int64) error {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	before := s.rows.buckets[key]
	if before == nil {
		return violation("bucket %q does not exist", key)
	}
	now := s.now()
	after := before.Clone()
	after.Limit = limit
	after.ActiveRaiseID = ""
	after.LimitEpoch++
	after.Revision++
	after.AuditSequence++
	after.NextTransitionAt = now
	if now.After(after.UpdatedAt) {
		after.UpdatedAt = now
	}
	row := ledger.AuditRow{
		BucketKey: key, Sequence: after.AuditSequence,
		Event: ledger.AuditLimitTaken, Outcome: ledger.OutcomeApplied, Reason: ledger.ReasonLimitChanged,
		RaiseID: before.ActiveRaiseID, TenantID: after.TenantID, BucketScopedKeyID: after.ScopedKeyID,
		Actor: "another hand", Worker: s.worker, Trigger: "sql",
		RequestedLimit: &limit, PriorLimit: &before.Limit, EffectiveLimit: &limit,
		DeclaredLimit: after.DeclaredLimit,
		UsedTokens:    after.UsedTokens, ReservedTokens: after.ReservedTokens,
		LimitEpoch: after.LimitEpoch, At: after.UpdatedAt,
	}
	if raise := s.rows.raises[key][before.ActiveRaiseID]; raise != nil {
		row.RaiseVersion, row.ScopedKeyID, row.ApprovalID = raise.Version, raise.ScopedKeyID, raise.ApprovalID
	}
	if after.Owner != nil {
		row.Cluster, row.Namespace, row.OwnerName = after.Owner.Cluster, after.Owner.Namespace, after.Owner.Name
	}
	s.rows.buckets[key] = after
	s.rows.audit[key] = append(s.rows.audit[key], cloneAudit(row))
	return nil
}

// DropBucket removes a bucket's row, its leases, rollups, periods and operations without the
// ledger: raises, approvals and audit stay. Tests use it.
func (s *Store) DropBucket(key string) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	delete(s.rows.buckets, key)
	delete(s.rows.leases, key)
	delete(s.rows.requests, key)
	delete(s.rows.periods, key)
	delete(s.rows.rollups, key)
	delete(s.rows.operations, key)
}
