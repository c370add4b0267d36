package e2e_test

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

const (
	workloads = 3
	// workloadCall bounds one call of the ledger by a workload.
	workloadCall = 10 * time.Second
	// workloadPause is the longest time between two calls of one workload.
	workloadPause = 150 * time.Millisecond
	// openLeases is how many leases a workload holds at most before it settles one.
	openLeases = 5
	// resolveAttempts bounds how often an unknown outcome is asked for at the end.
	resolveAttempts = 20
	// clockMargin allows for the time between an answer and its judgement.
	clockMargin = time.Second
)

// entry is one reservation in the test's own book: what the ledger has
// acknowledged of it, which must be what the rows say in the end.
type entry struct {
	request ledger.Reserve
	lease   ledger.Lease // zero until the reserve was acknowledged
	// pending is what was asked last and not answered: unknown until it is repeated.
	pending ledger.Request
	// settled is the final state that was acknowledged, with the actual figure.
	settled ledger.LeaseState
	actual  int64
	// refused: the reserve was, so there is no lease.
	refused bool
	// lost: the ledger said that it does not know the lease, or its bucket.
	lost bool
}

// book is what the workloads know.
type book struct {
	mu      sync.Mutex
	entries []*entry
	faults  []string
	// excused are the buckets whose row another hand has deleted.
	excused map[string]bool
}

func (b *book) fault(format string, args ...any) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.faults = append(b.faults, fmt.Sprintf(format, args...))
}

func (b *book) excuse(key string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.excused[key] = true
}

func (b *book) isExcused(key string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.excused[key]
}

func (b *book) add(e *entry) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.entries = append(b.entries, e)
}

// workload reserves and settles until the context ends.
type worker struct {
	number int
	random *rand.Rand
	ledger *ledger.Ledger
	book   *book
	keys   []string
	open   []*entry
	count  int
}

func (w *worker) run(ctx context.Context) {
	for ctx.Err() == nil {
		if len(w.open) == 0 || len(w.open) < openLeases && w.random.IntN(100) < 60 {
			w.reserve(ctx)
		} else {
			w.settle(ctx)
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Duration(w.random.Int64N(int64(workloadPause)))):
		}
	}
}

func (w *worker) reserve(ctx context.Context) {
	w.count++
	name := fmt.Sprintf("workload-%d-%d", w.number, w.count)
	e := &entry{request: ledger.Reserve{
		Key: w.keys[w.random.IntN(len(w.keys))], RequestKey: name, Fingerprint: name,
		Tokens: 1 + w.random.Int64N(400), TTL: time.Duration(200+w.random.IntN(4000)) * time.Millisecond,
	}}
	w.book.add(e)
	e.ask(ctx, w.ledger, w.book, e.request)
	if e.lease.ID != "" {
		w.open = append(w.open, e)
	}
}

// settle commits, releases, or leaves a lease to its expiry.
func (w *worker) settle(ctx context.Context) {
	i := w.random.IntN(len(w.open))
	e := w.open[i]
	w.open = append(w.open[:i], w.open[i+1:]...)
	switch roll := w.random.IntN(100); {
	case roll < 60:
		actual := w.random.Int64N(e.request.Tokens/8 + 1)
		if roll < 3 {
			actual = e.request.Tokens * 2
		}
		e.ask(ctx, w.ledger, w.book, ledger.Commit{Key: e.request.Key, LeaseID: e.lease.ID, ActualTokens: actual})
	case roll < 85:
		e.ask(ctx, w.ledger, w.book, ledger.Release{Key: e.request.Key, LeaseID: e.lease.ID})
	}
}

// ask makes one call and notes what is known after it. "Unavailable" says that
// nothing was changed, and is taken at its word; only an unknown outcome stays
// open.
func (e *entry) ask(ctx context.Context, l *ledger.Ledger, b *book, request ledger.Request) {
	// A workload that is told to end still waits for its answer.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), workloadCall)
	defer cancel()
	result := l.Do(ctx, request)[0]
	e.pending = nil
	code := ledger.Code("")
	if result.Err != nil {
		code = result.Err.Code
	}
	switch request := request.(type) {
	case ledger.Reserve:
		e.reserved(b, code, result)
	case ledger.Commit:
		e.committed(b, code, request.ActualTokens)
	case ledger.Release:
		e.released(b, code, result)
	}
	if code == ledger.CodeOutcomeUnknown {
		e.pending = request
	}
}

func (e *entry) reserved(b *book, code ledger.Code, result ledger.Result) {
	switch code {
	case "":
		e.lease = *result.Lease
		admitted(b, result)
	case ledger.CodeOutcomeUnknown:
	case ledger.CodeUnavailable, ledger.CodeBudgetExceeded, ledger.CodeBucketNotFound, ledger.CodeBucketClosed, ledger.CodeBucketRowMissing:
		e.refused = true
	default:
		b.fault("reserve %s on %s: %v", e.request.RequestKey, e.request.Key, result.Err)
	}
}

// admitted holds an answer to promise 1. An answer that was repeated shows the
// bucket of a later moment.
func admitted(b *book, result ledger.Result) {
	l, s := result.Lease, result.Snapshot
	if !s.UpdatedAt.Equal(l.CreatedAt) {
		return
	}
	if s.UsedTokens+s.ReservedTokens > s.Limit {
		b.fault("promise 1: %s was admitted on %s with %d used and %d reserved of %d", l.ID, l.BucketKey, s.UsedTokens, s.ReservedTokens, s.Limit)
	}
	if r := s.ActiveRaise; r != nil && (!l.CreatedAt.Before(r.ExpiresAt) || l.RaiseID != r.ID) {
		b.fault("promise 1: %s was admitted on %s at %s under the raise %s, which ends at %s (the lease says %q)",
			l.ID, l.BucketKey, l.CreatedAt, r.ID, r.ExpiresAt, l.RaiseID)
	}
}

func (e *entry) committed(b *book, code ledger.Code, actual int64) {
	switch code {
	case "":
		e.settled, e.actual = ledger.LeaseCommitted, actual
	case ledger.CodeLeaseExpired:
		e.expired(b, "commit")
	case ledger.CodeOutcomeUnknown, ledger.CodeUnavailable, ledger.CodeCommitExceedsBudget:
	default:
		e.unknown(b, "commit", code)
	}
}

func (e *entry) released(b *book, code ledger.Code, result ledger.Result) {
	switch code {
	case "":
		if e.settled = result.Lease.State; e.settled == ledger.LeaseExpired {
			e.expired(b, "release")
		}
	case ledger.CodeOutcomeUnknown, ledger.CodeUnavailable:
	default:
		e.unknown(b, "release", code)
	}
}

// expired judges the answer that a lease has expired. The call may have waited for
// its answer, so only one that came too early is a fault for certain.
func (e *entry) expired(b *book, verb string) {
	e.settled = ledger.LeaseExpired
	if time.Now().Before(e.lease.ExpiresAt.Add(-clockMargin)) {
		b.fault("%s of %s: expired before %s", verb, e.lease.ID, e.lease.ExpiresAt)
	}
}

// unknown judges an answer that denies the lease: it may go with its bucket, but a
// bucket goes only once nothing is reserved, unless another hand deleted it.
func (e *entry) unknown(b *book, verb string, code ledger.Code) {
	e.lost = true
	switch code {
	case ledger.CodeLeaseNotFound, ledger.CodeBucketNotFound, ledger.CodeBucketRowMissing:
	default:
		b.fault("%s of %s on %s: %s", verb, e.lease.ID, e.lease.BucketKey, code)
		return
	}
	if time.Now().Before(e.lease.ExpiresAt.Add(-clockMargin)) && !b.isExcused(e.lease.BucketKey) {
		b.fault("%s of %s on %s: %s, although it was reserved until %s", verb, e.lease.ID, e.lease.BucketKey, code, e.lease.ExpiresAt)
	}
}

// resolve repeats what stayed unknown until it is known.
func (b *book) resolve(ctx context.Context, l *ledger.Ledger) {
	for _, e := range b.entries {
		for range resolveAttempts {
			if e.pending == nil {
				break
			}
			e.ask(ctx, l, b, e.pending)
		}
		if e.pending != nil {
			b.fault("%s: still unknown: %+v", e.request.RequestKey, e.pending)
		}
	}
}

// hash is the second part of the IDs of the request's leases, whether or not one was
// answered.
func (e *entry) hash() string {
	hash := sha256.Sum256(fmt.Appendf(nil, "[%q,%q]", e.request.Key, e.request.RequestKey))
	return base64.RawURLEncoding.EncodeToString(hash[:])
}

// compare holds the rows against the book: an acknowledged effect is there, what
// was refused is not, and nothing is there that nobody asked for.
func (b *book) compare(leases, buckets []row) {
	opened := map[string]time.Time{}
	for _, r := range buckets {
		opened[r.text("bucket_key")], _ = time.Parse(time.RFC3339Nano, r.text("created_at"))
	}
	rows := map[string]row{}
	for _, r := range leases {
		if _, open := opened[r.text("bucket_key")]; open {
			_, hash, _ := strings.Cut(r.text("lease_id"), ".")
			rows[hash] = r
		}
	}
	for _, e := range b.entries {
		id := e.request.RequestKey
		found, there := rows[e.hash()]
		delete(rows, e.hash())
		since, open := opened[e.request.Key]
		switch {
		case e.lease.ID == "" && there:
			b.fault("promise 3: the reserve %s was answered with a refusal, and the lease is there: %v", id, found)
		case e.lease.ID == "" || !open || e.lease.CreatedAt.Before(since):
			if there {
				b.fault("promise 3: %s is older than its bucket: %v", id, found)
			}
		case !there:
			b.fault("promise 3: the lease %s was acknowledged, and is not there", id)
		default:
			b.compareOne(e, found)
		}
	}
	for id, r := range rows {
		b.fault("promise 3: nobody asked for the lease %s: %v", id, r)
	}
}

func (b *book) compareOne(e *entry, found row) {
	state, actual := found.text("state"), found.text("actual_tokens")
	var ok bool
	switch e.settled {
	case ledger.LeaseCommitted:
		ok = state == "committed" && actual == fmt.Sprint(e.actual)
	case ledger.LeaseReleased, ledger.LeaseExpired:
		ok = state == string(e.settled)
	default:
		// What was answered with "unavailable" was not done.
		ok = state == "reserved" || state == "expired"
	}
	if !ok || found.text("reserved_tokens") != fmt.Sprint(e.request.Tokens) || e.lost {
		b.fault("promise 3: the book says %q with %d tokens of %s (lost: %v), and the row says %v", e.settled, e.actual, e.request.RequestKey, e.lost, found)
	}
}
