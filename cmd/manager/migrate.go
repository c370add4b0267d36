package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"time"

	"github.com/token-lease/operator/internal/ledger/postgres"
)

func migrateCommand(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	fs := flag.NewFlagSet("manager migrate", flag.ContinueOnError)
	fs.SetOutput(stderr)
	var db database
	db.bind(fs)
	timeout := fs.Duration("timeout", 5*time.Minute, "How long to wait for the database and the migrations, at most.")
	role := fs.String("runtime-role", "",
		"Database role that \"manager run\" connects as. It is granted what it needs and no more; it must exist.")
	if err := parse(fs, args); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, *timeout)
	defer cancel()
	if err := postgres.WaitForServer(ctx, db.connString, func(reason string) {
		fmt.Fprintf(stderr, "manager migrate: waiting for the database, up to %s: %s\n", *timeout, reason)
	}); err != nil {
		return fmt.Errorf("reach the database: %w", err)
	}
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
	if *role == "" {
		return nil
	}
	if err := postgres.GrantRuntime(ctx, url, *role); err != nil {
		return fmt.Errorf("grant to the run-time role: %w", err)
	}
	fmt.Fprintln(stdout, "granted to the run-time role", *role)
	return nil
}
