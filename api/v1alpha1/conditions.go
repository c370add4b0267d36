package v1alpha1

// Condition types of both kinds, as kstatus reads them. Each carries the
// generation that it is about.
const (
	// ConditionReady is true once the ledger holds what the spec asks for.
	ConditionReady = "Ready"
	// ConditionReconciling is true while the operator is working, or waiting for
	// something that is expected to come.
	ConditionReconciling = "Reconciling"
	// ConditionStalled is true when nothing moves until somebody changes
	// something; the message says what.
	ConditionStalled = "Stalled"
)

// Condition types of a TokenBucket.
const (
	// ConditionLimitInSync is true while the limit in the ledger is the declared
	// one, or raised above it by a lease.
	ConditionLimitInSync = "LimitInSync"
	// ConditionRaised is true while a TemporaryLimitLease is in force.
	ConditionRaised = "Raised"
	// ConditionOverLimit is true while used and reserved tokens are above the limit.
	ConditionOverLimit = "OverLimit"
)

// Condition types of a TemporaryLimitLease.
const (
	// ConditionActive is true while the temporary limit is in force.
	ConditionActive = "Active"
	// ConditionRestored is true once the limit has been put back.
	ConditionRestored = "Restored"
	// ConditionEnded is true in every final state, so that a wait on it always ends.
	ConditionEnded = "Ended"
	// ConditionReviewRequired is true when the raise ended in a way that somebody
	// has to look at.
	ConditionReviewRequired = "ReviewRequired"
)

// Reasons that both kinds use.
const (
	// ReasonReady: the ledger holds what the spec asks for.
	ReasonReady = "Ready"
	// ReasonLedgerUnavailable: the ledger does not answer, or cannot be written.
	ReasonLedgerUnavailable = "LedgerUnavailable"
	// ReasonInvalidSpec: the ledger refuses a value that the schema let through.
	ReasonInvalidSpec = "InvalidSpec"
	// ReasonUndecodable: the stored object cannot be read as this version's type.
	ReasonUndecodable = "Undecodable"
	// ReasonDeleting: the resource is being deleted and the ledger is being settled.
	ReasonDeleting = "Deleting"
	// ReasonConflict: the bucket belongs to another owner.
	ReasonConflict = "Conflict"
	// ReasonInternalError: the ledger reports a state that it should never be in.
	ReasonInternalError = "InternalError"
)

// Reasons of a TokenBucket.
const (
	// ReasonKeyNotAllowed: the bucket key lies outside "<namespace>/" and the
	// namespace is not trusted with such keys.
	ReasonKeyNotAllowed = "KeyNotAllowed"
	// ReasonBucketRowMissing: the ledger once held the bucket and no longer does.
	// It is never opened again by itself, since its usage would be forgotten.
	ReasonBucketRowMissing = "BucketRowMissing"
	// ReasonStaleGeneration: the ledger already holds a newer generation.
	ReasonStaleGeneration = "StaleGeneration"
	// ReasonReservationsOpen: deletion waits until nothing is reserved.
	ReasonReservationsOpen = "ReservationsOpen"
	// ReasonLimitApplied: the limit is the declared one.
	ReasonLimitApplied = "LimitApplied"
	// ReasonRaised: a lease has raised the limit.
	ReasonRaised = "Raised"
	// ReasonNotRaised: no lease is in force.
	ReasonNotRaised = "NotRaised"
	// ReasonOverLimit: used and reserved tokens are above the limit.
	ReasonOverLimit = "OverLimit"
	// ReasonWithinLimit: used and reserved tokens fit the limit.
	ReasonWithinLimit = "WithinLimit"
)

// Reasons of a TemporaryLimitLease. The later ones are also the ledger's words
// for why a raise waits or how it ended.
const (
	// ReasonBucketNotFound: there is no TokenBucket of that name yet.
	ReasonBucketNotFound = "BucketNotFound"
	// ReasonBucketNotReady: the TokenBucket's present generation has not reached
	// the ledger yet.
	ReasonBucketNotReady = "BucketNotReady"
	// ReasonBucketClosed: the TokenBucket was deleted.
	ReasonBucketClosed = "BucketClosed"
	// ReasonBucketAlreadyRaised: another raise is active; this one waits its turn.
	ReasonBucketAlreadyRaised = "BucketAlreadyRaised"
	// ReasonTooManyRaises: the bucket has as many raises that have not ended as it
	// may have; this one is stored once another has ended.
	ReasonTooManyRaises = "TooManyRaises"
	// ReasonPending: the raise is stored and waits for its start.
	ReasonPending = "Pending"
	// ReasonActive: the temporary limit is in force.
	ReasonActive = "Active"
	// ReasonRestored: the raise ended and the limit is back.
	ReasonRestored = "Restored"
	// ReasonLimitMismatch: the limit is not the expected one; the raise waits a
	// short time for it to become so.
	ReasonLimitMismatch = "LimitMismatch"
	// ReasonLimitChanged: somebody else changed the limit; it was left alone.
	ReasonLimitChanged = "LimitChanged"
	// ReasonWindowMissed: the time from start to expiry passed without a raise.
	ReasonWindowMissed = "WindowMissed"
	// ReasonRevoked: the lease was deleted before it ended.
	ReasonRevoked = "Revoked"
	// ReasonApprovalAlreadyUsed: the approval was spent by another grant.
	ReasonApprovalAlreadyUsed = "ApprovalAlreadyUsed"
	// ReasonObserveOnly: the bucket only records what a raise would have done.
	ReasonObserveOnly = "ObserveOnly"
	// ReasonRaisesDisabled: the bucket accepts no raises.
	ReasonRaisesDisabled = "RaisesDisabled"
	// ReasonPolicyRefused: the raise is above the bucket's maxLimit or longer than
	// its maxDurationSeconds.
	ReasonPolicyRefused = "PolicyRefused"
	// ReasonActorUnknown: nothing vouches for who asks for the raise.
	ReasonActorUnknown = "ActorUnknown"
	// ReasonNoReviewNeeded: nothing about the raise asks for review.
	ReasonNoReviewNeeded = "NoReviewNeeded"
	// ReasonAcknowledged: somebody has looked at a raise that asked for review.
	ReasonAcknowledged = "Acknowledged"
	// ReasonNotEnded: the raise has not reached a final state.
	ReasonNotEnded = "NotEnded"
)

// MaxConditionMessageBytes bounds what the operator writes into the message of a
// condition, so that no error text can outgrow the object store.
const MaxConditionMessageBytes = 1024
