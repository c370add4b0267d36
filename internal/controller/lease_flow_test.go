package controller_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/internal/ledger"
)

// Goal: the whole path once. The status of both objects says where the raise
// stands, everything is done once, and each step is told once.
func TestRaiseFromBeginningToEnd(t *testing.T) {
	w := newWorld(t)
	bucket := w.createBucket("b")
	w.bucketReady("b")
	lease := w.createLease("l", "b")

	active := w.leaseState("l", v1alpha1.RaiseStateActive)
	if limit := w.snapshot(w.key("b")).Limit; limit != temporary {
		t.Fatalf("the lease says Active and the limit is %d", limit)
	}
	if !isTrue(active.Status.Conditions, v1alpha1.ConditionReady) || !isTrue(active.Status.Conditions, v1alpha1.ConditionActive) ||
		len(active.Finalizers) != 1 || active.Status.RequestedBy != "Ada Lovelace" || active.Status.BucketKey != w.key("b") ||
		active.Status.TenantID != "b" || active.Status.ActivatedAt == nil ||
		active.Status.Operations == nil || active.Status.Operations.Activate != string(lease.UID)+":activate" {
		t.Errorf("an active lease that looks like this: %s", show(active))
	}
	raised := w.bucketIs("b", "is raised", func(b *v1alpha1.TokenBucket) bool { return b.Status.ActiveRaise != nil })
	if *raised.Status.Limit != temporary || *raised.Status.DeclaredLimit != normal || raised.Status.ActiveRaise.Name != "l" ||
		!isTrue(raised.Status.Conditions, v1alpha1.ConditionLimitInSync) || !isTrue(raised.Status.Conditions, v1alpha1.ConditionRaised) {
		t.Errorf("a raised bucket that looks like this: %s", show(raised))
	}

	w.advance(2 * time.Hour)
	restored := w.leaseEnded("l", v1alpha1.RaiseStateRestored)
	if !isTrue(restored.Status.Conditions, v1alpha1.ConditionRestored) || !isTrue(restored.Status.Conditions, v1alpha1.ConditionReady) ||
		isTrue(restored.Status.Conditions, v1alpha1.ConditionReviewRequired) || restored.Status.RestoredAt == nil ||
		ptr.Deref(restored.Status.RestoreLagMilliseconds, -1) < 0 ||
		restored.Status.Operations.Restore != string(lease.UID)+":restore" {
		t.Errorf("a restored lease that looks like this: %s", show(restored))
	}
	w.bucketIs("b", "is back", func(b *v1alpha1.TokenBucket) bool {
		return b.Status.ActiveRaise == nil && *b.Status.Limit == normal && !isTrue(b.Status.Conditions, v1alpha1.ConditionRaised)
	})
	for _, event := range []ledger.AuditEvent{ledger.AuditRaiseStored, ledger.AuditRaiseActivated, ledger.AuditRaiseRestored} {
		if n := w.audited(w.key("b"), event); n != 1 {
			t.Errorf("%d audit rows of %s, want 1", n, event)
		}
	}
	w.eventuallyTold(lease, v1alpha1.EventRaiseActivated, v1alpha1.EventRaiseRestored)
	w.eventuallyTold(bucket, v1alpha1.EventBucketOpened)
}

// Goal: a lease may come before its bucket, and can be taken back meanwhile.
func TestLeaseBeforeItsBucket(t *testing.T) {
	w := newWorld(t)
	w.createLease("l", "b")
	other := w.createLease("other", "b")
	waiting := func(name string) *v1alpha1.TemporaryLimitLease {
		return w.leaseIs(name, "waits", func(l *v1alpha1.TemporaryLimitLease) bool {
			return isTrue(l.Status.Conditions, v1alpha1.ConditionReconciling) &&
				reasonIs(l.Status.Conditions, v1alpha1.ConditionReady, v1alpha1.ReasonBucketNotFound) &&
				l.Status.State == v1alpha1.RaiseStatePending
		})
	}
	waiting("l")
	if l := waiting("other"); len(l.Finalizers) != 0 {
		t.Errorf("finalizers %v on a lease that the ledger knows nothing of", l.Finalizers)
	}
	w.remove(other)
	w.eventuallyGone(other)
	w.createBucket("b")
	w.leaseState("l", v1alpha1.RaiseStateActive)
}

// Goal: deletion ends what is active, and a wait for it ends.
func TestLeaseDeletedWhileActive(t *testing.T) {
	w := newWorld(t)
	w.createBucket("b")
	lease := w.createLease("l", "b")
	w.leaseState("l", v1alpha1.RaiseStateActive)
	w.remove(lease)
	w.eventuallyGone(lease)
	if limit := w.snapshot(w.key("b")).Limit; limit != normal {
		t.Errorf("limit %d after the lease was deleted, want %d", limit, normal)
	}
	w.eventuallyTold(lease, v1alpha1.EventRaiseActivated, v1alpha1.EventRaiseRevoked)

	// The same grant again is the same raise, which stays revoked.
	w.createLease("l", "b", func(l *v1alpha1.TemporaryLimitLease) { l.Spec = *lease.Spec.DeepCopy() })
	again := w.leaseEnded("l", v1alpha1.RaiseStateRestored)
	if !reasonIs(again.Status.Conditions, v1alpha1.ConditionReady, v1alpha1.ReasonRevoked) {
		t.Errorf("the same grant again: %s", show(again.Status))
	}
	if n := w.audited(w.key("b"), ledger.AuditRaiseActivated); n != 1 {
		t.Errorf("the limit was raised %d times for one grant", n)
	}
}

// Goal: a bucket may go first: the raise ends with it and the lease says so.
func TestBucketDeletedWhileRaised(t *testing.T) {
	w := newWorld(t)
	bucket := w.createBucket("b")
	lease := w.createLease("l", "b")
	w.leaseState("l", v1alpha1.RaiseStateActive)
	w.remove(bucket)
	w.eventuallyGone(bucket)
	ended := w.leaseEnded("l", v1alpha1.RaiseStateRestored)
	if !reasonIs(ended.Status.Conditions, v1alpha1.ConditionEnded, v1alpha1.ReasonBucketClosed) {
		t.Errorf("a lease whose bucket was deleted: %s", show(ended.Status))
	}
	if s := w.snapshot(w.key("b")); s.Limit != normal || !s.Closed {
		t.Errorf("the bucket was left at %d, closed %v", s.Limit, s.Closed)
	}
	w.remove(lease)
	w.eventuallyGone(lease)
}

// Goal: a namespace goes with everything in it, whatever goes first.
func TestNamespaceDeleted(t *testing.T) {
	w := newWorld(t)
	w.createBucket("b")
	w.createLease("active", "b")
	w.leaseState("active", v1alpha1.RaiseStateActive)
	w.createLease("pending", "b")
	w.leaseState("pending", v1alpha1.RaiseStatePending)
	w.createLease("waiting", "none")
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.namespace}}
	w.remove(namespace)
	w.eventuallyGone(namespace)
	if s := w.snapshot(w.key("b")); s.Limit != normal || s.PendingRaises != 0 {
		t.Errorf("the namespace is gone; limit %d, %d raises pending", s.Limit, s.PendingRaises)
	}
}

// Goal: a status that was lost comes back from the ledger, for an active raise and
// for a finished one whose bucket is gone.
func TestLeaseStatusWiped(t *testing.T) {
	w := newWorld(t)
	bucket := w.createBucket("b")
	w.createLease("l", "b")
	before := w.leaseState("l", v1alpha1.RaiseStateActive)
	w.patchStatus(before.DeepCopy(), `{"status": null}`)
	again := w.leaseState("l", v1alpha1.RaiseStateActive)
	if show(again.Status.Operations) != show(before.Status.Operations) || !again.Status.ActivatedAt.Equal(before.Status.ActivatedAt) {
		t.Errorf("the status came back as %s, was %s", show(again.Status), show(before.Status))
	}
	w.remove(bucket)
	w.eventuallyGone(bucket)
	ended := w.leaseEnded("l", v1alpha1.RaiseStateRestored)
	w.patchStatus(ended.DeepCopy(), `{"status": null}`)
	w.leaseEnded("l", v1alpha1.RaiseStateRestored)
	if n := w.audited(w.key("b"), ledger.AuditRaiseActivated); n != 1 {
		t.Errorf("raised %d times, want 1", n)
	}
}

// Goal: a status write that fails after the ledger has raised the limit does not
// raise it again, nor does it change what the limit returns to.
func TestStatusWriteFails(t *testing.T) {
	var failures atomic.Int64
	w := newWorld(t, func(s *settings) {
		s.hooks.SubResourcePatch = func(ctx context.Context, c client.Client, subresource string, object client.Object, patch client.Patch, options ...client.SubResourcePatchOption) error {
			if strings.Contains(show(object), `"state": "Active"`) && failures.Add(1) <= 2 {
				return errors.New("the test lost this write")
			}
			return c.SubResource(subresource).Patch(ctx, object, patch, options...)
		}
	})
	w.createBucket("b")
	w.createLease("l", "b")
	w.leaseState("l", v1alpha1.RaiseStateActive)
	if failures.Load() < 2 {
		t.Fatal("no write was lost")
	}
	w.advance(2 * time.Hour)
	w.leaseEnded("l", v1alpha1.RaiseStateRestored)
	if n, limit := w.audited(w.key("b"), ledger.AuditRaiseActivated), w.snapshot(w.key("b")).Limit; n != 1 || limit != normal {
		t.Errorf("raised %d times, and the limit returned to %d", n, limit)
	}
}

// Goal: the earlier expiry of an edited lease reaches the ledger.
func TestExpiryMovedEarlier(t *testing.T) {
	w := newWorld(t)
	w.createBucket("b")
	lease := w.createLease("l", "b")
	w.leaseState("l", v1alpha1.RaiseStateActive)
	w.patch(lease, `{"spec": {"expiresAt": "`+w.now().Add(2*time.Minute).UTC().Format(time.RFC3339Nano)+`"}}`)
	w.leaseIs("l", "shows its second generation", func(l *v1alpha1.TemporaryLimitLease) bool { return l.Status.ObservedGeneration == 2 })
	w.advance(3 * time.Minute)
	w.leaseEnded("l", v1alpha1.RaiseStateRestored)
	w.eventuallyTold(lease, v1alpha1.EventRaiseActivated, v1alpha1.EventRaiseShortened, v1alpha1.EventRaiseRestored)
}

// Goal: a raise that can never run says so, and every wait on it ends.
func TestRaisesThatNeverRun(t *testing.T) {
	w := newWorld(t)
	w.createBucket("b")
	w.createBucket("disabled", func(b *v1alpha1.TokenBucket) { b.Spec.Raises = nil })
	w.bucketReady("b")
	far := metav1.Date(9999, 12, 30, 0, 0, 0, 0, time.UTC)
	w.createLease("missed", "b", func(l *v1alpha1.TemporaryLimitLease) { l.Spec.ExpiresAt = metav1.NewTime(w.now().Add(-time.Hour)) })
	w.createLease("far", "b", func(l *v1alpha1.TemporaryLimitLease) { l.Spec.ExpiresAt = far })
	w.createLease("disabled", "disabled")
	for name, reason := range map[string]string{
		"missed": v1alpha1.ReasonWindowMissed, "far": v1alpha1.ReasonPolicyRefused, "disabled": v1alpha1.ReasonRaisesDisabled,
	} {
		l := w.leaseEnded(name, v1alpha1.RaiseStateFailed)
		if !isTrue(l.Status.Conditions, v1alpha1.ConditionStalled) || !reasonIs(l.Status.Conditions, v1alpha1.ConditionReady, reason) ||
			isTrue(l.Status.Conditions, v1alpha1.ConditionReady) || isTrue(l.Status.Conditions, v1alpha1.ConditionActive) {
			t.Errorf("%s: %s", name, show(l.Status))
		}
	}
	// One that starts in two hours is where its spec wants it: it blocks no sync.
	w.createLease("later", "b", func(l *v1alpha1.TemporaryLimitLease) {
		l.Spec.StartsAt = ptr.To(metav1.NewTime(w.now().Add(2 * time.Hour)))
		l.Spec.ExpiresAt = metav1.NewTime(w.now().Add(3 * time.Hour))
	})
	w.leaseIs("later", "is ready", func(l *v1alpha1.TemporaryLimitLease) bool {
		return isTrue(l.Status.Conditions, v1alpha1.ConditionReady) && !isTrue(l.Status.Conditions, v1alpha1.ConditionReconciling) &&
			l.Status.State == v1alpha1.RaiseStatePending
	})
	w.advance(2*time.Hour + time.Minute)
	w.leaseState("later", v1alpha1.RaiseStateActive)
}

// Goal: another hand's limit during a raise is kept and shown.
func TestLimitChangedDuringRaise(t *testing.T) {
	w := newWorld(t)
	bucket := w.createBucket("b")
	lease := w.createLease("l", "b")
	w.leaseState("l", v1alpha1.RaiseStateActive)
	w.must(w.store.OverrideLimit(w.key("b"), 250))
	ended := w.leaseEnded("l", v1alpha1.RaiseStateFailed)
	if !isTrue(ended.Status.Conditions, v1alpha1.ConditionReviewRequired) || !isTrue(ended.Status.Conditions, v1alpha1.ConditionReady) ||
		*ended.Status.ObservedLimit != 250 {
		t.Errorf("a lease whose limit was changed: %s", show(ended.Status))
	}
	w.bucketIs("b", "shows the other limit", func(b *v1alpha1.TokenBucket) bool {
		return *b.Status.Limit == 250 && reasonIs(b.Status.Conditions, v1alpha1.ConditionLimitInSync, v1alpha1.ReasonLimitChanged) &&
			!isTrue(b.Status.Conditions, v1alpha1.ConditionLimitInSync)
	})
	w.patch(bucket.DeepCopy(), `{"spec": {"conflictPolicy": "Overwrite"}}`)
	w.bucketIs("b", "is back at what is declared", func(b *v1alpha1.TokenBucket) bool {
		return *b.Status.Limit == normal && isTrue(b.Status.Conditions, v1alpha1.ConditionLimitInSync)
	})
	w.eventuallyTold(lease, v1alpha1.EventRaiseActivated, v1alpha1.EventReviewRequired)
}

// Goal: while the ledger is away nothing is let go and everything says why; after
// that it goes on by itself.
func TestLedgerAway(t *testing.T) {
	w := newWorld(t)
	bucket := w.createBucket("b")
	lease := w.createLease("l", "b")
	w.leaseState("l", v1alpha1.RaiseStateActive)
	w.createLease("later", "b")
	w.leaseState("later", v1alpha1.RaiseStatePending)
	w.store.down.Store(true)
	w.remove(lease)
	stuck := w.leaseIs("l", "says why it stays", func(l *v1alpha1.TemporaryLimitLease) bool {
		return l.DeletionTimestamp != nil && reasonIs(l.Status.Conditions, v1alpha1.ConditionReconciling, v1alpha1.ReasonLedgerUnavailable)
	})
	if len(stuck.Finalizers) != 1 || stuck.Status.State != v1alpha1.RaiseStateActive {
		t.Errorf("a lease that cannot be ended: %s", show(stuck))
	}
	w.patch(bucket.DeepCopy(), `{"spec": {"limit": 200}}`)
	shown := w.bucketIs("b", "says that the ledger is away", func(b *v1alpha1.TokenBucket) bool {
		return reasonIs(b.Status.Conditions, v1alpha1.ConditionReady, v1alpha1.ReasonLedgerUnavailable)
	})
	if shown.Status.ObservedGeneration != 1 || *shown.Status.Limit != temporary || *shown.Status.DeclaredLimit != normal {
		t.Errorf("a bucket that cannot be declared: %s", show(shown.Status))
	}
	w.store.down.Store(false)
	w.eventuallyGone(lease)
	w.bucketIs("b", "has its new limit", func(b *v1alpha1.TokenBucket) bool {
		return b.Status.ObservedGeneration == 2 && *b.Status.DeclaredLimit == 200 && isTrue(b.Status.Conditions, v1alpha1.ConditionReady)
	})
}

// Goal: a raise whose lease is gone for the API server is ended; one whose lease is
// there is not.
func TestOrphanedRaise(t *testing.T) {
	w := newWorld(t, func(s *settings) { s.options.OrphanInterval = 100 * time.Millisecond })
	bucket := w.createBucket("b")
	w.createBucket("other")
	w.createLease("stays", "other")
	w.leaseState("stays", v1alpha1.RaiseStateActive)
	w.bucketReady("b")
	// What a manager leaves that was killed between two of its steps.
	raise, err := w.ledger.StoreRaise(w.ctx, ledger.StoreRaise{
		Key: w.key("b"), BucketUID: string(bucket.UID), BucketGeneration: 1,
		Grant: ledger.Grant{
			UID: "gone", CreatedAt: w.now(), Cluster: clusterID, Namespace: w.namespace, Name: "gone", TenantID: "b", ScopedKeyID: "key-1",
			NormalLimit: normal, TemporaryLimit: temporary, ExpiresAt: w.now().Add(time.Hour), ApprovalID: "CHG-gone",
			Actor: "Ada", OnBaseChange: ledger.BaseChangeReview,
		},
	})
	w.must(err)
	if raise.State != ledger.RaiseActive {
		t.Fatalf("the raise is %s", raise.State)
	}
	w.eventually("the raise is revoked", func() (string, bool) {
		record, err := w.store.Raise(w.ctx, clusterID, "gone")
		w.must(err)
		return show(record), record.State == ledger.RaiseRestored && record.Reason == ledger.ReasonRevoked
	})
	if limit := w.snapshot(w.key("other")).Limit; limit != temporary {
		t.Errorf("limit %d of a raise whose lease is there, want %d", limit, temporary)
	}
}
