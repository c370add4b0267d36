package e2e_test

import (
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/hack/devenv/postgres/postgrestest"
	"github.com/token-lease/operator/internal/ledger"
)

// Goal: an expired raise admits nothing more although no manager runs; the one
// who reserves next restores the limit, and the audit says so. A manager that
// comes back reports it and repeats nothing.
// Method: kill -9 while the raise is active, let the expiry pass, reserve from
// this process.
func TestExpiryWithTheManagerDead(t *testing.T) {
	t.Parallel()
	in := install(t)
	key := in.key(bucketName)
	m := in.start(t, "manager-a", managerOptions{})
	in.raised(t)
	in.mustCommit(t, in.mustReserve(t, "raised", 150_000), 150_000)
	m.kill9(t)

	stage(t, "nothing runs, and the expiry passes")
	expiresAt := in.passExpiry(t, leaseName)
	if got := in.db.raise(t, in.namespace, leaseName).text("state"); got != "active" {
		t.Fatalf("the raise is %s before anybody has touched the bucket, want active", got)
	}
	in.wantRefused(t, "expired", 1, ledger.CodeBudgetExceeded)
	if got := in.db.limit(t, key); got != normal {
		t.Errorf("the limit is %d after the first reserve, want %d", got, normal)
	}
	r := in.db.one(t, key, "RaiseRestored")
	if r.text("worker") != workload || r.text("trigger_operation") != "reserve" || r.text("actor") != requestedBy {
		t.Errorf("restored by %q during %q for %q, want %q, reserve, %q",
			r.text("worker"), r.text("trigger_operation"), r.text("actor"), workload, requestedBy)
	}
	if due := r.instant(t, "due_at"); !due.Equal(expiresAt) {
		t.Errorf("due at %s, want %s", due, expiresAt)
	}
	before := in.db.events(t, key)

	stage(t, "a manager comes back")
	in.start(t, "manager-b", managerOptions{})
	in.waitLease(t, leaseName, restored)
	in.waitNoFinalizer(t, leaseName)
	in.waitBucket(t, isTrue(v1alpha1.ConditionOverLimit), isFalse(v1alpha1.ConditionRaised), isTrue(v1alpha1.ConditionLimitInSync))
	if after := in.db.events(t, key); !slices.Equal(before, after) {
		t.Errorf("the audit went on from %v to %v", before, after)
	}
	in.db.counters(t, key)
}

// Goal: raises end, and start, on time while the API server is down, also by a
// manager that was started meanwhile; the process stays ready and says what it
// lacks; statuses catch up; SIGTERM ends it cleanly in this state too.
// Method: an API server and a database of its own. One manager lives through the
// outage, a second one is started in it, each restores one raise.
func TestAPIServerDown(t *testing.T) {
	t.Parallel()
	own := startOwnCluster(t)
	in := installOn(t, own, world.postgres)
	key := in.key(bucketName)

	stage(t, "a raise is active, another one is due to start later")
	first := in.start(t, "manager-a", managerOptions{})
	in.raised(t)
	other := in.key("other")
	endsAt := in.after(t, farAway+early)
	in.create(t,
		in.bucket(named[*v1alpha1.TokenBucket]("other")),
		in.lease(t, named[*v1alpha1.TemporaryLimitLease]("other-launch"), on("other"), approvedBy("CHG-2"),
			from(in.after(t, early)), until(endsAt)))
	in.waitLease(t, "other-launch", []want{
		isTrue(v1alpha1.ConditionReady), isFalse(v1alpha1.ConditionActive), isFalse(v1alpha1.ConditionEnded),
	})
	if err := own.plane.StopAPIServer(t.Context()); err != nil {
		t.Fatal(err)
	}

	stage(t, "both transitions happen without the API server")
	in.passExpiry(t, leaseName)
	in.db.waitLimit(t, key, normal)
	in.db.waitLimit(t, other, temporary)
	for bucket, event := range map[string]string{key: "RaiseRestored", other: "RaiseActivated"} {
		if got := in.db.one(t, bucket, event).text("worker"); got != "manager-a" {
			t.Errorf("%s of %s by %q, want manager-a", event, bucket, got)
		}
	}
	first.waitLacksAPIServer(t)
	if wrong := first.part(t, "ledger"); wrong != "" {
		t.Errorf("the ledger is shown as %q", wrong)
	}
	if status, body := first.get(t, first.health, "/readyz"); status != http.StatusOK {
		t.Errorf("GET /readyz without the API server: %d %s, want 200", status, body)
	}

	stage(t, "SIGTERM without the API server, and a start without it")
	first.terminate(t)
	in.db.moveClockTo(t, endsAt)
	second := in.start(t, "manager-b", managerOptions{})
	second.waitLacksAPIServer(t)
	second.waitPart(t, "ledger", true)
	in.db.waitLimit(t, other, normal)
	if got := in.db.one(t, other, "RaiseRestored").text("worker"); got != "manager-b" {
		t.Errorf("restored by %q, want manager-b", got)
	}

	third := in.start(t, "manager-c", managerOptions{})
	third.terminate(t) // it never had controllers

	stage(t, "the API server is back, and statuses catch up")
	if err := own.plane.StartAPIServer(t.Context()); err != nil {
		t.Fatal(err)
	}
	second.waitPart(t, "controllers", true)
	for _, name := range []string{leaseName, "other-launch"} {
		in.waitLease(t, name, restored)
		in.waitNoFinalizer(t, name)
	}
	in.waitBucket(t, inSync...)
	for _, bucket := range []string{key, other} {
		if got := strings.Count(strings.Join(in.db.events(t, bucket), " "), "RaiseRestored"); got != 1 {
			t.Errorf("restored %d times: %v", got, in.db.events(t, bucket))
		}
	}
	second.terminate(t)
}

// Goal: with PostgreSQL down the manager says so everywhere, lives, and goes on by
// itself once it is back; a raise that became due meanwhile ends then.
// Method: a database server of its own, taken down by a crash and by an orderly
// halt, and brought back on the same address.
func TestPostgreSQLDown(t *testing.T) {
	t.Parallel()
	server := postgrestest.Own(t)
	in := installOn(t, world.cluster, server)
	key := in.key(bucketName)
	m := in.start(t, "manager-a", managerOptions{})
	in.raised(t)
	m.waitPart(t, "ledger", true)
	m.wantMetrics(t, map[string]float64{"tokenlease_ledger_writable": 1})
	in.db.passAtRestart(t, in.db.raise(t, in.namespace, leaseName).instant(t, "expires_at"))

	stage(t, "the database crashes, and the expiry passes")
	if err := server.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	m.waitPart(t, "ledger", false)
	m.wantMetrics(t, map[string]float64{"tokenlease_ledger_writable": 0})
	in.waitLedgerUnavailable(t)
	if _, err := in.reserve(t, "down", 1); !ledger.HasCode(err, ledger.CodeUnavailable) {
		t.Errorf("reserve without a database: %v, want %s", err, ledger.CodeUnavailable)
	}

	stage(t, "it is back")
	in.db.resume(t)
	in.db.waitLimit(t, key, normal)
	in.waitLease(t, leaseName, restored)
	in.waitBucket(t, inSync...)
	m.waitPart(t, "ledger", true)
	m.wantMetrics(t, map[string]float64{
		"tokenlease_ledger_writable": 1, "budget_lease_restore_lag_seconds_count": 1, "budget_lease_active_past_expiry": 0,
	})
	in.db.one(t, key, "RaiseRestored")

	stage(t, "it is halted, and the manager is told to end")
	if err := server.Halt(t.Context()); err != nil {
		t.Fatal(err)
	}
	m.waitPart(t, "ledger", false)
	m.terminate(t)
}

// Goal: a wrong password is shown and breaks nothing for good: the right one is
// picked up from the file, and so is a new one later, without a restart. No
// password is told to anybody.
func TestPasswordRotation(t *testing.T) {
	t.Parallel()
	in := install(t)
	const wrong, next = "not-the-password-4711", "the-next-password-0815"
	right := in.db.runtimeURL
	in.writeDatabaseURL(t, withPassword(t, in.db.ownerURL, in.db.role, wrong))
	m := in.start(t, "manager-a", managerOptions{})
	in.create(t, in.bucket(), in.lease(t))

	stage(t, "the password is wrong")
	m.waitPart(t, "ledger", false)
	m.wantMetrics(t, map[string]float64{"tokenlease_ledger_writable": 0})
	in.waitLedgerUnavailable(t)

	stage(t, "the password is right")
	in.writeDatabaseURL(t, right)
	in.waitLease(t, leaseName, active)
	m.waitPart(t, "ledger", true)

	stage(t, "the password is changed on the server, then in the file")
	in.db.onServer(t, "ALTER ROLE "+in.db.role+" PASSWORD '"+next+"'")
	in.db.exec(t, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = $1", in.db.role)
	m.waitPart(t, "ledger", false)
	in.writeDatabaseURL(t, withPassword(t, in.db.ownerURL, in.db.role, next))
	m.waitPart(t, "ledger", true)
	in.waitBucket(t, isTrue(v1alpha1.ConditionReady), isTrue(v1alpha1.ConditionRaised))
	if !m.Running() {
		t.Fatal("the manager ended")
	}
	in.checkNotTold(t, m, wrong, next, passwordOf(t, right), passwordOf(t, in.db.ownerURL))
}
