package e2e_test

import (
	"net/url"
	"os"
	"strings"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/token-lease/operator/api/v1alpha1"
)

func passwordOf(t *testing.T, text string) string {
	t.Helper()
	parsed, err := url.Parse(text)
	if err != nil {
		t.Fatal("the database's URL cannot be read")
	}
	password, _ := parsed.User.Password()
	if password == "" {
		t.Fatal("the database's URL holds no password")
	}
	return password
}

// checkNotTold looks for secrets wherever a manager writes.
func (in *installation) checkNotTold(t *testing.T, m *manager, secrets ...string) {
	t.Helper()
	log, err := os.ReadFile(m.logFile)
	if err != nil {
		t.Fatal(err)
	}
	_, metrics := m.get(t, m.metrics, "/metrics")
	_, ready := m.get(t, m.health, "/readyz?verbose")
	var buckets v1alpha1.TokenBucketList
	var leases v1alpha1.TemporaryLimitLeaseList
	for _, list := range []client.ObjectList{&buckets, &leases} {
		if err := in.api.List(call(t), list, client.InNamespace(in.namespace)); err != nil {
			t.Fatal(err)
		}
	}
	for place, text := range map[string]string{
		"the log": string(log), "the metrics": metrics, "/readyz": ready, "an event": asJSON(in.listEvents(t)),
		"an object": asJSON(buckets) + asJSON(leases), "the audit": asJSON(in.db.audit(t, in.key(bucketName))),
	} {
		for _, secret := range secrets {
			if strings.Contains(text, secret) {
				t.Errorf("%s tells a password", place)
			}
		}
	}
}
