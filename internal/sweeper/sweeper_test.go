package sweeper

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/testr"

	"github.com/token-lease/operator/internal/ledger"
	"github.com/token-lease/operator/internal/ledger/memory"
)

// scripted answers each Sweep with the next of its results and keeps the
// requests.
type scripted struct {
	ledger.Store
	results  []ledger.SweepResult
	errs     []error
	requests []ledger.SweepRequest
	// retries are the outcomes of touching buckets that were set aside.
	retries chan *ledger.Error
}

func (s *scripted) Do(_ context.Context, requests []ledger.Request) []ledger.Result {
	results := make([]ledger.Result, len(requests))
	for i := range results {
		results[i].Err = <-s.retries
	}
	return results
}

func (s *scripted) Sweep(_ context.Context, r ledger.SweepRequest) (ledger.SweepResult, error) {
	n := len(s.requests)
	s.requests = append(s.requests, r)
	var err error
	if n < len(s.errs) {
		err = s.errs[n]
	}
	if n < len(s.results) {
		return s.results[n], err
	}
	return ledger.SweepResult{NextIn: -1}, err
}

type counts struct{ touched, setAside int }

func (c *counts) ObserveSweep(touched, setAside int) { c.touched += touched; c.setAside = setAside }

// Goal: a raise ends by the sweeper alone. Method: a memory store with a raise that
// runs for a moment; nothing but the sweeper calls the store until it is restored.
func TestRestoresWithoutAnyTraffic(t *testing.T) {
	store := memory.New(memory.Options{Worker: "sweeper-test"})
	l := ledger.New(store, nil)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	owner := ledger.Owner{Cluster: "c", Namespace: "ns", Name: "b", UID: "bucket-uid", CreatedAt: time.Now()}
	if _, err := l.ApplyDeclared(ctx, ledger.ApplyDeclared{
		Key: "ns/b", Owner: owner, Generation: 1,
		Declaration: ledger.Declaration{
			Limit: 100, TenantID: "b", Settings: ledger.DefaultSettings(), ConflictPolicy: ledger.ConflictReview,
			Raises: ledger.RaisePolicy{Mode: ledger.ModeEnforce, MaxLimit: 1000, MaxDuration: time.Hour},
		},
	}); err != nil {
		t.Fatal(err)
	}
	raise, err := l.StoreRaise(ctx, ledger.StoreRaise{
		Key: "ns/b", BucketUID: owner.UID, BucketGeneration: 1,
		Grant: ledger.Grant{
			UID: "raise-uid", CreatedAt: time.Now(), Cluster: "c", Namespace: "ns", Name: "r", TenantID: "b", ScopedKeyID: "k",
			NormalLimit: 100, TemporaryLimit: 300, ExpiresAt: time.Now().Add(300 * time.Millisecond),
			ApprovalID: "a", OnBaseChange: ledger.BaseChangeReview,
		},
	})
	if err != nil || raise.State != ledger.RaiseActive {
		t.Fatalf("stored raise: %+v, %v", raise, err)
	}

	stopped := make(chan struct{})
	run, stop := context.WithCancel(ctx)
	go func() {
		defer close(stopped)
		New(store, &counts{}, testr.New(t)).Run(run)
	}()
	for raise.State != ledger.RaiseRestored {
		if raise, err = store.Raise(ctx, "c", "raise-uid"); err != nil {
			t.Fatalf("the raise did not end: %v", err)
		}
	}
	stop()
	<-stopped
	rows, err := store.Audit(ctx, "ns/b", 0, 100)
	if err != nil {
		t.Fatal(err)
	}
	last := rows[len(rows)-1]
	if last.Event != ledger.AuditRaiseRestored || last.Worker != "sweeper-test" || last.Trigger != string(ledger.OpTouch) {
		t.Errorf("the audit does not say that the sweeper restored: %+v", last)
	}
}

// Goal: one bad bucket is left out of the passes and tried beside them, with a
// growing, bounded back-off, until it succeeds. Method: passes by hand with a clock
// that the test moves.
func TestBadBucketIsSetAside(t *testing.T) {
	broken := ledger.Errorf(ledger.CodeStateCorrupt, "broken")
	store := &scripted{
		results: []ledger.SweepResult{{Failed: map[string]error{"bad": broken}, NextIn: -1}},
		retries: make(chan *ledger.Error),
	}
	seen := &counts{}
	s := New(store, seen, logr.Discard())
	now := time.Unix(1000, 0)
	s.now = func() time.Time { return now }
	pass := func() {
		t.Helper()
		if _, err := s.pass(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	pass()
	pass()
	if s.retrying != nil || seen.setAside != 1 {
		t.Errorf("retrying %v before the back-off is over, and the metric shows %d set aside", s.retrying != nil, seen.setAside)
	}
	retry := func(outcome *ledger.Error) {
		t.Helper()
		now = s.aside["bad"].until
		pass()
		// While the retry stands still, passes go on without the bucket.
		pass()
		if got := store.requests[len(store.requests)-1].SetAside; !slices.Equal(got, []string{"bad"}) {
			t.Fatalf("set aside: %v", got)
		}
		store.retries <- outcome
		for retrying := s.retrying; s.retrying == retrying; {
			s.noteRetry()
		}
	}
	previous := time.Duration(0)
	for range 12 {
		retry(broken)
		backOff := s.aside["bad"].backOff
		if backOff < previous || backOff > maxAside {
			t.Fatalf("back-off went from %s to %s", previous, backOff)
		}
		previous = backOff
	}
	retry(nil)
	pass()
	if len(s.aside) != 0 || len(store.requests[len(store.requests)-1].SetAside) != 0 {
		t.Errorf("a bucket whose retry succeeded is still remembered: %v", s.aside)
	}
}

// Goal: what is remembered about failing buckets is bounded, as is a retry.
func TestSetAsideIsBounded(t *testing.T) {
	s := New(&scripted{}, &counts{}, logr.Discard())
	now := time.Unix(1000, 0)
	s.now = func() time.Time { return now }
	for i := range maxSetAside + 10 {
		s.putAside(fmt.Sprint(i), errors.New("broken"))
	}
	if len(s.aside) != maxSetAside {
		t.Errorf("%d buckets are remembered", len(s.aside))
	}
	now = now.Add(time.Hour)
	s.aside["first"] = asideBucket{until: now.Add(-2 * time.Hour)}
	if keys := s.ripe(); len(keys) != DefaultBatch || keys[0] != "first" {
		t.Errorf("%d buckets are retried at once, the first is %q", len(keys), keys[0])
	}
}

// Goal: the wait follows the store's clock within its bounds.
func TestWait(t *testing.T) {
	for _, test := range []struct {
		name   string
		result ledger.SweepResult
		want   time.Duration
	}{
		{"nothing is due ever", ledger.SweepResult{NextIn: -1}, maxSleep},
		{"due soon", ledger.SweepResult{NextIn: 300 * time.Millisecond}, 300 * time.Millisecond},
		{"due late", ledger.SweepResult{NextIn: time.Hour}, maxSleep},
		{"due but locked by somebody", ledger.SweepResult{NextIn: 0}, heldSleep},
		{"due while others were touched", ledger.SweepResult{Touched: []string{"a"}, NextIn: 0}, gatherSleep},
		{"due at once", ledger.SweepResult{NextIn: time.Millisecond}, gatherSleep},
		{"a full batch", ledger.SweepResult{Touched: make([]string, DefaultBatch)}, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := New(&scripted{results: []ledger.SweepResult{test.result}}, &counts{}, logr.Discard())
			if got, err := s.pass(t.Context()); err != nil || got != test.want {
				t.Errorf("got %s, %v; want %s", got, err, test.want)
			}
		})
	}
}

// Goal: what a pass did and met counts also when it ended early, so that slow
// buckets do not end every pass at the same place.
func TestPassThatEndsEarly(t *testing.T) {
	store := &scripted{
		results: []ledger.SweepResult{
			{Failed: map[string]error{"bad": errors.New("broken")}},
			{Touched: []string{"good"}, Failed: map[string]error{"slow": errors.New("too slow")}},
		},
		errs: []error{nil, context.DeadlineExceeded},
	}
	seen := &counts{}
	s := New(store, seen, logr.Discard())
	s.aside["good"] = asideBucket{until: s.now().Add(time.Hour)}
	for range 3 {
		if _, err := s.pass(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	aside := slices.Sorted(slices.Values(store.requests[2].SetAside))
	if !slices.Equal(aside, []string{"bad", "slow"}) || len(s.aside) != 2 || seen.touched != 1 {
		t.Errorf("%v are set aside, %d are remembered and %d were touched; want bad and slow, 2 and 1", aside, len(s.aside), seen.touched)
	}
}

// Goal: buckets that fail beyond what is remembered do not make the loop spin.
func TestMoreFailThanAreRemembered(t *testing.T) {
	failed := map[string]error{}
	for i := range DefaultBatch {
		failed[fmt.Sprint("new-", i)] = errors.New("broken")
	}
	s := New(&scripted{results: []ledger.SweepResult{{Failed: failed}, {Failed: failed}}}, &counts{}, logr.Discard())
	if wait, err := s.pass(t.Context()); err != nil || wait != 0 {
		t.Errorf("a full batch of failures that are set aside: wait %s, %v; want none", wait, err)
	}
	s = New(&scripted{results: []ledger.SweepResult{{Failed: failed}}}, &counts{}, logr.Discard())
	for i := range maxSetAside {
		s.aside[fmt.Sprint(i)] = asideBucket{until: s.now().Add(time.Hour)}
	}
	if wait, err := s.pass(t.Context()); err != nil || wait != maxSleep {
		t.Errorf("a full batch of failures that are not remembered: wait %s, %v; want %s", wait, err, maxSleep)
	}
}

// Goal: a pass that fails is tried again until the store is back.
func TestFailingPassesAreRepeated(t *testing.T) {
	broken := errors.New("no database")
	store := &scripted{errs: []error{broken, broken, nil}}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	done := &signalling{reached: cancel}
	New(store, done, logr.Discard()).Run(ctx)
	if len(store.requests) != 3 {
		t.Errorf("the store was asked %d times", len(store.requests))
	}
}

// signalling ends the run at the first pass that succeeds.
type signalling struct{ reached func() }

func (s *signalling) ObserveSweep(int, int) { s.reached() }
