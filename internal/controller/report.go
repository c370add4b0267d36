package controller

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"
	"unicode/utf8"

	jsonpatch "github.com/evanphx/json-patch/v5"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/internal/fault"
)

// writer is the only way in which the operator writes to the API server: merge
// patches with an optimistic lock that name finalizers or status and nothing else.
// A spec is never sent, since decoding and encoding would change its spelling.
type writer struct {
	client   client.Client
	recorder events.EventRecorder
	// refused is the incarnation and generation of each object of which it was told
	// that the API server takes no update.
	refused *perObject[string]
}

// addFinalizer stores the finalizer, unless it is there; object is then as the
// server has it.
func (w writer) addFinalizer(ctx context.Context, object client.Object) error {
	if controllerutil.ContainsFinalizer(object, v1alpha1.LedgerFinalizer) {
		return nil
	}
	fault.Point("controller.before-finalizer")
	return w.patchFinalizers(ctx, object, append(slices.Clone(object.GetFinalizers()), v1alpha1.LedgerFinalizer))
}

// removeFinalizer lets the object go. One that is gone already is no error.
func (w writer) removeFinalizer(ctx context.Context, object client.Object) error {
	if !controllerutil.ContainsFinalizer(object, v1alpha1.LedgerFinalizer) {
		return nil
	}
	fault.Point("controller.before-finalizer-removal")
	rest := slices.DeleteFunc(slices.Clone(object.GetFinalizers()), func(f string) bool { return f == v1alpha1.LedgerFinalizer })
	return client.IgnoreNotFound(w.patchFinalizers(ctx, object, rest))
}

func (w writer) patchFinalizers(ctx context.Context, object client.Object, finalizers []string) error {
	before, ok := object.DeepCopyObject().(client.Object)
	if !ok {
		panic("an API type whose copy is none")
	}
	object.SetFinalizers(finalizers)
	return w.client.Patch(ctx, object, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
}

// writeStatus writes what differs between the two, which must differ in nothing
// but their status, and reports whether there was anything to write.
func (w writer) writeStatus(ctx context.Context, before, after client.Object) (bool, error) {
	difference, err := statusDifference(before, after)
	if err != nil || difference == nil {
		return false, err
	}
	fault.Point("controller.before-status")
	err = w.client.Status().Patch(ctx, after, client.RawPatch(types.MergePatchType, difference))
	if err != nil {
		return false, err
	}
	fault.Point("controller.after-status")
	return true, nil
}

// statusDifference is the merge patch from one status to the next, on condition
// that the object is the one that was read; nil when there is no difference. It
// names nothing but the status, so an unreadable spec cannot be in its way.
func statusDifference(before, after client.Object) ([]byte, error) {
	was, err := statusOf(before)
	if err != nil {
		return nil, err
	}
	if damaged, ok := before.(interface{ storedStatus() json.RawMessage }); ok && damaged.storedStatus() != nil {
		was = damaged.storedStatus()
	}
	is, err := statusOf(after)
	if err != nil {
		return nil, err
	}
	difference, err := jsonpatch.CreateMergePatch(inStatus(was), inStatus(is))
	if err != nil || string(difference) == "{}" {
		return nil, err
	}
	var patch map[string]json.RawMessage
	if err := json.Unmarshal(difference, &patch); err != nil {
		return nil, err
	}
	if patch["metadata"], err = json.Marshal(map[string]string{"resourceVersion": before.GetResourceVersion()}); err != nil {
		return nil, err
	}
	return json.Marshal(patch)
}

func statusOf(object client.Object) (json.RawMessage, error) {
	data, err := json.Marshal(object)
	if err != nil {
		return nil, err
	}
	var parts struct {
		Status json.RawMessage `json:"status"`
	}
	err = json.Unmarshal(data, &parts)
	return parts.Status, err
}

func inStatus(status json.RawMessage) []byte {
	if len(status) == 0 {
		return []byte(`{}`)
	}
	return slices.Concat([]byte(`{"status":`), status, []byte(`}`))
}

// notice is one transition to tell, as an event.
type notice struct {
	warning bool
	reason  string
	action  string
	note    string
}

func (w writer) emit(about client.Object, happened []notice) {
	for _, e := range happened {
		kind := corev1.EventTypeNormal
		if e.warning {
			kind = corev1.EventTypeWarning
		}
		w.recorder.Eventf(about, nil, kind, e.reason, e.action, "%s", bounded(e.note))
	}
}

// afterWrite turns the error of a write into what the queue should do. A conflict
// means that the pass worked on an old copy: the next one works on a newer one.
//
// An object may stand in the store that the schema would not let in. Then a rule
// that fails to evaluate refuses every update, that of the status and that of a
// finalizer too, until somebody corrects the object: an event is all that can tell.
func (w writer) afterWrite(about client.Object, unreadable string, err error) (ctrl.Result, error) {
	switch {
	case apierrors.IsConflict(err):
		return ctrl.Result{RequeueAfter: conflictDelay}, nil
	case !apierrors.IsInvalid(err):
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	key, state := client.ObjectKeyFromObject(about), fmt.Sprint(about.GetUID(), "/", about.GetGeneration())
	if told, _ := w.refused.load(key); told != state {
		w.refused.store(key, state)
		note := "The API server refuses to store the status or to remove the finalizer. Correct the object, or its finalizer stays: " + unreadable
		if unreadable == "" {
			note += err.Error()
		}
		w.emit(about, []notice{{warning: true, reason: v1alpha1.EventStalled, action: "Update", note: note}})
	}
	return ctrl.Result{RequeueAfter: resyncInterval}, nil
}

// conditions sets conditions that are about one generation.
type conditions struct {
	list       *[]metav1.Condition
	generation int64
	now        time.Time
}

func (c conditions) set(kind string, status metav1.ConditionStatus, reason, message string) {
	meta.SetStatusCondition(c.list, metav1.Condition{
		Type: kind, Status: status, Reason: reason, Message: bounded(message),
		ObservedGeneration: c.generation,
		LastTransitionTime: metav1.NewTime(c.now.UTC().Truncate(time.Second)),
	})
}

func (c conditions) truth(kind string, is bool, reason, message string) {
	status := metav1.ConditionFalse
	if is {
		status = metav1.ConditionTrue
	}
	c.set(kind, status, reason, message)
}

// complete adds the conditions that a status does not have yet: every kind is
// there once an object was seen, so that nobody waits for one that never comes.
func (c conditions) complete(reason string, kinds ...string) {
	for _, kind := range kinds {
		if meta.FindStatusCondition(*c.list, kind) == nil {
			c.set(kind, metav1.ConditionUnknown, reason, "The ledger has not told yet.")
		}
	}
}

// settled sets the three conditions that kstatus reads, for an object that is
// where its spec wants it.
func (c conditions) settled(reason, message string) {
	c.set(v1alpha1.ConditionReady, metav1.ConditionTrue, reason, message)
	c.set(v1alpha1.ConditionReconciling, metav1.ConditionFalse, reason, "")
	c.set(v1alpha1.ConditionStalled, metav1.ConditionFalse, reason, "")
}

// failed sets them for an object that is not.
func (c conditions) failed(f *failure) {
	ready := metav1.ConditionFalse
	if f.unknown {
		ready = metav1.ConditionUnknown
	}
	c.set(v1alpha1.ConditionReady, ready, f.reason, f.message)
	working, stuck := f.message, ""
	if f.stalled {
		working, stuck = stuck, working
	}
	c.truth(v1alpha1.ConditionReconciling, !f.stalled, f.reason, working)
	c.truth(v1alpha1.ConditionStalled, f.stalled, f.reason, stuck)
}

// becameTrue reports whether a condition is true now and was not, or was for
// another reason.
func becameTrue(before, after []metav1.Condition, kind string) (*metav1.Condition, bool) {
	now := meta.FindStatusCondition(after, kind)
	if now == nil || now.Status != metav1.ConditionTrue {
		return nil, false
	}
	was := meta.FindStatusCondition(before, kind)
	return now, was == nil || was.Status != metav1.ConditionTrue || was.Reason != now.Reason
}

// becameFalse reports whether a condition is false now and was not.
func becameFalse(before, after []metav1.Condition, kind string) (*metav1.Condition, bool) {
	now := meta.FindStatusCondition(after, kind)
	if now == nil || now.Status != metav1.ConditionFalse {
		return nil, false
	}
	return now, !meta.IsStatusConditionFalse(before, kind)
}

// bounded cuts a message so that no error text outgrows the object.
func bounded(message string) string {
	const more = "..."
	if len(message) < v1alpha1.MaxConditionMessageBytes {
		return message
	}
	end := v1alpha1.MaxConditionMessageBytes - 1 - len(more)
	for end > 0 && !utf8.RuneStart(message[end]) {
		end--
	}
	return message[:end] + more
}
