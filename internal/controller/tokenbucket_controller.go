package controller

import (
	"context"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	"github.com/token-lease/operator/internal/fault"
	"github.com/token-lease/operator/internal/ledger"
)

// bucketReconciler tells the ledger what TokenBuckets declare and shows what the
// ledger holds.
type bucketReconciler struct {
	Options
	writer
	clock func() time.Time
	guard *guard
	// written is when the status of each TokenBucket was written last.
	written *perObject[time.Time]
	// standing is how to close the bucket of each TokenBucket that declared one.
	standing *perObject[*ledger.CloseBucket]
	// mirrored is what the mirror's query said of the bucket of each TokenBucket
	// that it woke, shown the revision that its status was last made of.
	mirrored *perObject[*ledger.Snapshot]
	shown    *perObject[int64]
	// ownWrites is the version that the latest status write made of each
	// TokenBucket: its event brings nothing that the pass has not seen.
	ownWrites *perObject[string]
}

// notOwnWrite leaves out the events of this controller's status writes.
func (r *bucketReconciler) notOwnWrite() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		version, _ := r.ownWrites.load(client.ObjectKeyFromObject(e.ObjectNew))
		return version != e.ObjectNew.GetResourceVersion()
	}}
}

// Reconcile makes one pass over a TokenBucket.
func (r *bucketReconciler) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	b := &storedBucket{}
	err := r.client.Get(ctx, request.NamespacedName, b)
	switch {
	case apierrors.IsNotFound(err):
		return r.departed(ctx, request.NamespacedName)
	case err != nil:
		return ctrl.Result{}, err
	}
	plan := decideBucket(&b.TokenBucket, b.unreadable, r.ClusterID, r.trusts(b.Namespace))
	if plan == (bucketPlan{}) {
		return ctrl.Result{}, nil
	}
	if plan.declare != nil {
		plan.declare.Declaration.Raises = boundedPolicy(plan.declare.Declaration.Raises, r.MaxRaiseDuration)
		if plan.declare.Actor, err = r.guard.name(ctx, plan.declare.Actor, r.ActorOptional); err != nil {
			return ctrl.Result{}, err
		}
		if err := r.addFinalizer(ctx, b); err != nil {
			return r.afterWrite(b, b.unreadable, err)
		}
		r.standing.store(request.NamespacedName, closeRequest(&b.TokenBucket, "", r.ClusterID))
	}
	found := r.observe(ctx, request.NamespacedName, plan)
	if ctx.Err() != nil {
		return ctrl.Result{}, ctx.Err()
	}
	return r.report(ctx, b, found)
}

// observe learns what the ledger holds: from the mirror's query, when that says
// all that a declaration would, else by the one call of the ledger.
func (r *bucketReconciler) observe(ctx context.Context, key client.ObjectKey, plan bucketPlan) bucketFinding {
	snapshot, mirrored := r.mirrored.take(key)
	shown, _ := r.shown.load(key)
	if mirrored && plan.declare != nil && saysItAll(snapshot, shown, plan.declare) {
		// The points stand for the step, whoever answers it.
		fault.Point("controller.before-ledger")
		defer fault.Point("controller.after-ledger")
		return bucketFinding{snapshot: snapshot}
	}
	return r.act(ctx, plan)
}

// departed closes the bucket of an object that is gone without having been held
// until then.
func (r *bucketReconciler) departed(ctx context.Context, key client.ObjectKey) (ctrl.Result, error) {
	if request, stands := r.standing.load(key); stands {
		found := r.act(ctx, bucketPlan{close: request})
		if found.failure != nil || !found.closing.Done {
			return r.nextLook(found)
		}
	}
	r.standing.forget(key)
	r.written.forget(key)
	r.refused.forget(key)
	r.mirrored.forget(key)
	r.shown.forget(key)
	r.ownWrites.forget(key)
	return ctrl.Result{}, nil
}

// act is the one call of the ledger.
func (r *bucketReconciler) act(ctx context.Context, plan bucketPlan) bucketFinding {
	if plan.refuse != nil {
		return bucketFinding{failure: plan.refuse}
	}
	ctx, cancel := context.WithTimeout(ctx, ledgerTimeout)
	defer cancel()
	fault.Point("controller.before-ledger")
	defer fault.Point("controller.after-ledger")
	if plan.close != nil {
		closing, err := r.Ledger.CloseBucket(ctx, *plan.close)
		switch {
		case ledger.HasCode(err, ledger.CodeInvalidInput):
			// What the ledger does not take, it never held.
			return bucketFinding{closing: &ledger.Closing{Done: true}}
		case err != nil:
			return bucketFinding{failure: failureOf(err)}
		}
		return bucketFinding{closing: &closing}
	}
	snapshot, err := r.Ledger.ApplyDeclared(ctx, *plan.declare)
	if err != nil {
		return bucketFinding{failure: failureOf(err)}
	}
	return bucketFinding{snapshot: &snapshot}
}

// report writes what was found, then lets an object go that is done with.
func (r *bucketReconciler) report(ctx context.Context, b *storedBucket, found bucketFinding) (ctrl.Result, error) {
	now, key := r.clock(), client.ObjectKeyFromObject(b)
	if found.closing != nil && found.closing.Done {
		r.standing.forget(key)
		ended := closedNotices(&b.TokenBucket)
		if err := r.removeFinalizer(ctx, b); err != nil {
			return r.afterWrite(b, b.unreadable, err)
		}
		r.emit(b, ended)
		return ctrl.Result{}, nil
	}
	if found.snapshot != nil {
		r.shown.store(key, found.snapshot.Revision)
	}
	before := b.DeepCopy()
	b.Status = bucketStatus(&b.TokenBucket, found, now)
	if onlyUsageDiffers(&before.Status, &b.Status) {
		if wait := r.holdBack(key, now); wait > 0 {
			return ctrl.Result{RequeueAfter: wait}, nil
		}
	}
	next := b.Status.DeepCopy()
	wrote, err := r.writeStatus(ctx, before, b)
	if err != nil {
		return r.afterWrite(b, b.unreadable, err)
	}
	if wrote {
		r.written.store(key, now)
		r.ownWrites.store(key, b.ResourceVersion)
		r.emit(b, bucketNotices(&before.Status, next, found))
	}
	return r.nextLook(found)
}

// nextLook is when to come back although nothing happens. Reservations run out
// without anybody being told, so while there are any, their figure is refreshed.
func (r *bucketReconciler) nextLook(found bucketFinding) (ctrl.Result, error) {
	switch {
	case found.failure != nil && found.failure.after == 0:
		return ctrl.Result{}, found.failure.err
	case found.failure != nil:
		return ctrl.Result{RequeueAfter: found.failure.after}, nil
	case found.closing != nil:
		return ctrl.Result{RequeueAfter: waitInterval}, nil
	case found.snapshot.ReservedTokens > 0:
		return ctrl.Result{RequeueAfter: min(r.UsageInterval, resyncInterval)}, nil
	default:
		return ctrl.Result{RequeueAfter: resyncInterval}, nil
	}
}

// holdBack is how long usage figures of a bucket must not be written yet.
func (r *bucketReconciler) holdBack(key client.ObjectKey, now time.Time) time.Duration {
	last, known := r.written.load(key)
	if !known || now.Before(last) {
		return 0
	}
	return last.Add(r.UsageInterval).Sub(now)
}
