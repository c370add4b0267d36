package e2e_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/token-lease/operator/api/v1alpha1"
)

// gitOps is a tool that keeps a cluster as a repository says.
const gitOps = "gitops"

// Goal: a GitOps tool that applies both objects again and again during a raise
// does no harm and sees no harm: L stays, no field is fought over, there is no
// difference between repository and cluster, and the specs stay as they are written,
// in the spelling of the person who wrote them.
// Method: apply with server-side apply under a field manager of its own, once a
// second from before the raise until after it, while L is watched by SQL and the
// manager is restarted in the middle.
func TestGitOpsDuringTheRaise(t *testing.T) {
	t.Parallel()
	in := install(t)
	key := in.key(bucketName)
	m := in.start(t, "manager-a", managerOptions{})
	startsAt, expiresAt := in.after(t, early), in.after(t, late)
	tokyo := time.FixedZone("", 9*60*60)
	manifest := in.sample(t, "tokenbucket.yaml") + "---\n" + in.sample(t, "temporarylimitlease.yaml",
		"startsAt", `"`+startsAt.In(tokyo).Format("2006-01-02T15:04:05.000Z07:00")+`"`,
		"expiresAt", `"`+expiresAt.In(tokyo).Format("2006-01-02T15:04:05.000Z07:00")+`"`)
	in.applyAsGitOps(t, manifest)
	in.waitLease(t, leaseName, pending)
	specs := in.specs(t)
	watched := watchLimit(t, in.db, key)

	in.syncs(t, manifest, 2)
	in.db.moveClockTo(t, startsAt)
	in.waitLease(t, leaseName, active)
	in.syncs(t, manifest, 4)
	m.terminate(t)
	in.syncs(t, manifest, 1)
	in.start(t, "manager-b", managerOptions{})
	in.syncs(t, manifest, 3)
	in.waitLease(t, leaseName, active)
	in.waitBucket(t, isTrue(v1alpha1.ConditionRaised), isTrue(v1alpha1.ConditionLimitInSync), isTrue(v1alpha1.ConditionReady))
	in.wantNoDiff(t, manifest)
	in.db.moveClockTo(t, expiresAt)
	in.waitLease(t, leaseName, restored)
	in.syncs(t, manifest, 2)
	in.waitBucket(t, inSync...)
	in.wantNoDiff(t, manifest)

	watched.wantInTurn(t, normal, temporary, normal)
	if after := in.specs(t); !slices.Equal(specs, after) {
		t.Errorf("the specs were %v and are %v", specs, after)
	}
	in.checkSpecOwners(t)
	want := []string{"BucketOpened", "RaiseStored", "RaiseActivated", "RaiseRestored/Expired"}
	if got := in.db.events(t, key); !slices.Equal(got, want) {
		t.Errorf("audit %v, want %v", got, want)
	}
}

func (in *installation) applyAsGitOps(t *testing.T, manifest string) {
	t.Helper()
	in.mustKubectl(t, manifest, "apply", "--server-side", "--field-manager="+gitOps)
}

// syncs applies a manifest so many times, a second apart, as such a tool does. A
// conflict over a field makes kubectl fail.
func (in *installation) syncs(t *testing.T, manifest string, count int) {
	t.Helper()
	for range count {
		in.applyAsGitOps(t, manifest)
		time.Sleep(time.Second) // the tool's interval, not a wait
	}
}

// wantNoDiff checks that kubectl diff finds nothing: it fails when it does.
func (in *installation) wantNoDiff(t *testing.T, manifest string) {
	t.Helper()
	if output := in.mustKubectl(t, manifest, "diff", "--server-side", "--field-manager="+gitOps); strings.TrimSpace(output) != "" {
		t.Errorf("kubectl diff shows\n%s", output)
	}
}

// raw reads the seed story's bucket and lease as they are stored.
func (in *installation) raw(t *testing.T) []*unstructured.Unstructured {
	t.Helper()
	objects := []*unstructured.Unstructured{{}, {}}
	for i, kind := range []string{"TokenBucket", "TemporaryLimitLease"} {
		objects[i].SetGroupVersionKind(v1alpha1.GroupVersion.WithKind(kind))
		name := map[string]string{"TokenBucket": bucketName, "TemporaryLimitLease": leaseName}[kind]
		if err := in.api.Get(call(t), client.ObjectKey{Namespace: in.namespace, Name: name}, objects[i]); err != nil {
			t.Fatal(err)
		}
	}
	return objects
}

// specs are the specs and generations, as text.
func (in *installation) specs(t *testing.T) []string {
	t.Helper()
	var texts []string
	for _, object := range in.raw(t) {
		texts = append(texts, fmt.Sprintf("generation %d: %s", object.GetGeneration(), asJSON(object.Object["spec"])))
	}
	return texts
}

// checkSpecOwners checks that the operator owns no field of a spec, and that the
// tool owns no field of a status.
func (in *installation) checkSpecOwners(t *testing.T) {
	t.Helper()
	for _, object := range in.raw(t) {
		for _, entry := range object.GetManagedFields() {
			var fields map[string]json.RawMessage
			owned := entry.FieldsV1.GetRawBytes()
			if err := json.Unmarshal(owned, &fields); err != nil {
				t.Fatal(err)
			}
			if _, spec := fields["f:spec"]; spec && entry.Manager != gitOps {
				t.Errorf("%s: %q owns fields of the spec: %s", object.GetName(), entry.Manager, owned)
			}
			if entry.Manager == gitOps && entry.Operation != metav1.ManagedFieldsOperationApply {
				t.Errorf("%s: %q did not apply but %s", object.GetName(), entry.Manager, entry.Operation)
			}
		}
	}
}

// Goal: what is only tried, compared or refused has no effect on the ledger.
// Method: dry runs of every verb, differences and refused requests, before there is
// a bucket and during a raise; what a last real request does shows that the manager
// has seen all that came before it.
func TestRequestsWithoutEffect(t *testing.T) {
	t.Parallel()
	in := install(t)
	in.start(t, "manager-a", managerOptions{})
	manifest := manifestOf(t, in.bucket(), in.lease(t))
	const rounds = 30
	for range rounds {
		for _, object := range []client.Object{in.bucket(), in.lease(t)} {
			if err := in.api.Create(call(t), object, client.DryRunAll); err != nil {
				t.Fatal(err)
			}
		}
	}
	in.mustKubectl(t, manifest, "apply", "--dry-run=server")
	in.wantDiff(t, manifest)
	in.create(t, in.otherBucket("real"), in.otherLease(t, "real", "real"))
	in.waitLease(t, "real", active)
	in.waitBucketNamed(t, "real", isTrue(v1alpha1.ConditionRaised), isTrue(v1alpha1.ConditionReady))
	for _, table := range []string{"buckets", "raises", "approvals"} {
		if got := query[int64](t, in.db, "SELECT count(*) FROM tokenlease."+table); got != 1 {
			t.Errorf("the ledger has %d %s, want only that of the real request", got, table)
		}
	}

	stage(t, "during a raise")
	bucket, lease := in.otherBucket("real"), in.otherLease(t, "real", "real")
	before := in.versions(t)
	lower := client.RawPatch("application/merge-patch+json", []byte(`{"spec": {"limit": 1}}`))
	sooner := client.RawPatch("application/merge-patch+json", fmt.Appendf(nil, `{"spec": {"expiresAt": %q}}`, in.after(t, 0).Format(time.RFC3339)))
	for range rounds {
		for _, err := range []error{
			in.api.Patch(call(t), bucket.DeepCopy(), lower, client.DryRunAll),
			in.api.Patch(call(t), lease.DeepCopy(), sooner, client.DryRunAll),
			in.api.Delete(call(t), lease.DeepCopy(), client.DryRunAll),
			in.api.Delete(call(t), bucket.DeepCopy(), client.DryRunAll),
		} {
			if err != nil {
				t.Fatal(err)
			}
		}
		if err := in.api.Create(call(t), bucket.DeepCopy()); !apierrors.IsAlreadyExists(err) {
			t.Fatalf("create a second time: %v, want a refusal", err)
		}
		if err := in.api.Create(call(t), in.otherLease(t, "real", "lower", raisedTo(normal))); !apierrors.IsInvalid(err) {
			t.Fatalf("create a lease that does not raise: %v, want a refusal", err)
		}
	}
	in.wantDiff(t, manifestOf(t, in.otherBucket("real", func(b *v1alpha1.TokenBucket) { b.Spec.Limit = permanent })))
	if after := in.versions(t); !slices.Equal(before, after) {
		t.Errorf("objects and ledger went from %v to %v", before, after)
	}
	in.delete(t, lease)
	in.waitGone(t, lease)
	want := []string{"BucketOpened", "RaiseStored", "RaiseActivated", "RaiseRestored/Revoked"}
	if got := in.db.events(t, in.key("real")); !slices.Equal(got, want) {
		t.Errorf("audit %v, want %v", got, want)
	}
}

// wantDiff checks that kubectl diff finds a difference.
func (in *installation) wantDiff(t *testing.T, manifest string) {
	t.Helper()
	output, err := in.kubectl(t.Context(), manifest, "diff", "--server-side", "--field-manager="+gitOps, "--force-conflicts")
	if err == nil || !strings.Contains(output, "spec:") && !strings.Contains(output, "limit:") {
		t.Errorf("kubectl diff: %v %s, want a difference", err, output)
	}
}
