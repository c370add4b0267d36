package ledgertest

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
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
)

// Linearizable checks that what concurrent callers are answered could have been
// answered to one after the other, in an order that keeps what came before what. The
// model below says what one caller is answered. The stores share their rows; disturb,
// if there is one, makes trouble until its context ends. Clocks run on: nothing
// expires within the test.
func Linearizable(t *testing.T, stores []ledger.Store, disturb func(context.Context)) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	ctx, cancel := context.WithCancel(t.Context())
	var trouble sync.WaitGroup
	defer trouble.Wait()
	defer cancel()
	if disturb != nil {
		trouble.Go(func() { disturb(ctx) })
	}
	outcomes := map[string]int{}
	for round := range linearizableRounds {
		h := &linearHistory{started: time.Now(), leases: map[string][]string{}}
		for _, bucket := range []string{"first", "second"} {
			h.open(ctx, t, stores[0], fmt.Sprintf("%s-%d", bucket, round))
		}
		var workers sync.WaitGroup
		for n := range linearizableWorkers {
			random := rand.New(rand.NewPCG(seed, uint64(round*linearizableWorkers+n)))
			workers.Go(func() { h.work(ctx, ledger.New(stores[n%len(stores)], nil), random, n) })
		}
		workers.Wait()
		for _, operation := range h.operations {
			if output := operation.Output.(linearOutput); output.unknown {
				outcomes["unknown"]++
			} else {
				outcomes[string(output.code)]++
			}
		}
		if result := porcupine.CheckOperationsTimeout(linearModel.ToModel(), h.operations, linearizableCheck); result != porcupine.Ok {
			t.Fatalf("round %d: no order of one after the other explains the answers (%s)", round, result)
		}
	}
	t.Logf("outcomes %v", outcomes)
	for _, code := range []ledger.Code{"", ledger.CodeIdempotencyConflict, ledger.CodeBudgetExceeded, ledger.CodeCommitConflict} {
		if outcomes[string(code)] == 0 {
			t.Errorf("nobody was answered %q: the callers did not meet", code)
		}
	}
}

// linearInput and linearOutput are what a caller asked and was answered.
type linearInput struct {
	bucket, verb, request, lease string
	tokens, expected             int64
}

type linearOutput struct {
	code           ledger.Code
	lease          string
	limit          int64
	used, reserved int64
	// unknown is set when the caller was told that the request may have been done.
	unknown bool
}

// linearHistory records a round.
type linearHistory struct {
	started time.Time
	keys    []string

	mutex      sync.Mutex
	operations []porcupine.Operation
	leases     map[string][]string
}

const linearLimit = 100

func (h *linearHistory) open(ctx context.Context, t *testing.T, store ledger.Store, key string) {
	t.Helper()
	// Trouble may hit the opening, too; a repetition finds it done.
	for deadline := time.Now().Add(linearizableCheck); time.Now().Before(deadline); {
		_, err := ledger.New(store, nil).OpenBucket(ctx, ledger.OpenBucket{Key: key, Limit: linearLimit})
		if err == nil {
			h.keys = append(h.keys, key)
			return
		}
	}
	t.Fatalf("bucket %s could not be opened", key)
}

func (h *linearHistory) work(ctx context.Context, l *ledger.Ledger, random *rand.Rand, worker int) {
	for range linearizableCalls {
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
		h.operations = append(h.operations, porcupine.Operation{
			ClientId: worker, Input: input, Output: output, Call: int64(called), Return: int64(returned),
		})
		if output.lease != "" && input.verb == "reserve" {
			h.leases[input.bucket] = append(h.leases[input.bucket], output.lease)
		}
		h.mutex.Unlock()
	}
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
	case roll < 75:
		in.verb, in.lease, in.tokens = "commit", leases[random.IntN(len(leases))], int64(5*random.IntN(4))
	case roll < 85:
		in.verb, in.lease = "release", leases[random.IntN(len(leases))]
	case roll < 93:
		in.verb, in.expected, in.tokens = "set limit", int64(linearLimit+20*random.IntN(2)), int64(linearLimit+20*random.IntN(2))
	}
	return in
}

func (in linearInput) toRequest() ledger.Request {
	switch in.verb {
	case "reserve":
		return ledger.Reserve{Key: in.bucket, RequestKey: in.request, Fingerprint: "f", Tokens: in.tokens, TTL: ledger.DefaultMax}
	case "commit":
		return ledger.Commit{Key: in.bucket, LeaseID: in.lease, ActualTokens: in.tokens}
	case "release":
		return ledger.Release{Key: in.bucket, LeaseID: in.lease}
	case "set limit":
		return ledger.SetLimit{Key: in.bucket, ExpectedLimit: in.expected, Limit: in.tokens}
	default:
		return ledger.Inspect{Key: in.bucket}
	}
}

// linearState is a bucket as the model has it.
type linearState struct {
	limit, used, reserved int64
	// requests holds the lease of each request key; its ID is learnt from answers.
	requests map[string]linearLease
}

type linearLease struct {
	id             string
	state          ledger.LeaseState
	tokens, actual int64
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
	Init: func() []any { return []any{linearState{limit: linearLimit, requests: map[string]linearLease{}}} },
	Step: func(state, input, output any) []any {
		s, in, out := state.(linearState), input.(linearInput), output.(linearOutput)
		next, code := s.step(in, out.lease)
		if out.unknown {
			return []any{s, next}
		}
		if code != out.code {
			return nil
		}
		if code == "" && (next.limit != out.limit || next.used != out.used || next.reserved != out.reserved) {
			return nil
		}
		return []any{next}
	},
	Equal: func(a, b any) bool { return reflect.DeepEqual(a, b) },
}

// step is the rules for what the callers ask, told once more. id is that of the lease
// in the answer.
func (s linearState) step(in linearInput, id string) (linearState, ledger.Code) {
	switch in.verb {
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
		switch {
		case s.limit != in.expected:
			return s, ledger.CodeLimitChanged
		case in.tokens < s.used+s.reserved:
			return s, ledger.CodeLimitBelowAllocated
		}
		s.limit = in.tokens
	}
	return s, ""
}

func (s linearState) reserve(in linearInput, id string) (linearState, ledger.Code) {
	lease, known := s.requests[in.request]
	switch {
	case known && lease.tokens != in.tokens:
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
	return s.with(in.request, linearLease{id: id, state: ledger.LeaseReserved, tokens: in.tokens}), ""
}

func (s linearState) settle(in linearInput, request string, lease linearLease) (linearState, ledger.Code) {
	commits := in.verb == "commit"
	switch {
	case lease.state == ledger.LeaseCommitted && !commits:
		return s, ledger.CodeLeaseCommitted
	case lease.state == ledger.LeaseCommitted && lease.actual != in.tokens:
		return s, ledger.CodeCommitConflict
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
