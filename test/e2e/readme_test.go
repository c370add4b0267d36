package e2e_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/util/cert"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/hack/devenv/process"
)

// Goal: what the README tells a user to run works to the letter, and does what it
// says there.
func TestReadmeUse(t *testing.T) {
	t.Parallel()
	in := install(t)
	in.start(t, "manager-a", managerOptions{})
	shell := in.readmeShell(t)
	for _, block := range readmeBlocks(t, "Use it") {
		shell(block)
	}
	key := in.key("pm-4821")
	for event, limit := range map[string]string{"RaiseActivated": "300000", "RaiseRestored": "120000"} {
		if got := in.db.one(t, key, event).text("effective_limit_tokens"); got != limit {
			t.Errorf("%s: the limit is %s, want %s", event, got, limit)
		}
	}
	in.db.one(t, key, "RaiseShortened")
	in.db.one(t, key, "BucketClosed")
	for _, object := range []client.Object{in.bucket(), in.lease(t)} {
		in.waitGone(t, object)
	}
}

// Goal: what the README tells a reader to run to draw from a bucket works to the letter,
// and leaves the bucket as it says.
func TestReadmeDraw(t *testing.T) {
	t.Parallel()
	in := install(t)
	m := in.start(t, "manager-a", managerOptions{dataPlane: true})
	shell := in.readmeShell(t)
	for _, block := range readmeBlocks(t, "Draw from it") {
		output := shell("TOKENLEASE=https://" + m.dataPlane + "\n" + block)
		for _, want := range []string{
			`"state":"LEASE_STATE_RESERVED"`, `"code":"budget_exceeded"`, `"requestedTokens":"601"`, `"availableTokens":"600"`,
			`"state":"LEASE_STATE_COMMITTED"`, `"availableTokens":"650"`,
		} {
			if !strings.Contains(output, want) {
				t.Errorf("the answers do not contain %s:\n%s", want, output)
			}
		}
	}
	if used, reserved := in.db.tokens(t, in.key("demo")); used != 350 || reserved != 0 {
		t.Errorf("used %d, reserved %d", used, reserved)
	}
}

// Goal: the operator can be installed and removed as the README says: nothing
// hangs, and custom resources go only with the CRDs, on purpose.
// Method: a control plane of its own, which runs no pods; a manager that the test
// starts does what the Deployment's would.
func TestReadmeInstallAndRemove(t *testing.T) {
	t.Parallel()
	own := startOwnCluster(t)
	in := installOn(t, own, world.postgres)
	shell := in.readmeShell(t)
	for _, block := range readmeBlocks(t, "Install it") {
		shell(block)
	}
	in.mustKubectl(t, "", "get", "deployment/tokenlease-manager", "secret/tokenlease-database", "--namespace="+systemNamespace)
	m := in.start(t, "manager-a", managerOptions{})
	in.raised(t)

	blocks := readmeBlocks(t, "Remove it")
	if len(blocks) != 3 {
		t.Fatalf("%d blocks, want three: objects, operator, CRDs", len(blocks))
	}
	shell(blocks[0])
	for _, object := range []client.Object{in.bucket(), in.lease(t)} {
		if err := in.api.Get(call(t), client.ObjectKeyFromObject(object), object); !apierrors.IsNotFound(err) {
			t.Errorf("%T is still there: %v", object, err)
		}
	}
	if got := in.db.limit(t, in.key(bucketName)); got != normal {
		t.Errorf("the limit is %d, want %d", got, normal)
	}
	m.terminate(t)
	shell(blocks[1])
	in.wantCRDs(t, true)
	shell(blocks[2])
	in.wantCRDs(t, false)
}

// readmeBlocks are the shell blocks of a section of the README, in their order.
func readmeBlocks(t *testing.T, section string) []string {
	t.Helper()
	return docBlocks(t, "README.md", section)
}

// docBlocks are the shell blocks of a section of a document, in their order.
func docBlocks(t *testing.T, document, section string) []string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(world.root, document))
	if err != nil {
		t.Fatal(err)
	}
	_, text, found := strings.Cut(string(content), "\n## "+section+"\n")
	if !found {
		t.Fatalf("%s has no section %q", document, section)
	}
	text, _, _ = strings.Cut(text, "\n## ")
	text, _, _ = strings.Cut(text, "\n### ")
	var blocks []string
	for {
		var block string
		if _, text, found = strings.Cut(text, "\n```sh\n"); !found {
			break
		}
		if block, text, found = strings.Cut(text, "\n```"); !found {
			t.Fatalf("a block of section %q does not end", section)
		}
		blocks = append(blocks, block)
	}
	if len(blocks) == 0 {
		t.Fatalf("section %q has no shell block", section)
	}
	return blocks
}

// readmeShell runs blocks as a reader does who stands in a clone, with kubectl on
// the PATH and the test's namespace as the current one.
func (in *installation) readmeShell(t *testing.T) func(block string) (answers string) {
	t.Helper()
	config, err := os.ReadFile(in.plane.KubeconfigPath())
	if err != nil {
		t.Fatal(err)
	}
	certificate, key, err := cert.GenerateSelfSignedCertKey("tokenlease.tokenlease-system.svc", nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	shell := readerShell(t, filepath.Dir(in.plane.Kubectl()), map[string]string{
		"kubeconfig": string(config), "run-time.url": in.db.runtimeURL, "owner.url": in.db.ownerURL,
		"tls.crt": string(certificate), "tls.key": string(key),
	})
	shell("kubectl config set-context --current --namespace=" + in.namespace)
	return shell
}

// readerShell runs blocks for a reader who has files, the clone's config and docs beside them,
// and the programs of a directory. It returns what was answered so far.
func readerShell(t *testing.T, programs string, files map[string]string) func(block string) string {
	t.Helper()
	home, err := newDir("reader")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"config", "docs"} {
		if err := os.Symlink(filepath.Join(world.root, name), filepath.Join(home, name)); err != nil {
			t.Fatal(err)
		}
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(home, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return func(block string) string {
		t.Helper()
		output, err := runToEnd(t.Context(), process.Command{
			Path: "/bin/sh", Args: []string{"-euc", block}, Dir: home, LogFile: filepath.Join(home, "output"),
			Env: []string{
				"HOME=" + home, "KUBECONFIG=" + filepath.Join(home, "kubeconfig"),
				"PATH=" + programs + string(os.PathListSeparator) + os.Getenv("PATH"),
			},
		})
		if err != nil {
			t.Fatalf("%v\n%s\nanswers (with those before):\n%s", err, block, output)
		}
		return output
	}
}

// wantCRDs checks whether the operator's kinds are known to the API server.
func (in *installation) wantCRDs(t *testing.T, there bool) {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := apiextensionsv1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	api, err := client.New(in.plane.RESTConfig(), client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"tokenbuckets", "temporarylimitleases"} {
		waitFor(t, name+" to be right", func() (bool, string) {
			var crd apiextensionsv1.CustomResourceDefinition
			err := api.Get(call(t), client.ObjectKey{Name: name + "." + v1alpha1.GroupName}, &crd)
			return (err == nil) == there && client.IgnoreNotFound(err) == nil, asJSON(crd.Status)
		})
	}
}
