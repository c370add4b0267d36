package ledger

import (
	"slices"
	"strconv"
	"strings"
	"time"
)

// RaiseState is where a raise stands.
type RaiseState string

// Raise states. RaiseRestoring is reserved for caps that live elsewhere; the
// ledger's own restore is one transaction.
const (
	RaisePending   RaiseState = "pending"
	RaiseActive    RaiseState = "active"
	RaiseRestoring RaiseState = "restoring"
	RaiseRestored  RaiseState = "restored"
	RaiseFailed    RaiseState = "failed"
)

// Ended reports whether the state is final.
func (s RaiseState) Ended() bool { return s == RaiseRestored || s == RaiseFailed }

// Reason says why a raise is in its state.
type Reason string

// Reasons of raises and of audit rows.
const (
	ReasonNone                Reason = ""
	ReasonBucketAlreadyRaised Reason = "BucketAlreadyRaised"
	ReasonLimitMismatch       Reason = "LimitMismatch"
	ReasonLimitChanged        Reason = "LimitChanged"
	ReasonWindowMissed        Reason = "WindowMissed"
	ReasonRevoked             Reason = "Revoked"
	ReasonBucketClosed        Reason = "BucketClosed"
	ReasonApprovalAlreadyUsed Reason = "ApprovalAlreadyUsed"
	ReasonObserveOnly         Reason = "ObserveOnly"
	ReasonRaisesDisabled      Reason = "RaisesDisabled"
	ReasonPolicyRefused       Reason = "PolicyRefused"
	ReasonExpired             Reason = "Expired"
	// ReasonLimitBelowAllocated is an audit row's: a limit was not set because it
	// was lower than what is used and reserved.
	ReasonLimitBelowAllocated Reason = "LimitBelowAllocated"

	// Why tokens that were spent were not booked.
	ReasonExceedsBudget Reason = "ExceedsBudget"
	ReasonLeaseExpired  Reason = "LeaseExpired"
)

// OnBaseChange says what a raise does when the declared limit changes under it.
type OnBaseChange string

// What a raise does when the declared limit changes while it is active.
const (
	// BaseChangeReview applies the new limit at once and ends the raise.
	BaseChangeReview OnBaseChange = "Review"
	// BaseChangeRebase keeps the raise over the new limit.
	BaseChangeRebase OnBaseChange = "Rebase"
)

// MaxLiveRaises bounds the raises of one bucket that have not ended: each request
// to the bucket looks at all of them.
const MaxLiveRaises = 100

// MismatchGrace is how long a raise waits for the limit to become the one that it
// expects: a bucket and its lease may arrive in one apply.
const MismatchGrace = 60 * time.Second

// Grant is what was asked for in a raise.
type Grant struct {
	// UID is the asking object's; the first one names the raise.
	UID string
	// CreatedAt is the object's creation timestamp, which orders incarnations: a
	// record is never linked back to an older one.
	CreatedAt                time.Time
	Cluster, Namespace, Name string
	TenantID                 string
	ScopedKeyID              string
	// NormalLimit is the cap that the raise expects to find, in tokens.
	NormalLimit int64
	// TemporaryLimit is the cap that it sets, above NormalLimit.
	TemporaryLimit int64
	// StartsAt is nil for "at once".
	StartsAt   *time.Time
	ExpiresAt  time.Time
	ApprovalID string
	Actor      string
	// OnBehalfOf is whom the actor claims to ask for, "" for nobody. It is kept beside
	// the actor, and checked by nobody.
	OnBehalfOf string
	// Purpose is one line for people, "" for none. It is kept, and judged by
	// nothing.
	Purpose      string
	OnBaseChange OnBaseChange
}

func (g Grant) validate() error {
	for _, f := range []struct {
		name, value string
		maximum     int
	}{
		{"uid", g.UID, MaxNameLength}, {"cluster", g.Cluster, MaxNameLength},
		{"namespace", g.Namespace, MaxNameLength}, {"name", g.Name, MaxNameLength},
		{"tenantID", g.TenantID, MaxIdentifierLength}, {"scopedKeyID", g.ScopedKeyID, MaxIdentifierLength},
		{"approvalID", g.ApprovalID, MaxIdentifierLength},
	} {
		if err := identifier(f.name, f.value, f.maximum); err != nil {
			return err
		}
	}
	if err := optionalIdentifier("actor", g.Actor, MaxActorLength); err != nil {
		return err
	}
	if err := optionalIdentifier("onBehalfOf", g.OnBehalfOf, MaxActorLength); err != nil {
		return err
	}
	if err := optionalLine("purpose", g.Purpose, MaxPurposeLength); err != nil {
		return err
	}
	if err := counter("normalLimit", g.NormalLimit); err != nil {
		return err
	}
	if err := counter("temporaryLimit", g.TemporaryLimit); err != nil {
		return err
	}
	if g.TemporaryLimit <= g.NormalLimit {
		return invalid("temporaryLimit", "temporaryLimit must be above normalLimit.")
	}
	if g.OnBaseChange != BaseChangeReview && g.OnBaseChange != BaseChangeRebase {
		return invalid("onBaseChange", "onBaseChange must be Review or Rebase, not %q.", g.OnBaseChange)
	}
	if err := instant("createdAt", g.CreatedAt); err != nil {
		return err
	}
	if err := instant("expiresAt", g.ExpiresAt); err != nil {
		return err
	}
	if g.StartsAt == nil {
		return nil
	}
	if err := instant("startsAt", *g.StartsAt); err != nil {
		return err
	}
	if g.ExpiresAt.Before(*g.StartsAt) {
		return invalid("expiresAt", "expiresAt must not lie before startsAt.")
	}
	return nil
}

// hash identifies what was granted, whichever incarnation of the object asks:
// a versioned list of fields without expiresAt, which may move.
func (g Grant) hash(bucketKey string) string {
	startsAt := ""
	if g.StartsAt != nil {
		startsAt = strconv.FormatInt(Truncate(*g.StartsAt).UnixMilli(), 10)
	}
	fields := []string{
		"grant/v1", bucketKey, g.TenantID, g.ScopedKeyID,
		strconv.FormatInt(g.NormalLimit, 10), strconv.FormatInt(g.TemporaryLimit, 10),
		startsAt, g.ApprovalID, string(g.OnBaseChange),
	}
	for i, f := range fields {
		fields[i] = quoteJS(f)
	}
	return hashOf("[" + strings.Join(fields, ",") + "]").String()
}

// Raise is the ledger's durable record of a TemporaryLimitLease.
type Raise struct {
	// ID is the UID of the object that first asked.
	ID        string
	BucketKey string
	Cluster   string
	Namespace string
	Name      string
	// CurrentUID is the UID of the object that stands for the raise now,
	// CurrentCreatedAt its creation timestamp.
	CurrentUID       string
	CurrentCreatedAt time.Time
	TenantID         string
	ScopedKeyID      string

	NormalLimit    int64
	TemporaryLimit int64
	// AppliedLimit, RestoreTo and Epoch are set at activation. Together with the
	// bucket's pointer they are the compare-and-set of the restore.
	AppliedLimit *int64
	RestoreTo    *int64
	Epoch        int64

	StartsAt     time.Time
	ExpiresAt    time.Time
	ApprovalID   string
	Actor        string
	OnBehalfOf   string
	Purpose      string
	GrantHash    string
	OnBaseChange OnBaseChange

	State  RaiseState
	Reason Reason
	// ReviewRequired is set when the raise ran and found another cap at its end, until
	// somebody acknowledges that.
	ReviewRequired bool
	// ObservedLimit is the cap that the latest decision on the raise found.
	ObservedLimit *int64
	// Version counts the changes of the record.
	Version int64

	StoredAt    time.Time
	ActivatedAt *time.Time
	EndedAt     *time.Time
	// MismatchSince is when the raise first found another cap than NormalLimit.
	MismatchSince *time.Time
	// ObservedAt is when an observe-only bucket noted what it would have done.
	ObservedAt *time.Time
}

// Clone returns a copy that shares nothing with r.
func (r *Raise) Clone() *Raise {
	c := *r
	c.AppliedLimit = clonePointer(r.AppliedLimit)
	c.RestoreTo = clonePointer(r.RestoreTo)
	c.ObservedLimit = clonePointer(r.ObservedLimit)
	c.ActivatedAt = clonePointer(r.ActivatedAt)
	c.EndedAt = clonePointer(r.EndedAt)
	c.MismatchSince = clonePointer(r.MismatchSince)
	c.ObservedAt = clonePointer(r.ObservedAt)
	return &c
}

// Reviewed reports whether the raise asked for review and that was acknowledged.
func (r *Raise) Reviewed() bool {
	return r.State == RaiseFailed && r.Ran() && r.Reason == ReasonLimitChanged && !r.ReviewRequired
}

// Ran reports whether the raise was ever in force.
func (r *Raise) Ran() bool { return r.ActivatedAt != nil }

// The suffixes of operation IDs that belong to raises.
const (
	suffixActivate        = ":activate"
	suffixRestore         = ":restore"
	suffixRevoke          = ":revoke"
	suffixObserveActivate = ":observe-activate"
	suffixObserveRestore  = ":observe-restore"
)

var raiseOperationSuffixes = []string{
	suffixActivate, suffixRestore, suffixRevoke, suffixObserveActivate, suffixObserveRestore,
}

// ActivateOperation names the effect of putting the raise in force.
func (r *Raise) ActivateOperation() string { return r.ID + suffixActivate }

// RestoreOperation names the effect of its restore at expiry or at the closing of
// its bucket.
func (r *Raise) RestoreOperation() string { return r.ID + suffixRestore }

// RevokeOperation names the effect of ending it because its object was deleted.
func (r *Raise) RevokeOperation() string { return r.ID + suffixRevoke }

func (r *Raise) observeActivateOperation() string { return r.ID + suffixObserveActivate }
func (r *Raise) observeRestoreOperation() string  { return r.ID + suffixObserveRestore }

// IsRaiseOperation reports whether an operation ID names an effect of a raise.
func IsRaiseOperation(id string) bool {
	return slices.ContainsFunc(raiseOperationSuffixes, func(suffix string) bool { return strings.HasSuffix(id, suffix) })
}
