package dataplane

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"

	"k8s.io/client-go/util/cert"
	"sigs.k8s.io/controller-runtime/pkg/certwatcher"
)

// Certificate is what the server shows of itself.
type Certificate struct {
	// Get implements tls.Config.GetCertificate.
	Get func(*tls.ClientHelloInfo) (*tls.Certificate, error)
	// Watch follows the files until the context ends.
	Watch func(ctx context.Context) error
}

// MountedCertificate reads certificate and key from files, and again when they change.
// What cannot be read leaves the last good pair in force.
func MountedCertificate(certFile, keyFile string) (*Certificate, error) {
	watcher, err := certwatcher.New(certFile, keyFile)
	if err != nil {
		return nil, fmt.Errorf("read the data plane's certificate: %w", err)
	}
	return &Certificate{Get: watcher.GetCertificate, Watch: watcher.Start}, nil
}

// SelfSignedCertificate makes a pair for this process and this machine alone. Nobody can
// verify it, so it is for development.
func SelfSignedCertificate() (*Certificate, error) {
	certificate, key, err := cert.GenerateSelfSignedCertKey("localhost", []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback}, nil)
	if err != nil {
		return nil, fmt.Errorf("make a certificate: %w", err)
	}
	pair, err := tls.X509KeyPair(certificate, key)
	if err != nil {
		return nil, fmt.Errorf("make a certificate: %w", err)
	}
	return &Certificate{
		Get:   func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return &pair, nil },
		Watch: func(ctx context.Context) error { <-ctx.Done(); return nil },
	}, nil
}
