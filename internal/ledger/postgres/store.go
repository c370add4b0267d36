package postgres

import (
	"context"
	"errors"
	"math"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/token-lease/operator/internal/ledger"
)

// Defaults of Options.
const (
	DefaultLockTimeout              = 2 * time.Second
	DefaultStatementTimeout         = 5 * time.Second
	DefaultIdleInTransactionTimeout = 5 * time.Second
	DefaultCallTimeout              = 30 * time.Second
	DefaultMaxConnections           = 16
	DefaultApplicationName          = "tokenlease"
)

// MinConnections is the least that MaxConnections bounds: for callers one connection
// to serve buckets together and one to serve them alone, beside those that are kept
// for reads, the sweeper and health.
const MinConnections = 2 + readConnections + watchConnections

const (
	connectTimeout = 5 * time.Second
	pingTimeout    = 2 * time.Second
	// networkAllowance is what a transaction may take beyond what the server
	// bounds, before the connection counts as dead.
	networkAllowance = 2 * time.Second
	// connectionLifetime bounds how long a connection outlives a change of the
	// connection string.
	connectionLifetime = 10 * time.Minute
	// readConnections and watchConnections are kept apart from the callers'.
	readConnections  = 2
	watchConnections = 2
	// refusedBackoff is how long credentials that were refused are not shown to
	// the server again, so that an account is not locked by repetition.
	refusedBackoff = 2 * time.Second
)

// Options configure a Store.
type Options struct {
	// ConnString returns a connection string, URL or keyword form. It is asked for
	// each new connection, so that a rotated password or a moved host is picked up
	// without a restart. Required.
	ConnString func(context.Context) (string, error)
	// Worker names this process in the audit. Required.
	Worker string
	// Observer is told of transitions once they are durable; nil observes nothing.
	Observer ledger.Observer
	// MaxConnections bounds the connections. A few of them are kept for reads, and
	// for the sweeper and the checks of health; the others are the callers'.
	MaxConnections int
	// ApplicationName is shown in pg_stat_activity.
	ApplicationName string
	// LockTimeout, StatementTimeout and IdleInTransactionTimeout bound each
	// transaction, on the server.
	LockTimeout              time.Duration
	StatementTimeout         time.Duration
	IdleInTransactionTimeout time.Duration
	// CallTimeout bounds a call as a whole, whatever its context says.
	CallTimeout time.Duration
}

func (o *Options) setDefaults() {
	setDefault(&o.Observer, ledger.Observer(ledger.NopObserver{}))
	setDefault(&o.MaxConnections, DefaultMaxConnections)
	setDefault(&o.ApplicationName, DefaultApplicationName)
	setDefault(&o.LockTimeout, DefaultLockTimeout)
	setDefault(&o.StatementTimeout, DefaultStatementTimeout)
	setDefault(&o.IdleInTransactionTimeout, DefaultIdleInTransactionTimeout)
	setDefault(&o.CallTimeout, DefaultCallTimeout)
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// Store is a ledger.Store over PostgreSQL. Its methods may be called
// concurrently.
type Store struct {
	options Options
	// pool serves Do, reads what lists rows, and watch the sweeper and the checks of
	// health: none of them ever waits for another kind's connections.
	pool, reads, watch *pgxpool.Pool
	engine             *engine
	refused            refusedCredentials
}

var _ ledger.Store = (*Store)(nil)

// Open returns a store without connecting: a process may start while its database
// is down, and calls fail until it is up. Call Check to learn about that, and
// Close at the end.
func Open(options Options) (*Store, error) {
	if options.ConnString == nil || options.Worker == "" {
		return nil, errors.New("postgres store: ConnString and Worker are required")
	}
	options.setDefaults()
	s := &Store{options: options}
	callers := max(options.MaxConnections, MinConnections) - readConnections - watchConnections
	var err error
	for _, p := range []struct {
		pool        **pgxpool.Pool
		connections int
	}{
		{&s.pool, callers},
		{&s.reads, readConnections},
		{&s.watch, watchConnections},
	} {
		if *p.pool, err = s.newPool(p.connections, p.pool == &s.pool); err != nil {
			return nil, err
		}
	}
	s.engine = newEngine(s, callers)
	return s, nil
}

func (s *Store) newPool(connections int, hot bool) (*pgxpool.Pool, error) {
	// The pool wants a configuration to start from; each connection replaces it.
	config, err := pgxpool.ParseConfig("host=localhost")
	if err != nil {
		return nil, err
	}
	config.MaxConns = int32(max(1, min(connections, math.MaxInt32)))
	config.MaxConnLifetime = connectionLifetime
	config.MaxConnLifetimeJitter = connectionLifetime / 5
	config.PingTimeout = pingTimeout
	config.BeforeConnect = s.configureConnection
	if hot {
		config.AfterConnect = s.prepareConnection
	}
	return pgxpool.NewWithConfig(context.Background(), config)
}

func (s *Store) pools() []*pgxpool.Pool { return []*pgxpool.Pool{s.pool, s.reads, s.watch} }

// Close takes in no more calls, answers those that were taken in, and ends all
// connections.
func (s *Store) Close() {
	s.engine.close()
	for _, pool := range s.pools() {
		pool.Close()
	}
}

// configureConnection is called for each new connection.
func (s *Store) configureConnection(ctx context.Context, config *pgx.ConnConfig) error {
	text, err := s.options.ConnString(ctx)
	if err != nil {
		return &connectionStringError{err}
	}
	fresh, err := parseConnString(text)
	if err != nil {
		return err
	}
	if err := s.refused.check(&fresh.Config); err != nil {
		return err
	}
	fresh.RuntimeParams["application_name"] = s.options.ApplicationName
	if fresh.ValidateConnect == nil {
		// A standby cannot be written; whether a primary wants to be read only by
		// default does not matter, because transactions say what they are.
		fresh.ValidateConnect = pgconn.ValidateConnectTargetSessionAttrsPrimary
	}
	*config = *fresh
	return nil
}

// parseConnString reads a connection string and sets what this package relies on.
// Its error does not repeat the string, which may hold a password.
func parseConnString(text string) (*pgx.ConnConfig, error) {
	config, err := pgx.ParseConfig(text)
	if err != nil {
		return nil, &connectionStringError{errors.New("it is neither a postgres:// URL nor a list of keyword=value")}
	}
	if config.ConnectTimeout == 0 {
		config.ConnectTimeout = connectTimeout
	}
	// One-shot unnamed statements are what a transaction pooler can pass on.
	config.DefaultQueryExecMode = pgx.QueryExecModeExec
	config.StatementCacheCapacity = 0
	config.DescriptionCacheCapacity = 0
	// Values travel as text in this mode, so their form must not depend on how the
	// database is set up. Poolers know these parameters.
	config.RuntimeParams["datestyle"] = "ISO"
	config.RuntimeParams["timezone"] = "UTC"
	return config, nil
}

// connectionStringError says that no connection string could be had.
type connectionStringError struct{ err error }

func (e *connectionStringError) Error() string {
	return "the connection string cannot be used: " + e.err.Error()
}

func (e *connectionStringError) Unwrap() error { return e.err }

// errRefusedRecently stands for a server that refused the same credentials a
// moment ago.
var errRefusedRecently = errors.New("the server refused these credentials a moment ago; they are not tried again yet")

// refusedCredentials remembers what the server refused latest.
type refusedCredentials struct {
	mutex       sync.Mutex
	credentials credentials
	until       time.Time
}

// credentials are who somebody claims to be, and to whom.
type credentials struct {
	host, user, password string
	port                 uint16
}

func credentialsOf(config *pgconn.Config) credentials {
	return credentials{host: config.Host, port: config.Port, user: config.User, password: config.Password}
}

func (r *refusedCredentials) check(config *pgconn.Config) error {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if credentialsOf(config) == r.credentials && time.Now().Before(r.until) {
		return errRefusedRecently
	}
	return nil
}

// note looks at why there is no connection.
func (r *refusedCredentials) note(err error) {
	var attempt *pgconn.ConnectError
	var reply *pgconn.PgError
	if !errors.As(err, &attempt) || !errors.As(err, &reply) || classOf(reply.Code) != classInvalidAuthorization {
		return
	}
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.credentials, r.until = credentialsOf(attempt.Config), time.Now().Add(refusedBackoff)
}

// acquire takes a connection from a pool.
func (s *Store) acquire(ctx context.Context, pool *pgxpool.Pool) (*pgxpool.Conn, error) {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		s.refused.note(err)
		return nil, &acquireError{err}
	}
	return conn, nil
}

// acquireError marks an error that came before anything was sent.
type acquireError struct{ err error }

func (e *acquireError) Error() string { return "no connection: " + e.err.Error() }
func (e *acquireError) Unwrap() error { return e.err }

// transactionBound is how long one transaction may take for this process: the
// server ends it earlier unless the network hangs.
func (s *Store) transactionBound() time.Duration {
	return s.options.LockTimeout + s.options.StatementTimeout + networkAllowance
}
