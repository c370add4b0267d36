package e2e_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/internal/ledger"
)

// permanentChange is a way to change the limit of a raised bucket for good.
type permanentChange struct {
	name   string
	change func(t *testing.T, in *installation)
	limit  int64
	// declared says that the change is the bucket's own wish.
	declared bool
}

// Goal: a permanent change that is made while a raise is active stays, whoever
// makes it: the restore never overwrites it, the raise ends and asks for review.
// Method: change the limit to 180,000 by each way there is, let the expiry of the
// raise pass, and make the ledger look at the bucket again.
func TestPermanentChangeDuringTheRaise(t *testing.T) {
	t.Parallel()
	const update = "UPDATE tokenlease.buckets SET limit_tokens = $1 WHERE bucket_key = $2"
	for _, c := range []permanentChange{
		{"by the spec", func(t *testing.T, in *installation) {
			in.patch(t, in.bucket(), `{"spec": {"limit": %d}}`, permanent)
		}, permanent, true},
		{"by SetLimit", func(t *testing.T, in *installation) {
			_, err := in.db.ledger.SetLimit(call(t), ledger.SetLimit{
				Key: in.key(bucketName), ExpectedLimit: temporary, Limit: permanent, Actor: "somebody",
			})
			if err != nil {
				t.Fatal(err)
			}
		}, permanent, false},
		{"by SQL", func(t *testing.T, in *installation) {
			in.db.exec(t, update, permanent, in.key(bucketName))
		}, permanent, false},
		{"by SQL, to the same figure", func(t *testing.T, in *installation) {
			in.db.exec(t, update, temporary, in.key(bucketName))
		}, temporary, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			c.check(t)
		})
	}
}

func (c permanentChange) check(t *testing.T) {
	in := install(t)
	key := in.key(bucketName)
	m := in.start(t, "manager-a", managerOptions{})
	in.raised(t)

	c.change(t, in)
	in.db.waitLimit(t, key, c.limit)
	if lease := in.waitLease(t, leaseName, underReview); lease.Status.State != v1alpha1.RaiseStateFailed {
		t.Errorf("state %s, want Failed", lease.Status.State)
	}
	in.checkInSync(t, c.declared)

	in.passExpiry(t, leaseName)
	snapshot, err := in.db.ledger.Inspect(call(t), key)
	if err != nil {
		t.Fatal(err)
	}
	if snapshot.Limit != c.limit || snapshot.ActiveRaise != nil {
		t.Errorf("after the expiry the limit is %d under %v, want %d and no raise", snapshot.Limit, snapshot.ActiveRaise, c.limit)
	}
	if got := in.db.limit(t, key); got != c.limit {
		t.Errorf("after the expiry L is %d, want %d", got, c.limit)
	}
	in.waitLease(t, leaseName, underReview)
	in.waitNoFinalizer(t, leaseName)
	in.checkInSync(t, c.declared)
	failed := in.db.one(t, key, "RaiseFailed")
	if failed.text("outcome") != "kept" || failed.text("reason") != "LimitChanged" {
		t.Errorf("audited as %s/%s, want kept/LimitChanged", failed.text("outcome"), failed.text("reason"))
	}
	if events := in.db.events(t, key); strings.Contains(strings.Join(events, " "), "RaiseRestored") {
		t.Errorf("restored: %v", events)
	}
	conflicts := 0.0 // those that another process met are in that one's metrics
	if failed.text("worker") == m.worker {
		conflicts = 1
	}
	m.wantMetrics(t, map[string]float64{
		`budget_lease_transitions_total{outcome="applied",transition="restore"}`: 0,
		`budget_lease_restore_lag_seconds_count`:                                 0,
		`budget_lease_limit_conflicts_total{reason="LimitChanged"}`:              conflicts,
	})
	in.wantEvents(t, v1alpha1.EventReviewRequired)
}

// checkInSync waits until the bucket shows whether the limit is the declared one.
func (in *installation) checkInSync(t *testing.T, declared bool) {
	t.Helper()
	sync := isFalse(v1alpha1.ConditionLimitInSync).because(v1alpha1.ReasonLimitChanged)
	if declared {
		sync = isTrue(v1alpha1.ConditionLimitInSync)
	}
	in.waitBucket(t, isFalse(v1alpha1.ConditionRaised), sync)
}

// Goal: with onBaseChange Rebase the raise stays over the new declared limit, and
// returns to it without review.
func TestRebase(t *testing.T) {
	t.Parallel()
	in := install(t)
	in.start(t, "manager-a", managerOptions{})
	in.raised(t, rebasing)
	in.patch(t, in.bucket(), `{"spec": {"limit": %d}}`, permanent)
	waitFor(t, "the new base", func() (bool, string) {
		got := in.db.raise(t, in.namespace, leaseName).text("restore_to_tokens")
		return got == "180000", got
	})
	if got := in.db.limit(t, in.key(bucketName)); got != temporary {
		t.Errorf("the limit is %d during the raise, want %d", got, temporary)
	}
	in.waitBucket(t, isTrue(v1alpha1.ConditionRaised), isTrue(v1alpha1.ConditionLimitInSync))
	in.waitLease(t, leaseName, active)
	in.shorten(t, time.Second)
	in.waitLease(t, leaseName, restored)
	in.waitBucket(t, inSync...)
	if got := in.db.limit(t, in.key(bucketName)); got != permanent {
		t.Errorf("the limit is %d after the raise, want %d", got, permanent)
	}
	want := []string{"BucketOpened", "RaiseStored", "RaiseActivated", "RaiseRebased", "RaiseShortened", "RaiseRestored/Expired"}
	if got := in.db.events(t, in.key(bucketName)); !slices.Equal(got, want) {
		t.Errorf("audit %v, want %v", got, want)
	}
}

// Goal: usage never holds a restore up. Below what is allocated the limit is back,
// the bucket is over its limit and admits nothing, holders settle what they hold,
// and the condition clears by itself.
func TestRestoreBelowAllocated(t *testing.T) {
	t.Parallel()
	in := install(t)
	key := in.key(bucketName)
	in.start(t, "manager-a", managerOptions{})
	in.raised(t)
	used, first, second := in.mustReserve(t, "used", 100_000), in.mustReserve(t, "first", 60_000), in.mustReserve(t, "second", 40_000)
	in.mustCommit(t, used, 100_000)
	in.shorten(t, time.Second)
	in.waitLease(t, leaseName, restored)

	stage(t, "over the limit")
	if got := in.db.limit(t, key); got != normal {
		t.Errorf("the limit is %d, want %d", got, normal)
	}
	b := in.waitBucket(t, isTrue(v1alpha1.ConditionOverLimit), isTrue(v1alpha1.ConditionReady), isTrue(v1alpha1.ConditionLimitInSync))
	if s := b.Status; s.OverLimitTokens == nil || *s.OverLimitTokens != 80_000 || s.AvailableTokens == nil || *s.AvailableTokens != 0 {
		t.Errorf("status %s, want 80000 over the limit and 0 available", asJSON(s))
	}
	in.wantRefused(t, "more", 1, ledger.CodeBudgetExceeded)

	stage(t, "the holders settle")
	in.mustCommit(t, first, 10_000)
	in.wantRefused(t, "more", 1, ledger.CodeBudgetExceeded)
	in.waitBucket(t, isTrue(v1alpha1.ConditionOverLimit))
	in.mustRelease(t, second)
	in.waitBucket(t, isFalse(v1alpha1.ConditionOverLimit))
	in.mustReserve(t, "more", 10_000)
	in.wantRefused(t, "even more", 1, ledger.CodeBudgetExceeded)
	in.db.counters(t, key)
	in.wantEvents(t, v1alpha1.EventOverLimit, v1alpha1.EventWithinLimit)
}
