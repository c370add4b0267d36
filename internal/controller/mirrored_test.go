package controller

import (
	"testing"
	"time"

	"k8s.io/utils/ptr"

	"github.com/token-lease/operator/internal/ledger"
)

// Goal: a status is made of the mirror's query only where a declaration would
// change nothing; whatever differs is asked of the ledger itself. Method: one
// snapshot that says it all, then one difference at a time.
func TestSaysItAll(t *testing.T) {
	owner := ledger.Owner{Cluster: "c", Namespace: "ns", Name: "b", UID: "u", CreatedAt: time.Unix(1000, 0)}
	request := ledger.ApplyDeclared{
		Key: "ns/b", Owner: owner, Generation: 2,
		Declaration: ledger.Declaration{
			Limit: 100, TenantID: "t", ScopedKeyID: "k", Settings: ledger.DefaultSettings(),
			ConflictPolicy: ledger.ConflictReview, Raises: ledger.RaisePolicy{Mode: ledger.ModeDisabled},
		},
	}
	const shown = 7
	complete := func() *ledger.Snapshot {
		return &ledger.Snapshot{
			Key: "ns/b", Owner: ptr.To(owner), TenantID: "t", ScopedKeyID: "k", Limit: 300, BaseLimit: 100,
			DeclaredLimit: ptr.To[int64](100), DeclaredGeneration: 2, Settings: ledger.DefaultSettings(),
			RaisePolicy: ledger.RaisePolicy{Mode: ledger.ModeDisabled}, Revision: shown,
		}
	}
	if !saysItAll(complete(), shown, &request) {
		t.Error("a snapshot that says it all is not believed")
	}
	if saysItAll(nil, 0, &request) {
		t.Error("a bucket that is not there says it all")
	}
	for name, change := range map[string]func(*ledger.Snapshot){
		"older than the status":    func(s *ledger.Snapshot) { s.Revision = shown - 1 },
		"closed":                   func(s *ledger.Snapshot) { s.Closed = true },
		"no owner":                 func(s *ledger.Snapshot) { s.Owner = nil },
		"another incarnation":      func(s *ledger.Snapshot) { s.Owner.UID = "u2" },
		"another object":           func(s *ledger.Snapshot) { s.Owner.Name = "b2" },
		"an older declaration":     func(s *ledger.Snapshot) { s.DeclaredGeneration = 1 },
		"another declared limit":   func(s *ledger.Snapshot) { s.DeclaredLimit = ptr.To[int64](99) },
		"no declared limit":        func(s *ledger.Snapshot) { s.DeclaredLimit = nil },
		"another key":              func(s *ledger.Snapshot) { s.ScopedKeyID = "k2" },
		"other settings":           func(s *ledger.Snapshot) { s.Settings.MaxRecords = 5 },
		"another policy of raises": func(s *ledger.Snapshot) { s.RaisePolicy.Mode = ledger.ModeEnforce },
	} {
		t.Run(name, func(t *testing.T) {
			s := complete()
			change(s)
			if saysItAll(s, shown, &request) {
				t.Error("it is believed to say it all")
			}
		})
	}
	taken := complete()
	taken.BaseLimit = 250
	if !saysItAll(taken, shown, &request) {
		t.Error("another hand's limit is kept under Review, so there is nothing to ask for")
	}
	request.Declaration.ConflictPolicy = ledger.ConflictOverwrite
	if saysItAll(taken, shown, &request) {
		t.Error("another hand's limit would not be overwritten")
	}
}
