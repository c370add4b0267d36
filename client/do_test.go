package client_test

import (
	"context"
	"errors"
	"net/http"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/token-lease/operator/client"
	"github.com/token-lease/operator/internal/dataplane/dataplanetest"
	"github.com/token-lease/operator/internal/ledger"
)

var errWork = errors.New("the model refused")

func request(tokens int64) client.Request { return client.Request{Bucket: bucket, Tokens: tokens} }

// Goal: however work ends, what it spent is booked and nothing stays reserved.
func TestDo(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		actual int64
		err    error
		used   int64
	}{
		"done": {actual: 7, used: 7}, "done for nothing": {actual: 0}, "more than estimated": {actual: 25, used: 25},
		"failed": {err: errWork}, "failed after spending": {actual: 4, err: errWork, used: 4},
		"failed with a figure that is none": {actual: -4, err: errWork},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			err := w.client.Do(t.Context(), request(10), func(context.Context) (int64, error) {
				w.wantCounters(t, 0, 10)
				return c.actual, c.err
			})
			if !errors.Is(err, c.err) || (err != nil) != (c.err != nil) {
				t.Errorf("%v, want %v", err, c.err)
			}
			w.wantCounters(t, c.used, 0)
		})
	}
	t.Run("a figure that is none", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		if err := w.client.Do(t.Context(), request(10), func(context.Context) (int64, error) { return -1, nil }); err == nil {
			t.Error("accepted")
		}
		w.wantCounters(t, 0, 0)
	})
	t.Run("refused", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		err := w.client.Do(t.Context(), request(1001), func(context.Context) (int64, error) {
			t.Error("the work was done")
			return 0, nil
		})
		if !client.HasCode(err, client.CodeBudgetExceeded) {
			t.Error(err)
		}
	})
}

// Goal: a panic, and a goroutine that ends, go on as they were and leave nothing
// reserved.
func TestDoPanics(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	func() {
		defer func() {
			if got := recover(); got != "broken" {
				t.Errorf("recovered %v", got)
			}
		}()
		_ = w.client.Do(t.Context(), request(10), func(context.Context) (int64, error) { panic("broken") })
	}()
	w.wantCounters(t, 0, 0)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = w.client.Do(t.Context(), request(10), func(context.Context) (int64, error) {
			runtime.Goexit()
			return 0, nil
		})
	}()
	await(t, "the goroutine to end", ended)
	w.wantCounters(t, 0, 0)
	for _, lease := range w.leases(t) {
		if lease.State != ledger.LeaseReleased {
			t.Errorf("a lease is %s", lease.State)
		}
	}
}

// Goal: a caller that gives up while work runs gets its reservation back, or what was
// spent booked; and one that gives up while it reserves leaves nothing behind.
func TestDoCancelled(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for spent, used := range map[int64]int64{0: 0, 3: 3} {
		ctx, cancel := context.WithCancel(t.Context())
		err := w.client.Do(ctx, request(10), func(ctx context.Context) (int64, error) {
			cancel()
			<-ctx.Done()
			return spent, ctx.Err()
		})
		if !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		s, inspectErr := w.Ledger.Inspect(t.Context(), bucket.Namespace+"/"+bucket.Name)
		if inspectErr != nil || s.ReservedTokens != 0 || spent > 0 && s.UsedTokens != used {
			t.Errorf("spent %d: %+v, %v", spent, s, inspectErr)
		}
	}

	ctx, cancel := context.WithCancel(t.Context())
	w.between.set(nil, func(method string, _ int) error {
		if method == "Reserve" && ctx.Err() == nil {
			cancel() // the reservation is made, and nobody waits for the answer
			return ctx.Err()
		}
		return nil
	})
	err := w.client.Do(ctx, request(10), func(context.Context) (int64, error) {
		t.Error("the work was done")
		return 0, nil
	})
	if !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	w.wantCounters(t, 3, 0)
}

// Goal: a reservation whose answers are all lost leaves nothing behind once the client
// stops repeating it, and a caller that had given up before reserves nothing.
func TestDoGivesUpReserving(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	work := func(context.Context) (int64, error) {
		t.Error("the work was done")
		return 0, nil
	}
	w.between.set(nil, func(method string, n int) error {
		if method == "Reserve" && n <= quick.Attempts {
			return errCut
		}
		return nil
	})
	if err := w.client.Do(t.Context(), request(10), work); !client.HasCode(err, client.CodeServerUnreachable) {
		t.Error(err)
	}
	w.wantCounters(t, 0, 0)
	if leases := w.leases(t); len(leases) != 1 || leases[0].State != ledger.LeaseReleased {
		t.Errorf("left behind: %+v", leases)
	}

	// Under a key of its own somebody else may be at work.
	named := request(10)
	named.RequestKey = "job-19"
	if _, err := w.client.Reserve(t.Context(), named); err != nil {
		t.Fatal(err)
	}
	begin := w.between.count("Reserve")
	w.between.set(nil, func(method string, n int) error {
		if method == "Reserve" && n <= begin+quick.Attempts {
			return errCut
		}
		return nil
	})
	if err := w.client.Do(t.Context(), named, work); !client.HasCode(err, client.CodeServerUnreachable) {
		t.Error(err)
	}
	w.wantCounters(t, 0, 10)

	before := w.between.count("Reserve")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := w.client.Do(ctx, request(10), work); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if n := w.between.count("Reserve"); n != before {
		t.Errorf("a caller that had given up asked %d times", n-before)
	}
}

// Goal: an extension that is never answered leaves time for another before the lease ends.
// Method: attempts may take far longer than the lease lives.
func TestDoExtensionHangs(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	patient := quick
	patient.Attempt = time.Hour
	c, err := client.New(client.Options{
		URL: w.URL, TokenFile: w.tokenFile, HTTPClient: &http.Client{Transport: hanging{w.between}}, Retry: patient, SettleTimeout: testBound,
	})
	if err != nil {
		t.Fatal(err)
	}
	extended := make(chan struct{}, 1)
	w.between.set(nil, func(method string, _ int) error {
		if method == "Extend" {
			select {
			case extended <- struct{}{}:
			default:
			}
		}
		return nil
	})
	r := request(10)
	r.TTL = 3 * time.Second
	err = c.Do(t.Context(), r, func(ctx context.Context) (int64, error) {
		await(t, "another extension", extended)
		return 7, context.Cause(ctx)
	})
	if err != nil {
		t.Error(err)
	}
	w.wantCounters(t, 7, 0)
}

// hanging never answers the first extension.
type hanging struct{ *between }

// RoundTrip implements http.RoundTripper.
func (h hanging) RoundTrip(request *http.Request) (*http.Response, error) {
	if filepath.Base(request.URL.Path) == "Extend" && h.count("Hung") == 0 {
		h.mutex.Lock()
		h.calls["Hung"]++
		h.mutex.Unlock()
		<-request.Context().Done()
		return nil, request.Context().Err()
	}
	return h.between.RoundTrip(request)
}

// Goal: work that runs longer than the TTL keeps its lease.
// Method: the ledger's clock is moved on by most of a TTL each time that an extension has
// arrived, until the lease is many times as old as its TTL.
func TestDoOutlivesTTL(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	extended := make(chan struct{})
	w.between.set(nil, func(method string, _ int) error {
		if method == "Extend" {
			select {
			case extended <- struct{}{}:
			default:
			}
		}
		return nil
	})
	const ttl = 300 * time.Millisecond
	r := request(10)
	r.TTL = ttl
	err := w.client.Do(t.Context(), r, func(ctx context.Context) (int64, error) {
		for range 10 {
			await(t, "an extension", extended)
			w.Clock.Advance(ttl * 2 / 3)
		}
		return 7, ctx.Err()
	})
	if err != nil {
		t.Error(err)
	}
	w.wantCounters(t, 7, 0)
	if lease := w.leases(t)[0]; lease.ExpiresAt.Sub(lease.CreatedAt) < 5*ttl {
		t.Errorf("the lease was kept from %s to %s only", lease.CreatedAt, lease.ExpiresAt)
	}
}

// Goal: work learns that its lease is lost, by the end of its context and the reason.
func TestDoLosesLease(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := request(10)
	r.TTL = 300 * time.Millisecond
	err := w.client.Do(t.Context(), r, func(ctx context.Context) (int64, error) {
		w.Clock.Advance(time.Minute)
		await(t, "the context to end", ctx.Done())
		if cause := context.Cause(ctx); !client.HasCode(cause, client.CodeLeaseExpired) {
			t.Errorf("the cause is %v", cause)
		}
		return 0, context.Cause(ctx)
	})
	if !client.HasCode(err, client.CodeLeaseExpired) {
		t.Error(err)
	}
	w.wantCounters(t, 0, 0)
}

// Goal: settling gets through an outage that begins while work runs, also when the caller
// has given up meanwhile.
func TestDoSettlesThroughOutage(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx, cancel := context.WithCancel(t.Context())
	err := w.client.Do(ctx, request(10), func(context.Context) (int64, error) {
		w.API.Set(func(a *dataplanetest.APIServer) { a.Down = true })
		w.Clock.Advance(40 * time.Second) // what was known of the caller is forgotten
		w.between.set(func(method string, n int) error {
			if method == "Commit" && n == 6 {
				w.API.Set(func(a *dataplanetest.APIServer) { a.Down = false })
			}
			return nil
		}, nil)
		cancel()
		return 7, nil
	})
	if err != nil {
		t.Error(err)
	}
	w.wantCounters(t, 7, 0)
}

// Goal: work that is named by a key is done once: a repetition after it was settled does
// not run, and one that finds the lease of a process that died goes on with it.
func TestDoOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := request(10)
	r.RequestKey = "job-17"
	runs := 0
	work := func(context.Context) (int64, error) { runs++; return 7, nil }
	if _, err := w.client.Reserve(t.Context(), r); err != nil { // and the process dies
		t.Fatal(err)
	}
	if err := w.client.Do(t.Context(), r, work); err != nil {
		t.Fatal(err)
	}
	if err := w.client.Do(t.Context(), r, work); !client.HasCode(err, client.CodeLeaseCommitted) {
		t.Errorf("the repetition: %v", err)
	}
	if runs != 1 {
		t.Errorf("the work was done %d times", runs)
	}
	w.wantCounters(t, 7, 0)
}

// Goal: a figure that the bucket has no room for is told and put on record, and the lease
// is not given back as if nothing had been spent.
func TestDoExceedsBudget(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	err := w.client.Do(t.Context(), request(10), func(context.Context) (int64, error) { return 1001, nil })
	if !client.HasCode(err, client.CodeCommitExceedsBudget) {
		t.Error(err)
	}
	w.wantCounters(t, 0, 10)
	if lease := w.leases(t)[0]; lease.RefusedTokens == nil || *lease.RefusedTokens != 1001 {
		t.Errorf("the lease has %+v", lease)
	}
	w.Clock.Advance(time.Minute)
	w.wantCounters(t, 0, 0)
}

// Goal: work that goes on with the lease of a process that died keeps it, however close to
// its end it was, and although it had been extended far beyond its TTL before.
func TestDoTakesOver(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := request(10)
	r.RequestKey, r.TTL = "job-18", 300*time.Millisecond
	lease, err := w.client.Reserve(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	if lease, err = w.client.Extend(t.Context(), bucket, lease.ID, 10*time.Minute); err != nil || lease.TTL != r.TTL {
		t.Fatalf("extended %+v, %v", lease, err)
	}
	w.Clock.Set(lease.ExpiresAt.Add(-time.Millisecond)) // and the process dies
	extended := make(chan struct{})
	w.between.set(nil, func(method string, _ int) error {
		if method == "Extend" {
			select {
			case extended <- struct{}{}:
			default:
			}
		}
		return nil
	})
	err = w.client.Do(t.Context(), r, func(ctx context.Context) (int64, error) {
		for range 5 {
			await(t, "an extension", extended)
			w.Clock.Advance(r.TTL / 2)
		}
		return 7, context.Cause(ctx)
	})
	if err != nil {
		t.Error(err)
	}
	w.wantCounters(t, 7, 0)
}
