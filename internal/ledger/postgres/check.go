package postgres

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/token-lease/operator/internal/ledger"
)

const oldestServer = 140000

const (
	schemaVersion = `
SELECT coalesce(max(v.version_id), 0)
FROM tokenlease.schema_version AS v
WHERE v.is_applied`

	// writeToLog makes COMMIT wait until the server's log is durable, on a synchronous
	// standby too, although no row was written or locked. Having a transaction ID
	// alone would not.
	writeToLog = `SELECT pg_logical_emit_message(true, 'tokenlease', '')`

	durability = `
SELECT
	current_setting('server_version_num')::int,
	current_setting('server_version'),
	current_setting('synchronous_commit'),
	current_setting('fsync'),
	current_setting('full_page_writes'),
	current_setting('synchronous_standby_names') <> '',
	EXISTS (SELECT 1 FROM pg_stat_replication)`
)

// Check looks at the server that the store would use. It fails when the ledger
// could not work there, and warns of settings under which a confirmed COMMIT may
// be lost.
func (s *Store) Check(ctx context.Context) (warnings []string, err error) {
	if err := s.Writable(ctx); err != nil {
		return nil, err
	}
	found, err := list(ctx, s, s.watch, durability, scanSettings)
	if err != nil {
		return nil, err
	}
	settings := found[0]
	if settings.version < oldestServer {
		return nil, ledger.Errorf(ledger.CodeUnavailable, "PostgreSQL %s is too old: version %d or newer is needed.",
			settings.versionText, oldestServer/10000)
	}
	applied, err := s.schemaVersion(ctx)
	if err != nil {
		return nil, err
	}
	if latest, err := latestVersion(); err != nil {
		return nil, err
	} else if applied > latest {
		warnings = append(warnings, fmt.Sprintf("the schema is at version %d, newer than this build's %d", applied, latest))
	}
	return append(warnings, settings.warnings()...), nil
}

type settings struct {
	version                                 int
	versionText                             string
	synchronousCommit, fsync, fullPageWrite string
	synchronousStandbys, standbys           bool
}

func scanSettings(row pgx.CollectableRow) (v settings, err error) {
	err = row.Scan(&v.version, &v.versionText, &v.synchronousCommit, &v.fsync, &v.fullPageWrite,
		&v.synchronousStandbys, &v.standbys)
	return v, err
}

func (v settings) warnings() []string {
	var warnings []string
	if v.synchronousCommit == "off" {
		warnings = append(warnings, "synchronous_commit is off: a crash of the server loses what it had confirmed")
	}
	if v.fsync == "off" {
		warnings = append(warnings, "fsync is off: a crash of the machine loses what was confirmed")
	}
	if v.fullPageWrite == "off" {
		warnings = append(warnings, "full_page_writes is off: a crash of the machine can corrupt pages")
	}
	if v.standbys && (!v.synchronousStandbys || v.synchronousCommit == "local") {
		warnings = append(warnings, "there is a standby, but replication is not synchronous: a failover loses what was confirmed")
	}
	return warnings
}

// Writable implements ledger.Store: it commits a transaction that changes nothing
// but the server's log, and makes sure that the migrations that this build needs
// have been applied. It takes no longer than one transaction may.
func (s *Store) Writable(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, min(s.options.CallTimeout, s.transactionBound()))
	defer cancel()
	err := s.attempt(ctx, readAttempts, nil, func() error { return s.commitNothing(ctx) })
	if err != nil {
		return domainError(err)
	}
	applied, err := s.schemaVersion(ctx)
	if err != nil {
		return err
	}
	latest, err := latestVersion()
	if err != nil {
		return err
	}
	if applied < latest {
		return ledger.Errorf(ledger.CodeUnavailable,
			"The ledger's database is at migration %d, and %d is needed: run manager migrate.", applied, latest)
	}
	return nil
}

func (s *Store) commitNothing(ctx context.Context) error {
	caller := ctx
	ctx, cancel := context.WithTimeout(ctx, s.transactionBound())
	defer cancel()
	conn, err := s.acquire(ctx, s.watch)
	if err != nil {
		return s.failed(caller, err, false)
	}
	t := &transaction{store: s, conn: conn.Conn(), terms: terms{lockTimeout: s.options.LockTimeout}}
	batch := &pgx.Batch{}
	t.queueBegin(batch)
	batch.Queue(writeToLog)
	batch.Queue(commitTransaction)
	if err := t.send(ctx, batch); err != nil {
		failure := s.failed(caller, err, false)
		t.rollBack(ctx, conn)
		return failure
	}
	conn.Release()
	return nil
}

func (s *Store) schemaVersion(ctx context.Context) (int64, error) {
	found, err := list(ctx, s, s.watch, schemaVersion, pgx.RowTo[int64])
	if err != nil {
		return 0, err
	}
	return found[0], nil
}
