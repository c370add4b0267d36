package postgres

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	devenv "github.com/token-lease/operator/hack/devenv/postgres"
	"github.com/token-lease/operator/hack/devenv/postgres/postgrestest"
	"github.com/token-lease/operator/internal/ledger"
)

const (
	// testTimeout bounds waits that only a broken test would reach.
	testTimeout = 60 * time.Second
)

func TestMain(m *testing.M) {
	if os.Getenv(childVariable) != "" {
		if err := runChild(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(postgrestest.Main(m))
}

// database is a migrated database of one test.
type database struct {
	t    *testing.T
	url  string
	conn *pgx.Conn
	// pooler stands between the database and its stores; nil for none.
	pooler *devenv.Pooler
}

func newDatabase(t *testing.T) *database {
	t.Helper()
	return newDatabaseBehind(t, nil)
}

// newDatabaseBehind is newDatabase with a pooler before it.
func newDatabaseBehind(t *testing.T, pooler *devenv.Pooler) *database {
	t.Helper()
	d := &database{t: t, url: postgrestest.NewDatabase(t), pooler: pooler}
	if _, err := Migrate(t.Context(), d.pooled()); err != nil {
		t.Fatal(err)
	}
	d.conn = d.connect()
	return d
}

// pooled is the database's URL for stores.
func (d *database) pooled() string {
	if d.pooler == nil {
		return d.url
	}
	direct, err := url.Parse(d.url)
	if err != nil {
		d.t.Fatal(err)
	}
	return d.pooler.URL(strings.TrimPrefix(direct.Path, "/"))
}

// connect opens a session of another hand.
func (d *database) connect() *pgx.Conn {
	d.t.Helper()
	conn, err := pgx.Connect(d.t.Context(), d.url)
	if err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
		defer cancel()
		conn.Close(ctx)
	})
	return conn
}

func (d *database) exec(sql string, arguments ...any) {
	d.t.Helper()
	if _, err := d.conn.Exec(d.t.Context(), sql, arguments...); err != nil {
		d.t.Fatalf("%s: %v", sql, err)
	}
}

// value answers the one value of a query.
func value[T any](d *database, sql string, arguments ...any) T {
	d.t.Helper()
	rows, err := d.conn.Query(d.t.Context(), sql, arguments...)
	if err != nil {
		d.t.Fatalf("%s: %v", sql, err)
	}
	v, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
	if err != nil {
		d.t.Fatalf("%s: %v", sql, err)
	}
	return v
}

// store opens a store on the database; change may adjust its options.
func (d *database) store(change func(*Options)) *Store {
	d.t.Helper()
	options := Options{
		ConnString: func(context.Context) (string, error) { return d.pooled(), nil },
		Worker:     "worker-1",
	}
	if change != nil {
		change(&options)
	}
	s, err := Open(options)
	if err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(s.Close)
	return s
}

// holdClock makes the database's clock stand at an instant, which tests move.
func (d *database) holdClock(at time.Time) {
	d.t.Helper()
	d.exec(`CREATE TABLE public.test_clock (at timestamptz NOT NULL)`)
	d.exec(`INSERT INTO public.test_clock VALUES ($1)`, at)
	d.exec(`GRANT SELECT ON public.test_clock TO PUBLIC`)
	d.exec(`CREATE OR REPLACE FUNCTION tokenlease.ledger_now() RETURNS timestamptz
		LANGUAGE sql VOLATILE AS $$ SELECT at FROM public.test_clock $$`)
}

func (d *database) setClock(at time.Time) {
	d.t.Helper()
	d.exec(`UPDATE public.test_clock SET at = $1`, at)
}

// do carries out one request, which must succeed.
func do(t *testing.T, store ledger.Store, request ledger.Request) ledger.Result {
	t.Helper()
	result := ledger.New(store, nil).Do(t.Context(), request)[0]
	if result.Err != nil {
		t.Fatalf("%s: %v", request.Operation(), result.Err)
	}
	return result
}

// eventually waits until a state is reached.
func eventually(t *testing.T, what string, reached func() bool) {
	t.Helper()
	deadline := time.Now().Add(testTimeout)
	for !reached() {
		if time.Now().After(deadline) {
			t.Fatalf("%s did not happen in %v", what, testTimeout)
		}
		time.Sleep(5 * time.Millisecond) // the pace of looking; the bound stands above
	}
}
