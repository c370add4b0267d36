package dataplane

import (
	"context"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// What RBAC rules are written for. No API serves the subresources; they are there to be
// named in roles.
const (
	apiGroup    = "budget.tokenlease.dev"
	resource    = "tokenbuckets"
	leasesOf    = "leases"
	auditOf     = "audit"
	usageOf     = "usage"
	verbCreate  = "create"
	verbUpdate  = "update"
	verbDelete  = "delete"
	verbGet     = "get"
	verbList    = "list"
	reviewOfUse = "access"
)

// accessReviewer asks the API server what somebody may do.
type accessReviewer interface {
	Create(ctx context.Context, review *authorizationv1.SubjectAccessReview, options metav1.CreateOptions) (*authorizationv1.SubjectAccessReview, error)
}

// access is what is asked about. The user is the very answer to a token, which is kept
// no longer than what is said about it.
type access struct {
	user                                *authenticationv1.UserInfo
	verb, subresource, namespace, named string
}

// authorizer finds out what a caller may do.
type authorizer struct {
	reviewer accessReviewer
	answers  *answers[access, bool]
}

func newAuthorizer(reviewer accessReviewer, now func() time.Time, observer Observer) *authorizer {
	return &authorizer{reviewer: reviewer, answers: newAnswers[access, bool](observer, reviewOfUse, maxAccessWaiting, now)}
}

// may reports whether a user may do something with a subresource of one TokenBucket.
func (a *authorizer) may(ctx context.Context, user *authenticationv1.UserInfo, verb, subresource, namespace, name string) (bool, error) {
	question := access{user: user, verb: verb, subresource: subresource, namespace: namespace, named: name}
	return a.answers.get(ctx, user.Username, question, time.Time{}, func(ctx context.Context) (bool, error) {
		return a.review(ctx, question)
	})
}

func (a *authorizer) review(ctx context.Context, question access) (bool, error) {
	extra := map[string]authorizationv1.ExtraValue{}
	for name, values := range question.user.Extra {
		extra[name] = authorizationv1.ExtraValue(values)
	}
	review, err := a.reviewer.Create(ctx, &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: question.user.Username, UID: question.user.UID, Groups: question.user.Groups, Extra: extra,
		ResourceAttributes: &authorizationv1.ResourceAttributes{
			Group: apiGroup, Resource: resource, Subresource: question.subresource, Verb: question.verb,
			Namespace: question.namespace, Name: question.named,
		},
	}}, metav1.CreateOptions{})
	if err != nil {
		return false, err
	}
	return review.Status.Allowed && !review.Status.Denied, nil
}
