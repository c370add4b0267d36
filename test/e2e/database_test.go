package e2e_test

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/token-lease/operator/hack/devenv/postgres"
	"github.com/token-lease/operator/hack/devenv/postgres/postgrestest"
	"github.com/token-lease/operator/internal/ledger"
	ledgerpostgres "github.com/token-lease/operator/internal/ledger/postgres"
)

// workload is the test process's name in the audit: it uses the ledger as any
// other process does that reserves tokens.
const workload = "workload"

// database is a database of one test, with a role that "manager run" connects as
// and that may do no more than "manager migrate --runtime-role" grants.
type database struct {
	server *postgres.Server
	// ownerURL is the owner's, runtimeURL the run-time role's. They hold passwords.
	ownerURL, runtimeURL string
	role                 string
	// sql is the owner's view, which no part of the product stands in.
	sql *pgxpool.Pool
	// ledger is the view of another process under the run-time role.
	ledger *ledger.Ledger
}

// newDatabase makes an empty database, not migrated.
func newDatabase(t *testing.T, server *postgres.Server) *database {
	t.Helper()
	d := &database{server: server, role: "runtime_" + strings.ToLower(rand.Text()[:12])}
	password := rand.Text()
	d.onServer(t, "CREATE ROLE "+d.role+" LOGIN PASSWORD '"+password+"'")
	t.Cleanup(func() {
		select {
		case <-server.Done():
			return // the server is down, and goes with its test
		default:
			d.onServer(t, "DROP ROLE "+d.role)
		}
	})
	d.ownerURL = postgrestest.NewDatabaseOn(t, server)
	d.runtimeURL = withPassword(t, d.ownerURL, d.role, password)

	var err error
	if d.sql, err = pgxpool.New(t.Context(), d.ownerURL); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.sql.Close)
	store, err := ledgerpostgres.Open(ledgerpostgres.Options{
		ConnString: func(context.Context) (string, error) { return d.runtimeURL, nil },
		Worker:     workload,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(store.Close)
	d.ledger = ledger.New(store, nil)
	return d
}

func withPassword(t *testing.T, base, user, password string) string {
	t.Helper()
	parsed, err := url.Parse(base)
	if err != nil {
		t.Fatal("the database's URL cannot be read")
	}
	parsed.User = url.UserPassword(user, password)
	return parsed.String()
}

// onServer runs a statement that concerns the server and not the database.
func (d *database) onServer(t *testing.T, statement string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), callBound)
	defer cancel()
	conn, err := pgx.Connect(ctx, d.server.URL("postgres"))
	if err != nil {
		t.Errorf("reach the database server: %v", err)
		return
	}
	defer conn.Close(ctx)
	if _, err := conn.Exec(ctx, statement); err != nil {
		t.Errorf("%s: %v", strings.SplitN(statement, " PASSWORD", 2)[0], err)
	}
}

// query reads one value.
func query[T any](t *testing.T, d *database, sql string, args ...any) T {
	t.Helper()
	var value T
	if err := d.sql.QueryRow(call(t), sql, args...).Scan(&value); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return value
}

func (d *database) exec(t *testing.T, sql string, args ...any) {
	t.Helper()
	if _, err := d.sql.Exec(call(t), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// now is the ledger's clock.
func (d *database) now(t *testing.T) time.Time {
	t.Helper()
	return query[time.Time](t, d, "SELECT tokenlease.ledger_now()").UTC()
}

// shiftClock sets the ledger's clock to the machine's and so much more, from the
// next statement of every session on. A process has no part in it.
func (d *database) shiftClock(t *testing.T, by time.Duration) {
	t.Helper()
	d.exec(t, fmt.Sprintf(`
		CREATE OR REPLACE FUNCTION tokenlease.ledger_now() RETURNS timestamptz LANGUAGE sql VOLATILE AS $$
			SELECT pg_catalog.date_trunc('milliseconds', pg_catalog.clock_timestamp() + interval '%d milliseconds')
		$$`, by.Milliseconds()))
}

// passAtRestart lets the ledger's clock pass an instant of the future when the server
// is started the next time.
func (d *database) passAtRestart(t *testing.T, instant time.Time) {
	t.Helper()
	d.exec(t, fmt.Sprintf(`
		CREATE OR REPLACE FUNCTION tokenlease.ledger_now() RETURNS timestamptz LANGUAGE sql VOLATILE AS $$
			SELECT pg_catalog.date_trunc('milliseconds', pg_catalog.clock_timestamp() +
				CASE WHEN pg_catalog.pg_postmaster_start_time() > '%s' THEN interval '%d milliseconds' ELSE interval '0' END)
		$$`,
		query[time.Time](t, d, "SELECT pg_postmaster_start_time()").UTC().Format(time.RFC3339Nano),
		instant.Sub(query[time.Time](t, d, "SELECT clock_timestamp()")).Milliseconds()+1))
}

// moveClockTo makes an instant of the future the ledger's present, and lets the
// clock go on from there.
func (d *database) moveClockTo(t *testing.T, instant time.Time) {
	t.Helper()
	d.shiftClock(t, instant.Sub(query[time.Time](t, d, "SELECT clock_timestamp()"))+time.Millisecond)
}

// waitPast waits until the ledger's clock has passed an instant.
func (d *database) waitPast(t *testing.T, instant time.Time) {
	t.Helper()
	waitFor(t, "the ledger's clock to pass "+instant.String(), func() (bool, string) {
		now := d.now(t)
		return now.After(instant), now.String()
	})
}

// limit is L: the limit in force, as SQL has it; -1 when there is no row.
func (d *database) limit(t *testing.T, key string) int64 {
	t.Helper()
	return query[int64](t, d, "SELECT coalesce((SELECT limit_tokens FROM tokenlease.buckets WHERE bucket_key = $1), -1)", key)
}

func (d *database) waitLimit(t *testing.T, key string, want int64) {
	t.Helper()
	waitFor(t, fmt.Sprintf("the limit of %s to be %d", key, want), func() (bool, string) {
		got := d.limit(t, key)
		return got == want, fmt.Sprint(got)
	})
}

// row is one row of a table, by column; integers are json.Number.
type row map[string]any

func (r row) text(column string) string {
	if r[column] == nil {
		return ""
	}
	return fmt.Sprint(r[column])
}

func (r row) instant(t *testing.T, column string) time.Time {
	t.Helper()
	instant, err := time.Parse(time.RFC3339Nano, r.text(column))
	if err != nil {
		t.Fatalf("%s: %v", column, err)
	}
	return instant
}

func (d *database) rows(t *testing.T, sql string, args ...any) []row {
	t.Helper()
	found, err := d.sql.Query(call(t), "SELECT to_jsonb(r)::text FROM ("+sql+") AS r", args...)
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	texts, err := pgx.CollectRows(found, pgx.RowTo[string])
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	rows := make([]row, len(texts))
	for i, text := range texts {
		decoder := json.NewDecoder(strings.NewReader(text))
		decoder.UseNumber()
		if err := decoder.Decode(&rows[i]); err != nil {
			t.Fatal(err)
		}
	}
	return rows
}

// audit is the whole audit of a bucket.
func (d *database) audit(t *testing.T, key string) []row {
	t.Helper()
	return d.rows(t, "SELECT * FROM tokenlease.audit WHERE bucket_key = $1 ORDER BY sequence", key)
}

// events are the audit's events in their order, for comparison and messages.
func (d *database) events(t *testing.T, key string) []string {
	t.Helper()
	var events []string
	for _, r := range d.audit(t, key) {
		event := r.text("event")
		if reason := r.text("reason"); reason != "" {
			event += "/" + reason
		}
		events = append(events, event)
	}
	return events
}

// one is the only audit row of an event.
func (d *database) one(t *testing.T, key, event string) row {
	t.Helper()
	var found []row
	for _, r := range d.audit(t, key) {
		if r.text("event") == event {
			found = append(found, r)
		}
	}
	if len(found) != 1 {
		t.Fatalf("%d audit rows %s, want one; the audit of %s is %v", len(found), event, key, d.events(t, key))
	}
	return found[0]
}

// raise is the record of the raise that an object asked for.
func (d *database) raise(t *testing.T, namespace, name string) row {
	t.Helper()
	found := d.rows(t, "SELECT * FROM tokenlease.raises WHERE namespace = $1 AND name = $2", namespace, name)
	if len(found) != 1 {
		t.Fatalf("%d raises of %s/%s, want one: %v", len(found), namespace, name, found)
	}
	return found[0]
}

// counters checks that the bucket's counters are the sums over its leases.
func (d *database) counters(t *testing.T, key string) {
	t.Helper()
	wrong := d.rows(t, `
		SELECT b.used_tokens, b.reserved_tokens, l.*
		FROM tokenlease.buckets b, LATERAL (
			SELECT coalesce(sum(actual_tokens) FILTER (WHERE state = 'committed'), 0) AS used_by_leases,
			       coalesce(sum(reserved_tokens) FILTER (WHERE state = 'reserved'), 0) AS reserved_by_leases,
			       count(*) AS leases
			FROM tokenlease.leases WHERE bucket_key = b.bucket_key) l
		WHERE b.bucket_key = $1
		  AND (b.used_tokens, b.reserved_tokens, b.lease_records) IS DISTINCT FROM (l.used_by_leases, l.reserved_by_leases, l.leases)`, key)
	if len(wrong) > 0 {
		t.Errorf("the counters of %s are not the sums over its leases: %v", key, wrong)
	}
}
