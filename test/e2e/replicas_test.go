package e2e_test

import (
	"strings"
	"testing"
	"time"

	"github.com/token-lease/operator/api/v1alpha1"
)

// Goal: of two managers on one ledger and one API server each does its part, and
// nothing is done twice; when the leader is killed in the middle the other one
// takes over, and raises end on time whoever leads.
// Method: find the leader by what /readyz says, kill -9 it while the raise is
// active, and end the one that is left with SIGTERM.
func TestLeaderKilled(t *testing.T) {
	t.Parallel()
	in := install(t)
	key := in.key(bucketName)
	leader := in.start(t, "manager-a", managerOptions{})
	leader.waitPart(t, "controllers", true)
	other := in.start(t, "manager-b", managerOptions{})
	in.raised(t)
	waitFor(t, "the other one to stand by", func() (bool, string) {
		state := other.part(t, "controllers")
		if state == "" {
			t.Fatal("both managers run the controllers")
		}
		return state == standingBy, state
	})

	// Events are sent after what they tell of: a leader that dies takes those along.
	in.wantEvents(t, "RaiseActivated")

	stage(t, "the leader dies, and the raise ends without one")
	leader.kill9(t)
	in.passExpiry(t, leaseName)
	in.db.waitLimit(t, key, normal)

	stage(t, "the other one takes over")
	other.waitPart(t, "controllers", true)
	in.waitLease(t, leaseName, restored)
	in.waitBucket(t, inSync...)
	in.waitNoFinalizer(t, leaseName)
	in.checkAuditOnce(t)
	in.wantEvents(t, "RaiseActivated", "RaiseRestored")

	stage(t, "it works: a second raise runs under it")
	in.create(t, in.lease(t, named[*v1alpha1.TemporaryLimitLease]("second"), approvedBy("CHG-2")))
	in.waitLease(t, "second", active)
	other.terminate(t)
}

// Goal: SIGTERM ends a manager with exit code 0 within its bound, whether it leads
// or not, and a leader that ends so hands over at once.
func TestTerminate(t *testing.T) {
	t.Parallel()
	in := install(t)
	leader := in.start(t, "manager-a", managerOptions{})
	leader.waitPart(t, "controllers", true)
	follower := in.start(t, "manager-b", managerOptions{})
	in.raised(t)
	follower.terminate(t)
	third := in.start(t, "manager-c", managerOptions{})
	leader.terminate(t)
	third.waitPart(t, "controllers", true)
	in.shorten(t, time.Second)
	in.waitLease(t, leaseName, restored)
	third.terminate(t)
	if got := strings.Join(in.db.events(t, in.key(bucketName)), " "); got != "BucketOpened RaiseStored RaiseActivated RaiseShortened RaiseRestored/Expired" {
		t.Errorf("audit %s", got)
	}
}
