package sweeper

import (
	"context"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/jackc/pgx/v5"

	"github.com/token-lease/operator/hack/devenv/postgres/postgrestest"
	"github.com/token-lease/operator/internal/ledger"
	"github.com/token-lease/operator/internal/ledger/postgres"
)

// waitTimeout bounds waits that only a broken sweeper would reach.
const waitTimeout = 90 * time.Second

func TestMain(m *testing.M) { os.Exit(postgrestest.Main(m)) }

// cluster is a ledger in PostgreSQL with as many buckets and replicas as a test
// wants.
type cluster struct {
	testing.TB
	url  string
	conn *pgx.Conn
}

// newCluster migrates a database.
func newCluster(t testing.TB, url string) *cluster {
	t.Helper()
	if _, err := postgres.Migrate(t.Context(), url); err != nil {
		t.Fatal(err)
	}
	c := &cluster{TB: t, url: url}
	c.conn = c.connect()
	return c
}

// connect opens a session of another hand.
func (c *cluster) connect() *pgx.Conn {
	c.Helper()
	conn, err := pgx.Connect(c.Context(), c.url)
	if err != nil {
		c.Fatal(err)
	}
	c.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), waitTimeout)
		defer cancel()
		conn.Close(ctx)
	})
	return conn
}

func (c *cluster) exec(sql string, arguments ...any) {
	c.Helper()
	if _, err := c.conn.Exec(c.Context(), sql, arguments...); err != nil {
		c.Fatalf("%s: %v", sql, err)
	}
}

func (c *cluster) count(sql string, arguments ...any) (n int64) {
	c.Helper()
	if err := c.conn.QueryRow(c.Context(), sql, arguments...).Scan(&n); err != nil {
		c.Fatalf("%s: %v", sql, err)
	}
	return n
}

// waitFor waits until a query counts what it should.
func (c *cluster) waitFor(what string, want int64, sql string) {
	c.Helper()
	deadline := time.Now().Add(waitTimeout)
	for {
		got := c.count(sql)
		if got == want {
			return
		}
		if time.Now().After(deadline) {
			c.Fatalf("%s: %d, want %d", what, got, want)
		}
		time.Sleep(10 * time.Millisecond) // the pace of looking; the bound stands above
	}
}

// shiftClock moves the database's clock ahead of the true time, all at once.
func (c *cluster) shiftClock(by time.Duration) {
	c.Helper()
	c.exec(`CREATE TABLE IF NOT EXISTS public.clock_shift (milliseconds bigint NOT NULL)`)
	c.exec(`TRUNCATE public.clock_shift`)
	c.exec(`INSERT INTO public.clock_shift VALUES ($1)`, by.Milliseconds())
	c.exec(`CREATE OR REPLACE FUNCTION tokenlease.ledger_now() RETURNS timestamptz LANGUAGE sql VOLATILE AS $$
		SELECT date_trunc('milliseconds', clock_timestamp()) + interval '1 millisecond' * milliseconds FROM public.clock_shift $$`)
}

func (c *cluster) store(worker string, observer ledger.Observer) *postgres.Store {
	c.Helper()
	store, err := postgres.Open(postgres.Options{
		ConnString: func(context.Context) (string, error) { return c.url, nil },
		Worker:     worker,
		Observer:   observer,
	})
	if err != nil {
		c.Fatal(err)
	}
	c.Cleanup(store.Close)
	return store
}

// replicas runs sweepers, each on a store of its own, until the returned function
// is called.
func (c *cluster) replicas(n int, observer ledger.Observer) (stop func()) {
	c.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	for i := range n {
		store := c.store(fmt.Sprintf("replica-%d", i), observer)
		running.Go(func() { New(store, &counts{}, logr.Discard()).Run(ctx) })
	}
	stop = func() {
		cancel()
		running.Wait()
	}
	c.Cleanup(stop)
	return stop
}

func (c *cluster) do(store ledger.Store, requests []ledger.Request) {
	c.Helper()
	for i, result := range ledger.New(store, nil).Do(context.Background(), requests...) {
		if result.Err != nil {
			c.Errorf("%s on %q: %v", requests[i].Operation(), requests[i].Bucket(), result.Err)
		}
	}
}

const (
	normalLimit    = 100
	temporaryLimit = 300
)

func numbered(kind string, from, n int) []string {
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprintf("%s-%04d", kind, from+i)
	}
	return names
}

func declarations(buckets []string) []ledger.Request {
	var requests []ledger.Request
	for _, name := range buckets {
		requests = append(requests, ledger.ApplyDeclared{
			Key: "tenants/" + name, Generation: 1,
			Owner: ledger.Owner{Cluster: "c", Namespace: "tenants", Name: name, UID: "uid-" + name, CreatedAt: time.Unix(0, 0)},
			Declaration: ledger.Declaration{
				Limit: normalLimit, TenantID: name, Settings: ledger.DefaultSettings(), ConflictPolicy: ledger.ConflictReview,
				Raises: ledger.RaisePolicy{Mode: ledger.ModeEnforce, MaxLimit: 1000, MaxDuration: 48 * time.Hour},
			},
		})
	}
	return requests
}

// raises asks for one raise on each bucket, from now until an instant.
func raises(buckets []string, expiresAt func(i int) time.Time) []ledger.Request {
	var requests []ledger.Request
	for i, name := range buckets {
		requests = append(requests, ledger.StoreRaise{
			Key: "tenants/" + name, BucketUID: "uid-" + name, BucketGeneration: 1,
			Grant: ledger.Grant{
				UID: "raise-" + name, CreatedAt: time.Unix(0, 0), Cluster: "c", Namespace: "tenants", Name: name, TenantID: name, ScopedKeyID: "k",
				NormalLimit: normalLimit, TemporaryLimit: temporaryLimit, ExpiresAt: expiresAt(i),
				ApprovalID: "CHG-" + name, OnBaseChange: ledger.BaseChangeReview,
			},
		})
	}
	return requests
}

// planned asks for one raise on each bucket, in a window.
func planned(buckets []string, startsAt, expiresAt time.Time) []ledger.Request {
	requests := raises(buckets, func(int) time.Time { return expiresAt })
	for i, request := range requests {
		raise := request.(ledger.StoreRaise)
		raise.Grant.StartsAt = &startsAt
		requests[i] = raise
	}
	return requests
}
