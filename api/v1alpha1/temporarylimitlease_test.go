package v1alpha1_test

import (
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/token-lease/operator/api/v1alpha1"
)

// leaseFields are the required fields of a lease; a case overrides or drops some.
func leaseFields() map[string]string {
	return map[string]string{
		"bucketRef":      `{name: pm-4821}`,
		"normalLimit":    `120000`,
		"temporaryLimit": `300000`,
		"expiresAt":      `"2030-01-01T00:30:00Z"`,
		"approvalID":     `CHG-20881`,
		"scopedKeyID":    `key_pm_4821_rent_v3`,
	}
}

// leaseWith is a lease with the given fields set, and those set to "" left out.
func leaseWith(changes ...string) manifest {
	fields := leaseFields()
	for i := 0; i+1 < len(changes); i += 2 {
		fields[changes[i]] = changes[i+1]
	}
	var parts []string
	for name, value := range fields {
		if value != "" {
			parts = append(parts, name+": "+value)
		}
	}
	return lease("{" + strings.Join(parts, ", ") + "}")
}

// Goal: a bad lease never gets in, and the answer says what to change.
func TestTemporaryLimitLeaseRefusals(t *testing.T) {
	cases := []struct {
		name  string
		lease manifest
		wants []string
	}{
		{"no spec", lease(`null`), []string{"spec", "Required"}},
		{"no bucket", leaseWith("bucketRef", ""), []string{"spec.bucketRef", "Required"}},
		{"nameless bucket", leaseWith("bucketRef", "{}"), []string{"spec.bucketRef.name", "Required"}},
		{"bucket by namespace", leaseWith("bucketRef", "{name: a, namespace: other}"), []string{"unknown field", "spec.bucketRef.namespace"}},
		{"bucket that cannot exist", leaseWith("bucketRef", "{name: PM_4821}"), []string{"spec.bucketRef.name", "lower-case letters"}},
		{"bucket name too long", leaseWith("bucketRef", "{name: "+strings.Repeat("n", 64)+"}"), []string{"spec.bucketRef.name", "63"}},
		{"no normal limit", leaseWith("normalLimit", ""), []string{"spec.normalLimit", "Required"}},
		{"negative normal limit", leaseWith("normalLimit", "-1"), []string{"spec.normalLimit", "greater than or equal to 0"}},
		{"no temporary limit", leaseWith("temporaryLimit", ""), []string{"spec.temporaryLimit", "Required"}},
		{"temporary limit as low", leaseWith("temporaryLimit", "120000"), []string{"spec.temporaryLimit", "above normalLimit"}},
		{"temporary limit too high", leaseWith("temporaryLimit", "9007199254740992"), []string{"spec.temporaryLimit", "9007199254740991"}},
		{"no expiry", leaseWith("expiresAt", ""), []string{"spec.expiresAt", "Required"}},
		{"expiry at the start", leaseWith("startsAt", `"2030-01-01T00:30:00Z"`), []string{"spec.expiresAt", "after startsAt"}},
		{"expiry before the start by its offset", leaseWith("startsAt", `"2030-01-01T00:00:00-01:00"`), []string{"spec.expiresAt", "after startsAt"}},
		{"no approval", leaseWith("approvalID", ""), []string{"spec.approvalID", "Required"}},
		{"empty approval", leaseWith("approvalID", `""`), []string{"spec.approvalID", "at least 1"}},
		{"approval with a newline", leaseWith("approvalID", `"CHG\n1"`), []string{"spec.approvalID", "control characters"}},
		{"no key ID", leaseWith("scopedKeyID", ""), []string{"spec.scopedKeyID", "Required"}},
		{"purpose of two lines", leaseWith("purpose", `"a\nb"`), []string{"spec.purpose", "one line"}},
		{"purpose too long", leaseWith("purpose", strings.Repeat("p", 513)), []string{"spec.purpose", "512"}},
		{"unknown base change", leaseWith("onBaseChange", "Keep"), []string{"spec.onBaseChange", `"Review"`}},
	}
	namespace := newNamespace(t)
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			wantRefusal(t, create(t, namespace, c.lease), c.wants...)
		})
	}
}

// Goal: every spelling of an instant is read as that instant, or refused; what
// gets in can be decoded, since one object that cannot would stop its kind.
func TestTemporaryLimitLeaseTimestampForms(t *testing.T) {
	instant := time.Date(2030, 1, 1, 0, 30, 0, 0, time.UTC)
	cases := []struct {
		written string
		want    time.Time // zero: refused
	}{
		{`"2030-01-01T00:30:00Z"`, instant},
		{`2030-01-01T00:30:00Z`, instant}, // unquoted, which YAML may take for a date of its own
		{`"2030-01-01T09:30:00+09:00"`, instant},
		{`"2029-12-31T21:00:00-03:30"`, instant},
		{`"2030-01-01T00:30:00-00:00"`, instant},
		{`"2030-01-01T00:30:00.0Z"`, instant},
		{`"2030-01-01T00:30:00.000Z"`, instant},
		{`"2030-01-01T00:30:00.123456789Z"`, instant.Add(123456789)},
		{`"2030-01-01T00:30:00.9999999999999Z"`, instant.Add(999999999)},
		{`"2030-01-01T00:30:00,5Z"`, instant.Add(500 * time.Millisecond)},
		{`"9999-12-30T23:59:59Z"`, time.Date(9999, 12, 30, 23, 59, 59, 0, time.UTC)},
		{`"2030-01-01t00:30:00z"`, time.Time{}},
		{`"2030-01-01T00:30:00z"`, time.Time{}},
		{`"2030-01-01T00:30:00"`, time.Time{}},
		{`"2030-01-01 00:30:00Z"`, time.Time{}},
		{`"2030-01-01T00:30Z"`, time.Time{}},
		{`"2030-01-01T00:30:00+0900"`, time.Time{}},
		{`"2030-01-01T00:30:00+25:00"`, time.Time{}},
		{`"2029-12-31T24:00:00Z"`, time.Time{}},
		{`"2028-12-31T23:59:60Z"`, time.Time{}},
		{`"2030-02-30T00:00:00Z"`, time.Time{}},
		{`"2030-01-01"`, time.Time{}},
		{`2030-01-01`, time.Time{}},
		{`1893457800`, time.Time{}},
		{`""`, time.Time{}},
		{`null`, time.Time{}},
		{`"1999-12-31T23:59:59Z"`, time.Time{}},
		{`"0000-01-01T00:00:00Z"`, time.Time{}},
		{`"9999-12-31T23:59:59-12:00"`, time.Time{}}, // the year 10000 in UTC, which RFC 3339 cannot write
		{`"10000-01-01T00:00:00Z"`, time.Time{}},
	}
	for _, c := range cases {
		t.Run(c.written, func(t *testing.T) {
			namespace := newNamespace(t)
			err := create(t, namespace, leaseWith("expiresAt", c.written))
			if c.want.IsZero() {
				wantRefusal(t, err, "spec.expiresAt")
				return
			}
			if err != nil {
				t.Fatalf("refused: %v", err)
			}
			var stored v1alpha1.TemporaryLimitLeaseList
			if err := kube.List(testContext(t), &stored, client.InNamespace(namespace)); err != nil {
				t.Fatalf("the typed client cannot list what got in: %v", err)
			}
			if got := stored.Items[0].Spec.ExpiresAt.Time; !got.Equal(c.want) {
				t.Errorf("read as %v, want %v", got, c.want)
			}
		})
	}
}

// Goal: a grant never changes, in any direction, but its end may come earlier.
func TestTemporaryLimitLeaseImmutability(t *testing.T) {
	start := `"2030-01-01T00:00:00Z"`
	full := func(changes ...string) manifest {
		return leaseWith(append([]string{"startsAt", start, "purpose", "launch", "onBaseChange", "Rebase"}, changes...)...)
	}
	cases := []struct {
		name          string
		before, after manifest
		want          string
	}{
		{"bucket", full(), full("bucketRef", "{name: other}"), "bucketRef is immutable"},
		{"normal limit", full(), full("normalLimit", "119999"), "normalLimit is immutable"},
		{"temporary limit", full(), full("temporaryLimit", "300001"), "temporaryLimit is immutable"},
		{"approval", full(), full("approvalID", "CHG-2"), "approvalID is immutable"},
		{"key ID", full(), full("scopedKeyID", "other"), "scopedKeyID is immutable"},
		{"start changed", full(), full("startsAt", `"2030-01-01T00:00:01Z"`), "startsAt is immutable"},
		{"start added", leaseWith(), leaseWith("startsAt", start), "startsAt is immutable"},
		{"start removed", full(), full("startsAt", ""), "startsAt is immutable"},
		{"purpose changed", full(), full("purpose", "other"), "purpose is immutable"},
		{"purpose added", leaseWith(), leaseWith("purpose", "other"), "purpose is immutable"},
		{"purpose removed", full(), full("purpose", ""), "purpose is immutable"},
		{"base change changed", full(), full("onBaseChange", "Review"), "onBaseChange is immutable"},
		{"base change added", leaseWith(), leaseWith("onBaseChange", "Rebase"), "onBaseChange is immutable"},
		{"base change removed", full(), full("onBaseChange", ""), "onBaseChange is immutable"},
		{"expiry later", full(), full("expiresAt", `"2030-01-01T00:30:01Z"`), "expiresAt may only be moved earlier"},
		{"expiry later by its offset", full(), full("expiresAt", `"2030-01-01T00:30:00-01:00"`), "expiresAt may only be moved earlier"},
		{"expiry at the start", full(), full("expiresAt", start), "expiresAt must be after startsAt"},
		{"expiry before the start", full(), full("expiresAt", `"2029-12-31T23:59:59Z"`), "expiresAt must be after startsAt"},
		{"expiry earlier", full(), full("expiresAt", `"2030-01-01T00:10:00Z"`), ""},
		{"expiry earlier by its offset", full(), full("expiresAt", `"2030-01-01T00:30:00+01:00"`), "expiresAt must be after startsAt"},
		{"expiry into the past, without a start", leaseWith(), leaseWith("expiresAt", `"2020-01-01T00:00:00Z"`), ""},
		{"same instant spelled otherwise", full(), full("expiresAt", `"2030-01-01T09:30:00.000+09:00"`), ""},
		{"nothing", full(), full(), ""},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			namespace := newNamespace(t)
			mustCreate(t, namespace, c.before)
			err := replace(t, namespace, c.after)
			if c.want != "" {
				wantRefusal(t, err, c.want)
			} else if err != nil {
				t.Errorf("refused: %v", err)
			}
		})
	}
}

// Goal: an old manifest in Git must not fail a whole apply; the ledger judges
// whether the window is over.
func TestTemporaryLimitLeaseInThePastIsAccepted(t *testing.T) {
	mustCreate(t, newNamespace(t), leaseWith("startsAt", `"2020-01-01T00:00:00Z"`, "expiresAt", `"2020-01-01T01:00:00Z"`))
}
