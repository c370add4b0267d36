package client

import (
	"errors"
	"fmt"
	"time"

	"connectrpc.com/connect"

	v1 "github.com/token-lease/operator/proto/tokenlease/v1alpha1"
)

// Codes of refusals that programs branch on. There are more; what they mean is told by
// Error.Message.
const (
	CodeBudgetExceeded      = "budget_exceeded"
	CodeBucketNotFound      = "bucket_not_found" // or the caller may not use it
	CodeBucketClosed        = "bucket_closed"
	CodeIdempotencyConflict = "idempotency_conflict"
	CodeRequestTooOld       = "request_too_old"
	CodeInvalidInput        = "invalid_input"
	CodeLeaseNotFound       = "lease_not_found"
	CodeLeaseExpired        = "lease_expired"
	CodeLeaseReleased       = "lease_released"
	CodeLeaseCommitted      = "lease_committed"
	CodeCommitConflict      = "commit_conflict"
	CodeCommitExceedsBudget = "commit_exceeds_budget"
	CodeUnauthenticated     = "unauthenticated"
	CodeUnavailable         = "ledger_unavailable"
	CodeOutcomeUnknown      = "outcome_unknown"
	// CodeServerUnreachable means that no LedgerService has answered.
	CodeServerUnreachable = "server_unreachable"
	// CodeTokenUnreadable means that the token file could not be read.
	CodeTokenUnreadable = "token_unreadable"
	// CodeAnswerNotUnderstood means that the server speaks another version.
	CodeAnswerNotUnderstood = "answer_not_understood"
)

const (
	figureRequestedTokens = "requestedTokens"
	figureAvailableTokens = "availableTokens"
	// maxDetails is how many details of an error are looked at.
	maxDetails = 8
)

// Error is a refusal, or the failure to get an answer.
type Error struct {
	// Code says what happened. Branch on it, never on the message.
	Code string
	// Message is for people.
	Message string
	// Figures and Texts are what is behind the message, such as requestedTokens.
	Figures map[string]int64
	Texts   map[string]string
	// Retryable is true when the same request may succeed later without anybody
	// changing anything.
	Retryable bool
	// RetryAfter is how long that takes at least, where it is known.
	RetryAfter time.Duration

	cause error
}

// Error implements error.
func (e *Error) Error() string { return e.Code + ": " + e.Message }

// Unwrap gives the error of the protocol.
func (e *Error) Unwrap() error { return e.cause }

// BudgetExceededError says that a reservation does not fit into what the bucket has left.
type BudgetExceededError struct {
	Refusal *Error
	// RequestedTokens were asked for, AvailableTokens were left.
	RequestedTokens, AvailableTokens int64
}

// Error implements error.
func (e *BudgetExceededError) Error() string {
	return fmt.Sprintf("%s (requested %d, available %d)", e.Refusal, e.RequestedTokens, e.AvailableTokens)
}

// Unwrap gives the refusal.
func (e *BudgetExceededError) Unwrap() error { return e.Refusal }

// HasCode reports whether an error is a refusal with a code.
func HasCode(err error, code string) bool {
	var e *Error
	return errors.As(err, &e) && e.Code == code
}

// understand turns what Connect returns into an error of this package.
func understand(err error) error {
	if own := (*Error)(nil); errors.As(err, &own) {
		return own
	}
	var protocol *connect.Error
	if !errors.As(err, &protocol) {
		return &Error{Code: CodeServerUnreachable, Message: err.Error(), Retryable: true, cause: err}
	}
	for i, packed := range protocol.Details() {
		if i == maxDetails {
			break
		}
		message, unpackErr := packed.Value()
		if unpackErr != nil {
			continue
		}
		if detail, ok := message.(*v1.ErrorDetail); ok {
			return refusal(protocol, detail)
		}
	}
	e := &Error{Message: protocol.Message(), cause: err}
	if connect.IsWireError(err) {
		// Something that is no LedgerService has answered, such as a proxy.
		e.Code = protocol.Code().String()
		e.Retryable = protocol.Code() == connect.CodeUnavailable || protocol.Code() == connect.CodeDeadlineExceeded
		return e
	}
	e.Code, e.Retryable = CodeServerUnreachable, true
	return e
}

func refusal(protocol *connect.Error, detail *v1.ErrorDetail) error {
	e := &Error{
		Code: detail.GetCode(), Message: protocol.Message(), Figures: detail.GetFigures(), Texts: detail.GetTexts(),
		Retryable: detail.GetRetryable(), RetryAfter: max(0, detail.GetRetryAfter().AsDuration()), cause: protocol,
	}
	if e.Code != CodeBudgetExceeded {
		return e
	}
	return &BudgetExceededError{
		Refusal: e, RequestedTokens: e.Figures[figureRequestedTokens], AvailableTokens: e.Figures[figureAvailableTokens],
	}
}

func notUnderstood(format string, args ...any) error {
	return &Error{Code: CodeAnswerNotUnderstood, Message: fmt.Sprintf(format, args...)}
}
