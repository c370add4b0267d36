// Package importer brings buckets over from the PostgreSQL table of the npm package
// token-lease@0.1.0: limits, usage, leases and the hashes of their requests, so that
// a request which the package has seen is recognised here.
//
// Each bucket is moved in steps. First the package's writers are kept out, under the
// package's own lock and for good, by a mark beside the source that names the ledger
// which the bucket goes to; then the bucket is written there, in one transaction, with
// the ID of the move as its operation; then the move is noted beside the source as
// done. A run that ends in between is finished by the next one into the same ledger,
// since the document cannot change any more, and refused into any other, where the
// bucket would be spent twice. What cannot be moved as it is stays where it is.
package importer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/token-lease/operator/internal/ledger"
)

// pageSize is how many keys are read at once.
const pageSize = 500

// Options configure a run.
type Options struct {
	// Source holds the package's table, Target the ledger; they may be one database.
	// The role of the source must own the package's table and be allowed to create a
	// table and a function beside it.
	Source, Target string
	// Buckets are the keys to move; all of them when it is empty.
	Buckets []string
	// DryRun reads and checks everything and changes nothing.
	DryRun bool
	// Report is told of each bucket that was not moved, and why. Required.
	Report func(bucket string, outcome Outcome, reason error)
}

// Outcome is what became of a bucket.
type Outcome string

// Outcomes.
const (
	// Imported: it is here now. In a dry run: it can be.
	Imported Outcome = "imported"
	// AlreadyImported: an earlier run did it; nothing was changed.
	AlreadyImported Outcome = "already imported"
	// Skipped: it cannot be moved as it is; it was left alone.
	Skipped Outcome = "skipped"
	// Failed: a database could not do its part; run it again.
	Failed Outcome = "failed"
)

// Summary counts what a run did. Leases and tokens are those of imported buckets.
type Summary struct {
	Buckets                            map[Outcome]int
	Leases, UsedTokens, ReservedTokens int64
}

// Complete reports whether every bucket is here now.
func (s Summary) Complete() bool { return s.Buckets[Skipped]+s.Buckets[Failed] == 0 }

// refusal is a reason for which a bucket is skipped.
type refusal struct{ err error }

func (r *refusal) Error() string { return r.err.Error() }
func (r *refusal) Unwrap() error { return r.err }

// errImported ends the move of a bucket that the ledger has by this very move.
var errImported = errors.New("it was imported already")

func refuse(format string, args ...any) error { return &refusal{fmt.Errorf(format, args...)} }

// run is one run.
type run struct {
	options        Options
	source, target *pgx.Conn
	ledgerID       string
	summary        Summary
}

// Run moves buckets. It fails when a database cannot be used; a bucket that cannot be
// moved is reported and counted.
func Run(ctx context.Context, o Options) (_ Summary, err error) {
	r := &run{options: o, summary: Summary{Buckets: map[Outcome]int{}}}
	for _, c := range []struct {
		conn *(*pgx.Conn)
		url  string
		name string
	}{{&r.source, o.Source, "source"}, {&r.target, o.Target, "ledger"}} {
		if *c.conn, err = pgx.Connect(ctx, c.url); err != nil {
			return r.summary, fmt.Errorf("connect to the %s: %w", c.name, withoutURL(err))
		}
		defer func() { err = errors.Join(err, (*c.conn).Close(context.WithoutCancel(ctx))) }()
	}
	if err := r.target.QueryRow(ctx, ledgerID).Scan(&r.ledgerID); err != nil {
		return r.summary, fmt.Errorf("tell the ledger from others: %w", err)
	}
	var there bool
	if err := r.source.QueryRow(ctx, `SELECT to_regclass('token_lease_buckets') IS NOT NULL`).Scan(&there); err != nil {
		return r.summary, err
	}
	if !there {
		return r.summary, errors.New("the source has no table token_lease_buckets on its search path; name the database that the npm package uses")
	}
	if !o.DryRun {
		if _, err := r.source.Exec(ctx, createFence); err != nil {
			return r.summary, fmt.Errorf("keep the package's writers out: %w", err)
		}
	}
	return r.summary, r.all(ctx)
}

// withoutURL is an error of the driver without the connection string that it may show.
func withoutURL(err error) error {
	var parse *pgconn.ParseConfigError
	if errors.As(err, &parse) {
		return errors.New("its URL is neither a postgres:// URL nor a list of keyword=value")
	}
	return err
}

func (r *run) all(ctx context.Context) error {
	if len(r.options.Buckets) > 0 {
		for _, key := range r.options.Buckets {
			r.note(ctx, key)
		}
		return ctx.Err()
	}
	var after *string
	for ctx.Err() == nil {
		rows, err := r.source.Query(ctx, listKeys, after, pageSize)
		if err != nil {
			return err
		}
		keys, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil || len(keys) == 0 {
			return err
		}
		for _, key := range keys {
			r.note(ctx, key)
		}
		after = &keys[len(keys)-1]
	}
	return ctx.Err()
}

// note moves a bucket and counts what became of it.
func (r *run) note(ctx context.Context, key string) {
	d, outcome, err := r.move(ctx, key)
	var refused *refusal
	switch {
	case errors.As(err, &refused):
		outcome = Skipped
	case err != nil:
		outcome = Failed
	}
	r.summary.Buckets[outcome]++
	if outcome == Imported {
		r.summary.Leases += int64(len(d.leases))
		r.summary.UsedTokens += d.used
		r.summary.ReservedTokens += d.reserved
	}
	if err != nil {
		r.options.Report(key, outcome, err)
	}
}

// move moves one bucket, or finds that it has been.
func (r *run) move(ctx context.Context, key string) (*document, Outcome, error) {
	check := func(d *document, m move) error { return r.check(ctx, d, m) }
	if r.options.DryRun {
		m, err := moveOf(ctx, r.source, key)
		if err != nil {
			return nil, Failed, err
		}
		d, err := read(ctx, r.source, key)
		if err == nil {
			err = check(d, m)
		}
		if errors.Is(err, errImported) {
			return nil, AlreadyImported, nil
		}
		return d, Imported, err
	}
	d, m, fresh, err := fence(ctx, r.source, key, r.ledgerID, check)
	switch {
	case errors.Is(err, errImported):
		_, err := r.source.Exec(ctx, endMove, key)
		return nil, AlreadyImported, err
	case err != nil:
		return nil, Failed, err
	}
	return r.write(ctx, d, m, fresh)
}

// check refuses a bucket that the ledger cannot take, and ends with errImported where
// it has taken it by this very move.
func (r *run) check(ctx context.Context, d *document, m move) error {
	var clock time.Time
	var known bool
	var imported string
	err := r.target.QueryRow(ctx, targetOf, d.bucket, string(ledger.AuditBucketImported)).Scan(&clock, &known, &imported)
	if err != nil {
		return err
	}
	if m.id != "" && imported == operationOf(m) && m.revision == d.revision {
		return errImported
	}
	if err := m.check(d, r.ledgerID); err != nil {
		return err
	}
	if known {
		return refuse("the ledger knows a bucket of this key already, which did not come from here; two are never made one%s", m.hint())
	}
	if err := d.checkTarget(clock); err != nil {
		return &refusal{err}
	}
	return nil
}

// write makes the bucket, and notes beside the source that it was made. Should somebody
// have made one of its key since it was looked for, the package's writers are let in
// again, if it was this run that kept them out.
func (r *run) write(ctx context.Context, d *document, m move, fresh bool) (*document, Outcome, error) {
	err := pgx.BeginFunc(ctx, r.target, func(tx pgx.Tx) error { return insert(ctx, tx, d, m) })
	var reply *pgconn.PgError
	const uniqueViolation = "23505"
	if errors.As(err, &reply) && reply.Code == uniqueViolation {
		err = r.check(ctx, d, m)
		if errors.Is(err, errImported) {
			return nil, AlreadyImported, nil
		}
		if fresh {
			_, lifted := r.source.Exec(ctx, takeFence, d.bucket)
			err = errors.Join(err, lifted)
		}
		return nil, Failed, err
	}
	if err != nil {
		return nil, Failed, err
	}
	_, err = r.source.Exec(ctx, endMove, d.bucket)
	return d, Imported, err
}
