// Command devenv brings up the development environment: PostgreSQL, a control
// plane with the operator's CRDs, and the manager's schema. Only what the
// caller is meant to use goes to standard output.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/token-lease/operator/hack/devenv/controlplane"
	"github.com/token-lease/operator/hack/devenv/environment"
)

const (
	usage = `usage: go run ./hack/devenv <command>

  assets   make sure that the control plane's programs exist, and print their directory
  up       bring everything up, print how to reach it, and take it down on Ctrl-C

Environment:
  TOKENLEASE_TEST_DATABASE_URL   a PostgreSQL server to use instead of starting one: the URL of a superuser
  KUBEBUILDER_ASSETS             a directory with kube-apiserver and etcd to use instead of building them
  TOKENLEASE_DEVENV_CACHE        where to keep built programs, instead of the user's cache directory
`
	stopTimeout   = time.Minute
	exitUsage     = 2
	exitImpatient = 130 // what a shell shows for a program ended by Ctrl-C
)

func main() {
	log.SetLogger(logr.Discard()) // envtest logs through it, at levels of no use here
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	go endAtSecondSignal(ctx)

	var err error
	switch command(os.Args[1:]) {
	case "assets":
		err = printAssets(ctx)
	case "up":
		err = up(ctx)
	case "help":
		fmt.Print(usage)
	default:
		fmt.Fprint(os.Stderr, usage)
		os.Exit(exitUsage)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "devenv:", err)
		os.Exit(1)
	}
}

// command is the one argument; anything else gets the usage.
func command(args []string) string {
	if len(args) != 1 {
		return ""
	}
	switch args[0] {
	case "-h", "-help", "--help":
		return "help"
	}
	return args[0]
}

// endAtSecondSignal lets an impatient user leave at once. The servers end with
// this process, and the next run removes their directories.
func endAtSecondSignal(ctx context.Context) {
	<-ctx.Done()
	second := make(chan os.Signal, 1)
	signal.Notify(second, syscall.SIGINT, syscall.SIGTERM)
	<-second
	os.Exit(exitImpatient)
}

func printAssets(ctx context.Context) error {
	dir, err := controlplane.Assets(ctx, os.Stderr)
	if err != nil {
		return err
	}
	fmt.Println(dir)
	return nil
}

func up(ctx context.Context) (err error) {
	e, err := environment.Start(ctx, environment.Options{Log: os.Stderr})
	if err != nil {
		return err
	}
	defer func() {
		stopping, cancel := context.WithTimeout(context.Background(), stopTimeout)
		defer cancel()
		fmt.Fprintln(os.Stderr, "devenv: taking everything down")
		err = errors.Join(err, e.Stop(stopping))
	}()
	describe(os.Stdout, e)
	select {
	case <-ctx.Done():
		return nil
	case <-e.ControlPlane.Done():
		return fmt.Errorf("a server of the control plane ended by itself; the logs end with:\n%s", e.ControlPlane.LogTails())
	case <-e.Postgres.Done():
		return fmt.Errorf("PostgreSQL ended by itself; its log ends with:\n%s", e.Postgres.LogTail())
	}
}

func describe(out io.Writer, e *environment.Environment) {
	manager := e.ManagerCommand()
	fmt.Fprintf(out, `export KUBECONFIG=%s
export DATABASE_URL=%s

# In another terminal, after these two lines, start the manager as its ServiceAccount:
#   KUBECONFIG=%s go run ./cmd/manager %s
# and use it:
#   %s apply -k config/samples
# Logs of the servers: %s
# Ctrl-C here takes everything down.
`, shellQuote(e.ControlPlane.KubeconfigPath()), shellQuote(e.DatabaseURL),
		shellQuote(e.ManagerKubeconfig()), strings.Join(manager.Args, " "),
		shellQuote(e.ControlPlane.Kubectl()), shellQuote(e.ControlPlane.Dir()))
}

// shellQuote makes one word of any text for a POSIX shell.
func shellQuote(text string) string {
	return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'"
}
