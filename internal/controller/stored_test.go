package controller

import (
	"encoding/json"
	"math"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/utils/ptr"

	"github.com/token-lease/operator/api/v1alpha1"
)

const (
	bucketHead = `{"apiVersion": "budget.tokenlease.dev/v1alpha1", "kind": "TokenBucket", "metadata": {"name": "b", "namespace": "ns", "generation": 3}`
	leaseHead  = `{"apiVersion": "budget.tokenlease.dev/v1alpha1", "kind": "TemporaryLimitLease", "metadata": {"name": "l", "namespace": "ns"}`
)

func decodeStored(t *testing.T, data string) runtime.Object {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	object, _, err := serializer.NewCodecFactory(scheme).UniversalDeserializer().Decode([]byte(data), nil, nil)
	if err != nil {
		t.Fatalf("a stored object was refused: %v", err)
	}
	return object
}

// Goal: no stored object is refused, what can be read of it is read, and what
// cannot is named. Method: through the decoder that clients use.
func TestStoredBucketIsNeverRefused(t *testing.T) {
	for _, c := range []struct {
		name, body string
		// wrong are the beginnings of what is named, in order; none when readable.
		wrong []string
		spec  v1alpha1.TokenBucketSpec
	}{
		{"sound", `"spec": {"limit": 100, "bucketKey": "k"}`, nil, v1alpha1.TokenBucketSpec{Limit: 100, BucketKey: "k"}},
		{"limit 0", `"spec": {"limit": 0}`, nil, v1alpha1.TokenBucketSpec{}},
		{"no limit", `"spec": {"bucketKey": "k"}`, []string{"spec.limit (is absent)"}, v1alpha1.TokenBucketSpec{BucketKey: "k"}},
		{"null limit", `"spec": {"limit": null}`, []string{"spec.limit (is absent)"}, v1alpha1.TokenBucketSpec{}},
		{"no spec", `"status": {}`, []string{"spec.limit (is absent)"}, v1alpha1.TokenBucketSpec{}},
		{"spec is a string", `"spec": "x"`, []string{"spec ("}, v1alpha1.TokenBucketSpec{}},
		{"string for int", `"spec": {"limit": "100", "deletionPolicy": "Delete"}`, []string{"spec.limit ("}, v1alpha1.TokenBucketSpec{DeletionPolicy: "Delete"}},
		{"fraction", `"spec": {"limit": 1.5}`, []string{"spec.limit ("}, v1alpha1.TokenBucketSpec{}},
		{"overflow", `"spec": {"limit": 9223372036854775808}`, []string{"spec.limit ("}, v1alpha1.TokenBucketSpec{}},
		{"two", `"spec": {"limit": 1, "bucketKey": {"a": 1}, "raises": {"mode": "Enforce", "maxLimit": 5, "maxDurationSeconds": 3000000000}}`,
			[]string{"spec.bucketKey (", "spec.raises ("}, v1alpha1.TokenBucketSpec{Limit: 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			b, ok := decodeStored(t, bucketHead+`, `+c.body+`}`).(*storedBucket)
			if !ok || b.Name != "b" || b.Generation != 3 || b.Kind != "TokenBucket" {
				t.Fatalf("decoded %+v", b)
			}
			rest := b.unreadable
			for _, want := range c.wrong {
				_, after, found := strings.Cut(rest, want)
				if !found {
					t.Errorf("%q does not name %s", b.unreadable, want)
				}
				rest = after
			}
			if len(c.wrong) == 0 && b.unreadable != "" {
				t.Errorf("unreadable: %s", b.unreadable)
			}
			if !equality.Semantic.DeepEqual(b.Spec, c.spec) {
				t.Errorf("read %+v, want %+v", b.Spec, c.spec)
			}
			if again := b.DeepCopy(); !equality.Semantic.DeepEqual(again.TokenBucket, b.TokenBucket) || again.unreadable != b.unreadable {
				t.Errorf("the copy is %+v", again)
			}
		})
	}
}

// Goal: the same for leases and for lists of them, where one bad one is among good
// ones.
func TestStoredLeases(t *testing.T) {
	spec := func(expires, more string) string {
		return `, "spec": {"bucketRef": {"name": "b"}, "normalLimit": 1, "temporaryLimit": 2, "expiresAt": ` + expires + more + `}}`
	}
	bodies := []string{
		spec(`"2026-11-30T18:00:00.000+02:00"`, ``), spec(`"2026-02-31T00:00:00Z"`, ``), spec(`"tomorrow"`, ``), spec(`17`, ``),
		spec(`null`, ``), spec(`"2026-11-30T18:00:00Z"`, `, "startsAt": ["x"]`), `}`,
		spec(`"2026-11-30T18:00:00Z"`, `, "temporaryLimit": {"a": 1}`),
	}
	var items []string
	for _, body := range bodies {
		items = append(items, leaseHead+body)
	}
	list, ok := decodeStored(t, `{"apiVersion": "budget.tokenlease.dev/v1alpha1", "kind": "TemporaryLimitLeaseList", "metadata": {"resourceVersion": "7"}, "items": [`+
		strings.Join(items, ",")+`]}`).(*storedLeaseList)
	if !ok || len(list.Items) != len(items) || list.ResourceVersion != "7" {
		t.Fatalf("decoded %+v", list)
	}
	for i, want := range []string{"", "spec.expiresAt", "spec.expiresAt", "spec.expiresAt", "", "spec.startsAt", "spec.normalLimit", "spec.temporaryLimit"} {
		l := list.Items[i]
		if got := l.unreadable; want == "" && got != "" || !strings.HasPrefix(got, want) {
			t.Errorf("%s: unreadable %q, want %q", items[i], got, want)
		}
		if l.Name != "l" || want != "" && want != "spec.normalLimit" && l.Spec.BucketRef.Name != "b" {
			t.Errorf("%s: read %+v", items[i], l.TemporaryLimitLease)
		}
	}
}

// Goal: a status that cannot be read is absent, and the next write replaces it; a
// status that can be read is changed where it differs, and a spec is never sent.
func TestStatusDifference(t *testing.T) {
	difference := func(stored string, change func(*v1alpha1.TokenBucketStatus)) string {
		before, ok := decodeStored(t, bucketHead+`, "spec": {"limit": "x"}, `+stored+`}`).(*storedBucket)
		if !ok {
			t.Fatal("no bucket")
		}
		before.ResourceVersion = "7"
		after := before.DeepCopy()
		change(&after.Status)
		patch, err := statusDifference(before, after)
		if err != nil {
			t.Fatal(err)
		}
		return string(patch)
	}
	set := func(s *v1alpha1.TokenBucketStatus) { s.Limit, s.BucketKey = ptr.To[int64](math.MaxInt64>>10), "k" }
	for _, c := range []struct {
		name, stored string
		change       func(*v1alpha1.TokenBucketStatus)
		want         string
	}{
		{"nothing", `"status": {"limit": 5}`, func(*v1alpha1.TokenBucketStatus) {}, ``},
		{"no status", `"x": 1`, set, `{"limit":9007199254740991,"bucketKey":"k"}`},
		{"sound", `"status": {"bucketKey": "k", "observedGeneration": 2}`, set, `{"limit":9007199254740991}`},
		{"a bad field", `"status": {"bucketKey": "k", "observedGeneration": 2, "usedTokens": {"a": 1}}`, set, `{"limit":9007199254740991,"usedTokens":null}`},
		{"bad conditions, no change", `"status": {"bucketKey": "k", "conditions": [{"type": 5}]}`, func(*v1alpha1.TokenBucketStatus) {}, `{"conditions":null}`},
		{"no object", `"status": "x"`, set, `{"limit":9007199254740991,"bucketKey":"k"}`},
	} {
		got := difference(c.stored, c.change)
		if c.want == "" {
			if got != "" {
				t.Errorf("%s: %s", c.name, got)
			}
			continue
		}
		var is, want map[string]any
		if err := json.Unmarshal([]byte(got), &is); err != nil {
			t.Fatalf("%s: %q: %v", c.name, got, err)
		}
		if err := json.Unmarshal([]byte(`{"metadata": {"resourceVersion": "7"}, "status": `+c.want+`}`), &want); err != nil {
			t.Fatal(err)
		}
		if !equality.Semantic.DeepEqual(is, want) || strings.Contains(got, "e+") {
			t.Errorf("%s: %s, want the status %s", c.name, got, c.want)
		}
	}
}

// Goal: the message says what to change and stays bounded, however much is wrong.
func TestUndecodableMessage(t *testing.T) {
	c := conditions{list: &[]metav1.Condition{}, generation: 1, now: testNow}
	c.failed(undecodable(strings.Repeat("spec.limit (ä), ", 200)))
	for _, condition := range *c.list {
		if len(condition.Message) >= v1alpha1.MaxConditionMessageBytes {
			t.Errorf("%s has %d bytes", condition.Type, len(condition.Message))
		}
	}
}
