package controller_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/internal/ledger"
)

const (
	kindBucket = "TokenBucket"
	kindLease  = "TemporaryLimitLease"
)

func rawObject(kind, namespace, name string) *unstructured.Unstructured {
	object := &unstructured.Unstructured{}
	object.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind(kind))
	object.SetNamespace(namespace)
	object.SetName(name)
	return object
}

// stored reads an object.
func (w *world) stored(kind, name string) *unstructured.Unstructured {
	w.Helper()
	object := rawObject(kind, w.namespace, name)
	w.must(kube.Get(w.ctx, client.ObjectKeyFromObject(object), object))
	return object
}

// rawIs waits for a state of an object that the types cannot hold.
func (w *world) rawIs(kind, name, what string, ok func(conditions []metav1.Condition, object *unstructured.Unstructured) bool) *unstructured.Unstructured {
	w.Helper()
	object := rawObject(kind, w.namespace, name)
	w.eventually(kind+" "+name+" "+what, func() (string, bool) {
		if err := kube.Get(w.ctx, client.ObjectKeyFromObject(object), object); err != nil {
			return err.Error(), false
		}
		var status struct {
			Status struct {
				Conditions []metav1.Condition `json:"conditions"`
			} `json:"status"`
		}
		w.must(runtime.DefaultUnstructuredConverter.FromUnstructured(map[string]any{"status": object.Object["status"]}, &status))
		return show(object), ok(status.Status.Conditions, object)
	})
	return object
}

// undecodable waits until an object is shown as such, with the field that is wrong.
func (w *world) undecodable(kind, name, field string) *unstructured.Unstructured {
	w.Helper()
	return w.rawIs(kind, name, "is shown as undecodable", func(conditions []metav1.Condition, object *unstructured.Unstructured) bool {
		observed, _, _ := unstructured.NestedInt64(object.Object, "status", "observedGeneration")
		return observed == object.GetGeneration() && isTrue(conditions, v1alpha1.ConditionStalled) &&
			!isTrue(conditions, v1alpha1.ConditionReady) && !isTrue(conditions, v1alpha1.ConditionReconciling) &&
			reasonIs(conditions, v1alpha1.ConditionStalled, v1alpha1.ReasonUndecodable) && strings.Contains(show(conditions), field)
	})
}

// withoutSchemas lets anything into the objects of both kinds while f runs.
func (w *world) withoutSchemas(f func()) {
	w.Helper()
	var restore []func()
	for _, name := range []string{"tokenbuckets." + v1alpha1.GroupName, "temporarylimitleases." + v1alpha1.GroupName} {
		spec := w.changeCRD(name, func(spec map[string]any) {
			for _, version := range spec["versions"].([]any) {
				version := version.(map[string]any)
				delete(version, "selectableFields")
				version["schema"] = map[string]any{"openAPIV3Schema": map[string]any{
					"type": "object", "x-kubernetes-preserve-unknown-fields": true,
				}}
			}
		})
		restore = append(restore, func() {
			w.changeCRD(name, func(now map[string]any) { now["versions"] = spec["versions"] })
		})
	}
	w.eventuallyAccepted(true)
	f()
	for _, f := range restore {
		f()
	}
	w.eventuallyAccepted(false)
}

// changeCRD changes the spec of a CRD and returns what it was.
func (w *world) changeCRD(name string, change func(spec map[string]any)) map[string]any {
	w.Helper()
	var was map[string]any
	w.eventually("the CRD is changed", func() (string, bool) {
		crd := &unstructured.Unstructured{}
		crd.SetAPIVersion("apiextensions.k8s.io/v1")
		crd.SetKind("CustomResourceDefinition")
		w.must(kube.Get(w.ctx, client.ObjectKey{Name: name}, crd))
		spec := crd.Object["spec"].(map[string]any)
		was = runtime.DeepCopyJSON(spec)
		change(spec)
		err := kube.Update(w.ctx, crd)
		if err != nil && !apierrors.IsConflict(err) {
			w.Fatal(err)
		}
		return fmt.Sprint(err), err == nil
	})
	return was
}

// eventuallyAccepted waits until the API server works by the schemas as they are:
// with them it refuses a bad object of either kind, without them it does not.
func (w *world) eventuallyAccepted(want bool) {
	w.Helper()
	w.eventually(fmt.Sprintf("bad objects are accepted: %v", want), func() (string, bool) {
		var results []string
		all := true
		for _, kind := range []string{kindBucket, kindLease} {
			object := rawObject(kind, w.namespace, "probe")
			object.Object["spec"] = map[string]any{"limit": "x"}
			err := kube.Create(w.ctx, object, client.DryRunAll)
			all = all && (err == nil) == want
			results = append(results, fmt.Sprint(err))
		}
		return strings.Join(results, "\n"), all
	})
}

func (w *world) createRaw(kind, name string, spec any) {
	w.Helper()
	object := rawObject(kind, w.namespace, name)
	object.Object["spec"] = spec
	w.must(kube.Create(w.ctx, object, client.FieldOwner(tester)))
}

func leaseSpec(change map[string]any) map[string]any {
	spec := map[string]any{
		"bucketRef": map[string]any{"name": "good"}, "normalLimit": int64(normal), "temporaryLimit": int64(temporary),
		"expiresAt": "2099-01-01T00:00:00Z", "approvalID": "A", "scopedKeyID": "K",
	}
	for name, value := range change {
		spec[name] = value
	}
	return spec
}

// badObject is one that the types cannot hold. Where refused is set, a rule of the
// schema fails on the field, and the API server takes no update of the object, not
// even of its status.
type badObject struct {
	kind, name, field string
	spec              any
	refused           bool
}

// shownAsUndecodable waits until each is shown: in its status, or by an event
// where the API server takes no status.
func (w *world) shownAsUndecodable(all []badObject) {
	w.Helper()
	for _, b := range all {
		object := rawObject(b.kind, w.namespace, b.name)
		if b.refused {
			w.must(kube.Get(w.ctx, client.ObjectKeyFromObject(object), object))
			// Each manager tells it once.
			w.eventually("an event tells it", func() (string, bool) {
				told := w.told(object)
				return show(told), slices.Contains(told, v1alpha1.EventStalled)
			})
		} else {
			object = w.undecodable(b.kind, b.name, b.field)
			w.eventuallyTold(object, v1alpha1.EventStalled)
		}
		if len(object.GetFinalizers()) != 0 {
			w.Errorf("%s %s is held by %v", b.kind, b.name, object.GetFinalizers())
		}
	}
}

// Goal: objects that cannot be decoded are shown as such and change nothing in the
// ledger, the others of their kind go on, what stands for them is still ended, and
// they recover when they are mended. Method: the real schemas are taken away while
// the objects are created or damaged, and put back; a manager sees some come by its
// list and some by its watch.
func TestUndecodable(t *testing.T) {
	w := newWorldAlone(t, func(s *settings) { s.options.OrphanInterval = 100 * time.Millisecond })
	for _, name := range []string{"good", "kept", "revoked", "closed"} {
		w.createBucket(name)
	}
	for _, name := range []string{"kept", "revoked", "closed"} {
		w.createLease(name, name)
		w.leaseState(name, v1alpha1.RaiseStateActive)
	}
	bad := []badObject{
		{kindBucket, "string-for-int", "spec.limit", map[string]any{"limit": "100"}, false},
		{kindBucket, "overflow", "spec.reservations", map[string]any{"limit": int64(100), "reservations": map[string]any{"maxTTLSeconds": int64(1) << 40}}, false},
		{kindBucket, "string-for-object", "spec.raises", map[string]any{"limit": int64(100), "raises": "all"}, false},
		{kindBucket, "no-limit", "spec.limit", map[string]any{"tenantID": "t"}, false},
		{kindLease, "date", "spec.expiresAt", leaseSpec(map[string]any{"expiresAt": "2026-02-31T00:00:00Z"}), false},
		{kindLease, "words", "spec.startsAt", leaseSpec(map[string]any{"startsAt": "tomorrow"}), false},
		{kindLease, "object-for-string", "spec.approvalID", leaseSpec(map[string]any{"approvalID": map[string]any{"a": "b"}}), true},
		{kindLease, "string-for-number", "spec.normalLimit", leaseSpec(map[string]any{"normalLimit": "100"}), true},
	}
	// Events are sent after what they tell of: who stops takes those along.
	w.eventuallyTold(w.stored(kindLease, "kept"), v1alpha1.EventRaiseActivated)
	w.stop()
	w.withoutSchemas(func() {
		for _, b := range bad {
			w.createRaw(b.kind, b.name, b.spec)
		}
	})
	w.run(w.settings)
	w.shownAsUndecodable(bad)
	w.withoutSchemas(func() {
		for _, name := range []string{"kept", "revoked"} {
			w.patch(rawObject(kindLease, w.namespace, name), `{"spec": {"expiresAt": "tomorrow"}}`)
		}
		w.patch(rawObject(kindBucket, w.namespace, "closed"), `{"spec": {"limit": {"tokens": 5}, "deletionPolicy": 7}}`)
	})
	all := func() {
		w.shownAsUndecodable(bad)
		for _, name := range []string{"kept", "revoked"} {
			w.undecodable(kindLease, name, "spec.expiresAt")
		}
		w.undecodable(kindBucket, "closed", "spec.deletionPolicy")
	}
	all()
	told := func() {
		w.eventuallyTold(w.undecodable(kindBucket, "overflow", "spec.reservations"), v1alpha1.EventStalled)
		w.eventuallyTold(w.undecodable(kindLease, "kept", "spec.expiresAt"), v1alpha1.EventRaiseActivated, v1alpha1.EventStalled)
	}
	told()

	// The others go on, also under another manager.
	w.restart()
	w.createBucket("later")
	w.createLease("later", "later")
	w.leaseState("later", v1alpha1.RaiseStateActive)
	w.createLease("unready", "string-for-object")
	w.leaseIs("unready", "waits", func(l *v1alpha1.TemporaryLimitLease) bool {
		return reasonIs(l.Status.Conditions, v1alpha1.ConditionReconciling, v1alpha1.ReasonBucketNotReady)
	})
	all()
	for _, b := range bad {
		if b.kind == kindBucket {
			if _, err := w.ledger.Inspect(w.ctx, w.key(b.name)); !ledger.HasCode(err, ledger.CodeBucketNotFound) {
				t.Errorf("the ledger holds the bucket of %s (%v)", b.name, err)
			}
			continue
		}
		object := rawObject(b.kind, w.namespace, b.name)
		w.must(kube.Get(w.ctx, client.ObjectKeyFromObject(object), object))
		if _, err := w.store.Raise(w.ctx, clusterID, string(object.GetUID())); !ledger.HasCode(err, ledger.CodeRaiseNotFound) {
			t.Errorf("the ledger holds a raise of %s (%v)", b.name, err)
		}
	}
	for _, name := range []string{"kept", "revoked", "closed"} {
		if s := w.snapshot(w.key(name)); s.Limit != temporary || s.Closed {
			t.Errorf("%s: limit %d, closed %v, want the raise to stay", name, s.Limit, s.Closed)
		}
	}
	told()
	w.undecodableAreEnded(bad[1].name)
}

// Goal: where the API server refuses every update of an object, the one that lets
// it go included, what it stood for is ended all the same, an event says what
// holds it, and mending lets it go.
func TestUndecodableAndHeldBack(t *testing.T) {
	w := newWorldAlone(t)
	w.createBucket("stuck")
	w.createBucket("raised")
	w.createLease("stuck", "raised")
	w.leaseState("stuck", v1alpha1.RaiseStateActive)
	w.bucketReady("stuck")
	bucket, lease := w.stored(kindBucket, "stuck"), w.stored(kindLease, "stuck")
	// Events are sent after what they tell of: who stops takes those along.
	w.eventuallyTold(bucket, v1alpha1.EventBucketOpened)
	w.eventuallyTold(lease, v1alpha1.EventRaiseActivated)
	w.stop()
	w.withoutSchemas(func() {
		w.patch(bucket, `{"spec": {"reservations": {"maxTTLSeconds": 1099511627776, "defaultTTLSeconds": "x"}}}`)
		w.patch(lease, `{"spec": {"temporaryLimit": "300"}}`)
	})
	w.run(w.settings)
	w.remove(bucket)
	w.remove(lease)
	w.eventuallyTold(bucket, v1alpha1.EventBucketOpened, v1alpha1.EventStalled)
	w.eventuallyTold(lease, v1alpha1.EventRaiseActivated, v1alpha1.EventStalled)
	w.eventually("what the objects stood for has ended", func() (string, bool) {
		raised, stuck := w.snapshot(w.key("raised")), w.snapshot(w.key("stuck"))
		return show(raised) + show(stuck), raised.Limit == normal && stuck.Closed
	})
	w.patch(bucket, `{"spec": {"reservations": {"maxTTLSeconds": 3600, "defaultTTLSeconds": 60}}}`)
	w.eventuallyGone(bucket)
	w.withoutSchemas(func() { w.patch(lease, `{"spec": {"temporaryLimit": 300}}`) })
	w.eventuallyGone(lease)
}

// undecodableAreEnded goes on with what TestUndecodable has made.
func (w *world) undecodableAreEnded(mended string) {
	w.Helper()
	for _, object := range []*unstructured.Unstructured{
		rawObject(kindLease, w.namespace, "revoked"), rawObject(kindLease, w.namespace, "date"),
		rawObject(kindBucket, w.namespace, "closed"), rawObject(kindBucket, w.namespace, "no-limit"),
	} {
		w.remove(object)
		w.eventuallyGone(object)
	}
	if s := w.snapshot(w.key("revoked")); s.Limit != normal || s.ActiveRaise != nil {
		w.Errorf("limit %d after an undecodable lease was deleted, want %d", s.Limit, normal)
	}
	if s := w.snapshot(w.key("closed")); s.Limit != normal || !s.Closed {
		w.Errorf("limit %d, closed %v after an undecodable bucket was deleted", s.Limit, s.Closed)
	}
	// The name is free for an object that can be read.
	w.createLease("date", "good")
	w.leaseState("date", v1alpha1.RaiseStateActive)

	w.patch(rawObject(kindBucket, w.namespace, mended), `{"spec": {"reservations": {"maxTTLSeconds": 3600}}}`)
	w.bucketReady(mended)
	w.patch(rawObject(kindBucket, w.namespace, "string-for-object"), `{"spec": {"raises": {"mode": "Enforce", "maxLimit": 1000, "maxDurationSeconds": 7200}}}`)
	w.bucketReady("string-for-object")
	w.leaseState("unready", v1alpha1.RaiseStateActive)

	w.advance(2 * time.Hour)
	w.rawIs(kindLease, "kept", "has ended and is let go", func(conditions []metav1.Condition, object *unstructured.Unstructured) bool {
		state, _, _ := unstructured.NestedString(object.Object, "status", "state")
		return state == string(v1alpha1.RaiseStateRestored) && isTrue(conditions, v1alpha1.ConditionEnded) && len(object.GetFinalizers()) == 0
	})
	if s := w.snapshot(w.key("kept")); s.Limit != normal {
		w.Errorf("limit %d after the expiry of an undecodable lease, want %d", s.Limit, normal)
	}
}
