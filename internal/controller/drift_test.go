package controller_test

import (
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/internal/ledger"
)

// Goal: an instant at the edge is neither lost nor too early: one that is now, a
// start that has passed, an end in the year 9999, and what became overdue while no
// operator ran.
func TestInstantsAtTheEdge(t *testing.T) {
	w := newWorld(t, func(s *settings) { s.options.MaxRaiseDuration = 366 * 24 * time.Hour })
	for _, name := range []string{"now", "past-start", "far", "overdue", "late"} {
		w.createBucket(name, func(b *v1alpha1.TokenBucket) { b.Spec.Raises.MaxDurationSeconds = 365 * 24 * 60 * 60 })
		w.bucketReady(name)
	}
	at := func(d time.Duration) metav1.Time { return metav1.NewTime(w.now().Add(d)) }
	w.createLease("now", "now", func(l *v1alpha1.TemporaryLimitLease) { l.Spec.ExpiresAt = at(0) })
	w.createLease("past-start", "past-start", func(l *v1alpha1.TemporaryLimitLease) { l.Spec.StartsAt = ptr.To(at(-time.Hour)) })
	w.createLease("far", "far", func(l *v1alpha1.TemporaryLimitLease) {
		l.Spec.StartsAt = ptr.To(metav1.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC))
		l.Spec.ExpiresAt = metav1.Date(9999, 12, 30, 23, 59, 59, 0, time.UTC)
	})
	w.createLease("overdue", "overdue")
	missed := w.leaseEnded("now", v1alpha1.RaiseStateFailed)
	if !reasonIs(missed.Status.Conditions, v1alpha1.ConditionEnded, v1alpha1.ReasonWindowMissed) {
		t.Errorf("a window that is over at once: %s", show(missed.Status))
	}
	w.leaseState("past-start", v1alpha1.RaiseStateActive)
	w.leaseState("overdue", v1alpha1.RaiseStateActive)
	far := func(l *v1alpha1.TemporaryLimitLease) bool {
		return l.Status.State == v1alpha1.RaiseStatePending && isTrue(l.Status.Conditions, v1alpha1.ConditionReady)
	}
	w.leaseIs("far", "waits", far)

	w.stop()
	w.createLease("late", "late")
	w.advance(2 * time.Hour)
	w.run(w.settings)
	overdue := w.leaseEnded("overdue", v1alpha1.RaiseStateRestored)
	if lag := ptr.Deref(overdue.Status.RestoreLagMilliseconds, 0); lag < (50 * time.Minute).Milliseconds() {
		t.Errorf("a restore that was overdue by an hour tells a lag of %d ms", lag)
	}
	late := w.leaseEnded("late", v1alpha1.RaiseStateFailed)
	if !reasonIs(late.Status.Conditions, v1alpha1.ConditionEnded, v1alpha1.ReasonWindowMissed) {
		t.Errorf("a window that passed without an operator: %s", show(late.Status))
	}
	w.leaseEnded("past-start", v1alpha1.RaiseStateRestored)
	w.leaseIs("far", "still waits", far)
	for _, name := range []string{"now", "past-start", "far", "overdue", "late"} {
		if s := w.snapshot(w.key(name)); s.Limit != normal {
			t.Errorf("%s: limit %d, want %d", name, s.Limit, normal)
		}
	}
}

// Goal: what another hand did to the ledger is seen although the object did not
// change, is shown, and is repaired only where the policy says so; a raise in
// force is no drift.
func TestDriftWithoutNewGeneration(t *testing.T) {
	w := newWorld(t)
	overwrite := func(b *v1alpha1.TokenBucket) { b.Spec.ConflictPolicy = v1alpha1.ConflictPolicyOverwrite }
	review := w.createBucket("review")
	w.createBucket("overwrite", overwrite)
	w.createBucket("raised")
	w.createBucket("same", overwrite)
	for _, name := range []string{"review", "overwrite", "raised", "same"} {
		w.bucketReady(name)
	}
	w.createLease("raised", "raised")
	w.createLease("same", "same")
	w.leaseState("raised", v1alpha1.RaiseStateActive)
	w.leaseState("same", v1alpha1.RaiseStateActive)
	for _, name := range []string{"raised", "same"} {
		w.bucketIs(name, "does not take its raise for drift", func(b *v1alpha1.TokenBucket) bool {
			return b.Status.ActiveRaise != nil && isTrue(b.Status.Conditions, v1alpha1.ConditionLimitInSync)
		})
	}

	w.must(w.store.OverrideLimit(w.key("review"), 70))
	w.must(w.store.OverrideLimit(w.key("overwrite"), 70))
	w.must(w.store.OverrideLimit(w.key("raised"), 250))
	// The very same value is another decision all the same.
	w.must(w.store.OverrideLimit(w.key("same"), temporary))
	w.bucketIs("review", "shows the other limit", func(b *v1alpha1.TokenBucket) bool {
		return *b.Status.Limit == 70 && *b.Status.DeclaredLimit == normal && isTrue(b.Status.Conditions, v1alpha1.ConditionReady) &&
			reasonIs(b.Status.Conditions, v1alpha1.ConditionLimitInSync, v1alpha1.ReasonLimitChanged)
	})
	w.eventuallyTold(review, v1alpha1.EventBucketOpened, v1alpha1.EventLimitConflict)
	for _, name := range []string{"overwrite", "same"} {
		w.eventually(name+" is repaired", func() (string, bool) {
			s := w.snapshot(w.key(name))
			return show(s), s.Limit == normal
		})
		w.bucketIs(name, "is in sync", func(b *v1alpha1.TokenBucket) bool {
			return *b.Status.Limit == normal && isTrue(b.Status.Conditions, v1alpha1.ConditionLimitInSync)
		})
	}
	for _, name := range []string{"raised", "same"} {
		l := w.leaseEnded(name, v1alpha1.RaiseStateFailed)
		if !isTrue(l.Status.Conditions, v1alpha1.ConditionReviewRequired) {
			t.Errorf("%s: %s", name, show(l.Status))
		}
	}
	w.advance(2 * time.Hour)
	w.afterPolls(10)
	if s := w.snapshot(w.key("raised")); s.Limit != 250 {
		t.Errorf("limit %d after the expiry, want the other hand's 250", s.Limit)
	}
	if s := w.snapshot(w.key("review")); s.Limit != 70 {
		t.Errorf("limit %d, want the other hand's 70", s.Limit)
	}
}

// Goal: a row that vanishes under an active raise is shown on the bucket, ends the
// raise for review, is never made again, and is given up with its object.
func TestRowMissingWhileRaised(t *testing.T) {
	w := newWorld(t)
	bucket := w.createBucket("b")
	lease := w.createLease("l", "b")
	w.leaseState("l", v1alpha1.RaiseStateActive)
	w.store.DropBucket(w.key("b"))
	w.bucketIs("b", "shows that its row is gone", func(b *v1alpha1.TokenBucket) bool {
		return reasonIs(b.Status.Conditions, v1alpha1.ConditionStalled, v1alpha1.ReasonBucketRowMissing) && b.Status.ActiveRaise == nil
	})
	ended := w.leaseEnded("l", v1alpha1.RaiseStateFailed)
	if !isTrue(ended.Status.Conditions, v1alpha1.ConditionReviewRequired) {
		t.Errorf("a raise whose bucket has vanished: %s", show(ended.Status))
	}
	w.advance(2 * time.Hour)
	w.afterPolls(10)
	if _, err := w.ledger.Inspect(w.ctx, w.key("b")); !ledger.HasCode(err, ledger.CodeBucketNotFound) {
		t.Errorf("the row was made again (%v)", err)
	}
	w.remove(lease)
	w.eventuallyGone(lease)
	w.remove(bucket)
	w.eventuallyGone(bucket)
	w.createBucket("b")
	if b := w.bucketReady("b"); *b.Status.Limit != normal || *b.Status.UsedTokens != 0 {
		t.Errorf("a bucket made after the old one was given up: %s", show(b.Status))
	}
}

// Goal: requests that never happened leave no trace: dry runs, and a name that is
// created twice.
func TestDryRunLeavesNoTrace(t *testing.T) {
	w := newWorld(t)
	w.createBucket("b")
	w.createLease("l", "b")
	w.leaseState("l", v1alpha1.RaiseStateActive)
	versions := w.eventuallyIdle()
	served := w.store.served.Load()
	tool := gitOps{w, []string{
		`{apiVersion: budget.tokenlease.dev/v1alpha1, kind: TokenBucket, metadata: {name: b}, spec: {limit: 7}}`,
		`{apiVersion: budget.tokenlease.dev/v1alpha1, kind: TokenBucket, metadata: {name: other}, spec: {limit: 7}}`,
		`{apiVersion: budget.tokenlease.dev/v1alpha1, kind: TemporaryLimitLease, metadata: {name: other}, spec: {bucketRef: {name: b}, normalLimit: 100, temporaryLimit: 300, expiresAt: "2099-01-01T00:00:00Z", approvalID: A, scopedKeyID: K}}`,
	}}
	for range 20 {
		tool.sync(client.DryRunAll, client.ForceOwnership)
		for _, object := range []client.Object{w.bucketReady("b"), w.leaseState("l", v1alpha1.RaiseStateActive)} {
			w.must(kube.Delete(w.ctx, object, client.DryRunAll))
			object.SetResourceVersion("")
			object.SetUID("")
			if err := kube.Create(w.ctx, object); !apierrors.IsAlreadyExists(err) {
				t.Fatalf("created twice: %v", err)
			}
		}
	}
	w.afterPolls(idlePolls)
	if now := w.versions(); difference(versions, now) != "" {
		t.Errorf("dry runs changed: %s", difference(versions, now))
	}
	if n := w.store.served.Load() - served; n != 0 {
		t.Errorf("%d requests to the ledger for dry runs", n)
	}
}

// Goal: the key of a live bucket cannot be changed, added or taken away, and the
// attempt touches nothing.
func TestKeyOfALiveBucket(t *testing.T) {
	w := newWorld(t)
	keyed := w.createBucket("keyed", func(b *v1alpha1.TokenBucket) { b.Spec.BucketKey = w.key("k") })
	plain := w.createBucket("plain")
	w.bucketReady("keyed")
	w.bucketReady("plain")
	versions := w.eventuallyIdle()
	for body, object := range map[string]*v1alpha1.TokenBucket{
		`{"spec": {"bucketKey": "` + w.key("other") + `"}}`:                        keyed,
		`{"spec": {"bucketKey": null}}`:                                            keyed,
		`{"spec": {"bucketKey": "` + w.key("plain") + `"}}`:                        plain,
		`{"spec": {"tenantID": "another", "bucketKey": "` + w.key("keyed") + `"}}`: plain,
	} {
		err := kube.Patch(w.ctx, object.DeepCopy(), client.RawPatch("application/merge-patch+json", []byte(body)))
		if !apierrors.IsForbidden(err) && !apierrors.IsInvalid(err) {
			t.Errorf("%s: %v", body, err)
		}
	}
	w.afterPolls(10)
	if now := w.versions(); difference(versions, now) != "" {
		t.Errorf("refused changes changed: %s", difference(versions, now))
	}
}

// Goal: a status that was restored from an old backup is brought up to date from
// the ledger, and nothing is raised, declared or told twice.
func TestStatusFromAnOldBackup(t *testing.T) {
	w := newWorld(t)
	bucket := w.createBucket("b")
	w.bucketReady("b")
	w.createLease("l", "b", func(l *v1alpha1.TemporaryLimitLease) {
		l.Spec.StartsAt = ptr.To(metav1.NewTime(w.now().Add(30 * time.Minute)))
	})
	pending := w.leaseIs("l", "is stored", func(l *v1alpha1.TemporaryLimitLease) bool { return l.Status.BucketKey != "" })
	backup := w.bucketReady("b").Status
	w.advance(40 * time.Minute)
	w.leaseState("l", v1alpha1.RaiseStateActive)
	w.advance(time.Hour)
	ended := w.leaseEnded("l", v1alpha1.RaiseStateRestored)
	w.patch(bucket.DeepCopy(), `{"spec": {"limit": 80}}`)
	w.bucketIs("b", "has its second limit", func(b *v1alpha1.TokenBucket) bool { return b.Status.ObservedGeneration == 2 })
	w.eventuallyIdle()
	rows := len(w.auditOf("b"))

	old := pending.Status
	old.ObservedGeneration = -1
	w.patchStatus(ended.DeepCopy(), `{"status": `+show(old)+`}`)
	w.patchStatus(bucket.DeepCopy(), `{"status": `+show(backup)+`}`)
	again := w.leaseIs("l", "is up to date", func(l *v1alpha1.TemporaryLimitLease) bool {
		return l.Status.State == v1alpha1.RaiseStateRestored && l.Status.ObservedGeneration == l.Generation &&
			isTrue(l.Status.Conditions, v1alpha1.ConditionEnded)
	})
	if !again.Status.ActivatedAt.Equal(ended.Status.ActivatedAt) || !again.Status.RestoredAt.Equal(ended.Status.RestoredAt) ||
		show(again.Status.Operations) != show(ended.Status.Operations) || len(again.Finalizers) != 0 {
		t.Errorf("the status came back as %s, was %s", show(again), show(ended))
	}
	w.bucketIs("b", "is up to date", func(b *v1alpha1.TokenBucket) bool {
		return b.Status.ObservedGeneration == 2 && *b.Status.DeclaredLimit == 80 && *b.Status.Limit == 80 && b.Status.ActiveRaise == nil
	})
	w.afterPolls(10)
	if now := len(w.auditOf("b")); now != rows {
		t.Errorf("%d audit rows, %d before the backup was restored", now, rows)
	}
}

func (w *world) auditOf(name string) []ledger.AuditRow {
	w.Helper()
	rows, err := w.store.Audit(w.ctx, w.key(name), 0, 1000)
	w.must(err)
	return rows
}
