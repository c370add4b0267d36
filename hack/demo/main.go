// Command demo shows a raise from beginning to end on real servers: a budget of
// 120,000 tokens is raised to 300,000 for about twenty seconds and comes back by
// itself, although the manager is killed in the middle.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/token-lease/operator/hack/devenv/environment"
)

const (
	// window is how long the raise lasts. It leaves time for everything that is
	// shown while it is active, on a slow machine too.
	window = 20 * time.Second
	// stateTimeout bounds the wait for each state.
	stateTimeout = 2 * time.Minute
	stopTimeout  = time.Minute
)

func main() {
	log.SetLogger(logr.Discard())
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	limit, err := run(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo: failed:", err)
		os.Exit(1)
	}
	fmt.Printf("demo: restored to %d\n", limit)
}

// run brings everything up, tells the story, and takes everything down, whatever
// happened. It returns the limit that the database holds at the end.
func run(ctx context.Context) (limit int64, err error) {
	fmt.Println("demo: bringing up PostgreSQL and a control plane; the first time, the control plane is built, which takes a while")
	e, err := environment.Start(ctx, environment.Options{Log: os.Stderr})
	if err != nil {
		return 0, fmt.Errorf("bring the environment up: %w", err)
	}
	defer func() {
		stopping, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
		defer cancel()
		if stopErr := e.Stop(stopping); stopErr != nil {
			err = errors.Join(err, fmt.Errorf("clean up: %w", stopErr))
		}
	}()
	s, err := newStory(ctx, e)
	if err != nil {
		return 0, err
	}
	defer s.close()
	for _, chapter := range []struct {
		title string
		tell  func(context.Context) error
	}{
		{"A budget of 120,000 tokens", s.declareBudget},
		{"The launch: 300,000 for about 20 seconds", s.raise},
		{"The manager is killed while the raise is active (kill -9)", s.killManager},
		{"Past the expiry, and nothing runs", s.reserveAfterExpiry},
		{"The manager comes back", s.restartManager},
		{"The audit trail", s.printAudit},
	} {
		fmt.Printf("\n=== %s\n", chapter.title)
		if err := chapter.tell(ctx); err != nil {
			return 0, fmt.Errorf("%s: %w%s", chapter.title, err, s.managerLog())
		}
	}
	fmt.Println("\n=== Cleaning up")
	return s.limit(ctx)
}
