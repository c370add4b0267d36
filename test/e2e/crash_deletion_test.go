package e2e_test

import (
	"slices"
	"strconv"
	"strings"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/token-lease/operator/api/v1alpha1"
)

// Goal: deletions, too, end in the same state with one step of each kind, whenever
// the manager is killed on the way: a lease that is deleted while its raise is
// active, a raised bucket that is closed, and one that is deleted for good.
// Method: the object is deleted while no manager runs, so that the one with the
// crash point has the deletion to do and nothing before it.
func TestCrashPointsOfDeletion(t *testing.T) {
	t.Parallel()
	for name, story := range map[string]func(*testing.T, string){
		"lease": crashRevoking, "bucket retained": crashClosing, "bucket deleted": crashDeletingForGood,
	} {
		for _, point := range []string{
			"ledger.committed", "controller.before-ledger", "controller.after-ledger", "controller.before-finalizer-removal",
		} {
			times := []int{1}
			if name == "lease" && strings.HasSuffix(point, "-ledger") {
				// Bucket and lease both get there, in either order. A bucket that is being
				// deleted ends the raise by itself: its lease may have nothing to do.
				times = append(times, 2)
			}
			for _, time := range times {
				t.Run(name+"/"+point+"/"+strconv.Itoa(time), func(t *testing.T) {
					t.Parallel()
					story(t, point+"=kill:"+strconv.Itoa(time))
				})
			}
		}
	}
}

// deletedUnattended brings up a raise, and deletes the object that is picked while
// no manager runs.
func deletedUnattended(t *testing.T, b *v1alpha1.TokenBucket, in *installation, pick client.Object) *v1alpha1.TemporaryLimitLease {
	t.Helper()
	m := in.start(t, "manager-a", managerOptions{})
	in.create(t, b, in.lease(t))
	lease := in.waitLease(t, leaseName, active)
	m.terminate(t)
	in.delete(t, pick)
	return lease
}

func crashRevoking(t *testing.T, fault string) {
	in := install(t)
	lease := deletedUnattended(t, in.bucket(), in, in.lease(t))
	s := in.supervise(t, fault)
	in.waitGone(t, in.lease(t))
	s.checkCrashed(t)
	in.waitBucket(t, inSync...)
	key := in.key(bucketName)
	if got := in.db.limit(t, key); got != normal {
		t.Errorf("the limit is %d, want %d", got, normal)
	}
	in.checkEachOnce(t, "BucketOpened", "RaiseStored", "RaiseActivated", "RaiseRestored/Revoked")
	in.checkOperations(t, string(lease.UID)+":activate", string(lease.UID)+":revoke")
}

func crashClosing(t *testing.T, fault string) {
	in := install(t)
	deletedUnattended(t, in.bucket(), in, in.bucket())
	s := in.supervise(t, fault)
	in.waitGone(t, in.bucket())
	in.waitLease(t, leaseName, restored)
	in.waitNoFinalizer(t, leaseName)
	s.checkCrashed(t)
	if got := in.db.limit(t, in.key(bucketName)); got != normal {
		t.Errorf("the bucket is closed and the limit is %d, want %d", got, normal)
	}
	in.checkEachOnce(t, "BucketOpened", "RaiseStored", "RaiseActivated", "RaiseRestored/BucketClosed", "BucketClosed")
}

func crashDeletingForGood(t *testing.T, fault string) {
	in := install(t)
	deletedUnattended(t, in.bucket(deletedForGood), in, in.bucket())
	s := in.supervise(t, fault)
	in.waitGone(t, in.bucket())
	in.waitLease(t, leaseName, restored)
	in.waitNoFinalizer(t, leaseName)
	s.checkCrashed(t)
	if got := in.db.limit(t, in.key(bucketName)); got != -1 {
		t.Errorf("the row is still there, with the limit %d", got)
	}
	in.checkEachOnce(t, "BucketOpened", "RaiseStored", "RaiseActivated", "RaiseRestored/BucketClosed", "BucketDeleted")
}

// checkEachOnce checks that the audit holds these events, none of any kind twice,
// and numbers without gaps.
func (in *installation) checkEachOnce(t *testing.T, wanted ...string) {
	t.Helper()
	key := in.key(bucketName)
	for i, r := range in.db.audit(t, key) {
		if r.text("sequence") != strconv.Itoa(i+1) {
			t.Errorf("audit row %d has the number %s", i+1, r.text("sequence"))
		}
	}
	events := in.db.events(t, key)
	for _, event := range wanted {
		if !slices.Contains(events, event) {
			t.Errorf("the audit does not tell %s: %v", event, events)
		}
	}
	slices.Sort(events)
	if once := slices.Compact(slices.Clone(events)); len(once) != len(events) {
		t.Errorf("the audit tells something twice: %v", events)
	}
}

// checkOperations checks which operations the ledger knows of the bucket.
func (in *installation) checkOperations(t *testing.T, wanted ...string) {
	t.Helper()
	var found []string
	for _, r := range in.db.rows(t, "SELECT operation_id FROM tokenlease.operations WHERE bucket_key = $1", in.key(bucketName)) {
		found = append(found, r.text("operation_id"))
	}
	slices.Sort(found)
	slices.Sort(wanted)
	if !slices.Equal(found, wanted) {
		t.Errorf("operations %v, want %v", found, wanted)
	}
}
