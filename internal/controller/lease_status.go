package controller

import (
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/internal/ledger"
)

// leaseStatus is the status of a TemporaryLimitLease after a pass that found the
// ledger's record, or failed, or both.
func leaseStatus(lease *v1alpha1.TemporaryLimitLease, record *ledger.Raise, failed *failure, now time.Time) v1alpha1.TemporaryLimitLeaseStatus {
	status := *lease.Status.DeepCopy()
	c := conditions{list: &status.Conditions, generation: lease.Generation, now: now}
	if record != nil {
		showRecord(&status, record)
		showRaise(c, record)
	}
	switch {
	case failed == nil:
		status.ObservedGeneration = lease.Generation
		showProgress(c, record)
	case failed.unknown:
		c.failed(failed)
		c.complete(failed.reason, v1alpha1.ConditionActive, v1alpha1.ConditionRestored,
			v1alpha1.ConditionEnded, v1alpha1.ConditionReviewRequired)
		if status.State == "" {
			status.State = v1alpha1.RaiseStatePending
		}
	default:
		status.ObservedGeneration = lease.Generation
		c.failed(failed)
		if record == nil {
			showNothingStored(&status, c, lease, failed)
		}
	}
	return status
}

// showNothingStored is for a raise that the ledger does not know: only the object
// says that it is pending.
func showNothingStored(status *v1alpha1.TemporaryLimitLeaseStatus, c conditions, lease *v1alpha1.TemporaryLimitLease, f *failure) {
	*status = v1alpha1.TemporaryLimitLeaseStatus{
		Conditions: status.Conditions, ObservedGeneration: status.ObservedGeneration,
		State: v1alpha1.RaiseStatePending,
	}
	if f.reason != v1alpha1.ReasonActorUnknown {
		status.RequestedBy = actorOf(lease)
	}
	for _, kind := range []string{v1alpha1.ConditionActive, v1alpha1.ConditionRestored, v1alpha1.ConditionEnded} {
		c.set(kind, metav1.ConditionFalse, f.reason, "The raise is not stored in the ledger.")
	}
	c.set(v1alpha1.ConditionReviewRequired, metav1.ConditionFalse, v1alpha1.ReasonNoReviewNeeded, "")
}

func showRecord(status *v1alpha1.TemporaryLimitLeaseStatus, r *ledger.Raise) {
	status.State = stateOf(r.State)
	status.RequestedBy = r.Actor
	status.BucketKey = r.BucketKey
	status.TenantID = v1alpha1.Identifier(r.TenantID)
	status.ObservedLimit = r.ObservedLimit
	status.ActivatedAt = micro(r.ActivatedAt)
	status.RestoredAt, status.RestoreLagMilliseconds, status.Operations = nil, nil, nil
	if r.Ran() {
		status.Operations = &v1alpha1.RaiseOperations{Activate: r.ActivateOperation()}
	}
	if r.State != ledger.RaiseRestored {
		return
	}
	status.RestoredAt = micro(r.EndedAt)
	status.Operations.Restore = r.RestoreOperation()
	if r.Reason == ledger.ReasonRevoked {
		status.Operations.Restore = r.RevokeOperation()
	}
	if r.Reason == ledger.ReasonExpired {
		status.RestoreLagMilliseconds = ptr.To(max(0, r.EndedAt.Sub(r.ExpiresAt).Milliseconds()))
	}
}

func stateOf(s ledger.RaiseState) v1alpha1.RaiseState {
	switch s {
	case ledger.RaiseActive:
		return v1alpha1.RaiseStateActive
	case ledger.RaiseRestoring:
		return v1alpha1.RaiseStateRestoring
	case ledger.RaiseRestored:
		return v1alpha1.RaiseStateRestored
	case ledger.RaiseFailed:
		return v1alpha1.RaiseStateFailed
	default:
		return v1alpha1.RaiseStatePending
	}
}

func micro(t *time.Time) *metav1.MicroTime {
	if t == nil {
		return nil
	}
	return ptr.To(metav1.NewMicroTime(t.UTC()))
}

// showRaise sets the conditions that tell where the raise stands.
func showRaise(c conditions, r *ledger.Raise) {
	reason, message := reasonOf(r), explain(r)
	c.truth(v1alpha1.ConditionActive, r.State == ledger.RaiseActive, reason, message)
	ended := r.State.Ended()
	if ended {
		c.truth(v1alpha1.ConditionRestored, r.State == ledger.RaiseRestored, reason, message)
	} else {
		c.set(v1alpha1.ConditionRestored, metav1.ConditionFalse, v1alpha1.ReasonNotEnded, "")
	}
	if ended {
		c.set(v1alpha1.ConditionEnded, metav1.ConditionTrue, reason, message)
	} else {
		c.set(v1alpha1.ConditionEnded, metav1.ConditionFalse, v1alpha1.ReasonNotEnded, "")
	}
	switch {
	case r.ReviewRequired:
		c.set(v1alpha1.ConditionReviewRequired, metav1.ConditionTrue, reason, message)
	case r.Reviewed():
		c.set(v1alpha1.ConditionReviewRequired, metav1.ConditionFalse, v1alpha1.ReasonAcknowledged, message)
	default:
		c.set(v1alpha1.ConditionReviewRequired, metav1.ConditionFalse, v1alpha1.ReasonNoReviewNeeded, "")
	}
}

// showProgress sets the conditions that kstatus reads: a raise is where its spec
// wants it once it is stored, unless it ended without having run.
func showProgress(c conditions, r *ledger.Raise) {
	if r.State == ledger.RaiseFailed && !r.Ran() {
		c.failed(&failure{reason: reasonOf(r), message: explain(r), stalled: true})
		return
	}
	c.settled(reasonOf(r), explain(r))
}

// reasonOf is the one word for where a raise stands.
func reasonOf(r *ledger.Raise) string {
	switch {
	case r.State == ledger.RaiseActive:
		return v1alpha1.ReasonActive
	case r.State == ledger.RaiseRestored && (r.Reason == ledger.ReasonExpired || r.Reason == ledger.ReasonNone):
		return v1alpha1.ReasonRestored
	case r.Reason == ledger.ReasonNone:
		return v1alpha1.ReasonPending
	default:
		return string(r.Reason)
	}
}

// explain says where a raise stands, and what to change where something is to be
// changed. The text depends on the record alone.
func explain(r *ledger.Raise) string {
	observed := "unknown"
	if r.ObservedLimit != nil {
		observed = fmt.Sprint(*r.ObservedLimit)
	}
	switch {
	case r.State == ledger.RaiseActive:
		return fmt.Sprintf("The limit is raised to %d until %s.", ptr.Deref(r.AppliedLimit, r.TemporaryLimit), instantText(r.ExpiresAt))
	case r.State == ledger.RaiseRestored:
		return fmt.Sprintf("The raise ended (%s) and the limit is back at %d.", r.Reason, ptr.Deref(r.RestoreTo, r.NormalLimit))
	case r.State == ledger.RaisePending:
		return explainPending(r, observed)
	case r.Reviewed():
		return fmt.Sprintf("Somebody else changed the limit during the raise; it was left at %s. The review was acknowledged; by whom is in the audit.", observed)
	case r.Ran() && r.Reason == ledger.ReasonLimitChanged:
		return fmt.Sprintf("Somebody else changed the limit during the raise; it was left at %s and needs a review: write the annotation "+v1alpha1.AcknowledgedAnnotation+" once somebody has looked at it.", observed)
	}
	switch r.Reason {
	case ledger.ReasonLimitChanged:
		return fmt.Sprintf("The raise did not start: it expects the limit %d and found %s. Create another lease with the normalLimit that holds.", r.NormalLimit, observed)
	case ledger.ReasonWindowMissed:
		return "The time from start to expiry passed without a raise. Create another lease with a later expiresAt."
	case ledger.ReasonRevoked:
		return "The raise was revoked, because its lease was deleted. Create another lease with a new approvalID."
	case ledger.ReasonBucketClosed:
		return "The raise ended, because its bucket was closed."
	case ledger.ReasonApprovalAlreadyUsed:
		return fmt.Sprintf("The approval %s was spent by another raise of this tenant. Create another lease with a new approvalID.", r.ApprovalID)
	case ledger.ReasonObserveOnly:
		return "The bucket's raises.mode is ObserveOnly: what the raise would have done is in the audit, and no limit was changed."
	case ledger.ReasonRaisesDisabled:
		return "The bucket accepts no raises. Set raises on the TokenBucket with mode Enforce, then create another lease."
	case ledger.ReasonPolicyRefused:
		return "The raise is above the bucket's raises.maxLimit, or longer than its raises.maxDurationSeconds or than the manager's --max-raise-duration. Create another lease within them."
	default:
		return fmt.Sprintf("The raise failed (%s).", r.Reason)
	}
}

func explainPending(r *ledger.Raise, observed string) string {
	switch r.Reason {
	case ledger.ReasonBucketAlreadyRaised:
		return "Another raise is in force; this one starts when that ends, if its own time is not over by then."
	case ledger.ReasonLimitMismatch:
		return fmt.Sprintf("The raise expects the limit %d and found %s. It waits %d seconds for the limit to become so.",
			r.NormalLimit, observed, int(ledger.MismatchGrace/time.Second))
	case ledger.ReasonObserveOnly:
		return "The bucket's raises.mode is ObserveOnly: what the raise would have done is in the audit."
	default:
		return fmt.Sprintf("The raise is stored and starts at %s.", instantText(r.StartsAt))
	}
}

func instantText(t time.Time) string { return t.UTC().Format(time.RFC3339Nano) }

// leaseNotices are the transitions from one status to the next.
func leaseNotices(before, after *v1alpha1.TemporaryLimitLeaseStatus, record *ledger.Raise, failed *failure) []notice {
	if record == nil {
		return stalledNotices(before.Conditions, after.Conditions)
	}
	var notices []notice
	if failed != nil {
		notices = stalledNotices(before.Conditions, after.Conditions)
	}
	tell := func(warning bool, reason, action string) {
		notices = append(notices, notice{warning: warning, reason: reason, action: action, note: explain(record)})
	}
	switch {
	case before.BucketKey == "" && after.State == v1alpha1.RaiseStatePending:
		tell(false, v1alpha1.EventRaiseStored, "Store")
	case failed == nil && before.BucketKey != "" && before.ObservedGeneration > 0 && before.ObservedGeneration < after.ObservedGeneration &&
		!record.State.Ended():
		tell(false, v1alpha1.EventRaiseShortened, "Shorten")
	}
	if was := meta.IsStatusConditionTrue(before.Conditions, v1alpha1.ConditionReviewRequired); was && record.Reviewed() {
		tell(false, v1alpha1.EventReviewAcknowledged, "Acknowledge")
	}
	if before.State == after.State {
		return notices
	}
	switch {
	case after.State == v1alpha1.RaiseStateActive:
		tell(false, v1alpha1.EventRaiseActivated, "Activate")
	case record.State.Ended() && record.Reason == ledger.ReasonRevoked:
		tell(false, v1alpha1.EventRaiseRevoked, "Revoke")
	case after.State == v1alpha1.RaiseStateRestored:
		tell(false, v1alpha1.EventRaiseRestored, "Restore")
	case after.State == v1alpha1.RaiseStateFailed && record.ReviewRequired:
		tell(true, v1alpha1.EventReviewRequired, "Restore")
	case after.State == v1alpha1.RaiseStateFailed:
		tell(true, v1alpha1.EventRaiseFailed, "Activate")
	}
	return notices
}

func stalledNotices(before, after []metav1.Condition) []notice {
	if now, changed := becameTrue(before, after, v1alpha1.ConditionStalled); changed {
		return []notice{{warning: true, reason: v1alpha1.EventStalled, action: "Reconcile", note: now.Message}}
	}
	return nil
}
