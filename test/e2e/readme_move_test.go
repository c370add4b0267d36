package e2e_test

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/token-lease/operator/internal/ledger"
	ledgerpostgres "github.com/token-lease/operator/internal/ledger/postgres"
)

// oldTable has the columns of the package's table, and refuses what its CHECKs refuse
// as far as the move depends on it: a document and its row agree.
const oldTable = `CREATE TABLE token_lease_buckets (
	bucket_key text NOT NULL, revision bigint NOT NULL DEFAULT 1, state jsonb NOT NULL, updated_at timestamptz NOT NULL DEFAULT now(),
	PRIMARY KEY (bucket_key), CHECK (state ->> 'bucket' = bucket_key AND (state ->> 'revision')::bigint = revision))`

// Goal: who moves from the npm package as the README says has everything here
// afterwards: usage, old requests and old leases; a dry run changes nothing, the
// package's writers are refused, and all of it can be repeated.
// Method: the README's commands, one after another, on a table as the package
// has it, with a document that the package has written, and an empty bucket.
func TestReadmeMove(t *testing.T) {
	t.Parallel()
	here, old := newDatabase(t, world.postgres), newDatabase(t, world.postgres)
	old.exec(t, oldTable)
	const key, empty = "tenants/pm-4821", "tenants/empty"
	putDocument(t, old, recordedDocument(t))
	putDocument(t, old, map[string]any{
		"schemaVersion": 1, "bucket": empty, "limit": 100, "usedTokens": 0, "reservedTokens": 0, "revision": 1,
		"createdAt": 1000, "updatedAt": 1000, "leases": map[string]any{}, "requests": map[string]any{},
	})
	before := old.rows(t, "SELECT * FROM token_lease_buckets ORDER BY bucket_key")
	shell := readerShell(t, filepath.Dir(world.manager), map[string]string{"owner.url": here.ownerURL, "old.url": old.ownerURL})
	blocks := readmeBlocks(t, "Move from the npm package")
	if len(blocks) != 1 {
		t.Fatalf("%d blocks, want one", len(blocks))
	}
	const moved = "2 imported (5 leases, 250 tokens used, 320 reserved), 0 already imported, 0 skipped, 0 failed"
	var output string
	for _, command := range strings.Split(blocks[0], "\n") {
		output = shell(command)
		if strings.HasSuffix(command, "--dry-run") {
			if !strings.HasSuffix(output, "dry run, nothing was changed: "+moved+"\n") {
				t.Errorf("the dry run says\n%s", output)
			}
			if n := query[int](t, here, "SELECT count(*) FROM tokenlease.buckets"); n != 0 {
				t.Errorf("after the dry run the ledger has %d buckets", n)
			}
			old.exec(t, "UPDATE token_lease_buckets SET updated_at = updated_at")
		}
	}
	if !strings.HasSuffix(output, "\n"+moved+"\n") {
		t.Errorf("the import says\n%s", output)
	}
	here.counters(t, key)
	here.one(t, key, "BucketImported")
	if got := here.limit(t, empty); got != 100 {
		t.Errorf("the limit of the empty bucket is %d, want 100", got)
	}
	wantOldRequests(t, here, key)
	_, err := old.sql.Exec(call(t), "UPDATE token_lease_buckets SET revision = revision + 1")
	if err == nil || !strings.Contains(err.Error(), "was moved to the ledger of the token-lease operator") {
		t.Errorf("a writer of the package is answered %v", err)
	}
	if after := old.rows(t, "SELECT * FROM token_lease_buckets ORDER BY bucket_key"); asJSON(after) != asJSON(before) {
		t.Errorf("the package's rows are %s, and were %s", asJSON(after), asJSON(before))
	}
	if output := shell(blocks[0]); !strings.HasSuffix(output, "\n0 imported (0 leases, 0 tokens used, 0 reserved), 2 already imported, 0 skipped, 0 failed\n") {
		t.Errorf("repeated, they say\n%s", output)
	}
}

// wantOldRequests checks that a request which the package has seen is recognised, and
// that a lease which it has made is settled, under its old ID.
func wantOldRequests(t *testing.T, d *database, key string) {
	t.Helper()
	// The run-time role gets its rights with a flag that the README's commands lack.
	store, err := ledgerpostgres.Open(ledgerpostgres.Options{
		ConnString: func(context.Context) (string, error) { return d.ownerURL, nil }, Worker: workload,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	l := ledger.New(store, nil)
	const committed, long = "9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb60", "9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb63"
	again := ledger.Reserve{Key: key, RequestKey: "committed", Fingerprint: "summarize:committed", Tokens: 400}
	replayed, err := l.Reserve(call(t), again)
	if err != nil || replayed.Lease.ID != committed || replayed.Lease.State != ledger.LeaseCommitted {
		t.Errorf("an old request is answered %+v, %v", replayed.Lease, err)
	}
	again.Tokens++
	if _, err := l.Reserve(call(t), again); !ledger.HasCode(err, ledger.CodeIdempotencyConflict) {
		t.Errorf("an old request for other tokens is answered %v, want a conflict", err)
	}
	settled, err := l.Commit(call(t), ledger.Commit{Key: key, LeaseID: long, ActualTokens: 25})
	if err != nil || settled.Bucket.UsedTokens != 275 || settled.Bucket.ReservedTokens != 20 {
		t.Errorf("the commit of an old lease is answered %+v, %v", settled.Bucket, err)
	}
}

// recordedDocument is one that the package has written, last updated a minute ago.
func recordedDocument(t *testing.T) map[string]any {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(world.root, "internal", "ledger", "postgres", "importer", "testdata", "bucket.json"))
	if err != nil {
		t.Fatal(err)
	}
	var document map[string]any
	if err := json.Unmarshal(text, &document); err != nil {
		t.Fatal(err)
	}
	shift := float64(time.Now().Add(-time.Minute).UnixMilli()) - document["updatedAt"].(float64)
	return moveInstants(document, shift).(map[string]any)
}

// moveInstants adds milliseconds to all that can only be an instant.
func moveInstants(value any, shift float64) any {
	const year2001 = 1e12
	switch v := value.(type) {
	case map[string]any:
		for name, inner := range v {
			v[name] = moveInstants(inner, shift)
		}
	case float64:
		if v > year2001 {
			return v + shift
		}
	}
	return value
}

func putDocument(t *testing.T, d *database, document map[string]any) {
	t.Helper()
	text, err := json.Marshal(document)
	if err != nil {
		t.Fatal(err)
	}
	d.exec(t, "INSERT INTO token_lease_buckets (bucket_key, revision, state) SELECT s ->> 'bucket', (s ->> 'revision')::bigint, s FROM (SELECT $1::text::jsonb AS s) AS t",
		string(text))
}
