package ledger

import "time"

// AuditEvent says what an audit row is about.
type AuditEvent string

// Audit events: one for each change of a cap and each decision not to change it.
const (
	AuditBucketOpened   AuditEvent = "BucketOpened"
	AuditBucketAdopted  AuditEvent = "BucketAdopted"
	AuditBucketReopened AuditEvent = "BucketReopened"
	AuditBucketClosed   AuditEvent = "BucketClosed"
	AuditBucketDeleted  AuditEvent = "BucketDeleted"
	// AuditBucketForgotten ends the history of a bucket whose row had vanished:
	// its owner was deleted, so the key may be opened anew.
	AuditBucketForgotten AuditEvent = "BucketForgotten"

	AuditLimitSet      AuditEvent = "LimitSet"
	AuditLimitDeclared AuditEvent = "LimitDeclared"
	// AuditLimitKept is the decision to leave another hand's limit alone.
	AuditLimitKept AuditEvent = "LimitKept"
	// AuditLimitTaken is written by the database itself when another hand than
	// the ledger writes a limit.
	AuditLimitTaken AuditEvent = "LimitChangedOutsideLedger"
	// AuditBucketInserted is written by the database itself when another hand than
	// the ledger inserts a bucket's row, such as one from a backup.
	AuditBucketInserted AuditEvent = "BucketInsertedOutsideLedger"

	// AuditBucketImported begins a bucket that was brought over from the npm package.
	AuditBucketImported AuditEvent = "BucketImported"

	// AuditCommitRefused tells of tokens that were spent and not booked.
	AuditCommitRefused AuditEvent = "CommitRefused"

	AuditPolicyChanged AuditEvent = "RaisePolicyChanged"

	AuditRaiseStored    AuditEvent = "RaiseStored"
	AuditRaiseLinked    AuditEvent = "RaiseLinked"
	AuditRaiseShortened AuditEvent = "RaiseShortened"
	AuditRaiseWaiting   AuditEvent = "RaiseWaiting"
	AuditRaiseActivated AuditEvent = "RaiseActivated"
	AuditRaiseRebased   AuditEvent = "RaiseRebased"
	AuditRaiseRestored  AuditEvent = "RaiseRestored"
	AuditRaiseFailed    AuditEvent = "RaiseFailed"
	AuditRaiseObserved  AuditEvent = "RaiseObserved"
	// AuditRaiseReviewed: somebody has looked at a raise that asked for review.
	AuditRaiseReviewed AuditEvent = "RaiseReviewed"
)

// AuditOutcome says whether the cap was changed.
type AuditOutcome string

// Audit outcomes.
const (
	// OutcomeApplied: what the event names was done.
	OutcomeApplied AuditOutcome = "applied"
	// OutcomeRefused: it was decided not to do it, for good.
	OutcomeRefused AuditOutcome = "refused"
	// OutcomeKept: another limit was found and left alone.
	OutcomeKept AuditOutcome = "kept"
	// OutcomeWaiting: the decision waits for something.
	OutcomeWaiting AuditOutcome = "waiting"
	// OutcomeObserved: an observe-only bucket noted what it would have done.
	OutcomeObserved AuditOutcome = "observed"
)

// AuditRow is one line of evidence. Rows are numbered per bucket and never
// change.
type AuditRow struct {
	BucketKey string
	Sequence  int64
	Event     AuditEvent
	Outcome   AuditOutcome
	Reason    Reason
	// OperationID names the effect, when it is one that can be repeated.
	OperationID string

	RaiseID      string
	RaiseVersion int64
	// Cluster, Namespace and OwnerName are the bucket's owner.
	Cluster   string
	Namespace string
	OwnerName string
	TenantID  string
	// ScopedKeyID is the one that the raise was granted for; BucketScopedKeyID is
	// the bucket's when the row was written.
	ScopedKeyID       string
	BucketScopedKeyID string
	ApprovalID        string
	// LeaseID and Tokens are what a row about a lease is about.
	LeaseID string
	Tokens  *int64

	// Actor asked for it, Worker did it, Trigger is the operation during which it
	// was done.
	Actor string
	// OnBehalfOf is whom the one who asked for the raise claimed to ask for.
	OnBehalfOf string
	Worker     string
	Trigger    string

	RequestedLimit *int64
	PriorLimit     *int64
	EffectiveLimit *int64
	DeclaredLimit  *int64
	UsedTokens     int64
	ReservedTokens int64
	LimitEpoch     int64

	// DueAt is when it was due, At when it was done.
	DueAt *time.Time
	At    time.Time
}

// History is what remains known of a bucket whose row is absent.
type History struct {
	// LastSequence is the number of its latest audit row, 0 for none.
	LastSequence int64
	// LastEvent is the latest of its LifeCycleEvents; raises write rows about a
	// bucket that is gone, too.
	LastEvent AuditEvent
	// Cluster, Namespace and OwnerName are the owner in that row, if it had one.
	Cluster, Namespace, OwnerName string
}

// LifeCycleEvents are the events that begin or end a bucket, or show that it is
// there.
func LifeCycleEvents() []AuditEvent {
	return []AuditEvent{
		AuditBucketOpened, AuditBucketAdopted, AuditBucketReopened,
		AuditBucketClosed, AuditBucketDeleted, AuditBucketForgotten, AuditBucketInserted,
		AuditBucketImported,
	}
}

// belongedTo reports whether the object owned the bucket at the end. A bucket
// without an owner belongs to whoever claims its key.
func (h History) belongedTo(o Owner) bool {
	return h.OwnerName == "" || h.Cluster == o.Cluster && h.Namespace == o.Namespace && h.OwnerName == o.Name
}

// vanished reports whether a row must have existed and gone without the ledger.
func (h History) vanished() bool {
	return h.LastEvent != "" && h.LastEvent != AuditBucketDeleted && h.LastEvent != AuditBucketForgotten
}
