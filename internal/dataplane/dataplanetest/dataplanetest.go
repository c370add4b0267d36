// Package dataplanetest runs a data plane over the memory store, on a real port and with
// a stand-in for the API server's reviews.
package dataplanetest

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"

	"github.com/token-lease/operator/internal/dataplane"
	"github.com/token-lease/operator/internal/ledger"
	"github.com/token-lease/operator/internal/ledger/ledgertest"
	"github.com/token-lease/operator/internal/ledger/memory"
	"github.com/token-lease/operator/internal/telemetry"
)

// What every test starts with: one bucket, and a subject that may use it.
const (
	Cluster    = "cluster-a"
	Audience   = "tokenlease"
	Namespace  = "tenants"
	BucketName = "pm-4821"
	Limit      = int64(1000)
	Worker     = "system:serviceaccount:tenants:worker"
	// Other is known, too, and may do nothing.
	Other = "system:serviceaccount:tenants:other"
)

// answerBound bounds a request to a server that does not answer.
const answerBound = 20 * time.Second

// Plane is a running data plane.
type Plane struct {
	API    *APIServer
	Ledger *ledger.Ledger
	Clock  *ledgertest.ManualClock
	URL    string
	// HTTP trusts the server.
	HTTP *http.Client
	// Stop ends it as SIGTERM does.
	Stop func() error
}

// Options are those of a data plane over a new ledger; it is not started.
func Options(clock *ledgertest.ManualClock) (dataplane.Options, *APIServer, error) {
	api := newAPIServer()
	l := ledger.New(memory.New(memory.Options{Clock: clock.Now}), nil)
	if err := declare(l, BucketName, Limit); err != nil {
		return dataplane.Options{}, nil, err
	}
	api.Allow(Worker, Namespace+"/"+BucketName, "create", "update", "get", "list", "audit", "usage")
	return dataplane.Options{
		Ledger: l, Cluster: func(context.Context) (string, error) { return Cluster, nil },
		TokenReviews: TokenReviews{api}, AccessReviews: AccessReviews{api},
		Audience: Audience, Limits: dataplane.DefaultLimits(), Observer: telemetry.NewDataPlane(), Log: logr.Discard(), Now: clock.Now,
	}, api, nil
}

// Start runs a data plane until the test ends.
func Start(t *testing.T, changes ...func(*dataplane.Options)) *Plane {
	t.Helper()
	p, err := Run(changes...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Stop(); err != nil {
			t.Error(err)
		}
	})
	return p
}

// Run runs a data plane until it is stopped.
func Run(changes ...func(*dataplane.Options)) (*Plane, error) {
	p := &Plane{Clock: ledgertest.NewClock()}
	options, api, err := Options(p.Clock)
	if err != nil {
		return nil, err
	}
	p.Ledger, p.API = options.Ledger, api
	for _, change := range changes {
		change(&options)
	}
	certificate, err := dataplane.SelfSignedCertificate()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		cancel()
		return nil, err
	}
	ended := make(chan error, 1)
	go func() { ended <- dataplane.New(options).Serve(ctx, listener, certificate.Get) }()
	p.URL = "https://" + listener.Addr().String()
	p.HTTP = &http.Client{Timeout: answerBound, Transport: &http.Transport{
		TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // the certificate is made at each start
		ForceAttemptHTTP2: true,
	}}
	p.Stop = sync.OnceValue(func() error {
		p.HTTP.CloseIdleConnections()
		cancel()
		return <-ended
	})
	return p, nil
}

// Declare declares a bucket of the namespace, as a controller does.
func Declare(tb testing.TB, l *ledger.Ledger, name string, limit int64) {
	tb.Helper()
	if err := declare(l, name, limit); err != nil {
		tb.Fatal(err)
	}
}

func declare(l *ledger.Ledger, name string, limit int64) error {
	_, err := l.ApplyDeclared(context.Background(), ledger.ApplyDeclared{
		Key:        Namespace + "/" + name,
		Owner:      ledger.Owner{Cluster: Cluster, Namespace: Namespace, Name: name, UID: "uid-of-" + name, CreatedAt: ledgertest.Epoch},
		Generation: 1,
		Declaration: ledger.Declaration{
			Limit: limit, TenantID: name, ConflictPolicy: ledger.ConflictReview, Settings: ledger.DefaultSettings(),
		},
	})
	return err
}

// Good is a token of a subject that is in order.
func (p *Plane) Good(subject string) string {
	return Token(subject, Audience, p.Clock.Now().Add(time.Hour))
}
