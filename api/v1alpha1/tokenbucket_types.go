package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ConflictPolicy says what happens when somebody else changed the limit in the
// ledger since the declared one was last applied.
//
// +kubebuilder:validation:Enum=Review;Overwrite
type ConflictPolicy string

const (
	// ConflictPolicyReview keeps the other limit and reports it.
	ConflictPolicyReview ConflictPolicy = "Review"
	// ConflictPolicyOverwrite puts the declared limit back.
	ConflictPolicyOverwrite ConflictPolicy = "Overwrite"
)

// DeletionPolicy says what becomes of the bucket in the ledger once its
// TokenBucket is deleted.
//
// +kubebuilder:validation:Enum=Retain;Delete
type DeletionPolicy string

const (
	// DeletionPolicyRetain closes the bucket and keeps it with its usage. A
	// TokenBucket of the same name opens it again.
	DeletionPolicyRetain DeletionPolicy = "Retain"
	// DeletionPolicyDelete closes the bucket, waits until nothing is reserved,
	// then removes it with its leases. Audit, raises and spent approvals stay.
	DeletionPolicyDelete DeletionPolicy = "Delete"
)

// RaiseMode says what a TemporaryLimitLease may do to a bucket.
//
// +kubebuilder:validation:Enum=Enforce;ObserveOnly;Disabled
type RaiseMode string

const (
	// RaiseModeEnforce applies raises.
	RaiseModeEnforce RaiseMode = "Enforce"
	// RaiseModeObserveOnly records in the audit what would have been done, and
	// changes no limit.
	RaiseModeObserveOnly RaiseMode = "ObserveOnly"
	// RaiseModeDisabled refuses raises. What is already active is still restored.
	RaiseModeDisabled RaiseMode = "Disabled"
)

// SettlementPolicy says what a commit does with tokens that were spent and do not
// fit.
//
// +kubebuilder:validation:Enum=Strict;RecordActual
type SettlementPolicy string

const (
	// SettlementPolicyStrict refuses a figure above what the bucket has left, and one
	// that comes after the lease expired. What was refused stays visible.
	SettlementPolicyStrict SettlementPolicy = "Strict"
	// SettlementPolicyRecordActual books the actual figure of a reserved or expired
	// lease, also above the limit.
	SettlementPolicyRecordActual SettlementPolicy = "RecordActual"
)

// Cadence is how often a budget begins anew.
//
// +kubebuilder:validation:Enum=Hour;Day;Week;Month;Year
type Cadence string

// The cadences. All are of the calendar in the period's time zone.
const (
	CadenceHour  Cadence = "Hour"
	CadenceDay   Cadence = "Day"
	CadenceWeek  Cadence = "Week"
	CadenceMonth Cadence = "Month"
	CadenceYear  Cadence = "Year"
)

// Period says when a budget begins anew: used and reserved tokens start at 0.
type Period struct {
	// every is the length of a period: Hour, Day, Week (from Monday), Month or Year.
	// +required
	Every Cadence `json:"every,omitempty"`

	// timeZone is the name of the calendar's time zone in the IANA database, such as
	// Etc/UTC or Europe/Berlin. A day has 23 or 25 hours where its clocks change.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:Pattern=`^[A-Za-z][A-Za-z0-9_+-]*(/[A-Za-z0-9][A-Za-z0-9_+-]*)*$`
	TimeZone string `json:"timeZone,omitempty"`
}

// CurrentPeriod is the period that is running, by the ledger's clock.
type CurrentPeriod struct {
	// startedAt is when it began.
	// +required
	StartedAt metav1.Time `json:"startedAt,omitzero"`

	// endsAt is when used and reserved tokens start at 0 again.
	// +required
	EndsAt metav1.Time `json:"endsAt,omitzero"`
}

// TokenBucketSpec is the budget that is asked for.
//
// +kubebuilder:validation:XValidation:rule="has(self.bucketKey) == has(oldSelf.bucketKey) && (!has(self.bucketKey) || self.bucketKey == oldSelf.bucketKey)",message="bucketKey is immutable, it can be neither added, changed nor removed: create another TokenBucket instead",fieldPath=".bucketKey",reason=FieldValueForbidden
// +kubebuilder:validation:XValidation:rule="has(self.tenantID) == has(oldSelf.tenantID) && (!has(self.tenantID) || self.tenantID == oldSelf.tenantID)",message="tenantID is immutable, it can be neither added, changed nor removed: create another TokenBucket instead",fieldPath=".tenantID",reason=FieldValueForbidden
type TokenBucketSpec struct {
	// limit is the normal cap, in tokens, 0..2^53-1. Used and reserved tokens
	// together may not pass it. 0 admits nothing; there is no "unlimited". A lower
	// limit applies at once, even below what is already used and reserved.
	// +required
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=9007199254740991
	Limit int64 `json:"limit"`

	// bucketKey names the bucket in the ledger, 1 to 200 UTF-16 units. When it is
	// left out, the key is "<namespace>/<name>". A key that does not begin with
	// "<namespace>/" is accepted only in namespaces that the manager is told to
	// trust. Immutable.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=200
	// +kubebuilder:validation:XValidation:rule="self.size() + self.findAll(r'[\\x{10000}-\\x{10FFFF}]').size() <= 200",message="must be at most 200 UTF-16 units long; a character outside the basic plane (an emoji, for one) counts twice"
	// +kubebuilder:validation:XValidation:rule="!self.matches(r'^[\\p{Z}\\x{FEFF}]|[\\p{Z}\\x{FEFF}]$')",message="must not begin or end with white space"
	// +kubebuilder:validation:XValidation:rule="!self.matches(r'[\\x00-\\x1F\\x7F\\x{FFFD}]')",message="must not contain control characters (U+0000 to U+001F, U+007F) or U+FFFD, which stands for a character that could not be read"
	// +kubebuilder:validation:XValidation:rule="!self.matches(r'\\p{L}[\\x{0300}-\\x{036F}]')",message="must be in composed Unicode form (NFC): write an accented letter as one character, not as a letter and a combining accent"
	BucketKey string `json:"bucketKey,omitempty"`

	// tenantID is the tenant that the budget belongs to, within this namespace; it
	// goes into every audit row. When it is left out, the tenant is the name of
	// the TokenBucket. Immutable.
	// +optional
	TenantID Identifier `json:"tenantID,omitempty"`

	// scopedKeyID identifies the API key whose usage is counted here, so that
	// usage and raises can be told apart by key. It is an identifier, never the
	// key itself.
	// +optional
	ScopedKeyID Identifier `json:"scopedKeyID,omitempty"`

	// period says when the budget begins anew. Without it that is never. A changed
	// period counts from the end of the running one; what was used before a first
	// period counts in it. A lease settles in the period in which it was reserved.
	// +optional
	Period *Period `json:"period,omitzero"`

	// reservations bounds how long and how many reservations are kept.
	// +optional
	// +kubebuilder:default={defaultTTLSeconds: 60, maxTTLSeconds: 3600, retentionDays: 30}
	Reservations ReservationPolicy `json:"reservations,omitempty,omitzero"`

	// settlementPolicy says what a commit does with tokens that were spent and do not
	// fit: Strict refuses a figure above what the bucket has left, or after the lease
	// expired, and keeps the refused figure visible on the lease and in the audit;
	// RecordActual books it, also above the limit.
	// +optional
	// +kubebuilder:default=Strict
	SettlementPolicy SettlementPolicy `json:"settlementPolicy,omitempty"`

	// conflictPolicy says what happens when somebody else changed the limit in the
	// ledger since the declared one was last applied: Review keeps theirs and
	// reports it, Overwrite puts the declared one back.
	// +optional
	// +kubebuilder:default=Review
	ConflictPolicy ConflictPolicy `json:"conflictPolicy,omitempty"`

	// deletionPolicy says what becomes of the bucket in the ledger once this
	// resource is deleted: Retain closes it and keeps its usage, Delete removes it
	// once nothing is reserved. The audit trail stays in both cases.
	// +optional
	// +kubebuilder:default=Retain
	DeletionPolicy DeletionPolicy `json:"deletionPolicy,omitempty"`

	// raises says which temporary raises this bucket accepts. Without it none is
	// accepted.
	// +optional
	Raises *RaisePolicy `json:"raises,omitzero"`
}

// ReservationPolicy bounds the reservations of one bucket. It is stored with the
// bucket, so that every replica and every client works by the same figures.
//
// +kubebuilder:validation:XValidation:rule="self.defaultTTLSeconds <= self.maxTTLSeconds",message="defaultTTLSeconds must not be above maxTTLSeconds (60 and 3600 if left out)",fieldPath=".defaultTTLSeconds"
// +kubebuilder:validation:MinProperties=0
type ReservationPolicy struct {
	// defaultTTLSeconds is how long a reservation lives that asks for no duration
	// of its own, in seconds, 1 to 31536000 (365 days).
	// +optional
	// +kubebuilder:default=60
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=31536000
	DefaultTTLSeconds int32 `json:"defaultTTLSeconds,omitempty"`

	// maxTTLSeconds is the longest duration that a reservation may ask for, in
	// seconds, 1 to 31536000 (365 days).
	// +optional
	// +kubebuilder:default=3600
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=31536000
	MaxTTLSeconds int32 `json:"maxTTLSeconds,omitempty"`

	// maxRecords is how many leases, settled ones included, the bucket may hold
	// before further reservations are refused. Without it there is no such bound.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000000000
	MaxRecords int32 `json:"maxRecords,omitempty"`

	// retentionDays is how many days a lease is kept after it was settled and its
	// expiry has passed, 1 to 3650. As long a request that is repeated is recognised.
	// What a lease has used stays known after that, by hour, tenant, key and raise.
	// +optional
	// +kubebuilder:default=30
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=3650
	RetentionDays int32 `json:"retentionDays,omitempty"`
}

// RaisePolicy bounds the temporary raises of one bucket. It is checked when a
// raise is stored and again when it starts. All fields are required: what is not
// allowed in so many words is refused.
type RaisePolicy struct {
	// mode is Enforce to apply raises, ObserveOnly to record in the audit what
	// would have been done, Disabled to refuse them. It decides about the start of
	// a raise only: what is active is always restored.
	// +required
	Mode RaiseMode `json:"mode,omitempty"`

	// maxLimit is the highest temporary limit that a raise may ask for, in tokens,
	// 1..2^53-1.
	// +required
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=9007199254740991
	MaxLimit int64 `json:"maxLimit,omitempty"`

	// maxDurationSeconds is the longest time from start to expiry that a raise may
	// ask for, in seconds, 1 to 31536000 (365 days).
	// +required
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=31536000
	MaxDurationSeconds int32 `json:"maxDurationSeconds,omitempty"`
}

// TokenBucketStatus mirrors the ledger. Usage figures lag behind it by up to a
// minute; what admits a reservation is the ledger itself. A figure that is absent
// is not known, 0 is a figure like any other.
//
// +kubebuilder:validation:MinProperties=0
type TokenBucketStatus struct {
	// conditions are Ready, Reconciling and Stalled as kstatus reads them, and
	// LimitInSync (the limit is the declared one, or raised above it by a lease),
	// Raised and OverLimit.
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

	// bucketKey is the key of the bucket in the ledger.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=200
	BucketKey string `json:"bucketKey,omitempty"`

	// limit is the cap now in force, in tokens. It differs from declaredLimit
	// while a raise is active, and after somebody else changed it.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=9007199254740991
	Limit *int64 `json:"limit,omitempty"`

	// declaredLimit is the last spec.limit that reached the ledger, in tokens.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=9007199254740991
	DeclaredLimit *int64 `json:"declaredLimit,omitempty"`

	// usedTokens is what committed leases have used.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=9007199254740991
	UsedTokens *int64 `json:"usedTokens,omitempty"`

	// reservedTokens is what open reservations hold.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=9007199254740991
	ReservedTokens *int64 `json:"reservedTokens,omitempty"`

	// availableTokens is what can still be reserved: limit - used - reserved, and
	// 0 where that would be negative.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=9007199254740991
	AvailableTokens *int64 `json:"availableTokens,omitempty"`

	// overLimitTokens is by how much used + reserved is above the limit, which
	// happens after a restore and after a lower declared limit. 0 otherwise.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=9007199254740991
	OverLimitTokens *int64 `json:"overLimitTokens,omitempty"`

	// usedPercent is usedTokens in percent of limit, rounded down; above 100 when
	// over the limit. Absent while the limit is 0.
	// +optional
	// +kubebuilder:validation:Minimum=0
	UsedPercent *int64 `json:"usedPercent,omitempty"`

	// period is the running period, if spec.period asks for any. The figures above are
	// those of this period.
	// +optional
	Period *CurrentPeriod `json:"period,omitempty"`

	// activeRaise is the raise now in force, if there is one.
	// +optional
	ActiveRaise *ActiveRaise `json:"activeRaise,omitzero"`

	// leaseRecords is how many leases are kept, settled ones included. At
	// spec.reservations.maxRecords nothing more is admitted until some are purged.
	// +optional
	// +kubebuilder:validation:Minimum=0
	LeaseRecords *int64 `json:"leaseRecords,omitempty"`

	// pendingRaises is how many raises are stored and wait for their start.
	// +optional
	// +kubebuilder:validation:Minimum=0
	PendingRaises *int32 `json:"pendingRaises,omitempty"`
}

// ActiveRaise is the raise now in force on a bucket.
type ActiveRaise struct {
	// name is the TemporaryLimitLease behind it, in the same namespace.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name,omitempty"`

	// temporaryLimit is the limit that the lease asked for, in tokens.
	// +required
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=9007199254740991
	TemporaryLimit int64 `json:"temporaryLimit,omitempty"`

	// expiresAt is when the raise ends, by the ledger's clock.
	// +required
	ExpiresAt metav1.Time `json:"expiresAt,omitzero"`
}

// The rule on the name below has to stand on the root, since only there a rule sees
// metadata.name. Root rules are not ratcheted; this one needs no ratchet, because
// a name never changes and the rule is as old as the kind.

// TokenBucket is one budget: a limit in tokens that many workloads reserve from
// at once and can never pass together.
//
// +genclient
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:path=tokenbuckets,singular=tokenbucket,shortName=tbkt,categories=tokenlease,scope=Namespaced
// +kubebuilder:selectablefield:JSONPath=`.status.bucketKey`
// +kubebuilder:printcolumn:name="Limit",type=integer,JSONPath=`.status.limit`,description="The cap now in force, in tokens"
// +kubebuilder:printcolumn:name="Declared",type=integer,JSONPath=`.spec.limit`,description="The cap that the spec asks for, in tokens"
// +kubebuilder:printcolumn:name="Used",type=integer,JSONPath=`.status.usedTokens`,description="Tokens used by committed leases"
// +kubebuilder:printcolumn:name="Reserved",type=integer,JSONPath=`.status.reservedTokens`,description="Tokens held by open reservations"
// +kubebuilder:printcolumn:name="Available",type=integer,JSONPath=`.status.availableTokens`,description="Tokens that can still be reserved"
// +kubebuilder:printcolumn:name="Raised-By",type=string,JSONPath=`.status.activeRaise.name`,description="The TemporaryLimitLease now in force"
// +kubebuilder:printcolumn:name="Raised-Until",type=string,JSONPath=`.status.activeRaise.expiresAt`,description="When the raise ends"
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Reason",type=string,priority=1,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Over-Limit",type=integer,priority=1,JSONPath=`.status.overLimitTokens`,description="Tokens used and reserved above the limit"
// +kubebuilder:printcolumn:name="Used-Percent",type=integer,priority=1,JSONPath=`.status.usedPercent`
// +kubebuilder:printcolumn:name="Period-Ends",type=string,priority=1,JSONPath=`.status.period.endsAt`,description="When the budget begins anew"
// +kubebuilder:printcolumn:name="Pending-Raises",type=integer,priority=1,JSONPath=`.status.pendingRaises`
// +kubebuilder:printcolumn:name="Bucket-Key",type=string,priority=1,JSONPath=`.status.bucketKey`,description="The key of the bucket in the ledger"
// +kubebuilder:validation:XValidation:rule="self.metadata.name.size() <= 63",message="metadata.name must be at most 63 characters long: choose a shorter name for the TokenBucket"
type TokenBucket struct {
	metav1.TypeMeta `json:",inline"`

	// metadata is the standard object metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitzero"`

	// spec is the budget that is asked for.
	// +required
	Spec TokenBucketSpec `json:"spec,omitzero"`

	// status mirrors the ledger; only the operator writes it.
	// +optional
	// +kubebuilder:default={"observedGeneration":-1}
	Status TokenBucketStatus `json:"status,omitempty,omitzero"`
}

// TokenBucketList is a list of TokenBuckets.
//
// +kubebuilder:object:root=true
type TokenBucketList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitzero"`
	Items           []TokenBucket `json:"items"`
}
