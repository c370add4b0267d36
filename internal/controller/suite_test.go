package controller_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/log"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/yaml"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/hack/devenv/controlplane"
	"github.com/token-lease/operator/internal/controller"
	"github.com/token-lease/operator/internal/ledger"
	"github.com/token-lease/operator/internal/ledger/memory"
)

// The goal of this suite is to show what users of a real API server see: the
// manager runs with the rights of the generated role, on a ledger in memory whose
// clock and whose faults the tests control. Each test has a manager, a ledger and
// a namespace of its own.

const (
	startTimeout = 20 * time.Minute // below the bound that make gives a package
	waitTimeout  = 60 * time.Second
	waitStep     = 25 * time.Millisecond
	pollInterval = 50 * time.Millisecond
	clusterID    = "test-cluster"
	tester       = "tester"
)

var (
	plane  *controlplane.ControlPlane
	kube   client.WithWatch
	scheme = runtime.NewScheme()
)

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	log.SetLogger(logr.Discard())
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	var err error
	if plane, err = controlplane.Start(ctx, controlplane.Options{}); err != nil {
		fmt.Fprintln(os.Stderr, "start the control plane:", err)
		return 1
	}
	code := 1
	if err := prepare(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "prepare the control plane:", err)
	} else {
		code = m.Run()
	}
	if err := plane.Stop(context.WithoutCancel(ctx)); err != nil {
		fmt.Fprintln(os.Stderr, "stop the control plane:", err)
		code = 1
	}
	return code
}

// prepare installs the CRDs and gives the manager the rights of the role that is
// generated from this package, and no others.
func prepare(ctx context.Context) error {
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, v1alpha1.AddToScheme} {
		if err := add(scheme); err != nil {
			return err
		}
	}
	config := filepath.Join("..", "..", "config")
	if err := plane.InstallCRDs(filepath.Join(config, "crd", "bases")); err != nil {
		return err
	}
	var err error
	if kube, err = client.NewWithWatch(plane.RESTConfig(), client.Options{Scheme: scheme}); err != nil {
		return err
	}
	content, err := os.ReadFile(filepath.Join(config, "rbac", "role.yaml"))
	if err != nil {
		return err
	}
	role := &rbacv1.ClusterRole{}
	if err := yaml.UnmarshalStrict(content, role); err != nil {
		return err
	}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: role.Name},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role.Name},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: "tokenlease-system", Name: "manager"}},
	}
	if err := kube.Create(ctx, role); err != nil {
		return err
	}
	return kube.Create(ctx, binding)
}

// world is one test's manager with its ledger and namespace.
type world struct {
	*testing.T
	ctx       context.Context
	namespace string
	store     *faultyStore
	ledger    *ledger.Ledger
	ahead     *atomic.Int64
	settings  settings
	// stop ends the manager, if one runs.
	stop func()
}

// settings change a world before its manager starts.
type settings struct {
	options    controller.Options
	namespaces []string
	hooks      interceptor.Funcs
}

func newWorld(t *testing.T, change ...func(*settings)) *world {
	t.Helper()
	t.Parallel()
	return newWorldAlone(t, change...)
}

// newWorldAlone is for a test that changes what all tests share: it runs before
// those that run side by side.
func newWorldAlone(t *testing.T, change ...func(*settings)) *world {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	w := &world{T: t, ctx: ctx, ahead: &atomic.Int64{}}
	w.store = &faultyStore{Store: memory.New(memory.Options{Clock: w.now, Worker: "test"})}
	w.ledger = ledger.New(w.store, nil)
	w.namespace = w.newNamespace()
	s := settings{
		options: controller.Options{
			Ledger: w.ledger, ClusterID: clusterID,
			PollInterval: pollInterval, UsageInterval: time.Second, OrphanInterval: time.Hour,
			ActorOptional: true, // test/e2e installs the policies that vouch for it
		},
		namespaces: []string{w.namespace},
	}
	for _, f := range change {
		f(&s)
	}
	w.run(s)
	t.Cleanup(func() {
		w.stop()
		cancel()
	})
	return w
}

// run starts a manager, which stop ends. One can be run after the other.
func (w *world) run(s settings) {
	w.Helper()
	ctx, cancel := context.WithCancel(w.ctx)
	ended := w.start(ctx, s)
	w.settings = s
	w.stop = func() {
		cancel()
		if err := <-ended; err != nil {
			w.Errorf("the manager ended with %v", err)
		}
		w.stop = func() {}
	}
}

// restart runs another manager after the present one.
func (w *world) restart() {
	w.Helper()
	w.stop()
	w.run(w.settings)
}

// start runs a manager and the sweeper's work until the context ends.
func (w *world) start(ctx context.Context, s settings) <-chan error {
	w.Helper()
	config, err := plane.ServiceAccountConfig("tokenlease-system", "manager")
	if err != nil {
		w.Fatal(err)
	}
	namespaces := map[string]cache.Config{}
	for _, namespace := range s.namespaces {
		namespaces[namespace] = cache.Config{}
	}
	mgr, err := ctrl.NewManager(config, ctrl.Options{
		Scheme:  managerScheme(w),
		Metrics: metricsserver.Options{BindAddress: "0"},
		Cache:   cache.Options{DefaultNamespaces: namespaces},
		NewClient: func(config *rest.Config, options client.Options) (client.Client, error) {
			c, err := client.NewWithWatch(config, options)
			if err != nil {
				return nil, err
			}
			return interceptor.NewClient(c, s.hooks), nil
		},
	})
	if err != nil {
		w.Fatal(err)
	}
	if err := controller.SetupWithManager(mgr, s.options); err != nil {
		w.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- mgr.Start(ctx) }()
	go func() {
		ticker := time.NewTicker(pollInterval)
		defer ticker.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
				_, _ = w.store.Sweep(ctx, ledger.SweepRequest{Limit: 100})
			}
		}
	}()
	return ended
}

// managerScheme reads both kinds as the manager does, whereas the tests read them
// as any other client.
func managerScheme(w *world) *runtime.Scheme {
	w.Helper()
	scheme := runtime.NewScheme()
	w.must(clientgoscheme.AddToScheme(scheme))
	w.must(controller.AddToScheme(scheme))
	return scheme
}

// now is the ledger's clock.
func (w *world) now() time.Time { return time.Now().Add(time.Duration(w.ahead.Load())) }

// advance moves the ledger's clock forward.
func (w *world) advance(d time.Duration) { w.ahead.Add(int64(d)) }

func (w *world) newNamespace() string {
	w.Helper()
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "controller-"}}
	w.must(kube.Create(w.ctx, namespace))
	return namespace.Name
}

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

// eventually waits for a state; state describes what is there meanwhile.
func (w *world) eventually(what string, state func() (string, bool)) {
	w.Helper()
	deadline := time.Now().Add(waitTimeout)
	for {
		seen, ok := state()
		if ok {
			return
		}
		if time.Now().After(deadline) {
			w.Fatalf("waited %s until %s; there is\n%s", waitTimeout, what, seen)
		}
		time.Sleep(waitStep) // the pace of looking; the bound stands above
	}
}

// faultyStore is a ledger in memory that can be taken away.
type faultyStore struct {
	*memory.Store
	down atomic.Bool
	// served counts the requests that may change something, polls the mirror's
	// queries for changes.
	served, polls atomic.Int64
	// onStore sees each raise before it is stored, if it is set.
	onStore atomic.Pointer[func(ledger.StoreRaise)]
}

func (s *faultyStore) unavailable() *ledger.Error {
	return ledger.Errorf(ledger.CodeUnavailable, "The test took the ledger away.")
}

func (s *faultyStore) Do(ctx context.Context, requests []ledger.Request) []ledger.Result {
	if !s.down.Load() {
		s.served.Add(int64(len(requests)))
		for _, request := range requests {
			if raise, ok := request.(ledger.StoreRaise); ok && s.onStore.Load() != nil {
				(*s.onStore.Load())(raise)
			}
		}
		return s.Store.Do(ctx, requests)
	}
	results := make([]ledger.Result, len(requests))
	for i := range results {
		results[i].Err = s.unavailable()
	}
	return results
}

func (s *faultyStore) Changes(ctx context.Context, known []ledger.KnownRevision) ([]ledger.Change, error) {
	if s.down.Load() {
		return nil, s.unavailable()
	}
	defer s.polls.Add(1)
	return s.Store.Changes(ctx, known)
}

func (s *faultyStore) Raise(ctx context.Context, cluster, uid string) (*ledger.Raise, error) {
	if s.down.Load() {
		return nil, s.unavailable()
	}
	return s.Store.Raise(ctx, cluster, uid)
}

func (s *faultyStore) LiveRaises(ctx context.Context, cluster string, after ledger.RaisePosition, limit int) ([]*ledger.Raise, error) {
	if s.down.Load() {
		return nil, s.unavailable()
	}
	return s.Store.LiveRaises(ctx, cluster, after, limit)
}
