package controller

import (
	"errors"
	"time"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/internal/ledger"
)

// failure is why an object is not where its spec wants it.
type failure struct {
	reason  string
	message string
	// stalled: nothing moves until somebody changes something.
	stalled bool
	// unknown: the ledger did not answer, so what it holds is not known.
	unknown bool
	// after is when to look again; 0 leaves it to the queue's back-off on err, which
	// is set then.
	after time.Duration
	err   error
}

// failureOf says what an error of the ledger means for the object that it was
// asked for. It is the only place that does.
func failureOf(err error) *failure {
	f := &failure{message: messageOf(err), err: err}
	switch ledger.CodeOf(err) {
	case ledger.CodeUnavailable, ledger.CodeOutcomeUnknown:
		f.reason, f.unknown = v1alpha1.ReasonLedgerUnavailable, true
		f.message = "The ledger cannot be used now, and is tried again: " + f.message
	case ledger.CodeBucketNotFound, ledger.CodeBucketNotReady:
		f.reason, f.after = v1alpha1.ReasonBucketNotReady, waitInterval
	case ledger.CodeRaiseLimit:
		f.reason, f.after = v1alpha1.ReasonTooManyRaises, backoffCap
	case ledger.CodeOwnerConflict, ledger.CodeRaiseConflict:
		f.reason, f.stalled, f.after = v1alpha1.ReasonConflict, true, resyncInterval
	case ledger.CodeBucketRowMissing:
		f.reason, f.stalled, f.after = v1alpha1.ReasonBucketRowMissing, true, resyncInterval
	case ledger.CodeInvalidInput:
		f.reason, f.stalled, f.after = v1alpha1.ReasonInvalidSpec, true, resyncInterval
	case ledger.CodeBucketClosed:
		f.reason, f.stalled, f.after = v1alpha1.ReasonBucketClosed, true, resyncInterval
		f.message = "The bucket is closed, because its TokenBucket was deleted: create the TokenBucket anew."
	case ledger.CodeStaleGeneration:
		// A pass that read an old copy cannot write this: its status write conflicts.
		f.reason, f.stalled = v1alpha1.ReasonStaleGeneration, true
		f.message = "The ledger holds a newer declaration of this bucket, as after a restore of the cluster from a backup: change the spec until its generation is newer."
	default:
		f.reason, f.stalled = v1alpha1.ReasonInternalError, true
	}
	return f
}

// messageOf is the part of an error that is meant for people; causes may say more
// than a status should.
func messageOf(err error) string {
	var e *ledger.Error
	if errors.As(err, &e) {
		return e.Message
	}
	return "The ledger could not answer."
}
