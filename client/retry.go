package client

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"connectrpc.com/connect"
)

// Retry bounds how calls are repeated. What is 0 is taken from DefaultRetry.
type Retry struct {
	// Attempts is how often a call is made at most, the first time included.
	Attempts int
	// Elapsed is for how long a call is begun anew at most.
	Elapsed time.Duration
	// Attempt bounds one attempt.
	Attempt time.Duration
	// FirstPause is the pause after the first attempt; it doubles up to LastPause. Half
	// of each is left to chance, so that callers who failed together do not come back
	// together.
	FirstPause, LastPause time.Duration
}

// DefaultRetry outlasts a database that fails over.
func DefaultRetry() Retry {
	return Retry{
		Attempts: 100, Elapsed: 2 * time.Minute, Attempt: 10 * time.Second,
		FirstPause: 50 * time.Millisecond, LastPause: 3 * time.Second,
	}
}

func (r Retry) orDefault() Retry {
	d := DefaultRetry()
	if r.Attempts <= 0 {
		r.Attempts = d.Attempts
	}
	if r.Elapsed <= 0 {
		r.Elapsed = d.Elapsed
	}
	if r.Attempt <= 0 {
		r.Attempt = d.Attempt
	}
	if r.FirstPause <= 0 {
		r.FirstPause = d.FirstPause
	}
	if r.LastPause <= 0 {
		r.LastPause = d.LastPause
	}
	r.LastPause = max(r.LastPause, r.FirstPause)
	return r
}

// repeat makes a call until it is answered with something that a repetition does not
// change.
func repeat[Q, A any](ctx context.Context, c *Client, call func(context.Context, Q) (A, error), request Q) (A, error) {
	var none A
	started, pause, renewed := time.Now(), c.retry.FirstPause, false
	for attempt := 1; ; attempt++ {
		answer, err := try(ctx, c, call, request)
		if err == nil {
			return answer, nil
		}
		var refused *Error
		if ctx.Err() != nil || !errors.As(err, &refused) {
			return none, err
		}
		if refused.Code == CodeUnauthenticated && !renewed && c.renewToken() {
			renewed = true // the file has been renewed since it was read
			continue
		}
		wait := pause/2 + rand.N(pause/2+1)
		// How long a refusal holds at least is known better by the server.
		wait = max(wait, min(refused.RetryAfter, c.retry.LastPause))
		if !worthRepeating(err, refused) || attempt >= c.retry.Attempts || time.Since(started)+wait > c.retry.Elapsed {
			return none, err
		}
		if !sleep(ctx, wait) {
			return none, err
		}
		pause = min(2*pause, c.retry.LastPause)
	}
}

// worthRepeating leaves out what may succeed later but is the caller's to decide.
func worthRepeating(err error, refused *Error) bool {
	var exceeded *BudgetExceededError
	return refused.Retryable && !errors.As(err, &exceeded)
}

func try[Q, A any](ctx context.Context, c *Client, call func(context.Context, Q) (A, error), request Q) (A, error) {
	attempt, cancel := context.WithTimeout(ctx, c.retry.Attempt)
	defer cancel()
	answer, err := call(attempt, request)
	if err == nil {
		return answer, nil
	}
	if own := ctx.Err(); own != nil {
		return answer, errors.Join(context.Cause(ctx), understand(err))
	}
	return answer, understand(err)
}

// sleep waits; it reports false when the context ended before.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// renewToken reads the token file again and reports whether there is another token in it.
func (c *Client) renewToken() bool {
	if c.tokens == nil {
		return false
	}
	before, err := c.tokens.get(false)
	if err != nil {
		return false
	}
	after, err := c.tokens.get(true)
	return err == nil && after != before
}

// showToken lets every request show the token as it is then.
func (c *Client) showToken(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, request connect.AnyRequest) (connect.AnyResponse, error) {
		token, err := c.tokens.get(false)
		if err != nil {
			return nil, &Error{Code: CodeTokenUnreadable, Message: err.Error(), Retryable: true, cause: err}
		}
		request.Header().Set("Authorization", "Bearer "+token)
		return next(ctx, request)
	}
}
