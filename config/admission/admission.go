// Package admission carries the admission policies of this directory, so that the
// manager can compare what a cluster has with what it was built for.
package admission

import (
	_ "embed" // the manifests are compiled in
	"fmt"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	"sigs.k8s.io/yaml"
)

// Names of the guards and of their bindings.
const (
	LeaseGuardName  = "lease-guard.budget.tokenlease.dev"
	BucketGuardName = "bucket-guard.budget.tokenlease.dev"
)

//go:embed lease_guard.yaml
var leaseGuard string

//go:embed bucket_guard.yaml
var bucketGuard string

// Guard is a policy that makes the names in annotations true, with its binding.
type Guard struct {
	Policy  admissionv1.ValidatingAdmissionPolicy
	Binding admissionv1.ValidatingAdmissionPolicyBinding
}

// LeaseGuard is the guard of TemporaryLimitLeases.
func LeaseGuard() (Guard, error) { return parse(leaseGuard) }

// BucketGuard is the guard of TokenBuckets.
func BucketGuard() (Guard, error) { return parse(bucketGuard) }

func parse(manifest string) (Guard, error) {
	var g Guard
	policy, binding, found := strings.Cut(manifest, "\n---\n")
	if !found {
		return g, fmt.Errorf("the manifest of an admission policy has no binding")
	}
	if err := yaml.UnmarshalStrict([]byte(policy), &g.Policy); err != nil {
		return g, fmt.Errorf("read an admission policy: %w", err)
	}
	if err := yaml.UnmarshalStrict([]byte(binding), &g.Binding); err != nil {
		return g, fmt.Errorf("read the binding of an admission policy: %w", err)
	}
	return g, nil
}
