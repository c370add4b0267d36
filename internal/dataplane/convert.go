package dataplane

import (
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/token-lease/operator/internal/ledger"
	v1 "github.com/token-lease/operator/proto/tokenlease/v1alpha1"
)

const (
	maxBucketName   = 63 // a TokenBucket's name, which is shorter than Kubernetes permits
	defaultPageSize = 100
	maxPageSize     = 500
)

func checkBucket(bucket *v1.BucketName) error {
	if bucket == nil {
		return invalid("bucket", "must name a TokenBucket by namespace and name.")
	}
	if len(validation.IsDNS1123Label(bucket.GetNamespace())) > 0 {
		return invalid("bucket.namespace", "must be the name of a namespace: at most 63 lower-case letters, digits and '-'.")
	}
	if len(bucket.GetName()) > maxBucketName || len(validation.IsDNS1123Subdomain(bucket.GetName())) > 0 {
		return invalid("bucket.name", "must be the name of a TokenBucket: at most 63 lower-case letters, digits, '-' and '.'.")
	}
	return nil
}

// readTTL reads a duration that may be absent, which is 0 to the ledger.
func readTTL(ttl *durationpb.Duration) (time.Duration, error) {
	if ttl == nil {
		return 0, nil
	}
	// AsDuration clamps what does not fit; nothing may be clamped.
	d := ttl.AsDuration()
	if ttl.CheckValid() != nil || d <= 0 || d%time.Millisecond != 0 || d/time.Second != time.Duration(ttl.GetSeconds()) {
		return 0, invalid("ttl", "must be a positive number of whole milliseconds.")
	}
	return d, nil
}

// readInstant reads an instant that may be absent.
func readInstant(field string, t *timestamppb.Timestamp) (*time.Time, error) {
	if t == nil {
		return nil, nil
	}
	instant := t.AsTime().Truncate(time.Millisecond)
	if t.CheckValid() != nil || !instantInRange(instant) {
		return nil, invalid(field, "must lie between 1970 and 9999.")
	}
	return &instant, nil
}

func readPageSize(size int32) (int, error) {
	switch {
	case size == 0:
		return defaultPageSize, nil
	case size < 0 || size > maxPageSize:
		return 0, invalid("pageSize", "must be from 1 to %d, or 0 for %d.", maxPageSize, defaultPageSize)
	default:
		return int(size), nil
	}
}

func writeInstant(t *time.Time) *timestamppb.Timestamp {
	if t == nil {
		return nil
	}
	return timestamppb.New(*t)
}

func writeState(state ledger.LeaseState) v1.LeaseState {
	switch state {
	case ledger.LeaseReserved:
		return v1.LeaseState_LEASE_STATE_RESERVED
	case ledger.LeaseCommitted:
		return v1.LeaseState_LEASE_STATE_COMMITTED
	case ledger.LeaseReleased:
		return v1.LeaseState_LEASE_STATE_RELEASED
	case ledger.LeaseExpired:
		return v1.LeaseState_LEASE_STATE_EXPIRED
	default:
		return v1.LeaseState_LEASE_STATE_UNSPECIFIED
	}
}

func writeLease(l *ledger.Lease) *v1.Lease {
	return &v1.Lease{
		Id: l.ID, State: writeState(l.State), ReservedTokens: l.ReservedTokens, ActualTokens: l.ActualTokens,
		CreatedAt: timestamppb.New(l.CreatedAt), ExpiresAt: timestamppb.New(l.ExpiresAt), SettledAt: writeInstant(l.SettledAt),
		Holder: l.Holder, RefusedTokens: l.RefusedTokens, Late: l.Late,
		Ttl: durationpb.New(l.TTL),
	}
}

func writeBucket(name *v1.BucketName, s *ledger.Snapshot) *v1.Bucket {
	b := &v1.Bucket{
		Name: name, LimitTokens: s.Limit, UsedTokens: s.UsedTokens, ReservedTokens: s.ReservedTokens,
		AvailableTokens: s.AvailableTokens, OverLimitTokens: s.OverLimitTokens,
		TenantId: s.TenantID, ScopedKeyId: s.ScopedKeyID, Closed: s.Closed, Revision: s.Revision,
	}
	if r := s.ActiveRaise; r != nil {
		b.ActiveRaise = &v1.Raise{Name: r.Name, TemporaryLimitTokens: r.TemporaryLimit, ExpiresAt: timestamppb.New(r.ExpiresAt)}
	}
	if p := s.CurrentPeriod; p != nil {
		b.Period = &v1.Period{StartedAt: timestamppb.New(p.StartedAt), EndsAt: timestamppb.New(p.EndsAt)}
	}
	return b
}

func writeUsage(x *ledger.Usage) *v1.Usage {
	u := &v1.Usage{
		Hour: timestamppb.New(x.Hour), TenantId: x.TenantID, ScopedKeyId: x.ScopedKeyID, RaiseId: x.RaiseID, Late: x.Late,
		UsedTokens: x.UsedTokens, CommittedLeases: x.Committed, ReleasedLeases: x.Released, ExpiredLeases: x.Expired,
	}
	if !x.PeriodStart.IsZero() {
		u.PeriodStartedAt = timestamppb.New(x.PeriodStart)
	}
	return u
}

func writeAudit(r *ledger.AuditRow) *v1.AuditRow {
	return &v1.AuditRow{
		Sequence: r.Sequence, Event: string(r.Event), Outcome: string(r.Outcome), Reason: string(r.Reason),
		OperationId: r.OperationID, RaiseId: r.RaiseID, TenantId: r.TenantID,
		ScopedKeyId: r.ScopedKeyID, BucketScopedKeyId: r.BucketScopedKeyID, ApprovalId: r.ApprovalID,
		Actor: r.Actor, Worker: r.Worker, Trigger: r.Trigger,
		RequestedLimitTokens: r.RequestedLimit, PriorLimitTokens: r.PriorLimit,
		EffectiveLimitTokens: r.EffectiveLimit, DeclaredLimitTokens: r.DeclaredLimit,
		UsedTokens: r.UsedTokens, ReservedTokens: r.ReservedTokens,
		DueAt: writeInstant(r.DueAt), At: timestamppb.New(r.At), LeaseId: r.LeaseID, Tokens: r.Tokens,
	}
}
