package main

import (
	"os"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"sigs.k8s.io/yaml"

	"github.com/token-lease/operator/internal/dataplane"
)

// Goal: what callers can take of the manager's memory, strangers included, fits into what
// the manifest gives it, so that nobody can have it killed.
func TestMemoryOfTheManifest(t *testing.T) {
	t.Parallel()
	// perConnection was measured with idle connections of HTTP/2 over TLS, and rounded up;
	// base is what the rest of the process takes.
	const perConnection, base = 56 << 10, 100 << 20
	container := readManifest(t).Containers[0]
	limits := dataplane.DefaultLimits()
	need := base + int64(limits.Connections)*perConnection + int64(limits.Requests)*limits.BodyBytes
	given := container.Resources.Limits.Memory().Value()
	if given < need {
		t.Errorf("the manager may take %d bytes, and may need %d", given, need)
	}
	for _, variable := range container.Env {
		if variable.Name != "GOMEMLIMIT" {
			continue
		}
		soft := resource.MustParse(strings.TrimSuffix(variable.Value, "B"))
		if soft.Value() < need || soft.Value() >= given {
			t.Errorf("%s bytes are collected for, of %d, and %d may be needed", variable.Value, given, need)
		}
	}
}

// Goal: a pod that leaves still answers while callers are sent to it, and is granted the
// time that the process may then take to end.
func TestGraceOfTheManifest(t *testing.T) {
	t.Parallel()
	spec := readManifest(t)
	lifecycle := spec.Containers[0].Lifecycle
	if lifecycle == nil || lifecycle.PreStop == nil || lifecycle.PreStop.Sleep == nil || lifecycle.PreStop.Sleep.Seconds < 3 {
		t.Fatalf("the listener closes while callers are sent to it: %+v", lifecycle)
	}
	leaving := time.Duration(lifecycle.PreStop.Sleep.Seconds) * time.Second
	granted := time.Duration(*spec.TerminationGracePeriodSeconds) * time.Second
	if need := leaving + shutdownGrace + closeGrace; granted < need {
		t.Errorf("%s are granted, and %s may be needed", granted, need)
	}
}

func readManifest(t *testing.T) corev1.PodSpec {
	t.Helper()
	text, err := os.ReadFile("../../config/manager/manager.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var deployment appsv1.Deployment
	if err := yaml.UnmarshalStrict(text, &deployment); err != nil {
		t.Fatal(err)
	}
	return deployment.Spec.Template.Spec
}
