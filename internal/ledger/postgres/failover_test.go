package postgres

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	devenv "github.com/token-lease/operator/hack/devenv/postgres"
	"github.com/token-lease/operator/hack/devenv/postgres/postgrestest"
	"github.com/token-lease/operator/internal/ledger"
)

// address is like that of a service: new connections are led to where it leads now,
// and those that are there stay where they are.
type address struct {
	host string

	mutex sync.Mutex
	to    string
	// open counts connections by where they lead.
	open map[string]int
}

func newAddress(t *testing.T) *address {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	a := &address{host: listener.Addr().String(), open: map[string]int{}}
	go func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			go a.pass(client)
		}
	}()
	return a
}

// pass connects a client for as long as both sides stay.
func (a *address) pass(client net.Conn) {
	defer client.Close()
	a.mutex.Lock()
	to := a.to
	a.open[to]++
	a.mutex.Unlock()
	defer func() {
		a.mutex.Lock()
		defer a.mutex.Unlock()
		a.open[to]--
	}()
	server, err := net.Dial("tcp", to)
	if err != nil {
		return
	}
	defer server.Close()
	ended := make(chan struct{}, 2)
	for _, way := range [][2]net.Conn{{client, server}, {server, client}} {
		go func() {
			// Whatever ends one way ends the connection.
			_, _ = io.Copy(way[0], way[1])
			ended <- struct{}{}
		}()
	}
	<-ended
}

func (a *address) lead(to string) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	a.to = to
}

func (a *address) connections(to string) int {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	return a.open[to]
}

const (
	failoverDatabase = "failover"

	failoverNormal, failoverTemporary = 1000, 3000
	failoverReserved                  = 2000
)

// failover is a ledger on a primary with a standby, and a store that knows an address
// before the two.
type failover struct {
	*database
	first, second *devenv.Server
	// atFirst and atSecond are where the address can lead: to the servers, or to
	// poolers before them.
	atFirst, atSecond string
	address           *address
	store             *Store
	// served counts what callers were confirmed.
	served atomic.Int64
}

// newFailover has a raise in force, of which tokens are reserved.
func newFailover(t *testing.T, pooled bool) *failover {
	t.Helper()
	f := &failover{first: postgrestest.Own(t), address: newAddress(t)}
	if err := f.first.CreateDatabase(t.Context(), failoverDatabase); err != nil {
		t.Fatal(err)
	}
	f.second = postgrestest.Standby(t, f.first)
	f.database = &database{t: t, url: f.first.URL(failoverDatabase)}
	if _, err := Migrate(t.Context(), f.url); err != nil {
		t.Fatal(err)
	}
	f.conn = f.connect()
	f.holdClock(start)
	f.atFirst, f.atSecond = f.place(f.first, pooled), f.place(f.second, pooled)
	f.address.lead(f.atFirst)
	through, err := url.Parse(f.url)
	if err != nil {
		t.Fatal(err)
	}
	through.Host = f.address.host
	f.store = f.database.store(func(o *Options) {
		o.ConnString = func(context.Context) (string, error) { return through.String(), nil }
	})
	owner := testOwner()
	do(t, f.store, declared(owner, 1, failoverNormal))
	do(t, f.store, raised("raise-1", owner, failoverNormal, failoverTemporary, time.Minute, &start))
	return f
}

// place is where a server is reached.
func (f *failover) place(server *devenv.Server, pooled bool) string {
	f.t.Helper()
	if !pooled {
		return server.Address()
	}
	ctx, cancel := context.WithTimeout(f.t.Context(), poolerStart)
	defer cancel()
	pooler, err := devenv.StartPooler(ctx, server, DefaultMaxConnections, os.Stderr)
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
		defer cancel()
		if err := pooler.Stop(ctx); err != nil {
			f.t.Error(err)
		}
	})
	at, err := url.Parse(pooler.URL(""))
	if err != nil {
		f.t.Fatal(err)
	}
	return at.Host
}

// Goal: when the primary changes nothing is confirmed that is not kept, and no restart
// is needed: while no server can be written every call fails with an error that can be
// repeated and health shows it; then the same store goes on at the new primary, and the
// raise ends there, once. Method: a real standby takes over, and the old primary becomes
// its standby, which answers reads; for a while both are standbys. Sessions of the old
// primary end with it, or live on in a pooler that leads to the standby it is now.
func TestFailover(t *testing.T) {
	t.Run("sessions end", func(t *testing.T) { newFailover(t, false).tell(nil) })
	for name, meets := range map[string]func(context.Context, *Store) error{
		"a reservation": request(ledger.Reserve{Key: bucketKey, RequestKey: "1", Fingerprint: "f", Tokens: 1}, nil),
		"the sweeper":   sweepOnce,
		"health":        func(ctx context.Context, store *Store) error { return store.Writable(ctx) },
	} {
		t.Run("sessions live on/"+name, func(t *testing.T) { newFailover(t, true).tell(meets) })
	}
}

// tell is the story. meets is the call that is the first to come upon sessions that
// have lived on; nil if there are none.
func (f *failover) tell(meets func(context.Context, *Store) error) {
	f.t.Helper()
	reserve := ledger.Reserve{Key: bucketKey, RequestKey: "before", Fingerprint: "f", Tokens: failoverReserved, TTL: hour}
	lease := do(f.t, f.store, reserve).Lease
	f.useAllPools()
	var stop func() []string
	if meets == nil {
		stop = f.askOnAndOn()
		f.awaitCallers()
	}
	if err := f.first.Halt(f.t.Context()); err != nil {
		f.t.Fatal(err)
	}
	if err := f.first.Follow(f.t.Context(), f.second); err != nil {
		f.t.Fatal(err)
	}
	if meets != nil {
		f.meet(meets)
		stop = f.askOnAndOn()
	}
	f.wantUnavailable("the old primary is a standby")
	f.address.lead(f.atSecond)
	f.wantUnavailable("the address leads to another standby")
	eventually(f.t, "the end of all connections to the old primary", func() bool { return f.address.connections(f.atFirst) == 0 })

	if err := f.second.Promote(f.t.Context()); err != nil {
		f.t.Fatal(err)
	}
	f.url = f.second.URL(failoverDatabase)
	f.conn = f.connect()
	eventually(f.t, "the store going on at the new primary", func() bool { return f.store.Writable(f.t.Context()) == nil })
	f.awaitCallers()
	if again := do(f.t, f.store, reserve); again.Lease.ID != lease.ID || again.Snapshot.Limit != failoverTemporary {
		f.t.Errorf("the reservation from before is answered with %+v in %+v, want lease %s under the raise", again.Lease, again.Snapshot, lease.ID)
	}
	confirmed := stop()
	if kept := value[int](f.database, `SELECT count(*) FROM tokenlease.leases WHERE lease_id = ANY ($1)`, confirmed); kept != len(confirmed) {
		f.t.Errorf("of %d confirmed reservations %d are kept", len(confirmed), kept)
	}
	f.endRaise()
	if n := f.address.connections(f.atFirst); n != 0 {
		f.t.Errorf("%d connections lead to the old primary", n)
	}
}

// meet has a call come upon sessions of the old primary that have lived on.
func (f *failover) meet(meets func(context.Context, *Store) error) {
	f.t.Helper()
	if f.address.connections(f.atFirst) == 0 {
		f.t.Error("no connection has outlived the old primary")
	}
	if _, err := f.store.Raise(f.t.Context(), testOwner().Cluster, "raise-1"); err != nil {
		f.t.Errorf("reading at the old primary: %v", err)
	}
	if err := meets(f.t.Context(), f.store); !ledger.HasCode(err, ledger.CodeUnavailable) {
		f.t.Errorf("the call is answered with %v, want ledger_unavailable", err)
	}
	log, err := os.ReadFile(f.first.LogFile())
	if err != nil {
		f.t.Fatal(err)
	}
	if refusal := "cannot set transaction read-write mode during recovery"; !strings.Contains(string(log), refusal) {
		f.t.Errorf("no session met %q at the old primary", refusal)
	}
}

// useAllPools opens a connection of each kind.
func (f *failover) useAllPools() {
	f.t.Helper()
	if err := f.store.Writable(f.t.Context()); err != nil {
		f.t.Fatal(err)
	}
	if _, err := f.store.Raise(f.t.Context(), testOwner().Cluster, "raise-1"); err != nil {
		f.t.Fatal(err)
	}
	for _, pool := range f.store.pools() {
		if pool.Stat().TotalConns() == 0 {
			f.t.Fatal("a pool has no connection")
		}
	}
}

// wantUnavailable asks for everything that writes.
func (f *failover) wantUnavailable(when string) {
	f.t.Helper()
	ctx := f.t.Context()
	answers := map[string]error{"Writable": f.store.Writable(ctx)}
	_, answers["Sweep"] = f.store.Sweep(ctx, ledger.SweepRequest{Limit: 10})
	for _, request := range []ledger.Request{
		ledger.Reserve{Key: bucketKey, RequestKey: when, Fingerprint: "f", Tokens: 1},
		ledger.SetLimit{Key: bucketKey, ExpectedLimit: failoverTemporary, Limit: failoverNormal},
		ledger.Inspect{Key: bucketKey},
		ledger.RevokeRaise{Key: bucketKey, UID: "raise-1"},
	} {
		answers[string(request.Operation())] = nil
		if result := ledger.New(f.store, nil).Do(ctx, request)[0]; result.Err != nil {
			answers[string(request.Operation())] = result.Err
		}
	}
	for name, err := range answers {
		if !ledger.HasCode(err, ledger.CodeUnavailable) || !strings.Contains(err.Error(), "standby") {
			f.t.Errorf("while %s, %s is answered with %v, want ledger_unavailable that names the standby", when, name, err)
		}
	}
}

// askOnAndOn has callers reserve and release until the returned function is called,
// which answers the leases that were confirmed.
func (f *failover) askOnAndOn() (stop func() (confirmed []string)) {
	const callers = 4
	ctx, cancel := context.WithCancel(f.t.Context())
	var asking sync.WaitGroup
	confirmed := make([][]string, callers)
	ask := func(request ledger.Request) ledger.Result {
		result := ledger.New(f.store, nil).Do(context.WithoutCancel(ctx), request)[0]
		if result.Err != nil && !result.Err.Retryable() {
			f.t.Errorf("%s is answered with %v, want success or an error that can be repeated", request.Operation(), result.Err)
		}
		return result
	}
	for c := range callers {
		asking.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				result := ask(ledger.Reserve{Key: bucketKey, RequestKey: fmt.Sprintf("caller-%d-%d", c, n), Fingerprint: "f", Tokens: 1})
				if result.Err != nil {
					time.Sleep(5 * time.Millisecond) // the pace of asking while nobody answers
					continue
				}
				f.served.Add(1)
				confirmed[c] = append(confirmed[c], result.Lease.ID)
				ask(ledger.Release{Key: bucketKey, LeaseID: result.Lease.ID})
			}
		})
	}
	end := func() {
		cancel()
		asking.Wait()
	}
	f.t.Cleanup(end)
	return func() (all []string) {
		end()
		for _, ids := range confirmed {
			all = append(all, ids...)
		}
		return all
	}
}

// awaitCallers waits until a caller is served.
func (f *failover) awaitCallers() {
	f.t.Helper()
	before := f.served.Load()
	eventually(f.t, "a caller being served", func() bool { return f.served.Load() > before })
}

// endRaise lets the raise expire at the new primary, under passes that meet.
func (f *failover) endRaise() {
	f.t.Helper()
	f.setClock(start.Add(time.Minute))
	pass := func() {
		if _, err := f.store.Sweep(f.t.Context(), ledger.SweepRequest{Limit: 10}); err != nil {
			f.t.Error(err)
		}
	}
	atOnce(pass, pass, pass)
	const restores = `SELECT count(*) FROM tokenlease.audit WHERE operation_id = 'raise-1:restore'`
	if n := value[int](f.database, restores); n != 1 {
		f.t.Errorf("%d rows tell of the restore, want 1", n)
	}
	bucket := do(f.t, f.store, ledger.Inspect{Key: bucketKey}).Snapshot
	if bucket.Limit != failoverNormal || bucket.ActiveRaise != nil {
		f.t.Errorf("after the expiry the bucket is %+v", bucket)
	}
	refused := ledger.New(f.store, nil).Do(f.t.Context(), ledger.Reserve{Key: bucketKey, RequestKey: "after", Fingerprint: "f", Tokens: 1})[0]
	if !ledger.HasCode(refused.Err, ledger.CodeBudgetExceeded) {
		f.t.Errorf("after the expiry a reservation is answered with %v, want budget_exceeded", refused.Err)
	}
	f.wantInvariants()
	old := &database{t: f.t, url: f.first.URL(failoverDatabase)}
	old.conn = old.connect()
	eventually(f.t, "the restore at the standby that was the primary", func() bool { return value[int](old, restores) == 1 })
}

// Goal: a session that turns read-only in the middle of what it does, as where a server
// is demoted under its sessions, confirms nothing and is not used again. Method: the
// clock that a transaction asks makes it read-only, so that the server refuses its
// writes; then it does not any more.
func TestSessionsThatTurnReadOnly(t *testing.T) {
	d := newDatabase(t)
	d.holdClock(start)
	store := d.store(nil)
	do(t, store, declared(testOwner(), 1, 100))
	do(t, store, raised("raise-1", testOwner(), 100, 300, time.Minute, &start))
	sessions := value[[]int32](d, sessionsOfStore, DefaultApplicationName)
	d.setClock(start.Add(time.Minute))
	d.exec(`CREATE OR REPLACE FUNCTION tokenlease.ledger_now() RETURNS timestamptz LANGUAGE sql VOLATILE AS $$
		SELECT at FROM public.test_clock WHERE set_config('transaction_read_only', 'on', true) = 'on' $$`)
	reserve := ledger.Reserve{Key: bucketKey, RequestKey: "1", Fingerprint: "f", Tokens: 1}
	result := ledger.New(store, nil).Do(t.Context(), reserve)[0]
	if !ledger.HasCode(result.Err, ledger.CodeUnavailable) || sqlState(result.Err) != codeReadOnly {
		t.Errorf("Reserve is answered with %+v, want ledger_unavailable because of %s", result, codeReadOnly)
	}
	if swept, err := store.Sweep(t.Context(), ledger.SweepRequest{Limit: 10}); !ledger.HasCode(err, ledger.CodeUnavailable) || sqlState(err) != codeReadOnly {
		t.Errorf("Sweep is answered with %+v, %v, want ledger_unavailable because of %s", swept, err, codeReadOnly)
	}
	eventually(t, "the end of the sessions", func() bool {
		return value[int](d, `SELECT count(*) FROM pg_stat_activity WHERE pid = ANY ($1)`, sessions) == 0
	})
	d.exec(`CREATE OR REPLACE FUNCTION tokenlease.ledger_now() RETURNS timestamptz LANGUAGE sql VOLATILE AS $$
		SELECT at FROM public.test_clock $$`)
	if bucket := do(t, store, reserve).Snapshot; bucket.Limit != 100 || bucket.ReservedTokens != 1 || bucket.LeaseRecords != 1 {
		t.Errorf("then the bucket is %+v", bucket)
	}
	if n := value[int](d, `SELECT count(*) FROM tokenlease.audit WHERE operation_id = 'raise-1:restore'`); n != 1 {
		t.Errorf("%d rows tell of the restore, want 1", n)
	}
	d.wantInvariants()
}

const sessionsOfStore = `
SELECT array_agg(pid) FROM pg_stat_activity WHERE datname = current_database() AND application_name = $1`
