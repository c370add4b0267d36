package dataplane_test

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"connectrpc.com/grpcreflect"
	"github.com/go-logr/logr/funcr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/protobuf/types/known/emptypb"
	"k8s.io/client-go/util/cert"
	certmetrics "sigs.k8s.io/controller-runtime/pkg/certwatcher/metrics"

	"github.com/token-lease/operator/internal/dataplane"
	"github.com/token-lease/operator/internal/dataplane/dataplanetest"
	"github.com/token-lease/operator/internal/ledger"
	"github.com/token-lease/operator/internal/telemetry"
	"github.com/token-lease/operator/proto/tokenlease/v1alpha1/tokenleasev1alpha1connect"
)

// Goal: at shutdown a request in work is answered, a new one finds nobody, and the end
// does not take for ever.
func TestDraining(t *testing.T) {
	t.Parallel()
	arrived, open := make(chan struct{}), make(chan struct{})
	w := newWorld(t, func(o *dataplane.Options) {
		o.Cluster = func(context.Context) (string, error) {
			close(arrived)
			<-open
			return dataplanetest.Cluster, nil
		}
	})
	answered := make(chan reply, 1)
	go func() { answered <- w.post(t, w.good(worker), "Reserve", reserveBody("a", 1)) }()
	<-arrived
	ended := make(chan error, 1)
	go func() { ended <- w.Stop() }()
	address := strings.TrimPrefix(w.URL, "https://")
	deadline := time.Now().Add(testBound)
	for {
		connection, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", address)
		if err != nil {
			break
		}
		connection.Close()
		if time.Now().After(deadline) {
			t.Fatal("new connections are still accepted")
		}
		time.Sleep(time.Millisecond) // between two looks at a listener that nobody announces the end of
	}
	select {
	case err := <-ended:
		t.Fatalf("it ended with a request in work: %v", err)
	default:
	}
	close(open)
	(<-answered).wantOK(t, "the request in work", nil)
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// Goal: a request that hangs is answered within its bound, with a refusal that may be
// repeated; so is one whose caller names a shorter time.
func TestDeadlines(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(o *dataplane.Options) {
		o.Limits.RequestTimeout = time.Second
		o.Cluster = func(ctx context.Context) (string, error) {
			<-ctx.Done()
			return "", ctx.Err()
		}
	})
	for what, headers := range map[string][]string{"the server's bound": nil, "the caller's": {"Connect-Timeout-Ms", "50"}} {
		started := time.Now()
		got := w.post(t, w.good(worker), "GetBucket", `{`+ofBucket+`}`, headers...)
		if got.status != http.StatusServiceUnavailable || got.code(t) != "ledger_unavailable" {
			t.Errorf("%s: %d %s", what, got.status, got.body)
		}
		if took := time.Since(started); took > testBound/2 {
			t.Errorf("%s: it took %s", what, took)
		}
	}
}

// Goal: a connection that says nothing, or a header a byte at a time, is closed.
func TestSlowCallers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for what, begin := range map[string]string{"silent": "", "slow": "POST " + service + "Reserve HTTP/1.1\r\nHost: a\r\n"} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			connection, err := (&tls.Dialer{Config: &tls.Config{InsecureSkipVerify: true}}).DialContext(t.Context(), "tcp", strings.TrimPrefix(w.URL, "https://"))
			if err != nil {
				t.Fatal(err)
			}
			defer connection.Close()
			if _, err := connection.Write([]byte(begin)); err != nil {
				t.Fatal(err)
			}
			if err := connection.SetReadDeadline(time.Now().Add(testBound)); err != nil {
				t.Fatal(err)
			}
			for { // what is said before it is closed does not matter
				if _, err := connection.Read(make([]byte, 512)); err != nil {
					if errors.Is(err, os.ErrDeadlineExceeded) {
						t.Errorf("it was left open for %s", testBound)
					}
					return
				}
			}
		})
	}
}

// Goal: a certificate that is renewed in its files is shown to the next connection, and
// one that cannot be read leaves the old one in force.
func TestCertificateIsReadAgain(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	certFile, keyFile := filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")
	if _, err := dataplane.MountedCertificate(certFile, keyFile); err == nil {
		t.Error("files that are not there are accepted")
	}
	write := func(host string) {
		t.Helper()
		certificate, key, err := cert.GenerateSelfSignedCertKey(host, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		for file, content := range map[string][]byte{keyFile: key, certFile: certificate} {
			if err := os.WriteFile(file+".next", content, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Rename(file+".next", file); err != nil {
				t.Fatal(err)
			}
		}
	}
	write("first")
	c, err := dataplane.MountedCertificate(certFile, keyFile)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	watched := make(chan error, 1)
	go func() { watched <- c.Watch(ctx) }()
	name := func() string {
		t.Helper()
		got, err := c.Get(nil)
		if err != nil {
			t.Fatal(err)
		}
		return got.Leaf.Subject.CommonName
	}
	if got := name(); !strings.HasPrefix(got, "first") {
		t.Errorf("shown is %q", got)
	}
	// The watcher counts what it cannot read. It looks every ten seconds if it is not told.
	refused := testutil.ToFloat64(certmetrics.ReadCertificateErrors)
	if err := os.WriteFile(certFile, []byte("no certificate"), 0o600); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(testBound + 10*time.Second); testutil.ToFloat64(certmetrics.ReadCertificateErrors) == refused; {
		if time.Now().After(deadline) {
			t.Fatal("the broken file was not noticed")
		}
		time.Sleep(10 * time.Millisecond) // between two looks at what the watcher has counted
	}
	if got := name(); !strings.HasPrefix(got, "first") {
		t.Errorf("shown is %q", got)
	}
	write("second")
	deadline := time.Now().Add(testBound + 10*time.Second) // it looks every ten seconds if it is not told
	for !strings.HasPrefix(name(), "second") {
		if time.Now().After(deadline) {
			t.Fatalf("shown is still %q", name())
		}
		time.Sleep(10 * time.Millisecond) // between two looks at what the watcher has read
	}
	cancel()
	if err := <-watched; err != nil {
		t.Error(err)
	}
}

// Goal: gRPC's health service and the description of the protocol answer without a token,
// and everything else needs one.
func TestHealthAndReflection(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for serviceName, want := range map[string]string{
		"": "STATUS_SERVING", tokenleasev1alpha1connect.LedgerServiceName: "STATUS_SERVING",
	} {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, w.URL+"/grpc.health.v1.Health/Check", strings.NewReader(`{"service": "`+serviceName+`"}`))
		if err != nil {
			t.Fatal(err)
		}
		request.Header.Set("Content-Type", "application/json")
		if got := w.do(t, request); got.status != http.StatusOK || !strings.Contains(got.body, want) {
			t.Errorf("health of %q: %d %s", serviceName, got.status, got.body)
		}
	}
	unknown := connect.NewClient[emptypb.Empty, emptypb.Empty](w.http, w.URL+"/grpc.health.v1.Health/Check", connect.WithGRPC())
	if _, err := unknown.CallUnary(t.Context(), connect.NewRequest(&emptypb.Empty{})); err != nil {
		t.Errorf("health over gRPC: %v", err)
	}
	stream := grpcreflect.NewClient(w.http, w.URL, connect.WithGRPC()).NewStream(t.Context())
	services, err := stream.ListServices()
	if err != nil || len(services) != 2 {
		t.Errorf("services %v, %v", services, err)
	}
	files, err := stream.FileContainingSymbol(tokenleasev1alpha1connect.LedgerServiceName)
	if err != nil || len(files) == 0 || !strings.Contains(files[0].String(), "request_key") {
		t.Errorf("%d files, %v", len(files), err)
	}
	if _, err := stream.Close(); err != nil {
		t.Error(err)
	}
}

// Goal: what is served is counted by procedure and code, and what callers make up adds
// no series.
func TestMetrics(t *testing.T) {
	t.Parallel()
	metrics := telemetry.NewDataPlane()
	registry := prometheus.NewRegistry()
	if err := registry.Register(metrics); err != nil {
		t.Fatal(err)
	}
	w := newWorld(t, func(o *dataplane.Options) { o.Observer = metrics })
	mine := w.good(worker)
	w.post(t, mine, "Reserve", reserveBody("a", 1))
	w.post(t, mine, "Reserve", reserveBody("b", 1000))
	w.post(t, mine, "Reserve", "{")
	w.post(t, "", "Reserve", "{}")
	w.post(t, mine, "Reserve", `{"fingerprint": "`+strings.Repeat("x", 70<<10)+`"}`)
	for _, path := range []string{"Drop", "Reserve2", "a/b", "%00"} {
		w.post(t, mine, path, "{}")
	}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, family := range families {
		for _, metric := range family.GetMetric() {
			var labels []string
			for _, label := range metric.GetLabel() {
				labels = append(labels, label.GetValue())
			}
			if metric.GetCounter() != nil {
				got[strings.TrimPrefix(family.GetName(), "tokenlease_dataplane_")+" "+strings.Join(labels, " ")] = metric.GetCounter().GetValue()
			}
		}
	}
	for series, want := range map[string]float64{
		"requests_total ok Reserve": 1, "requests_total budget_exceeded Reserve": 1, "requests_total invalid_request Reserve": 1,
		"requests_total unauthenticated Reserve": 1, "requests_total invalid_input Reserve": 1, "requests_total invalid_request other": 4,
		"reviews_total yes token": 1, "reviews_total yes access": 1,
	} {
		if got[series] != want {
			t.Errorf("%s is %v, want %v; there are %v", series, got[series], want, got)
		}
	}
	if len(got) != 8 {
		t.Errorf("there are %d series: %v", len(got), got)
	}
}

// Goal: why a request failed that should not is in the log without having been asked for,
// as its answer says; what callers did wrong, and what may be repeated, is not.
func TestFaultsAreLogged(t *testing.T) {
	t.Parallel()
	var mutex sync.Mutex
	var lines []string
	logged := func() []string {
		mutex.Lock()
		defer mutex.Unlock()
		return slices.Clone(lines)
	}
	fault := errors.New("the disk is on fire")
	w := newWorld(t, func(o *dataplane.Options) {
		o.Log = funcr.New(func(_, text string) {
			mutex.Lock()
			defer mutex.Unlock()
			lines = append(lines, text)
		}, funcr.Options{})
		o.Ledger = ledger.New(faulty{o.Ledger.Store(), ledger.Errorf(ledger.CodeStateCorrupt, "It cannot be read.").WithCause(fault)}, nil)
	})
	mine := w.good(worker)
	w.post(t, mine, "Reserve", `{`+ofBucket+`, "requestKey": "", "tokens": 1}`).wantStatus(t, "a caller's mistake", http.StatusBadRequest)
	w.api.Set(func(a *apiServer) { a.Down = true })
	w.post(t, w.good(other), "GetBucket", `{`+ofBucket+`}`).want(t, "to be repeated", http.StatusServiceUnavailable, "review_unavailable")
	w.api.Set(func(a *apiServer) { a.Down = false })
	if got := logged(); len(got) > 0 {
		t.Errorf("logged %q", got)
	}
	w.post(t, mine, "ListLeases", `{`+ofBucket+`}`).want(t, "a fault", http.StatusInternalServerError, "state_corrupt")
	if got := logged(); len(got) != 1 || !strings.Contains(got[0], fault.Error()) || strings.Contains(got[0], mine) {
		t.Errorf("logged %q, want one line with the cause", got)
	}
}

// faulty is a store whose leases cannot be listed.
type faulty struct {
	ledger.Store

	err error
}

func (f faulty) Leases(context.Context, string, ledger.LeasePosition, int) ([]*ledger.Lease, error) {
	return nil, f.err
}
