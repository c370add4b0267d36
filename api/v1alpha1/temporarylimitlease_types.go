package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// BaseChangePolicy says what happens to an active raise when the TokenBucket
// declares another limit.
//
// +kubebuilder:validation:Enum=Review;Rebase
type BaseChangePolicy string

const (
	// BaseChangePolicyReview applies the new limit at once; the raise ends and
	// asks for review.
	BaseChangePolicyReview BaseChangePolicy = "Review"
	// BaseChangePolicyRebase keeps the raise and returns to the new limit.
	BaseChangePolicyRebase BaseChangePolicy = "Rebase"
)

// RaiseState is the state of the raise in the ledger.
//
// +kubebuilder:validation:Enum=Pending;Active;Restoring;Restored;Failed
type RaiseState string

const (
	// RaiseStatePending means that the raise has not started yet.
	RaiseStatePending RaiseState = "Pending"
	// RaiseStateActive means that the temporary limit is in force.
	RaiseStateActive RaiseState = "Active"
	// RaiseStateRestoring means that the return to the normal limit has begun and
	// is not confirmed yet.
	RaiseStateRestoring RaiseState = "Restoring"
	// RaiseStateRestored means that the raise ended and the limit is back. Final.
	RaiseStateRestored RaiseState = "Restored"
	// RaiseStateFailed means that the raise never ran, or that the limit was left
	// alone at its end because somebody else had changed it. Final.
	RaiseStateFailed RaiseState = "Failed"
)

// Instants are strings to the schema, without a format, and the rules convert them
// themselves: the conversion takes exactly what Go takes, and a rule that begins
// with "unchanged, or" still lets an object be updated that carries an instant
// which an older schema let in. A rule that fails to evaluate is never ratcheted,
// so with "format: date-time" such an object could not even lose its finalizer.

// TemporaryLimitLeaseSpec is the raise that is asked for: a grant, made once.
// Only expiresAt may change, and only to an earlier instant.
//
// +kubebuilder:validation:XValidation:rule="self.temporaryLimit > self.normalLimit",message="temporaryLimit must be above normalLimit: a TemporaryLimitLease can only raise a limit",fieldPath=".temporaryLimit"
// +kubebuilder:validation:XValidation:rule="oldSelf.hasValue() && self.expiresAt == oldSelf.value().expiresAt || !has(self.startsAt) || timestamp(self.startsAt) < timestamp(self.expiresAt)",optionalOldSelf=true,message="expiresAt must be after startsAt",fieldPath=".expiresAt"
// +kubebuilder:validation:XValidation:rule="has(self.startsAt) == has(oldSelf.startsAt) && (!has(self.startsAt) || self.startsAt == oldSelf.startsAt || timestamp(self.startsAt) == timestamp(oldSelf.startsAt))",message="startsAt is immutable, it can be neither added, changed nor removed: create another TemporaryLimitLease instead",fieldPath=".startsAt",reason=FieldValueForbidden
// +kubebuilder:validation:XValidation:rule="has(self.purpose) == has(oldSelf.purpose) && (!has(self.purpose) || self.purpose == oldSelf.purpose)",message="purpose is immutable, it can be neither added, changed nor removed: create another TemporaryLimitLease instead",fieldPath=".purpose",reason=FieldValueForbidden
type TemporaryLimitLeaseSpec struct {
	// bucketRef names the TokenBucket, in the same namespace. It may be created
	// later; the raise waits for it. Immutable.
	// +required
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="bucketRef is immutable: create another TemporaryLimitLease instead",reason=FieldValueForbidden
	BucketRef BucketReference `json:"bucketRef,omitzero"`

	// normalLimit is the cap that the bucket is expected to have when the raise
	// starts, and to which it returns, in tokens, 0..2^53-1. The raise does not
	// start on another limit. Immutable.
	// +required
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=9007199254740991
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="normalLimit is immutable: create another TemporaryLimitLease instead",reason=FieldValueForbidden
	NormalLimit int64 `json:"normalLimit"`

	// temporaryLimit is the cap while the raise is active, in tokens, above
	// normalLimit and at most 2^53-1. Immutable.
	// +required
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=9007199254740991
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="temporaryLimit is immutable: create another TemporaryLimitLease instead",reason=FieldValueForbidden
	TemporaryLimit int64 `json:"temporaryLimit,omitempty"`

	// startsAt is when the raise begins, by the ledger's clock: RFC 3339 with an
	// offset, kept to the millisecond. When it is left out, the raise begins once
	// the ledger has stored it. Immutable.
	// +optional
	// +kubebuilder:validation:Schemaless
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:XValidation:rule="oldSelf.hasValue() && self == oldSelf.value() || timestamp(self) >= timestamp('2000-01-01T00:00:00Z') && timestamp(self) < timestamp('9999-12-31T00:00:00Z')",optionalOldSelf=true,message="must be an RFC 3339 instant with an offset, such as 2026-11-30T18:00:00Z, from 2000-01-01 to 9999-12-30"
	StartsAt *metav1.Time `json:"startsAt,omitempty"`

	// expiresAt is when the raise ends, by the ledger's clock: RFC 3339 with an
	// offset, kept to the millisecond. From this instant on nothing is admitted
	// above the normal limit. It may be moved earlier, never later.
	// +required
	// +kubebuilder:validation:Schemaless
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:XValidation:rule="oldSelf.hasValue() && self == oldSelf.value() || timestamp(self) >= timestamp('2000-01-01T00:00:00Z') && timestamp(self) < timestamp('9999-12-31T00:00:00Z')",optionalOldSelf=true,message="must be an RFC 3339 instant with an offset, such as 2026-11-30T18:30:00Z, from 2000-01-01 to 9999-12-30"
	// +kubebuilder:validation:XValidation:rule="self == oldSelf || timestamp(self) <= timestamp(oldSelf)",message="expiresAt may only be moved earlier: create another TemporaryLimitLease to raise the limit for longer",reason=FieldValueForbidden
	ExpiresAt metav1.Time `json:"expiresAt,omitzero"`

	// approvalID names the decision that allows the raise, such as a change
	// ticket. It is spent by the first grant that carries it, once in a tenant.
	// Immutable.
	// +required
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="approvalID is immutable: create another TemporaryLimitLease instead",reason=FieldValueForbidden
	ApprovalID Identifier `json:"approvalID,omitempty"`

	// scopedKeyID identifies the API key whose usage the raise is for. It goes
	// into the audit rows of the raise; an identifier, never the key itself.
	// Immutable.
	// +required
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="scopedKeyID is immutable: create another TemporaryLimitLease instead",reason=FieldValueForbidden
	ScopedKeyID Identifier `json:"scopedKeyID,omitempty"`

	// purpose says in one line why the limit is raised, 1 to 512 characters. It
	// goes into the ledger's record. Immutable.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	// +kubebuilder:validation:XValidation:rule="!self.matches(r'[\\x00-\\x1F\\x7F]')",message="must be one line without control characters"
	Purpose string `json:"purpose,omitempty"`

	// onBaseChange says what happens when the TokenBucket declares another limit
	// while the raise is active: Review applies the new limit at once and ends the
	// raise for review, Rebase keeps the raise and returns to the new limit.
	// Immutable.
	// +optional
	// +kubebuilder:default=Review
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="onBaseChange is immutable: create another TemporaryLimitLease instead",reason=FieldValueForbidden
	OnBaseChange BaseChangePolicy `json:"onBaseChange,omitempty"`
}

// BucketReference names a TokenBucket in the namespace of the one who refers.
type BucketReference struct {
	// name is the name of the TokenBucket, at most 63 characters.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:XValidation:rule="self.matches(r'^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$')",message="must be the name of a TokenBucket: lower-case letters, digits, '-' and '.', beginning and ending with a letter or digit"
	Name string `json:"name,omitempty"`
}

// TemporaryLimitLeaseStatus mirrors the raise in the ledger.
//
// +kubebuilder:validation:MinProperties=0
type TemporaryLimitLeaseStatus struct {
	// conditions are Ready, Reconciling and Stalled as kstatus reads them (Ready
	// once the intent is in the ledger, Stalled if the raise never ran), and
	// Active, Restored, Ended (any final state) and ReviewRequired.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +patchStrategy=merge
	// +patchMergeKey=type
	// +kubebuilder:validation:MinItems=0
	// +kubebuilder:validation:MaxItems=16
	Conditions []metav1.Condition `json:"conditions,omitempty" patchStrategy:"merge" patchMergeKey:"type"`

	// observedGeneration is the generation of the spec that this status is about;
	// -1 until the operator has seen the resource.
	// +optional
	// +kubebuilder:validation:Minimum=-1
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// state is the state of the raise. Restored and Failed are final.
	// +optional
	State RaiseState `json:"state,omitempty"`

	// requestedBy is who asked for the raise, as it stands in the audit.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	RequestedBy string `json:"requestedBy,omitempty"`

	// bucketKey is the key of the bucket in the ledger.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=200
	BucketKey string `json:"bucketKey,omitempty"`

	// tenantID is the tenant that the bucket belongs to.
	// +optional
	TenantID Identifier `json:"tenantID,omitempty"`

	// observedLimit is the limit of the bucket as the ledger last reported it for
	// this raise, in tokens.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=9007199254740991
	ObservedLimit *int64 `json:"observedLimit,omitempty"`

	// activatedAt is when the temporary limit came into force.
	// +optional
	ActivatedAt *metav1.MicroTime `json:"activatedAt,omitempty"`

	// restoredAt is when the limit was put back.
	// +optional
	RestoredAt *metav1.MicroTime `json:"restoredAt,omitempty"`

	// restoreLagMilliseconds is how long after its due instant the restore was
	// recorded. The old limit held from the due instant on all the same: no
	// reservation is admitted on a raise that is past its expiry.
	// +optional
	// +kubebuilder:validation:Minimum=0
	RestoreLagMilliseconds *int64 `json:"restoreLagMilliseconds,omitempty"`

	// operations are the IDs under which the ledger recorded what it did.
	// +optional
	Operations *RaiseOperations `json:"operations,omitzero"`
}

// RaiseOperations are the operation IDs of a raise, as found in the audit.
//
// +kubebuilder:validation:MinProperties=1
type RaiseOperations struct {
	// activate is the operation that put the temporary limit in force.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	Activate string `json:"activate,omitempty"`

	// restore is the operation that put the limit back.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	Restore string `json:"restore,omitempty"`
}

// TemporaryLimitLease raises the limit of one TokenBucket for a while. The raise
// is applied only to the limit that it expects, ends by itself, and never
// overwrites a newer decision.
//
// +genclient
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:path=temporarylimitleases,singular=temporarylimitlease,shortName=tll,categories=tokenlease,scope=Namespaced
// +kubebuilder:selectablefield:JSONPath=`.status.state`
// +kubebuilder:selectablefield:JSONPath=`.spec.bucketRef.name`
// +kubebuilder:printcolumn:name="Bucket",type=string,JSONPath=`.spec.bucketRef.name`
// +kubebuilder:printcolumn:name="State",type=string,JSONPath=`.status.state`
// +kubebuilder:printcolumn:name="Normal",type=integer,JSONPath=`.spec.normalLimit`,description="The cap before and after, in tokens"
// +kubebuilder:printcolumn:name="Temporary",type=integer,JSONPath=`.spec.temporaryLimit`,description="The cap while the raise is active, in tokens"
// +kubebuilder:printcolumn:name="Expires",type=string,JSONPath=`.spec.expiresAt`,description="When the raise ends"
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Review",type=string,priority=1,JSONPath=`.status.conditions[?(@.type=="ReviewRequired")].status`,description="Whether somebody has to look at it"
// +kubebuilder:printcolumn:name="Starts",type=string,priority=1,JSONPath=`.spec.startsAt`
// +kubebuilder:printcolumn:name="Activated",type=string,priority=1,JSONPath=`.status.activatedAt`
// +kubebuilder:printcolumn:name="Restored",type=string,priority=1,JSONPath=`.status.restoredAt`
// +kubebuilder:printcolumn:name="Lag-Ms",type=integer,priority=1,JSONPath=`.status.restoreLagMilliseconds`,description="Milliseconds from expiry to recorded restore"
// +kubebuilder:printcolumn:name="Approval",type=string,priority=1,JSONPath=`.spec.approvalID`
// +kubebuilder:printcolumn:name="Requested-By",type=string,priority=1,JSONPath=`.status.requestedBy`
type TemporaryLimitLease struct {
	metav1.TypeMeta `json:",inline"`

	// metadata is the standard object metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitzero"`

	// spec is the raise that is asked for.
	// +required
	Spec TemporaryLimitLeaseSpec `json:"spec,omitzero"`

	// status mirrors the raise in the ledger; only the operator writes it.
	// +optional
	// +kubebuilder:default={"observedGeneration":-1}
	Status TemporaryLimitLeaseStatus `json:"status,omitempty,omitzero"`
}

// TemporaryLimitLeaseList is a list of TemporaryLimitLeases.
//
// +kubebuilder:object:root=true
type TemporaryLimitLeaseList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitzero"`
	Items           []TemporaryLimitLease `json:"items"`
}
