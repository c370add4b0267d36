package e2e_test

import (
	"debug/elf"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/hack/devenv/process"
)

// Goal: the program that goes into an image needs nothing but itself, and starts.
// Method: build it as the Dockerfile does, look for a loader and for libraries in its
// headers, and run it.
func TestStaticProgram(t *testing.T) {
	t.Parallel()
	path := static(t)
	file, err := elf.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for _, part := range file.Progs {
		if part.Type == elf.PT_INTERP {
			t.Error("it asks for a loader")
		}
	}
	if libraries, err := file.ImportedLibraries(); err != nil || len(libraries) > 0 {
		t.Errorf("it asks for the libraries %v (%v)", libraries, err)
	}
	dir, err := newDir("static-run")
	if err != nil {
		t.Fatal(err)
	}
	output, err := runToEnd(t.Context(), process.Command{Path: path, Args: []string{"version"}, LogFile: dir + "/output"})
	if err != nil || strings.TrimSpace(output) == "" {
		t.Errorf("version: %v %s", err, output)
	}
}

// Goal: the Dockerfile copies what the program is made of, and builds it with the
// version of Go that the module asks for: it cannot be tried here.
func TestDockerfile(t *testing.T) {
	t.Parallel()
	dockerfile, err := os.ReadFile(filepath.Join(world.root, "Dockerfile"))
	if err != nil {
		t.Fatal(err)
	}
	dir, err := newDir("dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	packages, err := runToEnd(t.Context(), process.Command{
		Path: "/usr/bin/env", Args: []string{"go", "list", "-deps", "-f", "{{with .Module}}{{if .Main}}{{$.ImportPath}}{{end}}{{end}}", "./cmd/manager"},
		Env: os.Environ(), Dir: world.root, LogFile: filepath.Join(dir, "output"),
	})
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, packages)
	}
	const module = "github.com/token-lease/operator/"
	if !strings.Contains(packages, module+"cmd/manager") {
		t.Fatalf("go list does not name the program:\n%s", packages)
	}
	for line := range strings.Lines(packages) {
		folder, _, _ := strings.Cut(strings.TrimPrefix(strings.TrimSpace(line), module), "/")
		if !strings.Contains(string(dockerfile), "\nCOPY "+folder+" "+folder+"\n") {
			t.Errorf("the Dockerfile does not copy %s", folder)
		}
	}
	mod, err := os.ReadFile(filepath.Join(world.root, "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	_, version, _ := strings.Cut(string(mod), "\ngo ")
	version, _, _ = strings.Cut(version, "\n")
	if !strings.Contains(string(dockerfile), "\nARG GO_IMAGE=golang:"+version+"\n") {
		t.Errorf("the Dockerfile builds with another version than %s", version)
	}
}

// Goal: what a user applies comes up: each manifest is accepted, also a second time,
// as a dry run and by server-side apply; its pods keep the strictest standard; the
// managers wait for the migration; two replicas work under the ServiceAccount's own
// token, and carry a raise through. A wrong password in the Secret is shown, told to
// nobody, and mended without a restart.
// Method: install as the README says, and run the containers of Job and Deployment as
// processes, with the arguments that the cluster has for them.
func TestDeployed(t *testing.T) {
	t.Parallel()
	d := newDeployed(t)
	for _, block := range readmeBlocks(t, "Install it") {
		d.shell(block)
	}
	d.wantAppliedCleanly(t)
	d.wantStrictPods(t)

	stage(t, "the managers wait for the migration")
	spec := d.deployment(t).Spec.Template.Spec
	waiting := d.pod(t, "waiting", spec, spec.InitContainers[0])
	early, err := process.Start(waiting.command)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = early.Kill() })
	waitFor(t, "the init container to say what it waits for", func() (bool, string) {
		return strings.Contains(early.LogTail(), "waiting for the schema"), early.LogTail()
	})
	d.runJob(t)
	waitFor(t, "the init container to end", func() (bool, string) { return !early.Running(), early.LogTail() })
	if !early.State().Success() {
		t.Fatalf("the init container: %s", early.LogTail())
	}
	d.awaitAdmission(t)
	pods, managers := d.runReplicas(t)
	d.raised(t)
	d.wantEvents(t, "RaiseActivated")
	d.draw(t, managers[0])
	d.rotate(t, pods, managers)
	d.passExpiry(t, leaseName)
	d.waitLease(t, leaseName, restored)
	d.wantRights(t)
	d.wantNobodyElseWrites(t)
	for _, m := range managers {
		m.terminate(t)
	}
}

// wantAppliedCleanly applies what is installed again, in each way that tools do.
func (d *deployed) wantAppliedCleanly(t *testing.T) {
	t.Helper()
	for _, block := range []string{
		"kubectl apply -k config/default", "kubectl apply --dry-run=server -k config/default",
		"kubectl apply --server-side -k config/default", "kubectl apply --server-side -k config/crd", "kubectl diff -k config/default",
	} {
		d.shell(block)
	}
	before := d.deployment(t).Generation
	output, err := d.make(t, "deploy")
	if err != nil {
		t.Fatalf("make deploy: %v\n%s", err, output)
	}
	if after := d.deployment(t).Generation; after != before {
		t.Errorf("applying the same changed the Deployment from generation %d to %d", before, after)
	}
	if output, err := d.make(t, "build-installer", "DIST="+d.dir); err != nil {
		t.Fatalf("make build-installer: %v\n%s", err, output)
	}
	d.mustKubectl(t, "", "apply", "--server-side", "--dry-run=server", "--filename="+d.dir+"/install.yaml")
}

// wantStrictPods lets the API server judge the pods by the standard that the
// namespace enforces, and checks what that standard does not ask for.
func (d *deployed) wantStrictPods(t *testing.T) {
	t.Helper()
	for name, template := range map[string]corev1.PodTemplateSpec{
		"manager": d.deployment(t).Spec.Template, "migration": d.job(t).Spec.Template,
	} {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: systemNamespace, Name: name}, Spec: *template.Spec.DeepCopy()}
		if err := d.api.Create(call(t), p, client.DryRunAll); err != nil {
			t.Errorf("the pod of %s: %v", name, err)
		}
		for _, c := range slices.Concat(template.Spec.InitContainers, template.Spec.Containers) {
			if !*c.SecurityContext.ReadOnlyRootFilesystem || c.Resources.Limits.Memory().IsZero() || c.Resources.Requests.Cpu().IsZero() {
				t.Errorf("%s, %s: the file system can be written, or resources are unbounded", name, c.Name)
			}
		}
	}
	for _, volume := range d.deployment(t).Spec.Template.Spec.Volumes {
		if volume.Secret != nil && volume.Secret.SecretName == "tokenlease-database-owner" {
			t.Error("the manager sees the owner's URL")
		}
	}
}

// rotate changes the password in the Secret to a wrong one, kills the connections,
// and puts the right one back.
func (d *deployed) rotate(t *testing.T, pods []*pod, managers []*manager) {
	t.Helper()
	const wrong = "not-the-password-4711"
	right := d.db.runtimeURL
	stage(t, "the Secret holds a wrong password, and the connections are killed")
	d.setSecret(t, withPassword(t, d.db.ownerURL, runtimeRole, wrong), pods)
	d.db.exec(t, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = $1", runtimeRole)
	for _, m := range managers {
		m.waitPart(t, "ledger", false)
		m.wantMetrics(t, map[string]float64{"tokenlease_ledger_writable": 0})
		if status, answer := m.get(t, m.health, "/readyz"); status != 200 {
			t.Errorf("%s cannot answer: %d %s", m.worker, status, answer)
		}
	}
	d.waitLedgerUnavailable(t)

	stage(t, "the Secret holds the right one again")
	d.setSecret(t, right, pods)
	for _, m := range managers {
		m.waitPart(t, "ledger", true)
		if !m.Running() {
			t.Fatal("a manager ended")
		}
		d.checkNotTold(t, m, wrong, passwordOf(t, right), passwordOf(t, d.db.ownerURL))
	}
	d.waitBucket(t, isTrue(v1alpha1.ConditionReady), isTrue(v1alpha1.ConditionRaised))
}

// setSecret changes the Secret of the run-time role, and what the nodes mount of it.
func (d *deployed) setSecret(t *testing.T, url string, pods []*pod) {
	t.Helper()
	secret := &corev1.Secret{}
	d.get(t, databaseSecret, secret)
	secret.Data["database-url"] = []byte(url)
	if err := d.api.Update(call(t), secret); err != nil {
		t.Fatal(err)
	}
	for _, p := range pods {
		d.mount(t, p)
	}
}
