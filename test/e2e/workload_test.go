package e2e_test

import (
	"bytes"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/proto/tokenlease/v1alpha1/tokenleasev1alpha1connect"
)

const (
	workloadName     = "worker"
	workloadAudience = "tokenlease"
	// tokenSeconds is the shortest life that the API server gives a token.
	tokenSeconds = 600
)

// account makes a ServiceAccount in a namespace.
func (in *installation) account(t *testing.T, namespace, name string) {
	t.Helper()
	in.create(t, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}})
}

// token asks the API server for a token of a ServiceAccount, as a kubelet does.
func (in *installation) token(t *testing.T, namespace, name, audience string) string {
	t.Helper()
	seconds := int64(tokenSeconds)
	request := &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{Audiences: []string{audience}, ExpirationSeconds: &seconds},
	}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	if err := in.api.SubResource("token").Create(call(t), account, request); err != nil {
		t.Fatal(err)
	}
	return request.Status.Token
}

// permit lets a ServiceAccount of the namespace do things with leases of one bucket, or
// of all if none is named.
func (in *installation) permit(t *testing.T, name, account string, buckets []string, verbs ...string) {
	t.Helper()
	in.create(t,
		&rbacv1.Role{
			ObjectMeta: metav1.ObjectMeta{Namespace: in.namespace, Name: name},
			Rules: []rbacv1.PolicyRule{{
				APIGroups: []string{v1alpha1.GroupName}, Resources: []string{"tokenbuckets/leases"}, ResourceNames: buckets, Verbs: verbs,
			}},
		},
		in.binding(name, account),
	)
}

func (in *installation) binding(name, account string) *rbacv1.RoleBinding {
	return &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: in.namespace, Name: name},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: in.namespace, Name: account}},
	}
}

// answer is what the data plane said in JSON.
type answer struct {
	status int
	header http.Header
	body   string
}

// code is the code of a refusal.
func (a answer) code() string {
	var refusal struct {
		Details []struct {
			Debug struct {
				Code string `json:"code"`
			} `json:"debug"`
		} `json:"details"`
	}
	if json.Unmarshal([]byte(a.body), &refusal) != nil || len(refusal.Details) == 0 {
		return ""
	}
	return refusal.Details[0].Debug.Code
}

func (a answer) want(t *testing.T, what string, status int, code string) {
	t.Helper()
	if a.status != status || a.code() != code {
		t.Errorf("%s: %d %s, want %d with the code %q", what, a.status, a.body, status, code)
	}
}

func (a answer) wantOK(t *testing.T, what string) {
	t.Helper()
	if a.status != http.StatusOK {
		t.Fatalf("%s: %d %s", what, a.status, a.body)
	}
}

// overTLS is a client that trusts a certificate which a manager made itself.
var overTLS = &http.Client{Timeout: callBound, Transport: &http.Transport{
	TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, ForceAttemptHTTP2: true,
}}

// post asks a manager's data plane in JSON. Further arguments are names and values of
// headers. Status 0 means that nothing answers.
func (m *manager) post(t *testing.T, token, method, body string, headers ...string) answer {
	t.Helper()
	request, err := http.NewRequestWithContext(call(t), http.MethodPost,
		"https://"+m.dataPlane+"/"+tokenleasev1alpha1connect.LedgerServiceName+"/"+method, bytes.NewReader([]byte(body)))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	if token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	for i := 0; i < len(headers); i += 2 {
		request.Header.Add(headers[i], headers[i+1])
	}
	response, err := overTLS.Do(request)
	if err != nil {
		return answer{body: err.Error()}
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return answer{body: err.Error()}
	}
	return answer{status: response.StatusCode, header: response.Header, body: string(text)}
}

// about is a request about a bucket of a namespace; rest is further fields.
func about(namespace, bucket, rest string) string {
	text := fmt.Sprintf(`{"bucket": {"namespace": %q, "name": %q}`, namespace, bucket)
	if rest != "" {
		text += ", " + rest
	}
	return text + "}"
}

func reserving(key string, tokens int64) string {
	return fmt.Sprintf(`"requestKey": %q, "tokens": %d`, key, tokens)
}
