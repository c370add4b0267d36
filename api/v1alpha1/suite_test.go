package v1alpha1_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/yaml"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/hack/devenv/controlplane"
)

// The goal of this suite is to show what a real API server makes of manifests:
// the schema is a program, and only the server runs it. Each case writes a
// manifest as a user would, and reads the answer that the user would get.

const (
	startTimeout   = 20 * time.Minute // below the bound that make gives a package
	requestTimeout = 30 * time.Second // for what one test says to the API server
)

var (
	plane *controlplane.ControlPlane
	kube  client.Client
	raw   *rest.RESTClient
)

func TestMain(m *testing.M) {
	log.SetLogger(logr.Discard()) // the installer of the CRDs logs through it
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	code, err := runSuite(ctx, m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "API suite:", err)
		code = 1
	}
	os.Exit(code)
}

func runSuite(ctx context.Context, m *testing.M) (code int, err error) {
	if err := v1alpha1.AddToScheme(scheme.Scheme); err != nil {
		return 0, err
	}
	if plane, err = controlplane.Start(ctx, controlplane.Options{Log: os.Stderr}); err != nil {
		return 0, fmt.Errorf("start the control plane: %w", err)
	}
	defer func() { err = errors.Join(err, plane.Stop(context.WithoutCancel(ctx))) }()
	if err := plane.InstallCRDs("../../config/crd/bases"); err != nil {
		return 0, fmt.Errorf("install the CRDs: %w", err)
	}
	config := plane.RESTConfig()
	config.QPS = -1 // the suite waits for nobody but the server
	if kube, err = client.New(config, client.Options{Scheme: scheme.Scheme}); err != nil {
		return 0, err
	}
	versioned := rest.CopyConfig(config)
	versioned.APIPath = "/apis"
	versioned.GroupVersion = &v1alpha1.GroupVersion
	versioned.NegotiatedSerializer = scheme.Codecs.WithoutConversion()
	if raw, err = rest.RESTClientFor(versioned); err != nil {
		return 0, err
	}
	return m.Run(), nil
}

func testContext(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), requestTimeout)
	t.Cleanup(cancel)
	return ctx
}

// newNamespace gives each test a namespace of its own.
func newNamespace(t *testing.T) string {
	t.Helper()
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "api-"}}
	if err := kube.Create(testContext(t), namespace); err != nil {
		t.Fatalf("create a namespace: %v", err)
	}
	return namespace.Name
}

// manifest is what the user's file says; spec is YAML as the user wrote it,
// because the spelling of numbers and dates is what some cases are about.
type manifest struct {
	kind, name, spec string
}

func bucket(spec string) manifest {
	return manifest{kind: "TokenBucket", name: "pm-4821", spec: spec}
}

func lease(spec string) manifest {
	return manifest{kind: "TemporaryLimitLease", name: "pm-4821-launch", spec: spec}
}

func (m manifest) resource() string {
	return map[string]string{"TokenBucket": "tokenbuckets", "TemporaryLimitLease": "temporarylimitleases"}[m.kind]
}

func (m manifest) yaml() []byte {
	return fmt.Appendf(nil, "apiVersion: %s\nkind: %s\nmetadata: {name: %s}\nspec: %s\n",
		v1alpha1.GroupVersion, m.kind, m.name, m.spec)
}

// create posts the manifest's very bytes, so that no client rewrites a number or
// a date on the way.
func create(t *testing.T, namespace string, m manifest) error {
	t.Helper()
	return raw.Post().Namespace(namespace).Resource(m.resource()).
		SetHeader("Content-Type", "application/yaml").
		Param("fieldValidation", "Strict").
		Body(m.yaml()).Do(testContext(t)).Error()
}

// replace puts another spec in place of the stored one, as `kubectl replace` does.
func replace(t *testing.T, namespace string, m manifest) error {
	t.Helper()
	stored := fetch(t, namespace, m)
	var spec map[string]any
	if err := yaml.Unmarshal([]byte(m.spec), &spec); err != nil {
		t.Fatalf("the test's own manifest: %v", err)
	}
	stored.Object["spec"] = spec
	return kube.Update(testContext(t), stored)
}

func fetch(t *testing.T, namespace string, m manifest) *unstructured.Unstructured {
	t.Helper()
	stored := &unstructured.Unstructured{}
	stored.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind(m.kind))
	if err := kube.Get(testContext(t), client.ObjectKey{Namespace: namespace, Name: m.name}, stored); err != nil {
		t.Fatalf("read %s %s: %v", m.kind, m.name, err)
	}
	return stored
}

func mustCreate(t *testing.T, namespace string, m manifest) {
	t.Helper()
	if err := create(t, namespace, m); err != nil {
		t.Fatalf("create %s: %v", m.yaml(), err)
	}
}

// wantRefusal checks that the answer is a refusal whose text says each of wants.
func wantRefusal(t *testing.T, err error, wants ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("accepted, want a refusal that says %q", wants)
	}
	for _, want := range wants {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("refused with %q, which does not say %q", err, want)
		}
	}
}
