package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.uber.org/zap/zapcore"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client/config"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	controllermetrics "sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/token-lease/operator/internal/controller"
	"github.com/token-lease/operator/internal/ledger"
	"github.com/token-lease/operator/internal/ledger/postgres"
	"github.com/token-lease/operator/internal/sweeper"
	"github.com/token-lease/operator/internal/telemetry"
)

// shutdownGrace bounds how long the process takes to end once it is told to. It
// is shorter than what config/manager grants.
const shutdownGrace = 20 * time.Second

// closeGrace bounds how long the connections to the ledger may take to come back
// after that; a call that hangs must not keep the process.
const closeGrace = 5 * time.Second

// runOptions are the flags of "manager run".
type runOptions struct {
	database          database
	metricsAddress    string
	healthAddress     string
	worker            string
	trustedNamespaces string
	requireActor      bool
	approvalPattern   string
	leaderElection    leaderElection
	dataPlane         dataPlane
	controllers       controller.Options
	ledger            postgres.Options
	log               zap.Options
}

func (o *runOptions) bind(fs *flag.FlagSet) {
	o.database.bind(fs)
	fs.StringVar(&o.metricsAddress, "metrics-bind-address", ":8080", "Address of the metrics endpoint; 0 switches it off.")
	fs.StringVar(&o.healthAddress, "health-probe-bind-address", ":8081", "Address of /healthz and /readyz; 0 switches it off.")
	fs.StringVar(&o.controllers.ClusterID, "cluster-id", "",
		"Identity of this cluster in the ledger, which owns what its objects declare. Default: the UID of the namespace kube-system.")
	fs.StringVar(&o.worker, "worker", hostname(), "Name of this process in the audit.")
	fs.StringVar(&o.trustedNamespaces, "trusted-key-namespaces", "",
		"Comma-separated namespaces whose TokenBuckets may use bucket keys outside \"<namespace>/\".")
	fs.DurationVar(&o.controllers.PollInterval, "poll-interval", time.Second, "How often the ledger is asked which buckets changed.")
	fs.DurationVar(&o.controllers.UsageInterval, "usage-interval", time.Minute,
		"Status is written at most once in this time when only usage figures have changed.")
	fs.IntVar(&o.controllers.MaxConcurrentReconciles, "max-concurrent-reconciles", 4, "Objects of one kind that are reconciled at a time.")
	fs.BoolVar(&o.requireActor, "require-actor", true,
		"Refuse raises of which the admission policies of config/admission do not tell who asked. Without it the annotation is believed.")
	fs.StringVar(&o.approvalPattern, "approval-pattern", "",
		"Regular expression (RE2) that the whole approvalID of a new raise must match, such as CHG-[0-9]+. Default: any.")
	fs.DurationVar(&o.controllers.MaxRaiseDuration, "max-raise-duration", controller.DefaultMaxRaiseDuration,
		"The longest time from start to expiry of a raise, whatever the policy of its bucket says.")
	fs.DurationVar(&o.ledger.LockTimeout, "ledger-lock-timeout", 2*time.Second, "How long a ledger transaction waits for a locked bucket.")
	fs.DurationVar(&o.ledger.StatementTimeout, "ledger-statement-timeout", 5*time.Second, "How long a statement of a ledger transaction may run.")
	fs.DurationVar(&o.ledger.IdleInTransactionTimeout, "ledger-idle-in-transaction-timeout", 5*time.Second,
		"How long the database keeps a ledger transaction open for a process that has stopped, and with it the bucket's lock.")
	fs.IntVar(&o.ledger.MaxConnections, "ledger-max-connections", 10, "Connections to the database, at most. Four of them are kept for reads, the sweeper and health.")
	o.leaderElection.bind(fs)
	o.dataPlane.bind(fs)
	// Errors say what happened; a stack of this process's own loops adds nothing.
	o.log.StacktraceLevel = zapcore.PanicLevel
	o.log.TimeEncoder = zapcore.RFC3339NanoTimeEncoder
	o.log.BindFlags(fs)
	config.RegisterFlags(fs)
}

func hostname() string {
	name, err := os.Hostname()
	if err != nil {
		return "manager"
	}
	return name
}

func runCommand(ctx context.Context, args []string, stderr io.Writer) error {
	o, err := parseRun(args, stderr)
	if err != nil {
		return err
	}
	if err := o.validate(ctx); err != nil {
		return err
	}
	log := zap.New(zap.UseFlagOptions(&o.log))
	ctrl.SetLogger(log)
	klog.SetLogger(log)
	return run(ctx, *o, log)
}

func parseRun(args []string, stderr io.Writer) (*runOptions, error) {
	fs := flag.NewFlagSet("manager run", flag.ContinueOnError)
	fs.SetOutput(stderr)
	o := &runOptions{}
	o.bind(fs)
	return o, parse(fs, args)
}

// run starts the parts of the process side by side. None lives inside another:
// what keeps raises true needs the database alone, and goes on without the API
// server and without leadership.
func run(ctx context.Context, o runOptions, log logr.Logger) error {
	restConfig, err := config.GetConfig()
	if err != nil {
		return fmt.Errorf("find the API server: %w", err)
	}
	metrics := telemetry.New(log.WithName("ledger"))
	o.ledger.ConnString = o.database.connString
	o.ledger.Worker = o.worker
	o.ledger.Observer = metrics
	store, err := postgres.Open(o.ledger) //nolint:contextcheck // it opens nothing yet; the pool outlives any context
	if err != nil {
		return fmt.Errorf("open the ledger: %w", err)
	}
	defer func() {
		if !within(closeGrace, store.Close) {
			log.Info("connections to the ledger were still in use at the end", "waited", closeGrace.String())
		}
	}()
	o.controllers.Ledger = ledger.New(store, metrics)

	// Purging is nobody's request: how long it takes is no figure of theirs.
	purger := sweeper.NewPurger(ledger.New(store, nil), metrics, log.WithName("purger"))
	h := newHealth(partLedger, partControllers)
	served := telemetry.NewDataPlane()
	servers, err := o.listen(ctx, h, []prometheus.Collector{metrics, telemetry.NewPastExpiry(store), telemetry.NewOpenReviews(store), served})
	if err != nil {
		return err
	}
	workloads, err := o.dataPlane.parts(ctx, restConfig, o.controllers.ClusterID, o.controllers.Ledger, served, log.WithName("dataplane"))
	if err != nil {
		return err
	}
	parts := []func(context.Context) error{
		func(ctx context.Context) error {
			sweeper.New(store, metrics, log.WithName("sweeper")).Run(ctx)
			return nil
		},
		func(ctx context.Context) error {
			purger.Run(ctx)
			return nil
		},
		func(ctx context.Context) error {
			probeLedger(ctx, store, h, metrics.SetWritable, log.WithName("ledger"))
			return nil
		},
		func(ctx context.Context) error {
			runControllers(ctx, restConfig, o, h, log.WithName("controllers"))
			return nil
		},
	}
	for _, s := range servers {
		parts = append(parts, s.serve)
	}
	parts = append(parts, workloads...)
	log.Info("started", "version", version(), "worker", o.worker)
	err = together(ctx, h.stop, parts...)
	log.Info("stopped")
	return err
}

// listen binds the process's endpoints.
func (o *runOptions) listen(ctx context.Context, h *health, collectors []prometheus.Collector) ([]*server, error) {
	registry := prometheus.NewRegistry()
	for _, c := range collectors {
		if err := registry.Register(c); err != nil {
			return nil, fmt.Errorf("register metrics: %w", err)
		}
	}
	metricsMux := http.NewServeMux()
	metricsMux.Handle("GET /metrics", promhttp.HandlerFor(
		prometheus.Gatherers{registry, controllermetrics.Registry},
		promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError, MaxRequestsInFlight: 4}))
	healthMux := http.NewServeMux()
	healthMux.HandleFunc("GET /healthz", h.live)
	healthMux.HandleFunc("GET /readyz", h.ready)

	var servers []*server
	for _, e := range []struct {
		name, address string
		handler       http.Handler
	}{{"metrics", o.metricsAddress, metricsMux}, {"health probes", o.healthAddress, healthMux}} {
		s, err := listen(ctx, e.name, e.address, e.handler)
		if err != nil {
			return nil, err
		}
		if s != nil {
			servers = append(servers, s)
		}
	}
	return servers, nil
}

// together runs parts until the context ends or one of them fails, then waits for
// the others, within a bound.
func together(ctx context.Context, stopping func(), parts ...func(context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	failures := make(chan error, len(parts))
	for _, part := range parts {
		wg.Go(func() {
			if err := part(ctx); err != nil {
				failures <- err
				cancel()
			}
		})
	}
	<-ctx.Done()
	stopping()
	done := make(chan struct{})
	go func() {
		wg.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(shutdownGrace):
		return fmt.Errorf("parts of the process did not end within %s", shutdownGrace)
	}
	close(failures)
	var err error
	for failure := range failures {
		err = errors.Join(err, failure)
	}
	return err
}

// within reports whether a step that cannot be cancelled ended in time.
func within(bound time.Duration, step func()) bool {
	done := make(chan struct{})
	go func() {
		defer close(done)
		step()
	}()
	select {
	case <-done:
		return true
	case <-time.After(bound):
		return false
	}
}
