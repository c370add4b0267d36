package postgres

import (
	"context"
	"net/url"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/token-lease/operator/hack/devenv/postgres/postgrestest"
	"github.com/token-lease/operator/internal/ledger"
)

// Goal: replicas that start together migrate one database once. Method: eight at
// once, then once more.
func TestMigrateConcurrently(t *testing.T) {
	url := postgrestest.NewDatabase(t)
	var all []string
	var mutex sync.Mutex
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			applied, err := Migrate(t.Context(), url)
			mutex.Lock()
			defer mutex.Unlock()
			if err != nil {
				t.Error(err)
			}
			all = append(all, applied...)
		})
	}
	group.Wait()
	files, err := migrations.ReadDir("migrations")
	if err != nil {
		t.Fatal(err)
	}
	if len(all) != len(files) {
		t.Errorf("applied %v, want each of %d migrations once", all, len(files))
	}
	again, err := Migrate(t.Context(), url)
	if err != nil || len(again) != 0 {
		t.Errorf("the second run applied %v (%v), want nothing", again, err)
	}
}

// Goal: a store on a database without migrations says what to do.
func TestUnmigrated(t *testing.T) {
	d := &database{t: t, url: postgrestest.NewDatabase(t)}
	store := d.store(nil)
	if _, err := store.Check(t.Context()); err == nil || !strings.Contains(err.Error(), "manager migrate") {
		t.Errorf("Check = %v, want a hint at manager migrate", err)
	}
	result := store.Do(t.Context(), []ledger.Request{ledger.Inspect{Key: "b"}})[0]
	if !ledger.HasCode(result.Err, ledger.CodeUnavailable) || !strings.Contains(result.Err.Message, "manager migrate") {
		t.Errorf("Inspect = %v, want ledger_unavailable with a hint at manager migrate", result.Err)
	}
}

// runtimeRole makes a login role with just the runtime privileges and returns the
// database's URL for it.
func runtimeRole(d *database, password string) (role string, asRole string) {
	d.t.Helper()
	role = "runtime_" + strings.ToLower(d.t.Name())
	name := pgx.Identifier{role}.Sanitize()
	d.exec(`CREATE ROLE ` + name + ` LOGIN PASSWORD '` + password + `'`)
	d.t.Cleanup(func() {
		for _, sql := range []string{`DROP OWNED BY ` + name, `DROP ROLE ` + name} {
			if _, err := d.conn.Exec(context.Background(), sql); err != nil {
				d.t.Error(err)
			}
		}
	})
	if err := GrantRuntime(d.t.Context(), d.url, role); err != nil {
		d.t.Fatal(err)
	}
	u, err := url.Parse(d.url)
	if err != nil {
		d.t.Fatal(err)
	}
	u.User = url.UserPassword(role, password)
	return role, u.String()
}

// Goal: the runtime role can do all that a store does, and no more. Method: a
// bucket's whole life as that role, then what it must not do.
func TestRuntimeRole(t *testing.T) {
	d := newDatabase(t)
	_, asRole := runtimeRole(d, "runtime")
	store := d.store(func(o *Options) {
		o.ConnString = func(context.Context) (string, error) { return asRole, nil }
	})
	if _, err := store.Check(t.Context()); err != nil {
		t.Fatal(err)
	}
	owner := testOwner()
	do(t, store, declared(owner, 1, 1000))
	do(t, store, raised("raise-1", owner, 1000, 3000, hour, nil))
	first := do(t, store, ledger.Reserve{Key: bucketKey, RequestKey: "1", Fingerprint: "f", Tokens: 10}).Lease
	second := do(t, store, ledger.Reserve{Key: bucketKey, RequestKey: "2", Fingerprint: "f", Tokens: 10}).Lease
	do(t, store, ledger.Commit{Key: bucketKey, LeaseID: first.ID, ActualTokens: 7})
	do(t, store, ledger.Release{Key: bucketKey, LeaseID: second.ID})
	do(t, store, ledger.ReapExpired{Key: bucketKey})
	do(t, store, ledger.RevokeRaise{Key: bucketKey, UID: "raise-1"})
	do(t, store, ledger.SetLimit{Key: bucketKey, ExpectedLimit: 1000, Limit: 900})
	if _, err := store.Sweep(t.Context(), ledger.SweepRequest{Limit: 10}); err != nil {
		t.Error(err)
	}
	if rows, err := store.Audit(t.Context(), bucketKey, 0, 100); err != nil || len(rows) == 0 {
		t.Errorf("Audit = %d rows, %v", len(rows), err)
	}
	do(t, store, ledger.CloseBucket{Key: bucketKey, Owner: owner, Deletion: ledger.DeletionDelete})
	if n := value[int64](d, `SELECT count(*) FROM tokenlease.buckets`); n != 0 {
		t.Errorf("%d buckets are left, want 0", n)
	}

	conn, err := pgx.Connect(t.Context(), asRole)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	for _, sql := range []string{
		`UPDATE tokenlease.audit SET actor = 'x'`,
		`DELETE FROM tokenlease.audit`,
		`TRUNCATE tokenlease.audit`,
		`TRUNCATE tokenlease.buckets`,
		`DELETE FROM tokenlease.raises`,
		`ALTER TABLE tokenlease.buckets DISABLE TRIGGER buckets_limit_taken`,
		`CREATE TABLE tokenlease.mine ()`,
		`UPDATE tokenlease.schema_version SET is_applied = false`,
	} {
		if _, err := conn.Exec(t.Context(), sql); sqlState(err) != codeNoPrivilege {
			t.Errorf("%s: %v, want insufficient privilege", sql, err)
		}
	}
}
