package v1alpha1_test

import (
	"os/exec"
	"testing"

	"github.com/token-lease/operator/hack/devenv/environment"
)

// Goal: what is documented, `kubectl apply -k`, works, and works again, for the
// kinds, for the operator, and for the samples.
func TestKustomizationsApply(t *testing.T) {
	for _, dir := range []string{"../../config/crd", "../../config/default", "../../config/samples"} {
		for range 2 {
			kubectl := exec.CommandContext(testContext(t), plane.Kubectl(), "--kubeconfig", plane.KubeconfigPath(),
				"apply", "--server-side", "--field-manager=kustomize-test", "--force-conflicts", "-k", dir)
			if output, err := kubectl.CombinedOutput(); err != nil {
				t.Errorf("kubectl apply -k %s: %v\n%s", dir, err, output)
			}
		}
		if dir == "../../config/default" {
			// The admission policies refuse the kinds until the API server has looked at
			// their schemas.
			if err := environment.AwaitAdmission(t.Context(), plane.RESTConfig()); err != nil {
				t.Fatal(err)
			}
		}
	}
}
