package e2e_test

import (
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/internal/ledger"
)

func hourly(b *v1alpha1.TokenBucket) {
	b.Spec.Period = &v1alpha1.Period{Every: v1alpha1.CadenceHour, TimeZone: "Etc/UTC"}
}

// waitPeriod waits until the bucket's status shows the period that ends then.
func (in *installation) waitPeriod(t *testing.T, endsAt time.Time) *v1alpha1.TokenBucket {
	t.Helper()
	b := &v1alpha1.TokenBucket{}
	waitFor(t, "the period that ends at "+endsAt.String(), func() (bool, string) {
		if err := in.api.Get(call(t), client.ObjectKey{Namespace: in.namespace, Name: bucketName}, b); err != nil {
			return false, err.Error()
		}
		return b.Status.Period != nil && b.Status.Period.EndsAt.Time.Equal(endsAt), asJSON(b.Status)
	})
	return b
}

// Goal: a budget begins anew at the full hour by the ledger's clock, once, whoever
// notices first; what was reserved before is settled in its hour, a raise goes on into
// the next one, and nobody writes the spec.
// Method: two replicas that both sweep at the roll, under a clock that is moved to ten
// minutes past an hour and then to the next one.
func TestPeriodRolls(t *testing.T) {
	t.Parallel()
	in := install(t)
	key := in.key(bucketName)
	hour := in.db.now(t).Truncate(time.Hour).Add(time.Hour)
	next := hour.Add(time.Hour)
	in.db.moveClockTo(t, hour.Add(10*time.Minute))
	in.start(t, "manager-a", managerOptions{})
	in.start(t, "manager-b", managerOptions{})
	in.create(t, in.bucket(hourly))
	in.waitBucket(t, inSync...)
	if b := in.waitPeriod(t, next); !b.Status.Period.StartedAt.Time.Equal(hour) {
		t.Errorf("the period began at %v, want %v", b.Status.Period.StartedAt, hour)
	}
	in.create(t, in.lease(t, until(next.Add(time.Hour))))
	in.waitLease(t, leaseName, active)
	in.mustCommit(t, in.mustReserve(t, "used", 200_000), 200_000)
	held := in.mustReserve(t, "held", 100_000)
	in.wantRefused(t, "too much", 1, ledger.CodeBudgetExceeded)

	stage(t, "the roll")
	in.db.moveClockTo(t, next)
	in.waitPeriod(t, next.Add(time.Hour))
	in.mustReserve(t, "of the new hour", temporary)
	in.mustCommit(t, held, 90_000)
	periods := in.db.rows(t, `SELECT limit_tokens, used_tokens, reserved_tokens FROM tokenlease.periods WHERE bucket_key = $1`, key)
	if len(periods) != 1 || periods[0].text("limit_tokens") != "300000" || periods[0].text("used_tokens") != "290000" || periods[0].text("reserved_tokens") != "0" {
		t.Errorf("the ended periods are %v, want one of 300000 with 290000 used", periods)
	}
	in.waitLease(t, leaseName, active)
	in.checkInvariants(t)
	if got := strings.Join(in.db.events(t, key), " "); got != "BucketOpened RaiseStored RaiseActivated" {
		t.Errorf("audit %q: a roll changes no cap", got)
	}
}

// Goal: a time zone that there is not is refused with what to change, by name, and the
// bucket goes on as it was.
func TestUnknownTimeZone(t *testing.T) {
	t.Parallel()
	in := install(t)
	in.start(t, "manager-a", managerOptions{})
	b := in.bucket()
	in.create(t, b)
	in.waitBucket(t, inSync...)
	in.patch(t, b, `{"spec":{"period":{"every":"Day","timeZone":"Europe/Atlantis"}}}`)
	stalled := in.waitBucket(t, isTrue(v1alpha1.ConditionStalled))
	for _, c := range stalled.Status.Conditions {
		if c.Type == v1alpha1.ConditionStalled && (c.Status != metav1.ConditionTrue || !strings.Contains(c.Message, `"Europe/Atlantis"`)) {
			t.Errorf("stalled with %+v", c)
		}
	}
	in.mustReserve(t, "goes on", normal)
	in.patch(t, b, `{"spec":{"period":{"timeZone":"Europe/Berlin"}}}`)
	in.waitBucket(t, inSync...)
}

// Goal: what was spent beyond the limit, or too late, is booked under RecordActual and
// refused under Strict, and is to be seen in both: in the status, on the lease, and in
// the audit.
func TestSettlementPolicies(t *testing.T) {
	t.Parallel()
	in := install(t)
	key := in.key(bucketName)
	in.start(t, "manager-a", managerOptions{})
	b := in.bucket()
	in.create(t, b)
	in.waitBucket(t, inSync...)
	in.mustCommit(t, in.mustReserve(t, "used", 110_000), 110_000)
	held := in.mustReserve(t, "held", 10_000)
	commit := ledger.Commit{Key: key, LeaseID: held.ID, ActualTokens: 50_000}
	if _, err := in.db.ledger.Commit(call(t), commit); !ledger.HasCode(err, ledger.CodeCommitExceedsBudget) {
		t.Fatalf("under Strict: %v, want commit_exceeds_budget", err)
	}
	if r := in.db.one(t, key, "CommitRefused"); r.text("tokens") != "50000" || r.text("lease_id") != held.ID || r.text("reason") != "ExceedsBudget" {
		t.Errorf("the audit tells of the refused figure: %v", r)
	}
	in.patch(t, b, `{"spec":{"settlementPolicy":"RecordActual"}}`)
	in.waitBucket(t, inSync...)
	in.db.moveClockTo(t, held.ExpiresAt)
	in.wantRefused(t, "expires the other", normal, ledger.CodeBudgetExceeded)
	if _, err := in.db.ledger.Commit(call(t), commit); err != nil {
		t.Fatalf("under RecordActual: %v", err)
	}
	over := in.waitBucket(t, isTrue(v1alpha1.ConditionOverLimit))
	if s := over.Status; s.UsedTokens == nil || *s.UsedTokens != 160_000 || *s.OverLimitTokens != 40_000 {
		t.Errorf("status %s, want 160000 used", asJSON(s))
	}
	if lease := in.db.rows(t, `SELECT late, refused_tokens FROM tokenlease.leases WHERE lease_id = $1`, held.ID); lease[0].text("late") != "true" || lease[0].text("refused_tokens") != "50000" {
		t.Errorf("the lease is %v", lease)
	}
	in.checkInvariants(t)
}
