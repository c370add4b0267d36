package v1alpha1_test

import (
	"encoding/json"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/token-lease/operator/api/v1alpha1"
)

// apply is a server-side apply of the manifest's very bytes.
func apply(t *testing.T, namespace string, m manifest) {
	t.Helper()
	err := raw.Patch(types.ApplyYAMLPatchType).Namespace(namespace).Resource(m.resource()).Name(m.name).
		Param("fieldManager", "gitops").Body(m.yaml()).Do(testContext(t)).Error()
	if err != nil {
		t.Fatalf("apply %s: %v", m.yaml(), err)
	}
}

// Goal: applying the same file again changes nothing, not even the resource
// version, whatever spelling of dates it uses and whatever the operator has
// written meanwhile.
func TestApplyTwiceChangesNothing(t *testing.T) {
	namespace := newNamespace(t)
	for _, m := range []manifest{
		bucket(fullBucket),
		leaseWith("expiresAt", `"2030-01-01T02:30:00.000+02:00"`, "purpose", "online rent collection launch"),
	} {
		t.Run(m.kind, func(t *testing.T) {
			apply(t, namespace, m)
			stored := fetch(t, namespace, m)
			finalizer := []byte(`{"metadata": {"finalizers": ["` + v1alpha1.LedgerFinalizer + `"]}}`)
			if err := kube.Patch(testContext(t), stored, client.RawPatch(types.MergePatchType, finalizer), client.FieldOwner(v1alpha1.FieldManager)); err != nil {
				t.Fatalf("add the finalizer: %v", err)
			}
			status := []byte(`{"status": {"observedGeneration": 1, "bucketKey": "tenants/pm-4821"}}`)
			if err := kube.Status().Patch(testContext(t), stored, client.RawPatch(types.MergePatchType, status), client.FieldOwner(v1alpha1.FieldManager)); err != nil {
				t.Fatalf("write the status: %v", err)
			}
			before := fetch(t, namespace, m)

			apply(t, namespace, m)

			after := fetch(t, namespace, m)
			if before.GetResourceVersion() != after.GetResourceVersion() {
				t.Errorf("a second apply wrote the object:\n%v\n%v", before.Object, after.Object)
			}
			if after.GetGeneration() != 1 {
				t.Errorf("generation %d, want 1: finalizer and status are no change of the spec", after.GetGeneration())
			}
		})
	}
}

// Goal: an object that nobody has looked at says so, to tools that compare
// observedGeneration with generation.
func TestStatusBeforeTheOperatorHasLooked(t *testing.T) {
	namespace := newNamespace(t)
	for _, m := range []manifest{bucket(`{limit: 1}`), leaseWith()} {
		mustCreate(t, namespace, m)
		got, err := json.Marshal(fetch(t, namespace, m).Object["status"])
		if err != nil {
			t.Fatal(err)
		}
		if string(got) != `{"observedGeneration":-1}` {
			t.Errorf("%s: status %s, want only observedGeneration -1", m.kind, got)
		}
	}
}

// Goal: leases can be selected by state and by bucket, buckets by their key.
func TestFieldSelectors(t *testing.T) {
	namespace := newNamespace(t)
	other := leaseWith("bucketRef", "{name: other}")
	other.name = "other-launch"
	mustCreate(t, namespace, leaseWith())
	mustCreate(t, namespace, other)
	mustCreate(t, namespace, bucket(`{limit: 1}`))
	var active v1alpha1.TemporaryLimitLease
	if err := kube.Get(testContext(t), client.ObjectKey{Namespace: namespace, Name: other.name}, &active); err != nil {
		t.Fatal(err)
	}
	active.Status.State = v1alpha1.RaiseStateActive
	if err := kube.Status().Update(testContext(t), &active); err != nil {
		t.Fatalf("write the state: %v", err)
	}
	var counted v1alpha1.TokenBucket
	if err := kube.Get(testContext(t), client.ObjectKey{Namespace: namespace, Name: "pm-4821"}, &counted); err != nil {
		t.Fatal(err)
	}
	counted.Status.BucketKey = namespace + "/pm-4821"
	if err := kube.Status().Update(testContext(t), &counted); err != nil {
		t.Fatalf("write the key: %v", err)
	}

	for _, c := range []struct {
		list  client.ObjectList
		field string
		value string
		want  string
	}{
		{&v1alpha1.TemporaryLimitLeaseList{}, "status.state", "Active", other.name},
		{&v1alpha1.TemporaryLimitLeaseList{}, "spec.bucketRef.name", "pm-4821", "pm-4821-launch"},
		{&v1alpha1.TokenBucketList{}, "status.bucketKey", namespace + "/pm-4821", "pm-4821"},
	} {
		if err := kube.List(testContext(t), c.list, client.InNamespace(namespace), client.MatchingFields{c.field: c.value}); err != nil {
			t.Errorf("select by %s: %v", c.field, err)
			continue
		}
		if got := names(t, c.list); !slices.Equal(got, []string{c.want}) {
			t.Errorf("%s=%s selected %v, want %v", c.field, c.value, got, c.want)
		}
	}
}

func names(t *testing.T, list client.ObjectList) []string {
	t.Helper()
	var found []string
	switch list := list.(type) {
	case *v1alpha1.TokenBucketList:
		for _, item := range list.Items {
			found = append(found, item.Name)
		}
	case *v1alpha1.TemporaryLimitLeaseList:
		for _, item := range list.Items {
			found = append(found, item.Name)
		}
	default:
		t.Fatalf("unexpected list %T", list)
	}
	return found
}

// Goal: `kubectl get` answers the usual questions, and shows a future instant as
// the instant it is (a date column would show it as invalid).
func TestPrinterColumns(t *testing.T) {
	namespace := newNamespace(t)
	expiry := metav1.Date(2030, 1, 1, 0, 30, 0, 0, metav1.Now().UTC().Location())
	mustCreate(t, namespace, bucket(fullBucket))
	var stored v1alpha1.TokenBucket
	if err := kube.Get(testContext(t), client.ObjectKey{Namespace: namespace, Name: "pm-4821"}, &stored); err != nil {
		t.Fatal(err)
	}
	stored.Status = v1alpha1.TokenBucketStatus{
		ObservedGeneration: 1,
		Limit:              ptr.To[int64](300000), DeclaredLimit: ptr.To[int64](120000),
		UsedTokens: ptr.To[int64](0), ReservedTokens: ptr.To[int64](9007199254740991), AvailableTokens: ptr.To[int64](5),
		ActiveRaise: &v1alpha1.ActiveRaise{Name: "pm-4821-launch", TemporaryLimit: 300000, ExpiresAt: expiry},
		Conditions:  []metav1.Condition{{Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonReady, LastTransitionTime: metav1.Now()}},
	}
	if err := kube.Status().Update(testContext(t), &stored); err != nil {
		t.Fatalf("write the status: %v", err)
	}
	wantRow(t, namespace, "tokenbuckets", map[string]string{
		"Limit": "300000", "Declared": "120000", "Used": "0", "Reserved": "9007199254740991", "Available": "5",
		"Raised-By": `"pm-4821-launch"`, "Raised-Until": `"2030-01-01T00:30:00Z"`, "Ready": `"True"`,
	})

	mustCreate(t, namespace, leaseWith("expiresAt", `"2030-01-01T02:30:00+02:00"`))
	wantRow(t, namespace, "temporarylimitleases", map[string]string{
		"Bucket": `"pm-4821"`, "Normal": "120000", "Temporary": "300000", "Expires": `"2030-01-01T02:30:00+02:00"`,
	})
}

// wantRow reads the only object of the kind as the table that kubectl prints.
func wantRow(t *testing.T, namespace, resource string, want map[string]string) {
	t.Helper()
	body, err := raw.Get().Namespace(namespace).Resource(resource).
		SetHeader("Accept", "application/json;as=Table;g=meta.k8s.io;v=v1").Do(testContext(t)).Raw()
	if err != nil {
		t.Fatal(err)
	}
	var table struct {
		ColumnDefinitions []metav1.TableColumnDefinition `json:"columnDefinitions"`
		Rows              []struct {
			Cells []json.RawMessage `json:"cells"`
		} `json:"rows"`
	}
	if err := json.Unmarshal(body, &table); err != nil {
		t.Fatal(err)
	}
	if len(table.Rows) != 1 {
		t.Fatalf("%s: %d rows, want 1", resource, len(table.Rows))
	}
	missing := maps.Clone(want)
	for i, column := range table.ColumnDefinitions {
		if expected, ok := want[column.Name]; ok {
			delete(missing, column.Name)
			if got := string(table.Rows[0].Cells[i]); got != expected {
				t.Errorf("%s: column %s shows %s, want %s", resource, column.Name, got, expected)
			}
		}
	}
	if len(missing) > 0 {
		t.Errorf("%s: no columns for %v", resource, missing)
	}
}

// Goal: the samples are what the schema accepts, unknown fields refused.
func TestSamplesAreAccepted(t *testing.T) {
	namespace := newNamespace(t)
	for _, file := range []string{"tokenbucket.yaml", "temporarylimitlease.yaml"} {
		content, err := os.ReadFile("../../config/samples/" + file)
		if err != nil {
			t.Fatal(err)
		}
		var sample struct {
			Kind     string            `json:"kind"`
			Metadata metav1.ObjectMeta `json:"metadata"`
			Spec     json.RawMessage   `json:"spec"`
		}
		if err := yaml.Unmarshal(content, &sample); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		m := manifest{kind: sample.Kind, name: sample.Metadata.Name, spec: string(sample.Spec)}
		if err := create(t, namespace, m); err != nil {
			t.Errorf("%s: %v", file, err)
		}
		if strings.Contains(string(content), "\t") {
			t.Errorf("%s: holds a tab, which some YAML readers refuse", file)
		}
	}
}
