package postgres

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/token-lease/operator/internal/ledger"
)

// inLine counts the requests that wait for a bucket.
func (e *engine) inLine(key string) int {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	if l := e.lines[key]; l != nil {
		return l.requests
	}
	return 0
}

// awaitLockWaits waits until as many sessions of this database wait for a lock.
func (d *database) awaitLockWaits(sessions int64) {
	d.t.Helper()
	eventually(d.t, fmt.Sprintf("%d sessions waiting for a lock", sessions), func() bool {
		// Within a transaction, the sessions that were there at the first look are all
		// that is shown.
		d.exec(`SELECT pg_stat_clear_snapshot()`)
		return value[int64](d, `SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND wait_event_type = 'Lock'`) == sessions
	})
}

// idle reports whether nothing waits, is served or remembered.
func (e *engine) idle() bool {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	return len(e.lines) == 0 && e.waiting == 0 && e.committers.working == 0 && e.lanes.working == 0
}

// Goal: a bucket that another hand has locked holds up nobody else, however many
// ask for it. Method: more callers than connections, a lock that outlasts the
// test, and the fewest connections.
func TestLockedBucketHoldsUpNobody(t *testing.T) {
	d := newDatabase(t)
	store := d.store(func(o *Options) {
		o.MaxConnections = MinConnections
		o.LockTimeout, o.StatementTimeout = testTimeout, testTimeout
	})
	do(t, store, ledger.OpenBucket{Key: bucketKey, Limit: 100})
	do(t, store, ledger.OpenBucket{Key: "other", Limit: 100})
	d.exec(`BEGIN`)
	d.exec(`SELECT FROM tokenlease.buckets WHERE bucket_key = $1 FOR UPDATE`, bucketKey)
	ctx, giveUp := context.WithCancel(t.Context())
	var callers sync.WaitGroup
	const crowd = 64
	for i := range crowd + 1 {
		if i == 1 {
			d.awaitLockWaits(1)
		}
		callers.Go(func() {
			result := ledger.New(store, nil).Do(ctx, ledger.Inspect{Key: bucketKey})[0]
			if result.Err == nil || !result.Err.Retryable() {
				t.Errorf("a caller of the locked bucket got %+v, want an error that can be retried", result)
			}
		})
	}
	eventually(t, "the crowd standing in line", func() bool { return store.engine.inLine(bucketKey) == crowd })
	for range 3 {
		do(t, store, ledger.Reserve{Key: "other", RequestKey: "1", Fingerprint: "f", Tokens: 1})
		if _, err := store.Sweep(t.Context(), ledger.SweepRequest{Limit: 10}); err != nil {
			t.Error(err)
		}
		if err := store.Writable(t.Context()); err != nil {
			t.Error(err)
		}
		if _, err := store.Audit(t.Context(), bucketKey, 0, 10); err != nil {
			t.Error(err)
		}
	}
	giveUp()
	callers.Wait()
	d.exec(`ROLLBACK`)
	do(t, store, ledger.Inspect{Key: bucketKey})
}

// Goal: buckets that share a call do not wait for one another. Method: another hand
// has locked one of three; the call that names them all serves the others, and that
// one once it is free.
func TestLockedBucketLeavesItsBatch(t *testing.T) {
	d := newDatabase(t)
	store := d.store(func(o *Options) { o.LockTimeout, o.StatementTimeout = testTimeout, testTimeout })
	keys := []string{"a", "b", "c"}
	var requests []ledger.Request
	for _, key := range keys {
		do(t, store, ledger.OpenBucket{Key: key, Limit: 100})
		requests = append(requests, ledger.Reserve{Key: key, RequestKey: "1", Fingerprint: "f", Tokens: 5})
	}
	d.exec(`BEGIN`)
	d.exec(`SELECT FROM tokenlease.buckets WHERE bucket_key = 'b' FOR UPDATE`)
	answered := make(chan []ledger.Result, 1)
	go func() { answered <- ledger.New(store, nil).Do(context.Background(), requests...) }()
	eventually(t, "a and c being served", func() bool {
		return value[int64](d, `SELECT count(*) FROM tokenlease.leases WHERE bucket_key IN ('a', 'c')`) == 2
	})
	d.exec(`ROLLBACK`)
	for i, result := range <-answered {
		if result.Err != nil || result.Snapshot.Key != keys[i] || result.Snapshot.ReservedTokens != 5 {
			t.Errorf("%s: %+v", keys[i], result)
		}
	}
	eventually(t, "the engine being idle", store.engine.idle)
}

// Goal: what waits is bounded, the refusal says that it can be repeated, and whoever
// leaves makes room. Method: an engine whose crews have nobody to work.
func TestWaitingIsBounded(t *testing.T) {
	e := &engine{lines: map[string]*line{}}
	ctx, giveUp := context.WithCancel(t.Context())
	enter := func(key string) (*call, error) {
		c := newCall([]ledger.Request{ledger.Inspect{Key: key}})
		return c, e.enter(key, c)
	}
	var calls []*call
	for range maxWaiting {
		c, err := enter(bucketKey)
		if err != nil {
			t.Fatal(err)
		}
		calls = append(calls, c)
	}
	if _, err := enter(bucketKey); !ledger.HasCode(err, ledger.CodeUnavailable) {
		t.Errorf("beyond the bound of a bucket: %v, want ledger_unavailable", err)
	}
	for i := range maxWaitingInAll - maxWaiting {
		if _, err := enter(fmt.Sprint(i)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := enter("another"); !ledger.HasCode(err, ledger.CodeUnavailable) {
		t.Errorf("beyond the bound of all: %v, want ledger_unavailable", err)
	}
	giveUp()
	for _, c := range calls {
		if results := c.wait(ctx); !ledger.HasCode(results[0].Err, ledger.CodeUnavailable) {
			t.Fatalf("given up: %+v, want ledger_unavailable", results[0])
		}
	}
	for range (maxWaitingInAll - maxWaiting) / maxBuckets {
		if groups := e.next(&e.committers, maxBuckets); len(groups) != maxBuckets {
			t.Fatalf("%d buckets are served together, want %d", len(groups), maxBuckets)
		}
	}
	if e.waiting != 0 || e.inLine(bucketKey) != 0 {
		t.Errorf("%d requests wait, %d of them for the bucket; want none", e.waiting, e.inLine(bucketKey))
	}
}

// Goal: a busy bucket takes no more than its share of a transaction, buckets are
// served in turn, and each bucket's calls in their order.
func TestBucketsAreServedInTurn(t *testing.T) {
	e := &engine{lines: map[string]*line{}}
	want := map[string][]*call{}
	for i := range 3 * maxRequests {
		key := "busy"
		if i%64 == 0 {
			key = fmt.Sprint("quiet-", i/64)
		}
		c := newCall([]ledger.Request{ledger.Inspect{Key: key}})
		if err := e.enter(key, c); err != nil {
			t.Fatal(err)
		}
		want[key] = append(want[key], c)
	}
	first := e.next(&e.committers, maxBuckets)
	if len(first) != len(want) {
		t.Errorf("the first transaction serves %d buckets, want all %d", len(first), len(want))
	}
	for _, g := range first {
		if g.key == "busy" && g.count() != maxShare {
			t.Errorf("the busy bucket has %d requests served beside others, want %d", g.count(), maxShare)
		}
		for i, c := range g.calls {
			if c != want[g.key][i] {
				t.Fatalf("call %d of %s is out of turn", i, g.key)
			}
		}
	}
	for _, g := range first {
		e.answered(g)
	}
	if second := e.next(&e.committers, maxBuckets); len(second) != 1 || second[0].count() != maxRequests {
		t.Errorf("then %d buckets are served, want the busy one with %d requests", len(second), maxRequests)
	}
}

// Goal: a call that closes a bucket shares its transaction with no other, since one
// that makes the bucket anew cannot be decided in the same. Method: what is taken from
// a line.
func TestClosingIsByItself(t *testing.T) {
	e := &engine{lines: map[string]*line{}}
	touch, closing := ledger.Touch{Key: bucketKey}, ledger.CloseBucket{Key: bucketKey}
	for _, request := range []ledger.Request{touch, touch, closing, touch, closing, closing, touch} {
		if err := e.enter(bucketKey, newCall([]ledger.Request{request})); err != nil {
			t.Fatal(err)
		}
	}
	var got []int
	for e.waiting > 0 {
		for _, g := range e.next(&e.committers, maxBuckets) {
			got = append(got, g.count())
			e.answered(g)
		}
	}
	if want := []int{2, 1, 1, 1, 1, 1}; !slices.Equal(got, want) {
		t.Errorf("the transactions have %v calls, want %v", got, want)
	}
}

// Goal: a caller who gives up is answered at once and is alone affected: while its
// call waits for a lock nothing will be done, and the answer says so; those behind
// it are served. Method: calls on a bucket that another hand has locked.
func TestGivingUpWhileLocked(t *testing.T) {
	d := newDatabase(t)
	store := d.store(func(o *Options) { o.LockTimeout, o.StatementTimeout = testTimeout, testTimeout })
	do(t, store, ledger.OpenBucket{Key: bucketKey, Limit: 100})
	d.exec(`BEGIN`)
	d.exec(`SELECT FROM tokenlease.buckets WHERE bucket_key = $1 FOR UPDATE`, bucketKey)
	ctx, giveUp := context.WithCancel(t.Context())
	var callers sync.WaitGroup
	reserve := func(ctx context.Context, name string, check func(ledger.Result)) {
		callers.Go(func() {
			check(ledger.New(store, nil).Do(ctx, ledger.Reserve{Key: bucketKey, RequestKey: name, Fingerprint: "f", Tokens: 60})[0])
		})
	}
	gone := make(chan struct{})
	reserve(ctx, "gone", func(result ledger.Result) {
		defer close(gone)
		if !ledger.HasCode(result.Err, ledger.CodeUnavailable) {
			t.Errorf("given up: %+v, want ledger_unavailable", result)
		}
	})
	d.awaitLockWaits(1)
	reserve(t.Context(), "next", func(result ledger.Result) {
		if result.Err != nil {
			t.Errorf("the next one: %v", result.Err)
		}
	})
	giveUp()
	<-gone
	d.exec(`ROLLBACK`)
	callers.Wait()
	if n := value[int64](d, `SELECT reserved_tokens FROM tokenlease.buckets`); n != 60 {
		t.Errorf("%d tokens are reserved, want 60: the call that was given up must not be carried out", n)
	}
}

// Goal: rows on which the rules break cost only their own bucket, and not the process.
// Method: a raise that says it is active and does not say what to return to, which
// only a missing constraint lets in.
func TestRulesThatBreak(t *testing.T) {
	d := newDatabase(t)
	store := d.store(nil)
	owner := testOwner()
	do(t, store, declared(owner, 1, 100))
	do(t, store, raised("raise-1", owner, 100, 300, hour, nil))
	do(t, store, ledger.OpenBucket{Key: "other", Limit: 100})
	d.exec(`ALTER TABLE tokenlease.raises DROP CONSTRAINT raises_applied`)
	d.exec(`UPDATE tokenlease.raises SET restore_to_tokens = NULL`)
	results := ledger.New(store, nil).Do(t.Context(), ledger.Inspect{Key: bucketKey}, ledger.Inspect{Key: "other"})
	if got := codeOf(results[0]); got != ledger.CodeStateCorrupt {
		t.Errorf("the broken bucket: %q, want state_corrupt (%v)", got, results[0].Err)
	}
	if results[1].Err != nil {
		t.Errorf("the other one: %v", results[1].Err)
	}
	eventually(t, "the engine being idle", store.engine.idle)
}

// Goal: closing answers everybody who was taken in, and takes in nobody else.
func TestCloseAnswersWhatWasTakenIn(t *testing.T) {
	d := newDatabase(t)
	store := d.store(func(o *Options) { o.LockTimeout, o.StatementTimeout = testTimeout, testTimeout })
	do(t, store, ledger.OpenBucket{Key: bucketKey, Limit: 1000})
	d.exec(`BEGIN`)
	d.exec(`SELECT FROM tokenlease.buckets WHERE bucket_key = $1 FOR UPDATE`, bucketKey)
	var callers sync.WaitGroup
	const crowd = 20
	for i := range crowd + 1 {
		if i == 1 {
			d.awaitLockWaits(1)
		}
		callers.Go(func() {
			do(t, store, ledger.Reserve{Key: bucketKey, RequestKey: fmt.Sprint(i), Fingerprint: "f", Tokens: 1})
		})
	}
	eventually(t, "the crowd standing in line", func() bool { return store.engine.inLine(bucketKey) == crowd })
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		store.Close()
	}()
	eventually(t, "the door being closed", func() bool {
		result := store.Do(t.Context(), []ledger.Request{ledger.Inspect{Key: "other"}})[0]
		return ledger.HasCode(result.Err, ledger.CodeUnavailable)
	})
	d.exec(`ROLLBACK`)
	callers.Wait()
	<-closed
}

// Goal: the pools together keep to the bound, as far as it allows one connection
// for each kind of work.
func TestPoolsKeepToTheBound(t *testing.T) {
	for bound, want := range map[int]int32{1: 6, 6: 6, 10: 10, DefaultMaxConnections: DefaultMaxConnections} {
		store, err := Open(Options{
			ConnString: func(context.Context) (string, error) { return "", nil }, Worker: "w", MaxConnections: bound,
		})
		if err != nil {
			t.Fatal(err)
		}
		var total int32
		for _, pool := range store.pools() {
			total += pool.Config().MaxConns
		}
		store.Close()
		if total != want {
			t.Errorf("bound to %d, the pools have %d connections, want %d", bound, total, want)
		}
	}
}
