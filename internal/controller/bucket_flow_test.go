package controller_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/internal/ledger"
)

func (w *world) reserve(key, request string, tokens int64) ledger.Lease {
	w.Helper()
	result, err := w.ledger.Reserve(w.ctx, ledger.Reserve{Key: key, RequestKey: request, Fingerprint: "f", Tokens: tokens})
	w.must(err)
	return result.Lease
}

func (w *world) commit(key string, lease ledger.Lease, tokens int64) {
	w.Helper()
	_, err := w.ledger.Commit(w.ctx, ledger.Commit{Key: key, LeaseID: lease.ID, ActualTokens: tokens})
	w.must(err)
}

// Goal: a bucket is opened, changed, closed and opened again with its usage.
func TestBucketLifecycle(t *testing.T) {
	w := newWorld(t)
	bucket := w.createBucket("b")
	ready := w.bucketReady("b")
	if ready.Status.BucketKey != w.key("b") || *ready.Status.Limit != normal || *ready.Status.DeclaredLimit != normal ||
		*ready.Status.AvailableTokens != normal || *ready.Status.UsedPercent != 0 || ready.Status.ActiveRaise != nil ||
		isTrue(ready.Status.Conditions, v1alpha1.ConditionStalled) || !isTrue(ready.Status.Conditions, v1alpha1.ConditionLimitInSync) {
		t.Errorf("a bucket that looks like this: %s", show(ready))
	}
	w.commit(w.key("b"), w.reserve(w.key("b"), "r", 40), 30)
	w.patch(bucket.DeepCopy(), `{"spec": {"limit": 20}}`)
	over := w.bucketIs("b", "is over its lower limit", func(b *v1alpha1.TokenBucket) bool {
		return *b.Status.Limit == 20 && isTrue(b.Status.Conditions, v1alpha1.ConditionOverLimit)
	})
	if *over.Status.OverLimitTokens != 10 || *over.Status.AvailableTokens != 0 || *over.Status.UsedPercent != 150 {
		t.Errorf("an overdrawn bucket: %s", show(over.Status))
	}
	w.patch(bucket.DeepCopy(), `{"spec": {"limit": 60}}`)
	w.bucketIs("b", "fits again", func(b *v1alpha1.TokenBucket) bool {
		return *b.Status.Limit == 60 && !isTrue(b.Status.Conditions, v1alpha1.ConditionOverLimit)
	})
	w.eventuallyTold(bucket, v1alpha1.EventBucketOpened, v1alpha1.EventDeclaredLimitApplied, v1alpha1.EventOverLimit,
		v1alpha1.EventDeclaredLimitApplied, v1alpha1.EventWithinLimit)

	w.remove(bucket)
	w.eventuallyGone(bucket)
	if s := w.snapshot(w.key("b")); !s.Closed || s.UsedTokens != 30 {
		t.Errorf("closed %v, used %d after the deletion", s.Closed, s.UsedTokens)
	}
	again := w.createBucket("b")
	if b := w.bucketReady("b"); *b.Status.UsedTokens != 30 {
		t.Errorf("reopened with %d used, want 30", *b.Status.UsedTokens)
	}
	w.eventuallyTold(again, v1alpha1.EventBucketReopened)
}

// Goal: a bucket that is over its limit for its reservations fits again when they
// run out, without anybody doing anything.
func TestOverLimitClearsByItself(t *testing.T) {
	w := newWorld(t)
	bucket := w.createBucket("b")
	w.bucketReady("b")
	w.reserve(w.key("b"), "r", 80)
	w.patch(bucket.DeepCopy(), `{"spec": {"limit": 20}}`)
	w.bucketIs("b", "is over its limit", func(b *v1alpha1.TokenBucket) bool { return isTrue(b.Status.Conditions, v1alpha1.ConditionOverLimit) })
	w.advance(2 * time.Minute)
	w.bucketIs("b", "fits again", func(b *v1alpha1.TokenBucket) bool {
		return !isTrue(b.Status.Conditions, v1alpha1.ConditionOverLimit) && *b.Status.ReservedTokens == 0 && *b.Status.AvailableTokens == 20
	})
}

// Goal: usage is shown, and not at every reservation.
func TestUsageIsShownNowAndThen(t *testing.T) {
	w := newWorld(t, func(s *settings) { s.options.UsageInterval = 3 * time.Second })
	w.createBucket("b")
	before := w.bucketReady("b").ResourceVersion
	seen := map[string]bool{}
	for i := range 20 {
		w.commit(w.key("b"), w.reserve(w.key("b"), fmt.Sprint(i), 1), 1)
		b := w.bucketReady("b")
		seen[b.ResourceVersion] = true
	}
	w.bucketIs("b", "shows what was used", func(b *v1alpha1.TokenBucket) bool {
		seen[b.ResourceVersion] = true
		return *b.Status.UsedTokens == 20
	})
	delete(seen, before)
	if len(seen) > 5 {
		t.Errorf("%d status writes for 20 reservations", len(seen))
	}
}

// Goal: the first owner keeps its bucket; the second shows the conflict, can be
// deleted without harm, and takes over once the first is gone for good.
func TestSecondClaimant(t *testing.T) {
	w := newWorld(t)
	shared := func(b *v1alpha1.TokenBucket) { b.Spec.BucketKey = w.key("shared") }
	first := w.createBucket("first", shared, func(b *v1alpha1.TokenBucket) { b.Spec.DeletionPolicy = v1alpha1.DeletionPolicyDelete })
	w.bucketReady("first")
	conflict := func(name string) {
		b := w.bucketIs(name, "shows the conflict", func(b *v1alpha1.TokenBucket) bool {
			return isTrue(b.Status.Conditions, v1alpha1.ConditionStalled) &&
				reasonIs(b.Status.Conditions, v1alpha1.ConditionStalled, v1alpha1.ReasonConflict)
		})
		if b.Status.Limit != nil || isTrue(b.Status.Conditions, v1alpha1.ConditionReady) {
			t.Errorf("%s shows another's figures: %s", name, show(b.Status))
		}
	}
	second := w.createBucket("second", shared, func(b *v1alpha1.TokenBucket) {
		b.Spec.Limit = 1_000_000_000
		b.Spec.DeletionPolicy = v1alpha1.DeletionPolicyDelete
	})
	conflict("second")
	w.createBucket("third", shared)
	conflict("third")
	w.remove(second)
	w.eventuallyGone(second)
	if s := w.snapshot(w.key("shared")); s.Limit != normal || s.Closed || s.Owner.Name != "first" {
		t.Errorf("the loser's deletion left %+v", s)
	}
	w.remove(first)
	w.eventuallyGone(first)
	w.bucketReady("third")
}

// Goal: nobody reaches another namespace's bucket, unless the manager is told to
// trust the namespace.
func TestNamespacesAreApart(t *testing.T) {
	var trusted string
	w := newWorld(t, func(s *settings) {
		trusted = (&world{T: t, ctx: t.Context()}).newNamespace()
		s.options.TrustedNamespaces = []string{trusted}
		s.namespaces = append(s.namespaces, trusted)
	})
	foreign := w.createBucket("b", func(b *v1alpha1.TokenBucket) { b.Spec.BucketKey = trusted + "/b" })
	refused := w.bucketIs("b", "is refused", func(b *v1alpha1.TokenBucket) bool {
		return reasonIs(b.Status.Conditions, v1alpha1.ConditionStalled, v1alpha1.ReasonKeyNotAllowed)
	})
	if len(refused.Finalizers) != 0 {
		t.Errorf("finalizers %v on a bucket that the ledger knows nothing of", refused.Finalizers)
	}
	w.createLease("l", "b")
	w.leaseIs("l", "waits", func(l *v1alpha1.TemporaryLimitLease) bool {
		return reasonIs(l.Status.Conditions, v1alpha1.ConditionReconciling, v1alpha1.ReasonBucketNotReady)
	})
	if _, err := w.ledger.Inspect(w.ctx, trusted+"/b"); !ledger.HasCode(err, ledger.CodeBucketNotFound) {
		t.Errorf("the ledger holds the other namespace's bucket (%v)", err)
	}
	w.remove(foreign)
	w.eventuallyGone(foreign)

	own := w.namespace
	w.namespace = trusted
	w.createBucket("anything", func(b *v1alpha1.TokenBucket) { b.Spec.BucketKey = "imported:4711" })
	w.bucketReady("anything")
	// A lease names a bucket of its own namespace only.
	w.namespace = own
	w.createLease("across", "anything")
	w.leaseIs("across", "waits", func(l *v1alpha1.TemporaryLimitLease) bool {
		return reasonIs(l.Status.Conditions, v1alpha1.ConditionReconciling, v1alpha1.ReasonBucketNotFound)
	})
	if limit := w.snapshot("imported:4711").Limit; limit != normal {
		t.Errorf("limit %d, want %d", limit, normal)
	}
}

// Goal: a deletion that removes the bucket waits for what is reserved and says so.
func TestDeletionWaitsForReservations(t *testing.T) {
	w := newWorld(t)
	bucket := w.createBucket("b", func(b *v1alpha1.TokenBucket) { b.Spec.DeletionPolicy = v1alpha1.DeletionPolicyDelete })
	w.bucketReady("b")
	lease := w.reserve(w.key("b"), "r", 40)
	w.remove(bucket)
	waiting := w.bucketIs("b", "waits for its reservations", func(b *v1alpha1.TokenBucket) bool {
		return reasonIs(b.Status.Conditions, v1alpha1.ConditionReconciling, v1alpha1.ReasonReservationsOpen)
	})
	if *waiting.Status.ReservedTokens != 40 || strings.Contains(show(waiting.Status.Conditions), "40 tokens") {
		t.Errorf("a bucket that waits: %s", show(waiting.Status))
	}
	w.commit(w.key("b"), lease, 10)
	w.eventuallyGone(bucket)
	if _, err := w.ledger.Inspect(w.ctx, w.key("b")); !ledger.HasCode(err, ledger.CodeBucketNotFound) {
		t.Errorf("the bucket is still there (%v)", err)
	}
}

// Goal: a row that is gone is shown and never made again with nothing used; only
// the deletion of the object gives the usage up.
func TestRowMissing(t *testing.T) {
	w := newWorld(t)
	bucket := w.createBucket("b")
	w.bucketReady("b")
	w.commit(w.key("b"), w.reserve(w.key("b"), "r", 40), 40)
	w.store.DropBucket(w.key("b"))
	gone := w.bucketIs("b", "shows that its row is gone", func(b *v1alpha1.TokenBucket) bool {
		return reasonIs(b.Status.Conditions, v1alpha1.ConditionStalled, v1alpha1.ReasonBucketRowMissing)
	})
	if gone.Status.Limit != nil || gone.Status.UsedTokens != nil || !isTrue(gone.Status.Conditions, v1alpha1.ConditionStalled) {
		t.Errorf("a bucket without a row: %s", show(gone.Status))
	}
	w.patch(bucket.DeepCopy(), `{"spec": {"limit": 200}}`)
	w.bucketIs("b", "is still stalled", func(b *v1alpha1.TokenBucket) bool {
		return b.Status.ObservedGeneration == 2 && reasonIs(b.Status.Conditions, v1alpha1.ConditionReady, v1alpha1.ReasonBucketRowMissing)
	})
	w.remove(bucket)
	w.eventuallyGone(bucket)
	w.createBucket("b")
	w.bucketReady("b")
}

// Goal: a bucket's status that was lost comes back, and counts as no new bucket.
func TestBucketStatusWiped(t *testing.T) {
	w := newWorld(t)
	w.createBucket("b")
	before := w.bucketReady("b")
	w.patchStatus(before.DeepCopy(), `{"status": null}`)
	after := w.bucketReady("b")
	if show(after.Status.Limit) != show(before.Status.Limit) || after.Status.BucketKey != before.Status.BucketKey {
		t.Errorf("the status came back as %s", show(after.Status))
	}
	if n := w.audited(w.key("b"), ledger.AuditBucketOpened); n != 1 {
		t.Errorf("opened %d times, want 1", n)
	}
}
