package main

import (
	"os"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	"sigs.k8s.io/yaml"
)

// Goal: a pod that leaves still answers while callers are sent to it, and is granted the
// time that the process may then take to end.
func TestGraceOfTheManifest(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../config/manager/manager.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var deployment appsv1.Deployment
	if err := yaml.UnmarshalStrict(text, &deployment); err != nil {
		t.Fatal(err)
	}
	spec := deployment.Spec.Template.Spec
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
