package client_test

import (
	"context"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/token-lease/operator/client"
	"github.com/token-lease/operator/internal/dataplane/dataplanetest"
	"github.com/token-lease/operator/internal/ledger"
)

// testBound bounds what a test waits for. It only decides how late a failure is noticed.
const testBound = 20 * time.Second

var bucket = client.Bucket{Namespace: dataplanetest.Namespace, Name: dataplanetest.BucketName}

// quick repeats often and soon, as a test needs it.
var quick = client.Retry{Attempts: 50, Elapsed: testBound, Attempt: 2 * time.Second, FirstPause: time.Millisecond, LastPause: 20 * time.Millisecond}

// world is a client of a running data plane, with something between them that can be
// told to fail.
type world struct {
	*dataplanetest.Plane
	client    *client.Client
	tokenFile string
	between   *between
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{Plane: dataplanetest.Start(t), tokenFile: filepath.Join(t.TempDir(), "token")}
	w.between = &between{next: w.HTTP.Transport, calls: map[string]int{}}
	w.writeToken(t, w.Good(dataplanetest.Worker))
	w.client = w.newClient(t)
	return w
}

func (w *world) newClient(t *testing.T) *client.Client {
	t.Helper()
	c, err := client.New(client.Options{
		URL: w.URL, TokenFile: w.tokenFile, HTTPClient: &http.Client{Transport: w.between}, Retry: quick, SettleTimeout: testBound,
	})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func (w *world) writeToken(t *testing.T, token string) {
	t.Helper()
	next := w.tokenFile + ".next"
	if err := os.WriteFile(next, []byte(token+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(next, w.tokenFile); err != nil {
		t.Fatal(err)
	}
}

// wantCounters checks what the ledger has, asked beside the client.
func (w *world) wantCounters(t *testing.T, used, reserved int64) {
	t.Helper()
	s, err := w.Ledger.Inspect(t.Context(), bucket.Namespace+"/"+bucket.Name)
	if err != nil {
		t.Fatal(err)
	}
	if s.UsedTokens != used || s.ReservedTokens != reserved {
		t.Errorf("used %d and reserved %d tokens, want %d and %d", s.UsedTokens, s.ReservedTokens, used, reserved)
	}
}

func (w *world) leases(t *testing.T) []*ledger.Lease {
	t.Helper()
	leases, err := w.Ledger.Store().Leases(t.Context(), bucket.Namespace+"/"+bucket.Name, ledger.LeasePosition{}, 100)
	if err != nil {
		t.Fatal(err)
	}
	return leases
}

// between passes requests on and counts them, and fails where it is told to.
type between struct {
	next http.RoundTripper

	mutex sync.Mutex
	calls map[string]int
	// fail decides about the n-th call of a method: before it is sent or after it was
	// answered, it may return an error instead.
	before, after func(method string, n int) error
}

func (b *between) set(before, after func(method string, n int) error) {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	b.before, b.after = before, after
}

func (b *between) count(method string) int {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	return b.calls[method]
}

// RoundTrip implements http.RoundTripper.
func (b *between) RoundTrip(request *http.Request) (*http.Response, error) {
	method := filepath.Base(request.URL.Path)
	b.mutex.Lock()
	b.calls[method]++
	n, before, after := b.calls[method], b.before, b.after
	b.mutex.Unlock()
	if before != nil {
		if err := before(method, n); err != nil {
			return nil, err
		}
	}
	response, err := b.next.RoundTrip(request)
	if err != nil || after == nil {
		return response, err
	}
	if err := after(method, n); err != nil {
		response.Body.Close()
		return nil, err
	}
	return response, nil
}

// await waits for something that a callback announces.
func await[T any](t *testing.T, what string, c <-chan T) T {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testBound)
	defer cancel()
	select {
	case value := <-c:
		return value
	case <-ctx.Done():
		t.Fatalf("waited %s for %s", testBound, what)
		panic("not reached")
	}
}
