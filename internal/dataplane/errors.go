package dataplane

import (
	"errors"
	"fmt"
	"strconv"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/token-lease/operator/internal/ledger"
	v1 "github.com/token-lease/operator/proto/tokenlease/v1alpha1"
)

// Codes of refusals that the ledger does not know.
const (
	// codeUnauthenticated means that the token was refused.
	codeUnauthenticated ledger.Code = "unauthenticated"
	// codeReviewUnavailable means that the API server did not say who the caller is, or
	// what it may do.
	codeReviewUnavailable ledger.Code = "review_unavailable"
	// codeOverloaded means that this replica, or this caller, has as many requests in
	// work as it may.
	codeOverloaded ledger.Code = "overloaded"
	// codeInternal is a fault of this program.
	codeInternal ledger.Code = "internal"
)

// retrySoon is what callers are told to wait who may succeed at any time.
const retrySoon = time.Second

// statusOf says which status a refusal has in the protocols. HTTP has 400 for
// invalid_argument, 401 for unauthenticated, 404 for not_found, 409 for already_exists
// and aborted, 429 for resource_exhausted, 500 for internal and 503 for unavailable.
var statusOf = map[ledger.Code]connect.Code{
	ledger.CodeInvalidInput: connect.CodeInvalidArgument,

	codeUnauthenticated: connect.CodeUnauthenticated,

	ledger.CodeBucketNotFound: connect.CodeNotFound,
	ledger.CodeLeaseNotFound:  connect.CodeNotFound,
	ledger.CodeRaiseNotFound:  connect.CodeNotFound,

	ledger.CodeBudgetExceeded:    connect.CodeResourceExhausted,
	ledger.CodeBucketRecordLimit: connect.CodeResourceExhausted,

	ledger.CodeIdempotencyConflict: connect.CodeAlreadyExists,
	ledger.CodeCommitConflict:      connect.CodeAlreadyExists,
	ledger.CodeOperationConflict:   connect.CodeAlreadyExists,

	ledger.CodeCommitExceedsBudget: connect.CodeAborted,
	ledger.CodeRequestTooOld:       connect.CodeAborted,
	ledger.CodeLeaseExpired:        connect.CodeAborted,
	ledger.CodeLeaseReleased:       connect.CodeAborted,
	ledger.CodeLeaseCommitted:      connect.CodeAborted,
	ledger.CodeBucketClosed:        connect.CodeAborted,
	ledger.CodeBucketLimitConflict: connect.CodeAborted,
	ledger.CodeLimitChanged:        connect.CodeAborted,
	ledger.CodeLimitBelowAllocated: connect.CodeAborted,
	ledger.CodeOwnerConflict:       connect.CodeAborted,
	ledger.CodeStaleGeneration:     connect.CodeAborted,
	ledger.CodeRaiseConflict:       connect.CodeAborted,

	ledger.CodeUnavailable:    connect.CodeUnavailable,
	ledger.CodeOutcomeUnknown: connect.CodeUnavailable,
	ledger.CodeBucketNotReady: connect.CodeUnavailable,
	ledger.CodeRaiseLimit:     connect.CodeUnavailable,
	codeReviewUnavailable:     connect.CodeUnavailable,
	codeOverloaded:            connect.CodeUnavailable,

	ledger.CodeBucketRowMissing:       connect.CodeInternal,
	ledger.CodeInvalidClock:           connect.CodeInternal,
	ledger.CodeStateCorrupt:           connect.CodeInternal,
	ledger.CodeStoreContractViolation: connect.CodeInternal,
	codeInternal:                      connect.CodeInternal,
}

// codeOf is the code of a refusal.
func codeOf(err error) ledger.Code {
	var e *ledger.Error
	if errors.As(err, &e) {
		return e.Code
	}
	return codeInternal
}

// waiting is a refusal of which it is known how long it holds at least.
type waiting struct {
	error
	atLeast time.Duration
}

// Unwrap gives the refusal.
func (w *waiting) Unwrap() error { return w.error }

// answer turns a refusal into what every protocol carries.
func answer(err error) *connect.Error {
	var after time.Duration
	var wait *waiting
	if errors.As(err, &wait) {
		after = wait.atLeast
	}
	var refusal *ledger.Error
	if !errors.As(err, &refusal) {
		refusal = ledger.Errorf(codeInternal, "The server failed; its log says why.")
	}
	status, known := statusOf[refusal.Code]
	if !known {
		status = connect.CodeInternal
	}
	detail := &v1.ErrorDetail{
		Code: string(refusal.Code), Figures: map[string]int64{}, Texts: map[string]string{},
		Retryable: status == connect.CodeUnavailable || refusal.Code == ledger.CodeBudgetExceeded,
	}
	for name, value := range refusal.Details {
		switch value := value.(type) {
		case int64:
			detail.Figures[name] = value
		case string:
			detail.Texts[name] = value
		default:
			detail.Texts[name] = fmt.Sprint(value)
		}
	}
	answered := connect.NewError(status, errors.New(refusal.Message))
	if status == connect.CodeUnavailable && after == 0 {
		after = retrySoon
	}
	if after > 0 {
		detail.RetryAfter = durationpb.New(after)
		// HTTP counts whole seconds; a fraction must not become "at once".
		seconds := int64((after + time.Second - 1) / time.Second)
		answered.Meta().Set("Retry-After", strconv.FormatInt(seconds, 10))
	}
	if status == connect.CodeUnauthenticated {
		answered.Meta().Set("WWW-Authenticate", "Bearer")
	}
	if packed, err := connect.NewErrorDetail(detail); err == nil {
		answered.AddDetail(packed)
	}
	return answered
}

// notFound answers for a bucket that is not there and for one that the caller may not
// use: what it says depends on the request alone.
func notFound(bucket *v1.BucketName, verb, subresource string) *ledger.Error {
	return ledger.Errorf(ledger.CodeBucketNotFound,
		"There is no TokenBucket %q in the namespace %q in the ledger, or the caller may not %s %s/%s of it.",
		bucket.GetName(), bucket.GetNamespace(), verb, resource, subresource).
		WithDetails(map[string]any{"namespace": bucket.GetNamespace(), "name": bucket.GetName()})
}

// invalid refuses a field of a request.
func invalid(field, format string, args ...any) *ledger.Error {
	return ledger.Errorf(ledger.CodeInvalidInput, "%s", field+" "+fmt.Sprintf(format, args...)).
		WithDetails(map[string]any{"field": field})
}
