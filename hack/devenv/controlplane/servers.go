package controlplane

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"

	"k8s.io/client-go/rest"

	"github.com/token-lease/operator/hack/devenv/process"
)

const (
	etcdName      = "devenv"
	issuer        = "https://kubernetes.default.svc"
	serviceRange  = "10.0.0.0/24"
	addressInUse  = "address already in use"
	etcdReadyPath = "/readyz"
	// defaultServiceAccount is made by kube-controller-manager.
	defaultServiceAccount = "/api/v1/namespaces/default/serviceaccounts/default"
)

// controllers are those whose work shows to somebody without nodes. The others
// would only burden a small machine.
var controllers = []string{
	"namespace-controller",
	"garbage-collector-controller",
	"clusterrole-aggregation-controller",
	"serviceaccount-controller",
	"serviceaccount-token-controller",
	"root-ca-certificate-publisher-controller",
	"resourcequota-controller",
	"validatingadmissionpolicy-status-controller",
}

func (c *ControlPlane) startEtcd(ctx context.Context) error {
	if err := c.makeDir("etcd-data"); err != nil {
		return err
	}
	client := "http://" + process.Address(c.ports.etcdClient)
	peer := "http://" + process.Address(c.ports.etcdPeer)
	started, err := c.run(ctx, etcd, probe(http.DefaultClient, client+etcdReadyPath),
		"--name="+etcdName, "--data-dir="+c.file("etcd-data"),
		"--listen-client-urls="+client, "--advertise-client-urls="+client,
		"--listen-peer-urls="+peer, "--initial-advertise-peer-urls="+peer,
		"--initial-cluster="+etcdName+"="+peer,
		// Only a crash of the machine could lose what is not synced, and nothing
		// here outlives that.
		"--unsafe-no-fsync",
	)
	if err == nil {
		c.etcd = started
	}
	return err
}

func (c *ControlPlane) startAPIServer(ctx context.Context) error {
	client, err := rest.HTTPClientFor(c.admin)
	if err != nil {
		return err
	}
	defer client.CloseIdleConnections()
	certificate, key := servingFiles(apiServer)
	started, err := c.run(ctx, apiServer, probe(client, c.admin.Host+"/readyz"),
		"--bind-address="+process.Loopback, fmt.Sprintf("--secure-port=%d", c.ports.apiServer),
		"--tls-cert-file="+c.file(certificate), "--tls-private-key-file="+c.file(key),
		"--client-ca-file="+c.file(authorityFile),
		"--etcd-servers=http://"+process.Address(c.ports.etcdClient),
		"--authorization-mode=RBAC",
		"--service-account-issuer="+issuer,
		"--service-account-key-file="+c.file(serviceAccountFile),
		"--service-account-signing-key-file="+c.file(serviceAccountFile),
		"--service-cluster-ip-range="+serviceRange,
		// Loopback is no address for the endpoints of the kubernetes Service.
		"--endpoint-reconciler-type=none",
		"--profiling=false",
	)
	if err == nil {
		c.apiServer = started
	}
	return err
}

func (c *ControlPlane) startControllerManager(ctx context.Context) error {
	url := "https://" + process.Address(c.ports.controllerMgr)
	// Its health endpoint needs no credentials, only trust in its certificate.
	trusting, err := rest.HTTPClientFor(&rest.Config{
		Host: url, TLSClientConfig: rest.TLSClientConfig{CAData: c.authority.pem()},
	})
	if err != nil {
		return err
	}
	defer trusting.CloseIdleConnections()
	admin, err := rest.HTTPClientFor(c.admin)
	if err != nil {
		return err
	}
	defer admin.CloseIdleConnections()
	healthy, working := probe(trusting, url+"/healthz"), probe(admin, c.admin.Host+defaultServiceAccount)
	certificate, key := servingFiles(controllerMgr)
	config := c.file(controllerMgrConfig)
	// It answers as healthy before it has made its controllers, and ends if the
	// API server goes down meanwhile. The work of one shows that all are made.
	ready := func(ctx context.Context) error {
		if err := healthy(ctx); err != nil {
			return err
		}
		return working(ctx)
	}
	started, err := c.run(ctx, controllerMgr, ready,
		"--bind-address="+process.Loopback, fmt.Sprintf("--secure-port=%d", c.ports.controllerMgr),
		"--tls-cert-file="+c.file(certificate), "--tls-private-key-file="+c.file(key),
		"--kubeconfig="+config, "--authentication-kubeconfig="+config, "--authorization-kubeconfig="+config,
		"--leader-elect=false", "--use-service-account-credentials=true",
		"--service-account-private-key-file="+c.file(serviceAccountFile),
		"--root-ca-file="+c.file(authorityFile),
		"--controllers="+strings.Join(controllers, ","),
		"--profiling=false",
	)
	if err == nil {
		c.controllerMgr = started
	}
	return err
}

// run starts a program and waits until its health endpoint answers.
func (c *ControlPlane) run(
	ctx context.Context, name string, healthy func(context.Context) error, args ...string,
) (*process.Process, error) {
	started, err := process.Start(process.Command{
		Path: filepath.Join(c.assets, name), Args: args, LogFile: c.file(name + ".log"),
	})
	if err != nil {
		return nil, err
	}
	if err := started.WaitReady(ctx, readyTimeout, healthy); err != nil {
		portTaken := !started.Running() && strings.Contains(started.LogTail(), addressInUse)
		err = errors.Join(err, started.Kill())
		if portTaken {
			return nil, fmt.Errorf("%w: %w", process.ErrPortTaken, err)
		}
		return nil, err
	}
	return started, nil
}
