package dataplane

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/token-lease/operator/internal/ledger"
)

const (
	// maxTokenBytes bounds a token; those of ServiceAccounts have about 1,200 bytes.
	maxTokenBytes = 8 << 10
	// clockSkew is by how much this machine's clock may be wrong before a token is
	// refused without asking.
	clockSkew = 10 * time.Second
)

// tokenReviewer asks the API server who somebody is.
type tokenReviewer interface {
	Create(ctx context.Context, review *authenticationv1.TokenReview, options metav1.CreateOptions) (*authenticationv1.TokenReview, error)
}

// tokenHash stands for a token, which is not kept.
type tokenHash [sha256.Size]byte

// authenticator finds out who calls.
type authenticator struct {
	reviewer tokenReviewer
	audience string
	now      func() time.Time
	answers  *answers[tokenHash, *authenticationv1.UserInfo]
}

func newAuthenticator(reviewer tokenReviewer, audience string, now func() time.Time, observer Observer) *authenticator {
	return &authenticator{reviewer: reviewer, audience: audience, now: now, answers: newAnswers[tokenHash, *authenticationv1.UserInfo](observer, "token", maxTokensWaiting, now)}
}

func unauthenticated(format string, args ...any) *ledger.Error {
	return ledger.Errorf(codeUnauthenticated, format, args...)
}

// authenticate says who shows the token of a request's header. Only the token counts:
// headers that speak for somebody else are not read. Who is not known takes one of the
// strangers' places meanwhile.
func (a *authenticator) authenticate(ctx context.Context, header http.Header, strangers chan struct{}) (*authenticationv1.UserInfo, error) {
	token, err := bearerToken(header)
	if err != nil {
		return nil, err
	}
	hash := tokenHash(sha256.Sum256([]byte(token)))
	// A yes is kept until the token's end at most, so its claims need no other look.
	if user, ok := a.answers.keptYes(hash); ok {
		return user, nil
	}
	expiresAt, err := a.judgeClaims(token)
	if err != nil {
		return nil, err
	}
	select {
	case strangers <- struct{}{}:
		defer func() { <-strangers }()
	default:
		return nil, ledger.Errorf(codeOverloaded, "Too many callers wait to be reviewed.")
	}
	user, err := a.answers.get(ctx, "", hash, expiresAt, func(ctx context.Context) (*authenticationv1.UserInfo, error) {
		return a.review(ctx, token)
	})
	if err != nil {
		return nil, err
	}
	if user == nil {
		return nil, unauthenticated("The token was refused by the API server.")
	}
	return user, nil
}

func bearerToken(header http.Header) (string, error) {
	values := header.Values("Authorization")
	if len(values) != 1 {
		return "", unauthenticated("Show one ServiceAccount token as \"Authorization: Bearer ...\".")
	}
	scheme, token, _ := strings.Cut(values[0], " ")
	if !strings.EqualFold(scheme, "Bearer") || token == "" || len(token) > maxTokenBytes {
		return "", unauthenticated("Show one ServiceAccount token as \"Authorization: Bearer ...\".")
	}
	return token, nil
}

// claims are what a token says of itself. Nobody has verified it.
type claims struct {
	Audience  audience `json:"aud"`
	ExpiresAt *float64 `json:"exp"`
	Issuer    string   `json:"iss"`
	Subject   string   `json:"sub"`
}

// audience is a name or a list of names.
type audience []string

// UnmarshalJSON implements json.Unmarshaler.
func (a *audience) UnmarshalJSON(text []byte) error {
	var one string
	if json.Unmarshal(text, &one) == nil {
		*a = audience{one}
		return nil
	}
	return json.Unmarshal(text, (*[]string)(a))
}

// judgeClaims refuses a token that the API server would refuse anyway, so that it is not
// asked. What it lets through is only what may be worth asking. It returns the instant
// after which the token is worth nothing.
func (a *authenticator) judgeClaims(token string) (time.Time, error) {
	malformed := unauthenticated("The token is not one of a ServiceAccount.")
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return time.Time{}, malformed
	}
	var decoded [3][]byte
	for i, part := range parts {
		content, err := base64.RawURLEncoding.Strict().DecodeString(part)
		if err != nil || len(content) == 0 {
			return time.Time{}, malformed
		}
		decoded[i] = content
	}
	var head map[string]any
	var c claims
	if json.Unmarshal(decoded[0], &head) != nil || json.Unmarshal(decoded[1], &c) != nil || c.Issuer == "" || c.Subject == "" {
		return time.Time{}, malformed
	}
	// A token without an end is one of the old kind, which knows no audience either.
	if c.ExpiresAt == nil || *c.ExpiresAt < 0 || *c.ExpiresAt > float64(1<<40) {
		return time.Time{}, malformed
	}
	if !slices.Contains(c.Audience, a.audience) {
		return time.Time{}, unauthenticated("The token is not for the audience %q.", a.audience)
	}
	expiresAt := time.Unix(int64(*c.ExpiresAt), 0)
	if a.now().After(expiresAt.Add(clockSkew)) {
		return time.Time{}, unauthenticated("The token has expired.")
	}
	return expiresAt, nil
}

// review asks the API server; nil means that the token was refused. The audience is
// asked for, since it is checked only then, and looked for in the answer, since an
// authenticator that knows no audiences says yes to all.
func (a *authenticator) review(ctx context.Context, token string) (*authenticationv1.UserInfo, error) {
	review, err := a.reviewer.Create(ctx, &authenticationv1.TokenReview{
		Spec: authenticationv1.TokenReviewSpec{Token: token, Audiences: []string{a.audience}},
	}, metav1.CreateOptions{})
	if err != nil {
		return nil, err
	}
	status := review.Status
	if !status.Authenticated || status.User.Username == "" || !slices.Contains(status.Audiences, a.audience) {
		return nil, nil
	}
	return &status.User, nil
}
