// Package importer brings buckets over from the PostgreSQL table of the npm package
// token-lease@0.1.0: limits, usage, leases and the hashes of their requests, so that
// a request which the package has seen is recognised here.
//
// Each bucket is moved in two steps. First the package's writers are kept out, under
// the package's own lock and for good; then the bucket is written here, in one
// transaction. A run that ends in between is finished by the next one, since the
// document cannot change any more. What cannot be moved as it is stays where it is.
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
	// The role of the source must be allowed to create a table, a function and a
	// trigger beside the package's table.
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

// errImported ends the move of a bucket that another run has moved meanwhile.
var errImported = errors.New("it was imported meanwhile")

func refuse(format string, args ...any) error { return &refusal{fmt.Errorf(format, args...)} }

// run is one run.
type run struct {
	options        Options
	source, target *pgx.Conn
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
	after := ""
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
		after = keys[len(keys)-1]
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
	case errors.Is(err, pgx.ErrNoRows):
		outcome, err = Skipped, errors.New("the package has no such bucket")
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

func (r *run) move(ctx context.Context, key string) (*document, Outcome, error) {
	check := func(d *document) error { return r.checkTarget(ctx, d) }
	imported, err := r.isImported(ctx, key)
	if err != nil || imported {
		return nil, AlreadyImported, err
	}
	if r.options.DryRun {
		d, err := read(ctx, r.source, key)
		if err == nil {
			err = check(d)
		}
		return d, Imported, err
	}
	d, err := fence(ctx, r.source, key, check)
	switch {
	case errors.Is(err, errImported):
		return nil, AlreadyImported, nil
	case err != nil:
		return nil, Failed, err
	}
	return r.write(ctx, d)
}

// checkTarget refuses a document that the ledger cannot take.
func (r *run) checkTarget(ctx context.Context, d *document) error {
	var clock time.Time
	var known bool
	if err := r.target.QueryRow(ctx, bucketIsKnown, d.bucket).Scan(&clock, &known); err != nil {
		return err
	}
	if known {
		switch imported, err := r.isImported(ctx, d.bucket); {
		case err != nil:
			return err
		case imported:
			return errImported
		}
		return refuse("the ledger knows a bucket of this key already; two are never made one")
	}
	if err := d.checkTarget(clock); err != nil {
		return &refusal{err}
	}
	return nil
}

func (r *run) isImported(ctx context.Context, key string) (imported bool, err error) {
	err = r.target.QueryRow(ctx, bucketIsImported, key, string(ledger.AuditBucketImported)).Scan(&imported)
	return imported, err
}

// write makes the bucket. Should somebody have made one of its key since it was
// looked for, the package's writers are let in again.
func (r *run) write(ctx context.Context, d *document) (*document, Outcome, error) {
	err := pgx.BeginFunc(ctx, r.target, func(tx pgx.Tx) error { return insert(ctx, tx, d) })
	var reply *pgconn.PgError
	const uniqueViolation = "23505"
	if !errors.As(err, &reply) || reply.Code != uniqueViolation {
		return d, Imported, err
	}
	imported, err := r.isImported(ctx, d.bucket)
	if err != nil || imported {
		return nil, AlreadyImported, err
	}
	if _, err := r.source.Exec(ctx, takeFence, d.bucket); err != nil {
		return nil, Failed, err
	}
	return nil, Skipped, refuse("the ledger has got a bucket of this key meanwhile; two are never made one")
}
