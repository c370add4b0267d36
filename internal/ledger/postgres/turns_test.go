package postgres

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

// inLine counts the callers of a bucket.
func (t *turns) inLine(key string) int {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	if l := t.lines[key]; l != nil {
		return l.callers
	}
	return 0
}

// Goal: a bucket that another hand has locked holds up nobody else, however many
// ask for it. Method: more callers than connections, a lock that outlasts the
// test, and one connection to spare.
func TestLockedBucketHoldsUpNobody(t *testing.T) {
	d := newDatabase(t)
	store := d.store(func(o *Options) {
		o.MaxConnections = readConnections + watchConnections + 2
		o.LockTimeout, o.StatementTimeout = testTimeout, testTimeout
	})
	do(t, store, ledger.OpenBucket{Key: bucketKey, Limit: 100})
	do(t, store, ledger.OpenBucket{Key: "other", Limit: 100})
	d.exec(`BEGIN`)
	d.exec(`SELECT FROM tokenlease.buckets WHERE bucket_key = $1 FOR UPDATE`, bucketKey)
	ctx, giveUp := context.WithCancel(t.Context())
	var callers sync.WaitGroup
	const crowd = 64
	for range crowd {
		callers.Go(func() {
			result := ledger.New(store, nil).Do(ctx, ledger.Inspect{Key: bucketKey})[0]
			if result.Err == nil || !result.Err.Retryable() {
				t.Errorf("a caller of the locked bucket got %+v, want an error that can be retried", result)
			}
		})
	}
	eventually(t, "the crowd standing in line", func() bool { return store.turns.inLine(bucketKey) == crowd })
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

// Goal: buckets that share a call do not wait for one another's turn. Method: the
// turn on one of three is taken; the call that names them all serves the others.
func TestTurnsAreTakenApart(t *testing.T) {
	d := newDatabase(t)
	store := d.store(nil)
	keys := []string{"a", "b", "c"}
	var requests []ledger.Request
	for _, key := range keys {
		do(t, store, ledger.OpenBucket{Key: key, Limit: 100})
		requests = append(requests, ledger.Reserve{Key: key, RequestKey: "1", Fingerprint: "f", Tokens: 5})
	}
	if !store.turns.tryTake("b") {
		t.Fatal("the turn is taken")
	}
	answered := make(chan []ledger.Result, 1)
	go func() { answered <- ledger.New(store, nil).Do(context.Background(), requests...) }()
	eventually(t, "a and c being served", func() bool {
		return value[int64](d, `SELECT count(*) FROM tokenlease.leases WHERE bucket_key IN ('a', 'c')`) == 2
	})
	eventually(t, "their turns being free", func() bool { return store.turns.inLine("a")+store.turns.inLine("c") == 0 })
	store.turns.give("b")
	for i, result := range <-answered {
		if result.Err != nil || result.Snapshot.Key != keys[i] || result.Snapshot.ReservedTokens != 5 {
			t.Errorf("%s: %+v", keys[i], result)
		}
	}
}

// Goal: a line serves everybody in it, is bounded, and lets go of who leaves it.
func TestLine(t *testing.T) {
	var all turns
	if !all.tryTake(bucketKey) || all.tryTake(bucketKey) {
		t.Fatal("the turn can be had twice, or not at all")
	}
	served := make(chan struct{}, maxInLine)
	var waiting sync.WaitGroup
	for range maxInLine {
		waiting.Go(func() {
			if err := all.take(t.Context(), bucketKey); err != nil {
				t.Error(err)
			}
			served <- struct{}{}
		})
	}
	eventually(t, "the line being full", func() bool { return all.inLine(bucketKey) == maxInLine+1 })
	if err := all.take(t.Context(), bucketKey); !ledger.HasCode(err, ledger.CodeUnavailable) {
		t.Errorf("beyond the bound: %v, want ledger_unavailable", err)
	}
	for range maxInLine {
		all.give(bucketKey)
		<-served
	}
	waiting.Wait()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	err := domainError(all.take(ctx, bucketKey))
	if err.Code != ledger.CodeUnavailable || all.inLine(bucketKey) != 1 {
		t.Errorf("given up: %v and %d in line, want ledger_unavailable and one", err, all.inLine(bucketKey))
	}
	all.give(bucketKey)
	if len(all.lines) != 0 {
		t.Errorf("%d lines are left", len(all.lines))
	}
}

// Goal: the pools together keep to the bound, as far as it allows one connection
// for each kind of work.
func TestPoolsKeepToTheBound(t *testing.T) {
	for bound, want := range map[int]int32{1: 5, 5: 5, 10: 10, DefaultMaxConnections: DefaultMaxConnections} {
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
