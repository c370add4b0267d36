package controller

import (
	"fmt"
	"math"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/internal/ledger"
)

// bucketFinding is what a pass over a TokenBucket learned: exactly one of its
// fields is set.
type bucketFinding struct {
	snapshot *ledger.Snapshot
	closing  *ledger.Closing
	failure  *failure
}

// limitConditions tell how the limit in the ledger stands.
var limitConditions = []string{v1alpha1.ConditionLimitInSync, v1alpha1.ConditionRaised, v1alpha1.ConditionOverLimit}

// bucketStatus is the status of a TokenBucket after a pass.
func bucketStatus(b *v1alpha1.TokenBucket, found bucketFinding, now time.Time) v1alpha1.TokenBucketStatus {
	status := *b.Status.DeepCopy()
	c := conditions{list: &status.Conditions, generation: b.Generation, now: now}
	switch {
	case found.failure != nil:
		showBucketFailure(&status, c, found.failure)
		c.complete(found.failure.reason, limitConditions...)
	case found.closing != nil:
		showClosing(&status, c, *found.closing)
		c.complete(v1alpha1.ReasonDeleting, limitConditions...)
	default:
		status.BucketKey = found.snapshot.Key
		status.ObservedGeneration = b.Generation
		showFigures(&status, found.snapshot)
		c.settled(v1alpha1.ReasonReady, "The ledger holds what the spec asks for.")
		showLimit(&status, c, found.snapshot)
	}
	return status
}

func showFigures(status *v1alpha1.TokenBucketStatus, s *ledger.Snapshot) {
	status.Limit = ptr.To(s.Limit)
	status.DeclaredLimit = s.DeclaredLimit
	status.UsedTokens = ptr.To(s.UsedTokens)
	status.ReservedTokens = ptr.To(s.ReservedTokens)
	status.AvailableTokens = ptr.To(s.AvailableTokens)
	status.OverLimitTokens = ptr.To(s.OverLimitTokens)
	status.UsedPercent = percent(s.UsedTokens, s.Limit)
	status.LeaseRecords = ptr.To(s.LeaseRecords)
	status.PendingRaises = ptr.To(int32(math.MaxInt32))
	if s.PendingRaises >= 0 && s.PendingRaises < math.MaxInt32 {
		status.PendingRaises = ptr.To(int32(s.PendingRaises))
	}
	status.Period = nil
	if p := s.CurrentPeriod; p != nil {
		status.Period = &v1alpha1.CurrentPeriod{StartedAt: seconds(p.StartedAt), EndsAt: seconds(p.EndsAt)}
	}
	status.ActiveRaise = nil
	if r := s.ActiveRaise; r != nil {
		status.ActiveRaise = &v1alpha1.ActiveRaise{
			Name: r.Name, TemporaryLimit: r.TemporaryLimit, ExpiresAt: seconds(r.ExpiresAt),
		}
	}
}

// percent is rounded down; nil when nothing can be said. Neither product nor
// quotient overflows: both figures are at most 2^53-1.
func percent(used, limit int64) *int64 {
	if limit == 0 {
		return nil
	}
	return ptr.To(used * 100 / limit)
}

// seconds is an instant as metav1.Time is stored, so that it compares equal with
// what is read back.
func seconds(t time.Time) metav1.Time { return metav1.NewTime(t.UTC().Truncate(time.Second)) }

func showLimit(status *v1alpha1.TokenBucketStatus, c conditions, s *ledger.Snapshot) {
	declared := ptr.Deref(s.DeclaredLimit, s.BaseLimit)
	raise := s.ActiveRaise
	switch {
	case s.BaseLimit != declared:
		c.set(v1alpha1.ConditionLimitInSync, metav1.ConditionFalse, v1alpha1.ReasonLimitChanged, fmt.Sprintf(
			"Somebody else set the limit to %d, and the declared one is %d: declare the limit that shall hold, or set conflictPolicy to Overwrite.",
			s.BaseLimit, declared))
	case raise != nil:
		c.set(v1alpha1.ConditionLimitInSync, metav1.ConditionTrue, v1alpha1.ReasonRaised,
			"The limit is raised above the declared one, and returns to it.")
	default:
		c.set(v1alpha1.ConditionLimitInSync, metav1.ConditionTrue, v1alpha1.ReasonLimitApplied, "The limit is the declared one.")
	}
	if raise != nil {
		c.set(v1alpha1.ConditionRaised, metav1.ConditionTrue, v1alpha1.ReasonRaised, fmt.Sprintf(
			"TemporaryLimitLease %s has raised the limit to %d until %s.",
			raise.Name, s.Limit, raise.ExpiresAt.UTC().Format(time.RFC3339)))
	} else {
		c.set(v1alpha1.ConditionRaised, metav1.ConditionFalse, v1alpha1.ReasonNotRaised, "No raise is in force.")
	}
	if *status.OverLimitTokens > 0 {
		c.set(v1alpha1.ConditionOverLimit, metav1.ConditionTrue, v1alpha1.ReasonOverLimit,
			"Used and reserved tokens are above the limit. Nothing is admitted until they fit; what is reserved can be settled.")
	} else {
		c.set(v1alpha1.ConditionOverLimit, metav1.ConditionFalse, v1alpha1.ReasonWithinLimit, "Used and reserved tokens fit the limit.")
	}
}

// showBucketFailure keeps the last known figures, except those of a bucket that
// is known to be gone. While the ledger does not answer, the status stays about
// the generation that it was about.
func showBucketFailure(status *v1alpha1.TokenBucketStatus, c conditions, f *failure) {
	c.failed(f)
	if f.unknown {
		return
	}
	status.ObservedGeneration = c.generation
	if f.reason != v1alpha1.ReasonBucketRowMissing {
		return
	}
	status.Limit, status.UsedTokens, status.ReservedTokens, status.AvailableTokens = nil, nil, nil, nil
	status.OverLimitTokens, status.UsedPercent, status.ActiveRaise, status.PendingRaises = nil, nil, nil, nil
	status.Period, status.LeaseRecords = nil, nil
	for _, kind := range limitConditions {
		c.set(kind, metav1.ConditionUnknown, f.reason, "The ledger does not hold the bucket.")
	}
}

func showClosing(status *v1alpha1.TokenBucketStatus, c conditions, closing ledger.Closing) {
	status.ObservedGeneration = c.generation
	reason, message := v1alpha1.ReasonDeleting, "The ledger has done what the deletion asks for."
	if !closing.Done {
		reason = v1alpha1.ReasonReservationsOpen
		message = "The bucket is closed and is removed once nothing is reserved; status.reservedTokens tells what still is."
		status.ReservedTokens = ptr.To(closing.ReservedTokens)
	}
	// Closing has ended every raise. What the limit is since is not asked for.
	if status.ActiveRaise != nil {
		status.ActiveRaise, status.Limit, status.AvailableTokens, status.OverLimitTokens, status.UsedPercent = nil, nil, nil, nil, nil
	}
	status.PendingRaises = nil
	c.set(v1alpha1.ConditionRaised, metav1.ConditionFalse, v1alpha1.ReasonNotRaised, "No raise is in force.")
	c.set(v1alpha1.ConditionReady, metav1.ConditionFalse, reason, message)
	c.set(v1alpha1.ConditionReconciling, metav1.ConditionTrue, reason, message)
	c.set(v1alpha1.ConditionStalled, metav1.ConditionFalse, reason, "")
}

// onlyUsageDiffers reports whether two statuses differ, and only in figures that
// change with every reservation.
func onlyUsageDiffers(before, after *v1alpha1.TokenBucketStatus) bool {
	if equality.Semantic.DeepEqual(before, after) {
		return false
	}
	masked := after.DeepCopy()
	masked.UsedTokens, masked.ReservedTokens = before.UsedTokens, before.ReservedTokens
	masked.AvailableTokens, masked.UsedPercent = before.AvailableTokens, before.UsedPercent
	masked.OverLimitTokens, masked.LeaseRecords = before.OverLimitTokens, before.LeaseRecords
	if before.Period != nil && after.Period != nil {
		// All buckets of a time zone begin anew at one instant.
		masked.Period = before.Period
	}
	return before.UsedTokens != nil && equality.Semantic.DeepEqual(before, masked)
}

// bucketNotices are the transitions from one status to the next.
func bucketNotices(before, after *v1alpha1.TokenBucketStatus, found bucketFinding) []notice {
	var notices []notice
	tell := func(warning bool, reason, action, note string) {
		notices = append(notices, notice{warning: warning, reason: reason, action: action, note: note})
	}
	if s := found.snapshot; s != nil {
		declared := ptr.Deref(s.DeclaredLimit, 0)
		switch {
		case before.DeclaredLimit == nil && s.Revision > 1:
			tell(false, v1alpha1.EventBucketReopened, "Open",
				fmt.Sprintf("The bucket existed before and is in use again, with %d tokens used.", s.UsedTokens))
		case before.DeclaredLimit == nil:
			tell(false, v1alpha1.EventBucketOpened, "Open", fmt.Sprintf("The ledger opened the bucket with the limit %d.", s.Limit))
		case *before.DeclaredLimit != declared && s.BaseLimit == declared:
			tell(false, v1alpha1.EventDeclaredLimitApplied, "ApplyLimit",
				fmt.Sprintf("The declared limit is %d now; it was %d.", declared, *before.DeclaredLimit))
		}
	}
	if s := found.snapshot; s != nil && nearRecordLimit(after.LeaseRecords, s) && !nearRecordLimit(before.LeaseRecords, s) {
		tell(true, v1alpha1.EventNearRecordLimit, "Observe", fmt.Sprintf(
			"%d leases are kept of at most %d, after which nothing more is admitted: raise maxRecords, or keep them for fewer days.",
			s.LeaseRecords, s.Settings.MaxRecords))
	}
	if now, changed := becameFalse(before.Conditions, after.Conditions, v1alpha1.ConditionLimitInSync); changed {
		tell(true, v1alpha1.EventLimitConflict, "ApplyLimit", now.Message)
	}
	if now, changed := becameTrue(before.Conditions, after.Conditions, v1alpha1.ConditionOverLimit); changed {
		tell(true, v1alpha1.EventOverLimit, "Observe", now.Message)
	}
	if now, changed := becameFalse(before.Conditions, after.Conditions, v1alpha1.ConditionOverLimit); changed && hadOverLimit(before) {
		tell(false, v1alpha1.EventWithinLimit, "Observe", now.Message)
	}
	if now, changed := becameTrue(before.Conditions, after.Conditions, v1alpha1.ConditionStalled); changed {
		tell(true, v1alpha1.EventStalled, "Reconcile", now.Message)
	}
	return notices
}

// nearRecordLimit reports whether a number of leases is nine tenths of what may be kept.
func nearRecordLimit(records *int64, s *ledger.Snapshot) bool {
	maximum := s.Settings.MaxRecords
	return records != nil && maximum > 0 && *records >= maximum-maximum/10
}

func hadOverLimit(s *v1alpha1.TokenBucketStatus) bool { return ptr.Deref(s.OverLimitTokens, 0) > 0 }

// closedNotices tell the end of a bucket that was this object's.
func closedNotices(b *v1alpha1.TokenBucket) []notice {
	if !wasDeclared(b) {
		return nil
	}
	if b.Spec.DeletionPolicy == v1alpha1.DeletionPolicyDelete {
		return []notice{{reason: v1alpha1.EventBucketDeleted, action: "Delete", note: "The bucket was removed from the ledger; its audit trail stays."}}
	}
	return []notice{{reason: v1alpha1.EventBucketClosed, action: "Close", note: "The bucket is closed and keeps its usage."}}
}
