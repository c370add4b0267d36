package e2e_test

import (
	"path/filepath"
	"strings"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/token-lease/operator/api/v1alpha1"
)

// Goal: `make undeploy` with active raises hangs nowhere, and leaves CRDs and objects
// as the README says; what would hang is named, and nothing is removed for it. After a
// new installation the raises that became overdue meanwhile are restored once, that of
// an object which is gone as well, and the operator goes on.
// Method: two raises, then no operator. One object is deleted, which waits, and then
// taken away by force; the ledger's clock passes both expiries; the operator comes back.
func TestUndeploy(t *testing.T) {
	t.Parallel()
	d := newDeployed(t)
	for _, block := range readmeBlocks(t, "Install it") {
		d.shell(block)
	}
	d.awaitAdmission(t)
	d.runJob(t)
	_, managers := d.runReplicas(t)
	for _, name := range []string{"kept", "forced"} {
		d.create(t, d.otherBucket(name), d.otherLease(t, name, name))
		d.waitLease(t, name, active)
	}

	stage(t, "a budget in the operator's own namespace is in the way")
	inside := d.otherBucket("inside")
	inside.Namespace = systemNamespace
	d.create(t, inside)
	d.undeployRefused(t, "tokenbucket.budget.tokenlease.dev/inside")
	d.delete(t, inside)
	d.waitGone(t, inside)

	stage(t, "the operator is removed")
	if output, err := d.make(t, "undeploy"); err != nil {
		t.Fatalf("make undeploy: %v\n%s", err, output)
	}
	for _, m := range managers {
		if err := m.Kill(); err != nil { // as the end of their pods
			t.Fatal(err)
		}
	}
	d.wantUndeployed(t)

	stage(t, "an object that is deleted now waits, and is said to")
	forced := d.otherLease(t, "forced", "forced")
	d.delete(t, forced)
	d.undeployRefused(t, "temporarylimitleases "+d.namespace+"/forced")
	d.takeAway(t, forced)
	d.passExpiry(t, "kept")
	for _, name := range []string{"kept", "forced"} {
		if got := d.db.limit(t, d.key(name)); got != temporary {
			t.Errorf("%s: the limit is %d although nothing looks at it, want %d", name, got, temporary)
		}
	}

	stage(t, "the operator comes back")
	for _, block := range readmeBlocks(t, "Install it") {
		d.shell(block)
	}
	if output, err := d.make(t, "deploy"); err != nil {
		t.Fatalf("make deploy: %v\n%s", err, output)
	}
	d.runJob(t)
	d.runReplicas(t)
	d.waitLease(t, "kept", restored)
	for _, name := range []string{"kept", "forced"} {
		d.waitNormal(t, name)
		d.db.one(t, d.key(name), "RaiseActivated")
		d.db.one(t, d.key(name), "RaiseRestored")
	}
	for _, object := range []client.Object{d.otherLease(t, "kept", "kept"), d.otherBucket("kept"), d.otherBucket("forced")} {
		d.delete(t, object)
		d.waitGone(t, object)
	}
}

// undeployRefused checks that `make undeploy` ends within its bound, names what would
// hang, and removes nothing.
func (d *deployed) undeployRefused(t *testing.T, named string) {
	t.Helper()
	output, err := d.make(t, "undeploy", "REMOVE_TIMEOUT=2s")
	if err == nil || !strings.Contains(output, "nothing was removed") || !strings.Contains(output, named) {
		t.Errorf("make undeploy: %v, want a refusal that names %s:\n%s", err, named, output)
	}
	d.wantCRDs(t, true)
}

// wantUndeployed checks what is left after `make undeploy`: CRDs and objects.
func (d *deployed) wantUndeployed(t *testing.T) {
	t.Helper()
	d.wantCRDs(t, true)
	output, err := d.kubectl(t.Context(), "", "get", "namespace/"+systemNamespace, "clusterrole/tokenlease-manager", "clusterrolebinding/tokenlease-manager")
	if err == nil || strings.Count(output, "NotFound") != 3 {
		t.Errorf("the operator is not removed: %v %s", err, output)
	}
	for _, name := range []string{"kept", "forced"} {
		for _, object := range []client.Object{&v1alpha1.TokenBucket{}, &v1alpha1.TemporaryLimitLease{}} {
			err := d.api.Get(call(t), client.ObjectKey{Namespace: d.namespace, Name: name}, object)
			if err != nil || !object.GetDeletionTimestamp().IsZero() {
				t.Errorf("%T %s is not kept: %v", object, name, err)
			}
		}
		if got := d.db.limit(t, d.key(name)); got != temporary {
			t.Errorf("%s: the limit is %d, want %d", name, got, temporary)
		}
	}
}

// Goal: who deletes by the one file after all can get out of it as the README says:
// the objects wait for an operator and are not lost sight of; once it is there again
// the raise ends, the objects go, and the CRDs with them.
func TestDeletedByTheOneFile(t *testing.T) {
	t.Parallel()
	d := newDeployed(t)
	if output, err := d.make(t, "build-installer", "DIST="+d.dir); err != nil {
		t.Fatalf("make build-installer: %v\n%s", err, output)
	}
	file := "--filename=" + filepath.Join(d.dir, "install.yaml")
	installed := func() {
		d.mustKubectl(t, "", "apply", file)
		for _, block := range readmeBlocks(t, "Install it") {
			for line := range strings.Lines(block) {
				if strings.Contains(line, "create secret") {
					d.shell(line)
				}
			}
		}
	}
	installed()
	d.wantCRDs(t, true)
	d.awaitAdmission(t)
	d.runJob(t)
	_, managers := d.runReplicas(t)
	d.raised(t)

	stage(t, "everything is deleted at once, and the managers are gone first")
	for _, m := range managers {
		if err := m.Kill(); err != nil {
			t.Fatal(err)
		}
	}
	d.mustKubectl(t, "", "delete", file, "--wait=false")
	d.mustKubectl(t, "", "wait", "namespace/"+systemNamespace, "--for=delete", "--timeout=60s")
	lease := d.lease(t)
	if err := d.api.Get(call(t), client.ObjectKeyFromObject(lease), lease); err != nil || lease.DeletionTimestamp.IsZero() {
		t.Fatalf("the lease does not wait for an operator: %v", err)
	}

	stage(t, "the file is applied again")
	installed()
	d.runReplicas(t)
	d.db.waitLimit(t, d.key(bucketName), normal)
	d.mustKubectl(t, "", "wait", "--for=delete", "--timeout=120s",
		"crd/tokenbuckets."+v1alpha1.GroupName, "crd/temporarylimitleases."+v1alpha1.GroupName)
	d.db.one(t, d.key(bucketName), "RaiseRestored")
	d.db.one(t, d.key(bucketName), "BucketClosed")
}
