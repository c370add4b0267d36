package ledger

import (
	"errors"
	"fmt"
)

// Code names one way in which a request can be refused. Codes are stable:
// callers branch on them, never on messages.
type Code string

// Codes of the published package token-lease@0.1.0. Their meaning and their
// precedence are the package's; see the package documentation for differences.
const (
	CodeBucketNotFound         Code = "bucket_not_found"
	CodeBudgetExceeded         Code = "budget_exceeded"
	CodeBucketLimitConflict    Code = "bucket_limit_conflict"
	CodeLimitChanged           Code = "limit_changed"
	CodeLimitBelowAllocated    Code = "limit_below_allocated"
	CodeIdempotencyConflict    Code = "idempotency_conflict"
	CodeBucketRecordLimit      Code = "bucket_record_limit"
	CodeCommitConflict         Code = "commit_conflict"
	CodeCommitExceedsBudget    Code = "commit_exceeds_budget"
	CodeLeaseNotFound          Code = "lease_not_found"
	CodeLeaseExpired           Code = "lease_expired"
	CodeLeaseReleased          Code = "lease_released"
	CodeLeaseCommitted         Code = "lease_committed"
	CodeInvalidInput           Code = "invalid_input"
	CodeInvalidClock           Code = "invalid_clock"
	CodeStateCorrupt           Code = "state_corrupt"
	CodeStoreContractViolation Code = "store_contract_violation"
)

// Codes that the package does not have.
const (
	// CodeBucketClosed refuses new reservations on a bucket whose TokenBucket
	// was deleted. Leases that exist can still be settled.
	CodeBucketClosed Code = "bucket_closed"
	// CodeRequestTooOld refuses a reservation that was first asked for before the
	// bucket's retention: whether it was made then cannot be known any more.
	CodeRequestTooOld Code = "request_too_old"
	// CodeBucketRowMissing means that the bucket existed and its row is gone
	// without having been deleted through the ledger. It is never re-created
	// with used = 0.
	CodeBucketRowMissing Code = "bucket_row_missing"
	// CodeOwnerConflict means that another object owns the bucket.
	CodeOwnerConflict Code = "owner_conflict"
	// CodeStaleGeneration refuses a declaration that is older than the one
	// already applied, such as a thawed leader's.
	CodeStaleGeneration Code = "stale_generation"
	// CodeBucketNotReady means that the bucket, or the generation of it that the
	// raise was written against, has not reached the ledger yet. Repeat later.
	CodeBucketNotReady Code = "bucket_not_ready"
	// CodeRaiseConflict means that a raise with this ID is recorded with other
	// inputs. The recorded one stands.
	CodeRaiseConflict Code = "raise_conflict"
	// CodeRaiseLimit refuses one raise too many on a bucket; it may succeed once
	// another has ended.
	CodeRaiseLimit Code = "raise_limit"
	// CodeRaiseNotFound means that no raise is recorded for the object.
	CodeRaiseNotFound Code = "raise_not_found"
	// CodeOperationConflict means that an operation ID was used with other inputs.
	CodeOperationConflict Code = "operation_conflict"
	// CodeUnavailable means that the ledger could not be reached or written in
	// time and that nothing was changed. Repeat later.
	CodeUnavailable Code = "ledger_unavailable"
	// CodeOutcomeUnknown means that the connection was lost around COMMIT. The
	// effect may stand; repeating the same request is safe and tells.
	CodeOutcomeUnknown Code = "outcome_unknown"
)

// Error is the one error type of the domain.
type Error struct {
	// Code says what happened.
	Code Code
	// Message is for people and says what to change. It holds no secrets.
	Message string
	// Details are the figures behind the message. Values are int64 or string.
	Details map[string]any
	// cause is kept for logs; it is not part of the message that callers see.
	cause error
}

func (e *Error) Error() string { return string(e.Code) + ": " + e.Message }

// Unwrap returns what the store met, if anything.
func (e *Error) Unwrap() error { return e.cause }

// Is matches any *Error with the same code, so that errors.Is(err,
// &Error{Code: c}) works.
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.Code == e.Code
}

// Retryable reports whether the same request may succeed later without anybody
// changing anything.
func (e *Error) Retryable() bool {
	switch e.Code {
	case CodeUnavailable, CodeOutcomeUnknown, CodeBucketNotReady, CodeRaiseLimit:
		return true
	default:
		return false
	}
}

// Errorf makes a domain error without details.
func Errorf(code Code, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// WithDetails returns e with details added.
func (e *Error) WithDetails(details map[string]any) *Error {
	e.Details = details
	return e
}

// WithCause returns e with the error that led to it, for logs.
func (e *Error) WithCause(cause error) *Error {
	e.cause = cause
	return e
}

// CodeOf returns the code of err: "" for nil, CodeUnavailable for an error that
// is not the domain's.
func CodeOf(err error) Code {
	if err == nil {
		return ""
	}
	var e *Error
	if errors.As(err, &e) && e != nil {
		return e.Code
	}
	return CodeUnavailable
}

// HasCode reports whether err is a domain error with the code.
func HasCode(err error, code Code) bool {
	var e *Error
	return errors.As(err, &e) && e != nil && e.Code == code
}

func invalid(field, format string, args ...any) *Error {
	return Errorf(CodeInvalidInput, format, args...).WithDetails(map[string]any{"field": field})
}

func corrupt(format string, args ...any) *Error {
	return Errorf(CodeStateCorrupt, format, args...)
}
