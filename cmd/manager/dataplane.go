package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/token-lease/operator/internal/dataplane"
	"github.com/token-lease/operator/internal/ledger"
	"github.com/token-lease/operator/internal/telemetry"
)

const (
	// Reviews have the API server's attention for callers that are not known yet, so
	// they are not slowed down as the controllers are; how many are asked at a time is
	// bounded by the data plane.
	reviewQPS   = 200
	reviewBurst = 400
	// clusterTimeout bounds one question for the cluster's identity.
	clusterTimeout = 5 * time.Second

	maxAudienceBytes = 253
)

// dataPlane are the flags of the data plane.
type dataPlane struct {
	address    string
	certFile   string
	keyFile    string
	selfSigned bool
	audience   string
	limits     dataplane.Limits
}

func (d *dataPlane) bind(fs *flag.FlagSet) {
	d.limits = dataplane.DefaultLimits()
	fs.StringVar(&d.address, "data-plane-bind-address", "0",
		"Address at which workloads reserve and settle, such as :8443; 0 switches it off. It needs a certificate.")
	fs.StringVar(&d.certFile, "data-plane-tls-cert-file", "", "File with the data plane's certificate chain (PEM). It is read again when it changes.")
	fs.StringVar(&d.keyFile, "data-plane-tls-key-file", "", "File with the key of that certificate (PEM).")
	fs.BoolVar(&d.selfSigned, "data-plane-self-signed", false,
		"Make a certificate for localhost at each start, which nobody can verify. For development only.")
	fs.StringVar(&d.audience, "data-plane-audience", "tokenlease", "Audience that the tokens of workloads must be made for.")
	fs.IntVar(&d.limits.Connections, "data-plane-max-connections", d.limits.Connections, "Open connections to the data plane, at most.")
	fs.IntVar(&d.limits.Requests, "data-plane-max-requests", d.limits.Requests,
		"Requests that the data plane has in work at a time, at most; one caller may have half of them.")
	fs.DurationVar(&d.limits.RequestTimeout, "data-plane-request-timeout", d.limits.RequestTimeout, "How long one request to the data plane may take.")
}

// on reports whether the data plane is to be served.
func (d *dataPlane) on() bool { return d.address != "" && d.address != "0" }

func (d *dataPlane) validate() error {
	if !d.on() {
		return nil
	}
	mounted := d.certFile != "" || d.keyFile != ""
	switch {
	case mounted && d.selfSigned:
		return errors.New("--data-plane-self-signed and --data-plane-tls-cert-file exclude each other")
	case mounted && (d.certFile == "" || d.keyFile == ""):
		return errors.New("--data-plane-tls-cert-file and --data-plane-tls-key-file belong together")
	case !mounted && !d.selfSigned:
		return errors.New("the data plane needs --data-plane-tls-cert-file and --data-plane-tls-key-file; for development there is --data-plane-self-signed")
	case d.audience == "" || len(d.audience) > maxAudienceBytes:
		return fmt.Errorf("--data-plane-audience must have 1 to %d bytes", maxAudienceBytes)
	case d.limits.RequestTimeout < 100*time.Millisecond || d.limits.RequestTimeout > dataplane.MaxRequestTimeout:
		return fmt.Errorf("--data-plane-request-timeout must lie between 100ms and %s, which an ending process waits for, not %s",
			dataplane.MaxRequestTimeout, d.limits.RequestTimeout)
	}
	for _, f := range []struct {
		name    string
		value   int
		maximum int
	}{
		{"data-plane-max-connections", d.limits.Connections, 1 << 20}, {"data-plane-max-requests", d.limits.Requests, 1 << 16},
	} {
		if f.value < 2 || f.value > f.maximum {
			return fmt.Errorf("--%s must be at least 2 and at most %d, not %d", f.name, f.maximum, f.value)
		}
	}
	return nil
}

func (d *dataPlane) certificate() (*dataplane.Certificate, error) {
	if d.selfSigned {
		return dataplane.SelfSignedCertificate()
	}
	return dataplane.MountedCertificate(d.certFile, d.keyFile)
}

// +kubebuilder:rbac:groups=authentication.k8s.io,resources=tokenreviews,verbs=create
// +kubebuilder:rbac:groups=authorization.k8s.io,resources=subjectaccessreviews,verbs=create

// parts binds the data plane's address and returns what serves it. It lives beside the
// controllers: losing leadership, or the API server, ends no caller's request.
func (d *dataPlane) parts(ctx context.Context, restConfig *rest.Config, clusterID string, l *ledger.Ledger, metrics *telemetry.DataPlane, log logr.Logger) ([]func(context.Context) error, error) {
	if !d.on() {
		return nil, nil
	}
	certificate, err := d.certificate()
	if err != nil {
		return nil, err
	}
	config := rest.CopyConfig(restConfig)
	config.QPS, config.Burst = reviewQPS, reviewBurst
	// Each has a rate of its own, so that strangers with made-up tokens do not use up that
	// of questions about who is known.
	tokens, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("reach the API server: %w", err)
	}
	access, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("reach the API server: %w", err)
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", d.address)
	if err != nil {
		return nil, fmt.Errorf("listen for the data plane on %s: %w", d.address, err)
	}
	server := dataplane.New(dataplane.Options{
		Ledger: l, Cluster: (&identity{known: clusterID, ask: func(ctx context.Context) (string, error) {
			return askClusterID(ctx, config, newScheme())
		}}).get,
		TokenReviews: tokens.AuthenticationV1().TokenReviews(), AccessReviews: access.AuthorizationV1().SubjectAccessReviews(),
		Audience: d.audience, Limits: d.limits, Observer: metrics, Log: log,
	})
	log.Info("workloads are served", "address", listener.Addr().String(), "audience", d.audience, "selfSigned", d.selfSigned)
	return []func(context.Context) error{
		func(ctx context.Context) error { return server.Serve(ctx, listener, certificate.Get) },
		certificate.Watch,
	}, nil
}

// identity is the cluster's, asked for once it is needed and kept for good: it never
// changes.
type identity struct {
	ask func(context.Context) (string, error)

	mutex sync.Mutex
	known string
}

func (i *identity) get(ctx context.Context) (string, error) {
	i.mutex.Lock()
	known := i.known
	i.mutex.Unlock()
	if known != "" {
		return known, nil
	}
	ctx, cancel := context.WithTimeout(ctx, clusterTimeout)
	defer cancel()
	asked, err := i.ask(ctx)
	if err != nil {
		return "", err
	}
	i.mutex.Lock()
	defer i.mutex.Unlock()
	i.known = asked
	return asked, nil
}
