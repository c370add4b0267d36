package dataplanetest

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// APIServer stands for the API server's two reviews. Its fields are changed with Set.
type APIServer struct {
	mutex sync.Mutex
	// Down makes every review fail.
	Down bool
	// Users are the subjects whose tokens are good.
	Users map[string]bool
	// Audiences is what TokenReviews answer; nil echoes what they ask for.
	Audiences []string
	// May maps "user verb resource/subresource namespace/name" to yes.
	May map[string]bool
	// Wait, if not nil, holds reviews up until it is closed.
	Wait chan struct{}
	// WaitFor, if not nil, says whose reviews those are; nil means all.
	WaitFor func(subject string) bool

	tokenReviews, accessReviews int
}

func newAPIServer() *APIServer {
	return &APIServer{Users: map[string]bool{Worker: true, Other: true}, May: map[string]bool{}}
}

// Set changes what it answers.
func (a *APIServer) Set(change func(*APIServer)) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	change(a)
}

// Allow lets a user do things with leases of a bucket; the verbs audit and usage are to
// get those.
func (a *APIServer) Allow(user, bucket string, verbs ...string) {
	a.Set(func(a *APIServer) {
		for _, verb := range verbs {
			subresource := "leases"
			if verb == "audit" || verb == "usage" {
				verb, subresource = "get", verb
			}
			a.May[fmt.Sprintf("%s %s tokenbuckets/%s %s", user, verb, subresource, bucket)] = true
		}
	})
}

// Asked is how often it was asked about tokens and about access.
func (a *APIServer) Asked() (tokens, access int) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	return a.tokenReviews, a.accessReviews
}

func (a *APIServer) arrive(ctx context.Context, subject string) error {
	a.mutex.Lock()
	wait := a.Wait
	if a.WaitFor != nil && !a.WaitFor(subject) {
		wait = nil
	}
	a.mutex.Unlock()
	if wait == nil {
		return nil
	}
	select {
	case <-wait:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// TokenReviews is the API server's interface for tokens.
type TokenReviews struct{ *APIServer }

// Create answers a review.
func (a TokenReviews) Create(ctx context.Context, review *authenticationv1.TokenReview, _ metav1.CreateOptions) (*authenticationv1.TokenReview, error) {
	if err := a.arrive(ctx, SubjectOf(review.Spec.Token)); err != nil {
		return nil, err
	}
	a.mutex.Lock()
	defer a.mutex.Unlock()
	a.tokenReviews++
	if a.Down {
		return nil, errors.New("connection refused")
	}
	subject := SubjectOf(review.Spec.Token)
	answer := review.DeepCopy()
	answer.Status.Authenticated = a.Users[subject]
	if answer.Status.Authenticated {
		answer.Status.User = authenticationv1.UserInfo{Username: subject, Groups: []string{"system:authenticated"}}
		answer.Status.Audiences = review.Spec.Audiences
		if a.Audiences != nil {
			answer.Status.Audiences = a.Audiences
		}
	}
	return answer, nil
}

// AccessReviews is the API server's interface for access.
type AccessReviews struct{ *APIServer }

// Create answers a review.
func (a AccessReviews) Create(ctx context.Context, review *authorizationv1.SubjectAccessReview, _ metav1.CreateOptions) (*authorizationv1.SubjectAccessReview, error) {
	if err := a.arrive(ctx, review.Spec.User); err != nil {
		return nil, err
	}
	a.mutex.Lock()
	defer a.mutex.Unlock()
	a.accessReviews++
	if a.Down {
		return nil, errors.New("connection refused")
	}
	answer := review.DeepCopy()
	r := review.Spec.ResourceAttributes
	answer.Status.Allowed = a.May[fmt.Sprintf("%s %s %s/%s %s/%s", review.Spec.User, r.Verb, r.Resource, r.Subresource, r.Namespace, r.Name)]
	return answer, nil
}

// Token makes a token as a ServiceAccount's looks; its signature is nobody's business
// but the API server's.
func Token(subject, audience string, expiresAt time.Time) string {
	return JWT(map[string]any{"alg": "RS256"}, map[string]any{
		"iss": "https://kubernetes.default.svc", "sub": subject, "aud": []string{audience}, "exp": expiresAt.Unix(),
	})
}

// JWT puts a token together, with a signature that is none.
func JWT(parts ...any) string {
	encoded := make([]string, 0, len(parts)+1)
	for _, part := range parts {
		text, err := json.Marshal(part)
		if err != nil {
			panic(err)
		}
		encoded = append(encoded, base64.RawURLEncoding.EncodeToString(text))
	}
	return strings.Join(append(encoded, "c2lnbmF0dXJl"), ".")
}

// SubjectOf is whom a token says it is of; "" if it says nothing.
func SubjectOf(token string) string {
	parts := strings.Split(token, ".")
	if len(parts) < 2 {
		return ""
	}
	var claims struct {
		Subject string `json:"sub"`
	}
	text, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil || json.Unmarshal(text, &claims) != nil {
		return ""
	}
	return claims.Subject
}
