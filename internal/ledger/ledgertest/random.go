package ledgertest

import (
	"flag"
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/token-lease/operator/internal/ledger"
)

// randomChecks bounds the random test unless -rapid.checks says otherwise; each
// check costs as much as there were before it, so a few hundred are a lot. A
// failure prints the seed that repeats it.
const randomChecks = "30"

// testRandomOperations checks what must hold in every history.
//
// Goal: after any operations of any hand at any time, the stored rows agree, a
// model of the counters and of the normal limit predicts the answers, a raise is
// in force only within its window, and a touch leaves nothing due.
// Method: random histories on one bucket each, in one store, checked after each
// step.
func testRandomOperations(t *testing.T, newHarness NewHarness) {
	bound := flag.Lookup("rapid.checks")
	if bound != nil && bound.Value.String() == bound.DefValue {
		if err := bound.Value.Set(randomChecks); err != nil {
			t.Fatalf("bounding the checks: %v", err)
		}
		defer func() { _ = bound.Value.Set(bound.DefValue) }()
	}
	harness := newHarness(t)
	histories := 0
	rapid.Check(t, func(rt *rapid.T) {
		histories++
		h := newHistory(worldOn(t.Context(), rt, harness), histories)
		rt.Repeat(map[string]func(*rapid.T){
			"":             func(*rapid.T) { h.check() },
			"wait":         h.wait,
			"wait long":    h.waitLong,
			"reserve":      h.reserve,
			"replay":       h.replay,
			"commit":       h.commit,
			"release":      h.release,
			"extend":       h.extend,
			"purge":        h.purge,
			"several":      h.several,
			"set limit":    h.setLimit,
			"declare":      h.declare,
			"another hand": h.anotherHand,
			"raise":        h.storeRaise,
			"shorten":      h.shorten,
			"revoke":       h.revoke,
		})
	})
}

// history is a model of one bucket: its leases and the limit that it has without
// a raise. It knows nothing of how raises come and go.
type history struct {
	w         *world
	key       string
	namespace string

	base, declared int64
	recording      bool
	period         ledger.PeriodSpec
	// periodEnds is the end of the period that was running at the last look.
	periodEnds time.Time
	leases     []*modelLease
	raises     []ledger.StoreRaise
}

type modelLease struct {
	request   ledger.Reserve
	id        string
	state     ledger.LeaseState
	tokens    int64
	actual    int64
	expiresAt time.Time
	// past is set once the period has ended in which it was reserved.
	past bool
	// purged is set once it is gone.
	purged bool
}

func newHistory(w *world, number int) *history {
	h := &history{w: w, key: fmt.Sprintf("random/%d", number), namespace: fmt.Sprintf("random-%d", number), base: 100, declared: 100}
	w.owner.Namespace = h.namespace
	w.must(h.declaration(100, ledger.ModeEnforce))
	return h
}

func (h *history) declaration(limit int64, mode ledger.Mode) ledger.ApplyDeclared {
	request := h.w.declaration(limit, withMode(mode))
	request.Key = h.key
	if h.recording {
		recording(&request)
	}
	request.Declaration.Period = h.period
	request.Declaration.Settings.Retention = randomRetention
	return request
}

// touch performs what is due in the ledger and in the model, and answers what the
// bucket is then.
func (h *history) touch() *ledger.Snapshot {
	snapshot := h.w.must(ledger.Inspect{Key: h.key}).Snapshot
	for _, lease := range h.leases {
		if lease.state == ledger.LeaseReserved && !lease.expiresAt.After(h.w.now()) {
			lease.state = ledger.LeaseExpired
		}
		if !h.periodEnds.IsZero() && !h.periodEnds.After(h.w.now()) {
			lease.past = true
		}
	}
	h.periodEnds = time.Time{}
	if current := snapshot.CurrentPeriod; current != nil {
		h.periodEnds = current.EndsAt
	}
	return snapshot
}

func (h *history) counters() (used, reserved int64) {
	for _, lease := range h.leases {
		if lease.past {
			continue
		}
		switch lease.state {
		case ledger.LeaseReserved:
			reserved += lease.tokens
		case ledger.LeaseCommitted:
			used += lease.actual
		case ledger.LeaseReleased, ledger.LeaseExpired:
		}
	}
	return used, reserved
}

func (h *history) check() {
	w := h.w
	s := h.touch()
	used, reserved := h.counters()
	if s.UsedTokens != used || s.ReservedTokens != reserved || s.LeaseRecords != h.kept() {
		w.Fatalf("used %d, reserved %d, records %d; the model says %d, %d, %d",
			s.UsedTokens, s.ReservedTokens, s.LeaseRecords, used, reserved, h.kept())
	}
	if s.AvailableTokens != max(0, s.Limit-used-reserved) || s.OverLimitTokens != max(0, used+reserved-s.Limit) {
		w.Fatalf("the figures contradict each other: %+v", s)
	}
	if s.BaseLimit != h.base || *s.DeclaredLimit != h.declared {
		w.Fatalf("the limit without a raise is %d of %d declared; the model says %d of %d", s.BaseLimit, *s.DeclaredLimit, h.base, h.declared)
	}
	if r := s.ActiveRaise; r != nil {
		if w.now().Before(r.StartsAt) || !w.now().Before(r.ExpiresAt) || s.Limit != *r.AppliedLimit || s.Limit < h.base {
			w.Fatalf("at %v the limit is %d by %+v", w.now(), s.Limit, r)
		}
	} else if s.Limit != h.base {
		w.Fatalf("no raise is active, and the limit is %d, not %d", s.Limit, h.base)
	}
	w.invariants()
	w.sweep(1000)
	if sweep := w.sweep(1000); len(sweep.Touched) != 0 || sweep.NextIn == 0 {
		w.Fatalf("a second sweep finds %v due, the next in %v", sweep.Touched, sweep.NextIn)
	}
	if again := w.stored(h.key); again.Revision != s.Revision {
		w.Fatalf("a touch left something due: revision %d became %d", s.Revision, again.Revision)
	}
}

func (h *history) wait(t *rapid.T) {
	h.w.Clock().Advance(time.Duration(rapid.IntRange(1, 90_000).Draw(t, "milliseconds")) * time.Millisecond)
}

// waitLong lets periods end, some of which nobody touches.
func (h *history) waitLong(t *rapid.T) {
	h.w.Clock().Advance(time.Duration(rapid.IntRange(1, 36*60).Draw(t, "minutes")) * time.Minute)
}

func (h *history) reserve(t *rapid.T) {
	s := h.touch()
	request := ledger.Reserve{
		Key: h.key, RequestKey: h.w.next("request"), Fingerprint: "f",
		Tokens: rapid.Int64Range(1, 150).Draw(t, "tokens"),
		TTL:    time.Duration(rapid.IntRange(1, 60).Draw(t, "seconds")) * time.Second,
	}
	result := h.w.do(request)[0]
	if request.Tokens > s.AvailableTokens {
		h.w.wantRefusal(result, ledger.CodeBudgetExceeded, map[string]any{"availableTokens": s.AvailableTokens})
		return
	}
	if result.Err != nil {
		t.Fatalf("%d of %d tokens were refused: %v", request.Tokens, s.AvailableTokens, result.Err)
	}
	h.leases = append(h.leases, &modelLease{
		request: request, id: result.Lease.ID, state: ledger.LeaseReserved, tokens: request.Tokens, expiresAt: h.w.now().Add(request.TTL),
	})
}

func (h *history) pick(t *rapid.T) *modelLease {
	if len(h.leases) == 0 {
		t.Skip("no lease was made yet") // rapid's word for an action that does not apply: it draws another one
	}
	lease := rapid.SampledFrom(h.leases).Draw(t, "lease")
	if lease.purged {
		t.Skip("the lease is gone") // as above: another action is drawn, and no test is skipped
	}
	return lease
}

func (h *history) replay(t *rapid.T) {
	lease := h.pick(t)
	h.touch()
	request := lease.request
	if got := h.w.must(request).Lease; got.ID != lease.id || got.State != lease.state {
		t.Fatalf("the replay answers %+v, want %s in state %s", got, lease.id, lease.state)
	}
	request.Tokens++
	h.w.refuse(request, ledger.CodeIdempotencyConflict, nil)
}

func (h *history) commit(t *rapid.T) {
	lease := h.pick(t)
	s := h.touch()
	actual := rapid.Int64Range(0, 200).Draw(t, "actual")
	if lease.past && !h.recording {
		// What an ended period has left, the model does not know; what was reserved fits.
		actual = min(actual, lease.tokens)
	}
	result := h.w.do(ledger.Commit{Key: h.key, LeaseID: lease.id, ActualTokens: actual})[0]
	var want ledger.Code
	switch lease.state {
	case ledger.LeaseReserved:
		if room := s.Limit - s.UsedTokens - s.ReservedTokens + lease.tokens; !h.recording && !lease.past && actual > max(room, lease.tokens) {
			want = ledger.CodeCommitExceedsBudget
		} else {
			lease.state, lease.actual = ledger.LeaseCommitted, actual
		}
	case ledger.LeaseCommitted:
		if actual != lease.actual {
			want = ledger.CodeCommitConflict
		}
	case ledger.LeaseReleased:
		want = ledger.CodeLeaseReleased
	case ledger.LeaseExpired:
		if want = ledger.CodeLeaseExpired; h.recording {
			want, lease.state, lease.actual = "", ledger.LeaseCommitted, actual
		}
	}
	h.wantCode(result, want)
}

// randomRetention is short, so that there is something to purge.
const randomRetention = 10 * time.Minute

// purge forgets what is old, and nothing of what was used.
func (h *history) purge(t *rapid.T) {
	h.touch()
	limit := rapid.IntRange(1, 5).Draw(t, "limit")
	purged := h.w.must(ledger.Purge{Key: h.key, Limit: limit}).Purged
	for _, lease := range h.leases {
		if lease.purged {
			continue
		}
		result := h.w.do(ledger.Release{Key: h.key, LeaseID: lease.id})[0]
		if !ledger.HasCode(result.Err, ledger.CodeLeaseNotFound) {
			if lease.state == ledger.LeaseReserved {
				lease.state = ledger.LeaseReleased
			}
			continue
		}
		lease.purged = true
		purged.Leases--
		if lease.state == ledger.LeaseReserved || lease.expiresAt.Add(randomRetention).After(h.w.now()) {
			t.Fatalf("%+v was purged at %v", lease, h.w.now())
		}
	}
	if purged.Leases != 0 {
		t.Fatalf("%d leases more were said to be purged than are gone", purged.Leases)
	}
}

func (h *history) kept() int64 {
	var n int64
	for _, lease := range h.leases {
		if !lease.purged {
			n++
		}
	}
	return n
}

func (h *history) extend(t *rapid.T) {
	lease := h.pick(t)
	h.touch()
	ttl := time.Duration(rapid.IntRange(1, 90).Draw(t, "seconds")) * time.Second
	result := h.w.do(ledger.Extend{Key: h.key, LeaseID: lease.id, TTL: ttl})[0]
	switch lease.state {
	case ledger.LeaseReserved:
		h.wantCode(result, "")
		if until := h.w.now().Add(ttl); until.After(lease.expiresAt) {
			lease.expiresAt = until
		}
		if !result.Lease.ExpiresAt.Equal(lease.expiresAt) {
			t.Fatalf("extended by %v the lease expires at %v, want %v", ttl, result.Lease.ExpiresAt, lease.expiresAt)
		}
	case ledger.LeaseCommitted:
		h.wantCode(result, ledger.CodeLeaseCommitted)
	case ledger.LeaseReleased:
		h.wantCode(result, ledger.CodeLeaseReleased)
	case ledger.LeaseExpired:
		h.wantCode(result, ledger.CodeLeaseExpired)
	}
}

func (h *history) wantCode(result ledger.Result, want ledger.Code) {
	if want != "" {
		h.w.wantRefusal(result, want, nil)
	} else if result.Err != nil {
		h.w.Fatalf("refused: %v", result.Err)
	}
}

func (h *history) release(t *rapid.T) {
	lease := h.pick(t)
	h.touch()
	result := h.w.do(ledger.Release{Key: h.key, LeaseID: lease.id})[0]
	if lease.state == ledger.LeaseCommitted {
		h.wantCode(result, ledger.CodeLeaseCommitted)
		return
	}
	h.wantCode(result, "")
	if lease.state == ledger.LeaseReserved {
		lease.state = ledger.LeaseReleased
	}
}

// several reserves, settles and looks in one call.
func (h *history) several(t *rapid.T) {
	s := h.touch()
	first := ledger.Reserve{Key: h.key, RequestKey: h.w.next("request"), Fingerprint: "f",
		Tokens: rapid.Int64Range(1, 40).Draw(t, "tokens"), TTL: time.Minute}
	results := h.w.do(
		first,
		ledger.Commit{Key: h.key, LeaseID: h.w.leaseID(h.key, first.RequestKey), ActualTokens: 1},
		ledger.Inspect{Key: h.key},
		ledger.ReapExpired{Key: h.key},
	)
	if first.Tokens > s.AvailableTokens {
		h.wantCode(results[0], ledger.CodeBudgetExceeded)
		h.wantCode(results[1], ledger.CodeLeaseNotFound)
		return
	}
	for _, result := range results {
		h.wantCode(result, "")
	}
	h.leases = append(h.leases, &modelLease{
		request: first, id: results[0].Lease.ID, state: ledger.LeaseCommitted, tokens: first.Tokens, actual: 1, expiresAt: h.w.now().Add(time.Minute),
	})
}

func (h *history) setLimit(t *rapid.T) {
	s := h.touch()
	limit := rapid.Int64Range(0, 400).Draw(t, "limit")
	result := h.w.do(ledger.SetLimit{Key: h.key, ExpectedLimit: s.Limit, Limit: limit})[0]
	if limit < s.UsedTokens+s.ReservedTokens {
		h.wantCode(result, ledger.CodeLimitBelowAllocated)
		return
	}
	h.wantCode(result, "")
	h.base = limit
}

func (h *history) declare(t *rapid.T) {
	h.touch()
	limit := rapid.SampledFrom([]int64{100, 100, 100, 180, 400}).Draw(t, "limit")
	mode := rapid.SampledFrom([]ledger.Mode{
		ledger.ModeEnforce, ledger.ModeEnforce, ledger.ModeEnforce, ledger.ModeObserveOnly, ledger.ModeDisabled,
	}).Draw(t, "mode")
	h.recording = rapid.Bool().Draw(t, "record actual")
	h.period = rapid.SampledFrom([]ledger.PeriodSpec{
		{}, {}, {Every: ledger.CadenceHour, TimeZone: "Etc/UTC"}, {Every: ledger.CadenceDay, TimeZone: "Europe/Berlin"},
	}).Draw(t, "period")
	request := h.declaration(limit, mode)
	if rapid.Bool().Draw(t, "overwrite") {
		overwriting(&request)
	}
	h.w.must(request)
	if h.base == h.declared || request.Declaration.ConflictPolicy == ledger.ConflictOverwrite {
		h.base = limit
	}
	h.declared = limit
}

func (h *history) anotherHand(t *rapid.T) {
	h.touch()
	limit := rapid.SampledFrom([]int64{100, 100, 250, 300}).Draw(t, "limit")
	if err := h.w.OverrideLimit(h.w.ctx, h.key, limit); err != nil {
		t.Fatalf("writing the limit by another hand: %v", err)
	}
	h.base = limit
}

func (h *history) storeRaise(t *rapid.T) {
	h.touch()
	start := time.Duration(rapid.IntRange(-10, 60).Draw(t, "start")) * time.Second
	length := time.Duration(rapid.IntRange(0, 120).Draw(t, "length")) * time.Second
	request := h.w.raiseFrom(h.namespace+h.w.next("/raise"), start, start+length)
	request.Key, request.Grant.Namespace = h.key, h.namespace
	request.Grant.TemporaryLimit = rapid.SampledFrom([]int64{200, 300, 500, 1001}).Draw(t, "temporary limit")
	if rapid.Bool().Draw(t, "rebase") {
		rebasing(&request)
	}
	if rapid.IntRange(0, 4).Draw(t, "approval") == 0 {
		request.Grant.ApprovalID = "shared"
	}
	h.w.must(request)
	h.raises = append(h.raises, request)
}

func (h *history) pickRaise(t *rapid.T) *ledger.StoreRaise {
	if len(h.raises) == 0 {
		t.Skip("no raise was stored yet") // as in pick: another action is drawn
	}
	return &h.raises[rapid.IntRange(0, len(h.raises)-1).Draw(t, "raise")]
}

// shorten stores a raise again, perhaps under a new UID and with another expiry.
func (h *history) shorten(t *rapid.T) {
	request := h.pickRaise(t)
	h.touch()
	if rapid.Bool().Draw(t, "new object") {
		request.Grant.UID = h.namespace + h.w.next("/raise")
	}
	changed := *request
	changed.Grant.ExpiresAt = changed.Grant.ExpiresAt.Add(time.Duration(rapid.IntRange(-60, 60).Draw(t, "by")) * time.Second)
	if changed.Grant.ExpiresAt.Before(*changed.Grant.StartsAt) {
		changed.Grant.ExpiresAt = *changed.Grant.StartsAt
	}
	before, err := h.w.Store().Raise(h.w.ctx, cluster, request.Grant.UID)
	raise := h.w.must(changed).Raise
	if err == nil && raise.ExpiresAt.After(before.ExpiresAt) {
		t.Fatalf("the expiry moved from %v to %v", before.ExpiresAt, raise.ExpiresAt)
	}
}

func (h *history) revoke(t *rapid.T) {
	request := h.pickRaise(t)
	h.touch()
	raise := h.w.must(ledger.RevokeRaise{Key: h.key, UID: request.Grant.UID, Actor: requester}).Raise
	if !raise.State.Ended() {
		t.Fatalf("a revoked raise is %s/%s", raise.State, raise.Reason)
	}
}
