package e2e_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/token-lease/operator/api/v1alpha1"
)

// takeAway removes an object as a hand does that does not wait for the operator:
// its finalizer first.
func (in *installation) takeAway(t *testing.T, object client.Object) {
	t.Helper()
	in.patch(t, object, `{"metadata": {"finalizers": null}}`)
	if err := in.api.Delete(call(t), object); err != nil && !apierrors.IsNotFound(err) {
		t.Fatal(err)
	}
	in.waitGone(t, object)
}

// uid is the UID of a lease.
func (in *installation) uid(t *testing.T, lease string) string {
	t.Helper()
	found := &v1alpha1.TemporaryLimitLease{}
	if err := in.api.Get(call(t), client.ObjectKey{Namespace: in.namespace, Name: lease}, found); err != nil {
		t.Fatal(err)
	}
	return string(found.UID)
}

// grantStates are the states of a record in which its grant comes back, and what the
// lease shows then.
var grantStates = map[string][]want{
	"pending": pending, "active": active, "restored": restored, "revoked": revokedActive,
}

// grant is the lease that comes back in a state, each on a bucket of its own. It is
// the same one each time.
func (in *installation) grant(t *testing.T, state string, begin time.Time) *v1alpha1.TemporaryLimitLease {
	t.Helper()
	l := in.otherLease(t, state, state, from(begin), until(begin.Add(late)))
	switch state {
	case "pending":
		from(begin.Add(late))(l)
		until(begin.Add(2 * late))(l)
	case "restored":
		until(begin.Add(early))(l)
	}
	return l
}

// Goal: the same grant under a new UID, as a GitOps tool brings it back after a
// delete or a restored backup brings it, is never raised a second time: the new
// object takes over the record in whatever state it is, and shows it.
// Method: one bucket for each state of the record. While no manager runs, the
// leases are taken away, and they are applied again from the same manifests.
func TestSameGrantUnderANewUID(t *testing.T) {
	t.Parallel()
	in := install(t)
	first := in.start(t, "manager-a", managerOptions{})
	begin := in.after(t, 0).Add(-time.Minute)
	oldUIDs := in.bringToStates(t, begin)
	first.terminate(t)
	watched := watchLimit(t, in.db, in.key("active"))
	for _, state := range []string{"pending", "active", "restored"} {
		in.takeAway(t, in.grant(t, state, begin))
	}

	stage(t, "the same manifests are applied again")
	for state := range grantStates {
		in.create(t, in.grant(t, state, begin))
	}
	second := in.start(t, "manager-b", managerOptions{})
	for state, shown := range grantStates {
		in.waitLease(t, state, shown)
		raise := in.db.raise(t, in.namespace, state)
		if raise.text("raise_id") != oldUIDs[state] || raise.text("current_uid") != in.uid(t, state) {
			t.Errorf("%s: the record is %s, held by %s; want %s, held by %s",
				state, raise.text("raise_id"), raise.text("current_uid"), oldUIDs[state], in.uid(t, state))
		}
		in.db.one(t, in.key(state), "RaiseLinked")
	}

	stage(t, "a spent approval stays spent, on every bucket of the tenant")
	for state := range grantStates {
		again := in.otherLease(t, "restored", "again-"+state, approvedBy(v1alpha1.Identifier("CHG-"+state)))
		in.create(t, again)
		in.waitLease(t, again.Name, neverRan(v1alpha1.ReasonApprovalAlreadyUsed))
	}

	stage(t, "the records go on under their new objects")
	in.db.moveClockTo(t, begin.Add(late))
	in.waitLease(t, "active", restored)
	watched.wantInTurn(t, temporary, normal)
	in.waitLease(t, "pending", active)
	in.delete(t, in.grant(t, "pending", begin))
	in.waitGone(t, in.grant(t, "pending", begin))
	if got, want := in.db.one(t, in.key("pending"), "RaiseRestored").text("operation_id"), oldUIDs["pending"]+":revoke"; got != want {
		t.Errorf("revoked under %s, want %s", got, want)
	}
	for state := range grantStates {
		in.waitBucketNamed(t, state, inSync...)
		in.db.one(t, in.key(state), "RaiseActivated")
		in.db.one(t, in.key(state), "RaiseRestored")
	}
	second.terminate(t)
}

// bringToStates creates the buckets and the grants, brings each record into its
// state, and returns the UIDs under which they were stored.
func (in *installation) bringToStates(t *testing.T, begin time.Time) map[string]string {
	t.Helper()
	uids := map[string]string{}
	for state := range grantStates {
		in.create(t, in.otherBucket(state), in.grant(t, state, begin))
		uids[state] = in.uid(t, state)
	}
	in.waitLease(t, "pending", pending)
	for _, state := range []string{"active", "restored", "revoked"} {
		in.waitLease(t, state, active)
	}
	in.delete(t, in.grant(t, "revoked", begin))
	in.waitGone(t, in.grant(t, "revoked", begin))
	in.db.moveClockTo(t, begin.Add(early))
	in.waitLease(t, "restored", restored)
	in.waitNoFinalizer(t, "restored")
	return uids
}

// Goal: a status is only a picture: wiped, or restored from an old copy, it is
// painted anew, and the ledger is not touched for it.
func TestStatusWipedAndRestoredFromAnOldCopy(t *testing.T) {
	t.Parallel()
	in := install(t)
	key := in.key(bucketName)
	in.start(t, "manager-a", managerOptions{})
	startsAt := in.after(t, farAway)
	in.create(t, in.bucket(), in.lease(t, from(startsAt), until(startsAt.Add(farAway))))
	before := in.waitLease(t, leaseName, pending)
	in.db.moveClockTo(t, startsAt)
	during := in.waitLease(t, leaseName, active)
	raisedBucket := []want{isTrue(v1alpha1.ConditionReady), isTrue(v1alpha1.ConditionRaised), isTrue(v1alpha1.ConditionLimitInSync)}
	bucketDuring := in.waitBucket(t, raisedBucket...)
	events := in.db.events(t, key)
	watched := watchLimit(t, in.db, key)

	stage(t, "while the raise is in force")
	in.wipeStatus(t)
	again := in.waitLease(t, leaseName, active)
	if !again.Status.ActivatedAt.Equal(during.Status.ActivatedAt) {
		t.Errorf("activated at %v, then at %v", during.Status.ActivatedAt, again.Status.ActivatedAt)
	}
	in.waitBucket(t, raisedBucket...)
	in.restoreStatus(t, in.lease(t), before.Status)
	in.waitLease(t, leaseName, active)
	watched.wantInTurn(t, temporary)

	stage(t, "after it has ended")
	in.db.moveClockTo(t, startsAt.Add(farAway))
	in.waitLease(t, leaseName, restored)
	in.waitNoFinalizer(t, leaseName)
	in.waitBucket(t, inSync...)
	for _, status := range []v1alpha1.TemporaryLimitLeaseStatus{before.Status, during.Status, {ObservedGeneration: -1}} {
		in.restoreStatus(t, in.lease(t), status)
		in.waitLease(t, leaseName, restored)
		in.waitNoFinalizer(t, leaseName)
	}
	in.restoreStatus(t, in.bucket(), bucketDuring.Status)
	in.waitBucket(t, inSync...)
	if got, want := in.db.events(t, key), append(events, "RaiseRestored/Expired"); !slices.Equal(got, want) {
		t.Errorf("audit %v, want %v", got, want)
	}
	if got := in.db.limit(t, key); got != normal {
		t.Errorf("the limit is %d, want %d", got, normal)
	}
}

// restoreStatus puts a status where another one is.
func (in *installation) restoreStatus(t *testing.T, object client.Object, status any) {
	t.Helper()
	in.patchStatus(t, object, `{"status": null}`)
	text, err := json.Marshal(status)
	if err != nil {
		t.Fatal(err)
	}
	in.patchStatus(t, object, fmt.Sprintf(`{"status": %s}`, text))
}
