// Package v1alpha1 holds the declarative side of token budgets: TokenBucket
// declares a budget, TemporaryLimitLease raises its limit for a while.
//
// A resource holds the wish and mirrors the state. The ledger in PostgreSQL
// decides, by its own clock; the operator never writes a spec.
//
// Token counts are int64 within 0..2^53-1 (9007199254740991), the range that
// every JSON client reads exactly. Instants are RFC 3339 with an offset.
// Durations are whole seconds and say so in their name.
//
// Rules on the content of a spec sit on the spec and on its fields, where the
// API server ratchets them: an object stored before a rule existed can still be
// updated as long as the part that the rule looks at stays as it is.
//
// +kubebuilder:object:generate=true
// +groupName=budget.tokenlease.dev
package v1alpha1
