// Package memory keeps a ledger in this process: for tests and for development.
// What it keeps is gone when the process ends.
//
// It has the promises of the PostgreSQL store, and none of its concurrency: one
// lock covers everything. An effect that the other store's constraints would
// refuse is refused here too, so that a fault in the rules shows with either.
package memory

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

// Options configure a Store. The zero value is usable.
type Options struct {
	// Clock tells the time; time.Now if it is nil. It is cut to milliseconds.
	Clock func() time.Time
	// Worker names this process in the audit; "memory" if it is empty.
	Worker string
	// Observer is told of each step of a raise; nobody if it is nil. Operations are
	// told by ledger.Ledger.
	Observer ledger.Observer
}

// Store is a ledger.Store in memory. It is safe for concurrent use.
type Store struct {
	clock    func() time.Time
	worker   string
	observer ledger.Observer

	mutex sync.Mutex
	rows  rows
}

var _ ledger.Store = (*Store)(nil)

// rows are the tables. What they point to is never changed, only replaced, and
// never handed out: callers get copies.
type rows struct {
	buckets    map[string]*ledger.Bucket
	leases     map[string]map[string]*ledger.Lease
	requests   map[string]map[ledger.Hash]string // to the lease ID
	rollups    map[string]map[ledger.UsagePosition]ledger.Usage
	periods    map[string]map[time.Time]*ledger.Period // by start
	raises     map[string]map[string]*ledger.Raise
	operations map[string]map[string]ledger.OperationRecord
	approvals  map[ledger.ApprovalKey]ledger.SpentApproval
	audit      map[string][]ledger.AuditRow
}

// New returns an empty store.
func New(options Options) *Store {
	if options.Clock == nil {
		options.Clock = time.Now
	}
	if options.Worker == "" {
		options.Worker = "memory"
	}
	if options.Observer == nil {
		options.Observer = ledger.NopObserver{}
	}
	return &Store{
		clock: options.Clock, worker: options.Worker, observer: options.Observer,
		rows: rows{
			buckets:    map[string]*ledger.Bucket{},
			leases:     map[string]map[string]*ledger.Lease{},
			requests:   map[string]map[ledger.Hash]string{},
			rollups:    map[string]map[ledger.UsagePosition]ledger.Usage{},
			periods:    map[string]map[time.Time]*ledger.Period{},
			raises:     map[string]map[string]*ledger.Raise{},
			operations: map[string]map[string]ledger.OperationRecord{},
			approvals:  map[ledger.ApprovalKey]ledger.SpentApproval{},
			audit:      map[string][]ledger.AuditRow{},
		},
	}
}

func (s *Store) now() time.Time { return ledger.Truncate(s.clock()) }

// Do implements ledger.Store.
func (s *Store) Do(ctx context.Context, requests []ledger.Request) []ledger.Result {
	started := time.Now()
	results := make([]ledger.Result, len(requests))
	var steps []ledger.Transition
	if err := canceled(ctx); err != nil {
		for i := range results {
			results[i] = ledger.Result{Err: err}
		}
	} else {
		steps = s.do(requests, results)
	}
	s.observeTransitions(steps, time.Since(started))
	return results
}

// do serves the requests bucket by bucket, in byte order of the keys, and puts
// each answer in its place.
func (s *Store) do(requests []ledger.Request, results []ledger.Result) []ledger.Transition {
	positions := map[string][]int{}
	for i, request := range requests {
		positions[request.Bucket()] = append(positions[request.Bucket()], i)
	}
	keys := make([]string, 0, len(positions))
	for key := range positions {
		keys = append(keys, key)
	}
	slices.Sort(keys)

	s.mutex.Lock()
	defer s.mutex.Unlock()
	var steps []ledger.Transition
	for _, key := range keys {
		ofBucket := make([]ledger.Request, len(positions[key]))
		for i, position := range positions[key] {
			ofBucket[i] = requests[position]
		}
		answers, transitions := s.serve(key, ofBucket)
		steps = append(steps, transitions...)
		for i, position := range positions[key] {
			results[position] = answers[i]
		}
	}
	return steps
}

// serve runs the requests of one bucket in one transaction. If that cannot be
// made durable, each has one of its own, so that only the cause is refused.
func (s *Store) serve(key string, requests []ledger.Request) ([]ledger.Result, []ledger.Transition) {
	results, effects, err := s.transact(key, requests)
	if err == nil {
		return results, effects.Transitions
	}
	if len(requests) == 1 {
		return []ledger.Result{{Err: err}}, nil
	}
	results = make([]ledger.Result, 0, len(requests))
	var steps []ledger.Transition
	for _, request := range requests {
		answers, transitions := s.serve(key, []ledger.Request{request})
		results = append(results, answers...)
		steps = append(steps, transitions...)
	}
	return results, steps
}

// transact is one transaction on one bucket: all or nothing.
func (s *Store) transact(key string, requests []ledger.Request) ([]ledger.Result, *ledger.Effects, *ledger.Error) {
	clock := s.now()
	view := s.rows.load(key, clock, needsOf(requests))
	results, effects := ledger.Run(view, clock, s.worker, requests)
	tx := transaction{rows: &s.rows, clock: clock}
	if err := tx.apply(view, effects); err != nil {
		tx.rollBack()
		return nil, nil, err
	}
	for i := range results {
		results[i] = detach(results[i])
	}
	return results, effects, nil
}

// detach copies what a result shares with the view, so that two results never
// share anything either.
func detach(result ledger.Result) ledger.Result {
	if result.Lease != nil {
		result.Lease = result.Lease.Clone()
	}
	if result.Raise != nil {
		result.Raise = result.Raise.Clone()
	}
	result.ExpiredLeaseIDs = slices.Clone(result.ExpiredLeaseIDs)
	return result
}

func (s *Store) observeTransitions(steps []ledger.Transition, confirmed time.Duration) {
	for _, step := range steps {
		s.observer.ObserveTransition(step, confirmed)
	}
}

// needsOf puts the needs of several requests together. Empty names are left out.
func needsOf(requests []ledger.Request) ledger.Needs {
	var all ledger.Needs
	for _, request := range requests {
		needs := request.Needs()
		all.LeaseIDs = append(all.LeaseIDs, needs.LeaseIDs...)
		all.RequestHashes = append(all.RequestHashes, needs.RequestHashes...)
		all.OperationIDs = append(all.OperationIDs, needs.OperationIDs...)
		all.RaiseUIDs = append(all.RaiseUIDs, needs.RaiseUIDs...)
		all.Grants = append(all.Grants, needs.Grants...)
		all.Approvals = append(all.Approvals, needs.Approvals...)
		all.LivePeriods = all.LivePeriods || needs.LivePeriods
		all.Oldest += needs.Oldest
	}
	return all
}

func canceled(ctx context.Context) *ledger.Error {
	if err := ctx.Err(); err != nil {
		return ledger.Errorf(ledger.CodeUnavailable, "The call was canceled before the ledger was reached.").WithCause(err)
	}
	return nil
}

// byExpiryAndID orders leases as they are listed.
func byExpiryAndID(a, b *ledger.Lease) int {
	if order := a.ExpiresAt.Compare(b.ExpiresAt); order != 0 {
		return order
	}
	return strings.Compare(a.ID, b.ID)
}
