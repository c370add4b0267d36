package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/token-lease/operator/internal/ledger/postgres"
	"github.com/token-lease/operator/internal/ledger/postgres/importer"
)

// sourceURLEnvironment is read when no file is named for the source.
const sourceURLEnvironment = "SOURCE_DATABASE_URL"

// keys is a flag that can be given more than once.
type keys []string

func (k *keys) String() string { return strings.Join(*k, ", ") }

func (k *keys) Set(value string) error {
	*k = append(*k, value)
	return nil
}

var errIncomplete = errors.New("some buckets were not imported; each is named above with its reason")

func importCommand(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	fs := flag.NewFlagSet("manager import", flag.ContinueOnError)
	fs.SetOutput(stderr)
	var db, source database
	db.bind(fs)
	fs.StringVar(&source.file, "source-database-url-file", "",
		"File with the connection URL of the database that the npm package uses. Without it, the environment variable "+
			sourceURLEnvironment+" is taken; without that, the ledger's own database. The role must be allowed to create a table and a trigger beside token_lease_buckets.")
	dryRun := fs.Bool("dry-run", false, "Read and check everything and change nothing.")
	timeout := fs.Duration("timeout", time.Hour, "How long the import may take, at most. What is done stays done; run it again for the rest.")
	var buckets keys
	fs.Var(&buckets, "bucket", "Key of a bucket to import; can be given more than once. Without it, all of them.")
	if err := parse(fs, args); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, *timeout)
	defer cancel()
	target, err := db.connString(ctx)
	if err != nil {
		return err
	}
	o := importer.Options{
		Source: target, Target: target, Buckets: buckets, DryRun: *dryRun,
		Report: func(bucket string, outcome importer.Outcome, reason error) {
			fmt.Fprintf(stdout, "%s: %q: %v\n", outcome, bucket, reason)
		},
	}
	if source.file != "" {
		if o.Source, err = source.connString(ctx); err != nil {
			return err
		}
	} else if url := strings.TrimSpace(os.Getenv(sourceURLEnvironment)); url != "" {
		o.Source = url
	}
	if err := checkSchema(ctx, target); err != nil {
		return err
	}
	summary, err := importer.Run(ctx, o)
	prefix := ""
	if *dryRun {
		prefix = "dry run, nothing was changed: "
	}
	n := summary.Buckets
	fmt.Fprintf(stdout, "%s%d imported (%d leases, %d tokens used, %d reserved), %d already imported, %d skipped, %d failed\n",
		prefix, n[importer.Imported], summary.Leases, summary.UsedTokens, summary.ReservedTokens,
		n[importer.AlreadyImported], n[importer.Skipped], n[importer.Failed])
	switch {
	case err != nil:
		return fmt.Errorf("import: %w", err)
	case !summary.Complete():
		return errIncomplete
	default:
		return nil
	}
}

// checkSchema makes sure that the ledger is there and up to date.
func checkSchema(ctx context.Context, url string) error {
	store, err := postgres.Open(postgres.Options{ //nolint:contextcheck // Opening connects to nothing yet.
		ConnString: func(context.Context) (string, error) { return url, nil }, Worker: "import",
	})
	if err != nil {
		return err
	}
	defer store.Close()
	return store.Writable(ctx)
}
