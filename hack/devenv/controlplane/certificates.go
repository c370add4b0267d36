package controlplane

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"

	"github.com/token-lease/operator/hack/devenv/process"
)

const (
	certificateLifetime = 30 * 24 * time.Hour
	// clockTolerance lets a certificate count for a clock that is set back a bit.
	clockTolerance   = time.Hour
	serialNumberBits = 127
)

// authority signs what the servers and their clients show each other. Its key
// never leaves this process.
type authority struct {
	key         crypto.Signer
	certificate *x509.Certificate
}

func newAuthority() (*authority, error) {
	key, err := newKey()
	if err != nil {
		return nil, err
	}
	certificate, err := cert.NewSelfSignedCACert(cert.Config{CommonName: "token-lease development"}, key)
	if err != nil {
		return nil, fmt.Errorf("make a certificate authority: %w", err)
	}
	return &authority{key: key, certificate: certificate}, nil
}

func newKey() (*ecdsa.PrivateKey, error) {
	return ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
}

func (a *authority) pem() []byte {
	encoded, err := cert.EncodeCertificates(a.certificate)
	if err != nil {
		panic(err) // encoding to memory cannot fail
	}
	return encoded
}

// serving makes a certificate for a server on loopback.
func (a *authority) serving(name string) (certificate, key []byte, err error) {
	return a.sign(&x509.Certificate{
		Subject:     pkix.Name{CommonName: name},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames:    []string{"localhost"},
		IPAddresses: []net.IP{net.ParseIP(process.Loopback)},
	})
}

// client makes a certificate for a user of the API.
func (a *authority) client(user string, groups []string) (certificate, key []byte, err error) {
	return a.sign(&x509.Certificate{
		Subject:     pkix.Name{CommonName: user, Organization: groups},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
}

func (a *authority) sign(template *x509.Certificate) (certificate, key []byte, err error) {
	signer, err := newKey()
	if err != nil {
		return nil, nil, err
	}
	template.SerialNumber, err = rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), serialNumberBits))
	if err != nil {
		return nil, nil, err
	}
	template.KeyUsage = x509.KeyUsageDigitalSignature
	template.NotBefore = time.Now().Add(-clockTolerance)
	template.NotAfter = time.Now().Add(certificateLifetime)
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, signer.Public(), a.key)
	if err != nil {
		return nil, nil, fmt.Errorf("make a certificate for %s: %w", template.Subject.CommonName, err)
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, nil, err
	}
	if certificate, err = cert.EncodeCertificates(parsed); err != nil {
		return nil, nil, err
	}
	key, err = keyutil.MarshalPrivateKeyToPEM(signer)
	return certificate, key, err
}

// The files that the servers read, in the directory of the control plane.
const (
	authorityFile       = "ca.crt"
	serviceAccountFile  = "service-account.key"
	controllerMgrConfig = "kube-controller-manager.kubeconfig"
	adminConfig         = "admin.kubeconfig"
)

func servingFiles(server string) (certificate, key string) { return server + ".crt", server + ".key" }

// writeCertificates writes them once; every start of a server uses the same ones.
func (a *authority) writeCertificates(dir string) error {
	files := map[string][]byte{authorityFile: a.pem()}
	for _, server := range []string{apiServer, controllerMgr} {
		certificate, key, err := a.serving(server)
		if err != nil {
			return err
		}
		certificateFile, keyFile := servingFiles(server)
		files[certificateFile], files[keyFile] = certificate, key
	}
	signer, err := newKey()
	if err != nil {
		return err
	}
	if files[serviceAccountFile], err = keyutil.MarshalPrivateKeyToPEM(signer); err != nil {
		return err
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			return err
		}
	}
	return nil
}
