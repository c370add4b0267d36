package postgres

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/jackc/pgx/v5"
)

const (
	// promotionTimeoutSeconds bounds how long a promotion is waited for.
	promotionTimeoutSeconds = 60
	// standbyRetry is how soon a standby tries again to reach its primary.
	standbyRetry = "200ms"
)

// StartStandby starts a server that follows this one: it streams what this one commits
// and answers reads. The caller ends it with Stop.
func (s *Server) StartStandby(ctx context.Context) (_ *Server, err error) {
	if s.given {
		return nil, ErrGivenServer
	}
	standby := &Server{options: s.options, programs: s.programs, account: s.account}
	defer func() {
		if err != nil {
			err = errors.Join(err, standby.Stop(context.WithoutCancel(ctx)))
		}
	}()
	if standby.dir, err = standby.account.scratch(); err != nil {
		return nil, err
	}
	if err := standby.copyFrom(ctx, s); err != nil {
		return nil, err
	}
	if err := standby.setPrimary(s); err != nil {
		return nil, err
	}
	// The copy has the primary's password.
	password, _ := s.base.User.Password()
	if err := standby.listen(ctx, password); err != nil {
		return nil, err
	}
	return standby, s.awaitFollower(ctx)
}

// copyFrom runs pg_basebackup.
func (s *Server) copyFrom(ctx context.Context, primary *Server) error {
	password, _ := primary.base.User.Password()
	program := filepath.Join(filepath.Dir(s.programs.postgres), "pg_basebackup")
	args := []string{
		"--pgdata=" + s.dataDir(), "--host=" + primary.base.Hostname(), "--port=" + primary.base.Port(),
		"--username=" + superuser, "--checkpoint=fast", "--wal-method=stream",
	}
	if s.options.NoFsync {
		args = append(args, "--no-sync")
	}
	copied, err := s.run(ctx, program, args, "PGPASSWORD="+password)
	if err != nil {
		return err
	}
	if !copied.State().Success() {
		return fmt.Errorf("pg_basebackup failed: %s", copied.LogTail())
	}
	return nil
}

// Follow makes a server that is down a standby of another one, and starts it. Its own
// history must be part of the other one's: it was halted, not killed, while the other
// one followed it.
func (s *Server) Follow(ctx context.Context, primary *Server) error {
	if s.given {
		return ErrGivenServer
	}
	if err := s.setPrimary(primary); err != nil {
		return err
	}
	if err := s.Resume(ctx); err != nil {
		return err
	}
	return primary.awaitFollower(ctx)
}

// setPrimary writes what a standby is known by. A later setting of one name counts.
func (s *Server) setPrimary(primary *Server) (err error) {
	following := filepath.Join(s.dataDir(), "standby.signal")
	if err := os.WriteFile(following, nil, 0o600); err != nil {
		return err
	}
	if err := s.account.own(following); err != nil {
		return err
	}
	settings, err := os.OpenFile(filepath.Join(s.dataDir(), "postgresql.auto.conf"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, settings.Close()) }()
	_, err = fmt.Fprintf(settings, "primary_conninfo = '%s'\nwal_retrieve_retry_interval = %s\n", primary.base.String(), standbyRetry)
	return err
}

// awaitFollower waits until somebody streams from this server.
func (s *Server) awaitFollower(ctx context.Context) error {
	s.mu.Lock()
	running := s.process
	s.mu.Unlock()
	return running.WaitReady(ctx, readyTimeout, func(ctx context.Context) error {
		return s.with(ctx, func(conn *pgx.Conn) error {
			var streaming bool
			err := conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_stat_replication WHERE state = 'streaming')`).Scan(&streaming)
			if err == nil && !streaming {
				err = errors.New("no standby streams from it")
			}
			return err
		})
	})
}

// Promote makes a standby a primary, and returns once it can be written.
func (s *Server) Promote(ctx context.Context) error {
	return s.with(ctx, func(conn *pgx.Conn) error {
		var promoted bool
		err := conn.QueryRow(ctx, `SELECT pg_promote(true, $1)`, promotionTimeoutSeconds).Scan(&promoted)
		if err == nil && !promoted {
			err = fmt.Errorf("the standby is still one after %d s", promotionTimeoutSeconds)
		}
		return err
	})
}
