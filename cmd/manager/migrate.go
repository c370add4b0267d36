package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"time"

	"github.com/token-lease/operator/internal/ledger/postgres"
)

// schemaInterval is how often a process looks that waits for the schema.
const schemaInterval = time.Second

func migrateCommand(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	fs := flag.NewFlagSet("manager migrate", flag.ContinueOnError)
	fs.SetOutput(stderr)
	var db database
	db.bind(fs)
	timeout := fs.Duration("timeout", 5*time.Minute, "How long to wait for the database and the migrations, at most.")
	role := fs.String("runtime-role", "",
		"Database role that \"manager run\" connects as. It is granted what it needs and no more; it must exist.")
	waitOnly := fs.Bool("wait-only", false,
		"Change nothing: wait until another process has brought the schema up to date. The run-time role will do.")
	if err := parse(fs, args); err != nil {
		return err
	}
	if *waitOnly && *role != "" {
		return errors.New("--wait-only changes nothing, and so grants nothing: leave --runtime-role out")
	}
	ctx, cancel := context.WithTimeout(ctx, *timeout)
	defer cancel()
	waiting := func(what string) func(reason string) {
		return func(reason string) {
			fmt.Fprintf(stderr, "manager migrate: waiting for %s, up to %s: %s\n", what, *timeout, reason)
		}
	}
	if err := postgres.WaitForServer(ctx, db.connString, waiting("the database")); err != nil {
		return fmt.Errorf("reach the database: %w", err)
	}
	if *waitOnly {
		return waitForSchema(ctx, db, waiting("the schema"))
	}
	return migrate(ctx, db, *role, stdout)
}

// migrate brings the schema up to date and grants a role, if one is named, its use.
func migrate(ctx context.Context, db database, role string, stdout io.Writer) error {
	url, err := db.connString(ctx)
	if err != nil {
		return err
	}
	applied, err := postgres.Migrate(ctx, url)
	for _, name := range applied {
		fmt.Fprintln(stdout, "applied", name)
	}
	if err != nil {
		return fmt.Errorf("migrate: %w", err)
	}
	if len(applied) == 0 {
		fmt.Fprintln(stdout, "the schema is up to date")
	}
	if role == "" {
		return nil
	}
	if err := postgres.GrantRuntime(ctx, url, role); err != nil {
		return fmt.Errorf("grant to the run-time role: %w", err)
	}
	fmt.Fprintln(stdout, "granted to the run-time role", role)
	return nil
}

// waitForSchema waits until the ledger can be written, which it can be once the
// schema is what this build needs and its use has been granted.
func waitForSchema(ctx context.Context, db database, report func(reason string)) error {
	store, err := postgres.Open(postgres.Options{ConnString: db.connString, Worker: hostname()}) //nolint:contextcheck // it opens nothing yet
	if err != nil {
		return fmt.Errorf("open the ledger: %w", err)
	}
	defer store.Close()
	ticker := time.NewTicker(schemaInterval)
	defer ticker.Stop()
	told := ""
	for {
		err := store.Writable(ctx)
		if err == nil {
			return nil
		}
		if reason := err.Error(); reason != told && ctx.Err() == nil {
			told = reason
			report(reason)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for the schema: %w: %s", ctx.Err(), told)
		case <-ticker.C:
		}
	}
}
