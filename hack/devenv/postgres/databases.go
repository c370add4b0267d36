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

func (s *Server) ping(ctx context.Context) error { return s.execute(ctx, "SELECT 1") }

// execute runs one statement on a connection of its own, so that the server can
// go down and come back between two calls.
func (s *Server) execute(ctx context.Context, statement string) error {
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
	_, err = conn.Exec(ctx, statement)
	return err
}
