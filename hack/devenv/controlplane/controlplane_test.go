package controlplane

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/token-lease/operator/hack/devenv/process"
)

func admin(t *testing.T) client.Client {
	t.Helper()
	c, err := client.New(plane.RESTConfig(), client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func namespace(t *testing.T, prefix string) *corev1.Namespace {
	t.Helper()
	created := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: prefix + "-"}}
	if err := admin(t).Create(t.Context(), created); err != nil {
		t.Fatal(err)
	}
	return created
}

// Goal: what a cluster's controllers do happens here. Method: wait for the
// default ServiceAccount, for a dependent to go with its owner, for a role to
// be aggregated, for a namespace to go with what is in it.
func TestControllersWork(t *testing.T) {
	c := admin(t)
	ns := namespace(t, "controllers")
	waitUntil(t, "the default ServiceAccount is there", func() (bool, error) {
		err := c.Get(t.Context(), client.ObjectKey{Namespace: ns.Name, Name: "default"}, &corev1.ServiceAccount{})
		return err == nil, err
	})

	owner := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns.Name, Name: "owner"}}
	if err := c.Create(t.Context(), owner); err != nil {
		t.Fatal(err)
	}
	dependent := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
		Namespace: ns.Name, Name: "dependent",
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: owner.Name, UID: owner.UID}},
	}}
	if err := c.Create(t.Context(), dependent); err != nil {
		t.Fatal(err)
	}
	if err := c.Delete(t.Context(), owner); err != nil {
		t.Fatal(err)
	}
	waitUntil(t, "the dependent is collected", func() (bool, error) {
		err := c.Get(t.Context(), client.ObjectKeyFromObject(dependent), dependent)
		return apierrors.IsNotFound(err), err
	})

	part := &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{
			GenerateName: "devenv-part-", Labels: map[string]string{"rbac.authorization.k8s.io/aggregate-to-view": "true"},
		},
		Rules: []rbacv1.PolicyRule{{APIGroups: []string{"devenv.test"}, Resources: []string{"things"}, Verbs: []string{"get"}}},
	}
	if err := c.Create(t.Context(), part); err != nil {
		t.Fatal(err)
	}
	waitUntil(t, "the role view holds the new rule", func() (bool, error) {
		var view rbacv1.ClusterRole
		err := c.Get(t.Context(), client.ObjectKey{Name: "view"}, &view)
		return slices.ContainsFunc(view.Rules, func(rule rbacv1.PolicyRule) bool {
			return slices.Contains(rule.APIGroups, "devenv.test")
		}), err
	})

	if err := c.Delete(t.Context(), ns); err != nil {
		t.Fatal(err)
	}
	waitUntil(t, "the namespace is gone", func() (bool, error) {
		err := c.Get(t.Context(), client.ObjectKeyFromObject(ns), ns)
		return apierrors.IsNotFound(err), err
	})
}

// Goal: an API server that was stopped, or killed, comes back at the same
// address, with the same certificates and the same objects, for clients that
// knew it before.
func TestAPIServerOutage(t *testing.T) {
	c := admin(t)
	ns := namespace(t, "outage")
	kept := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns.Name, Name: "kept"}, Data: map[string]string{"cap": "120000"},
	}
	if err := c.Create(t.Context(), kept); err != nil {
		t.Fatal(err)
	}
	outages := map[string]func() error{
		"StopAPIServer": func() error { return plane.StopAPIServer(t.Context()) },
		"KillAPIServer": plane.KillAPIServer,
	}
	for name, takeDown := range outages {
		for range 2 { // the second time nothing happens
			if err := takeDown(); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(kept), &corev1.ConfigMap{}); err == nil {
			t.Fatalf("after %s the API server still answers", name)
		}
		for range 2 {
			if err := plane.StartAPIServer(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		var found corev1.ConfigMap
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(kept), &found); err != nil {
			t.Fatal(err)
		}
		if found.UID != kept.UID || found.Data["cap"] != "120000" {
			t.Fatalf("after %s the object is another one: %+v", name, found)
		}
	}
	if err := c.Delete(t.Context(), ns); err != nil {
		t.Fatal(err)
	}
	waitUntil(t, "the controllers work again", func() (bool, error) {
		err := c.Get(t.Context(), client.ObjectKeyFromObject(ns), ns)
		return apierrors.IsNotFound(err), err
	})
}

// Goal: users have the rights that RBAC gives them and no others, and the
// administrator's kubectl has all.
func TestUsers(t *testing.T) {
	ns := namespace(t, "users").Name
	config, err := plane.ServiceAccountConfig(ns, "manager")
	if err != nil {
		t.Fatal(err)
	}
	user, err := client.New(config, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := user.List(t.Context(), &corev1.ConfigMapList{}, client.InNamespace(ns)); !apierrors.IsForbidden(err) {
		t.Fatalf("a user without rights got %v, want Forbidden", err)
	}
	binding := &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "manager"},
		Subjects:   []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: ns, Name: "manager"}},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "view"},
	}
	if err := admin(t).Create(t.Context(), binding); err != nil {
		t.Fatal(err)
	}
	waitUntil(t, "the user may read", func() (bool, error) {
		err := user.List(t.Context(), &corev1.ConfigMapList{}, client.InNamespace(ns))
		return err == nil, err
	})

	path := filepath.Join(t.TempDir(), "a user.kubeconfig")
	if err := WriteKubeconfig(path, config); err != nil {
		t.Fatal(err)
	}
	for kubeconfig, want := range map[string]string{path: "no", plane.KubeconfigPath(): "yes"} {
		cmd := exec.CommandContext(t.Context(), plane.Kubectl(), "--kubeconfig", kubeconfig, "auth", "can-i", "delete", "namespaces")
		cmd.Env = process.Environment()
		out, _ := cmd.Output() // "no" exits with 1
		if got := strings.TrimSpace(string(out)); got != want {
			t.Errorf("with %s kubectl answers %q, want %q", filepath.Base(kubeconfig), got, want)
		}
	}
}

// Goal: CRDs are served once InstallCRDs returns, and a directory without any
// is an error rather than a surprise later.
func TestInstallCRDs(t *testing.T) {
	empty := t.TempDir()
	if err := plane.InstallCRDs(empty); err == nil {
		t.Fatal("a directory without CRDs was accepted")
	}
	dir := filepath.Join(t.TempDir(), "with space")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "things.yaml"), []byte(thingCRD), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 { // again is an update
		if err := plane.InstallCRDs(dir); err != nil {
			t.Fatal(err)
		}
	}
	things := &metav1.PartialObjectMetadataList{}
	things.SetGroupVersionKind(metav1.SchemeGroupVersion.WithKind("ThingList"))
	things.APIVersion = "devenv.test/v1"
	if err := admin(t).List(t.Context(), things); err != nil {
		t.Fatal(err)
	}
}

const thingCRD = `apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: things.devenv.test}
spec:
  group: devenv.test
  names: {kind: Thing, listKind: ThingList, plural: things, singular: thing}
  scope: Namespaced
  versions:
  - name: v1
    served: true
    storage: true
    schema: {openAPIV3Schema: {type: object}}
`
