package main

import (
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/token-lease/operator/hack/devenv/postgres/postgrestest"
)

// Goal: the command says what it did, fails when a bucket is left, and asks for the
// migrations first. Method: a table of the package with an empty bucket and a damaged
// one, beside the ledger and in a database of its own.
func TestImport(t *testing.T) {
	ledgerURL, sourceURL := postgrestest.NewDatabase(t), postgrestest.NewDatabase(t)
	for _, url := range []string{ledgerURL, sourceURL} {
		conn, err := pgx.Connect(t.Context(), url)
		if err != nil {
			t.Fatal(err)
		}
		_, err = conn.Exec(t.Context(), `
			CREATE TABLE token_lease_buckets (bucket_key text PRIMARY KEY, revision bigint, state jsonb, updated_at timestamptz);
			INSERT INTO token_lease_buckets SELECT current_database() || '/good', 1, jsonb_build_object(
				'schemaVersion', 1, 'bucket', current_database() || '/good', 'limit', 100, 'usedTokens', 0, 'reservedTokens', 0,
				'revision', 1, 'createdAt', 1000, 'updatedAt', 1000, 'leases', '{}'::jsonb, 'requests', '{}'::jsonb);
			INSERT INTO token_lease_buckets VALUES ('bad', 1, '{}')`)
		if err != nil {
			t.Fatal(err)
		}
		if err := conn.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv(databaseURLEnvironment, ledgerURL)
	run := func(args ...string) (string, error) {
		var stdout, stderr strings.Builder
		err := dispatch(t.Context(), append([]string{"import"}, args...), &stdout, &stderr)
		return stdout.String() + stderr.String(), err
	}
	if _, err := run(); err == nil || !strings.Contains(err.Error(), "run manager migrate") {
		t.Errorf("before the migrations: %v", err)
	}
	var ignored strings.Builder
	if err := dispatch(t.Context(), []string{"migrate"}, &ignored, &ignored); err != nil {
		t.Fatal(err)
	}
	output, err := run("--dry-run")
	if !errors.Is(err, errIncomplete) || !strings.Contains(output, "dry run, nothing was changed: 1 imported (0 leases") ||
		!strings.Contains(output, `skipped: "bad": its document is damaged`) {
		t.Errorf("dry run: %v\n%s", err, output)
	}
	if output, err = run(); !errors.Is(err, errIncomplete) || !strings.Contains(output, "\n1 imported (0 leases, 0 tokens used, 0 reserved), 0 already imported, 1 skipped, 0 failed") {
		t.Errorf("import: %v\n%s", err, output)
	}
	t.Setenv(sourceURLEnvironment, sourceURL)
	if output, err = run("--bucket", "absent", "--bucket", "bad"); !errors.Is(err, errIncomplete) || !strings.Contains(output, "2 skipped") {
		t.Errorf("some buckets: %v\n%s", err, output)
	}
	if output, err = run(); !errors.Is(err, errIncomplete) || !strings.Contains(output, "1 imported") {
		t.Errorf("from another database: %v\n%s", err, output)
	}
}
