package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

// answer is what a step was answered with, in the package's words. Leases are named
// by the steps that made them.
type answer struct {
	Code    string         `json:"code,omitempty"`
	Details map[string]any `json:"details,omitempty"`
	Bucket  *bucketState   `json:"bucket,omitempty"`
	Lease   *leaseState    `json:"lease,omitempty"`
	Expired []int          `json:"expired,omitempty"`
}

// bucketState is a bucket. Records counts its leases; Leases are compared where both
// sides list them.
type bucketState struct {
	Bucket          string       `json:"bucket"`
	Limit           int64        `json:"limit"`
	UsedTokens      int64        `json:"usedTokens"`
	ReservedTokens  int64        `json:"reservedTokens"`
	AvailableTokens int64        `json:"availableTokens"`
	Revision        int64        `json:"revision"`
	CreatedAt       int64        `json:"createdAt"`
	UpdatedAt       int64        `json:"updatedAt"`
	Records         int64        `json:"records"`
	Leases          []leaseState `json:"leases,omitempty"`
}

// leaseState is a lease.
type leaseState struct {
	ID             int    `json:"id"`
	State          string `json:"state"`
	ReservedTokens int64  `json:"reservedTokens"`
	ActualTokens   *int64 `json:"actualTokens"`
	CreatedAt      int64  `json:"createdAt"`
	ExpiresAt      int64  `json:"expiresAt"`
	SettledAt      *int64 `json:"settledAt"`
	// The hashes are listed with a bucket's leases only.
	RequestHash     string `json:"requestHash,omitempty"`
	FingerprintHash string `json:"fingerprintHash,omitempty"`
}

// String is the canonical form in which answers are compared.
func (a answer) String() string {
	slices.Sort(a.Expired)
	if a.Bucket != nil {
		b := *a.Bucket
		slices.SortFunc(b.Leases, func(x, y leaseState) int { return x.ID - y.ID })
		a.Bucket = &b
	}
	text, err := json.Marshal(a)
	if err != nil {
		return err.Error()
	}
	return string(text)
}

// ids tells leases by the steps that made them, and back.
type ids struct {
	ofStep map[int]string
	stepOf map[string]int
}

func newIDs() *ids { return &ids{ofStep: map[int]string{}, stepOf: map[string]int{}} }

// note remembers the lease that a step was answered with.
func (i *ids) note(step int, lease *ledger.Lease) {
	i.ofStep[step] = lease.ID
	if _, known := i.stepOf[lease.ID]; !known {
		i.stepOf[lease.ID] = step
	}
}

// answer says in the package's words what our ledger answered.
func (i *ids) answer(step int, result ledger.Result) answer {
	if result.Err != nil {
		a := answer{Code: string(result.Err.Code), Details: map[string]any{}}
		for name, value := range result.Err.Details {
			switch v := value.(type) {
			case int64:
				a.Details[name] = float64(v)
			case string:
				a.Details[name] = v
				if made, known := i.stepOf[v]; known && name == "leaseId" {
					a.Details[name] = float64(made)
				}
			default:
				a.Details[name] = fmt.Sprintf("%T %v", v, v)
			}
		}
		return a
	}
	a := answer{}
	if result.Lease != nil {
		i.note(step, result.Lease)
		l := i.lease(result.Lease)
		a.Lease = &l
	}
	for _, id := range result.ExpiredLeaseIDs {
		a.Expired = append(a.Expired, i.stepOf[id])
	}
	if s := result.Snapshot; s != nil {
		a.Bucket = &bucketState{
			Bucket: s.Key, Limit: s.Limit, UsedTokens: s.UsedTokens, ReservedTokens: s.ReservedTokens,
			AvailableTokens: s.AvailableTokens, Revision: s.Revision, Records: s.LeaseRecords,
			CreatedAt: s.CreatedAt.UnixMilli(), UpdatedAt: s.UpdatedAt.UnixMilli(),
		}
	}
	return a
}

func (i *ids) lease(l *ledger.Lease) leaseState {
	return leaseState{
		ID: i.stepOf[l.ID], State: string(l.State), ReservedTokens: l.ReservedTokens, ActualTokens: l.ActualTokens,
		CreatedAt: l.CreatedAt.UnixMilli(), ExpiresAt: l.ExpiresAt.UnixMilli(), SettledAt: millisecondsOf(l.SettledAt),
	}
}

func millisecondsOf(t *time.Time) *int64 {
	if t == nil {
		return nil
	}
	ms := t.UnixMilli()
	return &ms
}
