package e2e_test

import (
	"testing"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/internal/ledger"
)

// Goal: when the row of a raised bucket vanishes, nobody says any longer that the
// raise is in force, nothing is opened anew, and everything can be deleted.
func TestVanishedRowWhileRaised(t *testing.T) {
	t.Parallel()
	in := install(t)
	key := in.key(bucketName)
	in.start(t, "manager-a", managerOptions{})
	in.raised(t)
	in.create(t, in.otherLease(t, bucketName, "waiting"))
	in.waitLease(t, "waiting", waiting)
	in.db.exec(t, "DELETE FROM tokenlease.buckets WHERE bucket_key = $1", key)
	in.waitBucket(t, isFalse(v1alpha1.ConditionReady), isTrue(v1alpha1.ConditionStalled).because(v1alpha1.ReasonBucketRowMissing))
	in.waitLease(t, leaseName, underReview)

	stage(t, "all are deleted, and the bucket may begin anew")
	lease, waits, bucket := in.lease(t), in.otherLease(t, bucketName, "waiting"), in.bucket()
	in.delete(t, lease)
	in.waitGone(t, lease)
	in.delete(t, waits)
	in.waitGone(t, waits)
	in.delete(t, bucket)
	in.waitGone(t, bucket)
	if got := in.db.limit(t, key); got != -1 {
		t.Errorf("the bucket was opened again, with the limit %d", got)
	}
	in.create(t, in.bucket())
	in.waitBucket(t, inSync...)
	if live := in.db.rows(t, "SELECT raise_id, state FROM tokenlease.raises WHERE state NOT IN ('restored', 'failed')"); len(live) > 0 {
		t.Errorf("raises are left over: %v", live)
	}
}

// Goal: a row that is put back from an old copy does not bring back the limit of a
// raise that has ended since: nobody would end it a second time.
// Method: the row is copied while the raise is in force, and put back when the raise
// is over, as a person does who restores a table from a backup.
func TestRowComesBackFromAnOldCopy(t *testing.T) {
	t.Parallel()
	in := install(t)
	key := in.key(bucketName)
	in.start(t, "manager-a", managerOptions{})
	in.raised(t)
	in.db.exec(t, "CREATE TABLE public.copy AS SELECT * FROM tokenlease.buckets")
	in.passExpiry(t, leaseName)
	in.waitLease(t, leaseName, restored)
	in.waitBucket(t, inSync...)
	in.db.exec(t, "DELETE FROM tokenlease.buckets")
	in.db.exec(t, "INSERT INTO tokenlease.buckets SELECT * FROM public.copy")

	in.wantRefused(t, "raised for ever", normal+1, ledger.CodeBudgetExceeded)
	in.waitBucket(t, inSync...)
	in.mustReserve(t, "normal", normal)
	in.db.one(t, key, "BucketInsertedOutsideLedger")
	in.waitLease(t, leaseName, restored)
	stage(t, "a new raise runs on it")
	in.create(t, in.otherLease(t, bucketName, "second"))
	in.waitLease(t, "second", active)
	in.passExpiry(t, "second")
	in.waitLease(t, "second", restored)
	in.waitBucket(t, inSync...)
}
