package e2e_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/internal/ledger"
)

// pausedAt starts a manager that stops itself, as SIGSTOP does, when it reaches a
// point for the first time, and waits until it has.
func (in *installation) pausedAt(t *testing.T, worker, point string) *manager {
	t.Helper()
	onceFile := filepath.Join(in.dir, worker+"-frozen")
	m := in.launch(t, worker, managerOptions{program: world.faulty, env: []string{
		"TOKENLEASE_FAULT=" + point + "=pause", "TOKENLEASE_FAULT_ONCE_FILE=" + onceFile,
	}})
	waitFor(t, worker+" to freeze at "+point, func() (bool, string) {
		_, err := os.Stat(onceFile)
		return err == nil, fmt.Sprint(err)
	})
	return m
}

// thaw lets a frozen manager go on. It says so again and again: a manager may be at
// its point and not yet stopped, and would stand still for ever.
func (m *manager) thaw(t *testing.T) {
	t.Helper()
	if err := m.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	go func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-m.Done():
				return
			case <-time.After(waitStep):
				_ = m.Signal(syscall.SIGCONT) // it may have ended
			}
		}
	}()
}

// ledgerSteps are the points of a ledger transaction.
var ledgerSteps = []string{"ledger.locked", "ledger.before-write", "ledger.committed"}

// reserveInSpite reserves although a frozen process may hold the bucket: an
// answer that the ledger is unavailable may come until that one's transaction has
// reached its bound, and no other refusal.
func (in *installation) reserveInSpite(t *testing.T, requestKey string, tokens int64) {
	t.Helper()
	waitFor(t, "a reserve to be admitted", func() (bool, string) {
		_, err := in.reserve(t, requestKey, tokens)
		if err != nil && !ledger.HasCode(err, ledger.CodeUnavailable) {
			t.Fatalf("reserve: %v", err)
		}
		return err == nil, fmt.Sprint(err)
	})
}

// Goal: a manager that is frozen while it ends an overdue raise, at any step of its
// transaction, neither keeps the others from the bucket for longer than the bound
// of a transaction nor acts a second time when it thaws.
// Method: the manager stops itself at the step; another process reserves what the
// normal limit has while it is frozen; then it goes on.
func TestFrozenInTheRestore(t *testing.T) {
	t.Parallel()
	for _, point := range ledgerSteps {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			in := install(t)
			key := in.key(bucketName)
			first := in.start(t, "manager-a", managerOptions{})
			in.raised(t)
			first.terminate(t)
			in.passExpiry(t, leaseName)

			frozen := in.pausedAt(t, "manager-b", point)
			worker, left := workload, temporary
			if point == "ledger.committed" {
				worker, left = "manager-b", normal
			}
			if got := in.db.limit(t, key); got != left {
				t.Fatalf("the limit is %d while the manager is frozen at %s, want %d", got, point, left)
			}
			in.reserveInSpite(t, "frozen", normal)
			in.wantRefused(t, "more", 1, ledger.CodeBudgetExceeded)
			if got := in.db.one(t, key, "RaiseRestored").text("worker"); got != worker {
				t.Errorf("restored by %q, want %q", got, worker)
			}

			frozen.thaw(t)
			in.waitLease(t, leaseName, restored)
			in.waitNoFinalizer(t, leaseName)
			in.checkAuditOnce(t)
			in.db.counters(t, key)
			frozen.terminate(t)
		})
	}
}

// Goal: a manager that is frozen while it ends an overdue raise does not end the
// next one on the same bucket when it thaws: the new raise stands.
// Method: as above, and while the manager is frozen a second one ends the raise and
// starts another, to the very same limit.
func TestFrozenInTheRestoreUntilTheNextRaise(t *testing.T) {
	t.Parallel()
	for _, point := range ledgerSteps {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			in := install(t)
			key := in.key(bucketName)
			first := in.start(t, "manager-a", managerOptions{})
			in.raised(t)
			first.terminate(t)
			in.passExpiry(t, leaseName)
			frozen := in.pausedAt(t, "manager-b", point)
			other := in.start(t, "manager-c", managerOptions{})
			in.waitLease(t, leaseName, restored)
			in.create(t, in.otherLease(t, bucketName, "second"))
			in.waitLease(t, "second", active)
			watched := watchLimit(t, in.db, key)
			before := in.db.events(t, key)

			frozen.thaw(t)
			other.terminate(t)
			frozen.waitPart(t, "controllers", true)
			in.waitLease(t, "second", active)
			watched.wantInTurn(t, temporary)
			if after := in.db.events(t, key); !slices.Equal(before, after) {
				t.Errorf("the audit went on from %v to %v", before, after)
			}
			in.passExpiry(t, "second")
			in.waitLease(t, "second", restored)
			in.waitBucket(t, inSync...)
			if got, want := in.db.events(t, key), append(before, "RaiseRestored/Expired"); !slices.Equal(got, want) {
				t.Errorf("audit %v, want %v", got, want)
			}
			frozen.terminate(t)
		})
	}
}

// Goal: a manager that is frozen while it starts a raise, at any step of its
// transaction, until after the raise's expiry cannot raise the limit any more.
// Method: the manager stops itself at the step, the ledger's clock moves past the
// expiry, and the manager goes on at once: its transaction may still be whole. Or
// another process reserves first, which ends the transaction and the window.
func TestFrozenInTheActivation(t *testing.T) {
	t.Parallel()
	for _, point := range ledgerSteps {
		for _, others := range []bool{false, true} {
			name := map[bool]string{false: "/thawed at once", true: "/others act"}[others]
			t.Run(point+name, func(t *testing.T) {
				t.Parallel()
				frozenInTheActivation(t, point, others)
			})
		}
	}
}

func frozenInTheActivation(t *testing.T, point string, others bool) {
	in := install(t)
	key := in.key(bucketName)
	first := in.start(t, "manager-a", managerOptions{})
	startsAt := in.after(t, farAway)
	in.create(t, in.bucket(), in.lease(t, from(startsAt), until(startsAt.Add(farAway))))
	in.waitLease(t, leaseName, pending)
	first.terminate(t)
	in.db.moveClockTo(t, startsAt)

	frozen := in.pausedAt(t, "manager-b", point)
	watched := watchLimit(t, in.db, key)
	in.db.moveClockTo(t, startsAt.Add(farAway))
	if others {
		in.reserveInSpite(t, "frozen", normal)
		in.wantRefused(t, "more", 1, ledger.CodeBudgetExceeded)
	}
	frozen.thaw(t)
	if point == "ledger.committed" { // the raise ran, and ends as it should
		in.waitLease(t, leaseName, restored)
		watched.wantInTurn(t, temporary, normal)
		in.checkAuditOnce(t)
	} else {
		in.waitLease(t, leaseName, neverRan(v1alpha1.ReasonWindowMissed))
		watched.wantInTurn(t, normal)
		if got, want := in.db.events(t, key), []string{"BucketOpened", "RaiseStored", "RaiseFailed/WindowMissed"}; !slices.Equal(got, want) {
			t.Errorf("audit %v, want %v", got, want)
		}
	}
	in.waitBucket(t, inSync...)
	frozen.terminate(t)
}

// wantInTurn ends the watch. L must have had these values and no others, in turn.
func (w *limitWatch) wantInTurn(t *testing.T, want ...int64) {
	t.Helper()
	if seen := w.end(t); !slices.Equal(seen, want) {
		t.Errorf("the limit was %v in turn, want %v", seen, want)
	}
}

// Goal: a leader that is frozen across the expiry of a raise and the start of the
// next one on the same bucket does not disturb the new one when it goes on: the new
// raise stands, and everything has happened once.
// Method: the leader is stopped from outside, or stops itself before or after a call
// of the ledger, or before it writes a status. A second manager takes over.
func TestFrozenLeader(t *testing.T) {
	t.Parallel()
	for _, point := range []string{
		"", "controller.before-ledger", "controller.after-ledger", "controller.before-status",
	} {
		name := point
		if name == "" {
			name = "from outside"
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			frozenLeader(t, point)
		})
	}
}

// secondTemporary is the limit of another raise of the seed story's bucket.
const secondTemporary = int64(350_000)

func frozenLeader(t *testing.T, point string) {
	in := install(t)
	key := in.key(bucketName)
	leader := in.start(t, "manager-a", managerOptions{})
	in.raised(t)
	if point == "" {
		if err := leader.Signal(syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
	} else {
		leader.terminate(t)
		if point == "controller.before-status" { // so that there is something to write
			in.wipeStatus(t)
		}
		leader = in.pausedAt(t, "manager-b", point)
	}
	other := in.start(t, "manager-c", managerOptions{})
	other.waitPart(t, "controllers", true)

	stage(t, "the raise ends, and the next one starts")
	in.passExpiry(t, leaseName)
	in.db.waitLimit(t, key, normal)
	in.waitLease(t, leaseName, restored)
	in.create(t, in.lease(t, named[*v1alpha1.TemporaryLimitLease]("second"), approvedBy("CHG-2"), raisedTo(secondTemporary)))
	in.waitLease(t, "second", active)
	watched := watchLimit(t, in.db, key)
	before := in.db.events(t, key)

	stage(t, "the frozen leader goes on")
	leader.thaw(t)
	leader.waitPart(t, "controllers", false) // it has noticed
	in.waitLease(t, "second", active)
	in.waitLease(t, leaseName, restored)
	watched.wantInTurn(t, secondTemporary)
	if after := in.db.events(t, key); !slices.Equal(before, after) {
		t.Errorf("the audit went on from %v to %v", before, after)
	}

	stage(t, "it leads again, and the second raise ends")
	other.terminate(t)
	leader.waitPart(t, "controllers", true)
	in.passExpiry(t, "second")
	in.waitLease(t, "second", restored)
	in.waitBucket(t, inSync...)
	want := "BucketOpened RaiseStored RaiseActivated RaiseRestored/Expired RaiseStored RaiseActivated RaiseRestored/Expired"
	if got := strings.Join(in.db.events(t, key), " "); got != want {
		t.Errorf("audit %q, want %q", got, want)
	}
	leader.terminate(t)
}

// Goal: a leader that was frozen with an older declaration in its hands cannot bring
// it back when it thaws.
// Method: it stops itself before it declares generation 2; meanwhile the spec moves
// on to generation 3, which a second manager applies.
func TestOldDeclarationOfAThawedLeader(t *testing.T) {
	t.Parallel()
	in := install(t)
	key := in.key(bucketName)
	first := in.start(t, "manager-a", managerOptions{})
	in.create(t, in.bucket())
	in.waitBucket(t, inSync...)
	first.terminate(t)
	const old = int64(150_000)
	in.patch(t, in.bucket(), `{"spec": {"limit": %d}}`, old)
	frozen := in.pausedAt(t, "manager-b", "controller.before-ledger")
	in.patch(t, in.bucket(), `{"spec": {"limit": %d}}`, permanent)
	other := in.start(t, "manager-c", managerOptions{})
	in.waitBucket(t, inSync...)
	in.db.waitLimit(t, key, permanent)
	watched := watchLimit(t, in.db, key)

	frozen.thaw(t)
	waitFor(t, "the old declaration to be refused", func() (bool, string) {
		got := frozen.scrape(t)
		stale := got[`tokenlease_ledger_operations_total{code="stale_generation",operation="apply_declared"}`]
		// On a slow machine the time for the call was over before the thaw.
		late := got[`tokenlease_ledger_operations_total{code="unavailable",operation="apply_declared"}`]
		return stale+late > 0, fmt.Sprint(got)
	})
	frozen.waitPart(t, "controllers", false)
	in.waitBucket(t, inSync...)
	watched.wantInTurn(t, permanent)
	if got := in.db.one(t, key, "LimitDeclared").text("effective_limit_tokens"); got != fmt.Sprint(permanent) {
		t.Errorf("declared %s, want %d", got, permanent)
	}

	stage(t, "it leads again")
	other.terminate(t)
	frozen.waitPart(t, "controllers", true)
	in.patch(t, in.bucket(), `{"spec": {"limit": %d}}`, normal)
	in.db.waitLimit(t, key, normal)
	in.waitBucket(t, inSync...)
	frozen.terminate(t)
}
