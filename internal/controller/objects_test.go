package controller_test

import (
	"encoding/json"
	"slices"
	"time"

	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/internal/ledger"
)

const (
	normal    = 100
	temporary = 300
)

// createBucket creates a TokenBucket that accepts raises.
func (w *world) createBucket(name string, change ...func(*v1alpha1.TokenBucket)) *v1alpha1.TokenBucket {
	w.Helper()
	b := &v1alpha1.TokenBucket{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name},
		Spec: v1alpha1.TokenBucketSpec{
			Limit:  normal,
			Raises: &v1alpha1.RaisePolicy{Mode: v1alpha1.RaiseModeEnforce, MaxLimit: 1000, MaxDurationSeconds: 7200},
		},
	}
	for _, f := range change {
		f(b)
	}
	w.must(kube.Create(w.ctx, b, client.FieldOwner(tester)))
	return b
}

// createLease creates a lease that starts at once and lasts an hour.
func (w *world) createLease(name, bucket string, change ...func(*v1alpha1.TemporaryLimitLease)) *v1alpha1.TemporaryLimitLease {
	w.Helper()
	lease := &v1alpha1.TemporaryLimitLease{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: w.namespace, Name: name,
			Annotations: map[string]string{v1alpha1.RequestedByAnnotation: "  Ada\tLovelace "},
		},
		Spec: v1alpha1.TemporaryLimitLeaseSpec{
			BucketRef: v1alpha1.BucketReference{Name: bucket}, NormalLimit: normal, TemporaryLimit: temporary,
			ExpiresAt:  metav1.NewTime(w.now().Add(time.Hour)),
			ApprovalID: v1alpha1.Identifier("CHG-" + name), ScopedKeyID: "key-1",
		},
	}
	for _, f := range change {
		f(lease)
	}
	w.must(kube.Create(w.ctx, lease, client.FieldOwner(tester)))
	return lease
}

func (w *world) remove(object client.Object) {
	w.Helper()
	w.must(client.IgnoreNotFound(kube.Delete(w.ctx, object)))
}

func (w *world) eventuallyGone(object client.Object) {
	w.Helper()
	w.eventually("the object is gone", func() (string, bool) {
		err := kube.Get(w.ctx, client.ObjectKeyFromObject(object), object)
		return show(object), apierrors.IsNotFound(err)
	})
}

// bucketIs waits until a TokenBucket is as asked.
func (w *world) bucketIs(name, what string, ok func(*v1alpha1.TokenBucket) bool) *v1alpha1.TokenBucket {
	w.Helper()
	b := &v1alpha1.TokenBucket{}
	w.eventually("TokenBucket "+name+" "+what, func() (string, bool) {
		*b = v1alpha1.TokenBucket{}
		if err := kube.Get(w.ctx, client.ObjectKey{Namespace: w.namespace, Name: name}, b); err != nil {
			return err.Error(), false
		}
		return show(b), ok(b)
	})
	return b
}

func (w *world) leaseIs(name, what string, ok func(*v1alpha1.TemporaryLimitLease) bool) *v1alpha1.TemporaryLimitLease {
	w.Helper()
	lease := &v1alpha1.TemporaryLimitLease{}
	w.eventually("TemporaryLimitLease "+name+" "+what, func() (string, bool) {
		*lease = v1alpha1.TemporaryLimitLease{}
		if err := kube.Get(w.ctx, client.ObjectKey{Namespace: w.namespace, Name: name}, lease); err != nil {
			return err.Error(), false
		}
		return show(lease), ok(lease)
	})
	return lease
}

func (w *world) bucketReady(name string) *v1alpha1.TokenBucket {
	w.Helper()
	return w.bucketIs(name, "is ready", func(b *v1alpha1.TokenBucket) bool {
		return b.Status.ObservedGeneration == b.Generation && isTrue(b.Status.Conditions, v1alpha1.ConditionReady)
	})
}

func (w *world) leaseState(name string, state v1alpha1.RaiseState) *v1alpha1.TemporaryLimitLease {
	w.Helper()
	return w.leaseIs(name, "is "+string(state), func(l *v1alpha1.TemporaryLimitLease) bool { return l.Status.State == state })
}

func (w *world) leaseEnded(name string, state v1alpha1.RaiseState) *v1alpha1.TemporaryLimitLease {
	w.Helper()
	return w.leaseIs(name, "has ended "+string(state)+" and is let go", func(l *v1alpha1.TemporaryLimitLease) bool {
		return l.Status.State == state && isTrue(l.Status.Conditions, v1alpha1.ConditionEnded) && len(l.Finalizers) == 0
	})
}

// snapshot is the bucket in the ledger.
func (w *world) snapshot(key string) ledger.Snapshot {
	w.Helper()
	snapshot, err := w.ledger.Inspect(w.ctx, key)
	w.must(err)
	return snapshot
}

// audited counts the audit rows of a kind.
func (w *world) audited(key string, event ledger.AuditEvent) int {
	w.Helper()
	rows, err := w.store.Audit(w.ctx, key, 0, 1000)
	w.must(err)
	count := 0
	for _, row := range rows {
		if row.Event == event {
			count++
		}
	}
	return count
}

// eventuallyTold waits until the events on an object have these reasons, in any
// order and each once.
func (w *world) eventuallyTold(about client.Object, reasons ...string) {
	w.Helper()
	slices.Sort(reasons)
	w.eventually("the events are told", func() (string, bool) {
		told := w.told(about)
		return show(told), slices.Equal(told, reasons)
	})
}

// told lists the reasons of the events on an object, sorted.
func (w *world) told(about client.Object) []string {
	w.Helper()
	var list eventsv1.EventList
	w.must(kube.List(w.ctx, &list, client.InNamespace(about.GetNamespace())))
	var told []string
	for _, e := range list.Items {
		if e.Regarding.UID == about.GetUID() {
			told = append(told, e.Reason)
		}
	}
	slices.Sort(told)
	return told
}

func (w *world) key(name string) string { return w.namespace + "/" + name }

// patch changes a part of an object, as `kubectl patch --type=merge` does.
func (w *world) patch(object client.Object, body string) {
	w.Helper()
	w.must(kube.Patch(w.ctx, object, client.RawPatch(types.MergePatchType, []byte(body)), client.FieldOwner(tester)))
}

func (w *world) patchStatus(object client.Object, body string) {
	w.Helper()
	w.must(kube.Status().Patch(w.ctx, object, client.RawPatch(types.MergePatchType, []byte(body)), client.FieldOwner(tester)))
}

func isTrue(conditions []metav1.Condition, kind string) bool {
	return meta.IsStatusConditionTrue(conditions, kind)
}

func reasonIs(conditions []metav1.Condition, kind, reason string) bool {
	c := meta.FindStatusCondition(conditions, kind)
	return c != nil && c.Reason == reason
}

func show(value any) string {
	if object, ok := value.(client.Object); ok {
		object, _ = object.DeepCopyObject().(client.Object)
		object.SetManagedFields(nil)
		value = object
	}
	text, err := json.MarshalIndent(value, "", " ")
	if err != nil {
		return err.Error()
	}
	return string(text)
}
