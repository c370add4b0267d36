package ledger

import "time"

// LeaseState is where a lease stands.
type LeaseState string

// Lease states. The last three are final.
const (
	LeaseReserved  LeaseState = "reserved"
	LeaseCommitted LeaseState = "committed"
	LeaseReleased  LeaseState = "released"
	LeaseExpired   LeaseState = "expired"
)

// Lease is one reservation of tokens.
type Lease struct {
	ID        string
	BucketKey string
	// RequestHash and FingerprintHash are lower-case SHA-256; the plain texts are
	// never stored.
	RequestHash     string
	FingerprintHash string
	State           LeaseState
	ReservedTokens  int64
	// ActualTokens is set once committed.
	ActualTokens *int64
	// TTL is what the lease was reserved for. A replay that names no TTL is
	// compared with it.
	TTL       time.Duration
	CreatedAt time.Time
	ExpiresAt time.Time
	SettledAt *time.Time

	// ScopedKeyID and RaiseID are the bucket's at admission.
	ScopedKeyID string
	RaiseID     string

	// RefusedTokens is the highest actual figure that a commit was refused, and
	// RefusedCommits how often: tokens that were spent stay visible.
	RefusedTokens  *int64
	RefusedCommits int64
}

// Clone returns a copy that shares nothing with l.
func (l *Lease) Clone() *Lease {
	c := *l
	c.ActualTokens = clonePointer(l.ActualTokens)
	c.SettledAt = clonePointer(l.SettledAt)
	c.RefusedTokens = clonePointer(l.RefusedTokens)
	return &c
}
