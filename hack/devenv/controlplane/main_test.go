package controlplane

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"sigs.k8s.io/controller-runtime/pkg/log"
)

const (
	startTimeout = 20 * time.Minute // below the bound that make gives a package
	stopTimeout  = time.Minute
	waitTimeout  = 2 * time.Minute
)

// plane is shared by the tests of this package, which therefore run one after
// another where they take its API server down.
var plane *ControlPlane

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	log.SetLogger(logr.Discard())
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	var err error
	if plane, err = Start(ctx, Options{Log: os.Stderr}); err != nil {
		fmt.Fprintln(os.Stderr, "start the control plane:", err)
		return 1
	}
	code := m.Run()
	ctx, cancel = context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	for range 2 { // stopping twice is allowed
		if err := plane.Stop(ctx); err != nil {
			fmt.Fprintln(os.Stderr, "stop the control plane:", err)
			code = 1
		}
	}
	if _, err := os.Stat(plane.Dir()); !os.IsNotExist(err) {
		fmt.Fprintln(os.Stderr, "the stopped control plane left its directory:", err)
		code = 1
	}
	return code
}

func waitUntil(t *testing.T, what string, done func() (bool, error)) {
	t.Helper()
	deadline := time.Now().Add(waitTimeout)
	for {
		ok, err := done()
		if ok {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waited %s until %s (last error: %v)", waitTimeout, what, err)
		}
		time.Sleep(50 * time.Millisecond) // the pace of looking; the bound stands above
	}
}
