package postgres

import (
	"context"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/token-lease/operator/hack/devenv/postgres/postgrestest"
	"github.com/token-lease/operator/internal/ledger"
)

// Goal: a rotated password is picked up without a restart, and a wrong one gives a
// clear error that does not show it. Method: change the role's password, end its
// connections, then change what the store reads.
func TestPasswordRotation(t *testing.T) {
	d := newDatabase(t)
	role, asRole := runtimeRole(d, "first-secret")
	var connString atomic.Value
	connString.Store(asRole)
	store := d.store(func(o *Options) {
		o.ConnString = func(context.Context) (string, error) { return connString.Load().(string), nil }
	})
	do(t, store, ledger.OpenBucket{Key: bucketKey, Limit: 100})

	name := pgx.Identifier{role}.Sanitize()
	d.exec(`ALTER ROLE ` + name + ` PASSWORD 'second-secret'`)
	d.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = $1`, role)
	result := ledger.New(store, nil).Do(t.Context(), ledger.Inspect{Key: bucketKey})[0]
	if !ledger.HasCode(result.Err, ledger.CodeUnavailable) || !strings.Contains(result.Err.Message, "credentials") {
		t.Errorf("with the old password: %v, want ledger_unavailable that names the credentials", result.Err)
	}
	if strings.Contains(result.Err.Error(), "secret") {
		t.Errorf("the error shows a password: %v", result.Err)
	}
	rotated, err := url.Parse(asRole)
	if err != nil {
		t.Fatal(err)
	}
	rotated.User = url.UserPassword(role, "second-secret")
	connString.Store(rotated.String())
	do(t, store, ledger.Inspect{Key: bucketKey})
}

// Goal: calls fail closed within a bound while the server is away, and recover
// without a restart.
func TestOutage(t *testing.T) {
	server := postgrestest.Own(t)
	d := &database{t: t, url: postgrestest.NewDatabaseOn(t, server)}
	if _, err := Migrate(t.Context(), d.url); err != nil {
		t.Fatal(err)
	}
	store := d.store(nil)
	do(t, store, ledger.OpenBucket{Key: bucketKey, Limit: 100})
	if err := server.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	result := ledger.New(store, nil).Do(t.Context(), ledger.Inspect{Key: bucketKey})[0]
	if !ledger.HasCode(result.Err, ledger.CodeUnavailable) {
		t.Errorf("while the server is away: %v, want ledger_unavailable", result.Err)
	}
	if err := store.Writable(t.Context()); !ledger.HasCode(err, ledger.CodeUnavailable) {
		t.Errorf("Writable = %v, want ledger_unavailable", err)
	}
	if err := server.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	if snapshot := do(t, store, ledger.Inspect{Key: bucketKey}).Snapshot; snapshot.Limit != 100 {
		t.Errorf("after the outage: %+v", snapshot)
	}
}

// Goal: start-up warns of settings under which confirmed work can be lost.
func TestCheckWarns(t *testing.T) {
	for _, c := range []struct {
		name     string
		settings settings
		want     int
	}{
		{"durable", settings{synchronousCommit: "on", fsync: "on", fullPageWrite: "on"}, 0},
		{"asynchronous", settings{synchronousCommit: "off", fsync: "on", fullPageWrite: "on"}, 1},
		{"no fsync", settings{synchronousCommit: "on", fsync: "off", fullPageWrite: "off"}, 2},
		{"asynchronous standby", settings{synchronousCommit: "on", fsync: "on", fullPageWrite: "on", standbys: true}, 1},
		{"local commit", settings{synchronousCommit: "local", fsync: "on", fullPageWrite: "on", standbys: true, synchronousStandbys: true}, 1},
		{"synchronous standby", settings{synchronousCommit: "on", fsync: "on", fullPageWrite: "on", standbys: true, synchronousStandbys: true}, 0},
	} {
		if got := c.settings.warnings(); len(got) != c.want {
			t.Errorf("%s: %q, want %d warnings", c.name, got, c.want)
		}
	}
	d := newDatabase(t)
	d.exec(`ALTER DATABASE ` + pgx.Identifier{value[string](d, `SELECT current_database()::text`)}.Sanitize() + ` SET synchronous_commit = off`)
	warnings, err := d.store(nil).Check(t.Context())
	if err != nil || !strings.Contains(strings.Join(warnings, "\n"), "synchronous_commit is off") {
		t.Errorf("Check = %q, %v; want a warning about synchronous_commit", warnings, err)
	}
}

// Goal: how a database is set up does not change what is read. Method: a style of
// dates, a time zone and a search path that nobody expects.
func TestUnusualDatabase(t *testing.T) {
	d := newDatabase(t)
	name := pgx.Identifier{value[string](d, `SELECT current_database()::text`)}.Sanitize()
	for _, setting := range []string{
		`datestyle = 'SQL, DMY'`, `timezone = 'America/Los_Angeles'`, `search_path = ''`,
		`default_transaction_isolation = 'serializable'`, `default_transaction_read_only = on`,
	} {
		d.exec(`ALTER DATABASE ` + name + ` SET ` + setting)
	}
	store := d.store(nil)
	opened := do(t, store, ledger.OpenBucket{Key: bucketKey, Limit: 100}).Snapshot
	read := do(t, store, ledger.Inspect{Key: bucketKey}).Snapshot
	if !read.CreatedAt.Equal(opened.CreatedAt) || read.CreatedAt.Location() != opened.CreatedAt.Location() {
		t.Errorf("created at %v, read as %v", opened.CreatedAt, read.CreatedAt)
	}
}
