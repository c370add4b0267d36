package e2e_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/internal/ledger"
)

// Goal: a tenant whose bucket is stuck keeps nobody else waiting: other raises end
// on time, and are shown.
// Method: hold the lock of one bucket's row, as a forgotten psql session does,
// while the raises of both buckets expire.
func TestStuckTenant(t *testing.T) {
	t.Parallel()
	in := install(t)
	in.start(t, "manager-a", managerOptions{})
	in.raised(t)
	in.create(t,
		in.bucket(named[*v1alpha1.TokenBucket]("other")),
		in.lease(t, named[*v1alpha1.TemporaryLimitLease]("other-launch"), on("other"), approvedBy("CHG-2")))
	in.waitLease(t, "other-launch", active)
	session, err := in.db.sql.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = session.Rollback(t.Context()) }()
	if _, err := session.Exec(t.Context(), "SELECT FROM tokenlease.buckets WHERE bucket_key = $1 FOR UPDATE", in.key(bucketName)); err != nil {
		t.Fatal(err)
	}

	in.passExpiry(t, "other-launch") // the later one of the two
	in.waitLease(t, "other-launch", restored)
	in.db.waitLimit(t, in.key("other"), normal)
	if got := in.db.raise(t, in.namespace, leaseName).text("state"); got != "active" {
		t.Fatalf("the raise of the stuck bucket is %s; its row was not held", got)
	}
	if _, err := in.reserve(t, "stuck", 1); !ledger.HasCode(err, ledger.CodeUnavailable) {
		t.Errorf("reserve on the stuck bucket: %v, want %s", err, ledger.CodeUnavailable)
	}

	if err := session.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	in.waitLease(t, leaseName, restored)
	in.waitBucket(t, inSync...)
}

// Goal: a bucket whose row has vanished is not opened again with nothing used;
// it says so, and keeps saying so after a restart.
func TestVanishedRow(t *testing.T) {
	t.Parallel()
	in := install(t)
	m := in.start(t, "manager-a", managerOptions{})
	in.create(t, in.bucket())
	in.waitBucket(t, inSync...)
	in.mustCommit(t, in.mustReserve(t, "used", 70_000), 70_000)
	in.db.exec(t, "DELETE FROM tokenlease.buckets WHERE bucket_key = $1", in.key(bucketName))

	stalled := []want{
		isFalse(v1alpha1.ConditionReady), isTrue(v1alpha1.ConditionStalled).because(v1alpha1.ReasonBucketRowMissing),
	}
	in.waitBucket(t, stalled...)
	m.terminate(t)
	in.start(t, "manager-b", managerOptions{}).waitPart(t, "controllers", true)
	in.patch(t, in.bucket(), `{"spec": {"limit": %d}}`, permanent) // makes it look again
	in.waitBucket(t, stalled...)
	if got := in.db.limit(t, in.key(bucketName)); got != -1 {
		t.Errorf("the bucket was opened again, with the limit %d", got)
	}
}

// Goal: the same grant is not raised twice. A lease that was deleted while active
// and is applied again, as a GitOps tool does, stays revoked; another grant with
// the same approval is refused.
func TestGrantIsSpent(t *testing.T) {
	t.Parallel()
	in := install(t)
	in.start(t, "manager-a", managerOptions{})
	startsAt := in.db.now(t).Add(-time.Minute).Truncate(time.Second)
	in.raised(t, from(startsAt))
	lease := in.lease(t)
	in.delete(t, lease)
	in.waitGone(t, lease)

	in.create(t, in.lease(t, from(startsAt)))
	in.waitLease(t, leaseName, []want{isTrue(v1alpha1.ConditionEnded).because(v1alpha1.ReasonRevoked), isFalse(v1alpha1.ConditionActive)})
	in.create(t, in.lease(t, named[*v1alpha1.TemporaryLimitLease]("second")))
	in.waitLease(t, "second", []want{
		isTrue(v1alpha1.ConditionStalled).because(v1alpha1.ReasonApprovalAlreadyUsed), isTrue(v1alpha1.ConditionEnded),
	})
	if got := in.db.limit(t, in.key(bucketName)); got != normal {
		t.Errorf("the limit is %d, want %d", got, normal)
	}
	in.db.one(t, in.key(bucketName), "RaiseActivated")
}

// Goal: a lease may be deleted at any moment of its life; the limit is the normal
// one at the end, and no raise is left over. Most often it is so before the
// object is gone. But an API server that deletes an object while a finalizer is
// being added may let it go all the same; then the manager ends the raise once it
// hears of that.
func TestLeaseDeletedAtAnyMoment(t *testing.T) {
	t.Parallel()
	in := install(t)
	key := in.key(bucketName)
	in.start(t, "manager-a", managerOptions{})
	in.create(t, in.bucket())
	in.waitBucket(t, inSync...)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, seed))
	for i := range 30 {
		lease := in.lease(t, named[*v1alpha1.TemporaryLimitLease](fmt.Sprintf("lease-%d", i)),
			approvedBy(v1alpha1.Identifier(fmt.Sprintf("CHG-%d", i))))
		in.create(t, lease)
		time.Sleep(time.Duration(random.IntN(200)) * time.Millisecond) // the moment, not a wait
		in.delete(t, lease)
		in.waitGone(t, lease)
		in.db.waitLimit(t, key, normal)
	}
	in.waitBucket(t, inSync...)
	if live := in.db.rows(t, "SELECT raise_id, state FROM tokenlease.raises WHERE state NOT IN ('restored', 'failed')"); len(live) > 0 {
		t.Errorf("raises are left over: %v", live)
	}
	count := map[string]int{}
	for _, event := range in.db.events(t, key) {
		count[event]++
	}
	if count["RaiseActivated"] != count["RaiseRestored/Revoked"] {
		t.Errorf("raised %d times and taken back %d times", count["RaiseActivated"], count["RaiseRestored/Revoked"])
	}
}

// Goal: a lease whose object was taken away by force leaves no raise behind: the
// leader notices and ends it.
// Method: remove the finalizer while no manager runs, so that nobody is told.
func TestLeaseTakenAwayByForce(t *testing.T) {
	t.Parallel()
	in := install(t)
	key := in.key(bucketName)
	m := in.start(t, "manager-a", managerOptions{})
	in.raised(t)
	m.kill9(t)
	lease := in.lease(t)
	in.patch(t, lease, `{"metadata": {"finalizers": null}}`)
	if err := in.api.Delete(call(t), lease); err != nil && !apierrors.IsNotFound(err) {
		t.Fatal(err)
	}
	in.waitGone(t, lease)
	in.start(t, "manager-b", managerOptions{})
	in.db.waitLimit(t, key, normal)
	if events := in.db.events(t, key); !slices.Contains(events, "RaiseRestored/Revoked") {
		t.Errorf("audit %v, want the raise to be revoked", events)
	}
	in.waitBucket(t, inSync...)
}

// Goal: nothing is written while nothing happens, neither to objects nor to the
// ledger: a status that fed its own watch would go on for ever.
// Method: compare what two looks see, between which the leader has renewed its
// leadership for some seconds, and so has looked at the ledger many times.
func TestNothingIsWrittenWhenIdle(t *testing.T) {
	t.Parallel()
	in := install(t)
	in.start(t, "manager-a", managerOptions{})
	in.raised(t)
	in.create(t, in.lease(t, named[*v1alpha1.TemporaryLimitLease]("second"), approvedBy("CHG-2")))
	in.waitLease(t, "second", []want{
		isTrue(v1alpha1.ConditionReady).because(v1alpha1.ReasonBucketAlreadyRaised), isFalse(v1alpha1.ConditionActive),
	})
	before := in.versions(t)
	waitFor(t, "two looks in a row that see the same", func() (bool, string) {
		since := in.renewed(t)
		waitFor(t, "the leader to renew its leadership", func() (bool, string) {
			now := in.renewed(t)
			return now.Sub(since) >= 4*time.Second, now.String()
		})
		after := in.versions(t)
		same, seen := slices.Equal(before, after), fmt.Sprintf("%v, then %v", before, after)
		before = after
		return same, seen
	})
}

// versions are the resource versions of the objects and the row versions of the
// ledger: what differs after any write, also one that changes nothing.
func (in *installation) versions(t *testing.T) []string {
	t.Helper()
	var buckets v1alpha1.TokenBucketList
	var leases v1alpha1.TemporaryLimitLeaseList
	for _, list := range []client.ObjectList{&buckets, &leases} {
		if err := in.api.List(call(t), list, client.InNamespace(in.namespace)); err != nil {
			t.Fatal(err)
		}
	}
	var versions []string
	for _, b := range buckets.Items {
		versions = append(versions, b.Name+" "+b.ResourceVersion)
	}
	for _, l := range leases.Items {
		versions = append(versions, l.Name+" "+l.ResourceVersion)
	}
	for _, r := range in.db.rows(t, `
		SELECT bucket_key || ' ' || xmin AS version FROM tokenlease.buckets
		UNION ALL SELECT raise_id || ' ' || xmin FROM tokenlease.raises
		UNION ALL SELECT 'audit ' || count(*) FROM tokenlease.audit ORDER BY 1`) {
		versions = append(versions, r.text("version"))
	}
	return versions
}

// renewed is when the leader renewed its leadership last.
func (in *installation) renewed(t *testing.T) time.Time {
	t.Helper()
	var lease coordinationv1.Lease
	if err := in.api.Get(call(t), client.ObjectKey{Namespace: in.election, Name: electionID}, &lease); err != nil {
		t.Fatal(err)
	}
	if lease.Spec.RenewTime == nil {
		t.Fatal("the leader never renewed its leadership")
	}
	return lease.Spec.RenewTime.Time
}
