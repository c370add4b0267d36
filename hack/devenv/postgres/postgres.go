// Package postgres brings up a PostgreSQL server for development and tests, and
// takes it down again.
//
// It uses, in this order: the server whose URL it is given; server programs
// found on the machine; server programs that apt-get can install. A server that
// it starts listens on a loopback port of its own, asks for a random password,
// never runs as root, and ends with the process that started it.
package postgres

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/token-lease/operator/hack/devenv/process"
	"github.com/token-lease/operator/hack/devenv/scratch"
)

const (
	// URLVariable is the environment variable that names a server to use: the URL
	// of a superuser, since tests create databases and roles, and switch triggers
	// off to plant what the schema refuses.
	URLVariable = "TOKENLEASE_TEST_DATABASE_URL"

	superuser          = "postgres"
	maintenanceDB      = "postgres"
	readyTimeout       = 60 * time.Second
	portAttempts       = 5
	maximumConnections = 200
)

// ErrGivenServer says that only a server started here can be taken down.
var ErrGivenServer = errors.New("this PostgreSQL server was given by " + URLVariable +
	" and is not taken down: start one with Options.Own")

// Options say how to get a server. The zero value suits development.
type Options struct {
	// URL names an existing server; empty means the value of URLVariable.
	URL string
	// Own starts a server even when a URL is given, for callers who take it down.
	Own bool
	// NoFsync trades the safety of the data in a power failure for speed. What is
	// committed still survives Kill, which only ends the server's processes.
	NoFsync bool
	// Settings are further ones of the server, as name=value.
	Settings []string
	// Log receives what is being done, one line each; nil discards it.
	Log io.Writer
}

// Server is a PostgreSQL server. Its methods may be called concurrently.
type Server struct {
	base     url.URL // of the maintenance database
	given    bool
	options  Options
	programs programs
	account  *account
	dir      *scratch.Dir
	port     int

	mu      sync.Mutex
	process *process.Process
	stopped bool
}

// Start returns a server that answers. The caller ends it with Stop.
func Start(ctx context.Context, options Options) (*Server, error) {
	if options.Log == nil {
		options.Log = io.Discard
	}
	given := options.URL
	if given == "" {
		given = os.Getenv(URLVariable)
	}
	if given != "" && !options.Own {
		return useGiven(ctx, given, options)
	}
	found, err := findOrInstall(ctx, options.Log, debian)
	if err != nil {
		return nil, err
	}
	server := &Server{options: options, programs: found}
	if err := server.create(ctx); err != nil {
		return nil, errors.Join(err, server.Stop(context.WithoutCancel(ctx)))
	}
	return server, nil
}

func useGiven(ctx context.Context, given string, options Options) (*Server, error) {
	base, err := url.Parse(given)
	if err != nil || (base.Scheme != "postgres" && base.Scheme != "postgresql") {
		// The URL may hold a password, so the error does not repeat it.
		return nil, fmt.Errorf("the value of %s is not a URL like postgres://user@host:5432/postgres", URLVariable)
	}
	server := &Server{base: *base, given: true, options: options}
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	if err := server.ping(ctx); err != nil {
		return nil, fmt.Errorf("the PostgreSQL server given by %s does not answer: %w", URLVariable, err)
	}
	role, isSuperuser, err := server.role(ctx)
	if err != nil {
		return nil, fmt.Errorf("ask the PostgreSQL server given by %s for the rights of its role: %w", URLVariable, err)
	}
	if !isSuperuser {
		return nil, fmt.Errorf("the role %s given by %s is no superuser, which tests need to create databases and roles and to switch triggers off: "+
			"name one of a server that is there for tests only", role, URLVariable)
	}
	fmt.Fprintf(options.Log, "postgres: using the server at %s\n", base.Host)
	return server, nil
}

// create makes the data directory and starts the server on a free port.
func (s *Server) create(ctx context.Context) (err error) {
	if s.account, err = unprivilegedAccount(); err != nil {
		return err
	}
	if s.dir, err = s.account.scratch(); err != nil {
		return err
	}
	password := rand.Text()
	if err := s.initialise(ctx, password); err != nil {
		return err
	}
	if err := s.listen(ctx, password); err != nil {
		return err
	}
	fmt.Fprintf(s.options.Log, "postgres: %s on %s\n", s.programs.version, s.base.Host)
	return nil
}

// listen starts the server on a free port.
func (s *Server) listen(ctx context.Context, password string) (err error) {
	for range portAttempts {
		if s.port, err = process.FreePort(); err != nil {
			return err
		}
		s.base = url.URL{
			Scheme:   "postgres",
			User:     url.UserPassword(superuser, password),
			Host:     process.Address(s.port),
			Path:     "/" + maintenanceDB,
			RawQuery: "sslmode=disable",
		}
		if err = s.Resume(ctx); !errors.Is(err, process.ErrPortTaken) {
			break
		}
	}
	return err
}

// initialise runs initdb.
func (s *Server) initialise(ctx context.Context, password string) error {
	passwordFile := filepath.Join(s.dir.Path, "password")
	if err := os.WriteFile(passwordFile, []byte(password), 0o600); err != nil {
		return err
	}
	defer os.Remove(passwordFile)
	if err := s.account.own(passwordFile); err != nil {
		return err
	}
	args := []string{
		"--pgdata=" + s.dataDir(), "--username=" + superuser, "--pwfile=" + passwordFile,
		"--auth=scram-sha-256", "--encoding=UTF8", "--locale=C",
	}
	if s.options.NoFsync {
		args = append(args, "--no-sync")
	}
	initdb, err := s.run(ctx, s.programs.initdb, args)
	if err != nil {
		return err
	}
	if _, err := os.Stat(filepath.Join(s.dataDir(), "PG_VERSION")); err != nil {
		return fmt.Errorf("initdb failed: %s", initdb.LogTail())
	}
	return nil
}

// run runs a program of the installation to its end, as the server's account.
func (s *Server) run(ctx context.Context, program string, args []string, env ...string) (*process.Process, error) {
	started, err := process.Start(process.Command{
		Path: program, Args: args, Env: env, Dir: s.dir.Path,
		LogFile: s.LogFile(), Credential: s.account.credential(),
	})
	if err != nil {
		return nil, err
	}
	select {
	case <-started.Done():
		return started, nil
	case <-ctx.Done():
		return nil, errors.Join(ctx.Err(), started.Kill())
	}
}

// Given says that the server was given, not started here.
func (s *Server) Given() bool { return s.given }

// LogTail is the end of the server's log; empty for a given server.
func (s *Server) LogTail() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.process == nil {
		return ""
	}
	return s.process.LogTail()
}

// LogFile is the server's log; empty for a given server.
func (s *Server) LogFile() string {
	if s.given {
		return ""
	}
	return filepath.Join(s.dir.Path, "postgres.log")
}

func (s *Server) dataDir() string { return filepath.Join(s.dir.Path, "data") }

// Resume starts the server again after Halt or Kill: same port, same data. It
// returns once the server answers; a server that is up stays as it is.
func (s *Server) Resume(ctx context.Context) error {
	if s.given {
		return ErrGivenServer
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return errors.New("this PostgreSQL server was stopped and its data removed")
	}
	if s.process != nil && s.process.Running() {
		return nil
	}
	settings := []string{
		"listen_addresses=" + process.Loopback, "unix_socket_directories=",
		fmt.Sprintf("port=%d", s.port), fmt.Sprintf("max_connections=%d", maximumConnections),
		"shared_buffers=64MB", "timezone=UTC", "log_timezone=UTC",
		"log_destination=stderr", "logging_collector=off", "log_line_prefix=%m [%p] %d ",
	}
	if s.options.NoFsync {
		settings = append(settings, "fsync=off", "full_page_writes=off")
	}
	settings = append(settings, s.options.Settings...)
	args := []string{"-D", s.dataDir()}
	for _, setting := range settings {
		args = append(args, "-c", setting)
	}
	started, err := process.Start(process.Command{
		Path: s.programs.postgres, Args: args, Dir: s.dir.Path, LogFile: s.LogFile(),
		Credential: s.account.credential(),
		StopSignal: syscall.SIGINT, // "fast": no waiting for clients, but a checkpoint
	})
	if err != nil {
		return err
	}
	if err := started.WaitReady(ctx, readyTimeout, s.ping); err != nil {
		portTaken := !started.Running() && strings.Contains(started.LogTail(), "Address already in use")
		err = errors.Join(err, started.Kill())
		if portTaken {
			return fmt.Errorf("%w: %w", process.ErrPortTaken, err)
		}
		return err
	}
	s.process = started
	return nil
}

// Halt takes the server down in an orderly way and keeps its data for Resume.
func (s *Server) Halt(ctx context.Context) error {
	return s.takeDown(ctx, syscall.SIGINT)
}

// Kill takes the server down at once, as a crash does: nothing is written any
// more, open transactions are lost, and Resume begins with a recovery.
func (s *Server) Kill(ctx context.Context) error {
	return s.takeDown(ctx, syscall.SIGQUIT)
}

// Restart is Halt followed by Resume.
func (s *Server) Restart(ctx context.Context) error {
	return errors.Join(s.Halt(ctx), s.Resume(ctx))
}

func (s *Server) takeDown(ctx context.Context, signal syscall.Signal) error {
	if s.given {
		return ErrGivenServer
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.process == nil {
		return nil
	}
	return s.process.End(ctx, signal)
}

// Done is closed when the server's current process ends; nil for a given server.
func (s *Server) Done() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.process == nil {
		return nil
	}
	return s.process.Done()
}

// Stop takes the server down for good and removes its data. A given server goes
// on. Nothing happens the second time.
func (s *Server) Stop(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.given || s.stopped {
		return nil
	}
	s.stopped = true
	var err error
	if s.process != nil {
		// The data goes with it, so there is nothing to write to the disk first.
		err = s.process.End(ctx, syscall.SIGQUIT)
	}
	if s.dir != nil {
		err = errors.Join(err, s.dir.Remove())
	}
	return err
}
