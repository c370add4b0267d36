package postgres

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

const connectTimeout = 10 * time.Second

// URL names a database of this server, whether it exists or not. It holds the
// password: do not log it.
func (s *Server) URL(database string) string {
	named := s.base
	named.Path = "/" + database
	return named.String()
}

// Address is the server's host and port.
func (s *Server) Address() string { return s.base.Host }

// CreateDatabase makes an empty database.
func (s *Server) CreateDatabase(ctx context.Context, name string) error {
	// template0, because a connection to template1 would make this fail.
	err := s.execute(ctx, "CREATE DATABASE "+pgx.Identifier{name}.Sanitize()+" TEMPLATE template0")
	if err != nil {
		return fmt.Errorf("create database %s: %w", name, err)
	}
	return nil
}

// DropDatabase removes a database and disconnects whoever uses it. A database
// that is not there is no error.
func (s *Server) DropDatabase(ctx context.Context, name string) error {
	err := s.execute(ctx, "DROP DATABASE IF EXISTS "+pgx.Identifier{name}.Sanitize()+" WITH (FORCE)")
	if err != nil {
		return fmt.Errorf("drop database %s: %w", name, err)
	}
	return nil
}

// role is who this connects as, and whether that is a superuser.
func (s *Server) role(ctx context.Context) (name string, isSuperuser bool, err error) {
	err = s.with(ctx, func(conn *pgx.Conn) error {
		return conn.QueryRow(ctx, "SELECT rolname, rolsuper FROM pg_catalog.pg_roles WHERE rolname = current_user").
			Scan(&name, &isSuperuser)
	})
	return name, isSuperuser, err
}

func (s *Server) ping(ctx context.Context) error { return s.execute(ctx, "SELECT 1") }

func (s *Server) execute(ctx context.Context, statement string) error {
	return s.with(ctx, func(conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, statement)
		return err
	})
}

// with lends a connection that nobody else uses, so that the server can go down
// and come back between two calls.
func (s *Server) with(ctx context.Context, use func(*pgx.Conn) error) error {
	config, err := pgx.ParseConfig(s.base.String())
	if err != nil {
		return err
	}
	config.ConnectTimeout = connectTimeout
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	return use(conn)
}
