package ledger

import "time"

// Mode says what a bucket does with raises.
type Mode string

// Modes of a bucket. They gate activation only: what is active is always
// restored.
const (
	ModeEnforce     Mode = "Enforce"
	ModeObserveOnly Mode = "ObserveOnly"
	ModeDisabled    Mode = "Disabled"
)

// ConflictPolicy says what a declared limit does with a limit that somebody else
// set.
type ConflictPolicy string

// Conflict policies.
const (
	// ConflictReview keeps the other hand's limit and shows it.
	ConflictReview ConflictPolicy = "Review"
	// ConflictOverwrite sets the declared limit.
	ConflictOverwrite ConflictPolicy = "Overwrite"
)

// DeletionPolicy says what becomes of a bucket whose owner is deleted.
type DeletionPolicy string

// Deletion policies.
const (
	// DeletionRetain closes the bucket and keeps it with its usage.
	DeletionRetain DeletionPolicy = "Retain"
	// DeletionDelete closes it, waits until nothing is reserved, then removes it
	// with its leases.
	DeletionDelete DeletionPolicy = "Delete"
)

// Owner is the object that may declare a bucket. Cluster, Namespace and Name
// identify it; UID and CreatedAt tell one incarnation from the next.
type Owner struct {
	Cluster, Namespace, Name string
	UID                      string
	// CreatedAt is the object's creation timestamp, which orders incarnations.
	CreatedAt time.Time
}

// sameObject reports whether both are incarnations of one object.
func (o Owner) sameObject(other Owner) bool {
	return o.Cluster == other.Cluster && o.Namespace == other.Namespace && o.Name == other.Name
}

// RaisePolicy bounds raises on a bucket. The zero value refuses them all, as
// ModeDisabled does.
type RaisePolicy struct {
	Mode Mode
	// MaxLimit is the highest temporary limit, in tokens.
	MaxLimit int64
	// MaxDuration is the longest window from start to expiry.
	MaxDuration time.Duration
}

// SettlementPolicy says what a commit does with tokens that were spent and do not fit.
type SettlementPolicy string

// Settlement policies.
const (
	// SettlementStrict refuses a figure above what the bucket has left, and one that
	// comes after expiry. What was refused stays visible on the lease and in the audit.
	SettlementStrict SettlementPolicy = "Strict"
	// SettlementRecordActual books the figure of a reserved or an expired lease whatever
	// the limit: the tokens are spent. A released lease stays released.
	SettlementRecordActual SettlementPolicy = "RecordActual"
)

// ReservationSettings hold for reservations on one bucket. They are stored with
// it, so that all processes agree.
type ReservationSettings struct {
	// DefaultTTL is taken when a reservation names none.
	DefaultTTL time.Duration
	// MaxTTL is the longest TTL that a reservation may ask for.
	MaxTTL time.Duration
	// MaxRecords bounds the leases that are kept, whatever their state; 0 means
	// no bound.
	MaxRecords int64
	// Retention is how long a lease is kept after it was settled and its expiry has
	// passed, and with it the memory of its request; 0 means for ever.
	Retention time.Duration
	// Settlement is what settling holds to; "" means SettlementStrict.
	Settlement SettlementPolicy
}

// DefaultSettings are the package's defaults, without its bound on records.
func DefaultSettings() ReservationSettings {
	return ReservationSettings{DefaultTTL: DefaultTTL, MaxTTL: DefaultMax, Settlement: SettlementStrict}
}

// stored is the settings as they are kept: one form for one meaning.
func (s ReservationSettings) stored() ReservationSettings {
	if s.Settlement == "" {
		s.Settlement = SettlementStrict
	}
	return s
}

// maxRetention is a hundred years.
const maxRetention = 36525 * 24 * time.Hour

func (s ReservationSettings) validate() error {
	if err := milliseconds("defaultTTL", s.DefaultTTL); err != nil {
		return err
	}
	if err := milliseconds("maxTTL", s.MaxTTL); err != nil {
		return err
	}
	if s.DefaultTTL > s.MaxTTL {
		return invalid("defaultTTL", "defaultTTL cannot exceed maxTTL.")
	}
	if s.Retention < 0 || s.Retention > maxRetention || s.Retention%time.Millisecond != 0 {
		return invalid("retention", "retention must be from 0, for ever, to %v, in whole milliseconds.", maxRetention)
	}
	switch s.Settlement {
	case SettlementStrict, SettlementRecordActual, "":
	default:
		return invalid("settlementPolicy", "settlementPolicy must be Strict or RecordActual, not %q.", s.Settlement)
	}
	return counter("maxRecords", s.MaxRecords)
}

// stored is the policy as it is kept: one form for one meaning.
func (p RaisePolicy) stored() RaisePolicy {
	if p.Mode == "" {
		p.Mode = ModeDisabled
	}
	return p
}

func (p RaisePolicy) validate() error {
	switch p.Mode {
	case ModeDisabled, ModeEnforce, ModeObserveOnly, "":
	default:
		return invalid("raises.mode", "raises.mode must be Enforce, ObserveOnly or Disabled, not %q.", p.Mode)
	}
	if err := counter("raises.maxLimit", p.MaxLimit); err != nil {
		return err
	}
	if p.MaxDuration == 0 && (p.Mode == ModeDisabled || p.Mode == "") {
		return nil
	}
	return milliseconds("raises.maxDuration", p.MaxDuration)
}

// Bucket is one budget as the ledger keeps it.
type Bucket struct {
	Key string
	// Owner is nil for a bucket made by the library rather than by a TokenBucket.
	Owner *Owner
	// RetiredUID is the UID of the owner's incarnation before this one. It breaks
	// the tie when two incarnations were created in the same second.
	RetiredUID  string
	TenantID    string
	ScopedKeyID string

	// Limit is the cap now in force.
	Limit          int64
	UsedTokens     int64
	ReservedTokens int64

	// DeclaredLimit is the latest limit that the owner asked for, in force or
	// not; nil without an owner.
	DeclaredLimit      *int64
	DeclaredGeneration int64
	ConflictPolicy     ConflictPolicy
	Settings           ReservationSettings
	RaisePolicy        RaisePolicy

	// Period is what the owner asks for; it counts from the next roll.
	Period PeriodSpec
	// PeriodStart and PeriodEnd are the current period, [start, end). The stored end
	// is what counts. A zero start is the time before the first period, a zero end
	// never comes.
	PeriodStart, PeriodEnd time.Time

	// ActiveRaiseID points at the raise that set Limit; "" when none did.
	ActiveRaiseID string
	// LimitEpoch counts the writes of Limit, also those that left it equal.
	LimitEpoch int64

	// LeaseRecords counts the leases kept, whatever their state.
	LeaseRecords int64
	// AuditSequence is the number of the bucket's latest audit row.
	AuditSequence int64
	// Revision counts the changes of the bucket, its leases and its raises.
	Revision int64
	// ExpiredThrough is how far leases have been expired: every reserved lease has
	// ExpiresAt after it. Where it stands, the search for overdue leases begins.
	ExpiredThrough time.Time
	// PurgedThrough is how far leases have been purged: of a request that was made
	// before it, nothing may be known any more. The zero time when none ever was.
	PurgedThrough time.Time
	// NextTransitionAt is the earliest instant at which time changes something;
	// the zero time when nothing is due ever.
	NextTransitionAt time.Time
	// ClosedAt is set while the bucket admits nothing because its owner is gone.
	ClosedAt  *time.Time
	CreatedAt time.Time
	UpdatedAt time.Time
}

// Clone returns a copy that shares nothing with b.
func (b *Bucket) Clone() *Bucket {
	if b == nil {
		return nil
	}
	c := *b
	c.Owner = clonePointer(b.Owner)
	c.DeclaredLimit = clonePointer(b.DeclaredLimit)
	c.ClosedAt = clonePointer(b.ClosedAt)
	return &c
}

// available is what a reservation may still take: never negative.
func (b *Bucket) available() int64 {
	return max(0, b.Limit-b.UsedTokens-b.ReservedTokens)
}

// Snapshot is a bucket as callers see it. Leases are read in pages of their own.
type Snapshot struct {
	Key                string
	Owner              *Owner
	TenantID           string
	ScopedKeyID        string
	Limit              int64
	DeclaredLimit      *int64
	DeclaredGeneration int64
	// BaseLimit is the limit without the active raise: what a restore returns to.
	BaseLimit      int64
	UsedTokens     int64
	ReservedTokens int64
	// AvailableTokens is max(0, limit - used - reserved).
	AvailableTokens int64
	// OverLimitTokens is how far used + reserved exceed the limit, else 0.
	OverLimitTokens int64
	LeaseRecords    int64
	Settings        ReservationSettings
	RaisePolicy     RaisePolicy
	// Period is what is declared, CurrentPeriod what is running; nil without one. Used
	// and reserved tokens are of the current one.
	Period        PeriodSpec
	CurrentPeriod *PeriodBounds
	ActiveRaise   *Raise
	PendingRaises int64
	LimitEpoch    int64
	// AuditSequence is the number of the latest audit row: it moves with each
	// decision about the limit, also one to wait.
	AuditSequence int64
	Revision      int64
	Closed        bool
	CreatedAt     time.Time
	UpdatedAt     time.Time
}

// NewSnapshot describes a bucket with its live raises.
func NewSnapshot(b *Bucket, raises []*Raise) Snapshot {
	s := Snapshot{
		Key: b.Key, Owner: clonePointer(b.Owner), TenantID: b.TenantID, ScopedKeyID: b.ScopedKeyID,
		Limit: b.Limit, DeclaredLimit: clonePointer(b.DeclaredLimit), DeclaredGeneration: b.DeclaredGeneration,
		BaseLimit: b.Limit, UsedTokens: b.UsedTokens, ReservedTokens: b.ReservedTokens,
		AvailableTokens: b.available(), OverLimitTokens: max(0, b.UsedTokens+b.ReservedTokens-b.Limit),
		LeaseRecords: b.LeaseRecords, Settings: b.Settings, RaisePolicy: b.RaisePolicy, Period: b.Period,
		LimitEpoch: b.LimitEpoch, AuditSequence: b.AuditSequence, Revision: b.Revision, Closed: b.ClosedAt != nil,
		CreatedAt: b.CreatedAt, UpdatedAt: b.UpdatedAt,
	}
	if !b.PeriodEnd.IsZero() {
		s.CurrentPeriod = &PeriodBounds{StartedAt: b.PeriodStart, EndsAt: b.PeriodEnd}
		if b.PeriodStart.IsZero() {
			s.CurrentPeriod.StartedAt = b.CreatedAt
		}
	}
	for _, r := range raises {
		switch {
		case r.State == RaisePending:
			s.PendingRaises++
		case r.State == RaiseActive && r.ID == b.ActiveRaiseID:
			s.ActiveRaise = r.Clone()
			s.BaseLimit = *r.RestoreTo
		}
	}
	return s
}

func clonePointer[T any](p *T) *T {
	if p == nil {
		return nil
	}
	v := *p
	return &v
}
