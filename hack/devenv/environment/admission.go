package environment

import (
	"context"
	"errors"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/token-lease/operator/api/v1alpha1"
)

const (
	// AdmissionDir holds the admission policies.
	AdmissionDir = "config/admission"

	admissionPoll    = 200 * time.Millisecond
	admissionTimeout = 2 * time.Minute
	// admissionAge is how old the policies must be: the manager takes no lease that is
	// as old as they are, give or take seconds.
	admissionAge = 5 * time.Second
)

// AwaitAdmission waits until the API server goes by the admission policies that were
// just applied, and until they are old enough for the manager. It leaves nothing
// behind.
func AwaitAdmission(ctx context.Context, config *rest.Config) error {
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return err
	}
	api, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		return err
	}
	var last error
	applied := time.Now()
	err = wait.PollUntilContextTimeout(ctx, admissionPoll, admissionTimeout, true, func(ctx context.Context) (bool, error) {
		b := &v1alpha1.TokenBucket{
			ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "awaits-admission"},
			Spec:       v1alpha1.TokenBucketSpec{Limit: 1},
		}
		// The kind may not be served yet, and the guard may be known before the stamp is.
		if last = api.Create(ctx, b, client.DryRunAll); last != nil {
			return false, nil //nolint:nilerr // tried again; the last error is reported at the end
		}
		return b.Annotations[v1alpha1.RequestedByAnnotation] != "" && time.Since(applied) > admissionAge, nil
	})
	if err != nil {
		return fmt.Errorf("wait for the admission policies: %w", errors.Join(err, last))
	}
	return nil
}
