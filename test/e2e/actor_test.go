package e2e_test

import (
	"context"
	"path/filepath"
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/hack/devenv/controlplane"
)

// person is somebody with a certificate and the roles that were bound to it.
type person struct {
	in         *installation
	name       string
	api        client.Client
	kubeconfig string
}

// person makes a user who has ClusterRoles in the namespace of the test, and nothing
// else.
func (in *installation) person(t *testing.T, name string, roles ...string) *person {
	t.Helper()
	for _, role := range roles {
		in.create(t, &rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Namespace: in.namespace, Name: name + "-" + role},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
			Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: name}},
		})
	}
	config, err := in.plane.UserConfig(name)
	if err != nil {
		t.Fatal(err)
	}
	return in.personWith(t, name, config)
}

func (in *installation) personWith(t *testing.T, name string, config *rest.Config) *person {
	t.Helper()
	p := &person{in: in, name: name, kubeconfig: filepath.Join(in.dir, "kubeconfig-of-"+name)}
	var err error
	if p.api, err = client.New(config, client.Options{Scheme: in.api.Scheme()}); err != nil {
		t.Fatal(err)
	}
	if err := controlplane.WriteKubeconfig(p.kubeconfig, config); err != nil {
		t.Fatal(err)
	}
	return p
}

// kubectl runs kubectl as the person, on a manifest if there is one.
func (p *person) kubectl(ctx context.Context, manifest string, args ...string) (string, error) {
	return p.in.kubectlAs(ctx, p.kubeconfig, manifest, append(args, "--namespace="+p.in.namespace)...)
}

func (p *person) mustKubectl(t *testing.T, manifest string, args ...string) string {
	t.Helper()
	output, err := p.kubectl(t.Context(), manifest, args...)
	if err != nil {
		t.Fatalf("%s: kubectl %s: %v\n%s", p.name, strings.Join(args, " "), err, output)
	}
	return output
}

// wantNames checks who stands in the annotations of the seed story's lease; one that
// is not named must not be there.
func (in *installation) wantNames(t *testing.T, when string, want map[string]string) {
	t.Helper()
	found := &v1alpha1.TemporaryLimitLease{}
	if err := in.api.Get(call(t), client.ObjectKey{Namespace: in.namespace, Name: leaseName}, found); err != nil {
		t.Fatal(err)
	}
	for _, annotation := range []string{
		v1alpha1.RequestedByAnnotation, v1alpha1.ShortenedByAnnotation,
		v1alpha1.AcknowledgedAnnotation, v1alpha1.AcknowledgedByAnnotation,
	} {
		if got := found.Annotations[annotation]; got != want[annotation] {
			t.Errorf("%s: %s is %q, want %q", when, annotation, got, want[annotation])
		}
	}
}

// wantRefusal checks that a request was refused as forbidden, and that the message
// says what to change.
func wantRefusal(t *testing.T, what string, err error, says ...string) {
	t.Helper()
	if !apierrors.IsForbidden(err) {
		t.Fatalf("%s: %v, want it forbidden", what, err)
	}
	for _, word := range says {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("%s: %q does not say %q", what, err, word)
		}
	}
}

func annotated(annotation, value string) func(*v1alpha1.TemporaryLimitLease) {
	return func(l *v1alpha1.TemporaryLimitLease) {
		if l.Annotations == nil {
			l.Annotations = map[string]string{}
		}
		l.Annotations[annotation] = value
	}
}

// Goal: who asked for a raise is who created the lease, whatever the manifest said, and
// nobody can change it afterwards by any way of writing; manifests that say nothing of
// it, or something else, can be applied and replaced over and over without a difference.
// Method: a tenant, a second tenant and the administrator try each way.
func TestActorCannotBeForged(t *testing.T) {
	t.Parallel()
	in := install(t)
	in.start(t, "manager-a", managerOptions{})
	ada := in.person(t, "ada", "tokenlease-raiser")
	eve := in.person(t, "eve", "tokenlease-raiser")
	in.create(t, in.bucket())
	lease := in.lease(t, annotated(v1alpha1.ShortenedByAnnotation, "mallory"), annotated(v1alpha1.AcknowledgedByAnnotation, "mallory"),
		annotated(v1alpha1.OnBehalfOfAnnotation, "the launch team"))
	if err := ada.api.Create(call(t), lease); err != nil {
		t.Fatal(err)
	}
	names := map[string]string{v1alpha1.RequestedByAnnotation: ada.name}
	in.wantNames(t, "created", names)
	in.waitLease(t, leaseName, active)

	forged := `{"metadata": {"annotations": {"` + v1alpha1.RequestedByAnnotation + `": "mallory", "` + v1alpha1.ShortenedByAnnotation +
		`": "mallory", "` + v1alpha1.AcknowledgedByAnnotation + `": "mallory", "` + v1alpha1.OnBehalfOfAnnotation + `": "mallory"}}}`
	removed := `{"metadata": {"annotations": null}}`
	for _, writer := range []client.Client{ada.api, eve.api, in.api} {
		for _, body := range []string{forged, removed} {
			if err := writer.Patch(call(t), lease.DeepCopy(), client.RawPatch("application/merge-patch+json", []byte(body))); err != nil {
				t.Fatalf("patch %s: %v", body, err)
			}
			in.wantNames(t, "patched", names)
		}
	}
	in.patchStatus(t, lease.DeepCopy(), forged)
	in.wantNames(t, "patched through the status", names)

	stage(t, "kubectl")
	for _, requester := range []string{"", "mallory"} {
		manifest := in.leaseManifest(t, requester)
		for _, args := range [][]string{{"apply"}, {"replace"}, {"apply", "--server-side", "--force-conflicts"}} {
			for range 2 {
				eve.mustKubectl(t, manifest, args...)
			}
			in.wantNames(t, strings.Join(args, " "), names)
		}
		for _, args := range [][]string{{"diff"}, {"diff", "--server-side", "--force-conflicts"}} {
			if output, err := eve.kubectl(t.Context(), manifest, args...); err != nil {
				t.Errorf("kubectl %s with requester %q shows a difference: %v\n%s", strings.Join(args, " "), requester, err, output)
			}
		}
	}

	stage(t, "an earlier end is somebody's too")
	expiresAt := in.after(t, farAway/2).UTC().Format("2006-01-02T15:04:05Z")
	if err := eve.api.Patch(call(t), lease.DeepCopy(), client.RawPatch("application/merge-patch+json",
		[]byte(`{"spec": {"expiresAt": "`+expiresAt+`"}}`))); err != nil {
		t.Fatal(err)
	}
	names[v1alpha1.ShortenedByAnnotation] = eve.name
	in.wantNames(t, "shortened", names)
	waitFor(t, "the shortening to be in the audit", func() (bool, string) {
		events := in.db.events(t, in.key(bucketName))
		return strings.Contains(strings.Join(events, " "), "RaiseShortened"), strings.Join(events, " ")
	})
	for event, want := range map[string]string{"RaiseStored": ada.name, "RaiseActivated": ada.name, "RaiseShortened": eve.name} {
		row := in.db.one(t, in.key(bucketName), event)
		if row.text("actor") != want || row.text("on_behalf_of") != "the launch team" {
			t.Errorf("%s: the actor in the audit is %q, on behalf of %q, want %q", event, row.text("actor"), row.text("on_behalf_of"), want)
		}
	}
}

// leaseManifest is the stored lease of the seed story as a file would hold it.
func (in *installation) leaseManifest(t *testing.T, requester string) string {
	t.Helper()
	l := &v1alpha1.TemporaryLimitLease{}
	if err := in.api.Get(call(t), client.ObjectKey{Namespace: in.namespace, Name: leaseName}, l); err != nil {
		t.Fatal(err)
	}
	manifest := &v1alpha1.TemporaryLimitLease{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "TemporaryLimitLease"},
		ObjectMeta: metav1.ObjectMeta{Namespace: in.namespace, Name: leaseName},
		Spec:       l.Spec,
	}
	if requester != "" {
		manifest.Annotations = map[string]string{v1alpha1.RequestedByAnnotation: requester}
	}
	return asJSON(manifest)
}

// Goal: a tenant may create a lease only with the verb raise on that very bucket, and
// each refusal says what is missing; a dry run changes nothing.
func TestOnlyWhoMayRaise(t *testing.T) {
	t.Parallel()
	in := install(t)
	in.start(t, "manager-a", managerOptions{})
	in.create(t, in.bucket())
	in.waitBucket(t, inSync...)
	editor := in.person(t, "editor", "tokenlease-temporarylimitlease-editor")
	says := []string{"user editor may not raise TokenBucket " + bucketName, "verb raise on tokenbuckets/" + bucketName, "tokenlease-raiser"}
	wantRefusal(t, "without the verb", editor.api.Create(call(t), in.lease(t)), says...)
	output, err := editor.kubectl(t.Context(), asJSON(typed(in.lease(t))), "apply")
	if err == nil || !strings.Contains(output, says[0]) {
		t.Errorf("kubectl apply: %v %s, want a refusal with %q", err, output, says[0])
	}

	stage(t, "the verb on one bucket is none on another")
	const role = "raise-one"
	in.create(t, &rbacv1.Role{
		ObjectMeta: metav1.ObjectMeta{Namespace: in.namespace, Name: role},
		Rules: []rbacv1.PolicyRule{{
			APIGroups: []string{v1alpha1.GroupName}, Resources: []string{"tokenbuckets"}, Verbs: []string{"raise"}, ResourceNames: []string{bucketName},
		}},
	}, &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: in.namespace, Name: role},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: role},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: editor.name}},
	})
	waitFor(t, "the verb to count", func() (bool, string) {
		err := editor.api.Create(call(t), in.lease(t), client.DryRunAll)
		return err == nil, asText(err)
	})
	wantRefusal(t, "another bucket", editor.api.Create(call(t), in.otherLease(t, "other", "other")), "TokenBucket other")

	stage(t, "a dry run has no effect")
	events := in.db.events(t, in.key(bucketName))
	for range 20 {
		if err := editor.api.Create(call(t), in.lease(t), client.DryRunAll); err != nil {
			t.Fatal(err)
		}
	}
	if err := in.api.Get(call(t), client.ObjectKeyFromObject(in.lease(t)), &v1alpha1.TemporaryLimitLease{}); !apierrors.IsNotFound(err) {
		t.Errorf("after dry runs: %v, want no lease", err)
	}
	if err := editor.api.Create(call(t), in.lease(t)); err != nil {
		t.Fatal(err)
	}
	in.waitLease(t, leaseName, active)
	if got := in.db.events(t, in.key(bucketName)); len(got) != len(events)+2 {
		t.Errorf("audit %v after %v, want one raise stored and activated", got, events)
	}
	if got := in.db.one(t, in.key(bucketName), "RaiseStored").text("actor"); got != editor.name {
		t.Errorf("the actor is %q, want %q", got, editor.name)
	}

	stage(t, "what a raiser may not do")
	bucket := in.bucket()
	err = editor.api.Patch(call(t), bucket, client.RawPatch("application/merge-patch+json", []byte(`{"spec": {"limit": 1}}`)))
	wantRefusal(t, "the limit of a bucket", err, "tokenbuckets")
}

func typed(l *v1alpha1.TemporaryLimitLease) *v1alpha1.TemporaryLimitLease {
	l.TypeMeta = metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "TemporaryLimitLease"}
	return l
}

func asText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// Goal: without the guard or its binding, or with another one, nobody vouches for a
// name: leases are refused as ActorUnknown and said why, also when the guard is back;
// what was stored before goes on, clean-up too; the manager can be told to do without.
func TestWithoutTheGuardActorUnknown(t *testing.T) {
	t.Parallel()
	in := installOn(t, startOwnCluster(t), world.postgres)
	first := in.start(t, "manager-a", managerOptions{})
	in.raised(t)

	const guardName = "lease-guard.budget.tokenlease.dev"
	for i, c := range []struct{ what, kind, loosen string }{
		{"the binding is gone", "validatingadmissionpolicybinding", ""},
		{"the policy is gone", "validatingadmissionpolicy", ""},
		{"the policy is another one", "validatingadmissionpolicy", `{"spec": {"failurePolicy": "Ignore"}}`},
	} {
		stage(t, c.what)
		if c.loosen == "" {
			in.mustKubectl(t, "", "delete", c.kind, guardName)
		} else {
			in.mustKubectl(t, "", "patch", c.kind, guardName, "--type=merge", "--patch", c.loosen)
		}
		name := "unknown-" + string(rune('a'+i))
		in.create(t, in.otherBucket(name), in.otherLease(t, name, name))
		unknown := []want{
			isFalse(v1alpha1.ConditionReady).because(v1alpha1.ReasonActorUnknown), isTrue(v1alpha1.ConditionStalled),
			isFalse(v1alpha1.ConditionEnded),
		}
		in.waitLease(t, name, unknown)
		in.mustKubectl(t, "", "apply", "--kustomize", filepath.Join(world.root, "config/admission"))
		in.patch(t, in.otherLease(t, name, name), `{"metadata": {"labels": {"look": "again"}}}`)
		in.waitLease(t, name, unknown)
		in.delete(t, in.otherLease(t, name, name))
		in.waitGone(t, in.otherLease(t, name, name))
		if got := in.db.events(t, in.key(name)); strings.Contains(strings.Join(got, " "), "Raise") {
			t.Errorf("%s: audit %v, want nothing of a raise", c.what, got)
		}
	}
	in.delete(t, in.lease(t))
	in.waitGone(t, in.lease(t))
	first.terminate(t)

	stage(t, "the manager is told that actors are not required")
	in.mustKubectl(t, "", "delete", "--kustomize", filepath.Join(world.root, "config/admission"))
	in.start(t, "manager-b", managerOptions{args: []string{"--require-actor=false"}})
	in.create(t, in.otherBucket("claimed"), in.otherLease(t, "claimed", "claimed"))
	in.waitLease(t, "claimed", active)
}
