package ledgertest

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/token-lease/operator/internal/ledger"
)

const (
	linearizableRounds  = 8
	linearizableWorkers = 6
	linearizableCalls   = 40
	// linearizableCheck bounds the search for an order. It is found within
	// milliseconds, or there is none.
	linearizableCheck = time.Minute
	// linearizableVariable sets another number of rounds, for longer runs by hand.
	linearizableVariable = "TOKENLEASE_LINEARIZABLE_ROUNDS"
	// linearTick is by how much a caller moves the clock, and how long the shorter
	// leases live.
	linearTick = time.Second
)

// Concurrent is what Linearizable puts under load.
type Concurrent struct {
	// Stores share their rows.
	Stores []ledger.Store
	// SetClock sets the stores' clock, which begins at Start; nil leaves it alone, and
	// nothing expires.
	SetClock func(ctx context.Context, at time.Time) error
	Start    time.Time
	// Disturb makes trouble until its context ends; nil makes none. A store that
	// repeats a request after trouble may tell of the state at the repetition, as if
	// the caller had repeated it.
	Disturb func(context.Context)
}

// Linearizable checks that what concurrent callers are answered could have been
// answered to one after the other, in an order that keeps what came before what. The
// model below says what one caller is answered.
func Linearizable(t *testing.T, c Concurrent) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rounds := linearizableRounds
	if text := os.Getenv(linearizableVariable); text != "" {
		var err error
		if rounds, err = strconv.Atoi(text); err != nil || rounds < 1 {
			t.Fatalf("%s=%q: want a positive number of rounds", linearizableVariable, text)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	var trouble sync.WaitGroup
	defer trouble.Wait()
	defer cancel()
	if c.Disturb != nil {
		trouble.Go(func() { c.Disturb(ctx) })
	}
	outcomes := map[string]int{}
	clock := c.Start
	for round := range rounds {
		h := &linearHistory{Concurrent: c, started: time.Now(), clock: clock, leases: map[string][]string{}}
		for _, bucket := range []string{"first", "second"} {
			h.open(ctx, t, fmt.Sprintf("%s-%d", bucket, round))
		}
		var workers sync.WaitGroup
		for n := range linearizableWorkers {
			random := rand.New(rand.NewPCG(seed, uint64(round*linearizableWorkers+n)))
			workers.Go(func() { h.work(ctx, t, ledger.New(c.Stores[n%len(c.Stores)], nil), random, n) })
		}
		workers.Wait()
		clock = h.clock
		for _, operation := range h.operations {
			if output := operation.Output.(linearOutput); output.unknown {
				outcomes["unknown"]++
			} else {
				outcomes[string(output.code)]++
			}
		}
		if result := porcupine.CheckOperationsTimeout(linearModel.ToModel(), h.operations, linearizableCheck); result != porcupine.Ok {
			t.Fatalf("round %d: no order of one after the other explains the answers (%s):\n%s", round, result, h)
		}
	}
	t.Logf("outcomes %v", outcomes)
	met := []ledger.Code{"", ledger.CodeIdempotencyConflict, ledger.CodeBudgetExceeded, ledger.CodeCommitConflict}
	if c.SetClock != nil {
		met = append(met, ledger.CodeLeaseExpired)
	}
	for _, code := range met {
		if outcomes[string(code)] == 0 {
			t.Errorf("nobody was answered %q: the callers did not meet", code)
		}
	}
}

// linearInput and linearOutput are what a caller asked and was answered.
type linearInput struct {
	// request names what can be repeated: a reservation's key, a limit's operation.
	bucket, verb, request, lease string
	tokens, expected             int64
	ttl                          time.Duration
}

type linearOutput struct {
	code           ledger.Code
	lease          string
	limit          int64
	used, reserved int64
	// unknown is set when the caller was told that the request may have been done.
	unknown bool
	// unseen is set when the request was done, and the figures are not of then.
	unseen bool
}

// linearHistory records a round.
type linearHistory struct {
	Concurrent
	started time.Time
	keys    []string

	mutex      sync.Mutex
	operations []porcupine.Operation
	leases     map[string][]string
	limits     int

	// ticking lets one caller at a time move the clock.
	ticking sync.Mutex
	clock   time.Time
}

// String lists the operations in the order in which they were called.
func (h *linearHistory) String() string {
	slices.SortFunc(h.operations, func(a, b porcupine.Operation) int { return cmp.Compare(a.Call, b.Call) })
	var text strings.Builder
	for _, o := range h.operations {
		fmt.Fprintf(&text, "%10d %13d caller %d: %+v -> %+v\n", o.Call/1000, o.Return/1000, o.ClientId, o.Input, o.Output)
	}
	return text.String()
}

const linearLimit = 100

func (h *linearHistory) open(ctx context.Context, t *testing.T, key string) {
	t.Helper()
	// Trouble may hit the opening, too; a repetition finds it done.
	for deadline := time.Now().Add(linearizableCheck); time.Now().Before(deadline); {
		_, err := ledger.New(h.Stores[0], nil).OpenBucket(ctx, ledger.OpenBucket{Key: key, Limit: linearLimit})
		if err == nil {
			h.keys = append(h.keys, key)
			return
		}
	}
	t.Fatalf("bucket %s could not be opened", key)
}

func (h *linearHistory) work(ctx context.Context, t *testing.T, l *ledger.Ledger, random *rand.Rand, worker int) {
	for range linearizableCalls {
		if h.SetClock != nil && random.IntN(20) == 0 {
			if err := h.tick(ctx, worker); err != nil {
				t.Error(err)
				return
			}
		}
		input := h.draw(random)
		called := time.Since(h.started)
		result := l.Do(ctx, input.toRequest())[0]
		returned := time.Since(h.started)
		output := linearOutput{}
		switch {
		case ledger.HasCode(result.Err, ledger.CodeUnavailable):
			// Nothing was done, which is an answer that fits anywhere.
			continue
		case ledger.HasCode(result.Err, ledger.CodeOutcomeUnknown):
			// It may be done at any time from now on.
			output.unknown, returned = true, time.Hour
		case result.Err != nil:
			output.code = result.Err.Code
		default:
			s := result.Snapshot
			output.limit, output.used, output.reserved = s.Limit, s.UsedTokens, s.ReservedTokens
			if result.Lease != nil {
				output.lease = result.Lease.ID
			}
		}
		h.mutex.Lock()
		h.record(worker, input, output, called, returned)
		if h.Disturb != nil && output.code == "" && !output.unknown && input.verb != "inspect" {
			// What the store may have repeated is two requests: one that was done, and one
			// that found it done.
			output.unseen = true
			h.record(worker, input, output, called, returned)
		}
		if output.lease != "" && input.verb == "reserve" {
			h.leases[input.bucket] = append(h.leases[input.bucket], output.lease)
		}
		h.mutex.Unlock()
	}
}

func (h *linearHistory) record(worker int, input linearInput, output linearOutput, called, returned time.Duration) {
	h.operations = append(h.operations, porcupine.Operation{
		ClientId: worker, Input: input, Output: output, Call: int64(called), Return: int64(returned),
	})
}

// tick moves the clock, which all buckets see.
func (h *linearHistory) tick(ctx context.Context, worker int) error {
	h.ticking.Lock()
	defer h.ticking.Unlock()
	h.clock = h.clock.Add(linearTick)
	called := time.Since(h.started)
	if err := h.SetClock(ctx, h.clock); err != nil {
		return err
	}
	returned := time.Since(h.started)
	h.mutex.Lock()
	defer h.mutex.Unlock()
	for _, key := range h.keys {
		h.record(worker, linearInput{bucket: key, verb: "tick"}, linearOutput{unseen: true}, called, returned)
	}
	return nil
}

// draw makes up a request. Keys and leases are few, so that callers meet.
func (h *linearHistory) draw(random *rand.Rand) linearInput {
	h.mutex.Lock()
	defer h.mutex.Unlock()
	in := linearInput{bucket: h.keys[random.IntN(len(h.keys))], verb: "inspect"}
	leases := h.leases[in.bucket]
	switch roll := random.IntN(100); {
	case roll < 50 || len(leases) == 0:
		in.verb, in.request, in.tokens = "reserve", fmt.Sprint("request-", random.IntN(12)), int64(10+10*random.IntN(3))
		in.ttl = ledger.DefaultMax
		if h.SetClock != nil && in.tokens == 10 {
			in.ttl = linearTick
		}
	case roll < 75:
		in.verb, in.lease, in.tokens = "commit", leases[random.IntN(len(leases))], int64(5*random.IntN(4))
	case roll < 85:
		in.verb, in.lease = "release", leases[random.IntN(len(leases))]
	case roll < 93:
		h.limits++
		in.verb, in.request = "set limit", fmt.Sprint("limit-", h.limits)
		in.expected, in.tokens = int64(linearLimit+20*random.IntN(2)), int64(linearLimit+20*random.IntN(2))
	case roll < 96:
		in.verb = "reap"
	}
	return in
}

func (in linearInput) toRequest() ledger.Request {
	switch in.verb {
	case "reserve":
		return ledger.Reserve{Key: in.bucket, RequestKey: in.request, Fingerprint: "f", Tokens: in.tokens, TTL: in.ttl}
	case "commit":
		return ledger.Commit{Key: in.bucket, LeaseID: in.lease, ActualTokens: in.tokens}
	case "release":
		return ledger.Release{Key: in.bucket, LeaseID: in.lease}
	case "set limit":
		return ledger.SetLimit{Key: in.bucket, ExpectedLimit: in.expected, Limit: in.tokens, OperationID: in.request}
	case "reap":
		return ledger.ReapExpired{Key: in.bucket}
	default:
		return ledger.Inspect{Key: in.bucket}
	}
}

// linearState is a bucket as the model has it.
type linearState struct {
	limit, used, reserved int64
	// clock counts ticks.
	clock time.Duration
	// requests holds the lease of each request key; its ID is learnt from answers.
	requests map[string]linearLease
	// limits holds the outcome of each operation on the limit.
	limits map[string]ledger.Code
}

type linearLease struct {
	id             string
	state          ledger.LeaseState
	tokens, actual int64
	expires        time.Duration
}

func (s linearState) with(request string, lease linearLease) linearState {
	s.requests = maps.Clone(s.requests)
	s.requests[request] = lease
	return s
}

// linearModel answers one caller after the other.
var linearModel = porcupine.NondeterministicModel{
	Partition: func(history []porcupine.Operation) [][]porcupine.Operation {
		byBucket := map[string][]porcupine.Operation{}
		for _, operation := range history {
			key := operation.Input.(linearInput).bucket
			byBucket[key] = append(byBucket[key], operation)
		}
		var parts [][]porcupine.Operation
		for _, part := range byBucket {
			parts = append(parts, part)
		}
		return parts
	},
	Init: func() []any {
		return []any{linearState{limit: linearLimit, requests: map[string]linearLease{}, limits: map[string]ledger.Code{}}}
	},
	Step: func(state, input, output any) []any {
		s, in, out := state.(linearState), input.(linearInput), output.(linearOutput)
		next, code := s.step(in, out.lease)
		if out.unknown {
			return []any{s, next}
		}
		if code != out.code {
			return nil
		}
		if code == "" && !out.unseen && (next.limit != out.limit || next.used != out.used || next.reserved != out.reserved) {
			return nil
		}
		return []any{next}
	},
	Equal: func(a, b any) bool { return reflect.DeepEqual(a, b) },
}

// step is the rules for what the callers ask, told once more. id is that of the lease
// in the answer.
func (s linearState) step(in linearInput, id string) (linearState, ledger.Code) {
	s = s.expire()
	switch in.verb {
	case "tick":
		s.clock += linearTick
	case "reserve":
		return s.reserve(in, id)
	case "commit", "release":
		for request, lease := range s.requests {
			if lease.id == in.lease {
				return s.settle(in, request, lease)
			}
		}
		return s, ledger.CodeLeaseNotFound
	case "set limit":
		return s.setLimit(in)
	}
	return s, ""
}

// expire settles what is overdue, as every request does first.
func (s linearState) expire() linearState {
	for request, lease := range s.requests {
		if lease.state == ledger.LeaseReserved && lease.expires <= s.clock {
			s.reserved -= lease.tokens
			lease.state = ledger.LeaseExpired
			s = s.with(request, lease)
		}
	}
	return s
}

func (s linearState) setLimit(in linearInput) (linearState, ledger.Code) {
	if code, done := s.limits[in.request]; done {
		return s, code
	}
	var code ledger.Code
	switch {
	case s.limit != in.expected:
		code = ledger.CodeLimitChanged
	case in.tokens < s.used+s.reserved:
		code = ledger.CodeLimitBelowAllocated
	default:
		s.limit = in.tokens
	}
	s.limits = maps.Clone(s.limits)
	s.limits[in.request] = code
	return s, code
}

func (s linearState) reserve(in linearInput, id string) (linearState, ledger.Code) {
	lease, known := s.requests[in.request]
	switch {
	case known && lease.tokens != in.tokens: // which the lifetime follows
		return s, ledger.CodeIdempotencyConflict
	case known && lease.id == "":
		lease.id = id
		return s.with(in.request, lease), ""
	case known && id != "" && id != lease.id:
		return s, ledger.CodeStateCorrupt
	case known:
		return s, ""
	case in.tokens > s.limit-s.used-s.reserved:
		return s, ledger.CodeBudgetExceeded
	}
	s.reserved += in.tokens
	return s.with(in.request, linearLease{
		id: id, state: ledger.LeaseReserved, tokens: in.tokens, expires: s.clock + in.ttl,
	}), ""
}

func (s linearState) settle(in linearInput, request string, lease linearLease) (linearState, ledger.Code) {
	commits := in.verb == "commit"
	switch {
	case lease.state == ledger.LeaseCommitted && !commits:
		return s, ledger.CodeLeaseCommitted
	case lease.state == ledger.LeaseCommitted && lease.actual != in.tokens:
		return s, ledger.CodeCommitConflict
	case lease.state == ledger.LeaseExpired && commits:
		return s, ledger.CodeLeaseExpired
	case lease.state == ledger.LeaseReleased && commits:
		return s, ledger.CodeLeaseReleased
	case lease.state != ledger.LeaseReserved:
		return s, ""
	case commits && in.tokens > max(lease.tokens, s.limit-s.used-s.reserved+lease.tokens):
		return s, ledger.CodeCommitExceedsBudget
	}
	s.reserved -= lease.tokens
	lease.state = ledger.LeaseReleased
	if commits {
		lease.state, lease.actual = ledger.LeaseCommitted, in.tokens
		s.used += in.tokens
	}
	return s.with(request, lease), ""
}
