package dataplane

import (
	"encoding/base64"
	"encoding/json"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/token-lease/operator/internal/ledger"
)

const (
	// maxPageToken bounds a page token, in bytes; the longest has the longest of all
	// identifiers.
	maxPageToken = 4096
	// maxPlaceText bounds each text in it.
	maxPlaceText = 1024
)

// leasePlace is a place in a list of leases, as a page token holds it. Instants are in
// milliseconds since 1970.
type leasePlace struct {
	ExpiresAt int64  `json:"t"`
	LeaseID   string `json:"l"`
}

// usagePlace is a place in a list of usage. Without a period there is no start.
type usagePlace struct {
	PeriodStart *int64 `json:"p,omitempty"`
	Hour        int64  `json:"h"`
	Cluster     string `json:"c,omitempty"`
	Namespace   string `json:"n,omitempty"`
	TenantID    string `json:"t,omitempty"`
	ScopedKeyID string `json:"k,omitempty"`
	RaiseID     string `json:"r,omitempty"`
	Late        bool   `json:"l,omitempty"`
}

func writePageToken(place any) (string, error) {
	text, err := json.Marshal(place)
	return base64.RawURLEncoding.EncodeToString(text), err
}

// readPageToken reads what writePageToken wrote. Callers can write what they like, so
// what was read is checked before a store gets it.
func readPageToken(token string, place any) error {
	wrong := invalid("pageToken", "must be nextPageToken of the page before.")
	if len(token) > maxPageToken {
		return wrong
	}
	text, err := base64.RawURLEncoding.Strict().DecodeString(token)
	if err != nil || json.Unmarshal(text, place) != nil {
		return wrong
	}
	return nil
}

func readLeasePlace(token string) (ledger.LeasePosition, error) {
	if token == "" {
		return ledger.LeasePosition{}, nil
	}
	var p leasePlace
	if err := readPageToken(token, &p); err != nil {
		return ledger.LeasePosition{}, err
	}
	at := time.UnixMilli(p.ExpiresAt).UTC()
	if !instantInRange(at) || p.LeaseID == "" || !storable(p.LeaseID) {
		return ledger.LeasePosition{}, invalid("pageToken", "must be nextPageToken of the page before.")
	}
	return ledger.LeasePosition{ExpiresAt: at, LeaseID: p.LeaseID}, nil
}

func writeLeasePlace(last *ledger.Lease) (string, error) {
	return writePageToken(leasePlace{ExpiresAt: last.ExpiresAt.UnixMilli(), LeaseID: last.ID})
}

func readUsagePlace(token string) (*ledger.UsagePosition, error) {
	if token == "" {
		return nil, nil
	}
	var p usagePlace
	if err := readPageToken(token, &p); err != nil {
		return nil, err
	}
	position := &ledger.UsagePosition{
		Hour: time.UnixMilli(p.Hour).UTC(), Cluster: p.Cluster, Namespace: p.Namespace,
		TenantID: p.TenantID, ScopedKeyID: p.ScopedKeyID, RaiseID: p.RaiseID, Late: p.Late,
	}
	if p.PeriodStart != nil {
		position.PeriodStart = time.UnixMilli(*p.PeriodStart).UTC()
	}
	if !instantInRange(position.Hour) || p.PeriodStart != nil && !instantInRange(position.PeriodStart) ||
		!storable(p.Cluster, p.Namespace, p.TenantID, p.ScopedKeyID, p.RaiseID) {
		return nil, invalid("pageToken", "must be nextPageToken of the page before.")
	}
	return position, nil
}

func writeUsagePlace(last *ledger.Usage) (string, error) {
	p := usagePlace{
		Hour: last.Hour.UnixMilli(), Cluster: last.Cluster, Namespace: last.Namespace,
		TenantID: last.TenantID, ScopedKeyID: last.ScopedKeyID, RaiseID: last.RaiseID, Late: last.Late,
	}
	if !last.PeriodStart.IsZero() {
		start := last.PeriodStart.UnixMilli()
		p.PeriodStart = &start
	}
	return writePageToken(p)
}

// instantInRange reports whether an instant is one that the ledger could hold.
func instantInRange(t time.Time) bool {
	return !t.Before(time.Unix(0, 0)) && t.Year() <= 9999
}

// storable reports whether a database could hold the texts.
func storable(texts ...string) bool {
	for _, text := range texts {
		if len(text) > maxPlaceText || !utf8.ValidString(text) || strings.ContainsFunc(text, unicode.IsControl) {
			return false
		}
	}
	return true
}
