package postgres

import (
	"context"
	"errors"
	"slices"
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
	due, answers, err := s.touchDue(ctx, request)
	switch {
	case err == nil:
		for _, g := range due {
			pass.note(g.key, answers[g.key], nil)
		}
	case ctx.Err() == nil && touchesMayFail(err) && len(due) > 0:
		if err := pass.touchSingly(ctx, s, request, len(due)); err != nil {
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

// touchDue touches due buckets in one transaction. It also tells which ones those
// were when it fails.
func (s *Store) touchDue(ctx context.Context, request ledger.SweepRequest) (due []*group, answers map[string]answer, err error) {
	// The rows of locked buckets are skipped; this is for those beside them.
	terms := terms{pool: s.watch, lockTimeout: s.sharedLockTimeout()}
	err = s.attempt(ctx, batchAttempts, nil, func() (err error) {
		due = nil
		answers, err = s.inTransaction(ctx, nil, terms, func(ctx context.Context, t *transaction) ([]*group, error) {
			due, err = t.lockDue(ctx, request)
			if err != nil || len(due) == 0 {
				return due, err
			}
			reads := &pgx.Batch{}
			t.loader.queueReads(reads)
			return due, t.send(ctx, reads)
		})
		return err
	})
	return due, answers, err
}

// lockDue locks the due buckets that nobody else has locked.
func (t *transaction) lockDue(ctx context.Context, request ledger.SweepRequest) ([]*group, error) {
	batch := &pgx.Batch{}
	t.queueBegin(batch)
	t.loader.queueLockDue(batch, request)
	if err := t.send(ctx, batch); err != nil {
		return nil, err
	}
	var due []*group
	for _, key := range t.loader.keys() {
		due = append(due, touching(key))
	}
	return due, nil
}

// sweep is one pass.
type sweep struct {
	result ledger.SweepResult
}

// touchSingly gives each due bucket a transaction of its own, so that the bad one
// does not keep the others from being touched. It passes over those that somebody
// has locked in the meantime.
func (p *sweep) touchSingly(ctx context.Context, s *Store, request ledger.SweepRequest, count int) error {
	request.Limit = 1
	request.SetAside = slices.Clone(request.SetAside)
	for range count {
		due, answers, err := s.touchDue(ctx, request)
		if err != nil && (ctx.Err() != nil || !touchesMayFail(err) || len(due) == 0) {
			return err
		}
		if len(due) == 0 {
			return nil
		}
		key := due[0].key
		request.SetAside = append(request.SetAside, key)
		p.note(key, answers[key], err)
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
	waits, err := list(ctx, s, s.watch, nextDue, toDuration, setAside)
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
