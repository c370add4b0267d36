package e2e_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/hack/devenv/environment"
)

const gitOpsDocument = "docs/gitops/README.md"

// toolCRD stands in for a CRD of a tool that the test does not have: it takes whatever
// has the right kind.
const toolCRD = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: PLURAL.GROUP}
spec:
  group: GROUP
  scope: Namespaced
  names: {kind: KIND, plural: PLURAL}
  versions:
    - {name: VERSION, served: true, storage: true, schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}
---
`

// toolNamespaces are where the tools live, with the ConfigMap that Argo CD has.
const toolNamespaces = `
{apiVersion: v1, kind: Namespace, metadata: {name: argocd}}
---
{apiVersion: v1, kind: Namespace, metadata: {name: flux-system}}
---
{apiVersion: v1, kind: ConfigMap, metadata: {name: argocd-cm, namespace: argocd}, data: {theirs: kept}}
---
`

// Goal: each command of the document about GitOps works to the letter: the objects of
// the tools are accepted, the example's repository is applied without a conflict and
// shows no difference, the waits end, and what they say is so in the ledger.
// Method: a control plane of its own, with stand-ins for the kinds of Argo CD, Flux and
// the Prometheus Operator, and a manager that sees all namespaces.
func TestGitOpsDocument(t *testing.T) {
	t.Parallel()
	in := installOn(t, startOwnCluster(t), world.postgres)
	in.withTools(t)
	in.start(t, "manager-a", managerOptions{})
	shell := in.readmeShell(t)
	for _, section := range []string{"Argo CD", "Flux", "By hand, as a tool does it"} {
		for _, block := range docBlocks(t, gitOpsDocument, section) {
			if strings.Contains(block, "kubectl diff") {
				in.namespace = "tenants"
				in.waitBucket(t, inSync...)
				in.waitLease(t, leaseName, pending)
			}
			shell(block)
			if strings.Contains(block, "repository/operator") {
				if err := environment.AwaitAdmission(call(t), in.plane.RESTConfig()); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	if answer := in.mustKubectl(t, "", "get", "configmap/argocd-cm", "--namespace=argocd", "--output=jsonpath={.data.theirs}"); answer != "kept" {
		t.Errorf("the patch of Argo CD's ConfigMap has taken something away: %q", answer)
	}
	in.checkSpecOwners(t)
	for _, block := range docBlocks(t, gitOpsDocument, "Wait for it") {
		shell(block)
	}
	lease := &v1alpha1.TemporaryLimitLease{}
	if err := in.api.Get(call(t), client.ObjectKey{Namespace: in.namespace, Name: leaseName}, lease); client.IgnoreNotFound(err) != nil || err == nil {
		t.Errorf("the lease is still there: %v", err)
	}
	if got := in.db.raise(t, in.namespace, leaseName).text("reason"); got != "Revoked" {
		t.Errorf("the raise ended with %s, want Revoked", got)
	}
}

// withTools makes the cluster know the kinds of the tools.
func (in *installation) withTools(t *testing.T) {
	t.Helper()
	manifest := toolNamespaces
	for _, tool := range [][]string{
		{"argoproj.io", "v1alpha1", "Application", "applications"},
		{"kustomize.toolkit.fluxcd.io", "v1", "Kustomization", "kustomizations"},
		{"monitoring.coreos.com", "v1", "ServiceMonitor", "servicemonitors"},
	} {
		manifest += strings.NewReplacer("GROUP", tool[0], "VERSION", tool[1], "KIND", tool[2], "PLURAL", tool[3]).Replace(toolCRD)
	}
	in.mustKubectl(t, manifest, "apply")
	in.mustKubectl(t, "", "wait", "crd", "--all", "--for=condition=Established", "--timeout=60s")
}

// Goal: the objects for the tools name paths that the example repository has, and no
// tool ever prunes a CRD.
func TestGitOpsPaths(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"argocd/operator.yaml", "argocd/budgets.yaml", "flux/operator.yaml", "flux/budgets.yaml"} {
		content, err := os.ReadFile(filepath.Join(world.root, "docs/gitops", name))
		if err != nil {
			t.Fatal(err)
		}
		for document := range strings.SplitSeq(string(content), "\n---\n") {
			var object struct {
				Metadata struct{ Name string }
				Spec     struct {
					Path       string
					Prune      bool
					Source     struct{ Path string }
					SyncPolicy struct{ Automated struct{ Prune bool } }
				}
			}
			if err := yaml.Unmarshal([]byte(document), &object); err != nil {
				t.Fatal(err)
			}
			path := object.Spec.Path + object.Spec.Source.Path
			if _, err := os.Stat(filepath.Join(world.root, "docs/gitops/repository", path, "kustomization.yaml")); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			if path = filepath.Clean(path); path == "crds" && (object.Spec.Prune || object.Spec.SyncPolicy.Automated.Prune) {
				t.Errorf("%s: %s prunes CRDs", name, object.Metadata.Name)
			}
		}
	}
}

// Goal: the component for the Prometheus Operator can be added to the installation, and
// finds the managers: its selector, its port and the port's name are those of the
// Service, and those of the Deployment.
func TestMonitoringComponent(t *testing.T) {
	t.Parallel()
	dir, err := newDir("monitoring")
	if err != nil {
		t.Fatal(err)
	}
	up, err := filepath.Rel(dir, filepath.Join(world.root, "config"))
	if err != nil {
		t.Fatal(err)
	}
	overlay := "resources: [" + up + "/default]\ncomponents: [" + up + "/components/monitoring]\n"
	if err := os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(overlay), 0o600); err != nil {
		t.Fatal(err)
	}
	built := world.cluster.mustKubectl(t, "", "kustomize", dir)
	var monitor struct {
		Spec struct {
			Selector  struct{ MatchLabels map[string]string }
			Endpoints []struct{ Port string }
		}
	}
	var service struct {
		Metadata struct{ Labels map[string]string }
		Spec     struct {
			Selector map[string]string
			Ports    []struct{ Name, TargetPort string }
		}
	}
	var deployment struct {
		Spec struct {
			Template struct {
				Metadata struct{ Labels map[string]string }
				Spec     struct {
					Containers []struct{ Ports []struct{ Name string } }
				}
			}
		}
	}
	for document := range strings.SplitSeq(built, "\n---\n") {
		for begin, into := range map[string]any{
			"kind: ServiceMonitor\n": &monitor, "kind: Deployment\n": &deployment, "name: tokenlease-metrics\n": &service,
		} {
			if strings.Contains(document, begin) {
				if err := yaml.Unmarshal([]byte(document), into); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	wantLabels(t, monitor.Spec.Selector.MatchLabels, service.Metadata.Labels)
	wantLabels(t, service.Spec.Selector, deployment.Spec.Template.Metadata.Labels)
	ports := service.Spec.Ports
	if len(ports) != 1 || len(monitor.Spec.Endpoints) != 1 || monitor.Spec.Endpoints[0].Port != ports[0].Name {
		t.Fatalf("the monitor asks for %v, the Service has %v", monitor.Spec.Endpoints, ports)
	}
	for _, port := range deployment.Spec.Template.Spec.Containers[0].Ports {
		if port.Name == ports[0].TargetPort {
			return
		}
	}
	t.Errorf("the Deployment has no port %s", ports[0].TargetPort)
}

// wantLabels checks that a selector selects, and by something.
func wantLabels(t *testing.T, selector, labels map[string]string) {
	t.Helper()
	if len(selector) == 0 {
		t.Error("an empty selector selects everything")
	}
	for name, value := range selector {
		if labels[name] != value {
			t.Errorf("the selector asks for %s=%s and the labels are %v", name, value, labels)
		}
	}
}
