// Package ledgertest is the conformance suite of ledger stores: what one store
// answers every other one answers too. A store passes it with
//
//	func TestConformance(t *testing.T) {
//		ledgertest.Exercise(t, func(t *testing.T) ledgertest.Harness { ... })
//	}
package ledgertest

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

// WorkerName is the worker that a harness configures its store with; the suite
// looks for it in the audit.
const WorkerName = "conformance-worker"

// Harness is an empty store of its own, with the means to play time and another
// hand. It is made anew for each test and cleans up through the test's Cleanup.
type Harness interface {
	// Store is the store under test. It runs as WorkerName and takes its time from
	// Clock only.
	Store() ledger.Store
	// Clock is the injected clock.
	Clock() Clock
	// OverrideLimit writes a bucket's limit without the ledger, as somebody with
	// plain SQL would, also when the value stays equal. It returns once the change
	// is durable.
	OverrideLimit(ctx context.Context, key string, limit int64) error
	// DropBucket removes a bucket's row, and its leases, without the ledger.
	DropBucket(ctx context.Context, key string) error
	// Invariants checks all stored rows, without going through the rules, and
	// describes what does not hold:
	//   - for each bucket, the used tokens are the sum of the actual tokens of its
	//     committed leases, the reserved ones the sum of its reserved leases, the
	//     lease records their number;
	//   - counts lie within 0..2^53-1, and so does used + reserved;
	//   - a bucket that points at a raise points at the only active one of that
	//     bucket, whose epoch is the bucket's and whose applied limit its limit;
	//   - each bucket's audit is numbered 1..n without gaps, and n is the bucket's
	//     audit sequence;
	//   - a bucket with an active or pending raise has a next transition, no later
	//     than the earliest expiry of these.
	Invariants(ctx context.Context) error
}

// Clock is a clock that stands still until it is told otherwise. A store may see
// it through a function or through its database.
type Clock interface {
	// Now is the clock's time, in whole milliseconds, UTC.
	Now() time.Time
	Set(now time.Time)
	Advance(d time.Duration)
}

// NewHarness makes an empty store. It may fail the test.
type NewHarness func(t *testing.T) Harness

// Epoch is where the clocks of NewClock begin.
var Epoch = time.Date(2026, time.November, 30, 18, 0, 0, 0, time.UTC)

// ManualClock is a Clock in this process.
type ManualClock struct {
	mutex sync.Mutex
	now   time.Time
}

var _ Clock = (*ManualClock)(nil)

// NewClock returns a clock that stands at Epoch.
func NewClock() *ManualClock { return &ManualClock{now: Epoch} }

// Now implements Clock.
func (c *ManualClock) Now() time.Time {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	return c.now
}

// Set implements Clock.
func (c *ManualClock) Set(now time.Time) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.now = now.UTC().Truncate(time.Millisecond)
}

// Advance implements Clock.
func (c *ManualClock) Advance(d time.Duration) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.now = c.now.Add(d).Truncate(time.Millisecond)
}
