package e2e_test

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// Goal: raises follow the ledger's clock alone. A process whose own clock is
// fast or slow, by minutes or by an hour, neither starts nor ends them at another
// instant, and shows each step when it has happened, not when its own clock says so.
// Method: the database's clock is set against that of the machine, on which the
// manager runs, and L is watched under the ledger's clock. The window is real time.
func TestClocksDiffer(t *testing.T) {
	t.Parallel()
	for _, by := range []time.Duration{time.Hour, -10 * time.Minute} {
		t.Run(by.String(), func(t *testing.T) {
			t.Parallel()
			in := install(t)
			key := in.key(bucketName)
			in.db.shiftClock(t, by)
			in.start(t, "manager-a", managerOptions{})
			in.create(t, in.bucket())
			in.waitBucket(t, inSync...)
			watched := watchLimit(t, in.db, key)
			startsAt := in.after(t, 8*time.Second)
			expiresAt := startsAt.Add(16 * time.Second)
			in.create(t, in.lease(t, from(startsAt), until(expiresAt)))
			lease := in.waitLease(t, leaseName, restored)
			in.waitBucket(t, inSync...)
			watched.check(t, startsAt, expiresAt)

			raise := in.db.raise(t, in.namespace, leaseName)
			activated, ended := raise.instant(t, "activated_at"), raise.instant(t, "ended_at")
			if !lease.Status.ActivatedAt.Time.Equal(activated) || !lease.Status.RestoredAt.Time.Equal(ended) {
				t.Errorf("status %s, want the ledger's %s and %s", asJSON(lease.Status), activated, ended)
			}
			if lag := ended.Sub(expiresAt).Milliseconds(); lease.Status.RestoreLagMilliseconds == nil ||
				*lease.Status.RestoreLagMilliseconds != lag || lag < 0 || lag > waitBound.Milliseconds() {
				t.Errorf("restore lag %s, want %d", asJSON(lease.Status.RestoreLagMilliseconds), lag)
			}
		})
	}
}

// Goal: a clock that is set back, or far ahead and back again, makes nothing happen
// twice, and no bucket lives in the past: its own time never runs backwards.
func TestClockIsSetBack(t *testing.T) {
	t.Parallel()
	in := install(t)
	key := in.key(bucketName)
	in.db.shiftClock(t, time.Hour)
	in.start(t, "manager-a", managerOptions{})
	in.raised(t, until(in.after(t, 10*time.Minute)))
	expiresAt := in.db.raise(t, in.namespace, leaseName).instant(t, "expires_at")
	held := in.mustReserve(t, "held", 1000)

	in.db.shiftClock(t, time.Hour-5*time.Minute)
	in.mustCommit(t, held, 1000)
	in.waitLease(t, leaseName, active)
	in.db.moveClockTo(t, expiresAt)
	in.waitLease(t, leaseName, restored)
	in.db.shiftClock(t, -10*time.Minute)
	in.mustReserve(t, "again", 1000)
	in.wantOrder(t)

	stage(t, "a new raise runs all the same")
	in.create(t, in.otherLease(t, bucketName, "second", until(expiresAt.Add(time.Hour))))
	in.waitLease(t, "second", active)
	in.db.moveClockTo(t, expiresAt.Add(time.Hour))
	in.waitLease(t, "second", restored)
	in.waitLease(t, leaseName, restored)
	in.waitBucket(t, inSync...)
	in.wantOrder(t)
	in.db.counters(t, key)
	want := "BucketOpened RaiseStored RaiseActivated RaiseRestored/Expired RaiseStored RaiseActivated RaiseRestored/Expired"
	if got := strings.Join(in.db.events(t, key), " "); got != want {
		t.Errorf("audit %q, want %q", got, want)
	}
}

// wantOrder checks that the instants of the audit are in the order of its rows.
func (in *installation) wantOrder(t *testing.T) {
	t.Helper()
	var last time.Time
	for _, r := range in.db.audit(t, in.key(bucketName)) {
		at := r.instant(t, "recorded_at")
		if at.Before(last) {
			t.Errorf("audit row %s is of %s, after one of %s", r.text("sequence"), at, last)
		}
		last = at
	}
}

// Goal: one instant is one instant, however it is spelled, whatever time zones the
// manager and the database live in. What is finer than the ledger's resolution
// is cut off, never rounded up.
// Method: a manager in Tokyo, a database in Los Angeles, and one bucket for each
// spelling of one expiry. What the API server accepts must end at that instant; what
// has no offset, or is no instant, it must refuse.
func TestSpellingsOfOneInstant(t *testing.T) {
	t.Parallel()
	in := install(t)
	in.db.exec(t, fmt.Sprintf("ALTER DATABASE %q SET timezone = 'America/Los_Angeles'", query[string](t, in.db, "SELECT current_database()")))
	in.start(t, "manager-a", managerOptions{env: []string{"TZ=Asia/Tokyo"}})
	expiresAt := in.after(t, early)
	offset := func(name string, seconds int) string {
		return expiresAt.In(time.FixedZone(name, seconds)).Format("2006-01-02T15:04:05") + name
	}
	local := expiresAt.Format("2006-01-02T15:04:05")
	spellings := []string{
		local + "Z", local + ".0Z", local + ".000Z", local + ".000000000Z", local + "+00:00", local + "-00:00",
		offset("+09:00", 9*3600), offset("-03:30", -3*3600-1800), offset("+14:00", 14*3600), offset("-12:00", -12*3600),
	}
	for i, spelling := range spellings {
		in.mustKubectl(t, in.spelled(t, fmt.Sprintf("spelling-%d", i), spelling), "apply")
	}
	finer := map[string]time.Duration{".0000009Z": 0, ".001Z": time.Millisecond, ".123456789Z": 123 * time.Millisecond, ".9999999Z": 999 * time.Millisecond}
	for fraction := range finer {
		in.mustKubectl(t, in.spelled(t, "finer"+fraction[:len(fraction)-1], local+fraction), "apply")
	}
	for _, spelling := range []string{
		local, local + "+0900", local + " Z", expiresAt.Format("2006-01-02 15:04:05Z"), expiresAt.Format("2006-01-02"),
		expiresAt.Format("2006-01-02") + "T24:00:00Z", expiresAt.Format("2006-01-02T15:04") + ":60Z", local + "+25:00",
		strings.ToLower(local) + "z", fmt.Sprint(expiresAt.Unix()),
	} {
		if output, err := in.kubectl(t.Context(), in.spelled(t, "refused", spelling), "apply"); err == nil ||
			!strings.Contains(output, "spec.expiresAt") {
			t.Errorf("%s: %v %s, want a refusal that names spec.expiresAt", spelling, err, output)
		}
	}
	for i := range spellings {
		in.waitLease(t, fmt.Sprintf("spelling-%d", i), active)
	}
	for fraction, want := range finer {
		name := "finer" + fraction[:len(fraction)-1]
		in.waitLease(t, name, active)
		if got := in.db.raise(t, in.namespace, name).instant(t, "expires_at").Sub(expiresAt); got != want {
			t.Errorf("%s: stored as %s after the second, want %s", fraction, got, want)
		}
	}
	instants := in.db.rows(t, "SELECT DISTINCT expires_at FROM tokenlease.raises WHERE name LIKE 'spelling-%'")
	if len(instants) != 1 || !instants[0].instant(t, "expires_at").Equal(expiresAt) {
		t.Errorf("the raises end at %v, want %s", instants, expiresAt)
	}
	in.db.moveClockTo(t, expiresAt)
	for i := range spellings {
		lease := in.waitLease(t, fmt.Sprintf("spelling-%d", i), restored)
		due := in.db.one(t, in.key(lease.Name), "RaiseRestored").instant(t, "due_at")
		if !due.Equal(expiresAt) || lease.Status.RestoredAt.Time.Before(expiresAt) {
			t.Errorf("%s: due at %s, restored at %s, want %s", spellings[i], due, lease.Status.RestoredAt, expiresAt)
		}
	}
}

// spelled is a bucket with a lease that expires at an instant as it is spelled.
func (in *installation) spelled(t *testing.T, name, expiresAt string) string {
	t.Helper()
	const placeholder = "2030-01-01T00:00:00Z"
	instant, err := time.Parse(time.RFC3339, placeholder)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Replace(manifestOf(t, in.otherBucket(name), in.otherLease(t, name, name, until(instant))),
		`"`+placeholder+`"`, `"`+expiresAt+`"`, 1)
}
