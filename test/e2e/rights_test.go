package e2e_test

import (
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/token-lease/operator/api/v1alpha1"
)

// managerRights are what the manager may do beyond what every account may: resource,
// names, verbs. Each line has its reason in the code.
var managerRights = []string{
	// It reads specs, keeps its finalizer and its annotation, and writes status; it
	// never writes a spec, creates or deletes.
	"temporarylimitleases.budget.tokenlease.dev [] [get list patch watch]",
	"temporarylimitleases.budget.tokenlease.dev/status [] [patch]",
	"tokenbuckets.budget.tokenlease.dev [] [list patch watch]",
	"tokenbuckets.budget.tokenlease.dev/status [] [patch]",
	// It tells of transitions.
	"events.events.k8s.io [] [create patch]",
	// It asks who a workload is and what that may do; the answers are not stored.
	"tokenreviews.authentication.k8s.io [] [create]",
	"subjectaccessreviews.authorization.k8s.io [] [create]",
	// It looks whether the admission policies are there that vouch for who asks.
	"validatingadmissionpolicies.admissionregistration.k8s.io [bucket-guard.budget.tokenlease.dev] [get]",
	"validatingadmissionpolicies.admissionregistration.k8s.io [lease-guard.budget.tokenlease.dev] [get]",
	"validatingadmissionpolicybindings.admissionregistration.k8s.io [bucket-guard.budget.tokenlease.dev] [get]",
	"validatingadmissionpolicybindings.admissionregistration.k8s.io [lease-guard.budget.tokenlease.dev] [get]",
	// It asks for the cluster's identity.
	"namespaces [kube-system] [get]",
}

// electionRights are what it may do in its own namespace besides.
var electionRights = []string{
	"leases.coordination.k8s.io [] [create]",
	"leases.coordination.k8s.io [" + electionID + "] [get update]",
	"events [] [create patch]",
}

// seldomUsed are rights that no short story needs.
var seldomUsed = []string{
	"get temporarylimitleases.budget.tokenlease.dev", // whether the object of a pending raise is gone
	"patch events.events.k8s.io",                     // an event that repeats
	"patch events",                                   // the same, of the leader election
}

// wantRights compares what the manager may do with what its code needs: what is listed
// above, and what it was seen to use.
func (d *deployed) wantRights(t *testing.T) {
	t.Helper()
	for namespace, want := range map[string][]string{
		d.namespace: managerRights, "kube-system": managerRights, systemNamespace: slices.Concat(managerRights, electionRights),
	} {
		everybody := d.rights(t, "default", namespace)
		var got []string
		for _, right := range d.rights(t, serviceAccount, namespace) {
			if !slices.Contains(everybody, right) {
				got = append(got, right)
			}
		}
		slices.Sort(got)
		if want = slices.Sorted(slices.Values(want)); !slices.Equal(got, want) {
			t.Errorf("in %s the manager may\n%s\nand needs\n%s", namespace, strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
		for _, right := range got {
			resource, verbs, _ := strings.Cut(right, " ")
			_, verbs, _ = strings.Cut(verbs, "] [")
			for verb := range strings.FieldsSeq(strings.TrimSuffix(verbs, "]")) {
				if use := verb + " " + resource; !d.uses.seen(use) && !slices.Contains(seldomUsed, use) {
					t.Errorf("the manager may %s and never did; it did %v", use, d.uses.all())
				}
			}
		}
	}
}

// rights are what kubectl says that an account may do in a namespace.
func (d *deployed) rights(t *testing.T, account, namespace string) []string {
	t.Helper()
	output := d.mustKubectl(t, "", "auth", "can-i", "--list", "--namespace="+namespace,
		"--as=system:serviceaccount:"+systemNamespace+":"+account,
		"--as-group=system:serviceaccounts", "--as-group=system:serviceaccounts:"+systemNamespace, "--as-group=system:authenticated")
	head, lines, _ := strings.Cut(output, "\n")
	urls, names, verbs := strings.Index(head, "Non-Resource"), strings.Index(head, "Resource Names"), strings.Index(head, "Verbs")
	if urls < 0 || names < urls || verbs < names {
		t.Fatalf("kubectl prints the columns %q", head)
	}
	var rights []string
	for line := range strings.Lines(lines) {
		if resource := strings.TrimSpace(line[:urls]); resource != "" {
			rights = append(rights, resource+" "+strings.TrimSpace(line[names:verbs])+" "+strings.TrimSpace(line[verbs:]))
		}
	}
	return rights
}

// wantNobodyElseWrites checks what the roles for people come to in the built-in ones:
// whoever views a namespace sees both kinds; whoever edits or administers one writes
// neither, since limit, policy and approval stand there.
func (d *deployed) wantNobodyElseWrites(t *testing.T) {
	t.Helper()
	for name, reads := range map[string]bool{"view": true, "edit": true, "admin": true} {
		var role rbacv1.ClusterRole
		waitFor(t, name+" to be aggregated", func() (bool, string) {
			if err := d.api.Get(call(t), client.ObjectKey{Name: name}, &role); err != nil {
				return false, err.Error()
			}
			return mayRead(role.Rules) == reads, asJSON(role.Rules)
		})
		for _, rule := range role.Rules {
			for _, verb := range rule.Verbs {
				if slices.Contains(rule.APIGroups, v1alpha1.GroupName) && !slices.Contains([]string{"get", "list", "watch"}, verb) {
					t.Errorf("%s may %s %v", name, verb, rule.Resources)
				}
			}
		}
	}
}

func mayRead(rules []rbacv1.PolicyRule) bool {
	seen := map[string]bool{}
	for _, rule := range rules {
		if slices.Contains(rule.APIGroups, v1alpha1.GroupName) && slices.Contains(rule.Verbs, "get") {
			for _, resource := range rule.Resources {
				seen[resource] = true
			}
		}
	}
	return seen["tokenbuckets"] && seen["temporarylimitleases"]
}

// draw reserves at the data plane, so that the manager asks who the workload is.
func (d *deployed) draw(t *testing.T, m *manager) {
	t.Helper()
	d.account(t, d.namespace, workloadName)
	d.permit(t, "draw", workloadName, []string{bucketName}, "create", "update", "get")
	d.waitAdmitted(t, m, d.token(t, d.namespace, workloadName, workloadAudience), "first")
}

// uses are the verbs and resources that the API server was asked for.
type uses struct {
	mutex sync.Mutex
	of    map[string]bool
}

func (u *uses) add(use string) {
	u.mutex.Lock()
	defer u.mutex.Unlock()
	if u.of == nil {
		u.of = map[string]bool{}
	}
	u.of[use] = true
}

func (u *uses) seen(use string) bool { return slices.Contains(u.all(), use) }

func (u *uses) all() []string {
	u.mutex.Lock()
	defer u.mutex.Unlock()
	var all []string
	for use := range u.of {
		all = append(all, use)
	}
	slices.Sort(all)
	return all
}

// watched stands between the managers and the API server, and notes what they ask for.
// Who they are goes through as it is, which asks for TLS: client-go tells no token
// without it.
func (u *uses) watched(t *testing.T, server *rest.Config) *rest.Config {
	t.Helper()
	target, err := url.Parse(server.Host)
	if err != nil {
		t.Fatal(err)
	}
	transport, err := rest.TransportFor(&rest.Config{Host: server.Host, TLSClientConfig: rest.TLSClientConfig{CAData: server.CAData}})
	if err != nil {
		t.Fatal(err)
	}
	proxy := httptest.NewTLSServer(&httputil.ReverseProxy{
		Transport: transport, FlushInterval: -1, // a watch is an answer that never ends
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(target)
			u.add(useOf(r.In))
		},
	})
	t.Cleanup(func() {
		proxy.CloseClientConnections()
		proxy.Close()
	})
	certificate := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: proxy.Certificate().Raw})
	return &rest.Config{Host: proxy.URL, TLSClientConfig: rest.TLSClientConfig{CAData: certificate}}
}

// useOf is a request's verb and resource, as RBAC names them.
func useOf(request *http.Request) string {
	parts := strings.Split(strings.Trim(request.URL.Path, "/"), "/")
	group := ""
	switch {
	case len(parts) > 2 && parts[0] == "api":
		parts = parts[2:]
	case len(parts) > 3 && parts[0] == "apis":
		group, parts = "."+parts[1], parts[3:]
	default:
		return "get " + request.URL.Path
	}
	if parts[0] == "namespaces" && len(parts) > 2 {
		parts = parts[2:]
	}
	resource := parts[0] + group
	if len(parts) > 2 {
		resource += "/" + parts[2]
	}
	verb := map[string]string{http.MethodPost: "create", http.MethodPut: "update", http.MethodPatch: "patch", http.MethodDelete: "delete"}[request.Method]
	switch {
	case verb != "":
	case request.URL.Query().Get("watch") != "":
		verb = "watch"
	case len(parts) == 1:
		verb = "list"
	default:
		verb = "get"
	}
	return verb + " " + resource
}
