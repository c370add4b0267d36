package e2e_test

import (
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"testing"

	"k8s.io/client-go/rest"
)

// groupPath is where the API server serves the operator's kinds.
const groupPath = "/apis/budget.tokenlease.dev/v1alpha1/"

// newWindow stands between a manager and the API server that many tests share,
// and shows it the objects of one namespace only: a request for all namespaces
// becomes one for this. Everything else passes as it is, under the identity and
// the rights of the ServiceAccount, answers and refusals included. It returns the
// address to use instead of the API server's.
func newWindow(t *testing.T, identity *rest.Config, namespace string) string {
	t.Helper()
	target, err := url.Parse(identity.Host)
	if err != nil {
		t.Fatal(err)
	}
	transport, err := rest.TransportFor(identity)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(&httputil.ReverseProxy{
		Transport:     transport,
		FlushInterval: -1, // a watch is an answer that never ends
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(target)
			kind, ours := strings.CutPrefix(r.In.URL.Path, groupPath)
			if ours && (kind == "tokenbuckets" || kind == "temporarylimitleases") {
				r.Out.URL.Path = groupPath + "namespaces/" + namespace + "/" + kind
			}
		},
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) {
			http.Error(w, err.Error(), http.StatusBadGateway)
		},
	})
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	return server.URL
}
