package controller

import (
	"slices"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/internal/ledger"
)

func testLease(change ...func(*v1alpha1.TemporaryLimitLease)) *v1alpha1.TemporaryLimitLease {
	l := &v1alpha1.TemporaryLimitLease{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "ns", Name: "l", UID: "lease-uid", Generation: 1, Finalizers: []string{v1alpha1.LedgerFinalizer},
			CreationTimestamp: metav1.NewTime(testNow),
		},
		Spec: v1alpha1.TemporaryLimitLeaseSpec{
			BucketRef: v1alpha1.BucketReference{Name: "b"}, NormalLimit: 100, TemporaryLimit: 300,
			ExpiresAt: metav1.NewTime(testNow.Add(time.Hour)), ApprovalID: "CHG-1", ScopedKeyID: "key",
		},
	}
	for _, f := range change {
		f(l)
	}
	return l
}

func testRaise(state ledger.RaiseState, reason ledger.Reason, change ...func(*ledger.Raise)) *ledger.Raise {
	r := &ledger.Raise{
		ID: "lease-uid", CurrentUID: "lease-uid", BucketKey: "ns/b", Cluster: "cluster", Namespace: "ns", Name: "l",
		TenantID: "b", ScopedKeyID: "key", NormalLimit: 100, TemporaryLimit: 300, ApprovalID: "CHG-1", Actor: "Ada",
		StartsAt: testNow, ExpiresAt: testNow.Add(time.Hour), State: state, Reason: reason, StoredAt: testNow,
		OnBaseChange: ledger.BaseChangeReview,
	}
	if state == ledger.RaiseActive || state == ledger.RaiseRestored {
		ran(r)
	}
	if state.Ended() {
		r.EndedAt = ptr.To(r.ExpiresAt.Add(42 * time.Millisecond))
	}
	for _, f := range change {
		f(r)
	}
	return r
}

func ran(r *ledger.Raise) {
	r.ActivatedAt, r.AppliedLimit, r.RestoreTo = ptr.To(testNow), ptr.To[int64](300), ptr.To[int64](100)
}

func settledLease() *v1alpha1.TemporaryLimitLease {
	l := testLease(func(l *v1alpha1.TemporaryLimitLease) { l.Finalizers = nil })
	l.Status = leaseStatus(l, testRaise(ledger.RaiseRestored, ledger.ReasonExpired), nil, testNow)
	return l
}

// Goal: what a pass does follows from what was gathered; an object that is being
// deleted never stores anything, and a finished raise needs no bucket.
func TestDecideLease(t *testing.T) {
	deleting := func(l *v1alpha1.TemporaryLimitLease) { l.DeletionTimestamp = ptr.To(metav1.NewTime(testNow)) }
	deletingBucket := testBucket(func(b *v1alpha1.TokenBucket) { b.DeletionTimestamp = ptr.To(metav1.NewTime(testNow)) })
	foreignKey := testBucket(func(b *v1alpha1.TokenBucket) { b.Spec.BucketKey = "other/b" })
	otherKey := testBucket(func(b *v1alpha1.TokenBucket) { b.Spec.BucketKey = "ns/other" })
	active := testRaise(ledger.RaiseActive, ledger.ReasonNone)
	ended := testRaise(ledger.RaiseRestored, ledger.ReasonExpired)
	taken := testRaise(ledger.RaiseActive, ledger.ReasonNone, func(r *ledger.Raise) { r.CurrentUID = "newer" })
	for _, c := range []struct {
		name string
		in   leaseInput
		want string
	}{
		{"new", leaseInput{lease: testLease(), bucket: testBucket()}, "store ns/b"},
		{"active", leaseInput{lease: testLease(), record: active, bucket: testBucket()}, "store ns/b"},
		{"ended", leaseInput{lease: testLease(), record: ended, bucket: testBucket()}, "mirror restored"},
		{"ended, bucket gone", leaseInput{lease: testLease(), record: ended}, "mirror restored"},
		{"active, bucket gone", leaseInput{lease: testLease(), record: active}, "mirror active"},
		{"active, bucket came back with another key", leaseInput{lease: testLease(), record: active, bucket: otherKey}, "mirror active"},
		{"active, bucket going", leaseInput{lease: testLease(), record: active, bucket: deletingBucket}, "mirror active"},
		{"no bucket", leaseInput{lease: testLease()}, "wait BucketNotFound"},
		{"bucket going", leaseInput{lease: testLease(), bucket: deletingBucket}, "wait BucketNotFound"},
		{"bucket with a foreign key", leaseInput{lease: testLease(), bucket: foreignKey}, "wait BucketNotReady"},
		{"bucket with a foreign key, trusted", leaseInput{lease: testLease(), bucket: foreignKey, trusted: true}, "store other/b"},
		{"bucket unreadable", leaseInput{lease: testLease(), bucket: testBucket(), bucketUnreadable: true}, "wait BucketNotReady"},
		{"active, bucket unreadable", leaseInput{lease: testLease(), record: active, bucket: testBucket(), bucketUnreadable: true}, "mirror active"},
		{"unreadable", leaseInput{lease: testLease(), bucket: testBucket(), unreadable: "spec.expiresAt"}, "wait Undecodable"},
		{"unreadable, active", leaseInput{lease: testLease(), record: active, bucket: testBucket(), unreadable: "spec.expiresAt"}, "mirror active and wait Undecodable"},
		{"unreadable, ended", leaseInput{lease: testLease(), record: ended, unreadable: "spec.expiresAt"}, "mirror restored"},
		{"unreadable, deleted", leaseInput{lease: testLease(deleting), record: active, unreadable: "spec.expiresAt"}, "revoke ns/b"},
		{"unreadable, deleted, nothing stored", leaseInput{lease: testLease(deleting), unreadable: "spec.expiresAt"}, "let go"},
		{"settled", leaseInput{lease: settledLease(), record: ended}, "mirror restored"},
		{"settled, ledger knows nothing", leaseInput{lease: settledLease(), bucket: testBucket()}, "nothing"},
		{"deleted", leaseInput{lease: testLease(deleting), record: active, bucket: testBucket()}, "revoke ns/b"},
		{"deleted, nothing stored", leaseInput{lease: testLease(deleting), bucket: testBucket()}, "let go"},
		{"deleted, ended", leaseInput{lease: testLease(deleting), record: ended}, "mirror restored"},
		{"deleted, another stands for it", leaseInput{lease: testLease(deleting), record: taken}, "let go"},
		{"deleted, not held", leaseInput{lease: testLease(deleting, func(l *v1alpha1.TemporaryLimitLease) { l.Finalizers = nil }), record: active}, "nothing"},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.in.cluster, c.in.actorOptional = "cluster", true // who asks has a test of its own
			got := "nothing"
			switch plan := decideLease(c.in); {
			case plan.store != nil:
				got = "store " + plan.store.Key
			case plan.revoke != nil:
				got = "revoke " + plan.revoke.Key
			case plan.mirror != nil && plan.wait != nil:
				got = "mirror " + string(plan.mirror.State) + " and wait " + plan.wait.reason
			case plan.mirror != nil:
				got = "mirror " + string(plan.mirror.State)
			case plan.wait != nil:
				got = "wait " + plan.wait.reason
			case plan.letGo:
				got = "let go"
			}
			if got != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
		})
	}
}

// Goal: no sleep is negative, endless or overflows, whatever the instants.
func TestWakeAfter(t *testing.T) {
	at := func(starts, expires time.Duration) func(*ledger.Raise) {
		return func(r *ledger.Raise) { r.StartsAt, r.ExpiresAt = testNow.Add(starts), testNow.Add(expires) }
	}
	for _, c := range []struct {
		name  string
		raise *ledger.Raise
		want  time.Duration
	}{
		{"starts soon", testRaise(ledger.RaisePending, "", at(time.Minute, time.Hour)), time.Minute + wakeMargin},
		{"waits its turn", testRaise(ledger.RaisePending, ledger.ReasonBucketAlreadyRaised, at(-time.Minute, 2*time.Minute)), 2*time.Minute + wakeMargin},
		{"waits for the limit", testRaise(ledger.RaisePending, ledger.ReasonLimitMismatch, at(-time.Minute, time.Hour),
			func(r *ledger.Raise) { r.MismatchSince = ptr.To(testNow.Add(-20 * time.Second)) }), 40*time.Second + wakeMargin},
		{"ends soon", testRaise(ledger.RaiseActive, "", at(-time.Hour, time.Second)), time.Second + wakeMargin},
		{"overdue", testRaise(ledger.RaiseActive, "", at(-time.Hour, -time.Hour)), overdueDelay},
		{"due now", testRaise(ledger.RaiseActive, "", at(-time.Hour, 0)), overdueDelay},
		{"far", testRaise(ledger.RaiseActive, "", func(r *ledger.Raise) { r.ExpiresAt = time.Date(9999, 12, 30, 0, 0, 0, 0, time.UTC) }), longestWake},
		{"ended", testRaise(ledger.RaiseRestored, ledger.ReasonExpired), 0},
	} {
		if got := wakeAfter(c.raise, testNow); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

// Goal: each state of a raise has its conditions; a wait for Ended always ends,
// and a status depends on the record alone.
func TestLeaseStatus(t *testing.T) {
	review := func(r *ledger.Raise) { ran(r); r.ReviewRequired, r.ObservedLimit = true, ptr.To[int64](180) }
	for _, c := range []struct {
		name   string
		record *ledger.Raise
		failed *failure
		want   string
	}{
		{"pending", testRaise(ledger.RaisePending, ""), nil,
			"Ready+Pending Reconciling-Pending Stalled-Pending Active-Pending Restored-NotEnded Ended-NotEnded ReviewRequired-NoReviewNeeded"},
		{"waits its turn", testRaise(ledger.RaisePending, ledger.ReasonBucketAlreadyRaised), nil,
			"Ready+BucketAlreadyRaised Reconciling-BucketAlreadyRaised Stalled-BucketAlreadyRaised Active-BucketAlreadyRaised Restored-NotEnded Ended-NotEnded ReviewRequired-NoReviewNeeded"},
		{"active", testRaise(ledger.RaiseActive, ""), nil,
			"Ready+Active Reconciling-Active Stalled-Active Active+Active Restored-NotEnded Ended-NotEnded ReviewRequired-NoReviewNeeded"},
		{"restored", testRaise(ledger.RaiseRestored, ledger.ReasonExpired), nil,
			"Ready+Restored Reconciling-Restored Stalled-Restored Active-Restored Restored+Restored Ended+Restored ReviewRequired-NoReviewNeeded"},
		{"revoked", testRaise(ledger.RaiseRestored, ledger.ReasonRevoked), nil,
			"Ready+Revoked Reconciling-Revoked Stalled-Revoked Active-Revoked Restored+Revoked Ended+Revoked ReviewRequired-NoReviewNeeded"},
		{"changed while active", testRaise(ledger.RaiseFailed, ledger.ReasonLimitChanged, review), nil,
			"Ready+LimitChanged Reconciling-LimitChanged Stalled-LimitChanged Active-LimitChanged Restored-LimitChanged Ended+LimitChanged ReviewRequired+LimitChanged"},
		{"never ran", testRaise(ledger.RaiseFailed, ledger.ReasonWindowMissed), nil,
			"Ready-WindowMissed Reconciling-WindowMissed Stalled+WindowMissed Active-WindowMissed Restored-WindowMissed Ended+WindowMissed ReviewRequired-NoReviewNeeded"},
		{"no bucket", nil, waitForBucket(leaseInput{lease: testLease()}),
			"Ready-BucketNotFound Reconciling+BucketNotFound Stalled-BucketNotFound Active-BucketNotFound Restored-BucketNotFound Ended-BucketNotFound ReviewRequired-NoReviewNeeded"},
		{"ledger away", nil, failureOf(ledger.Errorf(ledger.CodeUnavailable, "away")),
			"Ready?LedgerUnavailable Reconciling+LedgerUnavailable Stalled-LedgerUnavailable Active?LedgerUnavailable Restored?LedgerUnavailable Ended?LedgerUnavailable ReviewRequired?LedgerUnavailable"},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := testLease()
			l.Status = leaseStatus(l, c.record, c.failed, testNow)
			got := summary(l.Status.Conditions, "Ready", "Reconciling", "Stalled", "Active", "Restored", "Ended", "ReviewRequired")
			if got != c.want {
				t.Errorf("conditions\n%s, want\n%s", got, c.want)
			}
			if again := leaseStatus(l, c.record, c.failed, testNow.Add(time.Hour)); !equality.Semantic.DeepEqual(again, l.Status) {
				t.Errorf("the same finding later changed the status to %+v", again)
			}
		})
	}
}

// Goal: the lag is that of a restore at expiry; a revoked raise has none, and
// names the operation that put its limit back.
func TestLeaseStatusFigures(t *testing.T) {
	restored := leaseStatus(testLease(), testRaise(ledger.RaiseRestored, ledger.ReasonExpired), nil, testNow)
	if ptr.Deref(restored.RestoreLagMilliseconds, -1) != 42 || restored.Operations.Restore != "lease-uid:restore" || restored.RestoredAt == nil {
		t.Errorf("restored: %+v", restored)
	}
	revoked := leaseStatus(testLease(), testRaise(ledger.RaiseRestored, ledger.ReasonRevoked), nil, testNow)
	if revoked.RestoreLagMilliseconds != nil || revoked.Operations.Restore != "lease-uid:revoke" {
		t.Errorf("revoked: %+v", revoked)
	}
	changed := leaseStatus(testLease(), testRaise(ledger.RaiseFailed, ledger.ReasonLimitChanged, ran), nil, testNow)
	if changed.RestoredAt != nil || changed.Operations.Restore != "" || changed.Operations.Activate != "lease-uid:activate" {
		t.Errorf("changed: %+v", changed)
	}
}

// Goal: each transition is told once, also after passes that met an outage.
func TestLeaseNotices(t *testing.T) {
	l := testLease()
	away := failureOf(ledger.Errorf(ledger.CodeUnavailable, "away"))
	for _, step := range []struct {
		name   string
		record *ledger.Raise
		failed *failure
		want   []string
	}{
		{"away at first", nil, away, nil},
		{"stored", testRaise(ledger.RaisePending, ""), nil, []string{v1alpha1.EventRaiseStored}},
		{"again", testRaise(ledger.RaisePending, ""), nil, nil},
		{"away", nil, away, nil},
		{"back", testRaise(ledger.RaisePending, ""), nil, nil},
		{"active", testRaise(ledger.RaiseActive, ""), nil, []string{v1alpha1.EventRaiseActivated}},
		{"away while active", nil, away, nil},
		{"restored", testRaise(ledger.RaiseRestored, ledger.ReasonExpired), nil, []string{v1alpha1.EventRaiseRestored}},
		{"restored again", testRaise(ledger.RaiseRestored, ledger.ReasonExpired), nil, nil},
	} {
		before := l.Status
		l.Status = leaseStatus(l, step.record, step.failed, testNow)
		var got []string
		for _, n := range leaseNotices(&before, &l.Status, step.record, step.failed) {
			got = append(got, n.reason)
		}
		if !slices.Equal(got, step.want) {
			t.Errorf("%s: told %v, want %v", step.name, got, step.want)
		}
	}
}

// Goal: a lease of the same name that asks for something else does not stand for
// the raise.
func TestMayStandFor(t *testing.T) {
	raise := testRaise(ledger.RaiseActive, "")
	for name, c := range map[string]struct {
		change func(*v1alpha1.TemporaryLimitLease)
		want   bool
	}{
		"the same":       {func(*v1alpha1.TemporaryLimitLease) {}, true},
		"earlier expiry": {func(l *v1alpha1.TemporaryLimitLease) { l.Spec.ExpiresAt = metav1.NewTime(testNow) }, true},
		"its start":      {func(l *v1alpha1.TemporaryLimitLease) { l.Spec.StartsAt = ptr.To(metav1.NewTime(testNow)) }, true},
		"another start": {func(l *v1alpha1.TemporaryLimitLease) {
			l.Spec.StartsAt = ptr.To(metav1.NewTime(testNow.Add(time.Second)))
		}, false},
		"approval": {func(l *v1alpha1.TemporaryLimitLease) { l.Spec.ApprovalID = "CHG-2" }, false},
		"limit":    {func(l *v1alpha1.TemporaryLimitLease) { l.Spec.TemporaryLimit = 301 }, false},
		"rebase":   {func(l *v1alpha1.TemporaryLimitLease) { l.Spec.OnBaseChange = v1alpha1.BaseChangePolicyRebase }, false},
	} {
		if got := mayStandFor(testLease(c.change), raise); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}
