package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"github.com/token-lease/operator/config/admission"
)

// +kubebuilder:rbac:groups=admissionregistration.k8s.io,resources=validatingadmissionpolicies;validatingadmissionpolicybindings,resourceNames=lease-guard.budget.tokenlease.dev;bucket-guard.budget.tokenlease.dev,verbs=get

// guardMargin is how long after it was stored a policy may still be unknown to an
// API server, which looks for new ones each second.
const guardMargin = 3 * time.Second

// guardMemory is how long a look is enough for names that only go into the audit.
const guardMemory = 5 * time.Second

// guardTimeout bounds the look at a policy and its binding.
const guardTimeout = 10 * time.Second

// guard tells whether an admission policy makes the names in annotations true.
//
// A name is true if the policy judged the request that wrote it. Nothing in an
// object proves that, since whatever a policy could leave there, a user could write
// while there is no policy. So the proof is the cluster's: the policy and its binding
// are there, as this program knows them to the letter, and have been since before the
// object was created. That holds against everybody who may not write admission
// policies; who may, can act as anybody anyway. An API server that has been told not
// to judge by policies is not noticed.
type guard struct {
	// reader asks the API server itself: a cache would still know a policy that is
	// gone.
	reader client.Reader
	shall  admission.Guard

	mu     sync.Mutex
	recent guardStanding
	seen   time.Time
}

// guardStanding is how a guard was found. The zero value vouches for nothing.
type guardStanding struct {
	inForce bool
	// missing says what is wrong with the guard when it is not in force.
	missing string
	// since is when the policy or its binding was last written.
	since time.Time
}

// look finds out how the guard stands. An error says that this is not known.
func (g *guard) look(ctx context.Context) (guardStanding, error) {
	ctx, cancel := context.WithTimeout(ctx, guardTimeout)
	defer cancel()
	policy, binding := &admissionv1.ValidatingAdmissionPolicy{}, &admissionv1.ValidatingAdmissionPolicyBinding{}
	for _, object := range []client.Object{policy, binding} {
		name := g.shall.Policy.Name
		err := g.reader.Get(ctx, client.ObjectKey{Name: name}, object)
		switch {
		case apierrors.IsNotFound(err):
			return guardStanding{missing: fmt.Sprintf("%T %s is not there", object, name)[len("*v1."):]}, nil
		case apierrors.IsForbidden(err):
			return guardStanding{missing: "the manager may not read " + name + "; bind the role of config/rbac"}, nil
		case err != nil:
			return guardStanding{}, fmt.Errorf("look for the admission policy %s: %w", name, err)
		case !object.GetDeletionTimestamp().IsZero():
			return guardStanding{missing: fmt.Sprintf("%T %s is being deleted", object, name)[len("*v1."):]}, nil
		}
	}
	return judgeGuard(g.shall, policy, binding), nil
}

// judgeGuard compares what a cluster has with what it shall have.
func judgeGuard(shall admission.Guard, policy *admissionv1.ValidatingAdmissionPolicy, binding *admissionv1.ValidatingAdmissionPolicyBinding) guardStanding {
	switch {
	case !equality.Semantic.DeepEqual(policy.Spec, shall.Policy.Spec):
		return guardStanding{missing: "ValidatingAdmissionPolicy " + policy.Name + " is not the one that belongs to this version"}
	case !equality.Semantic.DeepEqual(binding.Spec, shall.Binding.Spec):
		return guardStanding{missing: "ValidatingAdmissionPolicyBinding " + binding.Name + " is not the one that belongs to this version"}
	}
	since := lastWritten(policy)
	if other := lastWritten(binding); other.After(since) {
		since = other
	}
	return guardStanding{inForce: true, since: since}
}

// lastWritten is when anything but the status of an object was written last. What was
// weakened for a while and then put back must not vouch for that while.
func lastWritten(object client.Object) time.Time {
	last := object.GetCreationTimestamp().Time
	for _, entry := range object.GetManagedFields() {
		if entry.Subresource == "" && entry.Time != nil && entry.Time.After(last) {
			last = entry.Time.Time
		}
	}
	return last
}

// doubt is why the name of who created an object is not to be believed; "" when it
// is. Instants of the API server are whole seconds.
func (s guardStanding) doubt(created metav1.Time) string {
	switch {
	case !s.inForce:
		return cmp.Or(s.missing, "nobody has looked for the admission policies")
	case created.Time.Before(s.since.Add(guardMargin)):
		return "the lease is older than the admission policies (" + instantText(s.since) + "), or as old"
	default:
		return ""
	}
}

// name is a name as the audit shall have it: as it is written while the guard is in
// force, else unknown. Nothing is decided by it.
func (g *guard) name(ctx context.Context, written string, believed bool) (string, error) {
	if believed || written == actorUnknown {
		return written, nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if age := time.Since(g.seen); age < 0 || age > guardMemory {
		found, err := g.look(ctx)
		if err != nil {
			return "", err
		}
		g.recent, g.seen = found, time.Now()
	}
	if !g.recent.inForce {
		return actorUnknown, nil
	}
	return written, nil
}

// addGuardCheck says once, when the controllers start, what is wrong with the guards.
func addGuardCheck(mgr ctrl.Manager, o Options) error {
	if o.ActorOptional {
		return nil
	}
	log := mgr.GetLogger().WithName("admission")
	return mgr.Add(manager.RunnableFunc(func(ctx context.Context) error {
		for _, load := range []func() (admission.Guard, error){admission.LeaseGuard, admission.BucketGuard} {
			shall, err := load()
			if err != nil {
				return err
			}
			found, err := (&guard{reader: mgr.GetAPIReader(), shall: shall}).look(ctx)
			if err == nil && !found.inForce {
				err = errors.New(found.missing)
			}
			if err != nil {
				log.Error(err, "who asks for a raise is not known: leases are refused as ActorUnknown. Apply config/admission, or start with --require-actor=false")
			}
		}
		return nil
	}))
}
