package e2e_test

import (
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/token-lease/operator/api/v1alpha1"
)

// These adapt the objects of the seed story.

func named[T client.Object](name string) func(T) {
	return func(object T) { object.SetName(name) }
}

func on(bucket string) func(*v1alpha1.TemporaryLimitLease) {
	return func(l *v1alpha1.TemporaryLimitLease) { l.Spec.BucketRef.Name = bucket }
}

func approvedBy(id v1alpha1.Identifier) func(*v1alpha1.TemporaryLimitLease) {
	return func(l *v1alpha1.TemporaryLimitLease) { l.Spec.ApprovalID = id }
}

func from(startsAt time.Time) func(*v1alpha1.TemporaryLimitLease) {
	return func(l *v1alpha1.TemporaryLimitLease) {
		at := metav1.NewTime(startsAt)
		l.Spec.StartsAt = &at
	}
}

func until(expiresAt time.Time) func(*v1alpha1.TemporaryLimitLease) {
	return func(l *v1alpha1.TemporaryLimitLease) { l.Spec.ExpiresAt = metav1.NewTime(expiresAt) }
}

func rebasing(l *v1alpha1.TemporaryLimitLease) { l.Spec.OnBaseChange = v1alpha1.BaseChangePolicyRebase }

func raisedTo(tokens int64) func(*v1alpha1.TemporaryLimitLease) {
	return func(l *v1alpha1.TemporaryLimitLease) { l.Spec.TemporaryLimit = tokens }
}

func mode(m v1alpha1.RaiseMode) func(*v1alpha1.TokenBucket) {
	return func(b *v1alpha1.TokenBucket) { b.Spec.Raises.Mode = m }
}

func overwriting(b *v1alpha1.TokenBucket) { b.Spec.ConflictPolicy = v1alpha1.ConflictPolicyOverwrite }

func deletedForGood(b *v1alpha1.TokenBucket) { b.Spec.DeletionPolicy = v1alpha1.DeletionPolicyDelete }

// manifestOf is what a person would write to ask for objects: no more than kind,
// metadata and spec.
func manifestOf(t *testing.T, objects ...client.Object) string {
	t.Helper()
	var text strings.Builder
	for _, object := range objects {
		content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(object)
		if err != nil {
			t.Fatal(err)
		}
		content["apiVersion"] = v1alpha1.GroupVersion.String()
		content["kind"] = map[bool]string{true: "TokenBucket", false: "TemporaryLimitLease"}[isBucket(object)]
		delete(content, "status")
		written, err := yaml.Marshal(content)
		if err != nil {
			t.Fatal(err)
		}
		text.WriteString("---\n")
		text.Write(written)
	}
	return text.String()
}

func isBucket(object client.Object) bool {
	_, is := object.(*v1alpha1.TokenBucket)
	return is
}
