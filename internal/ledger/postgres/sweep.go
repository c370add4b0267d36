package postgres

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/token-lease/operator/internal/ledger"
)

// Sweep implements ledger.Store. The due buckets are touched in one transaction,
// or if that fails one by one.
func (s *Store) Sweep(ctx context.Context, request ledger.SweepRequest) (ledger.SweepResult, error) {
	ctx, cancel := context.WithTimeout(ctx, s.options.CallTimeout)
	defer cancel()
	request.Limit = max(0, min(request.Limit, maxBuckets))
	pass := sweep{result: ledger.SweepResult{Failed: map[string]error{}}}
	var answers map[string]answer
	_, err := s.attempt(ctx, batchAttempts, false, func() (err error) {
		pass.due = nil
		answers, err = s.inTransaction(ctx, nil, func(ctx context.Context, t *transaction) ([]*group, error) {
			return pass.lock(ctx, t, request)
		})
		return err
	})
	switch {
	case err == nil:
		for _, g := range pass.due {
			pass.note(g.key, answers[g.key], nil)
		}
	case ctx.Err() == nil && touchesMayFail(err) && len(pass.due) > 0:
		if err := pass.touchSingly(ctx, s); err != nil {
			return pass.result, domainError(err)
		}
	default:
		return pass.result, domainError(err)
	}
	pass.result.NextIn, err = s.nextIn(ctx, request.SetAside)
	if err != nil {
		return pass.result, err
	}
	return pass.result, nil
}

// sweep is one pass.
type sweep struct {
	due    []*group
	result ledger.SweepResult
}

// lock locks the due buckets and loads what their touches need.
func (p *sweep) lock(ctx context.Context, t *transaction, request ledger.SweepRequest) ([]*group, error) {
	batch := &pgx.Batch{}
	t.queueBegin(batch)
	t.loader.queueLockDue(batch, request)
	if err := t.send(ctx, batch); err != nil {
		return nil, err
	}
	for _, key := range t.loader.keys() {
		p.due = append(p.due, &group{key: key, requests: []ledger.Request{ledger.Touch{Key: key}}})
	}
	if len(p.due) == 0 {
		return nil, nil
	}
	reads := &pgx.Batch{}
	t.loader.queueReads(reads)
	return p.due, t.send(ctx, reads)
}

// touchSingly gives each bucket a transaction of its own, so that the bad one
// does not keep the others from being touched.
func (p *sweep) touchSingly(ctx context.Context, s *Store) error {
	for _, g := range p.due {
		var answers map[string]answer
		_, err := s.attempt(ctx, batchAttempts, false, func() (err error) {
			answers, err = s.serve(ctx, []*group{g})
			return err
		})
		if err != nil && !touchesMayFail(err) {
			return err
		}
		p.note(g.key, answers[g.key], err)
	}
	return nil
}

func (p *sweep) note(key string, a answer, err error) {
	switch {
	case err != nil:
		p.result.Failed[key] = domainError(err)
	case a.results[0].Err != nil:
		p.result.Failed[key] = a.results[0].Err
	case !a.effects.Empty():
		p.result.Touched = append(p.result.Touched, key)
	}
}

// touchesMayFail tells an error that belongs to some bucket from the absence of a
// connection, which concerns them all.
func touchesMayFail(err error) bool {
	var f *failure
	return errors.As(err, &f) && (f.certainty == aborted || f.certainty == timedOut)
}

// nextIn is the time until the next transition by the server's clock: 0 when one
// is due, negative when there is none.
func (s *Store) nextIn(ctx context.Context, setAside []string) (time.Duration, error) {
	if setAside == nil {
		setAside = []string{}
	}
	waits, err := list(ctx, s, nextDue, toDuration, setAside)
	if err != nil {
		return 0, err
	}
	if len(waits) == 0 {
		return -1, nil
	}
	return max(0, waits[0]), nil
}

func toDuration(row pgx.CollectableRow) (wait time.Duration, err error) {
	err = row.Scan(milliseconds{&wait})
	return wait, err
}
