package controller

import (
	"context"
	"sync"
	"time"

	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/internal/fault"
	"github.com/token-lease/operator/internal/ledger"
)

// bucketReconciler tells the ledger what TokenBuckets declare and shows what the
// ledger holds.
type bucketReconciler struct {
	Options
	writer
	clock func() time.Time
	usage *usageTimes
}

// Reconcile makes one pass over a TokenBucket.
func (r *bucketReconciler) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	b := &v1alpha1.TokenBucket{}
	if err := r.client.Get(ctx, request.NamespacedName, b); err != nil {
		if client.IgnoreNotFound(err) == nil {
			r.usage.forget(request.NamespacedName)
		}
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	plan := decideBucket(b, r.ClusterID, r.trusts(b.Namespace))
	if plan == (bucketPlan{}) {
		return ctrl.Result{}, nil
	}
	if plan.declare != nil {
		if err := r.addFinalizer(ctx, b); err != nil {
			return afterWrite(err)
		}
	}
	found := r.act(ctx, plan)
	if ctx.Err() != nil {
		return ctrl.Result{}, ctx.Err()
	}
	return r.report(ctx, b, found)
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
func (r *bucketReconciler) report(ctx context.Context, b *v1alpha1.TokenBucket, found bucketFinding) (ctrl.Result, error) {
	now := r.clock()
	if found.closing != nil && found.closing.Done {
		ended := closedNotices(b)
		if err := r.removeFinalizer(ctx, b); err != nil {
			return afterWrite(err)
		}
		r.emit(b, ended)
		return ctrl.Result{}, nil
	}
	key := client.ObjectKeyFromObject(b)
	before := b.DeepCopy()
	b.Status = bucketStatus(b, found, now)
	if onlyUsageDiffers(&before.Status, &b.Status) {
		if wait := r.usage.wait(key, now, r.UsageInterval); wait > 0 {
			return ctrl.Result{RequeueAfter: wait}, nil
		}
	}
	next := b.Status.DeepCopy()
	wrote, err := r.writeStatus(ctx, before, b)
	if err != nil {
		return afterWrite(err)
	}
	if wrote {
		r.usage.wrote(key, now)
		r.emit(b, bucketNotices(&before.Status, next, found))
	}
	return r.nextLook(found)
}

// nextLook is when to come back although nothing happens. Reservations run out
// without anybody being told, so while there are any, their figure is refreshed.
func (r *bucketReconciler) nextLook(found bucketFinding) (ctrl.Result, error) {
	switch {
	case found.failure != nil && found.failure.after == 0:
		return ctrl.Result{}, found.failure
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

// usageTimes remembers when the status of each bucket was written last. It holds
// one entry for each TokenBucket.
type usageTimes struct {
	mutex sync.Mutex
	last  map[client.ObjectKey]time.Time
}

func newUsageTimes() *usageTimes { return &usageTimes{last: map[client.ObjectKey]time.Time{}} }

// wait is how long usage figures must still be held back.
func (u *usageTimes) wait(key client.ObjectKey, now time.Time, interval time.Duration) time.Duration {
	u.mutex.Lock()
	defer u.mutex.Unlock()
	last, known := u.last[key]
	if !known || now.Before(last) {
		return 0
	}
	return last.Add(interval).Sub(now)
}

func (u *usageTimes) wrote(key client.ObjectKey, now time.Time) {
	u.mutex.Lock()
	defer u.mutex.Unlock()
	u.last[key] = now
}

func (u *usageTimes) forget(key client.ObjectKey) {
	u.mutex.Lock()
	defer u.mutex.Unlock()
	delete(u.last, key)
}
