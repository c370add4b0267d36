package e2e_test

import (
	"errors"
	"testing"

	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/token-lease/operator/api/v1alpha1"
)

// want is a condition that a test waits for; without reason any will do.
type want struct {
	condition string
	status    metav1.ConditionStatus
	reason    string
}

func isTrue(condition string) want  { return want{condition, metav1.ConditionTrue, ""} }
func isFalse(condition string) want { return want{condition, metav1.ConditionFalse, ""} }

func (w want) because(reason string) want {
	w.reason = reason
	return w
}

// met reports whether conditions are as wanted, and are about the generation.
func met(conditions []metav1.Condition, generation int64, wanted []want) bool {
	for _, w := range wanted {
		c := meta.FindStatusCondition(conditions, w.condition)
		if c == nil || c.Status != w.status || (w.reason != "" && c.Reason != w.reason) || c.ObservedGeneration != generation {
			return false
		}
	}
	return true
}

// What a lease looks like in its states.
var (
	active = []want{
		isTrue(v1alpha1.ConditionReady), isTrue(v1alpha1.ConditionActive), isFalse(v1alpha1.ConditionRestored),
		isFalse(v1alpha1.ConditionEnded), isFalse(v1alpha1.ConditionReviewRequired),
	}
	restored = []want{
		isTrue(v1alpha1.ConditionReady), isFalse(v1alpha1.ConditionActive), isTrue(v1alpha1.ConditionRestored),
		isTrue(v1alpha1.ConditionEnded), isFalse(v1alpha1.ConditionReviewRequired),
	}
	// underReview is a raise that ran and found another limit at its end.
	underReview = []want{
		isTrue(v1alpha1.ConditionReady), isFalse(v1alpha1.ConditionActive), isFalse(v1alpha1.ConditionRestored),
		isTrue(v1alpha1.ConditionEnded), isTrue(v1alpha1.ConditionReviewRequired).because(v1alpha1.ReasonLimitChanged),
	}
	// pending is a raise that is stored and waits for its start.
	pending = []want{
		isTrue(v1alpha1.ConditionReady).because(v1alpha1.ReasonPending), isFalse(v1alpha1.ConditionActive),
		isFalse(v1alpha1.ConditionEnded),
	}
	// waiting is a raise that waits for another one to end.
	waiting = []want{
		isTrue(v1alpha1.ConditionReady).because(v1alpha1.ReasonBucketAlreadyRaised), isFalse(v1alpha1.ConditionActive),
		isFalse(v1alpha1.ConditionEnded), isFalse(v1alpha1.ConditionReviewRequired),
	}
	// inSync is a bucket whose limit is the declared one.
	inSync = []want{
		isTrue(v1alpha1.ConditionReady), isTrue(v1alpha1.ConditionLimitInSync), isFalse(v1alpha1.ConditionRaised),
	}
)

// neverRan is a raise that ended without having started.
func neverRan(reason string) []want {
	return []want{
		isFalse(v1alpha1.ConditionReady), isTrue(v1alpha1.ConditionStalled).because(reason), isFalse(v1alpha1.ConditionActive),
		isFalse(v1alpha1.ConditionRestored), isTrue(v1alpha1.ConditionEnded).because(reason), isFalse(v1alpha1.ConditionReviewRequired),
	}
}

// waitBucket waits until the bucket of the seed story has the conditions, about
// its present generation.
func (in *installation) waitBucket(t *testing.T, wanted ...want) *v1alpha1.TokenBucket {
	t.Helper()
	return in.waitBucketNamed(t, bucketName, wanted...)
}

// waitBucketNamed is waitBucket for any bucket.
func (in *installation) waitBucketNamed(t *testing.T, name string, wanted ...want) *v1alpha1.TokenBucket {
	t.Helper()
	b := &v1alpha1.TokenBucket{}
	waitFor(t, "bucket "+name+" to be "+asJSON(wantTexts(wanted)), func() (bool, string) {
		if err := in.api.Get(call(t), client.ObjectKey{Namespace: in.namespace, Name: name}, b); err != nil {
			return false, err.Error()
		}
		return b.Status.ObservedGeneration == b.Generation && met(b.Status.Conditions, b.Generation, wanted), asJSON(b.Status)
	})
	return b
}

// waitLedgerUnavailable waits until bucket and lease say that the ledger cannot be
// used. What it holds is unknown then, and so is whether that is what the present
// generation asks for.
func (in *installation) waitLedgerUnavailable(t *testing.T) {
	t.Helper()
	unavailable := []want{
		{v1alpha1.ConditionReady, metav1.ConditionUnknown, v1alpha1.ReasonLedgerUnavailable},
		isTrue(v1alpha1.ConditionReconciling).because(v1alpha1.ReasonLedgerUnavailable),
		isFalse(v1alpha1.ConditionStalled),
	}
	b, l := &v1alpha1.TokenBucket{}, &v1alpha1.TemporaryLimitLease{}
	waitFor(t, "bucket and lease to say that the ledger is unavailable", func() (bool, string) {
		err := errors.Join(
			in.api.Get(call(t), client.ObjectKey{Namespace: in.namespace, Name: bucketName}, b),
			in.api.Get(call(t), client.ObjectKey{Namespace: in.namespace, Name: leaseName}, l))
		if err != nil {
			return false, err.Error()
		}
		return met(b.Status.Conditions, b.Generation, unavailable) && met(l.Status.Conditions, l.Generation, unavailable),
			asJSON(b.Status) + asJSON(l.Status)
	})
}

// waitLease waits until a lease has the conditions, about its present generation.
func (in *installation) waitLease(t *testing.T, name string, wanted []want) *v1alpha1.TemporaryLimitLease {
	t.Helper()
	l := &v1alpha1.TemporaryLimitLease{}
	waitFor(t, "lease "+name+" to be "+asJSON(wantTexts(wanted)), func() (bool, string) {
		if err := in.api.Get(call(t), client.ObjectKey{Namespace: in.namespace, Name: name}, l); err != nil {
			return false, err.Error()
		}
		return l.Status.ObservedGeneration == l.Generation && met(l.Status.Conditions, l.Generation, wanted), asJSON(l.Status)
	})
	return l
}

func wantTexts(wanted []want) []string {
	var texts []string
	for _, w := range wanted {
		text := w.condition + "=" + string(w.status)
		if w.reason != "" {
			text += "/" + w.reason
		}
		texts = append(texts, text)
	}
	return texts
}

// waitGone waits until an object is no longer there.
func (in *installation) waitGone(t *testing.T, object client.Object) {
	t.Helper()
	waitFor(t, object.GetName()+" to be gone", func() (bool, string) {
		err := in.api.Get(call(t), client.ObjectKeyFromObject(object), object)
		if apierrors.IsNotFound(err) {
			return true, ""
		}
		if err != nil {
			return false, err.Error()
		}
		return false, asJSON(object)
	})
}

// waitNoFinalizer waits until the operator lets go of a lease.
func (in *installation) waitNoFinalizer(t *testing.T, name string) {
	t.Helper()
	l := &v1alpha1.TemporaryLimitLease{}
	waitFor(t, "the finalizer of "+name+" to be gone", func() (bool, string) {
		if err := in.api.Get(call(t), client.ObjectKey{Namespace: in.namespace, Name: name}, l); err != nil {
			return false, err.Error()
		}
		return len(l.Finalizers) == 0, asJSON(l.Finalizers)
	})
}

// listEvents lists the events of the namespace.
func (in *installation) listEvents(t *testing.T) []eventsv1.Event {
	t.Helper()
	var list eventsv1.EventList
	if err := in.api.List(call(t), &list, client.InNamespace(in.namespace)); err != nil {
		t.Fatal(err)
	}
	return list.Items
}

func seriesCount(e eventsv1.Event) int {
	if e.Series == nil {
		return 0
	}
	return int(e.Series.Count)
}

// wipeStatus takes the statuses of the seed story's bucket and lease away, as a
// restore from a backup without statuses does.
func (in *installation) wipeStatus(t *testing.T) {
	t.Helper()
	for _, object := range []client.Object{in.bucket(), in.lease(t)} {
		in.patchStatus(t, object, `{"status": null}`)
	}
}

// patchStatus writes to a status, which nobody but the operator should.
func (in *installation) patchStatus(t *testing.T, object client.Object, change string) {
	t.Helper()
	if err := in.api.Status().Patch(call(t), object, client.RawPatch("application/merge-patch+json", []byte(change))); err != nil {
		t.Fatalf("patch the status of %T %s: %v", object, object.GetName(), err)
	}
}
