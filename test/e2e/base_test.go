package e2e_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/internal/ledger"
)

// setLimit changes L as a hand with psql does.
func (d *database) setLimit(t *testing.T, key string, tokens int64) {
	t.Helper()
	d.exec(t, "UPDATE tokenlease.buckets SET limit_tokens = $1 WHERE bucket_key = $2", tokens, key)
}

// Goal: under onBaseChange Rebase the declared limit may change any number of times
// during a raise, also above the temporary limit and back: L is the higher of both,
// and the newest declared limit in the end, without review.
func TestRebaseSeveralTimes(t *testing.T) {
	t.Parallel()
	in := install(t)
	key := in.key(bucketName)
	in.start(t, "manager-a", managerOptions{})
	in.raised(t, rebasing)
	watched := watchLimit(t, in.db, key)
	for _, c := range []struct{ declared, limit int64 }{
		{180_000, temporary}, {350_000, 350_000}, {320_000, 320_000}, {100_000, temporary}, {400_000, 400_000}, {150_000, temporary},
	} {
		in.patch(t, in.bucket(), `{"spec": {"limit": %d}}`, c.declared)
		b := in.waitBucket(t, isTrue(v1alpha1.ConditionRaised), isTrue(v1alpha1.ConditionLimitInSync), isTrue(v1alpha1.ConditionReady))
		if s := b.Status; s.Limit == nil || *s.Limit != c.limit || s.DeclaredLimit == nil || *s.DeclaredLimit != c.declared {
			t.Errorf("declared %d: status %s, want the limit %d", c.declared, asJSON(s), c.limit)
		}
		if got := in.db.raise(t, in.namespace, leaseName).text("restore_to_tokens"); got != fmt.Sprint(c.declared) {
			t.Errorf("declared %d: the raise returns to %s", c.declared, got)
		}
		in.waitLease(t, leaseName, active)
		watched.waitSeen(t, c.limit)
	}
	in.passExpiry(t, leaseName)
	in.waitLease(t, leaseName, restored)
	in.waitBucket(t, inSync...)
	watched.wantInTurn(t, temporary, 350_000, 320_000, temporary, 400_000, temporary, 150_000)
	want := []string{
		"BucketOpened", "RaiseStored", "RaiseActivated", "RaiseRebased", "RaiseRebased", "RaiseRebased", "RaiseRebased",
		"RaiseRebased", "RaiseRebased", "RaiseRestored/Expired",
	}
	if got := in.db.events(t, key); !slices.Equal(got, want) {
		t.Errorf("audit %v, want %v", got, want)
	}
}

// Goal: under Rebase, another hand than the declaration still takes the limit away
// from the raise: what it set is kept, and asks for review.
func TestRebaseThenAnotherHand(t *testing.T) {
	t.Parallel()
	in := install(t)
	key := in.key(bucketName)
	in.start(t, "manager-a", managerOptions{})
	in.raised(t, rebasing)
	in.patch(t, in.bucket(), `{"spec": {"limit": %d}}`, permanent)
	in.waitBucket(t, isTrue(v1alpha1.ConditionRaised), isTrue(v1alpha1.ConditionLimitInSync))
	in.db.setLimit(t, key, temporary) // the very same figure
	in.waitLease(t, leaseName, underReview)
	in.waitBucket(t, isFalse(v1alpha1.ConditionRaised), isFalse(v1alpha1.ConditionLimitInSync).because(v1alpha1.ReasonLimitChanged))
	in.passExpiry(t, leaseName)
	in.mustReserve(t, "kept", temporary)
	if got := in.db.limit(t, key); got != temporary {
		t.Errorf("after the expiry L is %d, want what the other hand set, %d", got, temporary)
	}
}

// Goal: with conflictPolicy Overwrite the declared limit is put back after any other
// hand's change, during and after a raise, and never the temporary one; the raise
// that lost the limit asks for review.
func TestOverwrite(t *testing.T) {
	t.Parallel()
	in := install(t)
	key := in.key(bucketName)
	in.start(t, "manager-a", managerOptions{})
	in.create(t, in.bucket(overwriting), in.lease(t))
	in.waitLease(t, leaseName, active)

	stage(t, "before a restore, by SQL and by SetLimit")
	in.db.setLimit(t, key, 250_000)
	in.waitLease(t, leaseName, underReview)
	in.waitNormal(t, bucketName)
	for i, set := range []int64{50_000, temporary, normal + 1} {
		in.db.setLimit(t, key, set)
		in.waitNormal(t, bucketName)
		waitFor(t, "the change by another hand to be in the audit", func() (bool, string) {
			events := in.db.events(t, key)
			count := 0
			for _, e := range events {
				if e == "LimitChangedOutsideLedger/LimitChanged" {
					count++
				}
			}
			return count == i+2, fmt.Sprint(events)
		})
	}
	if _, err := in.db.ledger.SetLimit(call(t), ledger.SetLimit{Key: key, ExpectedLimit: normal, Limit: permanent, Actor: "somebody"}); err != nil {
		t.Fatal(err)
	}
	in.waitNormal(t, bucketName)

	stage(t, "after a raise that ran its course")
	in.create(t, in.otherLease(t, bucketName, "second"))
	in.waitLease(t, "second", active)
	in.passExpiry(t, "second")
	in.waitLease(t, "second", restored)
	in.waitNormal(t, bucketName)
	in.db.setLimit(t, key, temporary)
	in.waitNormal(t, bucketName)
	in.waitLease(t, "second", restored)
	in.waitLease(t, leaseName, underReview)
}

// Goal: a raise that finds another limit than the one it expects waits for a while,
// since bucket and lease may arrive in one apply; it starts when the limit becomes
// so in time, and otherwise ends with a word about it.
func TestMismatch(t *testing.T) {
	t.Parallel()
	in := install(t)
	in.start(t, "manager-a", managerOptions{})
	mismatch := []want{
		isTrue(v1alpha1.ConditionReady).because(v1alpha1.ReasonLimitMismatch), isFalse(v1alpha1.ConditionActive),
		isFalse(v1alpha1.ConditionEnded),
	}
	names := []string{"in-time", "by-hand", "too-late"}
	for _, name := range names {
		in.create(t, in.otherBucket(name, func(b *v1alpha1.TokenBucket) { b.Spec.Limit = permanent }), in.otherLease(t, name, name))
	}
	for _, name := range names {
		in.waitLease(t, name, mismatch)
		in.db.one(t, in.key(name), "RaiseWaiting")
	}
	in.patch(t, in.otherBucket("in-time"), `{"spec": {"limit": %d}}`, normal)
	in.waitLease(t, "in-time", active)
	in.db.setLimit(t, in.key("by-hand"), normal)
	in.waitLease(t, "by-hand", active)

	in.db.moveClockTo(t, in.after(t, ledger.MismatchGrace))
	in.waitLease(t, "too-late", neverRan(v1alpha1.ReasonLimitChanged))
	if got := in.db.limit(t, in.key("too-late")); got != permanent {
		t.Errorf("the limit is %d, want %d", got, permanent)
	}
	in.patch(t, in.otherBucket("too-late"), `{"spec": {"limit": %d}}`, normal)
	in.waitBucketNamed(t, "too-late", inSync...)
	in.waitLease(t, "too-late", neverRan(v1alpha1.ReasonLimitChanged))
	for _, name := range names {
		in.db.one(t, in.key(name), "RaiseWaiting")
	}
}
