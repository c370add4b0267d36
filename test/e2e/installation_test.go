package e2e_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/hack/devenv/controlplane"
	"github.com/token-lease/operator/hack/devenv/postgres"
	"github.com/token-lease/operator/hack/devenv/process"
	"github.com/token-lease/operator/internal/ledger"
)

// The figures of the seed story, used throughout.
const (
	normal    = int64(120_000)
	temporary = int64(300_000)
	permanent = int64(180_000)
)

// Names of the seed story.
const (
	bucketName  = "pm-4821"
	leaseName   = "pm-4821-launch"
	tenantID    = "pm_4821"
	scopedKeyID = "key_pm_4821_rent_v3"
	approvalID  = "CHG-20881"
	// requestedBy is the administrator, as whom the tests act where they do not say
	// otherwise.
	requestedBy = "devenv-admin"
)

// farAway is an expiry that no test reaches by waiting. When the story is ready for
// it, the ledger's clock is moved, or the expiry, so that no machine is too slow.
const farAway = time.Hour

// installation is the operator as one user has it: one namespace, one ledger,
// one identity in it. Any number of managers may run.
type installation struct {
	*cluster
	db        *database
	namespace string
	// clusterID is what the managers are told; empty leaves it to them.
	clusterID string
	// election is the namespace in which the managers elect their leader.
	election        string
	kubeconfig      string
	databaseURLFile string
	dir             string
}

// install makes an installation on what all tests share.
func install(t *testing.T) *installation {
	t.Helper()
	return installOn(t, world.cluster, world.postgres)
}

// installOn makes one on servers of the caller's choice. On a cluster that is
// shared, its managers see the namespace of the test only.
func installOn(t *testing.T, on *cluster, server *postgres.Server) *installation {
	t.Helper()
	in := &installation{cluster: on, db: newDatabase(t, server), namespace: on.newNamespace(t)}
	in.clusterID = "cluster-of-" + in.namespace
	var err error
	if in.dir, err = newDir(in.namespace); err != nil {
		t.Fatal(err)
	}
	in.writeDatabaseURL(t, in.db.runtimeURL)
	in.migrate(t)

	identity, err := on.plane.ServiceAccountConfig(systemNamespace, serviceAccount)
	if err != nil {
		t.Fatal(err)
	}
	in.election = systemNamespace
	if on == world.cluster {
		in.election = on.newElection(t)
		identity = &rest.Config{Host: newWindow(t, identity, in.namespace)}
	}
	in.kubeconfig = filepath.Join(in.dir, "kubeconfig")
	if err := controlplane.WriteKubeconfig(in.kubeconfig, identity); err != nil {
		t.Fatal(err)
	}
	return in
}

// migrate runs "manager migrate" as the database's owner.
func (in *installation) migrate(t *testing.T) {
	t.Helper()
	output, err := runToEnd(t.Context(), process.Command{
		Path: world.manager, Args: []string{"migrate", "--runtime-role=" + in.db.role},
		Env: []string{"DATABASE_URL=" + in.db.ownerURL}, LogFile: filepath.Join(in.dir, "migrate.log"),
	})
	if err != nil {
		t.Fatalf("manager migrate: %v\n%s", err, output)
	}
}

func (in *installation) writeDatabaseURL(t *testing.T, url string) {
	t.Helper()
	in.databaseURLFile = filepath.Join(in.dir, "database-url")
	// A mounted Secret changes at once, not byte by byte.
	next := in.databaseURLFile + ".next"
	if err := os.WriteFile(next, []byte(url+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(next, in.databaseURLFile); err != nil {
		t.Fatal(err)
	}
}

// key is the ledger's key of a bucket of this namespace.
func (in *installation) key(bucket string) string { return in.namespace + "/" + bucket }

// bucket is the bucket of the seed story; changes adapt it.
func (in *installation) bucket(changes ...func(*v1alpha1.TokenBucket)) *v1alpha1.TokenBucket {
	b := &v1alpha1.TokenBucket{
		ObjectMeta: metav1.ObjectMeta{Namespace: in.namespace, Name: bucketName},
		Spec: v1alpha1.TokenBucketSpec{
			Limit: normal, TenantID: tenantID, ScopedKeyID: scopedKeyID,
			Reservations: v1alpha1.ReservationPolicy{DefaultTTLSeconds: 3600, MaxTTLSeconds: 3600},
			Raises: &v1alpha1.RaisePolicy{
				Mode: v1alpha1.RaiseModeEnforce, MaxLimit: 400_000, MaxDurationSeconds: int32((2 * farAway).Seconds()),
			},
		},
	}
	for _, change := range changes {
		change(b)
	}
	return b
}

// lease is the raise of the seed story, from now on until an instant that is far
// away; changes adapt it.
func (in *installation) lease(t *testing.T, changes ...func(*v1alpha1.TemporaryLimitLease)) *v1alpha1.TemporaryLimitLease {
	t.Helper()
	l := &v1alpha1.TemporaryLimitLease{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: in.namespace, Name: leaseName,
			// Whatever a manifest says, the one who creates it is who asked.
			Annotations: map[string]string{v1alpha1.RequestedByAnnotation: "somebody else"},
		},
		Spec: v1alpha1.TemporaryLimitLeaseSpec{
			BucketRef: v1alpha1.BucketReference{Name: bucketName}, NormalLimit: normal, TemporaryLimit: temporary,
			ExpiresAt: metav1.NewTime(in.after(t, farAway)), ApprovalID: approvalID, ScopedKeyID: scopedKeyID,
		},
	}
	for _, change := range changes {
		change(l)
	}
	return l
}

// after is a whole second at least d after the ledger's present.
func (in *installation) after(t *testing.T, d time.Duration) time.Time {
	t.Helper()
	return in.db.now(t).Add(d).Truncate(time.Second).Add(time.Second)
}

func (in *installation) create(t *testing.T, objects ...client.Object) {
	t.Helper()
	for _, object := range objects {
		if err := in.api.Create(call(t), object); err != nil {
			t.Fatalf("create %T %s: %v", object, object.GetName(), err)
		}
	}
}

func (in *installation) delete(t *testing.T, object client.Object) {
	t.Helper()
	if err := in.api.Delete(call(t), object); err != nil {
		t.Fatalf("delete %T %s: %v", object, object.GetName(), err)
	}
}

// patch merges a change of the spec into an object.
func (in *installation) patch(t *testing.T, object client.Object, format string, args ...any) {
	t.Helper()
	change := client.RawPatch("application/merge-patch+json", fmt.Appendf(nil, format, args...))
	if err := in.api.Patch(call(t), object, change); err != nil {
		t.Fatalf("patch %T %s: %v", object, object.GetName(), err)
	}
}

// shorten moves the expiry of the seed story's raise, and returns it.
func (in *installation) shorten(t *testing.T, d time.Duration) time.Time {
	t.Helper()
	expiresAt := in.after(t, d)
	lease := &v1alpha1.TemporaryLimitLease{ObjectMeta: metav1.ObjectMeta{Namespace: in.namespace, Name: leaseName}}
	in.patch(t, lease, `{"spec": {"expiresAt": %q}}`, expiresAt.Format(time.RFC3339))
	return expiresAt
}

// passExpiry moves the ledger's clock to the expiry of a raise, and returns it.
func (in *installation) passExpiry(t *testing.T, name string) time.Time {
	t.Helper()
	expiresAt := in.db.raise(t, in.namespace, name).instant(t, "expires_at")
	in.db.moveClockTo(t, expiresAt)
	return expiresAt
}

// raised brings up bucket and raise, and waits until the raise is in force.
func (in *installation) raised(t *testing.T, changes ...func(*v1alpha1.TemporaryLimitLease)) {
	t.Helper()
	in.create(t, in.bucket(), in.lease(t, changes...))
	in.waitLease(t, leaseName, active)
	if got := in.db.limit(t, in.key(bucketName)); got != temporary {
		t.Fatalf("the lease is active and the limit is %d, want %d", got, temporary)
	}
}

// reserve takes tokens as a workload does.
func (in *installation) reserve(t *testing.T, requestKey string, tokens int64) (ledger.Lease, error) {
	t.Helper()
	answer, err := in.db.ledger.Reserve(call(t), ledger.Reserve{
		Key: in.key(bucketName), RequestKey: requestKey, Fingerprint: requestKey, Tokens: tokens,
	})
	return answer.Lease, err
}

func (in *installation) mustReserve(t *testing.T, requestKey string, tokens int64) ledger.Lease {
	t.Helper()
	lease, err := in.reserve(t, requestKey, tokens)
	if err != nil {
		t.Fatalf("reserve %d tokens (%s): %v", tokens, requestKey, err)
	}
	return lease
}

// wantRefused checks that a reserve is refused with a code.
func (in *installation) wantRefused(t *testing.T, requestKey string, tokens int64, code ledger.Code) {
	t.Helper()
	if _, err := in.reserve(t, requestKey, tokens); !ledger.HasCode(err, code) {
		t.Fatalf("reserve %d tokens (%s): %v, want %s", tokens, requestKey, err, code)
	}
}

func (in *installation) mustCommit(t *testing.T, lease ledger.Lease, tokens int64) {
	t.Helper()
	_, err := in.db.ledger.Commit(call(t), ledger.Commit{Key: lease.BucketKey, LeaseID: lease.ID, ActualTokens: tokens})
	if err != nil {
		t.Fatalf("commit %d tokens: %v", tokens, err)
	}
}

func (in *installation) mustRelease(t *testing.T, lease ledger.Lease) {
	t.Helper()
	if _, err := in.db.ledger.Release(call(t), ledger.Release{Key: lease.BucketKey, LeaseID: lease.ID}); err != nil {
		t.Fatalf("release: %v", err)
	}
}

// asJSON shows an object in a message.
func asJSON(value any) string {
	text, err := json.Marshal(value)
	if err != nil {
		return err.Error()
	}
	return string(text)
}
