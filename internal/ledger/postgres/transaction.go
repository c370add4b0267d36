package postgres

import (
	"context"
	"fmt"
	"runtime/debug"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/token-lease/operator/internal/fault"
	"github.com/token-lease/operator/internal/ledger"
)

const (
	beginTransaction    = `BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE`
	commitTransaction   = `COMMIT`
	rollbackTransaction = `ROLLBACK`

	// setBounds bounds a transaction ($5 is true), or all of a session, so that a
	// process that stops in the middle holds its locks no longer than this. Where half a pipeline arrives none of the first three
	// bounds counts: a peer that is gone is found by its silence, and one that only
	// stopped by the bound of the whole transaction, which PostgreSQL 17 brought. It
	// also tells the schema's triggers that this is the ledger and no other hand, and
	// has every row looked up through an index, whatever the server knows, or once
	// knew, of the size of the tables.
	setBounds = `
SELECT set_config('lock_timeout', $1::text, $5::boolean),
	set_config('statement_timeout', $2::text, $5::boolean),
	set_config('idle_in_transaction_session_timeout', $3::text, $5::boolean),
	CASE WHEN current_setting('transaction_timeout', true) IS NOT NULL
		THEN set_config('transaction_timeout', $4::text, $5::boolean) END,
	set_config('tcp_keepalives_idle', '5s', $5::boolean),
	set_config('tcp_keepalives_interval', '1s', $5::boolean),
	set_config('tcp_keepalives_count', '4', $5::boolean),
	set_config('tokenlease.writer', 'ledger', $5::boolean),
	set_config('plan_cache_mode', 'force_generic_plan', $5::boolean),
	set_config('enable_seqscan', 'off', $5::boolean),
	set_config('enable_hashjoin', 'off', $5::boolean),
	set_config('enable_mergejoin', 'off', $5::boolean),
	set_config('jit', 'off', $5::boolean)`

	// lookUpByBitmap holds for the writes of a transaction, which join the rows to
	// write with new values. Planned while a table was empty, such a join reads all of
	// an index for each of them, and the plan stays when the table has grown. A bitmap
	// is only made of what an index is asked for.
	lookUpByBitmap = `SELECT set_config('enable_indexscan', 'off', true)`

	setLockTimeout = `SELECT set_config('lock_timeout', $1::text, true)`

	rollbackTimeout = 2 * time.Second
)

// transaction is one attempt to serve some groups.
type transaction struct {
	store  *Store
	conn   *pgx.Conn
	loader *loader
	terms  terms
	// readAt is when the clock's value arrived here.
	readAt time.Time
	// committing is set once COMMIT may have been sent.
	committing bool
	answers    map[string]answer
}

// answer is what the rules said about one bucket.
type answer struct {
	// calls are those that were decided on, with their results one after another.
	calls   []*call
	results []ledger.Result
	effects *ledger.Effects
	// piled is set when more leases were overdue than one transaction settles. It
	// settled as many as it does, and performed what else was due; the requests are
	// still to be served.
	piled bool
}

// terms are what a transaction is run under.
type terms struct {
	pool *pgxpool.Pool
	// lockTimeout bounds the wait for each lock.
	lockTimeout time.Duration
	// lock is the statement that locks the buckets.
	lock string
}

// longestSharedWait is the most that sharedLockTimeout can be.
const longestSharedWait = 250 * time.Millisecond

// serveTogether carries out groups of different buckets in one transaction, those
// that nobody else has locked and that have a row. It returns no answer for the
// others.
func (s *Store) serveTogether(ctx context.Context, groups []*group) (map[string]answer, error) {
	return s.serve(ctx, groups, terms{
		pool: s.pool, lockTimeout: s.sharedLockTimeout(), lock: lockFreeBuckets,
	})
}

// serveAlone carries out one bucket's group, waiting for its lock, or for the lock
// that an absent bucket would have.
func (s *Store) serveAlone(ctx context.Context, g *group) (map[string]answer, error) {
	return s.serve(ctx, []*group{g}, terms{pool: s.pool, lockTimeout: s.options.LockTimeout, lock: lockBuckets})
}

// serve carries out groups in one transaction. After an error nothing of them was
// done, unless the error says that this is unknown.
func (s *Store) serve(ctx context.Context, groups []*group, terms terms) (map[string]answer, error) {
	return s.inTransaction(ctx, groups, terms, func(ctx context.Context, t *transaction) ([]*group, error) {
		batch := &pgx.Batch{}
		t.queueBegin(batch)
		t.loader.queueLock(batch, terms.lock)
		t.loader.queueReads(batch)
		if err := t.send(ctx, batch); err != nil || terms.lock == lockBuckets {
			return groups, err
		}
		return slices.DeleteFunc(slices.Clone(groups), func(g *group) bool {
			return t.loader.view(g.key).Bucket == nil
		}), nil
	})
}

// inTransaction runs the groups that load returns.
func (s *Store) inTransaction(
	caller context.Context, groups []*group, terms terms,
	load func(context.Context, *transaction) ([]*group, error),
) (map[string]answer, error) {
	ctx, cancel := context.WithTimeout(caller, s.transactionBound())
	defer cancel()
	conn, err := s.acquire(ctx, terms.pool)
	if err != nil {
		return nil, s.failed(caller, err, false)
	}
	t := &transaction{store: s, conn: conn.Conn(), loader: newLoader(groups), terms: terms, answers: map[string]answer{}}
	committed := false
	defer func() {
		if committed {
			conn.Release()
		} else {
			t.rollBack(ctx, conn)
		}
	}()
	if err := t.run(ctx, load); err != nil {
		return nil, s.failed(caller, err, t.committing)
	}
	committed = true
	t.observe()
	return t.answers, nil
}

func (t *transaction) run(ctx context.Context, load func(context.Context, *transaction) ([]*group, error)) error {
	groups, err := load(ctx, t)
	if err != nil {
		return err
	}
	t.readAt = time.Now()
	if err := t.loadMore(ctx, groups); err != nil {
		return err
	}
	fault.Point("ledger.locked")
	for _, g := range groups {
		view := t.loader.view(g.key)
		piled := piled(view)
		calls, requests := g.decide(piled)
		results, effects, err := t.ask(view, requests)
		if err != nil {
			return err
		}
		t.answers[g.key] = answer{calls, results, effects, piled}
	}
	return t.write(ctx, groups)
}

// ask has the rules decide. Should they break on a row, the process and the other
// buckets go on: it is as if the server had refused the transaction.
func (t *transaction) ask(view *ledger.View, requests []ledger.Request) (results []ledger.Result, effects *ledger.Effects, err error) {
	defer func() {
		if broken := recover(); broken != nil {
			err = &rulesError{broken, debug.Stack()}
		}
	}()
	results, effects = ledger.Run(view, t.loader.clock, t.store.options.Worker, requests)
	return results, effects, nil
}

// rulesError says that the rules broke, and where.
type rulesError struct {
	broken any
	stack  []byte
}

func (e *rulesError) Error() string { return fmt.Sprintf("the rules broke: %v\n%s", e.broken, e.stack) }

// queueBegin begins a transaction under its bounds. A session of this process's own
// has them already, but for the wait for locks.
func (t *transaction) queueBegin(batch *pgx.Batch) {
	batch.Queue(beginTransaction)
	switch {
	case !isOwnSession(t.conn):
		batch.Queue(setBounds, t.store.bounds(t.terms.lockTimeout, true)...)
	case t.terms.lockTimeout != t.store.sharedLockTimeout():
		batch.Queue(setLockTimeout, inMilliseconds(t.terms.lockTimeout))
	}
}

// bounds are the arguments of setBounds.
func (s *Store) bounds(lockTimeout time.Duration, transactionOnly bool) []any {
	return []any{
		inMilliseconds(lockTimeout), inMilliseconds(s.options.StatementTimeout),
		inMilliseconds(s.options.IdleInTransactionTimeout), inMilliseconds(s.transactionBound()), transactionOnly,
	}
}

// sharedLockTimeout bounds the wait for a lock in a transaction of many buckets,
// which all wait along: whoever is in the way gets a transaction of its own.
func (s *Store) sharedLockTimeout() time.Duration {
	return min(s.options.LockTimeout, longestSharedWait)
}

// inMilliseconds is at least one: zero would mean no bound at all.
func inMilliseconds(d time.Duration) string {
	return strconv.FormatInt(max(1, d.Milliseconds()), 10) + "ms"
}

// loadMore reads what only the rows that were read have shown to be needed, which is
// hardly ever anything.
func (t *transaction) loadMore(ctx context.Context, groups []*group) error {
	batch := &pgx.Batch{}
	if missing := t.loader.missing(groups); len(missing) > 0 {
		t.loader.queueHistories(batch, missing)
	}
	t.loader.queuePeriods(batch)
	if batch.Len() == 0 {
		return nil
	}
	return t.send(ctx, batch)
}

// write sends what was decided, and COMMIT, in one pipeline: the first statement
// that fails keeps the server from reaching the COMMIT.
func (t *transaction) write(ctx context.Context, groups []*group) error {
	var buckets bucketWrites
	var retention retentionWrites
	var leases leaseWrites
	var periods periodWrites
	var raises raiseWrites
	var approvals approvalWrites
	var operations operationWrites
	var audit []ledger.AuditRow
	locked := false
	for _, g := range groups {
		view, effects := t.loader.view(g.key), t.answers[g.key].effects
		locked = locked || view.Bucket != nil || effects.Row == ledger.RowDelete
		if effects.Empty() {
			continue
		}
		before := t.loader.before[g.key]
		buckets.add(&before, view, effects)
		retention.add(view, effects)
		leases.add(view, effects)
		periods.add(view, effects)
		raises.add(effects)
		approvals.add(effects)
		operations.add(view, effects)
		audit = append(audit, effects.Audit...)
	}
	batch := &pgx.Batch{}
	batch.Queue(lookUpByBitmap)
	buckets.queue(batch, t.loader.clock)
	retention.queue(batch)
	leases.queue(batch)
	periods.queue(batch)
	raises.queue(batch)
	approvals.queue(batch)
	if err := operations.queue(batch); err != nil {
		return err
	}
	queueAudit(batch, audit)
	if len(groups) > 0 && batch.Len() == 1 && !locked {
		// That there is no row may be an earlier transaction's doing, which must not be
		// answered before it is durable. Locking a row would have written to the log.
		batch.Queue(writeToLog)
	}
	var outcome string
	batch.Queue(commitTransaction).Exec(func(tag pgconn.CommandTag) error {
		outcome = tag.String()
		return nil
	})
	fault.Point("ledger.before-write")
	// Up to here it is certain that nothing was done.
	if err := ctx.Err(); err != nil {
		return err
	}
	if t.conn.IsClosed() {
		return pgconn.ErrConnClosed
	}
	t.committing = true
	if err := t.send(ctx, batch); err != nil {
		return err
	}
	// The server answers COMMIT with ROLLBACK when the transaction had failed.
	if outcome != commitTransaction {
		t.committing = false
		return fmt.Errorf("COMMIT was answered with %q", outcome)
	}
	fault.Point("ledger.committed")
	return nil
}

func (t *transaction) send(ctx context.Context, batch *pgx.Batch) error {
	return t.conn.SendBatch(ctx, batch).Close()
}

// rollBack returns the connection to the pool, which throws it away if it is
// still in a transaction.
func (t *transaction) rollBack(ctx context.Context, conn *pgxpool.Conn) {
	defer conn.Release()
	if t.conn.IsClosed() {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
	defer cancel()
	// An error leaves the connection unusable, which the pool notices.
	_, _ = t.conn.Exec(ctx, rollbackTransaction)
}

// observe reports transitions, which are durable now.
func (t *transaction) observe() {
	confirmed := time.Since(t.readAt)
	for _, a := range t.answers {
		for _, transition := range a.effects.Transitions {
			t.store.options.Observer.ObserveTransition(transition, confirmed)
		}
	}
}
