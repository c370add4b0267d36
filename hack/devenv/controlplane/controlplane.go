// Package controlplane brings up a Kubernetes control plane for development and
// tests, and takes it down again: etcd, kube-apiserver and
// kube-controller-manager as processes on loopback, with RBAC. Namespaces go,
// garbage is collected and roles aggregate as in a real cluster; there are no
// nodes, so no pod runs.
//
// The API server can be taken down and brought back alone, on the same address
// with the same certificates and data, which is what a test of an outage needs
// and what envtest does not offer.
package controlplane

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/token-lease/operator/hack/devenv/process"
	"github.com/token-lease/operator/hack/devenv/scratch"
)

const (
	readyTimeout = 2 * time.Minute
	probeTimeout = 5 * time.Second
	crdTimeout   = time.Minute
	portAttempts = 5
	probeBytes   = 512
	// apiServerGrace is how long an API server may serve its last requests. Watches
	// can keep it for a minute, and what it has confirmed is in etcd.
	apiServerGrace = 3 * time.Second
	adminUser      = "devenv-admin"
	adminGroup     = "system:masters"
)

// Options say how to start a control plane. The zero value will do.
type Options struct {
	// Assets is a directory with the programs; empty asks Assets for one.
	Assets string
	// Log receives what is being done, one line each; nil discards it.
	Log io.Writer
}

// ControlPlane is a running control plane. Its methods may be called
// concurrently.
type ControlPlane struct {
	assets    string
	log       io.Writer
	dir       *scratch.Dir
	authority *authority
	admin     *rest.Config
	ports     ports

	mu                             sync.Mutex
	etcd, apiServer, controllerMgr *process.Process
	stopped                        bool
}

// ports are fixed by the first start that succeeds.
type ports struct{ etcdClient, etcdPeer, apiServer, controllerMgr int }

// Start returns a control plane whose API server answers and whose controllers
// run. The caller ends it with Stop.
func Start(ctx context.Context, options Options) (*ControlPlane, error) {
	c := &ControlPlane{assets: options.Assets, log: options.Log}
	if c.log == nil {
		c.log = io.Discard
	}
	if c.assets == "" {
		var err error
		if c.assets, err = Assets(ctx, c.log); err != nil {
			return nil, err
		}
	}
	if err := c.start(ctx); err != nil {
		return nil, errors.Join(err, c.Stop(context.WithoutCancel(ctx)))
	}
	return c, nil
}

func (c *ControlPlane) start(ctx context.Context) (err error) {
	if c.dir, err = scratch.New("", "controlplane"); err != nil {
		return err
	}
	if c.authority, err = newAuthority(); err != nil {
		return err
	}
	if err := c.authority.writeCertificates(c.dir.Path); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	begun := time.Now()
	for _, step := range []func(context.Context) error{c.startEtcd, c.startAPIServer, c.startControllerManager} {
		if err := onFreePorts(ctx, step, c.choosePorts); err != nil {
			return err
		}
	}
	fmt.Fprintf(c.log, "controlplane: API server on %s after %s\n", c.admin.Host, elapsed(begun))
	return nil
}

// onFreePorts repeats a step with other ports while the ones chosen are taken
// by someone else.
func onFreePorts(ctx context.Context, step func(context.Context) error, choose func() error) error {
	var err error
	for range portAttempts {
		if err = choose(); err != nil {
			return err
		}
		if err = step(ctx); !errors.Is(err, process.ErrPortTaken) {
			break
		}
	}
	return err
}

// choosePorts gives ports to the servers that do not run yet, and writes the
// kubeconfigs that follow from them.
func (c *ControlPlane) choosePorts() error {
	var wanted []*int
	if c.etcd == nil {
		wanted = append(wanted, &c.ports.etcdClient, &c.ports.etcdPeer)
	}
	if c.apiServer == nil {
		wanted = append(wanted, &c.ports.apiServer)
	}
	if c.controllerMgr == nil {
		wanted = append(wanted, &c.ports.controllerMgr)
	}
	for _, port := range wanted {
		free, err := process.FreePort()
		if err != nil {
			return err
		}
		*port = free
	}
	if c.apiServer != nil {
		return nil
	}
	return c.writeKubeconfigs()
}

// Stop takes everything down for good and removes the data. Nothing happens the
// second time. The context is there for the symmetry with Start: the servers are
// killed, which takes no time worth cancelling.
func (c *ControlPlane) Stop(_ context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stopped {
		return nil
	}
	c.stopped = true
	var err error
	// The data goes as well, so there is nothing that an orderly end would save;
	// an API server takes its time over one.
	for _, p := range []*process.Process{c.controllerMgr, c.apiServer, c.etcd} {
		if p != nil {
			err = errors.Join(err, p.Kill())
		}
	}
	if c.dir != nil {
		err = errors.Join(err, c.dir.Remove())
	}
	return err
}

// StopAPIServer takes the API server down in an orderly way, within seconds.
// etcd keeps the data and kube-controller-manager keeps trying. Nothing happens
// when it is down.
func (c *ControlPlane) StopAPIServer(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, apiServerGrace)
	defer cancel()
	if err := c.apiServer.Stop(ctx); !errors.Is(err, process.ErrHadToBeKilled) {
		return err
	}
	return nil
}

// KillAPIServer takes the API server down at once, as a crash does.
func (c *ControlPlane) KillAPIServer() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.apiServer.Kill()
}

// StartAPIServer brings the API server back: same address, certificates and
// data. It returns once the server is ready and kube-controller-manager runs;
// what is up stays as it is.
func (c *ControlPlane) StartAPIServer(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stopped {
		return errors.New("this control plane was stopped and its data removed")
	}
	if !c.apiServer.Running() {
		if err := c.startAPIServer(ctx); err != nil {
			return err
		}
	}
	if !c.controllerMgr.Running() {
		return c.startControllerManager(ctx)
	}
	return nil
}

// Done is closed when etcd or kube-controller-manager has ended, or the API
// server that runs now: without a call of Stop or StopAPIServer, a failure.
func (c *ControlPlane) Done() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	ended := make(chan struct{})
	etcd, apiServer, controllerMgr := c.etcd, c.apiServer, c.controllerMgr
	go func() {
		defer close(ended)
		select {
		case <-etcd.Done():
		case <-apiServer.Done():
		case <-controllerMgr.Done():
		}
	}()
	return ended
}

// LogTails are the ends of the logs of the servers that do not run, for error
// messages.
func (c *ControlPlane) LogTails() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var tails []string
	for _, p := range []*process.Process{c.etcd, c.apiServer, c.controllerMgr} {
		if p != nil && !p.Running() {
			tails = append(tails, p.Name()+":\n"+p.LogTail())
		}
	}
	return strings.Join(tails, "\n")
}

// Dir holds the servers' logs and data until Stop.
func (c *ControlPlane) Dir() string { return c.dir.Path }

// Kubectl is the path of kubectl.
func (c *ControlPlane) Kubectl() string { return filepath.Join(c.assets, kubectl) }

// InstallCRDs applies the CustomResourceDefinitions in a directory and waits
// until the API server serves them, at most a minute.
func (c *ControlPlane) InstallCRDs(dir string) error {
	installed, err := envtest.InstallCRDs(c.RESTConfig(), envtest.CRDInstallOptions{
		Paths: []string{dir}, ErrorIfPathMissing: true, MaxTime: crdTimeout,
	})
	if err != nil {
		return fmt.Errorf("install the CRDs of %s: %w", dir, err)
	}
	if len(installed) == 0 {
		return fmt.Errorf("there is no CustomResourceDefinition in %s", dir)
	}
	return nil
}

// probe reports whether a server's health endpoint answers 200.
func probe(client *http.Client, url string) func(context.Context) error {
	return func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, probeTimeout)
		defer cancel()
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		response, err := client.Do(request)
		if err != nil {
			return err
		}
		defer response.Body.Close()
		if response.StatusCode != http.StatusOK {
			body, _ := io.ReadAll(io.LimitReader(response.Body, probeBytes))
			return fmt.Errorf("%s answers %s: %s", url, response.Status, body)
		}
		return nil
	}
}

func (c *ControlPlane) file(name string) string { return filepath.Join(c.dir.Path, name) }

func (c *ControlPlane) makeDir(name string) error { return os.MkdirAll(c.file(name), 0o700) }
