package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/jackc/pgx/v5"

	devenv "github.com/token-lease/operator/hack/devenv/postgres"
	"github.com/token-lease/operator/internal/ledger"
	"github.com/token-lease/operator/internal/ledger/memory"
	"github.com/token-lease/operator/internal/ledger/postgres"
)

const stopTimeout = 30 * time.Second

// stores are ours. The one in memory is new for each sequence; the one in PostgreSQL
// goes on, so sequences have buckets of their own.
type stores struct {
	server   *devenv.Server
	conn     *pgx.Conn
	postgres *postgres.Store
}

func openStores(ctx context.Context) (_ *stores, err error) {
	s := &stores{}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	s.server, err = devenv.Start(ctx, devenv.Options{Own: true, NoFsync: true, Log: os.Stderr})
	if err != nil {
		return nil, err
	}
	const database = "conformance"
	if err := s.server.CreateDatabase(ctx, database); err != nil {
		return nil, err
	}
	url := s.server.URL(database)
	if _, err := postgres.Migrate(ctx, url); err != nil {
		return nil, err
	}
	if s.conn, err = pgx.Connect(ctx, url); err != nil {
		return nil, err
	}
	// The ledger reads its clock from one function.
	_, err = s.conn.Exec(ctx, `CREATE TABLE public.conformance_clock (at timestamptz NOT NULL);
		INSERT INTO public.conformance_clock VALUES (now());
		CREATE OR REPLACE FUNCTION tokenlease.ledger_now() RETURNS timestamptz
			LANGUAGE sql VOLATILE AS $$ SELECT at FROM public.conformance_clock $$`)
	if err != nil {
		return nil, err
	}
	s.postgres, err = postgres.Open(postgres.Options{
		ConnString: func(context.Context) (string, error) { return url, nil }, Worker: "conformance",
	})
	return s, err
}

func (s *stores) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	var errs []error
	if s.postgres != nil {
		s.postgres.Close()
	}
	if s.conn != nil {
		errs = append(errs, s.conn.Close(ctx))
	}
	if s.server != nil {
		errs = append(errs, s.server.Stop(ctx))
	}
	return errors.Join(errs...)
}

// ledgers are our stores for one sequence, each with a way to set its clock.
func (s *stores) ledgers() []ourLedger {
	var now time.Time
	return []ourLedger{
		{
			name: "memory", store: memory.New(memory.Options{Clock: func() time.Time { return now }}),
			setClock: func(_ context.Context, to time.Time) error {
				now = to
				return nil
			},
		},
		{
			name: "postgres", store: s.postgres,
			setClock: func(ctx context.Context, to time.Time) error {
				_, err := s.conn.Exec(ctx, `UPDATE public.conformance_clock SET at = $1`, to)
				return err
			},
		},
	}
}

type ourLedger struct {
	name     string
	store    ledger.Store
	setClock func(context.Context, time.Time) error
}

// ourAnswer is an answer of our ledger.
type ourAnswer struct {
	answer
	// evidenceBefore and evidence are when evidence that the package does not keep was
	// last written on the bucket, before this step and with it; the zero time for never.
	evidenceBefore, evidence time.Time
}

// leavesEvidence reports whether our ledger writes down what the package does not: a
// SetLimit, whatever comes of it, and a refused actual figure.
func leavesEvidence(s step, result ledger.Result) bool {
	switch s.verb {
	case setLimit:
		return result.Err == nil || ledger.HasCode(result.Err, ledger.CodeLimitChanged) || ledger.HasCode(result.Err, ledger.CodeLimitBelowAllocated)
	case commit:
		return ledger.HasCode(result.Err, ledger.CodeCommitExceedsBudget) || ledger.HasCode(result.Err, ledger.CodeLeaseExpired)
	default:
		return false
	}
}

// isKey reports whether a bucket can have a key here.
func isKey(key string) bool { return ledger.ValidateBucketKey(key) == nil }

// updatedAt is when a bucket was last updated; the zero time for no bucket.
func (o ourLedger) updatedAt(ctx context.Context, bucket string) (time.Time, error) {
	if !isKey(bucket) {
		return time.Time{}, nil
	}
	changes, err := o.store.Changes(ctx, []ledger.KnownRevision{{Key: bucket}})
	if err != nil || len(changes) != 1 || changes[0].Snapshot == nil {
		return time.Time{}, err
	}
	return changes[0].Snapshot.UpdatedAt, nil
}

// run runs a sequence.
func (o ourLedger) run(ctx context.Context, s sequence) ([]ourAnswer, error) {
	l := ledger.New(o.store, nil)
	made := newIDs()
	answers := make([]ourAnswer, len(s.steps))
	var clock time.Time
	evidence := map[string]time.Time{}
	for i, step := range s.steps {
		if !step.clock.Equal(clock) {
			clock = step.clock
			if err := o.setClock(ctx, clock); err != nil {
				return nil, err
			}
		}
		answers[i].evidenceBefore = evidence[step.bucket]
		updated, err := o.updatedAt(ctx, step.bucket)
		if err != nil {
			return nil, err
		}
		result := l.Do(ctx, step.request(s.settings, made.ofStep))[0]
		if result.Err != nil && result.Err.Retryable() {
			return nil, fmt.Errorf("%s: step %d: %w", o.name, i, result.Err)
		}
		answers[i].answer = made.answer(i, result)
		if leavesEvidence(step, result) {
			evidence[step.bucket] = updated
			if clock.After(updated) {
				evidence[step.bucket] = clock
			}
		}
		answers[i].evidence = evidence[step.bucket]
		if replaysWithoutTTL(step, s.settings, result) {
			// The package refused it, so nobody settles a lease in its name there.
			delete(made.ofStep, i)
		}
		if step.verb != inspect || result.Err != nil {
			continue
		}
		leases, err := o.store.Leases(ctx, step.bucket, ledger.LeasePosition{}, len(s.steps))
		if err != nil {
			return nil, err
		}
		for _, lease := range leases {
			listed := made.lease(lease)
			listed.RequestHash, listed.FingerprintHash = lease.RequestHash.String(), lease.FingerprintHash.String()
			answers[i].Bucket.Leases = append(answers[i].Bucket.Leases, listed)
		}
	}
	return answers, nil
}
