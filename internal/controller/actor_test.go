package controller

import (
	"regexp"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/config/admission"
	"github.com/token-lease/operator/internal/ledger"
)

// Goal: a guard vouches only if policy and binding are those of this version, and only
// for what was created clearly after both were written last; a write of their status
// does not count.
func TestGuardVouches(t *testing.T) {
	shall, err := admission.LeaseGuard()
	if err != nil {
		t.Fatal(err)
	}
	entry := func(subresource string, at time.Time) metav1.ManagedFieldsEntry {
		return metav1.ManagedFieldsEntry{Subresource: subresource, Time: ptr.To(metav1.NewTime(at))}
	}
	for _, c := range []struct {
		name    string
		change  func(*admissionv1.ValidatingAdmissionPolicy, *admissionv1.ValidatingAdmissionPolicyBinding)
		created time.Time
		doubt   string
	}{
		{"in force", nil, testNow.Add(guardMargin), ""},
		{"a lease as old as the policy", nil, testNow.Add(guardMargin - time.Second), "older than the admission policies"},
		{"a lease from before", nil, testNow.Add(-time.Hour), "older than the admission policies"},
		{"a validation taken away", func(p *admissionv1.ValidatingAdmissionPolicy, _ *admissionv1.ValidatingAdmissionPolicyBinding) {
			p.Spec.Validations = p.Spec.Validations[1:]
		}, testNow.Add(time.Hour), "ValidatingAdmissionPolicy " + shall.Policy.Name + " is not the one"},
		{"a binding that only warns", func(_ *admissionv1.ValidatingAdmissionPolicy, b *admissionv1.ValidatingAdmissionPolicyBinding) {
			b.Spec.ValidationActions = []admissionv1.ValidationAction{admissionv1.Warn}
		}, testNow.Add(time.Hour), "ValidatingAdmissionPolicyBinding " + shall.Binding.Name + " is not the one"},
		{"weakened and put back", func(p *admissionv1.ValidatingAdmissionPolicy, _ *admissionv1.ValidatingAdmissionPolicyBinding) {
			p.ManagedFields = append(p.ManagedFields, entry("", testNow.Add(2*time.Hour)))
		}, testNow.Add(time.Hour), "older than the admission policies"},
		{"a binding put back", func(_ *admissionv1.ValidatingAdmissionPolicy, b *admissionv1.ValidatingAdmissionPolicyBinding) {
			b.CreationTimestamp = metav1.NewTime(testNow.Add(2 * time.Hour))
		}, testNow.Add(time.Hour), "older than the admission policies"},
		{"a status written later", func(p *admissionv1.ValidatingAdmissionPolicy, _ *admissionv1.ValidatingAdmissionPolicyBinding) {
			p.ManagedFields = append(p.ManagedFields, entry("status", testNow.Add(2*time.Hour)))
		}, testNow.Add(time.Hour), ""},
	} {
		policy, binding := shall.Policy.DeepCopy(), shall.Binding.DeepCopy()
		policy.CreationTimestamp, binding.CreationTimestamp = metav1.NewTime(testNow), metav1.NewTime(testNow)
		if c.change != nil {
			c.change(policy, binding)
		}
		doubt := judgeGuard(shall, policy, binding).doubt(metav1.NewTime(c.created))
		if (doubt == "") != (c.doubt == "") || !strings.Contains(doubt, c.doubt) {
			t.Errorf("%s: doubt %q, want %q", c.name, doubt, c.doubt)
		}
	}
	if (guardStanding{}).doubt(metav1.NewTime(testNow)) == "" {
		t.Error("a guard that nobody has looked for vouches")
	}
}

// Goal: without somebody who vouches nothing new is stored and nothing is acknowledged,
// while what is stored can be shortened, by an unknown hand.
func TestDecideLeaseWithoutAnActor(t *testing.T) {
	inForce := guardStanding{inForce: true, since: testNow.Add(-time.Hour)}
	shortened := testLease(func(l *v1alpha1.TemporaryLimitLease) {
		l.Spec.ExpiresAt = metav1.NewTime(testNow.Add(time.Minute))
		l.Annotations = map[string]string{v1alpha1.ShortenedByAnnotation: "Eve"}
	})
	looked := testLease(func(l *v1alpha1.TemporaryLimitLease) {
		l.Annotations = map[string]string{v1alpha1.AcknowledgedAnnotation: "yes", v1alpha1.AcknowledgedByAnnotation: "Rita"}
	})
	active := testRaise(ledger.RaiseActive, ledger.ReasonNone)
	open := testRaise(ledger.RaiseFailed, ledger.ReasonLimitChanged, ran, func(r *ledger.Raise) { r.ReviewRequired = true })
	for _, c := range []struct {
		name  string
		in    leaseInput
		asks  bool
		check func(leasePlan) bool
	}{
		{"new, nobody vouches", leaseInput{lease: testLease(), bucket: testBucket()}, true, func(p leasePlan) bool {
			return p.store == nil && p.wait != nil && p.wait.reason == v1alpha1.ReasonActorUnknown && p.wait.stalled
		}},
		{"new, vouched for", leaseInput{lease: testLease(), bucket: testBucket(), guard: inForce}, true, func(p leasePlan) bool { return p.store != nil }},
		{"new, not required", leaseInput{lease: testLease(), bucket: testBucket(), actorOptional: true}, false, func(p leasePlan) bool { return p.store != nil }},
		{"stored", leaseInput{lease: testLease(), bucket: testBucket(), record: active}, false, func(p leasePlan) bool { return p.store != nil }},
		{"shortened, nobody vouches", leaseInput{lease: shortened, bucket: testBucket(), record: active}, true, func(p leasePlan) bool {
			return p.store != nil && p.store.ShortenedBy == actorUnknown
		}},
		{"shortened, vouched for", leaseInput{lease: shortened, bucket: testBucket(), record: active, guard: inForce}, true, func(p leasePlan) bool {
			return p.store != nil && p.store.ShortenedBy == "Eve"
		}},
		{"under review", leaseInput{lease: testLease(), record: open}, false, func(p leasePlan) bool { return p.mirror == open }},
		{"acknowledged, nobody vouches", leaseInput{lease: looked, record: open}, true, func(p leasePlan) bool { return p.mirror == open }},
		{"acknowledged, vouched for", leaseInput{lease: looked, record: open, guard: inForce}, true, func(p leasePlan) bool {
			return p.acknowledge != nil && p.acknowledge.Actor == "Rita"
		}},
	} {
		if got := asksWho(c.in); got != c.asks {
			t.Errorf("%s: asks who: %t, want %t", c.name, got, c.asks)
		}
		if plan := decideLease(c.in); !c.check(plan) {
			t.Errorf("%s: the plan is %+v", c.name, plan)
		}
	}
}

// Goal: the bound of all raises is part of the policy that the ledger is told.
func TestBoundedPolicy(t *testing.T) {
	for _, c := range []struct{ policy, bound, want time.Duration }{
		{time.Hour, 24 * time.Hour, time.Hour}, {48 * time.Hour, 24 * time.Hour, 24 * time.Hour}, {0, time.Hour, 0},
	} {
		if got := boundedPolicy(ledger.RaisePolicy{MaxDuration: c.policy}, c.bound).MaxDuration; got != c.want {
			t.Errorf("%s under %s: %s, want %s", c.policy, c.bound, got, c.want)
		}
	}
}

// Goal: a new raise whose approval is not of the form that is asked for is not stored,
// and says which form that is; one that is stored goes on.
func TestApprovalPattern(t *testing.T) {
	for _, c := range []struct {
		pattern string
		record  *ledger.Raise
		stored  bool
	}{
		{"^(?:CHG-[0-9]+)$", nil, true}, {"^(?:INC-[0-9]+)$", nil, false},
		{"^(?:INC-[0-9]+)$", testRaise(ledger.RaiseActive, ledger.ReasonNone), true},
	} {
		plan := decideLease(leaseInput{
			lease: testLease(), bucket: testBucket(), record: c.record, actorOptional: true, approvals: regexp.MustCompile(c.pattern),
		})
		if stored := plan.store != nil; stored != c.stored {
			t.Errorf("%s: stored: %t, want %t", c.pattern, stored, c.stored)
		}
		if !c.stored && (!plan.wait.stalled || !strings.Contains(plan.wait.message, "INC-[0-9]+")) {
			t.Errorf("%s: refused with %+v", c.pattern, plan.wait)
		}
	}
}
