package controller

import (
	"fmt"
	"regexp"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/internal/ledger"
)

// leaseInput is what is gathered for a decision about a TemporaryLimitLease.
type leaseInput struct {
	lease *v1alpha1.TemporaryLimitLease
	// unreadable says what of the lease's spec cannot be read; "" when all can.
	unreadable string
	// record is the ledger's; nil when it has none for this object.
	record *ledger.Raise
	// bucket is the TokenBucket that the lease refers to; nil when there is none.
	bucket *v1alpha1.TokenBucket
	// bucketUnreadable: its spec cannot be read.
	bucketUnreadable bool
	// trusted: the namespace may use keys outside "<namespace>/".
	trusted bool
	cluster string
	// guard is how the guard of the names in annotations stands, looked for where
	// asksWho says so.
	guard guardStanding
	// actorOptional: the names are believed without it.
	actorOptional bool
	// maxDuration bounds every raise.
	maxDuration time.Duration
	// approvals is what the approval ID of a new raise must match; nil takes any.
	approvals *regexp.Regexp
}

// asksWho reports whether a pass goes by a name in the lease's annotations, so that
// it must know whether that is true.
func asksWho(in leaseInput) bool {
	switch {
	case in.actorOptional || in.unreadable != "" || !in.lease.DeletionTimestamp.IsZero():
		return false
	case in.record == nil:
		return usable(in) && !isSettled(in.lease)
	case in.record.State.Ended():
		return wantsAcknowledged(in)
	default:
		return in.lease.Spec.ExpiresAt.Time.Before(in.record.ExpiresAt)
	}
}

// leasePlan is what a pass over a TemporaryLimitLease does: at most one of its
// fields is set, and none when there is nothing to do or to say. Only an object
// that cannot be read may have both a record to mirror and something to wait for.
type leasePlan struct {
	store  *ledger.StoreRaise
	revoke *ledger.RevokeRaise
	// acknowledge: somebody has looked at a raise that asks for review.
	acknowledge *ledger.AcknowledgeReview
	// mirror: the record says it all.
	mirror *ledger.Raise
	wait   *failure
	// letGo: an object that is being deleted has nothing in the ledger to end.
	letGo bool
}

// decideLease is a pure function of what was gathered. An object that is being
// deleted never stores anything.
func decideLease(in leaseInput) leasePlan {
	ended := in.record != nil && in.record.State.Ended()
	switch {
	case !in.lease.DeletionTimestamp.IsZero():
		return decideDeletedLease(in)
	case ended && acknowledged(in):
		return leasePlan{acknowledge: &ledger.AcknowledgeReview{
			Key: in.record.BucketKey, UID: string(in.lease.UID), Actor: nameIn(in.lease, v1alpha1.AcknowledgedByAnnotation),
		}}
	case ended:
		return leasePlan{mirror: in.record}
	case in.record == nil && isSettled(in.lease):
		return leasePlan{}
	case in.unreadable != "":
		return leasePlan{mirror: in.record, wait: undecodable(in.unreadable)}
	case in.record != nil && (!usable(in) || in.record.BucketKey != bucketKeyOf(in.bucket)):
		// A TokenBucket that came back with another key does not get the raise too:
		// one object asks for one raise, under one approval.
		return leasePlan{mirror: in.record}
	case in.record == nil && usable(in) && !in.actorOptional && in.guard.doubt(in.lease.CreationTimestamp) != "":
		return leasePlan{wait: actorUnknownFailure(in)}
	case in.record == nil && usable(in) && in.approvals != nil && !in.approvals.MatchString(string(in.lease.Spec.ApprovalID)):
		return leasePlan{wait: &failure{
			reason: v1alpha1.ReasonPolicyRefused, stalled: true, after: resyncInterval,
			message: fmt.Sprintf("The approvalID %q is not of the form %s that the manager's --approval-pattern asks for. Create another lease with one that is.",
				in.lease.Spec.ApprovalID, in.approvals),
		}}
	case usable(in):
		return leasePlan{store: storeRequest(in)}
	default:
		return leasePlan{wait: waitForBucket(in)}
	}
}

func decideDeletedLease(in leaseInput) leasePlan {
	switch {
	case !controllerutil.ContainsFinalizer(in.lease, v1alpha1.LedgerFinalizer):
		return leasePlan{}
	case in.record == nil || in.record.CurrentUID != string(in.lease.UID):
		return leasePlan{letGo: true}
	case in.record.State.Ended():
		return leasePlan{mirror: in.record}
	default:
		return leasePlan{revoke: &ledger.RevokeRaise{Key: in.record.BucketKey, UID: string(in.lease.UID), Actor: actorUnknown}}
	}
}

// usable reports whether raises on the TokenBucket can be asked for.
func usable(in leaseInput) bool {
	return in.bucket != nil && in.bucket.DeletionTimestamp.IsZero() && !in.bucketUnreadable && keyAllowed(in.bucket, in.trusted)
}

// waitForBucket names what a lease waits for. Watches wake it; it also looks by
// itself now and then.
func waitForBucket(in leaseInput) *failure {
	f := &failure{reason: v1alpha1.ReasonBucketNotFound, after: resyncInterval}
	name := in.lease.Spec.BucketRef.Name
	switch {
	case in.bucket == nil:
		f.message = "There is no TokenBucket " + name + " in this namespace yet; the raise waits for it."
	case !in.bucket.DeletionTimestamp.IsZero():
		f.message = "TokenBucket " + name + " is being deleted; the raise waits for a new one."
	case in.bucketUnreadable:
		f.reason = v1alpha1.ReasonBucketNotReady
		f.message = "TokenBucket " + name + " cannot be read; its conditions say what to change. The raise waits for it."
	default:
		f.reason = v1alpha1.ReasonBucketNotReady
		f.message = "TokenBucket " + name + " is not in the ledger; its conditions say why."
	}
	return f
}

// wantsAcknowledged reports whether the lease says that somebody has looked at it.
func wantsAcknowledged(in leaseInput) bool {
	return in.record.ReviewRequired && isCurrent(in.record, in.lease) &&
		in.lease.Annotations[v1alpha1.AcknowledgedAnnotation] != ""
}

// acknowledged reports whether that is to be believed: without the guard anybody
// could have written it.
func acknowledged(in leaseInput) bool {
	return wantsAcknowledged(in) && (in.actorOptional || in.guard.inForce)
}

func actorUnknownFailure(in leaseInput) *failure {
	return &failure{
		reason: v1alpha1.ReasonActorUnknown, stalled: true, after: resyncInterval,
		message: "It is not known who asks for this raise: " + in.guard.doubt(in.lease.CreationTimestamp) +
			". Apply config/admission, then create the lease anew; or start the manager with --require-actor=false.",
	}
}

// shortenedBy is who moved the expiry. Making a raise shorter is never refused for
// want of a name.
func shortenedBy(in leaseInput) string {
	if !in.actorOptional && !in.guard.inForce {
		return actorUnknown
	}
	return nameIn(in.lease, v1alpha1.ShortenedByAnnotation)
}

func storeRequest(in leaseInput) *ledger.StoreRaise {
	spec := in.lease.Spec
	grant := ledger.Grant{
		UID: string(in.lease.UID), CreatedAt: in.lease.CreationTimestamp.Time,
		Cluster: in.cluster, Namespace: in.lease.Namespace, Name: in.lease.Name,
		TenantID: tenantOf(in.bucket), ScopedKeyID: string(spec.ScopedKeyID),
		NormalLimit: spec.NormalLimit, TemporaryLimit: spec.TemporaryLimit,
		ExpiresAt: spec.ExpiresAt.Time, ApprovalID: string(spec.ApprovalID),
		Actor: actorOf(in.lease), OnBehalfOf: claimIn(in.lease), Purpose: spec.Purpose, OnBaseChange: onBaseChangeOf(spec.OnBaseChange),
	}
	if spec.StartsAt != nil {
		grant.StartsAt = ptr.To(spec.StartsAt.Time)
	}
	return &ledger.StoreRaise{
		Key: bucketKeyOf(in.bucket), Grant: grant,
		BucketUID: string(in.bucket.UID), BucketGeneration: in.bucket.Generation,
		MaxDuration: in.maxDuration, ShortenedBy: shortenedBy(in),
	}
}

func onBaseChangeOf(p v1alpha1.BaseChangePolicy) ledger.OnBaseChange {
	if p == v1alpha1.BaseChangePolicyRebase {
		return ledger.BaseChangeRebase
	}
	return ledger.BaseChangeReview
}

// isSettled reports whether a lease is over as far as its object tells: the raise
// has ended, the status says so, and nothing holds the object.
func isSettled(lease *v1alpha1.TemporaryLimitLease) bool {
	return lease.DeletionTimestamp.IsZero() &&
		!controllerutil.ContainsFinalizer(lease, v1alpha1.LedgerFinalizer) &&
		lease.Status.ObservedGeneration == lease.Generation &&
		meta.IsStatusConditionTrue(lease.Status.Conditions, v1alpha1.ConditionEnded)
}

const (
	// wakeMargin lets an instant pass before it is looked for.
	wakeMargin = 50 * time.Millisecond
	// overdueDelay is for a ledger whose clock is behind this process's.
	overdueDelay = time.Second
	// longestWake bounds a sleep: the clocks may change, and nothing overflows.
	longestWake = 5 * time.Minute
)

// wakeAfter is when to look at a raise next because of its own instants. The
// ledger acts on them by itself; this only brings the status up to date.
func wakeAfter(r *ledger.Raise, now time.Time) time.Duration {
	due := r.ExpiresAt
	switch {
	case r.State.Ended():
		return 0
	case r.State == ledger.RaisePending && now.Before(r.StartsAt):
		due = r.StartsAt
	case r.State == ledger.RaisePending && r.MismatchSince != nil:
		if over := r.MismatchSince.Add(ledger.MismatchGrace); over.Before(due) {
			due = over
		}
	}
	if !now.Before(due) {
		return overdueDelay
	}
	return min(due.Sub(now), longestWake-wakeMargin) + wakeMargin
}
