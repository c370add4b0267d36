package ledger

import (
	"context"
	"errors"
	"time"

	"github.com/google/uuid"
)

// Ledger is what callers use: it checks what they ask, makes up the IDs that a
// request needs to be repeatable, and hands it to a store.
type Ledger struct {
	store    Store
	observer Observer
}

// New returns a ledger over a store. A nil observer observes nothing.
func New(store Store, observer Observer) *Ledger {
	if observer == nil {
		observer = NopObserver{}
	}
	return &Ledger{store: store, observer: observer}
}

// Store gives access to the reads, which need no checks.
func (l *Ledger) Store() Store { return l.store }

// Do carries out requests and answers each, in order. A request that is not valid
// is answered with invalid_input and does not reach the store.
func (l *Ledger) Do(ctx context.Context, requests ...Request) []Result {
	started := time.Now()
	results := make([]Result, len(requests))
	valid := make([]Request, 0, len(requests))
	positions := make([]int, 0, len(requests))
	for i, request := range requests {
		request = withIDs(request)
		if err := request.validate(); err != nil {
			results[i].Err = asDomain(err)
			continue
		}
		valid = append(valid, request)
		positions = append(positions, i)
	}
	if len(valid) > 0 {
		for i, result := range l.store.Do(ctx, valid) {
			results[positions[i]] = result
		}
	}
	elapsed := time.Since(started)
	for i, request := range requests {
		code := Code("")
		if results[i].Err != nil {
			code = results[i].Err.Code
		}
		l.observer.ObserveOperation(request.Operation(), code, elapsed)
	}
	return results
}

// withIDs makes up the IDs that the caller left to the ledger. They are made
// once, so that a store can repeat the request after an ambiguous error.
func withIDs(request Request) Request {
	switch r := request.(type) {
	case SetLimit:
		if r.OperationID == "" {
			r.OperationID = uuid.NewString()
		}
		return r
	default:
		return request
	}
}

func asDomain(err error) *Error {
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	return Errorf(CodeUnavailable, "The ledger could not answer.").WithCause(err)
}

func (l *Ledger) one(ctx context.Context, request Request) (Result, error) {
	result := l.Do(ctx, request)[0]
	if result.Err != nil {
		return Result{}, result.Err
	}
	return result, nil
}

func (l *Ledger) snapshot(ctx context.Context, request Request) (Snapshot, error) {
	result, err := l.one(ctx, request)
	if err != nil {
		return Snapshot{}, err
	}
	return *result.Snapshot, nil
}

// LeaseResult answers Reserve, Commit, Release and Extend.
type LeaseResult struct {
	Lease  Lease
	Bucket Snapshot
}

func (l *Ledger) lease(ctx context.Context, request Request) (LeaseResult, error) {
	result, err := l.one(ctx, request)
	if err != nil {
		return LeaseResult{}, err
	}
	return LeaseResult{Lease: *result.Lease, Bucket: *result.Snapshot}, nil
}

// OpenBucket carries out one OpenBucket.
func (l *Ledger) OpenBucket(ctx context.Context, r OpenBucket) (Snapshot, error) {
	return l.snapshot(ctx, r)
}

// SetLimit carries out one SetLimit.
func (l *Ledger) SetLimit(ctx context.Context, r SetLimit) (Snapshot, error) {
	return l.snapshot(ctx, r)
}

// Inspect carries out one Inspect.
func (l *Ledger) Inspect(ctx context.Context, key string) (Snapshot, error) {
	return l.snapshot(ctx, Inspect{Key: key})
}

// ApplyDeclared carries out one ApplyDeclared.
func (l *Ledger) ApplyDeclared(ctx context.Context, r ApplyDeclared) (Snapshot, error) {
	return l.snapshot(ctx, r)
}

// Reserve carries out one Reserve.
func (l *Ledger) Reserve(ctx context.Context, r Reserve) (LeaseResult, error) {
	return l.lease(ctx, r)
}

// Commit carries out one Commit.
func (l *Ledger) Commit(ctx context.Context, r Commit) (LeaseResult, error) {
	return l.lease(ctx, r)
}

// Release carries out one Release.
func (l *Ledger) Release(ctx context.Context, r Release) (LeaseResult, error) {
	return l.lease(ctx, r)
}

// Extend carries out one Extend.
func (l *Ledger) Extend(ctx context.Context, r Extend) (LeaseResult, error) {
	return l.lease(ctx, r)
}

// ReapExpired carries out one ReapExpired.
func (l *Ledger) ReapExpired(ctx context.Context, key string) ([]string, Snapshot, error) {
	result, err := l.one(ctx, ReapExpired{Key: key})
	if err != nil {
		return nil, Snapshot{}, err
	}
	return result.ExpiredLeaseIDs, *result.Snapshot, nil
}

// CloseBucket carries out one CloseBucket.
func (l *Ledger) CloseBucket(ctx context.Context, r CloseBucket) (Closing, error) {
	result, err := l.one(ctx, r)
	if err != nil {
		return Closing{}, err
	}
	return *result.Closing, nil
}

// StoreRaise carries out one StoreRaise.
func (l *Ledger) StoreRaise(ctx context.Context, r StoreRaise) (*Raise, error) {
	result, err := l.one(ctx, r)
	return result.Raise, err
}

// RevokeRaise carries out one RevokeRaise.
func (l *Ledger) RevokeRaise(ctx context.Context, r RevokeRaise) (*Raise, error) {
	result, err := l.one(ctx, r)
	return result.Raise, err
}

// AcknowledgeReview carries out one AcknowledgeReview.
func (l *Ledger) AcknowledgeReview(ctx context.Context, r AcknowledgeReview) (*Raise, error) {
	result, err := l.one(ctx, r)
	return result.Raise, err
}
