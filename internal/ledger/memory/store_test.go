package memory

import (
	"testing"
	"time"

	"github.com/token-lease/operator/internal/ledger"
	"github.com/token-lease/operator/internal/ledger/ledgertest"
)

// Goal: what cannot be made durable is refused alone, and leaves nothing behind.
// Method: an index entry without its lease stands in for a row that the rules did
// not see; three reserves in one call, of which the second meets it.
func TestViolationIsRefusedAlone(t *testing.T) {
	store := New(Options{})
	l := ledger.New(store, nil)
	if _, err := l.OpenBucket(t.Context(), ledger.OpenBucket{Key: "b", Limit: 100}); err != nil {
		t.Fatal(err)
	}
	request := func(name string) ledger.Reserve {
		return ledger.Reserve{Key: "b", RequestKey: name, Fingerprint: "f", Tokens: 10}
	}
	store.rows.requests["b"] = map[ledger.Hash]string{request("second").Needs().RequestHashes[0]: "ghost"}

	results := l.Do(t.Context(), request("first"), request("second"), request("third"))
	for i, want := range []ledger.Code{"", ledger.CodeStoreContractViolation, ""} {
		if got := ledger.CodeOf(errorOf(results[i])); got != want {
			t.Errorf("request %d was answered %q, want %q", i, got, want)
		}
	}
	if b := store.rows.buckets["b"]; b.ReservedTokens != 20 || b.LeaseRecords != 2 || len(store.rows.leases["b"]) != 2 {
		t.Errorf("the bucket reads %+v with %d leases", b, len(store.rows.leases["b"]))
	}
}

func errorOf(result ledger.Result) error {
	if result.Err == nil {
		return nil
	}
	return result.Err
}

type recorder struct {
	ledger.NopObserver
	transitions []ledger.Transition
}

func (r *recorder) ObserveTransition(step ledger.Transition, _ time.Duration) {
	r.transitions = append(r.transitions, step)
}

// Goal: an observer hears of each step of a raise, with the instant at which it
// was due, whether a request or the sweeper performed it.
func TestObserverHearsTransitions(t *testing.T) {
	clock := ledgertest.NewClock()
	seen := &recorder{}
	store := New(Options{Clock: clock.Now, Observer: seen})
	start, end := clock.Now(), clock.Now().Add(time.Minute)
	results := store.Do(t.Context(), []ledger.Request{
		ledger.ApplyDeclared{
			Key: "b", Owner: ledger.Owner{Cluster: "c", Namespace: "n", Name: "b", UID: "u", CreatedAt: start}, Generation: 1,
			Declaration: ledger.Declaration{
				Limit: 100, TenantID: "t", Settings: ledger.DefaultSettings(), ConflictPolicy: ledger.ConflictReview,
				Raises: ledger.RaisePolicy{Mode: ledger.ModeEnforce, MaxLimit: 300, MaxDuration: time.Hour},
			},
		},
		ledger.StoreRaise{Key: "b", BucketUID: "u", BucketGeneration: 1, Grant: ledger.Grant{
			UID: "r", CreatedAt: start, Cluster: "c", Namespace: "n", Name: "r", TenantID: "t", ScopedKeyID: "k", NormalLimit: 100, TemporaryLimit: 300,
			StartsAt: &start, ExpiresAt: end, ApprovalID: "a", OnBaseChange: ledger.BaseChangeReview,
		}},
	})
	if results[1].Err != nil {
		t.Fatal(results[1].Err)
	}
	clock.Set(end.Add(time.Second))
	if _, err := store.Sweep(t.Context(), ledger.SweepRequest{Limit: 1}); err != nil {
		t.Fatal(err)
	}
	if len(seen.transitions) != 2 {
		t.Fatalf("heard of the transitions %+v", seen.transitions)
	}
	restore := seen.transitions[1]
	if restore.Kind != ledger.TransitionRestore || restore.RaiseID != "r" || !restore.DueAt.Equal(end) || !restore.At.Equal(end.Add(time.Second)) {
		t.Errorf("heard of the restore as %+v", restore)
	}
}
