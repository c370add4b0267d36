package e2e_test

import (
	"context"
	"testing"
	"time"
)

const (
	// waitBound is how long a state may take. It only decides how late a broken
	// product is noticed, so it is generous.
	waitBound = 3 * time.Minute
	waitStep  = 100 * time.Millisecond
	// callBound bounds one call to a server.
	callBound = 30 * time.Second
)

// waitFor waits until a state is reached. look says whether it is, and what was
// seen, which is shown when time is up.
func waitFor(t *testing.T, what string, look func() (done bool, state string)) {
	t.Helper()
	deadline := time.Now().Add(waitBound)
	for {
		done, state := look()
		if done {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waited %s for: %s\nlast seen: %s", waitBound, what, state)
		}
		time.Sleep(waitStep)
	}
}

// call gives a context for one call to a server.
func call(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), callBound)
	t.Cleanup(cancel)
	return ctx
}

// stage names a part of a story in the log, so that a failure shows where.
func stage(t *testing.T, text string) {
	t.Helper()
	t.Log("— " + text)
}
