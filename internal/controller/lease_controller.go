package controller

import (
	"context"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/internal/fault"
	"github.com/token-lease/operator/internal/ledger"
)

// leaseReconciler stores the raises that TemporaryLimitLeases ask for and shows
// what becomes of them.
type leaseReconciler struct {
	Options
	writer
	clock func() time.Time
	guard *guard
	// standing is the UID under which each lease may have a raise that has not
	// ended.
	standing *perObject[string]
}

// Reconcile makes one pass over a TemporaryLimitLease.
func (r *leaseReconciler) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	lease := &storedLease{}
	if err := r.client.Get(ctx, request.NamespacedName, lease); client.IgnoreNotFound(err) != nil {
		return ctrl.Result{}, err
	}
	// Without an object the UID is empty.
	if lease.UID == "" {
		r.refused.forget(request.NamespacedName)
	}
	if err := r.departed(ctx, request.NamespacedName, string(lease.UID)); err != nil || lease.UID == "" {
		return ctrl.Result{}, err
	}
	in, failed, err := r.gather(ctx, lease)
	switch {
	case ctx.Err() != nil:
		return ctrl.Result{}, ctx.Err()
	case err != nil:
		return ctrl.Result{}, err
	case failed != nil && isSettled(&lease.TemporaryLimitLease):
		// No outage makes a lease that is over less so.
		return ctrl.Result{}, failed.err
	case failed != nil:
		return r.report(ctx, lease, nil, failed)
	}
	plan := decideLease(in)
	if plan.store != nil {
		if err := r.addFinalizer(ctx, lease); err != nil {
			return r.afterWrite(lease, lease.unreadable, err)
		}
		r.standing.store(request.NamespacedName, string(lease.UID))
	}
	record, failed := r.act(ctx, in, plan)
	switch {
	case ctx.Err() != nil:
		return ctrl.Result{}, ctx.Err()
	case plan.letGo:
		r.standing.forget(request.NamespacedName)
		return r.afterWrite(lease, lease.unreadable, r.removeFinalizer(ctx, lease))
	case record == nil && failed == nil:
		return ctrl.Result{}, nil
	}
	return r.report(ctx, lease, record, failed)
}

// departed revokes the raise of an earlier object of the name that is gone without
// having been held until then.
func (r *leaseReconciler) departed(ctx context.Context, key client.ObjectKey, present string) error {
	uid, stands := r.standing.load(key)
	if !stands || uid == present {
		return nil
	}
	record, err := r.record(ctx, uid)
	if err != nil {
		return err
	}
	if record != nil && !record.State.Ended() && record.CurrentUID == uid {
		plan := leasePlan{revoke: &ledger.RevokeRaise{Key: record.BucketKey, UID: uid, Actor: actorUnknown}}
		if _, failed := r.act(ctx, leaseInput{}, plan); failed != nil {
			return failed.err
		}
	}
	r.standing.forget(key)
	return nil
}

// gather reads the ledger's record first: with it, a raise that is over needs no
// bucket.
func (r *leaseReconciler) gather(ctx context.Context, lease *storedLease) (leaseInput, *failure, error) {
	in := leaseInput{
		lease: &lease.TemporaryLimitLease, unreadable: lease.unreadable, cluster: r.ClusterID, trusted: r.trusts(lease.Namespace),
		actorOptional: r.ActorOptional, maxDuration: r.MaxRaiseDuration, approvals: r.ApprovalPattern,
	}
	record, err := r.record(ctx, string(lease.UID))
	if err != nil {
		return in, failureOf(err), nil
	}
	in.record = record
	bucket := &storedBucket{}
	err = r.client.Get(ctx, client.ObjectKey{Namespace: lease.Namespace, Name: lease.Spec.BucketRef.Name}, bucket)
	if err == nil {
		in.bucket, in.bucketUnreadable = &bucket.TokenBucket, bucket.unreadable != ""
	}
	if err = client.IgnoreNotFound(err); err != nil || !asksWho(in) {
		return in, nil, err
	}
	in.guard, err = r.guard.look(ctx)
	return in, nil, err
}

func (r *leaseReconciler) record(ctx context.Context, uid string) (*ledger.Raise, error) {
	ctx, cancel := context.WithTimeout(ctx, ledgerTimeout)
	defer cancel()
	record, err := r.Ledger.Store().Raise(ctx, r.ClusterID, uid)
	if ledger.HasCode(err, ledger.CodeRaiseNotFound) {
		return nil, nil
	}
	return record, err
}

// act is the one call of the ledger that changes something. It returns the record
// as it is afterwards, or as it was before a failure.
func (r *leaseReconciler) act(ctx context.Context, in leaseInput, plan leasePlan) (*ledger.Raise, *failure) {
	if plan.store == nil && plan.revoke == nil && plan.acknowledge == nil {
		return plan.mirror, plan.wait
	}
	ctx, cancel := context.WithTimeout(ctx, ledgerTimeout)
	defer cancel()
	fault.Point("controller.before-ledger")
	defer fault.Point("controller.after-ledger")
	var record *ledger.Raise
	var err error
	switch {
	case plan.store != nil:
		record, err = r.Ledger.StoreRaise(ctx, *plan.store)
	case plan.revoke != nil:
		record, err = r.Ledger.RevokeRaise(ctx, *plan.revoke)
	default:
		record, err = r.Ledger.AcknowledgeReview(ctx, *plan.acknowledge)
	}
	if err != nil {
		return in.record, failureOf(err)
	}
	return record, nil
}

// report writes what was found, then lets an object go whose raise is over.
func (r *leaseReconciler) report(ctx context.Context, lease *storedLease, record *ledger.Raise, failed *failure) (ctrl.Result, error) {
	now := r.clock()
	before := lease.DeepCopy()
	lease.Status = leaseStatus(&lease.TemporaryLimitLease, record, failed, now)
	next := lease.Status.DeepCopy()
	wrote, err := r.writeStatus(ctx, before, lease)
	if err != nil {
		return r.afterWrite(lease, lease.unreadable, err)
	}
	if wrote {
		r.emit(lease, leaseNotices(&before.Status, next, record, failed))
	}
	if record != nil && failed == nil && (record.State.Ended() || !isCurrent(record, &lease.TemporaryLimitLease)) {
		r.standing.forget(client.ObjectKeyFromObject(lease))
		return r.afterWrite(lease, lease.unreadable, r.removeFinalizer(ctx, lease))
	}
	switch {
	case failed != nil && failed.after == 0:
		return ctrl.Result{}, failed.err
	case failed != nil && record != nil && !record.State.Ended():
		return ctrl.Result{RequeueAfter: min(failed.after, wakeAfter(record, now))}, nil
	case failed != nil:
		return ctrl.Result{RequeueAfter: failed.after}, nil
	default:
		return ctrl.Result{RequeueAfter: wakeAfter(record, now)}, nil
	}
}

// isCurrent reports whether the object stands for the raise now. Another
// incarnation of the lease may have taken its place.
func isCurrent(r *ledger.Raise, lease *v1alpha1.TemporaryLimitLease) bool {
	return r.CurrentUID == string(lease.UID)
}

// leasesOf lists the leases that a TokenBucket wakes.
func (r *leaseReconciler) leasesOf(ctx context.Context, bucket client.Object) []reconcile.Request {
	keys, err := unsettledLeases(ctx, r.client, client.ObjectKeyFromObject(bucket))
	if err != nil {
		log.FromContext(ctx).Error(err, "list the leases of a bucket", "bucket", client.ObjectKeyFromObject(bucket))
	}
	requests := make([]reconcile.Request, len(keys))
	for i, key := range keys {
		requests[i] = reconcile.Request{NamespacedName: key}
	}
	return requests
}

// unsettledLeases lists the leases of a bucket that are not over. The reader must
// be the cache, which has the index.
func unsettledLeases(ctx context.Context, reader client.Reader, bucket client.ObjectKey) ([]client.ObjectKey, error) {
	var list storedLeaseList
	err := reader.List(ctx, &list, client.InNamespace(bucket.Namespace),
		client.MatchingFields{bucketRefIndex: bucket.Name}, client.UnsafeDisableDeepCopy)
	if err != nil {
		return nil, err
	}
	var keys []client.ObjectKey
	for i := range list.Items {
		if !isSettled(&list.Items[i].TemporaryLimitLease) {
			keys = append(keys, client.ObjectKeyFromObject(&list.Items[i]))
		}
	}
	return keys, nil
}

// bucketMattersToLeases leaves out updates that only bring usage figures.
func bucketMattersToLeases() predicate.Predicate {
	return predicate.Funcs{
		UpdateFunc: func(e event.UpdateEvent) bool {
			before, ok := e.ObjectOld.(*storedBucket)
			after, okToo := e.ObjectNew.(*storedBucket)
			return ok && okToo && whatLeasesSee(before) != whatLeasesSee(after)
		},
	}
}

// seenByLeases is what a lease wants to know of its bucket.
type seenByLeases struct {
	uid                  string
	deleting, ready      bool
	unreadable           bool
	generation, observed int64
}

func whatLeasesSee(b *storedBucket) seenByLeases {
	return seenByLeases{
		uid: string(b.UID), deleting: !b.DeletionTimestamp.IsZero(), unreadable: b.unreadable != "",
		ready:      meta.IsStatusConditionTrue(b.Status.Conditions, v1alpha1.ConditionReady),
		generation: b.Generation, observed: b.Status.ObservedGeneration,
	}
}
