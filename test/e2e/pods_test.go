package e2e_test

import (
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/token-lease/operator/hack/devenv/controlplane"
	"github.com/token-lease/operator/hack/devenv/environment"
	"github.com/token-lease/operator/hack/devenv/postgres/postgrestest"
	"github.com/token-lease/operator/hack/devenv/process"
)

const (
	databaseSecret = "tokenlease-database"
	runtimeRole    = "tokenlease"
	// tokenLife is longer than any test.
	tokenLife = "2h"
)

// deployed is an installation as a user makes it, from nothing: a control plane that
// knows nothing of the operator, a server with the two roles that the README asks for.
// The control plane has no nodes, so that the test runs what pods would.
type deployed struct {
	*installation
	shell func(block string) (answers string)
	// uses is what the managers ask the API server for, at server.
	uses   *uses
	server *rest.Config
}

func newDeployed(t *testing.T) *deployed {
	t.Helper()
	c, err := startEmptyCluster(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	c.stopWith(t)
	in := &installation{cluster: c, db: newDatabase(t, postgrestest.Own(t)), namespace: c.newNamespace(t), election: systemNamespace}
	if in.dir, err = newDir(in.namespace); err != nil {
		t.Fatal(err)
	}
	password := rand.Text()
	in.db.onServer(t, "CREATE ROLE "+runtimeRole+" LOGIN PASSWORD '"+password+"'")
	in.db.runtimeURL = withPassword(t, in.db.ownerURL, runtimeRole, password)
	d := &deployed{installation: in, shell: in.readmeShell(t), uses: &uses{}}
	d.server = d.uses.watched(t, c.plane.RESTConfig())
	return d
}

// make runs one of the Makefile's targets against the cluster.
func (d *deployed) make(t *testing.T, arguments ...string) (string, error) {
	t.Helper()
	return runMake(t.Context(), commandTimeout, append(arguments, "KUBECTL="+d.plane.Kubectl()), "KUBECONFIG="+d.plane.KubeconfigPath())
}

func runMake(ctx context.Context, bound time.Duration, arguments []string, env ...string) (string, error) {
	dir, err := newDir("make")
	if err != nil {
		return "", err
	}
	// The go command needs the caller's own environment: proxies and caches.
	return runWithin(ctx, bound, process.Command{
		Path: "/usr/bin/env", Args: append([]string{"make", "--no-print-directory"}, arguments...),
		Env: append(os.Environ(), env...), Dir: world.root, LogFile: filepath.Join(dir, "output"),
	})
}

// staticProgram builds the program as it goes into an image, once for all tests. Its
// flags are not those of the tests, so that the first build compiles everything.
var staticProgram = sync.OnceValues(func() (string, error) {
	dir, err := newDir("static")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "manager")
	if output, err := runMake(context.Background(), startTimeout, []string{"build-static", "STATIC=" + path}); err != nil {
		return "", fmt.Errorf("make build-static: %w: %s", err, output)
	}
	return path, nil
})

func static(t *testing.T) string {
	t.Helper()
	path, err := staticProgram()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func (d *deployed) deployment(t *testing.T) *appsv1.Deployment {
	t.Helper()
	found := &appsv1.Deployment{}
	d.get(t, "tokenlease-manager", found)
	return found
}

func (d *deployed) job(t *testing.T) *batchv1.Job {
	t.Helper()
	found := &batchv1.Job{}
	d.get(t, "tokenlease-migration", found)
	return found
}

func (d *deployed) get(t *testing.T, name string, object client.Object) {
	t.Helper()
	if err := d.api.Get(call(t), client.ObjectKey{Namespace: systemNamespace, Name: name}, object); err != nil {
		t.Fatal(err)
	}
}

// pod is what a container of a pod would be: its files, its account and its address.
type pod struct {
	name    string
	secrets map[string]string // from a Secret's name to where it is mounted here
	command process.Command
	// addresses are those of the container's ports, by the flag that binds them.
	addresses map[string]string
}

// pod prepares a container of a pod that the cluster describes. Its arguments are
// those of the cluster, with the directories and ports of this machine.
func (d *deployed) pod(t *testing.T, name string, spec corev1.PodSpec, container corev1.Container) *pod {
	t.Helper()
	p := &pod{
		name: name, secrets: map[string]string{}, addresses: map[string]string{},
		command: process.Command{Path: static(t), LogFile: filepath.Join(d.dir, name+".log")},
	}
	directories := map[string]string{} // from the pod's to ours
	for _, mount := range container.VolumeMounts {
		for _, volume := range spec.Volumes {
			if volume.Name == mount.Name && volume.Secret != nil {
				dir := filepath.Join(d.dir, name, volume.Name)
				p.secrets[volume.Secret.SecretName], directories[mount.MountPath] = dir, dir
			}
		}
	}
	d.mount(t, p)
	for _, argument := range container.Args {
		flag, _, _ := strings.Cut(argument, "=")
		if strings.HasSuffix(flag, "-bind-address") {
			port, err := process.FreePort()
			if err != nil {
				t.Fatal(err)
			}
			p.addresses[flag] = process.Address(port)
			argument = flag + "=" + p.addresses[flag]
		}
		for theirs, ours := range directories {
			argument = strings.Replace(argument, "="+theirs+"/", "="+ours+"/", 1)
		}
		p.command.Args = append(p.command.Args, argument)
	}
	if spec.AutomountServiceAccountToken == nil || *spec.AutomountServiceAccountToken {
		p.command.Env = append(p.command.Env, "KUBECONFIG="+d.identity(t, spec.ServiceAccountName))
	}
	return p
}

// identity writes a kubeconfig with a token of a ServiceAccount, such as a pod gets.
func (d *deployed) identity(t *testing.T, name string) string {
	t.Helper()
	token := strings.TrimSpace(d.mustKubectl(t, "", "create", "token", name, "--namespace="+systemNamespace, "--duration="+tokenLife))
	file := filepath.Join(d.dir, name+".kubeconfig")
	config := rest.CopyConfig(d.server)
	config.BearerToken = token
	if err := controlplane.WriteKubeconfig(file, config); err != nil {
		t.Fatal(err)
	}
	return file
}

// mount writes the Secrets of a pod as a node does: each version into a directory of
// its own, to which a link is moved at once.
func (d *deployed) mount(t *testing.T, p *pod) {
	t.Helper()
	for name, dir := range p.secrets {
		secret := &corev1.Secret{}
		d.get(t, name, secret)
		version := "..version-" + secret.ResourceVersion
		if err := os.MkdirAll(filepath.Join(dir, version), 0o700); err != nil {
			t.Fatal(err)
		}
		for key, value := range secret.Data {
			if err := os.WriteFile(filepath.Join(dir, version, key), value, 0o400); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink(filepath.Join("..data", key), filepath.Join(dir, key)); err != nil && !os.IsExist(err) {
				t.Fatal(err)
			}
		}
		next := filepath.Join(dir, "..data.next")
		if err := os.Symlink(version, next); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(next, filepath.Join(dir, "..data")); err != nil {
			t.Fatal(err)
		}
	}
}

// runJob runs the migration to its end.
func (d *deployed) runJob(t *testing.T) {
	t.Helper()
	spec := d.job(t).Spec.Template.Spec
	output, err := runToEnd(t.Context(), d.pod(t, "migration", spec, spec.Containers[0]).command)
	if err != nil {
		t.Fatalf("the migration: %v\n%s", err, output)
	}
}

// runReplicas runs the managers of the Deployment, and waits until they answer.
func (d *deployed) runReplicas(t *testing.T) (pods []*pod, managers []*manager) {
	t.Helper()
	deployment := d.deployment(t)
	spec := deployment.Spec.Template.Spec
	for i := range int(*deployment.Spec.Replicas) {
		name := fmt.Sprintf("replica-%d-%s", i, strings.ToLower(rand.Text()[:5]))
		init := d.pod(t, name+"-init", spec, spec.InitContainers[0])
		if output, err := runToEnd(t.Context(), init.command); err != nil {
			t.Fatalf("the init container: %v\n%s", err, output)
		}
		p := d.pod(t, name, spec, spec.Containers[0])
		// What a pod has of its own: the name of its host, and the file with its namespace.
		p.command.Args = append(p.command.Args, "--worker="+name, "--leader-election-namespace="+systemNamespace)
		started, err := process.Start(p.command)
		if err != nil {
			t.Fatal(err)
		}
		m := &manager{
			Process: started, worker: name, logFile: p.command.LogFile,
			metrics: p.addresses["--metrics-bind-address"], health: p.addresses["--health-probe-bind-address"],
			dataPlane: p.addresses["--data-plane-bind-address"],
		}
		t.Cleanup(func() { m.endWith(t) })
		pods, managers = append(pods, p), append(managers, m)
	}
	for _, m := range managers {
		waitFor(t, m.worker+" to be ready", func() (bool, string) {
			status, answer := m.get(t, m.health, spec.Containers[0].ReadinessProbe.HTTPGet.Path)
			return status == 200 && m.Running(), answer + m.LogTail()
		})
	}
	return pods, managers
}

// awaitAdmission waits until leases may be created: the manager takes none that is as old
// as the policies which vouch for it.
func (d *deployed) awaitAdmission(t *testing.T) {
	t.Helper()
	if err := environment.AwaitAdmission(t.Context(), d.plane.RESTConfig()); err != nil {
		t.Fatal(err)
	}
}
