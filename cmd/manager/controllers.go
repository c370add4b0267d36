package main

import (
	"context"
	"flag"
	"fmt"
	"sync"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlconfig "sigs.k8s.io/controller-runtime/pkg/config"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/token-lease/operator/internal/controller"
)

// The back-off between two lives of the controller manager.
const (
	minRebuild = time.Second
	maxRebuild = 15 * time.Second
	// steadyAfter is how long a life must last to count as a good one.
	steadyAfter = time.Minute
	// controllerGrace bounds how long reconciles may take to end; it lies inside
	// shutdownGrace.
	controllerGrace = 10 * time.Second
)

// leaderElection bounds how the controllers of several replicas take turns.
type leaderElection struct {
	enabled       bool
	id            string
	namespace     string
	leaseDuration time.Duration
	renewDeadline time.Duration
	retryPeriod   time.Duration
}

func (l *leaderElection) bind(fs *flag.FlagSet) {
	fs.BoolVar(&l.enabled, "leader-elect", true, "Let only one replica run the controllers. Everything else runs on every replica.")
	fs.StringVar(&l.id, "leader-election-id", "token-lease-operator.budget.tokenlease.dev", "Name of the Lease that the replicas share.")
	fs.StringVar(&l.namespace, "leader-election-namespace", "", "Namespace of that Lease. Default: the one that the process runs in.")
	fs.DurationVar(&l.leaseDuration, "leader-election-lease-duration", 15*time.Second, "How long a silent leader keeps the leadership.")
	fs.DurationVar(&l.renewDeadline, "leader-election-renew-deadline", 10*time.Second, "How long a leader tries to renew before it gives up.")
	fs.DurationVar(&l.retryPeriod, "leader-election-retry-period", 2*time.Second, "How long to wait between two tries.")
}

// newScheme knows the built-in kinds and ours.
func newScheme() *runtime.Scheme {
	scheme := runtime.NewScheme()
	utilruntime.Must(clientgoscheme.AddToScheme(scheme))
	utilruntime.Must(controller.AddToScheme(scheme))
	return scheme
}

// runControllers runs the controller manager until the context ends. A manager
// ends when its leadership is lost or its caches cannot be filled; it cannot be
// started again, so a new one is built.
func runControllers(ctx context.Context, restConfig *rest.Config, o runOptions, h *health, log logr.Logger) {
	backOff := minRebuild
	for {
		started := time.Now()
		err := runControllersOnce(ctx, restConfig, o, h, log)
		if ctx.Err() != nil {
			if err != nil {
				log.Error(err, "the controllers did not end cleanly")
			}
			return
		}
		if time.Since(started) > steadyAfter {
			backOff = minRebuild
		}
		wrong := "ended"
		if err != nil {
			wrong = err.Error()
		}
		h.wrong(partControllers, wrong)
		log.Error(err, "the controllers ended; they are built anew", "in", backOff.String())
		timer := time.NewTimer(backOff)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		}
		backOff = min(2*backOff, maxRebuild)
	}
}

func runControllersOnce(ctx context.Context, restConfig *rest.Config, o runOptions, h *health, log logr.Logger) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	scheme := newScheme()
	grace := controllerGrace
	skipNameValidation := true // a process builds more than one manager in its life
	mgr, err := ctrl.NewManager(restConfig, ctrl.Options{
		Scheme:                        scheme,
		Logger:                        log,
		Metrics:                       metricsserver.Options{BindAddress: "0"},
		HealthProbeBindAddress:        "0",
		LeaderElection:                o.leaderElection.enabled,
		LeaderElectionID:              o.leaderElection.id,
		LeaderElectionNamespace:       o.leaderElection.namespace,
		LeaderElectionReleaseOnCancel: true,
		LeaseDuration:                 &o.leaderElection.leaseDuration,
		RenewDeadline:                 &o.leaderElection.renewDeadline,
		RetryPeriod:                   &o.leaderElection.retryPeriod,
		GracefulShutdownTimeout:       &grace,
		Controller:                    ctrlconfig.Controller{SkipNameValidation: &skipNameValidation},
	})
	if err != nil {
		return fmt.Errorf("build the controller manager: %w", err)
	}
	options := o.controllers
	if options.ClusterID == "" {
		if options.ClusterID, err = askClusterID(ctx, restConfig, scheme); err != nil {
			return err
		}
	}
	if err := controller.SetupWithManager(mgr, options); err != nil { //nolint:contextcheck // what it registers gets its context from Start
		return fmt.Errorf("set the controllers up: %w", err)
	}
	log.Info("the controllers are built", "clusterID", options.ClusterID)
	var watching sync.WaitGroup
	watching.Go(func() {
		ask := func(ctx context.Context) error { return askAPIServer(ctx, mgr.GetAPIReader()) }
		watchControllers(ctx, mgr.Elected(), apiProbeInterval, ask, h, log)
	})
	err = mgr.Start(ctx)
	// Nobody may say that they run once this says how they ended.
	cancel()
	watching.Wait()
	return err
}

// +kubebuilder:rbac:groups="",resources=namespaces,resourceNames=kube-system,verbs=get

// askClusterID asks for what tells this cluster's objects from another's on the same
// ledger: the UID of a namespace that every cluster has and nobody re-creates.
func askClusterID(ctx context.Context, restConfig *rest.Config, scheme *runtime.Scheme) (string, error) {
	reader, err := client.New(restConfig, client.Options{Scheme: scheme})
	if err != nil {
		return "", fmt.Errorf("reach the API server: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, maxRebuild)
	defer cancel()
	var namespace corev1.Namespace
	if err := reader.Get(ctx, client.ObjectKey{Name: "kube-system"}, &namespace); err != nil {
		return "", fmt.Errorf("read the cluster's identity: %w", err)
	}
	return string(namespace.UID), nil
}
