package ledger

import "time"

// Operation names a verb, in metrics and as the trigger in the audit.
type Operation string

// The verbs.
const (
	OpOpenBucket        Operation = "open_bucket"
	OpSetLimit          Operation = "set_limit"
	OpReserve           Operation = "reserve"
	OpCommit            Operation = "commit"
	OpRelease           Operation = "release"
	OpExtend            Operation = "extend"
	OpPurge             Operation = "purge"
	OpReapExpired       Operation = "reap_expired"
	OpInspect           Operation = "inspect"
	OpApplyDeclare      Operation = "apply_declared"
	OpCloseBucket       Operation = "close_bucket"
	OpStoreRaise        Operation = "store_raise"
	OpRevokeRaise       Operation = "revoke_raise"
	OpAcknowledgeReview Operation = "acknowledge_review"
	OpTouch             Operation = "touch"
)

// Request is one thing asked of the ledger. The types of this file are the only
// ones that implement it.
type Request interface {
	// Operation names the verb.
	Operation() Operation
	// Bucket is the key of the bucket that the request is about.
	Bucket() string
	// Needs tells a store which rows the rules must see, beside the bucket's own
	// row and its live raises, which they always see.
	Needs() Needs

	validate() error
	apply(u *unit) Result
}

// Needs are the rows that one request's rules read, all of one bucket.
type Needs struct {
	// RequestHashes name leases that the ledger made, LeaseIDs imported ones.
	RequestHashes []Hash
	LeaseIDs      []string
	OperationIDs  []string
	// RaiseUIDs names raises by ID or by current UID, whatever their state.
	RaiseUIDs []string
	// Grants names raises by the object that asked and what it asked.
	Grants []GrantKey
	// Approvals names approvals that may have been spent.
	Approvals []ApprovalKey
	// LivePeriods asks for the ended periods in which something is reserved still.
	LivePeriods bool
	// Oldest asks for so many leases and so many operations of those that the bucket's
	// retention may be over for, the oldest first.
	Oldest int
}

// GrantKey finds the record of a grant that another incarnation of the same
// object asked for.
type GrantKey struct {
	Cluster, Namespace, Name, ApprovalID, GrantHash string
}

// ApprovalKey is what an approval is unique within: a tenant belongs to its
// namespace.
type ApprovalKey struct {
	Cluster, Namespace, TenantID, ApprovalID string
}

// Result answers one request. Exactly one of Err and the fields that the request
// documents is set.
type Result struct {
	Err *Error
	// Snapshot is the bucket after the request; nil when there is none.
	Snapshot *Snapshot
	// Lease is set by Reserve, Commit, Release and Extend.
	Lease *Lease
	// Purged is set by Purge.
	Purged *Purged
	// ExpiredLeaseIDs is set by ReapExpired and Touch, in byte order.
	ExpiredLeaseIDs []string
	// Raise is set by StoreRaise and RevokeRaise.
	Raise *Raise
	// Closing is set by CloseBucket.
	Closing *Closing
}

// Closing tells how far the closing of a bucket has come.
type Closing struct {
	// Done is true when nothing of the object's wish is left to do.
	Done bool
	// ReservedTokens is what a deletion still waits for.
	ReservedTokens int64
}

// OpenBucket creates a bucket without an owner, or verifies that it exists with
// the limit. A raised bucket is compared with the limit that its restore will
// return to. Answers Snapshot; refuses with bucket_limit_conflict.
type OpenBucket struct {
	Key   string
	Limit int64
	// Settings are stored when the bucket is created; the zero value means
	// DefaultSettings.
	Settings ReservationSettings
}

// SetLimit changes the limit if it is the expected one. Answers Snapshot; refuses
// with limit_changed or limit_below_allocated. On a raised bucket the limit in
// force is compared, and the raise ends with LimitChanged, also when the value
// stays equal.
type SetLimit struct {
	Key           string
	ExpectedLimit int64
	Limit         int64
	// OperationID names the effect: repeated, it has the same outcome. The ledger
	// makes one up when it is empty.
	OperationID string
	// Actor is recorded in the audit.
	Actor string
}

// Reserve takes tokens of the bucket for a while. Answers Lease and Snapshot.
type Reserve struct {
	Key string
	// RequestKey makes the request idempotent within its bucket.
	RequestKey string
	// Fingerprint says what the request is; a replay must match it.
	Fingerprint string
	// Tokens is the estimate, from 1 to MaxTokens.
	Tokens int64
	// TTL is how long the lease lives; 0 means the bucket's default, and on a
	// replay the original's.
	TTL time.Duration
	// Holder is whom the lease belongs to, "" for nobody. A replay by another holder
	// is refused as one with other inputs.
	Holder string
	// FirstAttemptAt is when the request was made first, if its caller says so: one
	// that is older than the bucket's retention is refused with request_too_old, since
	// its lease may have been purged.
	FirstAttemptAt *time.Time
}

// Commit settles a lease with the actual figure. Answers Lease and Snapshot. What a
// figure above the reservation, or one that comes after expiry, leads to is the
// bucket's SettlementPolicy.
type Commit struct {
	Key          string
	LeaseID      string
	ActualTokens int64
	// Holder, if set, is whose lease it must be: another's is not found, and one of
	// nobody belongs to everybody.
	Holder string
}

// Release gives a reservation back unused. Answers Lease and Snapshot.
type Release struct {
	Key     string
	LeaseID string
	// Holder is as in Commit.
	Holder string
}

// Extend moves the expiry of a reserved lease to TTL from now, never earlier than it
// stands. Answers Lease and Snapshot. Repeating it is harmless.
type Extend struct {
	Key     string
	LeaseID string
	// TTL is from now, at most the bucket's maximum; 0 means the bucket's default.
	TTL time.Duration
	// Holder is as in Commit.
	Holder string
}

// MaxPurge bounds what one Purge looks at.
const MaxPurge = 1000

// Purge removes leases that were settled longer ago than the bucket's retention, and
// operations that were recorded longer ago, at most Limit of each. What the leases used
// is added to the rollups. Answers Purged and Snapshot.
type Purge struct {
	Key string
	// Limit is from 1 to MaxPurge.
	Limit int
}

// Purged tells what a Purge did.
type Purged struct {
	Leases, Operations int64
	// More is true when there may be more to purge at once.
	More bool
}

// ReapExpired expires every overdue lease. Answers ExpiredLeaseIDs and Snapshot.
type ReapExpired struct{ Key string }

// Inspect answers a Snapshot after performing what is due.
type Inspect struct{ Key string }

// Touch performs what is due on a bucket; a bucket that does not exist is no
// error. Answers Snapshot, nil if there is no bucket.
type Touch struct{ Key string }

// Declaration is what a TokenBucket asks for.
type Declaration struct {
	Limit          int64
	TenantID       string
	ScopedKeyID    string
	Settings       ReservationSettings
	ConflictPolicy ConflictPolicy
	Raises         RaisePolicy
	// Period says when the bucket begins anew; the zero value means never.
	Period PeriodSpec
}

// ApplyDeclared opens a bucket or changes it to what its owner declares. Answers
// Snapshot; refuses with owner_conflict, stale_generation, bucket_row_missing or
// bucket_closed.
type ApplyDeclared struct {
	Key   string
	Owner Owner
	// Generation orders declarations of one incarnation of the owner.
	Generation  int64
	Declaration Declaration
	// ExpectExisting is true when the caller knows that the bucket existed, so
	// that a missing row is refused even when its audit is gone too.
	ExpectExisting bool
	// Actor is recorded in the audit.
	Actor string
}

// CloseBucket ends a bucket whose owner was deleted. Answers Closing. A bucket
// that is missing, or belongs to somebody else, counts as done.
type CloseBucket struct {
	Key      string
	Owner    Owner
	Deletion DeletionPolicy
	Actor    string
}

// StoreRaise stores the intent of a raise, or finds the record that exists for
// it; a repetition can only move ExpiresAt earlier. Answers Raise, in whatever
// state it is. Refuses with bucket_not_ready, bucket_not_found, bucket_closed,
// owner_conflict, raise_limit or raise_conflict.
type StoreRaise struct {
	Key   string
	Grant Grant
	// BucketUID and BucketGeneration are the TokenBucket that the grant was
	// written against: that generation must have reached the ledger.
	BucketUID        string
	BucketGeneration int64
	// MaxDuration bounds the window of a new raise, beside the bucket's policy; 0 for
	// no bound.
	MaxDuration time.Duration
	// ShortenedBy is the actor of an earlier ExpiresAt; "" means the grant's.
	ShortenedBy string
}

// RevokeRaise ends a raise because the object that stands for it was deleted.
// Answers Raise; a finished raise, or one that another incarnation stands for
// now, is answered unchanged. Refuses with raise_not_found.
type RevokeRaise struct {
	Key string
	// UID is the deleted object's.
	UID   string
	Actor string
}

// AcknowledgeReview records that somebody has looked at a raise that asks for review.
// Answers Raise; one that asks for none, or that another incarnation stands for now,
// is answered unchanged. Refuses with raise_not_found.
type AcknowledgeReview struct {
	Key string
	// UID is that of the object that stands for the raise.
	UID   string
	Actor string
}

// Operation implements Request.
func (OpenBucket) Operation() Operation    { return OpOpenBucket }
func (SetLimit) Operation() Operation      { return OpSetLimit }
func (Reserve) Operation() Operation       { return OpReserve }
func (Commit) Operation() Operation        { return OpCommit }
func (Release) Operation() Operation       { return OpRelease }
func (Extend) Operation() Operation        { return OpExtend }
func (ReapExpired) Operation() Operation   { return OpReapExpired }
func (Purge) Operation() Operation         { return OpPurge }
func (Inspect) Operation() Operation       { return OpInspect }
func (Touch) Operation() Operation         { return OpTouch }
func (ApplyDeclared) Operation() Operation { return OpApplyDeclare }
func (CloseBucket) Operation() Operation   { return OpCloseBucket }
func (StoreRaise) Operation() Operation    { return OpStoreRaise }
func (RevokeRaise) Operation() Operation   { return OpRevokeRaise }

// Operation implements Request.
func (AcknowledgeReview) Operation() Operation { return OpAcknowledgeReview }

// Bucket implements Request.
func (r AcknowledgeReview) Bucket() string { return r.Key }

// Needs implements Request.
func (r AcknowledgeReview) Needs() Needs { return Needs{RaiseUIDs: []string{r.UID}} }

func (r AcknowledgeReview) validate() error {
	return RevokeRaise(r).validate()
}

// Bucket implements Request.
func (r OpenBucket) Bucket() string    { return r.Key }
func (r SetLimit) Bucket() string      { return r.Key }
func (r Reserve) Bucket() string       { return r.Key }
func (r Commit) Bucket() string        { return r.Key }
func (r Release) Bucket() string       { return r.Key }
func (r Extend) Bucket() string        { return r.Key }
func (r ReapExpired) Bucket() string   { return r.Key }
func (r Purge) Bucket() string         { return r.Key }
func (r Inspect) Bucket() string       { return r.Key }
func (r Touch) Bucket() string         { return r.Key }
func (r ApplyDeclared) Bucket() string { return r.Key }
func (r CloseBucket) Bucket() string   { return r.Key }
func (r StoreRaise) Bucket() string    { return r.Key }
func (r RevokeRaise) Bucket() string   { return r.Key }

// Needs implements Request.
func (OpenBucket) Needs() Needs    { return Needs{} }
func (Inspect) Needs() Needs       { return Needs{} }
func (Touch) Needs() Needs         { return Needs{} }
func (ApplyDeclared) Needs() Needs { return Needs{} }
func (CloseBucket) Needs() Needs   { return Needs{LivePeriods: true} }
func (ReapExpired) Needs() Needs   { return Needs{} }
func (r Purge) Needs() Needs       { return Needs{Oldest: r.Limit} }

func (r SetLimit) Needs() Needs {
	return Needs{OperationIDs: []string{r.OperationID}}
}

func (r Reserve) Needs() Needs {
	return Needs{RequestHashes: []Hash{requestHash(r.Key, r.RequestKey)}}
}

func (r Commit) Needs() Needs { return needsOfLease(r.LeaseID) }

func (r Release) Needs() Needs { return needsOfLease(r.LeaseID) }

func (r Extend) Needs() Needs { return needsOfLease(r.LeaseID) }

func needsOfLease(id string) Needs {
	if hash, ok := requestHashOf(id); ok {
		return Needs{RequestHashes: []Hash{hash}}
	}
	return Needs{LeaseIDs: []string{id}}
}

func (r StoreRaise) Needs() Needs {
	return Needs{
		RaiseUIDs: []string{r.Grant.UID},
		Grants:    []GrantKey{r.Grant.key(r.Key)},
		Approvals: []ApprovalKey{r.Grant.approval()},
	}
}

func (r RevokeRaise) Needs() Needs { return Needs{RaiseUIDs: []string{r.UID}} }

func (g Grant) key(bucketKey string) GrantKey {
	return GrantKey{
		Cluster: g.Cluster, Namespace: g.Namespace, Name: g.Name,
		ApprovalID: g.ApprovalID, GrantHash: g.hash(bucketKey),
	}
}

func (g Grant) approval() ApprovalKey {
	return ApprovalKey{Cluster: g.Cluster, Namespace: g.Namespace, TenantID: g.TenantID, ApprovalID: g.ApprovalID}
}

func (r *Raise) approval() ApprovalKey {
	return ApprovalKey{Cluster: r.Cluster, Namespace: r.Namespace, TenantID: r.TenantID, ApprovalID: r.ApprovalID}
}
