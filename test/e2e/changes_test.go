package e2e_test

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

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

func deletedForGood(b *v1alpha1.TokenBucket) { b.Spec.DeletionPolicy = v1alpha1.DeletionPolicyDelete }
