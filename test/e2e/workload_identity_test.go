package e2e_test

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/token-lease/operator/api/v1alpha1"
)

// Goal: a workload draws from the bucket on which it has a role, with the identity that
// it has in the cluster, and from no other: not of its own namespace, not of another,
// not with a token for somebody else or of another time, and not by saying that it is
// somebody else. What it may not see it cannot tell from what is not there.
func TestWorkloadIdentity(t *testing.T) {
	t.Parallel()
	in := install(t)
	m := in.start(t, "manager-a", managerOptions{dataPlane: true})
	elsewhere := in.newNamespace(t)
	in.create(t, in.bucket(), in.otherBucket("second"))
	in.waitBucket(t, inSync...)
	in.waitBucketNamed(t, "second", inSync...)
	in.account(t, in.namespace, workloadName)
	in.account(t, elsewhere, workloadName)
	in.permit(t, "draw", workloadName, []string{bucketName}, "create", "update", "get")
	mine := in.token(t, in.namespace, workloadName, workloadAudience)

	stage(t, "it is allowed what its role says")
	in.waitAdmitted(t, m, mine, "first")
	m.post(t, mine, "GetBucket", about(in.namespace, bucketName, "")).wantOK(t, "get")

	stage(t, "and nothing else")
	for what, c := range map[string][2]string{
		"another bucket": {in.namespace, "second"}, "another namespace": {elsewhere, bucketName},
		"a bucket that is not there": {in.namespace, "absent"}, "a namespace that is not there": {"absent", bucketName},
	} {
		m.post(t, mine, "Reserve", about(c[0], c[1], reserving("x", 1))).want(t, what, http.StatusNotFound, "bucket_not_found")
		m.post(t, mine, "GetBucket", about(c[0], c[1], "")).want(t, what, http.StatusNotFound, "bucket_not_found")
	}
	m.post(t, mine, "ListLeases", about(in.namespace, bucketName, "")).want(t, "a verb that it lacks", http.StatusNotFound, "bucket_not_found")
	m.post(t, mine, "ListUsage", about(in.namespace, bucketName, "")).want(t, "another subresource", http.StatusNotFound, "bucket_not_found")
	m.post(t, mine, "ListAudit", about(in.namespace, bucketName, "")).want(t, "a subresource that it lacks", http.StatusNotFound, "bucket_not_found")
	theirs := in.token(t, elsewhere, workloadName, workloadAudience)
	m.post(t, theirs, "Reserve", about(in.namespace, bucketName, reserving("x", 1))).
		want(t, "its namesake of another namespace", http.StatusNotFound, "bucket_not_found")

	stage(t, "tokens that are no good")
	for what, token := range map[string]string{
		"no token": "", "another audience": in.token(t, in.namespace, workloadName, "https://kubernetes.default.svc"),
		"expired": withClaim(t, mine, "exp", time.Now().Add(-time.Hour).Unix()), "made longer": withClaim(t, mine, "exp", time.Now().Add(time.Hour).Unix()),
		"another's name": withClaim(t, mine, "sub", "system:serviceaccount:kube-system:admin"), "cut short": mine[:len(mine)-8],
	} {
		m.post(t, token, "Reserve", about(in.namespace, bucketName, reserving("x", 1))).want(t, what, http.StatusUnauthorized, "unauthenticated")
	}

	stage(t, "headers that speak for others")
	for _, headers := range [][]string{
		{"Impersonate-User", "system:serviceaccount:" + in.namespace + ":" + workloadName},
		{"Impersonate-User", "admin", "Impersonate-Group", "system:masters"}, {"X-Remote-User", "admin", "X-Remote-Group", "system:masters"},
	} {
		what := fmt.Sprint(headers)
		m.post(t, theirs, "Reserve", about(in.namespace, bucketName, reserving("x", 1)), headers...).want(t, what, http.StatusNotFound, "bucket_not_found")
		m.post(t, mine, "GetBucket", about(in.namespace, bucketName, ""), headers...).wantOK(t, what)
	}
	if got := query[int64](t, in.db, "SELECT reserved_tokens FROM tokenlease.buckets WHERE bucket_key = $1", in.key(bucketName)); got != 1 {
		t.Errorf("%d tokens are reserved, want the one of the request that was allowed", got)
	}
	if got := query[string](t, in.db, "SELECT holder FROM tokenlease.leases WHERE bucket_key = $1", in.key(bucketName)); got != "system:serviceaccount:"+in.namespace+":"+workloadName {
		t.Errorf("the lease belongs to %q", got)
	}
}

// waitAdmitted reserves a token once the API server's authorizer has seen the role. A
// refusal is kept for a while, so this waits that long at most.
func (in *installation) waitAdmitted(t *testing.T, m *manager, token, requestKey string) {
	t.Helper()
	waitFor(t, "a reservation to be admitted", func() (bool, string) {
		got := m.post(t, token, "Reserve", about(in.namespace, bucketName, reserving(requestKey, 1)))
		return got.status == http.StatusOK, got.body
	})
}

// withClaim is a token with one claim changed, and the signature of before.
func withClaim(t *testing.T, token, name string, value any) string {
	t.Helper()
	parts := strings.Split(token, ".")
	text, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		t.Fatal(err)
	}
	claims := map[string]any{}
	if err := json.Unmarshal(text, &claims); err != nil {
		t.Fatal(err)
	}
	claims[name] = value
	if text, err = json.Marshal(claims); err != nil {
		t.Fatal(err)
	}
	parts[1] = base64.RawURLEncoding.EncodeToString(text)
	return strings.Join(parts, ".")
}

// Goal: a right that is taken away while a workload runs is gone on every replica within
// the time that answers are kept; so is a ServiceAccount. A lease that it holds runs out
// by itself. Two replicas answer alike before and after.
func TestWorkloadRevoked(t *testing.T) {
	t.Parallel()
	in := install(t)
	replicas := []*manager{
		in.start(t, "manager-a", managerOptions{dataPlane: true}), in.start(t, "manager-b", managerOptions{dataPlane: true}),
	}
	in.create(t, in.bucket(func(b *v1alpha1.TokenBucket) { b.Spec.Reservations.DefaultTTLSeconds = 1 }))
	in.waitBucket(t, inSync...)
	in.account(t, in.namespace, workloadName)
	in.permit(t, "draw", workloadName, nil, "create", "get")
	mine := in.token(t, in.namespace, workloadName, workloadAudience)
	for i, m := range replicas {
		in.waitAdmitted(t, m, mine, fmt.Sprint(i))
	}

	stage(t, "the binding goes")
	in.delete(t, in.binding("draw", workloadName))
	in.waitRefused(t, replicas, mine, http.StatusNotFound, "bucket_not_found")

	stage(t, "it is given back")
	in.create(t, in.binding("draw", workloadName))
	for i, m := range replicas {
		in.waitAdmitted(t, m, mine, fmt.Sprint("again ", i))
	}

	stage(t, "the ServiceAccount goes, and its token with it")
	in.delete(t, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: in.namespace, Name: workloadName}})
	in.waitRefused(t, replicas, mine, http.StatusUnauthorized, "unauthenticated")

	waitFor(t, "its leases to have run out", func() (bool, string) {
		reserved := query[int64](t, in.db, "SELECT reserved_tokens FROM tokenlease.buckets WHERE bucket_key = $1", in.key(bucketName))
		return reserved == 0, fmt.Sprint(reserved)
	})
}

// revokedBound is how long a kept answer may hold, with what a slow machine and the API
// server's own watch of roles may add.
const revokedBound = 30*time.Second + 15*time.Second

// waitRefused waits until every replica refuses the token, within the promised time.
func (in *installation) waitRefused(t *testing.T, replicas []*manager, token string, status int, code string) {
	t.Helper()
	since := time.Now()
	for _, m := range replicas {
		waitFor(t, m.worker+" to refuse", func() (bool, string) {
			got := m.post(t, token, "GetBucket", about(in.namespace, bucketName, ""))
			return got.status == status && got.code() == code, got.body
		})
	}
	if took := time.Since(since); took > revokedBound {
		t.Errorf("what was taken away held for %s, want at most %s", took, revokedBound)
	}
}
