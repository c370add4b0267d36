package e2e_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/internal/ledger"
)

// Goal: deleting an active lease takes the raise back at once, and the object goes
// only after that.
func TestLeaseDeletedWhileActive(t *testing.T) {
	t.Parallel()
	in := install(t)
	key := in.key(bucketName)
	m := in.start(t, "manager-a", managerOptions{})
	in.raised(t)
	lease := in.waitLease(t, leaseName, active)
	in.delete(t, lease)
	in.waitGone(t, lease)
	if got := in.db.limit(t, key); got != normal {
		t.Errorf("the lease is gone and the limit is %d, want %d", got, normal)
	}
	r := in.db.one(t, key, "RaiseRestored")
	if r.text("reason") != "Revoked" || r.text("operation_id") != string(lease.UID)+":revoke" {
		t.Errorf("audited as %s under %s", r.text("reason"), r.text("operation_id"))
	}
	in.waitBucket(t, inSync...)
	m.wantMetrics(t, map[string]float64{`budget_lease_transitions_total{outcome="applied",transition="revoke"}`: 1})
}

// Goal: a raised bucket that is deleted under Retain is closed: the raise is taken
// back, nothing more is admitted, usage stays, and a TokenBucket of the same name
// opens it again with its usage.
func TestRaisedBucketDeletedAndRetained(t *testing.T) {
	t.Parallel()
	in := install(t)
	key := in.key(bucketName)
	in.start(t, "manager-a", managerOptions{})
	in.raised(t)
	in.mustCommit(t, in.mustReserve(t, "used", 70_000), 70_000)
	held := in.mustReserve(t, "held", 10_000)
	b := in.bucket()
	in.delete(t, b)
	in.waitGone(t, b)
	if got := in.db.limit(t, key); got != normal {
		t.Errorf("the bucket is closed and the limit is %d, want %d", got, normal)
	}
	in.waitLease(t, leaseName, restored)
	in.waitNoFinalizer(t, leaseName)
	if r := in.db.one(t, key, "RaiseRestored"); r.text("reason") != "BucketClosed" {
		t.Errorf("restored because %s, want BucketClosed", r.text("reason"))
	}
	in.wantRefused(t, "closed", 1, ledger.CodeBucketClosed)
	in.mustCommit(t, held, 5_000)

	stage(t, "the same name again")
	in.create(t, in.bucket())
	again := in.waitBucket(t, inSync...)
	if s := again.Status; s.UsedTokens == nil || *s.UsedTokens != 75_000 {
		t.Errorf("status %s, want 75000 tokens used", asJSON(s))
	}
	in.mustReserve(t, "reopened", 45_000)
	in.wantRefused(t, "too much", 1, ledger.CodeBudgetExceeded)
	in.db.one(t, key, "BucketReopened")
}

// Goal: under Delete the bucket is closed at once, waits until nothing is
// reserved, and then goes with its leases; the evidence stays.
func TestRaisedBucketDeletedForGood(t *testing.T) {
	t.Parallel()
	in := install(t)
	key := in.key(bucketName)
	in.start(t, "manager-a", managerOptions{})
	in.create(t, in.bucket(deletedForGood), in.lease(t))
	in.waitLease(t, leaseName, active)
	held := in.mustReserve(t, "held", 10_000)
	b := in.bucket()
	in.delete(t, b)
	in.waitBucket(t, isTrue(v1alpha1.ConditionReconciling).because(v1alpha1.ReasonReservationsOpen))
	in.db.waitLimit(t, key, normal)
	in.waitLease(t, leaseName, restored)
	in.wantRefused(t, "closed", 1, ledger.CodeBucketClosed)
	in.mustRelease(t, held)
	in.waitGone(t, b)
	if got := in.db.limit(t, key); got != -1 {
		t.Errorf("the row is still there, with the limit %d", got)
	}
	if left := in.db.rows(t, "SELECT lease_id FROM tokenlease.leases WHERE bucket_key = $1", key); len(left) > 0 {
		t.Errorf("leases are left: %v", left)
	}
	in.db.one(t, key, "BucketDeleted")
	in.db.raise(t, in.namespace, leaseName)
}

// Goal: a lease may arrive before its bucket; it says what it waits for.
func TestLeaseBeforeItsBucket(t *testing.T) {
	t.Parallel()
	in := install(t)
	in.start(t, "manager-a", managerOptions{})
	in.create(t, in.lease(t))
	in.waitLease(t, leaseName, []want{
		isFalse(v1alpha1.ConditionReady), isTrue(v1alpha1.ConditionReconciling).because(v1alpha1.ReasonBucketNotFound),
		isFalse(v1alpha1.ConditionStalled), isFalse(v1alpha1.ConditionActive), isFalse(v1alpha1.ConditionEnded),
	})
	in.create(t, in.bucket())
	in.waitLease(t, leaseName, active)
	in.db.waitLimit(t, in.key(bucketName), temporary)
}

// Goal: the order of the objects in a file does not matter.
func TestBucketAndLeaseInOneApply(t *testing.T) {
	t.Parallel()
	for _, files := range [][]string{
		{"tokenbucket.yaml", "temporarylimitlease.yaml"},
		{"temporarylimitlease.yaml", "tokenbucket.yaml"},
	} {
		t.Run(files[0]+" first", func(t *testing.T) {
			t.Parallel()
			in := install(t)
			in.start(t, "manager-a", managerOptions{})
			now := in.db.now(t)
			var manifest strings.Builder
			for _, file := range files {
				var fields []string
				if strings.HasPrefix(file, "temporary") {
					fields = []string{
						"startsAt", now.Add(-time.Minute).Format(time.RFC3339), "expiresAt", now.Add(farAway).Format(time.RFC3339),
					}
				}
				manifest.WriteString("---\n" + in.sample(t, file, fields...))
			}
			in.mustKubectl(t, manifest.String(), "apply")
			in.waitLease(t, leaseName, active)
			in.waitBucket(t, isTrue(v1alpha1.ConditionReady), isTrue(v1alpha1.ConditionRaised))
		})
	}
}

// Goal: an old manifest does not fail an apply. It is accepted, raises nothing,
// ends at once, and whoever waits for it is told.
func TestWindowInThePast(t *testing.T) {
	t.Parallel()
	in := install(t)
	key := in.key(bucketName)
	m := in.start(t, "manager-a", managerOptions{})
	in.create(t, in.bucket())
	in.mustKubectl(t, in.sample(t, "temporarylimitlease.yaml",
		"startsAt", "2024-11-30T18:00:00Z", "expiresAt", "2024-11-30T18:30:00Z"), "apply")
	in.waitConditions(t, "temporarylimitlease/"+leaseName, "Ended")
	lease := in.waitLease(t, leaseName, []want{
		isFalse(v1alpha1.ConditionReady), isTrue(v1alpha1.ConditionStalled).because(v1alpha1.ReasonWindowMissed),
		isFalse(v1alpha1.ConditionActive), isFalse(v1alpha1.ConditionRestored), isTrue(v1alpha1.ConditionEnded),
		isFalse(v1alpha1.ConditionReviewRequired),
	})
	if lease.Status.State != v1alpha1.RaiseStateFailed {
		t.Errorf("state %s, want Failed", lease.Status.State)
	}
	in.waitNoFinalizer(t, leaseName)
	if got := in.db.limit(t, key); got != normal {
		t.Errorf("the limit is %d, want %d", got, normal)
	}
	if events := in.db.events(t, key); slices.Contains(events, "RaiseActivated") {
		t.Errorf("the raise ran: %v", events)
	}
	m.wantMetrics(t, map[string]float64{
		`budget_lease_transitions_total{outcome="applied",transition="activate"}`: 0,
		`budget_lease_transitions_total{outcome="refused",transition="activate"}`: 1,
	})
}

// Goal: a namespace can be deleted with all that is in it; nothing hangs, and no
// raise survives.
func TestNamespaceDeleted(t *testing.T) {
	t.Parallel()
	in := install(t)
	in.start(t, "manager-a", managerOptions{})
	in.raised(t)
	in.mustReserve(t, "held", 10_000)
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: in.namespace}}
	in.delete(t, namespace)
	in.waitGone(t, namespace)
	if got := in.db.limit(t, in.key(bucketName)); got != normal {
		t.Errorf("the namespace is gone and the limit is %d, want %d", got, normal)
	}
	if raise := in.db.raise(t, in.namespace, leaseName); raise.text("state") != "restored" {
		t.Errorf("the raise is %s, want restored", raise.text("state"))
	}
	in.wantRefused(t, "closed", 1, ledger.CodeBucketClosed)
}
