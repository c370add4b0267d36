package controller_test

import (
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/cli-utils/pkg/kstatus/status"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/internal/ledger"
)

// gitOps is a tool that applies manifests again and again by server-side apply,
// without force: a conflict fails the test.
type gitOps struct {
	*world
	manifests []string
}

func (g gitOps) sync(options ...client.ApplyOption) []*unstructured.Unstructured {
	g.Helper()
	var applied []*unstructured.Unstructured
	for _, manifest := range g.manifests {
		object := &unstructured.Unstructured{}
		g.must(yaml.Unmarshal([]byte(manifest), &object.Object))
		object.SetNamespace(g.namespace)
		g.must(kube.Apply(g.ctx, client.ApplyConfigurationFromUnstructured(object),
			append(options, client.FieldOwner("gitops"))...))
		applied = append(applied, object)
	}
	return applied
}

// specBytes is the spec as the API server sends it, byte for byte.
func (w *world) specBytes(resource, name string) string {
	w.Helper()
	config := plane.RESTConfig()
	to, err := rest.HTTPClientFor(config)
	w.must(err)
	url := strings.TrimSuffix(config.Host, "/") + "/apis/" + v1alpha1.GroupVersion.String() + "/namespaces/" + w.namespace + "/" + resource + "/" + name
	if !strings.Contains(url, "://") {
		url = "https://" + url
	}
	request, err := http.NewRequestWithContext(w.ctx, http.MethodGet, url, nil)
	w.must(err)
	response, err := to.Do(request)
	w.must(err)
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(response.Body, 1<<20))
	w.must(err)
	var object struct {
		Spec json.RawMessage `json:"spec"`
	}
	w.must(json.Unmarshal(body, &object))
	if len(object.Spec) == 0 {
		w.Fatalf("no spec in %s", body)
	}
	return string(object.Spec)
}

// Goal: a GitOps tool that applies both specs again and again during a raise meets
// no conflict and no difference, the limit stays raised, and the specs keep their
// very bytes and their owner, also across a restart of the operator.
func TestAppliedAgainDuringRaise(t *testing.T) {
	w := newWorld(t)
	starts := w.now().Add(-time.Minute).UTC().Format("2006-01-02T15:04:05.000Z")
	expires := w.now().Add(time.Hour).In(time.FixedZone("", 2*60*60)).Format("2006-01-02T15:04:05-07:00")
	tool := gitOps{w, []string{
		`{apiVersion: budget.tokenlease.dev/v1alpha1, kind: TokenBucket, metadata: {name: b}, spec: {limit: 100, raises: {mode: Enforce, maxLimit: 300, maxDurationSeconds: 7200}}}`,
		`{apiVersion: budget.tokenlease.dev/v1alpha1, kind: TemporaryLimitLease, metadata: {name: l}, spec: {bucketRef: {name: b}, normalLimit: 100, temporaryLimit: 300, startsAt: "` +
			starts + `", expiresAt: "` + expires + `", approvalID: A, scopedKeyID: K}}`,
	}}
	tool.sync()
	bucketSpec, leaseSpec := w.specBytes("tokenbuckets", "b"), w.specBytes("temporarylimitleases", "l")
	if !strings.Contains(leaseSpec, `"`+starts+`"`) || !strings.Contains(leaseSpec, `"`+expires+`"`) {
		t.Fatalf("the instants are not spelled as written: %s", leaseSpec)
	}
	w.leaseState("l", v1alpha1.RaiseStateActive)
	w.bucketIs("b", "is raised", func(b *v1alpha1.TokenBucket) bool { return b.Status.ActiveRaise != nil })
	for round := range 40 {
		if round == 20 {
			w.restart()
		}
		for _, object := range tool.sync() {
			if object.GetGeneration() != 1 {
				t.Fatalf("%s has generation %d", object.GetKind(), object.GetGeneration())
			}
		}
		w.afterPolls(1)
		if s := w.snapshot(w.key("b")); s.Limit != temporary || s.ActiveRaise == nil || s.BaseLimit != normal {
			t.Fatalf("round %d: %s", round, show(s))
		}
	}
	if got := w.specBytes("tokenbuckets", "b"); got != bucketSpec {
		t.Errorf("the spec became %s, was %s", got, bucketSpec)
	}
	if got := w.specBytes("temporarylimitleases", "l"); got != leaseSpec {
		t.Errorf("the spec became %s, was %s", got, leaseSpec)
	}
	if n := w.audited(w.key("b"), ledger.AuditRaiseActivated); n != 1 {
		t.Errorf("raised %d times, want 1", n)
	}
	tool.ownsSpecs()
	w.advance(2 * time.Hour)
	w.leaseEnded("l", v1alpha1.RaiseStateRestored)
	tool.sync()
	w.leaseEnded("l", v1alpha1.RaiseStateRestored)
	if s := w.snapshot(w.key("b")); s.Limit != normal {
		t.Errorf("limit %d after the expiry, want %d", s.Limit, normal)
	}
}

// ownsSpecs checks that the operator owns its finalizer and the status, and no
// field of a spec.
func (g gitOps) ownsSpecs() {
	g.Helper()
	for _, object := range g.sync() {
		var managers []string
		for _, entry := range object.GetManagedFields() {
			managers = append(managers, entry.Manager+"/"+entry.Subresource)
			if fields := entry.FieldsV1.GetRawString(); entry.Manager == v1alpha1.FieldManager && strings.Contains(fields, "f:spec") {
				g.Errorf("the operator owns fields of the spec: %s", fields)
			}
		}
		slices.Sort(managers)
		want := []string{"gitops/", v1alpha1.FieldManager + "/", v1alpha1.FieldManager + "/status"}
		if slices.Sort(want); !slices.Equal(managers, want) {
			g.Errorf("field managers of %s: %v, want %v", object.GetKind(), managers, want)
		}
	}
}

// health is what a tool's rule for kstatus makes of an object on the server.
func (w *world) health(kind, name string) status.Status {
	w.Helper()
	object := rawObject(kind, w.namespace, name)
	w.must(kube.Get(w.ctx, client.ObjectKeyFromObject(object), object))
	result, err := status.Compute(object)
	w.must(err)
	return result.Status
}

func (w *world) eventuallyHealthy(kind, name string, want status.Status) {
	w.Helper()
	w.eventually(kind+" "+name+" is "+want.String(), func() (string, bool) {
		got := w.health(kind, name)
		return got.String(), got == want
	})
}

// Goal: nothing is green before the operator has seen it, and nothing that waits
// for its time or has run blocks a sync.
func TestHealth(t *testing.T) {
	w := newWorld(t)
	w.stop()
	bucket := w.createBucket("b")
	w.createLease("l", "b")
	for _, o := range []struct{ kind, name string }{{kindBucket, "b"}, {kindLease, "l"}} {
		if got := w.health(o.kind, o.name); got != status.InProgressStatus {
			t.Errorf("%s is %s without an operator", o.kind, got)
		}
	}
	w.run(w.settings)
	w.eventuallyHealthy(kindBucket, "b", status.CurrentStatus)
	w.eventuallyHealthy(kindLease, "l", status.CurrentStatus)
	w.stop()
	w.patch(bucket, `{"spec": {"conflictPolicy": "Overwrite"}}`)
	if got := w.health(kindBucket, "b"); got != status.InProgressStatus {
		t.Errorf("a changed bucket is %s without an operator", got)
	}
	w.run(w.settings)
	w.eventuallyHealthy(kindBucket, "b", status.CurrentStatus)

	w.createLease("waits", "b")
	w.eventuallyHealthy(kindLease, "waits", status.CurrentStatus)
	w.createLease("no-bucket", "none")
	w.leaseIs("no-bucket", "is seen", func(l *v1alpha1.TemporaryLimitLease) bool { return l.Status.ObservedGeneration == 1 })
	if got := w.health(kindLease, "no-bucket"); got != status.InProgressStatus {
		t.Errorf("a lease without a bucket is %s", got)
	}
	w.store.down.Store(true)
	w.eventuallyHealthy(kindBucket, "b", status.InProgressStatus)
	w.store.down.Store(false)
	w.eventuallyHealthy(kindBucket, "b", status.CurrentStatus)
	w.advance(2 * time.Hour)
	w.leaseEnded("l", v1alpha1.RaiseStateRestored)
	w.eventuallyHealthy(kindLease, "l", status.CurrentStatus)
	w.eventuallyHealthy(kindLease, "waits", status.FailedStatus)

	held := w.createBucket("held", func(b *v1alpha1.TokenBucket) { b.Spec.DeletionPolicy = v1alpha1.DeletionPolicyDelete })
	w.bucketReady("held")
	w.reserve(w.key("held"), "r", 10)
	w.remove(held)
	w.eventuallyHealthy(kindBucket, "held", status.TerminatingStatus)
}
