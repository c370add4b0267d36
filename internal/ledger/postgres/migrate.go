package postgres

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"
)

//go:embed migrations/*.sql
var migrations embed.FS

const (
	versionTable = "tokenlease.schema_version"
	lockTable    = "tokenlease.schema_lock"

	lockInterval = 250 * time.Millisecond
	// lockAttempts times lockInterval is five minutes: longer than any migration
	// should take.
	lockAttempts = 1200

	schemaAttempts = 5
	schemaPause    = 50 * time.Millisecond
)

// schemaExists comes first because CREATE SCHEMA asks for the privilege to create
// even when the schema is there.
const (
	schemaExists = `SELECT to_regnamespace('tokenlease') IS NOT NULL`
	createSchema = `CREATE SCHEMA IF NOT EXISTS tokenlease`
	grantRuntime = `SELECT tokenlease.grant_runtime($1::name)`
)

// Migrate brings the schema up to date and returns the names of the migrations
// that it applied. It may be run again, and by several processes at once. The
// role needs the right to create a schema in the database, or a schema
// "tokenlease" of its own.
func Migrate(ctx context.Context, connString string) (applied []string, err error) {
	db, err := openDatabase(connString)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	if err := ensureSchema(ctx, db); err != nil {
		return nil, fmt.Errorf("create schema tokenlease: %w", err)
	}
	provider, err := newProvider(db)
	if err != nil {
		return nil, err
	}
	results, err := provider.Up(ctx)
	for _, result := range results {
		if result.Error == nil {
			applied = append(applied, result.Source.Path)
		}
	}
	if err != nil {
		return applied, fmt.Errorf("migrate: %w", err)
	}
	return applied, nil
}

// GrantRuntime gives an existing role what a Store needs and nothing more. It is
// run by the role that ran Migrate.
func GrantRuntime(ctx context.Context, connString, role string) (err error) {
	db, err := openDatabase(connString)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	if _, err := db.ExecContext(ctx, grantRuntime, role); err != nil {
		return fmt.Errorf("grant to role %q: %w", role, err)
	}
	return nil
}

func openDatabase(connString string) (*sql.DB, error) {
	config, err := parseConnString(connString)
	if err != nil {
		return nil, err
	}
	config.RuntimeParams["application_name"] = DefaultApplicationName + "-migrate"
	return stdlib.OpenDB(*config), nil
}

// ensureSchema makes the schema, in which the migrations keep their own tables.
// PostgreSQL lets two CREATE SCHEMA IF NOT EXISTS collide, so it is repeated.
func ensureSchema(ctx context.Context, db *sql.DB) error {
	var err error
	for range schemaAttempts {
		var exists bool
		if err = db.QueryRowContext(ctx, schemaExists).Scan(&exists); err != nil || exists {
			return err
		}
		if _, err = db.ExecContext(ctx, createSchema); err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(schemaPause):
		}
	}
	return err
}

func newProvider(db *sql.DB) (*goose.Provider, error) {
	files, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return nil, err
	}
	// A row of a table, unlike an advisory lock of a session, also excludes others
	// through a transaction pooler.
	locker, err := lock.NewPostgresTableLocker(
		lock.WithTableName(lockTable),
		lock.WithTableLockTimeout(lockInterval, lockAttempts),
		lock.WithTableUnlockTimeout(lockInterval, lockAttempts),
		lock.WithTableLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		return nil, err
	}
	return goose.NewProvider(goose.DialectPostgres, db, files,
		goose.WithTableName(versionTable),
		goose.WithLocker(locker),
		goose.WithDisableGlobalRegistry(true),
		goose.WithLogger(goose.NopLogger()))
}

// latestVersion is the newest migration that this build knows: files are numbered,
// and ReadDir sorts them by name.
func latestVersion() (int64, error) {
	files, err := migrations.ReadDir("migrations")
	if err != nil {
		return 0, err
	}
	return goose.NumericComponent(files[len(files)-1].Name())
}
