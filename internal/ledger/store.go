package ledger

import (
	"context"
	"time"
)

// Store keeps buckets and lets the rules of this package decide on them. It
// knows no rule itself: for each bucket of a call it locks the row, reads the
// clock, loads a View, calls Run and makes the Effects durable, all or nothing.
//
// A store answers only what is durable: no result, refusals included, leaves
// before its transaction is confirmed.
type Store interface {
	// Do carries out requests and answers each, in order; len(results) ==
	// len(requests). Requests on one bucket are applied in their order, under one
	// lock and at one instant. A request that cannot be carried out affects the
	// others no further than their transaction, which is run again without it.
	Do(ctx context.Context, requests []Request) []Result

	// Sweep touches up to limit due buckets that nobody else has locked.
	Sweep(ctx context.Context, request SweepRequest) (SweepResult, error)

	// Changes answers the buckets that are not the known ones at the known
	// revisions, and those that are gone, from one query. It performs nothing that is due.
	Changes(ctx context.Context, known []KnownRevision) ([]Change, error)

	// BucketOf answers the key of the bucket that an object declares, whatever the
	// object's UID: the open one, else the latest. It refuses with bucket_not_found.
	BucketOf(ctx context.Context, owner Owner) (string, error)
	// Raise finds a raise by its ID or current UID within a cluster, whichever
	// bucket it is on. It refuses with raise_not_found.
	Raise(ctx context.Context, cluster, uid string) (*Raise, error)
	// LiveRaises lists a cluster's raises that have not ended, by (bucket, ID)
	// after the given position, at most limit.
	LiveRaises(ctx context.Context, cluster string, after RaisePosition, limit int) ([]*Raise, error)
	// Leases lists a bucket's leases by (expires at, ID) after the given position,
	// at most limit.
	Leases(ctx context.Context, bucketKey string, after LeasePosition, limit int) ([]*Lease, error)
	// Purgeable looks through the buckets by key after the given one, at most limit, and
	// lists those that Purge may find something in. next is where to go on, "" once all
	// were looked at.
	Purgeable(ctx context.Context, after string, limit int) (keys []string, next string, err error)
	// Usage lists what a bucket has used, from rollups and leases together, by position
	// after the given one, at most limit. All of it adds up to what was ever used.
	Usage(ctx context.Context, query UsageQuery) ([]Usage, error)
	// Audit lists a bucket's audit rows above a sequence number, at most limit.
	Audit(ctx context.Context, bucketKey string, afterSequence int64, limit int) ([]AuditRow, error)
	// ActivePastExpiry counts raises still active although their expiry has passed.
	ActivePastExpiry(ctx context.Context) (int64, error)
	// OpenReviews counts raises that ask for review and that nobody has acknowledged.
	OpenReviews(ctx context.Context) (int64, error)
	// Writable reports whether the ledger can be written now: nil, or why not.
	Writable(ctx context.Context) error
}

// SweepRequest bounds one pass of the sweeper.
type SweepRequest struct {
	// Limit is how many buckets to touch at most.
	Limit int
	// SetAside are buckets to leave out of this pass.
	SetAside []string
}

// SweepResult tells what a pass did.
type SweepResult struct {
	// Touched are the buckets on which something due was performed.
	Touched []string
	// Failed are the buckets whose touch failed, with the reason.
	Failed map[string]error
	// NextIn is how long from now the next transition is due, by the store's
	// clock: 0 when one is due already, negative when there is none.
	NextIn time.Duration
}

// KnownRevision is a bucket as the caller last saw it; revision 0 asks for the
// bucket whatever its revision. Revisions of a key that was deleted and opened
// again start anew, so CreatedAt tells the two apart.
type KnownRevision struct {
	Key       string
	Revision  int64
	CreatedAt time.Time
}

// Change is a bucket that is not as the caller knows it; Snapshot is nil when the
// bucket is gone.
type Change struct {
	Key      string
	Snapshot *Snapshot
}

// RaisePosition is a place in the list of live raises.
type RaisePosition struct{ BucketKey, RaiseID string }

// LeasePosition is a place in a bucket's list of leases.
type LeasePosition struct {
	ExpiresAt time.Time
	LeaseID   string
}

// View is what the rules see of one bucket: rows that the store loaded under the
// bucket's lock. The rules change it in place; what changed is in Effects.
type View struct {
	Key string
	// Bucket is nil when there is no row.
	Bucket *Bucket
	// History is loaded when there is no row.
	History History
	// Raises are the bucket's live raises and those that the Needs named.
	Raises []*Raise
	// Leases are those that the Needs asked for, and the overdue ones: reserved, with
	// ExpiresAt after the bucket's ExpiredThrough and not after its instant. Each
	// lease is there once.
	Leases []*Lease
	// Periods are the ended ones that the leases above were reserved in, and those that
	// the Needs asked for.
	Periods []*Period
	// OverdueThrough is set when more leases are overdue than Leases holds: it holds
	// those with ExpiresAt up to here.
	OverdueThrough time.Time
	// Operations are the recorded operations that the Needs asked for.
	Operations []OperationRecord
	// Approvals maps the approvals that the Needs named, or live raises hold, to
	// the raise that spent them.
	Approvals map[ApprovalKey]string
}

// OperationRecord keeps the outcome of one operation ID.
type OperationRecord struct {
	BucketKey string
	ID        string
	// Inputs identifies what was asked; the same ID with other inputs is refused.
	Inputs string
	// Code is the refusal; "" for success. Details belong to it.
	Code    Code
	Message string
	Details map[string]any
	At      time.Time
}

// RowWrite says what becomes of a bucket's row.
type RowWrite int

// What becomes of a bucket's row.
const (
	RowUnchanged RowWrite = iota
	RowInsert
	RowUpdate
	// RowDelete removes the bucket, its leases, rollups, periods and operations; audit,
	// raises and approvals stay.
	RowDelete
)

// Effects are what a store must make durable, in one transaction, for one bucket.
type Effects struct {
	Row RowWrite
	// LimitWritten is true when the limit column must be named by the statement,
	// also when its value stays equal. Nothing else may name it.
	LimitWritten bool
	// InsertLeases and UpdateLeases hold each lease once. The store checks that it
	// finds those to update.
	InsertLeases []*Lease
	UpdateLeases []*Lease
	// DeleteLeases and DeleteOperations are gone before anything is inserted; Usage is
	// added to the rollups.
	DeleteLeases     []*Lease
	DeleteOperations []string
	Usage            []Usage
	// ExtendLeases are those of UpdateLeases whose expiry has moved.
	ExtendLeases []*Lease
	// InsertPeriods and UpdatePeriods hold each period once.
	InsertPeriods []*Period
	UpdatePeriods []*Period
	InsertRaises  []*Raise
	UpdateRaises  []*Raise
	// SpendApprovals and FreeApprovals are (approval, raise) pairs.
	SpendApprovals   []SpentApproval
	FreeApprovals    []SpentApproval
	InsertOperations []OperationRecord
	Audit            []AuditRow
	// Transitions are for metrics and logs, once the transaction is confirmed.
	Transitions []Transition
}

// Empty reports whether there is nothing to write. Audit rows can stand alone:
// the history of a bucket outlives its row.
func (e *Effects) Empty() bool { return e.Row == RowUnchanged && len(e.Audit) == 0 }

// SpentApproval says which raise an approval was spent for.
type SpentApproval struct {
	Approval  ApprovalKey
	RaiseID   string
	BucketKey string
	At        time.Time
}

// TransitionKind names what happened to a raise, in metrics and logs.
type TransitionKind string

// What can happen to a raise.
const (
	TransitionActivate TransitionKind = "activate"
	TransitionRestore  TransitionKind = "restore"
	TransitionRevoke   TransitionKind = "revoke"
	TransitionFail     TransitionKind = "fail"
	TransitionWait     TransitionKind = "wait"
	TransitionObserve  TransitionKind = "observe"
)

// Transition reports one step of a raise.
type Transition struct {
	BucketKey string
	RaiseID   string
	Kind      TransitionKind
	Outcome   AuditOutcome
	Reason    Reason
	DueAt     time.Time
	At        time.Time
}

// Observer is told what a store did, after it is durable. Implementations must
// not block.
type Observer interface {
	// ObserveOperation is called once for each request; code is "" for success.
	ObserveOperation(operation Operation, code Code, duration time.Duration)
	// ObserveTransition is called once for each step of a raise. confirmed is the
	// time from the transaction's instant to the confirmation of its COMMIT.
	ObserveTransition(t Transition, confirmed time.Duration)
}

// NopObserver ignores everything.
type NopObserver struct{}

// ObserveOperation implements Observer.
func (NopObserver) ObserveOperation(Operation, Code, time.Duration) {}

// ObserveTransition implements Observer.
func (NopObserver) ObserveTransition(Transition, time.Duration) {}
