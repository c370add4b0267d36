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

// ourAnswer is an answer, and when the bucket was last updated before it, by our
// ledger; the zero time when it was not there.
type ourAnswer struct {
	answer
	updatedBefore time.Time
}

// run runs a sequence.
func (o ourLedger) run(ctx context.Context, s sequence) ([]ourAnswer, error) {
	l := ledger.New(o.store, nil)
	made := newIDs()
	answers := make([]ourAnswer, len(s.steps))
	var clock time.Time
	for i, step := range s.steps {
		if !step.clock.Equal(clock) {
			clock = step.clock
			if err := o.setClock(ctx, clock); err != nil {
				return nil, err
			}
		}
		changes, err := o.store.Changes(ctx, []ledger.KnownRevision{{Key: step.bucket}})
		if err == nil && len(changes) == 1 && changes[0].Snapshot != nil {
			answers[i].updatedBefore = changes[0].Snapshot.UpdatedAt
		}
		result := l.Do(ctx, step.request(s.settings, made.ofStep))[0]
		if result.Err != nil && result.Err.Retryable() {
			return nil, fmt.Errorf("%s: step %d: %w", o.name, i, result.Err)
		}
		answers[i].answer = made.answer(i, result)
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
			answers[i].Bucket.Leases = append(answers[i].Bucket.Leases, made.lease(lease))
		}
	}
	return answers, nil
}
