package v1alpha1_test

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/token-lease/operator/api/v1alpha1"
)

const (
	aggregationTimeout = 2 * time.Minute
	aggregationPoll    = 50 * time.Millisecond
)

// Goal: whoever may view a namespace sees its budgets, and nobody may change a
// budget or ask for a raise only because the namespace is theirs.
func TestRolesForPeople(t *testing.T) {
	for _, file := range []string{ // what must not be aggregated comes first, so that it would be seen
		"tokenbucket_editor_role.yaml", "temporarylimitlease_editor_role.yaml", "raiser_role.yaml", "reviewer_role.yaml",
		"tokenbucket_viewer_role.yaml", "temporarylimitlease_viewer_role.yaml",
	} {
		content, err := os.ReadFile(filepath.Join("../../config/rbac", file))
		if err != nil {
			t.Fatal(err)
		}
		var role rbacv1.ClusterRole
		if err := yaml.UnmarshalStrict(content, &role); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		if err := kube.Create(testContext(t), &role); client.IgnoreAlreadyExists(err) != nil {
			t.Fatalf("%s: %v", file, err)
		}
	}
	for _, name := range []string{"view", "edit", "admin"} {
		for _, resource := range []string{"tokenbuckets", "temporarylimitleases"} {
			verbs := aggregatedVerbs(t, name, resource)
			if want := []string{"get", "list", "watch"}; !slices.Equal(verbs, want) {
				t.Errorf("%s may %v %s, want only %v", name, verbs, resource, want)
			}
		}
	}
}

// aggregatedVerbs waits until the role names the resource, and returns what it
// allows.
func aggregatedVerbs(t *testing.T, role, resource string) []string {
	t.Helper()
	var verbs []string
	err := wait.PollUntilContextTimeout(t.Context(), aggregationPoll, aggregationTimeout, true, func(ctx context.Context) (bool, error) {
		var found rbacv1.ClusterRole
		if err := kube.Get(ctx, client.ObjectKey{Name: role}, &found); err != nil {
			return false, client.IgnoreNotFound(err)
		}
		verbs = nil
		for _, rule := range found.Rules {
			if slices.Contains(rule.APIGroups, v1alpha1.GroupName) && slices.Contains(rule.Resources, resource) {
				verbs = append(verbs, rule.Verbs...)
			}
		}
		return len(verbs) > 0, nil
	})
	if err != nil {
		t.Fatalf("%s never came to name %s: %v", role, resource, err)
	}
	slices.Sort(verbs)
	return slices.Compact(verbs)
}
