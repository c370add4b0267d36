package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/hack/devenv/controlplane"
	"github.com/token-lease/operator/hack/devenv/environment"
	"github.com/token-lease/operator/hack/devenv/process"
)

const (
	systemNamespace = "tokenlease-system"
	serviceAccount  = "tokenlease-manager"
	electionRole    = "tokenlease-leader-election"
	electionID      = "token-lease-operator.budget.tokenlease.dev"
	commandTimeout  = waitBound + time.Minute
)

// cluster is a control plane with the operator's CRDs and roles, as an
// administrator sees it.
type cluster struct {
	plane *controlplane.ControlPlane
	api   client.Client
}

func startCluster(ctx context.Context) (*cluster, error) {
	c, err := startEmptyCluster(ctx)
	if err != nil {
		return nil, err
	}
	if err := c.installConfig(ctx); err != nil {
		return nil, errors.Join(err, c.plane.Stop(ctx))
	}
	return c, nil
}

// startEmptyCluster starts a control plane that knows nothing of the operator.
func startEmptyCluster(ctx context.Context) (*cluster, error) {
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		return nil, err
	}
	plane, err := controlplane.Start(ctx, controlplane.Options{Assets: world.assets, Log: os.Stderr})
	if err != nil {
		return nil, err
	}
	api, err := client.New(plane.RESTConfig(), client.Options{Scheme: scheme})
	if err != nil {
		return nil, errors.Join(err, plane.Stop(ctx))
	}
	return &cluster{plane: plane, api: api}, nil
}

// installConfig applies what a user applies: CRDs, roles and admission policies.
func (c *cluster) installConfig(ctx context.Context) error {
	if err := c.plane.InstallCRDs(filepath.Join(world.root, "config", "crd", "bases")); err != nil {
		return err
	}
	system := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: systemNamespace}}
	if err := c.api.Create(ctx, system); err != nil {
		return err
	}
	for _, dir := range []string{"config/rbac", environment.AdmissionDir} {
		if output, err := c.kubectl(ctx, "", "apply", "--kustomize", filepath.Join(world.root, dir)); err != nil {
			return fmt.Errorf("%w: %s", err, output)
		}
	}
	return environment.AwaitAdmission(ctx, c.plane.RESTConfig())
}

// kubectl runs kubectl as administrator and returns all that it wrote. A manifest,
// if there is one, is what it is told to read.
func (c *cluster) kubectl(ctx context.Context, manifest string, args ...string) (string, error) {
	return c.kubectlAs(ctx, c.plane.KubeconfigPath(), manifest, args...)
}

// kubectlAs runs it as whom a file identifies.
func (c *cluster) kubectlAs(ctx context.Context, kubeconfig, manifest string, args ...string) (string, error) {
	dir, err := newDir("kubectl")
	if err != nil {
		return "", err
	}
	if manifest != "" {
		file := filepath.Join(dir, "manifest.yaml")
		if err := os.WriteFile(file, []byte(manifest), 0o600); err != nil {
			return "", err
		}
		args = append(args, "--filename="+file)
	}
	return runToEnd(ctx, process.Command{
		Path:    c.plane.Kubectl(),
		Args:    append([]string{"--cache-dir=" + filepath.Join(world.dir, "kubectl-cache")}, args...),
		Env:     []string{"KUBECONFIG=" + kubeconfig, "PATH=" + os.Getenv("PATH")},
		LogFile: filepath.Join(dir, "output"),
	})
}

// runToEnd runs a command that ends by itself, and returns what it wrote. Unlike
// os/exec it leaves no child behind when the test process is killed.
func runToEnd(ctx context.Context, command process.Command) (string, error) {
	return runWithin(ctx, commandTimeout, command)
}

func runWithin(ctx context.Context, bound time.Duration, command process.Command) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	p, err := process.Start(command)
	if err != nil {
		return "", err
	}
	select {
	case <-p.Done():
	case <-ctx.Done():
		err = errors.Join(ctx.Err(), p.Kill())
	}
	output, readErr := os.ReadFile(command.LogFile)
	if state := p.State(); err == nil && !state.Success() {
		err = fmt.Errorf("%s: %s", p.Name(), state)
	}
	return string(output), errors.Join(err, readErr)
}

// mustKubectl fails the test when kubectl fails.
func (c *cluster) mustKubectl(t *testing.T, manifest string, args ...string) string {
	t.Helper()
	output, err := c.kubectl(t.Context(), manifest, args...)
	if err != nil {
		t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, output)
	}
	return output
}

// startOwnCluster starts a control plane for one test, which may take its API
// server down.
func startOwnCluster(t *testing.T) *cluster {
	t.Helper()
	c, err := startCluster(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	c.stopWith(t)
	return c
}

// stopWith stops the control plane at the end of a test.
func (c *cluster) stopWith(t *testing.T) {
	t.Helper()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
		defer cancel()
		if err := c.plane.Stop(ctx); err != nil {
			t.Error(err)
		}
	})
}

// newNamespace makes a namespace that no other test uses.
func (c *cluster) newNamespace(t *testing.T) string {
	t.Helper()
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "tenants-"}}
	if err := c.api.Create(call(t), namespace); err != nil {
		t.Fatal(err)
	}
	return namespace.Name
}

// newElection makes a namespace in which managers may elect a leader of their own,
// with the rights that the shipped role gives in the system's namespace.
func (c *cluster) newElection(t *testing.T) (namespace string) {
	t.Helper()
	namespace = c.newNamespace(t)
	key := client.ObjectKey{Namespace: systemNamespace, Name: electionRole}
	var role rbacv1.Role
	var binding rbacv1.RoleBinding
	for _, object := range []client.Object{&role, &binding} {
		if err := c.api.Get(call(t), key, object); err != nil {
			t.Fatal(err)
		}
	}
	role.ObjectMeta = metav1.ObjectMeta{Namespace: namespace, Name: electionRole}
	binding.ObjectMeta = role.ObjectMeta
	for _, object := range []client.Object{&role, &binding} {
		if err := c.api.Create(call(t), object); err != nil {
			t.Fatal(err)
		}
	}
	return namespace
}

// table reads what kubectl prints: one map from heading to cell for each row.
func table(text string) []map[string]string {
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	head := lines[0]
	var starts []int
	for i := range head {
		if head[i] != ' ' && (i == 0 || head[i-1] == ' ') {
			starts = append(starts, i)
		}
	}
	var rows []map[string]string
	for _, line := range lines[1:] {
		row := map[string]string{}
		for i, start := range starts {
			end, stop := len(line), len(head)
			if i+1 < len(starts) {
				end, stop = min(end, starts[i+1]), starts[i+1]
			}
			row[strings.TrimSpace(head[start:stop])] = strings.TrimSpace(line[min(start, end):end])
		}
		rows = append(rows, row)
	}
	return rows
}
