package v1alpha1

const (
	// LedgerFinalizer holds a resource until the ledger has settled what it stands
	// for: a bucket until it is closed, a lease until its raise has ended.
	LedgerFinalizer = GroupName + "/ledger"

	// RequestedByAnnotation names who created a TemporaryLimitLease, or who declared
	// what stands in the spec of a TokenBucket now. The admission policies of
	// config/admission write it, whatever a manifest says. It goes into the audit as
	// the actor.
	RequestedByAnnotation = GroupName + "/requested-by"

	// OnBehalfOfAnnotation on a TemporaryLimitLease is whom its creator claims to ask
	// for, such as the person behind a pipeline. It goes into the audit beside the actor;
	// nobody checks it, and it stays as it was at creation.
	OnBehalfOfAnnotation = GroupName + "/on-behalf-of"

	// ShortenedByAnnotation on a TemporaryLimitLease names who moved expiresAt last.
	// It is written as RequestedByAnnotation is.
	ShortenedByAnnotation = GroupName + "/shortened-by"

	// AcknowledgedAnnotation on a TemporaryLimitLease says, in any words, that
	// somebody has looked at a raise that asks for review. Writing it takes the verb
	// review on the TokenBucket.
	AcknowledgedAnnotation = GroupName + "/acknowledged"

	// AcknowledgedByAnnotation names who wrote AcknowledgedAnnotation. It is written
	// as RequestedByAnnotation is.
	AcknowledgedByAnnotation = GroupName + "/acknowledged-by"

	// FieldManager is the name under which the operator writes to the API server.
	FieldManager = "token-lease-operator"
)
