package e2e_test

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/token-lease/operator/api/v1alpha1"
)

// Goal: the manager may be killed at any moment, before, between and after its
// side effects, and the rerun ends in the same state with one operation of each
// kind.
// Method: a build with crash points kills itself with SIGKILL at a named point and
// is started again. Each point is tried from nothing (bucket and raise arrive, the
// raise runs and ends), at the first and at a later time of reaching it, and by
// a manager that comes up after the expiry of a raise that it has to end.
func TestCrashPoints(t *testing.T) {
	t.Parallel()
	for _, point := range []string{
		"ledger.locked", "ledger.before-write", "ledger.committed",
		"controller.before-finalizer", "controller.before-ledger", "controller.after-ledger",
		"controller.before-status", "controller.after-status", "controller.before-finalizer-removal",
	} {
		for _, time := range timesOf(point) {
			t.Run(point+"/"+strconv.Itoa(time), func(t *testing.T) {
				t.Parallel()
				crashFromNothing(t, point+"=kill:"+strconv.Itoa(time))
			})
		}
	}
	for _, point := range []string{
		"ledger.locked", "ledger.before-write", "ledger.committed",
		"controller.before-ledger", "controller.after-ledger",
		"controller.before-status", "controller.after-status", "controller.before-finalizer-removal",
	} {
		t.Run(point+"/overdue", func(t *testing.T) {
			t.Parallel()
			crashOverdue(t, point+"=kill")
		})
	}
}

// timesOf are the times of reaching a point at which to crash. There are two
// finalizers to add, and one to remove before the test ends.
func timesOf(point string) []int {
	switch point {
	case "controller.before-finalizer":
		return []int{1, 2}
	case "controller.before-finalizer-removal":
		return []int{1}
	default:
		return []int{1, 2, 4}
	}
}

func crashFromNothing(t *testing.T, fault string) {
	in := install(t)
	s := in.supervise(t, fault)
	in.create(t, in.bucket(), in.lease(t))
	in.waitLease(t, leaseName, active)
	in.shorten(t, time.Second)
	in.checkOneOfEverything(t, s)
}

func crashOverdue(t *testing.T, fault string) {
	in := install(t)
	m := in.start(t, "manager-a", managerOptions{})
	in.raised(t)
	m.kill9(t)
	in.passExpiry(t, leaseName)
	in.checkOneOfEverything(t, in.supervise(t, fault))
}

// checkOneOfEverything waits for the end of the story, and checks that there is
// no trace of anything having been done twice.
func (in *installation) checkOneOfEverything(t *testing.T, s *supervised) {
	t.Helper()
	key := in.key(bucketName)
	lease := in.waitLease(t, leaseName, restored)
	in.waitBucket(t, inSync...)
	in.waitNoFinalizer(t, leaseName)
	s.checkCrashed(t)
	if got := in.db.limit(t, key); got != normal {
		t.Errorf("the limit is %d at the end, want %d", got, normal)
	}
	if lease.Status.State != v1alpha1.RaiseStateRestored {
		t.Errorf("state %s, want Restored", lease.Status.State)
	}
	in.checkAuditOnce(t)
	var operations []string
	for _, r := range in.db.rows(t, "SELECT operation_id FROM tokenlease.operations WHERE bucket_key = $1", key) {
		operations = append(operations, r.text("operation_id"))
	}
	slices.Sort(operations)
	want := []string{string(lease.UID) + ":activate", string(lease.UID) + ":restore"}
	if !slices.Equal(operations, want) {
		t.Errorf("operations %v, want %v", operations, want)
	}
}

// checkAuditOnce checks that the audit tells the story once, without gaps.
func (in *installation) checkAuditOnce(t *testing.T) {
	t.Helper()
	key := in.key(bucketName)
	var events []string
	for i, r := range in.db.audit(t, key) {
		if r.text("sequence") != strconv.Itoa(i+1) {
			t.Errorf("audit row %d has the number %s", i+1, r.text("sequence"))
		}
		// The raise waits for nothing here, unless the bucket came after it.
		if event := r.text("event"); event != "RaiseShortened" {
			events = append(events, event)
		}
	}
	if got := strings.Join(events, " "); got != "BucketOpened RaiseStored RaiseActivated RaiseRestored" {
		t.Errorf("the audit tells %q", in.db.events(t, key))
	}
	for _, event := range []string{"RaiseActivated", "RaiseRestored"} {
		in.db.one(t, key, event)
	}
}

// maximumLives bounds how often a manager is started again; one crash is asked
// for.
const maximumLives = 5

// supervised is a manager with a crash point that is started again when it ends,
// as Kubernetes does it.
type supervised struct {
	stop chan struct{}
	// ends are how its lives ended, in order; closed after the last one.
	ends chan *os.ProcessState
}

// supervise starts it; it ends with the test.
func (in *installation) supervise(t *testing.T, fault string) *supervised {
	t.Helper()
	options := managerOptions{program: world.faulty, env: []string{
		"TOKENLEASE_FAULT=" + fault, "TOKENLEASE_FAULT_ONCE_FILE=" + filepath.Join(in.dir, "crashed"),
	}}
	s := &supervised{stop: make(chan struct{}), ends: make(chan *os.ProcessState, maximumLives)}
	var running sync.WaitGroup
	running.Go(func() {
		defer close(s.ends)
		for range maximumLives {
			m, err := in.begin("supervised", options)
			if err != nil {
				t.Error(err)
				return
			}
			select {
			case <-m.Done():
				s.ends <- m.State()
			case <-s.stop:
				m.endWith(t)
				return
			}
		}
	})
	t.Cleanup(func() {
		close(s.stop)
		running.Wait()
	})
	return s
}

// checkCrashed checks that the manager has crashed, at its crash point and
// nowhere else: a test that injected nothing would prove nothing.
func (s *supervised) checkCrashed(t *testing.T) {
	t.Helper()
	select {
	case end := <-s.ends:
		if status, ok := end.Sys().(syscall.WaitStatus); !ok || status.Signal() != syscall.SIGKILL {
			t.Errorf("the manager ended with %v, want SIGKILL", end)
		}
	case <-time.After(waitBound):
		t.Error("the manager did not reach its crash point")
	}
	select {
	case end := <-s.ends:
		t.Errorf("the manager ended a second time, with %v", end)
	default:
	}
}
