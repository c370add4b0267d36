package e2e_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/token-lease/operator/hack/devenv/controlplane"
	"github.com/token-lease/operator/hack/devenv/environment"
	"github.com/token-lease/operator/hack/devenv/postgres"
	"github.com/token-lease/operator/hack/devenv/repository"
	"github.com/token-lease/operator/hack/devenv/scratch"
)

const (
	startTimeout = 20 * time.Minute // below the bound that make gives a package
	stopTimeout  = time.Minute
	// sideBySide is how many tests run at once: they mostly wait.
	sideBySide = "8"
	faultsTag  = "faultinjection"
)

// world is what the tests share.
var world struct {
	root     string // of the repository
	dir      string // for files, removed at the end
	assets   string // the control plane's programs
	postgres *postgres.Server
	cluster  *cluster
	// manager is the program that users get, faulty the one with crash points.
	manager, faulty string
}

func TestMain(m *testing.M) {
	if asked, err := runVictim(); asked {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(run(m))
}

func run(m *testing.M) (code int) {
	flag.Parse()
	if !given("test.parallel") {
		if err := flag.Set("test.parallel", sideBySide); err != nil {
			panic(err)
		}
	}
	log.SetLogger(logr.Discard())
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	defer func() {
		if err := stopWorld(); err != nil {
			fmt.Fprintln(os.Stderr, "stop what the tests share:", err)
			code = 1
		}
	}()
	if err := startWorld(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "start what the tests share:", err)
		return 1
	}
	return m.Run()
}

func given(name string) bool {
	found := false
	flag.Visit(func(f *flag.Flag) { found = found || f.Name == name })
	return found
}

var worldDir *scratch.Dir

func startWorld(ctx context.Context) (err error) {
	if world.root, err = repository.Root(); err != nil {
		return err
	}
	if worldDir, err = scratch.New("", "e2e"); err != nil {
		return err
	}
	world.dir = worldDir.Path
	if world.assets, err = controlplane.Assets(ctx, os.Stderr); err != nil {
		return err
	}
	return together(
		func() (err error) {
			world.postgres, err = postgres.Start(ctx, postgres.Options{NoFsync: true, Log: os.Stderr})
			return err
		},
		func() (err error) {
			world.cluster, err = startCluster(ctx)
			return err
		},
		func() (err error) {
			if world.manager, err = buildManager(ctx, "ordinary"); err != nil {
				return err
			}
			world.faulty, err = buildManager(ctx, "faulty", faultsTag)
			return err
		},
	)
}

// newDir makes a directory that goes with the others, however the tests end: if
// not at their end, then when the next ones start.
func newDir(purpose string) (string, error) { return os.MkdirTemp(world.dir, purpose+"-") }

func buildManager(ctx context.Context, name string, tags ...string) (string, error) {
	dir := filepath.Join(world.dir, name)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return "", err
	}
	return environment.BuildManager(ctx, world.root, dir, tags...)
}

func stopWorld() error {
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	var err error
	if world.cluster != nil {
		err = errors.Join(err, world.cluster.plane.Stop(ctx))
	}
	if world.postgres != nil {
		err = errors.Join(err, world.postgres.Stop(ctx))
	}
	if worldDir != nil {
		err = errors.Join(err, worldDir.Remove())
	}
	return err
}

// together runs steps at the same time and joins their errors.
func together(steps ...func() error) error {
	results := make([]error, len(steps))
	var running sync.WaitGroup
	for i, step := range steps {
		running.Go(func() { results[i] = step() })
	}
	running.Wait()
	return errors.Join(results...)
}
