package controller

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"sync"
	"time"

	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/config/admission"
	"github.com/token-lease/operator/internal/ledger"
)

// The manager's rights on the API: it reads both kinds, patches finalizers and
// status, and writes events. It needs no right to create, replace or delete.
//
// +kubebuilder:rbac:groups=budget.tokenlease.dev,resources=tokenbuckets;temporarylimitleases,verbs=list;watch;patch
// +kubebuilder:rbac:groups=budget.tokenlease.dev,resources=temporarylimitleases,verbs=get
// +kubebuilder:rbac:groups=budget.tokenlease.dev,resources=tokenbuckets/status;temporarylimitleases/status,verbs=patch
// +kubebuilder:rbac:groups=events.k8s.io,resources=events,verbs=create;patch

const (
	// ledgerTimeout bounds one call of the ledger, whose own bounds are tighter. A
	// stuck bucket costs one worker for at most this long.
	ledgerTimeout = 10 * time.Second
	// resyncInterval is when an object is looked at again although nothing
	// happened.
	resyncInterval = 10 * time.Minute
	// waitInterval is when something is looked at again that should come soon.
	waitInterval = 2 * time.Second
	// conflictDelay gives the cache time to catch up with a write.
	conflictDelay = 100 * time.Millisecond

	backoffBase = 200 * time.Millisecond
	// backoffCap keeps recovery prompt after an outage of any length.
	backoffCap = 10 * time.Second

	bucketRefIndex = "spec.bucketRef.name"
)

// Options configure the controllers.
type Options struct {
	// Ledger is required.
	Ledger *ledger.Ledger
	// ClusterID is required: the identity of this cluster as an owner in the
	// ledger. It must never change while the ledger is kept.
	ClusterID string
	// TrustedNamespaces may use bucket keys outside "<namespace>/".
	TrustedNamespaces []string
	// PollInterval is how often changed buckets are looked for; 1 s if it is 0.
	PollInterval time.Duration
	// UsageInterval is the least time between two status writes of one bucket that
	// change nothing but usage figures; 60 s if it is 0.
	UsageInterval time.Duration
	// OrphanInterval is how often raises are looked for whose object is gone; 30 s
	// if it is 0.
	OrphanInterval time.Duration
	// MaxConcurrentReconciles is the number of workers of each controller; 4 if it
	// is 0.
	MaxConcurrentReconciles int
	// ActorOptional takes leases of which nobody can tell who asked for them, and
	// believes what stands in their annotations.
	ActorOptional bool
	// MaxRaiseDuration bounds every raise, whatever the policy of its bucket says;
	// 24 h if it is 0.
	MaxRaiseDuration time.Duration
	// ApprovalPattern is what the approval ID of a new raise must match as a whole; nil
	// takes any.
	ApprovalPattern *regexp.Regexp
}

// DefaultMaxRaiseDuration is how long a raise may last where nobody says otherwise.
const DefaultMaxRaiseDuration = 24 * time.Hour

func (o Options) withDefaults() (Options, error) {
	if o.Ledger == nil || o.ClusterID == "" {
		return o, errors.New("controllers: a ledger and a cluster ID are required")
	}
	if o.PollInterval <= 0 {
		o.PollInterval = time.Second
	}
	if o.UsageInterval <= 0 {
		o.UsageInterval = time.Minute
	}
	if o.OrphanInterval <= 0 {
		o.OrphanInterval = 30 * time.Second
	}
	if o.MaxConcurrentReconciles <= 0 {
		o.MaxConcurrentReconciles = 4
	}
	if o.MaxRaiseDuration <= 0 {
		o.MaxRaiseDuration = DefaultMaxRaiseDuration
	}
	return o, nil
}

// trusts reports whether a namespace may use keys outside "<namespace>/".
func (o Options) trusts(namespace string) bool {
	return slices.Contains(o.TrustedNamespaces, namespace)
}

// SetupWithManager registers both controllers, the index, the mirror and the
// search for orphaned raises. The manager's scheme must come from this package's
// AddToScheme. It may be called again for another manager of the same process.
func SetupWithManager(mgr ctrl.Manager, o Options) error {
	o, err := o.withDefaults()
	if err != nil {
		return err
	}
	err = mgr.GetFieldIndexer().IndexField(context.Background(), &storedLease{}, bucketRefIndex,
		func(object client.Object) []string {
			lease, ok := object.(*storedLease)
			if !ok {
				return nil
			}
			return []string{lease.Spec.BucketRef.Name}
		})
	if err != nil {
		return fmt.Errorf("index leases by bucket: %w", err)
	}
	write := writer{
		refused:  newPerObject[string](),
		client:   client.WithFieldOwner(mgr.GetClient(), v1alpha1.FieldManager),
		recorder: mgr.GetEventRecorder(v1alpha1.FieldManager),
	}
	buckets, leases := newQueue(), newQueue()
	mirrored := newPerObject[*ledger.Snapshot]()
	if err := setupBuckets(mgr, o, write, buckets, mirrored); err != nil {
		return fmt.Errorf("set up the TokenBucket controller: %w", err)
	}
	if err := setupLeases(mgr, o, write, leases); err != nil {
		return fmt.Errorf("set up the TemporaryLimitLease controller: %w", err)
	}
	if err := addGuardCheck(mgr, o); err != nil {
		return fmt.Errorf("set up the look at the admission policies: %w", err)
	}
	if err := mgr.Add(newMirror(mgr.GetCache(), o, buckets, leases, mirrored)); err != nil {
		return fmt.Errorf("set up the mirror: %w", err)
	}
	if err := mgr.Add(newOrphans(mgr.GetCache(), mgr.GetAPIReader(), o)); err != nil {
		return fmt.Errorf("set up the search for orphans: %w", err)
	}
	return nil
}

func setupBuckets(mgr ctrl.Manager, o Options, write writer, queue *queue, mirrored *perObject[*ledger.Snapshot]) error {
	write.refused = newPerObject[string]()
	shall, err := admission.BucketGuard()
	if err != nil {
		return err
	}
	r := &bucketReconciler{
		Options: o, writer: write, clock: time.Now, guard: &guard{reader: mgr.GetAPIReader(), shall: shall},
		written: newPerObject[time.Time](), standing: newPerObject[*ledger.CloseBucket](),
		mirrored: mirrored, shown: newPerObject[int64](), ownWrites: newPerObject[string](),
	}
	return ctrl.NewControllerManagedBy(mgr).
		Named("tokenbucket").
		For(&storedBucket{}, builder.WithPredicates(r.notOwnWrite())).
		WatchesRawSource(queue.source()).
		WithOptions(controllerOptions(o)).
		Complete(r)
}

func setupLeases(mgr ctrl.Manager, o Options, write writer, queue *queue) error {
	write.refused = newPerObject[string]()
	shall, err := admission.LeaseGuard()
	if err != nil {
		return err
	}
	r := &leaseReconciler{
		Options: o, writer: write, clock: time.Now, standing: newPerObject[string](),
		guard: &guard{reader: mgr.GetAPIReader(), shall: shall},
	}
	return ctrl.NewControllerManagedBy(mgr).
		Named("temporarylimitlease").
		For(&storedLease{}).
		Watches(&storedBucket{}, handler.EnqueueRequestsFromMapFunc(r.leasesOf),
			builder.WithPredicates(bucketMattersToLeases())).
		WatchesRawSource(queue.source()).
		WithOptions(controllerOptions(o)).
		Complete(r)
}

func controllerOptions(o Options) controller.Options {
	return controller.Options{
		MaxConcurrentReconciles: o.MaxConcurrentReconciles,
		RateLimiter:             workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](backoffBase, backoffCap),
		// The process builds a manager anew after a loss of leadership.
		SkipNameValidation: ptr.To(true),
	}
}

// queue hands out a controller's work queue once the controller runs. Adding to
// the queue itself never blocks, as a channel would when it is full.
type queue struct {
	once  sync.Once
	ready chan struct{}
	queue workqueue.TypedRateLimitingInterface[reconcile.Request]
}

func newQueue() *queue { return &queue{ready: make(chan struct{})} }

func (q *queue) source() source.Source {
	return source.Func(func(_ context.Context, work workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
		q.once.Do(func() {
			q.queue = work
			close(q.ready)
		})
		return nil
	})
}

// wait returns false if the context ends before the controller runs.
func (q *queue) wait(ctx context.Context) bool {
	select {
	case <-q.ready:
		return true
	case <-ctx.Done():
		return false
	}
}

// add wakes the controller for an object. The caller has waited before.
func (q *queue) add(key client.ObjectKey) { q.queue.Add(reconcile.Request{NamespacedName: key}) }
