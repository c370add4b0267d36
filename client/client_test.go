package client_test

import (
	"context"
	"errors"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/token-lease/operator/client"
	"github.com/token-lease/operator/internal/dataplane/dataplanetest"
)

var errCut = errors.New("connection reset by peer")

// Goal: each verb does what it says, and a refusal is an error that a program can look
// into.
func TestVerbs(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := t.Context()
	lease, err := w.client.Reserve(ctx, client.Request{Bucket: bucket, Tokens: 400, TTL: 30 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	if lease.State != client.Reserved || lease.ReservedTokens != 400 || lease.ExpiresAt.Sub(lease.CreatedAt) != 30*time.Second {
		t.Errorf("reserved %+v", lease)
	}
	if lease, err = w.client.Extend(ctx, bucket, lease.ID, time.Minute); err != nil || lease.ExpiresAt.Sub(lease.CreatedAt) != time.Minute {
		t.Errorf("extended %+v, %v", lease, err)
	}
	_, err = w.client.Reserve(ctx, client.Request{Bucket: bucket, Tokens: 601})
	var exceeded *client.BudgetExceededError
	if !errors.As(err, &exceeded) || exceeded.RequestedTokens != 601 || exceeded.AvailableTokens != 600 || exceeded.Refusal.RetryAfter != time.Minute {
		t.Errorf("one token too many: %v", err)
	}
	var refusal *client.Error
	if !errors.As(err, &refusal) || refusal.Code != client.CodeBudgetExceeded {
		t.Errorf("it is no *Error either: %v", err)
	}
	if lease, err = w.client.Commit(ctx, bucket, lease.ID, 350); err != nil || lease.State != client.Committed || *lease.ActualTokens != 350 {
		t.Errorf("committed %+v, %v", lease, err)
	}
	if _, err = w.client.Release(ctx, bucket, lease.ID); !client.HasCode(err, client.CodeLeaseCommitted) {
		t.Errorf("release of what was committed: %v", err)
	}
	if figures, err := w.client.Figures(ctx, bucket); err != nil || figures != (client.Figures{Limit: 1000, Used: 350, Available: 650}) {
		t.Errorf("figures %+v, %v", figures, err)
	}
	if _, err = w.client.Figures(ctx, client.Bucket{Namespace: bucket.Namespace, Name: "absent"}); !client.HasCode(err, client.CodeBucketNotFound) {
		t.Errorf("a bucket that is not there: %v", err)
	}
}

// Goal: a lost answer is no lost reservation and no second one: the key is made once and
// kept across repetitions. The same holds for settling.
func TestLostAnswers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.between.set(
		func(_ string, n int) error { // two requests do not arrive
			if n <= 2 {
				return errCut
			}
			return nil
		},
		func(_ string, n int) error { // the answers to two more are lost
			if n <= 4 {
				return errCut
			}
			return nil
		})
	lease, err := w.client.Reserve(t.Context(), client.Request{Bucket: bucket, Tokens: 10})
	if err != nil {
		t.Fatal(err)
	}
	w.wantCounters(t, 0, 10)
	if _, err := w.client.Commit(t.Context(), bucket, lease.ID, 7); err != nil {
		t.Fatal(err)
	}
	w.wantCounters(t, 7, 0)
	if got := len(w.leases(t)); got != 1 {
		t.Errorf("%d leases were made", got)
	}
	if n := w.between.count("Reserve"); n != 5 {
		t.Errorf("the reservation was asked for %d times, want 5", n)
	}
}

// Goal: what a repetition does not change is not repeated, and what is repeated ends:
// after the attempts, after the time, or with the context.
func TestRetriesAreBounded(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	if _, err := w.client.Reserve(t.Context(), client.Request{Bucket: bucket, Tokens: 1001}); !client.HasCode(err, client.CodeBudgetExceeded) {
		t.Error(err)
	}
	if _, err := w.client.Reserve(t.Context(), client.Request{Bucket: bucket, Tokens: -1}); !client.HasCode(err, client.CodeInvalidInput) {
		t.Error(err)
	}
	if n := w.between.count("Reserve"); n != 2 {
		t.Errorf("two refusals took %d requests", n)
	}
	w.between.set(func(string, int) error { return errCut }, nil)
	if _, err := w.client.Figures(t.Context(), bucket); !client.HasCode(err, client.CodeServerUnreachable) || !errors.Is(err, errCut) {
		t.Errorf("nobody answers: %v", err)
	}
	if n := w.between.count("GetBucket"); n != quick.Attempts {
		t.Errorf("%d attempts, want %d", n, quick.Attempts)
	}
	ctx, cancel := context.WithCancel(t.Context())
	w.between.set(func(string, int) error { cancel(); return errCut }, nil)
	before := w.between.count("GetBucket")
	if _, err := w.client.Figures(ctx, bucket); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	if n := w.between.count("GetBucket"); n != before+1 {
		t.Errorf("%d attempts after the caller had given up", n-before-1)
	}
}

// Goal: while the API server cannot vouch for the caller, the server says that it may be
// repeated, and the client gets through once it can.
func TestRetriedThrough(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.API.Set(func(a *dataplanetest.APIServer) { a.Down = true })
	w.between.set(func(_ string, n int) error {
		if n == 5 {
			w.API.Set(func(a *dataplanetest.APIServer) { a.Down = false })
		}
		return nil
	}, nil)
	if _, err := w.client.Reserve(t.Context(), client.Request{Bucket: bucket, Tokens: 1}); err != nil {
		t.Error(err)
	}
	if n := w.between.count("Reserve"); n < 5 {
		t.Errorf("it got through at attempt %d", n)
	}
}

// Goal: a token that was renewed in its file is shown as soon as the old one is refused.
func TestTokenIsReadAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	if _, err := w.client.Figures(t.Context(), bucket); err != nil {
		t.Fatal(err)
	}
	w.Clock.Advance(2 * time.Hour) // the token that the client holds has expired
	if _, err := w.client.Figures(t.Context(), bucket); !client.HasCode(err, client.CodeUnauthenticated) {
		t.Errorf("with the old token: %v", err)
	}
	w.writeToken(t, w.Good(dataplanetest.Worker))
	if _, err := w.client.Figures(t.Context(), bucket); err != nil {
		t.Errorf("with the new token: %v", err)
	}
}

// Goal: a client that could not work, or would show its token to anybody, is not made.
func TestNew(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for what, o := range map[string]client.Options{
		"without TLS": {URL: strings.Replace(w.URL, "https", "http", 1), TokenFile: w.tokenFile},
		"no URL":      {TokenFile: w.tokenFile}, "no token": {URL: w.URL}, "no such token": {URL: w.URL, TokenFile: "absent"},
		"no such certificates": {URL: w.URL, TokenFile: w.tokenFile, CAFile: "absent"},
		"no certificates":      {URL: w.URL, TokenFile: w.tokenFile, CAFile: w.tokenFile},
	} {
		if _, err := client.New(o); err == nil {
			t.Errorf("%s: a client is made", what)
		}
	}
	c, err := client.New(client.Options{URL: w.URL, TokenFile: w.tokenFile, Retry: client.Retry{Attempts: 1}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Figures(t.Context(), bucket); !client.HasCode(err, client.CodeServerUnreachable) || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("a server that nobody vouches for: %v", err)
	}
}

// Goal: an answer that is none of a LedgerService is an error, not a surprise.
func TestOtherServer(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.between.next = http.NewFileTransport(http.Dir(filepath.Dir(w.tokenFile)))
	c, err := client.New(client.Options{
		URL: w.URL, TokenFile: w.tokenFile, HTTPClient: &http.Client{Transport: w.between}, Retry: client.Retry{Attempts: 2, FirstPause: time.Millisecond},
	})
	if err != nil {
		t.Fatal(err)
	}
	var refusal *client.Error
	if _, err := c.Figures(t.Context(), bucket); !errors.As(err, &refusal) {
		t.Errorf("%v is no *Error", err)
	}
}
