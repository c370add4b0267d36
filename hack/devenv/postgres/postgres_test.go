package postgres_test

import (
	"context"
	"errors"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/token-lease/operator/hack/devenv/postgres"
	"github.com/token-lease/operator/hack/devenv/postgres/postgrestest"
)

func TestMain(m *testing.M) { os.Exit(postgrestest.Main(m)) }

func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

func read[T any](t *testing.T, conn *pgx.Conn, query string) T {
	t.Helper()
	var value T
	if err := conn.QueryRow(t.Context(), query).Scan(&value); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return value
}

// Goal: committed rows survive an orderly halt and a crash, on the same port;
// uncommitted ones do not. Method: write, take down in both ways, read again.
func TestDataSurvivesOutages(t *testing.T) {
	server := postgrestest.Own(t)
	database := postgrestest.NewDatabaseOn(t, server)
	conn := connect(t, database)
	if _, err := conn.Exec(t.Context(), "CREATE TABLE kept (id int)"); err != nil {
		t.Fatal(err)
	}
	outages := map[string]func(context.Context) error{"Halt": server.Halt, "Kill": server.Kill}
	rows := 0
	for name, takeDown := range outages {
		conn := connect(t, database)
		if _, err := conn.Exec(t.Context(), "INSERT INTO kept VALUES (1)"); err != nil {
			t.Fatal(err)
		}
		rows++
		open, err := conn.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := open.Exec(t.Context(), "INSERT INTO kept VALUES (2)"); err != nil {
			t.Fatal(err)
		}

		if err := takeDown(t.Context()); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if err := takeDown(t.Context()); err != nil {
			t.Fatalf("%s of a server that is down: %v", name, err)
		}
		if _, err := pgx.Connect(t.Context(), database); err == nil {
			t.Fatalf("after %s the server still answers", name)
		}
		if err := server.Resume(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := read[int](t, connect(t, database), "SELECT count(*) FROM kept"); got != rows {
			t.Fatalf("after %s there are %d rows, want %d", name, got, rows)
		}
	}
	if err := server.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := read[int](t, connect(t, database), "SELECT count(*) FROM kept"); got != rows {
		t.Fatalf("after Restart there are %d rows, want %d", got, rows)
	}
}

// Goal: Stop leaves nothing behind and may be called again.
func TestStopRemovesEverything(t *testing.T) {
	server := postgrestest.Own(t)
	dir := filepath.Dir(server.LogFile())
	for range 2 {
		if err := server.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("%s is still there: %v", dir, err)
	}
	if err := server.Resume(t.Context()); err == nil {
		t.Fatal("a stopped server was resumed without its data")
	}
}

// Goal: nobody gets in without the password, and the data is as durable as the
// options say.
func TestServerIsClosedAndDurable(t *testing.T) {
	server := startWithFsync(t)
	conn := connect(t, server.URL("postgres"))
	for setting, want := range map[string]string{
		"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on", "listen_addresses": "127.0.0.1",
	} {
		if got := read[string](t, conn, "SHOW "+setting); got != want {
			t.Errorf("%s is %q, want %q", setting, got, want)
		}
	}
	wrong, err := url.Parse(server.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	wrong.User = url.UserPassword(wrong.User.Username(), "wrong")
	_, err = pgx.Connect(t.Context(), wrong.String())
	if refusal := (*pgconn.PgError)(nil); !errors.As(err, &refusal) || refusal.Code != "28P01" {
		t.Errorf("a wrong password got %v, want SQLSTATE 28P01", err)
	}
}

func startWithFsync(t *testing.T) *postgres.Server {
	t.Helper()
	server, err := postgres.Start(t.Context(), postgres.Options{Own: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Stop(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return server
}

// Goal: a standby has what its primary commits and cannot be written; it can take over,
// and the old primary then follows it.
func TestStandbyTakesOver(t *testing.T) {
	first := postgrestest.Own(t)
	write := func(server *postgres.Server, statement string) error {
		_, err := connect(t, server.URL("postgres")).Exec(t.Context(), statement)
		return err
	}
	if err := write(first, "CREATE TABLE kept AS SELECT 1 AS id"); err != nil {
		t.Fatal(err)
	}
	second := postgrestest.Standby(t, first)
	if err := write(first, "INSERT INTO kept VALUES (2)"); err != nil {
		t.Fatal(err)
	}
	const readOnly = "25006"
	if refusal := (*pgconn.PgError)(nil); !errors.As(write(second, "INSERT INTO kept VALUES (3)"), &refusal) || refusal.Code != readOnly {
		t.Errorf("writing to the standby is answered with %v, want SQLSTATE %s", refusal, readOnly)
	}
	if err := first.Halt(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := second.Promote(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := write(second, "INSERT INTO kept VALUES (3)"); err != nil {
		t.Error(err)
	}
	if got := read[int](t, connect(t, second.URL("postgres")), "SELECT count(*) FROM kept"); got != 3 {
		t.Errorf("the new primary has %d rows, want 3", got)
	}
	if err := first.Follow(t.Context(), second); err != nil {
		t.Fatal(err)
	}
	if !read[bool](t, connect(t, first.URL("postgres")), "SELECT pg_is_in_recovery()") {
		t.Error("the old primary is none of the new one's standbys")
	}
}

// Goal: each test has a database of its own, which goes with the test.
func TestDatabasesAreIsolated(t *testing.T) {
	server := postgrestest.Server(t)
	var first string
	t.Run("one", func(t *testing.T) {
		first = postgrestest.NewDatabase(t)
		conn := connect(t, first)
		if _, err := conn.Exec(t.Context(), "CREATE TABLE mine ()"); err != nil {
			t.Fatal(err)
		}
		second := connect(t, postgrestest.NewDatabase(t))
		if read[bool](t, second, "SELECT to_regclass('mine') IS NOT NULL") {
			t.Fatal("a table of another database shows")
		}
	})
	if _, err := pgx.Connect(t.Context(), first); err == nil {
		t.Fatal("the database outlived its test")
	}
	if err := server.DropDatabase(t.Context(), `never "there"`); err != nil {
		t.Fatal(err)
	}
}

// Goal: a given server is used and never taken down.
func TestGivenServer(t *testing.T) {
	own := postgrestest.Own(t)
	given, err := postgres.Start(t.Context(), postgres.Options{URL: own.URL("postgres") + "&application_name=given"})
	if err != nil {
		t.Fatal(err)
	}
	conn := connect(t, postgrestest.NewDatabaseOn(t, given))
	if got := read[string](t, conn, "SHOW application_name"); got != "given" {
		t.Errorf("the parameters of the given URL are lost: application_name is %q", got)
	}
	for name, call := range map[string]func(context.Context) error{
		"Halt": given.Halt, "Kill": given.Kill, "Resume": given.Resume,
	} {
		if err := call(t.Context()); !errors.Is(err, postgres.ErrGivenServer) {
			t.Errorf("%s of a given server: %v, want ErrGivenServer", name, err)
		}
	}
	if err := given.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	connect(t, own.URL("postgres"))
}

// Goal: a wrong URL is refused at once, and its password is not repeated.
func TestGivenURLThatIsNone(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	_, err := postgres.Start(ctx, postgres.Options{URL: "mysql://root:hunter2@127.0.0.1"})
	if err == nil || strings.Contains(err.Error(), "hunter2") || !strings.Contains(err.Error(), postgres.URLVariable) {
		t.Fatalf("got %v", err)
	}
}

// Goal: a given server whose role is no superuser is refused at once, by an error
// that names role and variable and not the password.
func TestGivenRoleIsNoSuperuser(t *testing.T) {
	server := postgrestest.Own(t)
	conn := connect(t, server.URL("postgres"))
	if _, err := conn.Exec(t.Context(), "CREATE ROLE modest LOGIN CREATEDB PASSWORD 'hunter2'"); err != nil {
		t.Fatal(err)
	}
	given, err := url.Parse(server.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	given.User = url.UserPassword("modest", "hunter2")
	_, err = postgres.Start(t.Context(), postgres.Options{URL: given.String()})
	if err == nil || !strings.Contains(err.Error(), "the role modest given by "+postgres.URLVariable+" is no superuser") ||
		strings.Contains(err.Error(), "hunter2") {
		t.Errorf("got %v", err)
	}
}
