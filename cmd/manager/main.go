// Command manager is the token-lease operator: one binary that keeps the ledger's
// schema (manager migrate), brings buckets over from the npm package (manager import)
// and runs the operator (manager run).
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"
)

// Exit codes.
const (
	exitFailure = 1
	exitUsage   = 2
)

const usage = `The token-lease operator keeps token budgets.

Usage:
  manager <command> [flags]

Commands:
  run       run the operator: data plane, sweeper, metrics, health and controllers
  migrate   bring the ledger's schema up to date; safe to repeat
  import    bring buckets over from the npm package token-lease; safe to repeat
  version   print the version

Run "manager <command> -h" for the flags of a command.
`

// errUsage marks an error in the command line; its text has been printed.
var errUsage = errors.New("usage")

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := dispatch(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	switch {
	case err == nil:
	case errors.Is(err, errUsage):
		os.Exit(exitUsage)
	default:
		fmt.Fprintln(os.Stderr, "manager:", err)
		os.Exit(exitFailure)
	}
}

func dispatch(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	if len(args) == 0 {
		fmt.Fprint(stderr, usage)
		return errUsage
	}
	switch args[0] {
	case "run":
		return runCommand(ctx, args[1:], stderr)
	case "migrate":
		return migrateCommand(ctx, args[1:], stdout, stderr)
	case "import":
		return importCommand(ctx, args[1:], stdout, stderr)
	case "version":
		fmt.Fprintln(stdout, version())
		return nil
	case "-h", "--help", "help":
		fmt.Fprint(stdout, usage)
		return nil
	default:
		fmt.Fprintf(stderr, "unknown command %q\n\n%s", args[0], usage)
		return errUsage
	}
}

// parse reads flags, then those of the file that --config names, and refuses what is
// left over.
func parse(fs *flag.FlagSet, args []string) error {
	file := fs.String(configFlag, "",
		"YAML file with flags of this command by their names, without dashes in front. What the command line says wins.")
	switch err := fs.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		os.Exit(0)
	case err != nil:
		return errUsage
	case fs.NArg() > 0:
		fmt.Fprintf(fs.Output(), "unexpected argument %q\n", fs.Arg(0))
		return errUsage
	}
	return readConfig(fs, *file)
}

func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" {
		return "(devel)"
	}
	return info.Main.Version
}
