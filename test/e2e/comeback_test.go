package e2e_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/token-lease/operator/api/v1alpha1"
)

// Goal: a process that lost the API server, and with it the leadership, gets its
// controllers back by itself, and they work. It takes its identity in the ledger
// from the cluster when it is not told one, and the same one each time.
// Method: a control plane of its own, whose API server goes down for longer than a
// leader may go without; the manager's process stays the same throughout.
func TestControllersComeBack(t *testing.T) {
	t.Parallel()
	own := startOwnCluster(t)
	in := installOn(t, own, world.postgres)
	in.clusterID = ""
	m := in.start(t, "manager-a", managerOptions{})
	in.raised(t)
	in.passExpiry(t, leaseName)
	in.waitLease(t, leaseName, restored)
	wantOwner := clusterIdentity(t, own)
	in.wantCluster(t, wantOwner)

	stage(t, "the API server goes, and with it the leadership")
	if err := own.plane.StopAPIServer(t.Context()); err != nil {
		t.Fatal(err)
	}
	m.waitLacksAPIServer(t)
	waitFor(t, "the leader to give up", func() (bool, string) {
		log, err := os.ReadFile(m.logFile)
		return strings.Contains(string(log), "the controllers ended; they are built anew"), fmt.Sprint(err)
	})

	stage(t, "both come back, and a second raise runs from beginning to end")
	if err := own.plane.StartAPIServer(t.Context()); err != nil {
		t.Fatal(err)
	}
	m.waitPart(t, "controllers", true)
	in.create(t, in.lease(t, named[*v1alpha1.TemporaryLimitLease]("second"), approvedBy("CHG-2")))
	in.waitLease(t, "second", active)
	in.passExpiry(t, "second")
	in.waitLease(t, "second", restored)
	in.waitBucket(t, inSync...)
	in.wantCluster(t, wantOwner)
	if !m.Running() {
		t.Error("it is not the same process any more")
	}
	m.terminate(t)
}

// clusterIdentity is what tells a cluster from others, as the README says.
func clusterIdentity(t *testing.T, c *cluster) string {
	t.Helper()
	var namespace corev1.Namespace
	if err := c.api.Get(call(t), client.ObjectKey{Name: "kube-system"}, &namespace); err != nil {
		t.Fatal(err)
	}
	if namespace.UID == "" {
		t.Fatal("the namespace kube-system has no UID")
	}
	return string(namespace.UID)
}

// wantCluster checks whose everything in the ledger is.
func (in *installation) wantCluster(t *testing.T, cluster string) {
	t.Helper()
	rows := in.db.rows(t, `
		SELECT owner_cluster AS cluster FROM tokenlease.buckets
		UNION SELECT cluster FROM tokenlease.raises`)
	if len(rows) != 1 || rows[0].text("cluster") != cluster {
		t.Errorf("buckets and raises belong to %v, want %s", rows, cluster)
	}
}

// Goal: the shipped role is enough for an election and its event, and for no other
// Lease of the namespace.
func TestElectionRole(t *testing.T) {
	t.Parallel()
	in := install(t)
	in.start(t, "manager-a", managerOptions{}).waitPart(t, "controllers", true)
	waitFor(t, "the event about the new leader", func() (bool, string) {
		var events corev1.EventList
		if err := in.api.List(call(t), &events, client.InNamespace(in.election)); err != nil {
			return false, err.Error()
		}
		for _, event := range events.Items {
			if event.Reason == "LeaderElection" && event.InvolvedObject.Name == electionID {
				return true, ""
			}
		}
		return false, asJSON(events.Items)
	})
	as := "--as=system:serviceaccount:" + systemNamespace + ":" + serviceAccount
	for _, c := range []struct{ verb, what, want string }{
		{"get", "leases.coordination.k8s.io/" + electionID, "yes"},
		{"update", "leases.coordination.k8s.io/" + electionID, "yes"},
		{"create", "leases.coordination.k8s.io", "yes"},
		{"update", "leases.coordination.k8s.io/another", "no"},
		{"get", "leases.coordination.k8s.io/another", "no"},
		{"list", "leases.coordination.k8s.io", "no"},
		{"delete", "leases.coordination.k8s.io/" + electionID, "no"},
	} {
		// It ends with an error when the answer is no.
		output, _ := in.kubectl(t.Context(), "", "auth", "can-i", c.verb, c.what, as, "--namespace="+in.election)
		if lines := strings.Fields(output); len(lines) == 0 || lines[len(lines)-1] != c.want {
			t.Errorf("may the manager %s %s: %q, want %s", c.verb, c.what, output, c.want)
		}
	}
}
