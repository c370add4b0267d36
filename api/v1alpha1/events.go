package v1alpha1

// Reasons of the events on a TokenBucket. Events tell transitions, never the
// repetition of a state.
const (
	// EventBucketOpened: the bucket exists in the ledger for the first time.
	EventBucketOpened = "BucketOpened"
	// EventBucketReopened: a closed bucket is in use again, with its usage.
	EventBucketReopened = "BucketReopened"
	// EventBucketClosed: the bucket admits nothing more and keeps its usage.
	EventBucketClosed = "BucketClosed"
	// EventBucketDeleted: the bucket was removed from the ledger.
	EventBucketDeleted = "BucketDeleted"
	// EventDeclaredLimitApplied: the declared limit is in force.
	EventDeclaredLimitApplied = "DeclaredLimitApplied"
	// EventLimitConflict: somebody else changed the limit in the ledger.
	EventLimitConflict = "LimitConflict"
	// EventNearRecordLimit: nearly as many leases are kept as maxRecords allows, after
	// which nothing more is admitted.
	EventNearRecordLimit = "NearRecordLimit"
	// EventOverLimit: used and reserved tokens are above the limit.
	EventOverLimit = "OverLimit"
	// EventWithinLimit: used and reserved tokens fit the limit again.
	EventWithinLimit = "WithinLimit"
	// EventStalled: nothing moves until somebody changes something.
	EventStalled = "Stalled"
)

// Reasons of the events on a TemporaryLimitLease.
const (
	// EventRaiseStored: the raise is recorded and waits for its start.
	EventRaiseStored = "RaiseStored"
	// EventRaiseShortened: an earlier expiry reached the ledger.
	EventRaiseShortened = "RaiseShortened"
	// EventRaiseActivated: the temporary limit is in force.
	EventRaiseActivated = "RaiseActivated"
	// EventRaiseRestored: the limit is back.
	EventRaiseRestored = "RaiseRestored"
	// EventRaiseRevoked: the raise was ended because its lease was deleted.
	EventRaiseRevoked = "RaiseRevoked"
	// EventRaiseFailed: the raise ended without a restore; the message says why.
	EventRaiseFailed = "RaiseFailed"
	// EventReviewRequired: somebody has to look at how the raise ended.
	EventReviewRequired = "ReviewRequired"
	// EventReviewAcknowledged: somebody has looked at it.
	EventReviewAcknowledged = "ReviewAcknowledged"
)
