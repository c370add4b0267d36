package e2e_test

import (
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/hack/devenv/postgres/postgrestest"
	"github.com/token-lease/operator/internal/ledger"
)

// Goal: a bucket may be deleted before its leases, whatever state they are in:
// everything ends, and everything can be deleted, without a hand on a finalizer.
func TestBucketDeletedBeforeItsLeases(t *testing.T) {
	t.Parallel()
	in := install(t)
	key := in.key(bucketName)
	in.start(t, "manager-a", managerOptions{})
	in.raised(t)
	ended := in.otherLease(t, bucketName, "ended", until(in.db.now(t).Add(-farAway)))
	waits := in.otherLease(t, bucketName, "waiting")
	later := in.otherLease(t, bucketName, "later", from(in.after(t, farAway)), until(in.after(t, 2*farAway)))
	in.create(t, ended, waits, later)
	in.waitLease(t, "ended", neverRan(v1alpha1.ReasonWindowMissed))
	in.waitLease(t, "waiting", waiting)
	in.waitLease(t, "later", pending)

	bucket := in.bucket()
	in.delete(t, bucket)
	in.waitGone(t, bucket)
	if got := in.db.limit(t, key); got != normal {
		t.Errorf("the bucket is gone and the limit is %d, want %d", got, normal)
	}
	lease := in.waitLease(t, leaseName, restored)
	if c := meta.FindStatusCondition(lease.Status.Conditions, v1alpha1.ConditionEnded); c.Reason != v1alpha1.ReasonBucketClosed {
		t.Errorf("ended because %s, want %s", c.Reason, v1alpha1.ReasonBucketClosed)
	}
	in.waitLease(t, "waiting", neverRan(v1alpha1.ReasonBucketClosed))
	in.waitLease(t, "later", neverRan(v1alpha1.ReasonBucketClosed))
	in.waitLease(t, "ended", neverRan(v1alpha1.ReasonWindowMissed))

	early := in.otherLease(t, bucketName, "early") // it never had a bucket
	in.create(t, early)
	in.waitLease(t, "early", []want{isTrue(v1alpha1.ConditionReconciling).because(v1alpha1.ReasonBucketNotFound)})
	for _, l := range []*v1alpha1.TemporaryLimitLease{lease, waits, later, ended, early} {
		in.delete(t, l)
		in.waitGone(t, l)
	}
	in.db.one(t, key, "RaiseRestored")
}

// Goal: what is deleted while PostgreSQL is down waits, says why, and goes when the
// ledger has done its part; what is taken away by force meanwhile leaves no raise
// behind.
// Method: one raise is deleted in good order, one is taken away by force under the
// eyes of the manager, and one when no manager runs either.
func TestDeletedWhilePostgreSQLIsDown(t *testing.T) {
	t.Parallel()
	server := postgrestest.Own(t)
	in := installOn(t, world.cluster, server)
	first := in.start(t, "manager-a", managerOptions{})
	names := []string{"deleted", "forced", "unseen"}
	leases := map[string]*v1alpha1.TemporaryLimitLease{}
	for _, name := range names {
		leases[name] = in.otherLease(t, name, name)
		in.create(t, in.otherBucket(name), leases[name])
	}
	for _, name := range names {
		in.waitLease(t, name, active)
	}
	expiresAt := leases["unseen"].Spec.ExpiresAt.Time

	stage(t, "the database is down")
	if err := server.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	first.waitPart(t, "ledger", false)
	in.delete(t, leases["deleted"])
	in.waitTerminating(t, "deleted")
	in.takeAway(t, leases["forced"])
	if _, err := in.db.ledger.Inspect(call(t), in.key("forced")); !ledger.HasCode(err, ledger.CodeUnavailable) {
		t.Errorf("inspect without a database: %v, want %s", err, ledger.CodeUnavailable)
	}

	stage(t, "the database is back")
	in.db.resume(t)
	in.waitGone(t, leases["deleted"])
	in.waitNormal(t, "deleted")
	in.waitNormal(t, "forced")
	for _, name := range []string{"deleted", "forced"} {
		if r := in.db.one(t, in.key(name), "RaiseRestored"); r.text("reason") != "Revoked" {
			t.Errorf("%s: restored because %s, want Revoked", name, r.text("reason"))
		}
	}

	stage(t, "database and manager are down")
	first.kill9(t)
	if err := server.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	in.takeAway(t, leases["unseen"])
	in.db.resume(t)
	in.db.moveClockTo(t, expiresAt)
	in.start(t, "manager-b", managerOptions{})
	in.waitNormal(t, "unseen")
	if r := in.db.one(t, in.key("unseen"), "RaiseRestored"); r.text("reason") != "Expired" {
		t.Errorf("restored because %s, want Expired", r.text("reason"))
	}
}

// resume brings the database back, and forgets the connections that it broke.
func (d *database) resume(t *testing.T) {
	t.Helper()
	if err := d.server.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	d.sql.Reset()
}

// waitNormal waits until a bucket's limit is the normal one and its status says so.
func (in *installation) waitNormal(t *testing.T, bucket string) {
	t.Helper()
	in.db.waitLimit(t, in.key(bucket), normal)
	in.waitBucketNamed(t, bucket, inSync...)
}

// waitTerminating waits until a deleted lease says that it waits for the ledger.
func (in *installation) waitTerminating(t *testing.T, name string) {
	t.Helper()
	l := &v1alpha1.TemporaryLimitLease{}
	waitFor(t, name+" to say why it is not gone", func() (bool, string) {
		if err := in.api.Get(call(t), client.ObjectKey{Namespace: in.namespace, Name: name}, l); err != nil {
			t.Fatalf("the lease cannot be read; it must not go before the raise has ended: %v", err)
		}
		c := meta.FindStatusCondition(l.Status.Conditions, v1alpha1.ConditionReady)
		return !l.DeletionTimestamp.IsZero() && c.Status == metav1.ConditionUnknown &&
			c.Reason == v1alpha1.ReasonLedgerUnavailable && c.ObservedGeneration == l.Generation, asJSON(l)
	})
}
