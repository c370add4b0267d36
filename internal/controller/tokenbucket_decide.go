package controller

import (
	"fmt"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/internal/ledger"
)

// bucketPlan is what a pass over a TokenBucket does about the ledger: at most one
// of its fields is set, and none when there is nothing to do.
type bucketPlan struct {
	declare *ledger.ApplyDeclared
	close   *ledger.CloseBucket
	refuse  *failure
}

// decideBucket is a pure function of the object, of what of its spec cannot be
// read, and of what its namespace may do. An object that is being deleted never
// declares anything, nor does one that cannot be read.
func decideBucket(b *v1alpha1.TokenBucket, unreadable, cluster string, trusted bool) bucketPlan {
	switch {
	case !b.DeletionTimestamp.IsZero():
		if !controllerutil.ContainsFinalizer(b, v1alpha1.LedgerFinalizer) {
			return bucketPlan{}
		}
		return bucketPlan{close: closeRequest(b, unreadable, cluster)}
	case unreadable != "":
		return bucketPlan{refuse: undecodable(unreadable)}
	case !keyAllowed(b, trusted):
		return bucketPlan{refuse: &failure{
			reason: v1alpha1.ReasonKeyNotAllowed, stalled: true, after: resyncInterval,
			message: fmt.Sprintf("bucketKey must begin with %q, because this namespace is not trusted with other keys: create another TokenBucket, or start the manager with this namespace trusted.", b.Namespace+"/"),
		}}
	default:
		return bucketPlan{declare: declareRequest(b, cluster)}
	}
}

func declareRequest(b *v1alpha1.TokenBucket, cluster string) *ledger.ApplyDeclared {
	return &ledger.ApplyDeclared{
		Key: bucketKeyOf(b), Owner: ownerOf(b, cluster), Generation: b.Generation,
		Declaration: ledger.Declaration{
			Limit: b.Spec.Limit, TenantID: tenantOf(b), ScopedKeyID: string(b.Spec.ScopedKeyID),
			Settings:       settingsOf(&b.Spec),
			ConflictPolicy: conflictPolicyOf(b.Spec.ConflictPolicy),
			Raises:         raisePolicyOf(b.Spec.Raises),
			Period:         periodOf(b.Spec.Period),
		},
		ExpectExisting: wasDeclared(b),
		Actor:          actorOf(b),
	}
}

// saysItAll reports whether a snapshot makes a declaration needless: the bucket is
// this object's, holds all that its spec says, and there is no other hand's limit
// to overwrite. One that is older than what the status was made of says nothing.
func saysItAll(s *ledger.Snapshot, shown int64, r *ledger.ApplyDeclared) bool {
	d := r.Declaration
	return s != nil && s.Revision >= shown && !s.Closed &&
		s.Owner != nil && *s.Owner == (ledger.Owner{
		Cluster: r.Owner.Cluster, Namespace: r.Owner.Namespace, Name: r.Owner.Name,
		UID: r.Owner.UID, CreatedAt: s.Owner.CreatedAt,
	}) &&
		s.DeclaredGeneration == r.Generation && s.DeclaredLimit != nil && *s.DeclaredLimit == d.Limit &&
		s.TenantID == d.TenantID && s.ScopedKeyID == d.ScopedKeyID &&
		s.Settings == d.Settings && s.RaisePolicy == d.Raises && s.Period == d.Period &&
		(s.BaseLimit == d.Limit || d.ConflictPolicy == ledger.ConflictReview)
}

// closeRequest closes by owner, so that a key which is only guessed does no harm,
// and keeps the usage unless the spec says in so many words to remove it.
func closeRequest(b *v1alpha1.TokenBucket, unreadable, cluster string) *ledger.CloseBucket {
	deletion := ledger.DeletionRetain
	if b.Spec.DeletionPolicy == v1alpha1.DeletionPolicyDelete {
		deletion = ledger.DeletionDelete
	}
	return &ledger.CloseBucket{Key: knownKeyOf(b, unreadable), Owner: ownerOf(b, cluster), Deletion: deletion, Actor: actorUnknown}
}

// wasDeclared reports whether the ledger held this object's bucket before: the
// status is written by the operator alone, and declaredLimit only from the ledger.
func wasDeclared(b *v1alpha1.TokenBucket) bool {
	return b.Status.DeclaredLimit != nil && b.Status.BucketKey == bucketKeyOf(b)
}

func settingsOf(spec *v1alpha1.TokenBucketSpec) ledger.ReservationSettings {
	s, p := ledger.DefaultSettings(), spec.Reservations
	if p.DefaultTTLSeconds > 0 {
		s.DefaultTTL = time.Duration(p.DefaultTTLSeconds) * time.Second
	}
	if p.MaxTTLSeconds > 0 {
		s.MaxTTL = time.Duration(p.MaxTTLSeconds) * time.Second
	}
	s.MaxRecords = int64(p.MaxRecords)
	s.Retention = defaultRetention
	if p.RetentionDays > 0 {
		s.Retention = time.Duration(p.RetentionDays) * 24 * time.Hour
	}
	if spec.SettlementPolicy == v1alpha1.SettlementPolicyRecordActual {
		s.Settlement = ledger.SettlementRecordActual
	}
	return s
}

// defaultRetention is that of the CRD, for objects from before it had one.
const defaultRetention = 30 * 24 * time.Hour

func periodOf(p *v1alpha1.Period) ledger.PeriodSpec {
	if p == nil {
		return ledger.PeriodSpec{}
	}
	return ledger.PeriodSpec{Every: ledger.Cadence(p.Every), TimeZone: p.TimeZone}
}

func conflictPolicyOf(p v1alpha1.ConflictPolicy) ledger.ConflictPolicy {
	if p == v1alpha1.ConflictPolicyOverwrite {
		return ledger.ConflictOverwrite
	}
	return ledger.ConflictReview
}

// raisePolicyOf refuses raises unless the policy allows them in so many words.
func raisePolicyOf(p *v1alpha1.RaisePolicy) ledger.RaisePolicy {
	if p == nil {
		return ledger.RaisePolicy{Mode: ledger.ModeDisabled}
	}
	policy := ledger.RaisePolicy{
		Mode: ledger.ModeDisabled, MaxLimit: p.MaxLimit, MaxDuration: time.Duration(p.MaxDurationSeconds) * time.Second,
	}
	switch p.Mode {
	case v1alpha1.RaiseModeEnforce:
		policy.Mode = ledger.ModeEnforce
	case v1alpha1.RaiseModeObserveOnly:
		policy.Mode = ledger.ModeObserveOnly
	case v1alpha1.RaiseModeDisabled:
	}
	return policy
}

// boundedPolicy keeps the policy within the bound of all raises. It stands on the
// bucket's row, so that the ledger goes by it on every replica, also when a raise
// starts.
func boundedPolicy(p ledger.RaisePolicy, longest time.Duration) ledger.RaisePolicy {
	p.MaxDuration = min(p.MaxDuration, longest)
	return p
}
