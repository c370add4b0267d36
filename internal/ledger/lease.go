package ledger

import (
	"encoding/base64"
	"strconv"
	"strings"
	"time"
)

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
	// ID names this lease and no other, ever. The ledger makes it of the request
	// hash and the creation instant; an imported lease keeps the one it came with.
	ID        string
	BucketKey string
	// RequestHash and FingerprintHash stand for the request key and for what was
	// asked; the plain texts are never stored.
	RequestHash     Hash
	FingerprintHash Hash
	State           LeaseState
	ReservedTokens  int64
	// ActualTokens is set once committed.
	ActualTokens *int64
	// TTL is what the lease was reserved for. A replay that names no TTL is
	// compared with it.
	TTL       time.Duration
	CreatedAt time.Time
	// ExpiresAt is TTL after CreatedAt, or later if the lease was extended.
	ExpiresAt time.Time
	// SettledAt is when it was committed, was released or was found expired.
	SettledAt *time.Time
	// Late is set when it was committed after it had expired.
	Late bool

	// PeriodStart is the start of the bucket's period in which it was reserved, and in
	// which it settles; the zero time on a bucket without periods.
	PeriodStart time.Time
	// Holder is whom the lease belongs to, "" for nobody.
	Holder string

	// ScopedKeyID and RaiseID are the bucket's at admission.
	ScopedKeyID string
	RaiseID     string

	// RefusedTokens is the highest actual figure that a commit was refused, and
	// RefusedCommits how often: tokens that were spent stay visible.
	RefusedTokens  *int64
	RefusedCommits int64
	// ImportedAt is set on a lease that was brought over from the npm package.
	// Retention counts from it.
	ImportedAt *time.Time
}

// Clone returns a copy that shares nothing with l.
func (l *Lease) Clone() *Lease {
	c := *l
	c.ActualTokens = clonePointer(l.ActualTokens)
	c.SettledAt = clonePointer(l.SettledAt)
	c.RefusedTokens = clonePointer(l.RefusedTokens)
	c.ImportedAt = clonePointer(l.ImportedAt)
	return &c
}

// foreignTo reports whether a lease belongs to another holder than the given one.
// Nobody's lease is everybody's, and who names no holder speaks for all.
func (l *Lease) foreignTo(holder string) bool {
	return holder != "" && l.Holder != "" && l.Holder != holder
}

// leaseIDSeparator stands between the two parts of a lease ID.
const leaseIDSeparator = "."

// leaseID makes the ID of a lease: the creation instant, which tells it from a
// later lease of the same request key, and the request hash, by which its row is
// found.
func leaseID(createdAt time.Time, hash Hash) string {
	return strconv.FormatInt(createdAt.UnixMilli(), 36) + leaseIDSeparator + base64.RawURLEncoding.EncodeToString(hash[:])
}

// IsOwnLeaseID reports whether an ID has the form of those that the ledger makes. A
// lease with another one can only have been imported.
func IsOwnLeaseID(id string) bool {
	_, own := requestHashOf(id)
	return own
}

// requestHashOf reads the request hash from a lease ID that the ledger made. The ID
// of an imported lease, or of none, does not hold one.
func requestHashOf(id string) (Hash, bool) {
	var hash Hash
	createdAt, encoded, _ := strings.Cut(id, leaseIDSeparator)
	milliseconds, err := strconv.ParseInt(createdAt, 36, 64)
	if err != nil || len(encoded) != base64.RawURLEncoding.EncodedLen(len(hash)) {
		return hash, false
	}
	if _, err := base64.RawURLEncoding.Strict().Decode(hash[:], []byte(encoded)); err != nil {
		return hash, false
	}
	return hash, leaseID(time.UnixMilli(milliseconds), hash) == id
}
