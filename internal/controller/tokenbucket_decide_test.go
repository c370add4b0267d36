package controller

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/internal/ledger"
)

var testNow = time.Date(2026, 11, 30, 18, 0, 0, 0, time.UTC)

func testBucket(change ...func(*v1alpha1.TokenBucket)) *v1alpha1.TokenBucket {
	b := &v1alpha1.TokenBucket{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "ns", Name: "b", UID: "bucket-uid", Generation: 3,
			CreationTimestamp: metav1.NewTime(testNow), Finalizers: []string{v1alpha1.LedgerFinalizer},
		},
		Spec: v1alpha1.TokenBucketSpec{Limit: 100},
	}
	for _, f := range change {
		f(b)
	}
	return b
}

// Goal: what is asked of the ledger follows from the object alone.
func TestDecideBucket(t *testing.T) {
	deleting := func(b *v1alpha1.TokenBucket) { b.DeletionTimestamp = ptr.To(metav1.NewTime(testNow)) }
	key := func(key string) func(*v1alpha1.TokenBucket) {
		return func(b *v1alpha1.TokenBucket) { b.Spec.BucketKey = key }
	}
	for _, c := range []struct {
		name       string
		bucket     *v1alpha1.TokenBucket
		unreadable string
		trusted    bool
		want       string
	}{
		{"default key", testBucket(), "", false, "declare ns/b"},
		{"key inside", testBucket(key("ns/other")), "", false, "declare ns/other"},
		{"namespace alone", testBucket(key("ns/")), "", false, "refuse KeyNotAllowed"},
		{"prefix without slash", testBucket(key("nsx/b")), "", false, "refuse KeyNotAllowed"},
		{"key outside", testBucket(key("other/b")), "", false, "refuse KeyNotAllowed"},
		{"key outside, trusted", testBucket(key("other/b")), "", true, "declare other/b"},
		{"deleted", testBucket(deleting), "", false, "close ns/b Retain"},
		{"deleted, to be removed", testBucket(deleting, func(b *v1alpha1.TokenBucket) { b.Spec.DeletionPolicy = "Delete" }), "", false, "close ns/b Delete"},
		{"deleted, key no longer trusted", testBucket(deleting, key("other/b")), "", false, "close other/b Retain"},
		{"deleted, not held", testBucket(deleting, func(b *v1alpha1.TokenBucket) { b.Finalizers = []string{"foreign/one"} }), "", false, "nothing"},
		{"unreadable", testBucket(), "spec.limit", false, "refuse Undecodable"},
		{"unreadable, deleted", testBucket(deleting, func(b *v1alpha1.TokenBucket) { b.Status.BucketKey = "ns/known" }), "spec.bucketKey", false, "close ns/known Retain"},
		{"unreadable, deleted, never seen", testBucket(deleting), "spec.bucketKey", false, "close ns/b Retain"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := "nothing"
			switch plan := decideBucket(c.bucket, c.unreadable, "cluster", c.trusted); {
			case plan.declare != nil:
				got = "declare " + plan.declare.Key
			case plan.close != nil:
				got = "close " + plan.close.Key + " " + string(plan.close.Deletion)
			case plan.refuse != nil:
				got = "refuse " + plan.refuse.reason
			}
			if got != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
		})
	}
}

// Goal: every field of the spec reaches the ledger, and nothing that is not
// allowed in so many words.
func TestDeclareRequest(t *testing.T) {
	plain := declareRequest(testBucket(), "cluster")
	retained := ledger.DefaultSettings()
	retained.Retention = 30 * 24 * time.Hour
	if plain.Declaration.TenantID != "b" || plain.Declaration.Raises.Mode != ledger.ModeDisabled ||
		plain.Declaration.Settings != retained || plain.Declaration.Period != (ledger.PeriodSpec{}) || plain.Declaration.ConflictPolicy != ledger.ConflictReview ||
		plain.ExpectExisting || plain.Actor != actorUnknown || plain.Generation != 3 ||
		plain.Owner != (ledger.Owner{Cluster: "cluster", Namespace: "ns", Name: "b", UID: "bucket-uid", CreatedAt: testNow}) {
		t.Errorf("a bare bucket declares %+v", plain)
	}
	full := declareRequest(testBucket(func(b *v1alpha1.TokenBucket) {
		b.Annotations = map[string]string{v1alpha1.RequestedByAnnotation: "Ada"}
		b.Spec.TenantID, b.Spec.ScopedKeyID = "tenant", "key"
		b.Spec.ConflictPolicy = v1alpha1.ConflictPolicyOverwrite
		b.Spec.Reservations = v1alpha1.ReservationPolicy{DefaultTTLSeconds: 5, MaxTTLSeconds: 10, MaxRecords: 7, RetentionDays: 2}
		b.Spec.SettlementPolicy = v1alpha1.SettlementPolicyRecordActual
		b.Spec.Period = &v1alpha1.Period{Every: v1alpha1.CadenceWeek, TimeZone: "Asia/Tokyo"}
		b.Spec.Raises = &v1alpha1.RaisePolicy{Mode: v1alpha1.RaiseModeObserveOnly, MaxLimit: 9, MaxDurationSeconds: 60}
		b.Status.BucketKey, b.Status.DeclaredLimit = "ns/b", ptr.To[int64](100)
	}), "cluster")
	want := ledger.Declaration{
		Limit: 100, TenantID: "tenant", ScopedKeyID: "key", ConflictPolicy: ledger.ConflictOverwrite,
		Settings: ledger.ReservationSettings{
			DefaultTTL: 5 * time.Second, MaxTTL: 10 * time.Second, MaxRecords: 7, Retention: 48 * time.Hour,
			Settlement: ledger.SettlementRecordActual,
		},
		Period: ledger.PeriodSpec{Every: ledger.CadenceWeek, TimeZone: "Asia/Tokyo"},
		Raises: ledger.RaisePolicy{Mode: ledger.ModeObserveOnly, MaxLimit: 9, MaxDuration: time.Minute},
	}
	if full.Declaration != want || !full.ExpectExisting || full.Actor != "Ada" {
		t.Errorf("declares %+v, want %+v", full, want)
	}
}
