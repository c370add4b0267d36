// Package environment brings up everything that the manager needs, for
// development, the demo and the end-to-end tests: PostgreSQL, a control plane
// with the operator's CRDs and roles, the manager's program and its schema.
package environment

import (
	"context"
	"errors"
	"io"
	"path/filepath"
	"sync"

	"github.com/token-lease/operator/hack/devenv/controlplane"
	"github.com/token-lease/operator/hack/devenv/postgres"
	"github.com/token-lease/operator/hack/devenv/process"
	"github.com/token-lease/operator/hack/devenv/repository"
	"github.com/token-lease/operator/hack/devenv/scratch"
)

const (
	databasePrefix = "tokenlease"
	crdDir         = "config/crd/bases"
	rbacDir        = "config/rbac"
	namespaceFile  = "config/manager/namespace.yaml"
)

// Where the manager lives, as config/rbac says.
const (
	SystemNamespace = "tokenlease-system"
	ManagerAccount  = "tokenlease-manager" // a ServiceAccount
)

// Options say what to bring up. The zero value suits development.
type Options struct {
	// Postgres says how to get PostgreSQL. Its Log is replaced by Log.
	Postgres postgres.Options
	// ManagerTags are Go build tags for the manager.
	ManagerTags []string
	// Log receives what is being done, one line each; nil discards it.
	Log io.Writer
}

// Environment is what was brought up.
type Environment struct {
	// Root is the root of the repository.
	Root string
	// Dir is a directory for the caller's files, such as the manager's log. It
	// goes with the environment.
	Dir          string
	Postgres     *postgres.Server
	ControlPlane *controlplane.ControlPlane
	// DatabaseURL names a database of this environment alone, migrated. It holds
	// a password.
	DatabaseURL string
	// Manager is the path of the manager's program.
	Manager string

	database string
	dir      *scratch.Dir
	stop     sync.Once
	stopErr  error
}

// Start brings everything up. The caller ends it with Stop.
func Start(ctx context.Context, options Options) (*Environment, error) {
	if options.Log == nil {
		options.Log = io.Discard
	}
	options.Log = &lockedWriter{writer: options.Log}
	options.Postgres.Log = options.Log
	e := &Environment{}
	if err := e.start(ctx, options); err != nil {
		return nil, errors.Join(err, e.Stop(context.WithoutCancel(ctx)))
	}
	return e, nil
}

func (e *Environment) start(ctx context.Context, options Options) (err error) {
	if e.Root, err = repository.Root(); err != nil {
		return err
	}
	if e.dir, err = scratch.New("", "environment"); err != nil {
		return err
	}
	e.Dir = e.dir.Path
	// The programs first, and alone: building them takes all the machine has.
	assets, err := controlplane.Assets(ctx, options.Log)
	if err != nil {
		return err
	}
	err = together(ctx,
		func(ctx context.Context) (err error) {
			e.Postgres, err = postgres.Start(ctx, options.Postgres)
			return err
		},
		func(ctx context.Context) (err error) {
			e.ControlPlane, err = controlplane.Start(ctx, controlplane.Options{Assets: assets, Log: options.Log})
			return err
		},
		func(ctx context.Context) (err error) {
			e.Manager, err = BuildManager(ctx, e.Root, e.Dir, options.ManagerTags...)
			return err
		},
	)
	if err != nil {
		return err
	}
	return together(ctx, e.createDatabase, e.installConfig)
}

// Stop takes everything down. Nothing happens the second time.
func (e *Environment) Stop(ctx context.Context) error {
	e.stop.Do(func() {
		if e.ControlPlane != nil {
			e.stopErr = errors.Join(e.stopErr, e.ControlPlane.Stop(ctx))
		}
		if e.Postgres != nil {
			// On a given server the database would stay behind.
			if e.database != "" && e.Postgres.Given() {
				e.stopErr = errors.Join(e.stopErr, e.Postgres.DropDatabase(ctx, e.database))
			}
			e.stopErr = errors.Join(e.stopErr, e.Postgres.Stop(ctx))
		}
		if e.dir != nil {
			e.stopErr = errors.Join(e.stopErr, e.dir.Remove())
		}
	})
	return e.stopErr
}

// ManagerCommand runs the manager as its ServiceAccount, with the rights that
// config/rbac gives to that and no others; its log is manager.log in Dir. The
// arguments are added to those that it needs here. Only one may serve metrics and
// health at a time, unless they are moved by argument.
func (e *Environment) ManagerCommand(args ...string) process.Command {
	return process.Command{
		Path:    e.Manager,
		Args:    append([]string{"run", "--leader-election-namespace=" + SystemNamespace}, args...),
		Env:     []string{"KUBECONFIG=" + e.ManagerKubeconfig(), "DATABASE_URL=" + e.DatabaseURL},
		LogFile: filepath.Join(e.Dir, "manager.log"),
	}
}

// ManagerKubeconfig is a file with the identity of the manager's ServiceAccount.
func (e *Environment) ManagerKubeconfig() string {
	return filepath.Join(e.Dir, "manager.kubeconfig")
}

func (e *Environment) createDatabase(ctx context.Context) error {
	name := uniqueName(databasePrefix)
	if err := e.Postgres.CreateDatabase(ctx, name); err != nil {
		return err
	}
	e.database, e.DatabaseURL = name, e.Postgres.URL(name)
	return Migrate(ctx, e.Manager, e.DatabaseURL)
}

// installConfig gives the control plane the operator's CRDs, roles and admission
// policies.
func (e *Environment) installConfig(ctx context.Context) error {
	if err := e.ControlPlane.InstallCRDs(filepath.Join(e.Root, crdDir)); err != nil {
		return err
	}
	for _, args := range [][]string{
		{"apply", "--filename", filepath.Join(e.Root, namespaceFile)},
		{"apply", "--kustomize", filepath.Join(e.Root, rbacDir)},
		{"apply", "--kustomize", filepath.Join(e.Root, AdmissionDir)},
	} {
		if err := e.Kubectl(ctx, io.Discard, args...); err != nil {
			return err
		}
	}
	if err := AwaitAdmission(ctx, e.ControlPlane.RESTConfig()); err != nil {
		return err
	}
	identity, err := e.ControlPlane.ServiceAccountConfig(SystemNamespace, ManagerAccount)
	if err != nil {
		return err
	}
	return controlplane.WriteKubeconfig(e.ManagerKubeconfig(), identity)
}

// together runs the steps at the same time, and stops all when one fails.
func together(ctx context.Context, steps ...func(context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	results := make([]error, len(steps))
	var running sync.WaitGroup
	for i, step := range steps {
		running.Go(func() {
			if results[i] = step(ctx); results[i] != nil {
				cancel()
			}
		})
	}
	running.Wait()
	// What failed only because another step failed would hide the reason.
	var reasons []error
	for _, err := range results {
		if err != nil && !errors.Is(err, context.Canceled) {
			reasons = append(reasons, err)
		}
	}
	if len(reasons) == 0 {
		return errors.Join(results...)
	}
	return errors.Join(reasons...)
}

// lockedWriter keeps lines whole that are written at the same time.
type lockedWriter struct {
	mu     sync.Mutex
	writer io.Writer
}

func (w *lockedWriter) Write(line []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.writer.Write(line)
}
