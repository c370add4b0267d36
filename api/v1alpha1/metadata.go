package v1alpha1

const (
	// LedgerFinalizer holds a resource until the ledger has settled what it stands
	// for: a bucket until it is closed, a lease until its raise has ended.
	LedgerFinalizer = GroupName + "/ledger"

	// RequestedByAnnotation on a TemporaryLimitLease names who asks for the raise.
	// It goes into the audit as the actor. Nobody checks it yet: whoever may create
	// the lease may write any name here.
	RequestedByAnnotation = GroupName + "/requested-by"

	// FieldManager is the name under which the operator writes to the API server.
	FieldManager = "token-lease-operator"
)
