package memory

import (
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

// violation reports effects that the PostgreSQL store's constraints would refuse.
func violation(format string, args ...any) *ledger.Error {
	return ledger.Errorf(ledger.CodeStoreContractViolation, format, args...)
}

func checkBucket(b *ledger.Bucket, clock time.Time) *ledger.Error {
	switch {
	case !tokens(b.Limit), !tokens(b.UsedTokens), !tokens(b.ReservedTokens), !tokens(b.UsedTokens + b.ReservedTokens):
		return violation("bucket %q holds limit %d, used %d, reserved %d", b.Key, b.Limit, b.UsedTokens, b.ReservedTokens)
	case b.DeclaredLimit != nil && !tokens(*b.DeclaredLimit):
		return violation("bucket %q declares the limit %d", b.Key, *b.DeclaredLimit)
	case b.Owner == nil && b.DeclaredLimit != nil:
		return violation("bucket %q has a declared limit without an owner", b.Key)
	case b.LimitEpoch < 0 || b.LeaseRecords < 0 || b.AuditSequence < 0 || b.Revision < 1:
		return violation("bucket %q counts below zero", b.Key)
	case b.UpdatedAt.Before(b.CreatedAt):
		return violation("bucket %q was updated before it was created", b.Key)
	case b.Settings.DefaultTTL <= 0 || b.Settings.DefaultTTL > b.Settings.MaxTTL || b.Settings.MaxRecords < 0:
		return violation("bucket %q has settings out of range", b.Key)
	case !b.PeriodEnd.IsZero() && (!b.PeriodEnd.After(b.PeriodStart) || b.NextTransitionAt.After(b.PeriodEnd)):
		return violation("bucket %q does not wake at the end of its period, %s", b.Key, b.PeriodEnd)
	case !b.NextTransitionAt.IsZero() && !b.NextTransitionAt.After(clock):
		return violation("bucket %q is left with something due at %s", b.Key, b.NextTransitionAt)
	default:
		return nil
	}
}

// checkBucketUpdate compares a row with the one that it replaces. The limit is
// written exactly when the effects say so, and each writing has its epoch.
func checkBucketUpdate(before, after *ledger.Bucket, limitWritten bool) *ledger.Error {
	switch {
	case limitWritten && after.LimitEpoch <= before.LimitEpoch:
		return violation("bucket %q writes its limit without a new epoch", after.Key)
	case !limitWritten && (after.LimitEpoch != before.LimitEpoch || after.Limit != before.Limit):
		return violation("bucket %q changes its limit without naming it", after.Key)
	case after.Revision < before.Revision || after.UpdatedAt.Before(before.UpdatedAt):
		return violation("bucket %q goes back from revision %d to %d", after.Key, before.Revision, after.Revision)
	case after.AuditSequence < before.AuditSequence || !after.CreatedAt.Equal(before.CreatedAt):
		return violation("bucket %q changes its history", after.Key)
	default:
		return nil
	}
}

func checkLease(key string, l *ledger.Lease) *ledger.Error {
	settled, committed := l.SettledAt != nil, l.ActualTokens != nil
	consistent := false
	switch l.State {
	case ledger.LeaseReserved:
		consistent = !settled && !committed
	case ledger.LeaseCommitted:
		consistent = settled && committed && tokens(*l.ActualTokens) && l.SettledAt.Before(l.ExpiresAt) != l.Late
	case ledger.LeaseReleased:
		consistent = settled && !committed && l.SettledAt.Before(l.ExpiresAt)
	case ledger.LeaseExpired:
		consistent = settled && !committed && !l.SettledAt.Before(l.ExpiresAt)
	}
	switch {
	case !consistent:
		return violation("lease %q is %s without the fields of that state", l.ID, l.State)
	case l.BucketKey != key || l.ID == "" || l.RequestHash == (ledger.Hash{}) || l.FingerprintHash == (ledger.Hash{}):
		return violation("lease %q is not named as it should be", l.ID)
	case l.ReservedTokens < 1 || !tokens(l.ReservedTokens):
		return violation("lease %q reserves %d tokens", l.ID, l.ReservedTokens)
	case l.TTL <= 0 || l.ExpiresAt.Before(l.CreatedAt.Add(l.TTL)):
		return violation("lease %q expires before its TTL is over", l.ID)
	case l.Late && l.State != ledger.LeaseCommitted:
		return violation("lease %q is late without being committed", l.ID)
	case settled && l.SettledAt.Before(l.CreatedAt):
		return violation("lease %q was settled before it was made", l.ID)
	case (l.RefusedTokens == nil) != (l.RefusedCommits == 0) || l.RefusedCommits < 0:
		return violation("lease %q counts %d refused commits", l.ID, l.RefusedCommits)
	default:
		return nil
	}
}

func checkRaise(key string, r *ledger.Raise) *ledger.Error {
	ran, ended := r.ActivatedAt != nil, r.EndedAt != nil
	consistent := false
	switch r.State {
	case ledger.RaisePending:
		consistent = !ran && !ended
	case ledger.RaiseActive, ledger.RaiseRestoring:
		consistent = ran && !ended
	case ledger.RaiseRestored:
		consistent = ran && ended
	case ledger.RaiseFailed:
		consistent = ended
	}
	switch {
	case !consistent:
		return violation("raise %q is %s without the fields of that state", r.ID, r.State)
	case ran != (r.AppliedLimit != nil) || ran != (r.RestoreTo != nil) || ran != (r.Epoch > 0):
		return violation("raise %q does not know how to end", r.ID)
	case r.BucketKey != key || r.ID == "" || r.CurrentUID == "" || r.GrantHash == "":
		return violation("raise %q is not named as it should be", r.ID)
	case !tokens(r.NormalLimit) || !tokens(r.TemporaryLimit) || r.TemporaryLimit <= r.NormalLimit:
		return violation("raise %q goes from %d to %d", r.ID, r.NormalLimit, r.TemporaryLimit)
	case r.ExpiresAt.Before(r.StartsAt):
		return violation("raise %q ends before it starts", r.ID)
	case r.Version < 1:
		return violation("raise %q has version %d", r.ID, r.Version)
	default:
		return nil
	}
}

// checkRaisesOfBucket holds what is unique among a bucket's raises: the object
// that stands for one, and being active.
func checkRaisesOfBucket(key string, raises map[string]*ledger.Raise) *ledger.Error {
	active := 0
	standsFor := map[[2]string]string{}
	for id, r := range raises {
		if r.State == ledger.RaiseActive || r.State == ledger.RaiseRestoring {
			active++
		}
		object := [2]string{r.Cluster, r.CurrentUID}
		if other, taken := standsFor[object]; taken {
			return violation("raises %q and %q of bucket %q have one object", id, other, key)
		}
		standsFor[object] = id
	}
	if active > 1 {
		return violation("bucket %q has %d active raises", key, active)
	}
	return nil
}

func checkAudit(key string, last int64, row ledger.AuditRow) *ledger.Error {
	switch {
	case row.BucketKey != key || row.Sequence != last+1:
		return violation("audit row %d of bucket %q follows row %d of %q", row.Sequence, row.BucketKey, last, key)
	case row.Event == "" || row.Outcome == "" || row.Worker == "" || row.Trigger == "" || row.At.IsZero():
		return violation("audit row %d of bucket %q does not say who did what when", row.Sequence, key)
	default:
		return nil
	}
}

func tokens(v int64) bool { return v >= 0 && v <= ledger.MaxTokens }
