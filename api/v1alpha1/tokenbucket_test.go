package v1alpha1_test

import (
	"encoding/json"
	"strings"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/token-lease/operator/api/v1alpha1"
)

const fullBucket = `{limit: 120000, bucketKey: tenants/pm-4821, tenantID: pm_4821, scopedKeyID: key_pm_4821_rent_v3,
  reservations: {defaultTTLSeconds: 60, maxTTLSeconds: 3600, maxRecords: 10000}, conflictPolicy: Review, deletionPolicy: Retain,
  raises: {mode: Enforce, maxLimit: 400000, maxDurationSeconds: 7200}}`

// Goal: a bad TokenBucket never gets in, and the answer says what to change.
func TestTokenBucketRefusals(t *testing.T) {
	emoji := strings.Repeat("\U0001F600", 65)
	cases := []struct {
		name  string
		spec  string
		wants []string
	}{
		{"no spec", `null`, []string{"spec", "Required"}},
		{"infinite limit", `{limit: .inf}`, []string{"unsupported value"}},
		{"no limit", `{}`, []string{"spec.limit", "Required"}},
		{"negative limit", `{limit: -1}`, []string{"spec.limit", "greater than or equal to 0"}},
		{"fractional limit", `{limit: 1.5}`, []string{"spec.limit", "integer"}},
		{"limit as text", `{limit: "120000"}`, []string{"spec.limit", "integer"}},
		{"unknown field", `{limit: 1, perod: 3}`, []string{"unknown field", "spec.perod"}},
		{"field that there is not", `{limit: 1, parent: {name: team}}`, []string{"unknown field", "spec.parent"}},
		{"period without a time zone", `{limit: 1, period: {every: Hour}}`, []string{"spec.period.timeZone", "Required"}},
		{"period of another length", `{limit: 1, period: {every: Minute, timeZone: Etc/UTC}}`, []string{"spec.period.every", `"Hour"`}},
		{"time zone that is none", `{limit: 1, period: {every: Day, timeZone: "../etc"}}`, []string{"spec.period.timeZone"}},
		{"settlement policy that there is not", `{limit: 1, settlementPolicy: Lenient}`, []string{"spec.settlementPolicy", `"RecordActual"`}},
		{"retention of nothing", `{limit: 1, reservations: {retentionDays: 0}}`, []string{"spec.reservations.retentionDays", "greater than or equal to 1"}},
		{"empty key", `{limit: 1, bucketKey: ""}`, []string{"spec.bucketKey", "at least 1"}},
		{"key too long", `{limit: 1, bucketKey: ` + strings.Repeat("k", 201) + `}`, []string{"spec.bucketKey", "200"}},
		{"key too long in UTF-16", `{limit: 1, bucketKey: "` + strings.Repeat("\U0001F600", 101) + `"}`, []string{"spec.bucketKey", "200 UTF-16 units"}},
		{"key ends in a space", `{limit: 1, bucketKey: "k "}`, []string{"spec.bucketKey", "white space"}},
		{"key begins with a no-break space", `{limit: 1, bucketKey: "\u00A0k"}`, []string{"spec.bucketKey", "white space"}},
		{"key begins with a byte-order mark", `{limit: 1, bucketKey: "\uFEFFk"}`, []string{"spec.bucketKey", "white space"}},
		{"key with a tab", `{limit: 1, bucketKey: "a\tb"}`, []string{"spec.bucketKey", "control characters"}},
		{"key with NUL", `{limit: 1, bucketKey: "a\u0000b"}`, []string{"spec.bucketKey", "control characters"}},
		{"key with DEL", `{limit: 1, bucketKey: "a\u007Fb"}`, []string{"spec.bucketKey", "control characters"}},
		{"key with an unreadable character", `{limit: 1, bucketKey: "a\uFFFDb"}`, []string{"spec.bucketKey", "U+FFFD"}},
		{"key with a decomposed accent", `{limit: 1, bucketKey: "cafe\u0301"}`, []string{"spec.bucketKey", "NFC"}},
		{"empty tenant", `{limit: 1, tenantID: ""}`, []string{"spec.tenantID", "at least 1"}},
		{"tenant too long", `{limit: 1, tenantID: ` + strings.Repeat("t", 129) + `}`, []string{"spec.tenantID", "128"}},
		{"tenant too long in UTF-16", `{limit: 1, tenantID: "` + emoji + `"}`, []string{"spec.tenantID", "128 UTF-16 units"}},
		{"tenant with a newline", `{limit: 1, tenantID: "a\nb"}`, []string{"spec.tenantID", "control characters"}},
		{"key ID with a space", `{limit: 1, scopedKeyID: " a"}`, []string{"spec.scopedKeyID", "white space"}},
		{"default TTL above the greatest", `{limit: 1, reservations: {defaultTTLSeconds: 7200}}`, []string{"spec.reservations.defaultTTLSeconds", "maxTTLSeconds"}},
		{"TTL of zero", `{limit: 1, reservations: {defaultTTLSeconds: 0}}`, []string{"defaultTTLSeconds", "greater than or equal to 1"}},
		{"no records", `{limit: 1, reservations: {maxRecords: 0}}`, []string{"maxRecords", "greater than or equal to 1"}},
		{"unknown conflict policy", `{limit: 1, conflictPolicy: review}`, []string{"conflictPolicy", `"Review"`}},
		{"unknown deletion policy", `{limit: 1, deletionPolicy: Orphan}`, []string{"deletionPolicy", `"Retain"`}},
		{"raises without a mode", `{limit: 1, raises: {maxLimit: 2, maxDurationSeconds: 1}}`, []string{"spec.raises.mode", "Required"}},
		{"raises without a greatest limit", `{limit: 1, raises: {mode: Enforce, maxDurationSeconds: 1}}`, []string{"spec.raises.maxLimit", "Required"}},
		{"raises without a longest duration", `{limit: 1, raises: {mode: Enforce, maxLimit: 2}}`, []string{"spec.raises.maxDurationSeconds", "Required"}},
		{"raises as a duration", `{limit: 1, raises: {mode: Enforce, maxLimit: 2, maxDurationSeconds: 2h}}`, []string{"maxDurationSeconds", "integer"}},
	}
	namespace := newNamespace(t)
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			wantRefusal(t, create(t, namespace, bucket(c.spec)), c.wants...)
		})
	}
	t.Run("name too long", func(t *testing.T) {
		m := bucket(`{limit: 1}`)
		m.name = strings.Repeat("n", 64)
		wantRefusal(t, create(t, namespace, m), "metadata.name must be at most 63 characters")
	})
}

// Goal: a key at the edge of what the ledger takes gets in and comes back exact.
func TestTokenBucketKeysAreExact(t *testing.T) {
	for name, key := range map[string]string{
		"longest plain":      strings.Repeat("k", 200),
		"longest in UTF-16":  strings.Repeat("\U0001F600", 100),
		"composed accent":    "caf\u00E9",
		"inner white space":  "team one/budget\u00A0two",
		"upper case":         "Tenants/PM-4821",
		"not a Latin letter": "予算/四八二一",
	} {
		t.Run(name, func(t *testing.T) {
			namespace := newNamespace(t)
			quoted, err := json.Marshal(key)
			if err != nil {
				t.Fatal(err)
			}
			mustCreate(t, namespace, bucket(`{limit: 1, bucketKey: `+string(quoted)+`}`))
			var stored v1alpha1.TokenBucket
			if err := kube.Get(testContext(t), client.ObjectKey{Namespace: namespace, Name: "pm-4821"}, &stored); err != nil {
				t.Fatal(err)
			}
			if stored.Spec.BucketKey != key {
				t.Errorf("stored %q, want %q", stored.Spec.BucketKey, key)
			}
		})
	}
}

// Goal: a limit is stored exactly or refused, however the file spells it.
func TestTokenBucketNumberForms(t *testing.T) {
	cases := []struct {
		written string
		want    int64 // -1: refused
	}{
		{"0", 0},
		{"120000", 120000},
		{"300000000", 300000000},
		{"9007199254740991", 9007199254740991},
		{"9007199254740992", -1},
		{"9007199254740993", -1},
		{"9223372036854775807", -1},
		{"9223372036854775808", -1},
		{"1e400", -1},
		{`"100k"`, -1},
		{"100k", -1},
		{"NaN", -1},
		{"true", -1},
		{"null", -1},
		{"1_000_000", 1000000},
		{"0o17", 15},
		{"0x10", 16},
		{"1e3", 1000},
		{"3e+08", 300000000},
		{"1000.0", 1000},
	}
	for _, c := range cases {
		t.Run(c.written, func(t *testing.T) {
			namespace := newNamespace(t)
			err := create(t, namespace, bucket(`{limit: `+c.written+`}`))
			if c.want < 0 {
				wantRefusal(t, err, "spec.limit")
				return
			}
			if err != nil {
				t.Fatalf("refused: %v", err)
			}
			var stored v1alpha1.TokenBucket
			if err := kube.Get(testContext(t), client.ObjectKey{Namespace: namespace, Name: "pm-4821"}, &stored); err != nil {
				t.Fatalf("the typed client cannot read what got in: %v", err)
			}
			if stored.Spec.Limit != c.want {
				t.Errorf("stored %d, want %d", stored.Spec.Limit, c.want)
			}
		})
	}
}

// Goal: what names the bucket and its tenant never changes, in any direction.
func TestTokenBucketImmutability(t *testing.T) {
	with := func(field string) string { return `{limit: 1` + field + `}` }
	cases := []struct {
		name, before, after, want string
	}{
		{"key changed", with(`, bucketKey: a`), with(`, bucketKey: b`), "bucketKey is immutable"},
		{"key added", with(``), with(`, bucketKey: b`), "bucketKey is immutable"},
		{"key removed", with(`, bucketKey: a`), with(``), "bucketKey is immutable"},
		{"tenant changed", with(`, tenantID: a`), with(`, tenantID: b`), "tenantID is immutable"},
		{"tenant added", with(``), with(`, tenantID: b`), "tenantID is immutable"},
		{"tenant removed", with(`, tenantID: a`), with(``), "tenantID is immutable"},
		{"limit", with(``), `{limit: 2}`, ""},
		{"key ID added", with(``), with(`, scopedKeyID: b`), ""},
		{"raises added", with(``), with(`, raises: {mode: Enforce, maxLimit: 2, maxDurationSeconds: 1}`), ""},
		{"raises removed", with(`, raises: {mode: Enforce, maxLimit: 2, maxDurationSeconds: 1}`), with(``), ""},
		{"everything else at once", fullBucket, `{limit: 0, bucketKey: tenants/pm-4821, tenantID: pm_4821, conflictPolicy: Overwrite, deletionPolicy: Delete}`, ""},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			namespace := newNamespace(t)
			mustCreate(t, namespace, bucket(c.before))
			err := replace(t, namespace, bucket(c.after))
			if c.want != "" {
				wantRefusal(t, err, c.want, "create another TokenBucket")
			} else if err != nil {
				t.Errorf("refused: %v", err)
			}
		})
	}
}

// Goal: a spec with only a limit reads back with every default spelled out, and
// with nothing made up for the fields whose absence means something.
func TestTokenBucketDefaults(t *testing.T) {
	for name, spec := range map[string]string{
		"reservations left out": `{limit: 7}`,
		"reservations empty":    `{limit: 7, reservations: {}}`,
	} {
		t.Run(name, func(t *testing.T) {
			namespace := newNamespace(t)
			mustCreate(t, namespace, bucket(spec))
			var stored v1alpha1.TokenBucket
			if err := kube.Get(testContext(t), client.ObjectKey{Namespace: namespace, Name: "pm-4821"}, &stored); err != nil {
				t.Fatal(err)
			}
			want := v1alpha1.TokenBucketSpec{
				Limit:            7,
				Reservations:     v1alpha1.ReservationPolicy{DefaultTTLSeconds: 60, MaxTTLSeconds: 3600, RetentionDays: 30},
				SettlementPolicy: v1alpha1.SettlementPolicyStrict,
				ConflictPolicy:   v1alpha1.ConflictPolicyReview,
				DeletionPolicy:   v1alpha1.DeletionPolicyRetain,
			}
			if stored.Spec != want {
				t.Errorf("stored %+v, want %+v", stored.Spec, want)
			}
			if stored.Status.ObservedGeneration != -1 {
				t.Errorf("observedGeneration %d before anybody looked, want -1", stored.Status.ObservedGeneration)
			}
		})
	}
}
