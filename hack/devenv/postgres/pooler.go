package postgres

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/token-lease/operator/hack/devenv/process"
	"github.com/token-lease/operator/hack/devenv/scratch"
)

// poolerDirs are searched besides PATH, which often lacks the second one.
var poolerDirs = []string{"", "/usr/sbin"}

// Pooler is PgBouncer in front of a server: in transaction mode, so that the session
// behind a connection changes with each transaction.
type Pooler struct {
	base    url.URL
	dir     *scratch.Dir
	process *process.Process
}

// StartPooler starts PgBouncer with a number of connections to each database of the
// server. Where it is missing it is installed, as root with apt-get. The caller ends
// it with Stop.
func StartPooler(ctx context.Context, server *Server, connections int, log io.Writer) (_ *Pooler, err error) {
	program, err := findOrInstallPooler(ctx, log)
	if err != nil {
		return nil, err
	}
	account, err := unprivilegedAccount()
	if err != nil {
		return nil, err
	}
	p := &Pooler{base: server.base}
	if p.dir, err = account.scratch(); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.Stop(ctx))
		}
	}()
	port, err := process.FreePort()
	if err != nil {
		return nil, err
	}
	p.base.Host = process.Address(port)
	password, _ := server.base.User.Password()
	config := filepath.Join(p.dir.Path, "pgbouncer.ini")
	content := fmt.Sprintf(`[databases]
* = host=%s port=%s user=%s password=%s
[pgbouncer]
listen_addr = %s
listen_port = %d
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = %d
max_client_conn = 500
`, server.base.Hostname(), server.base.Port(), server.base.User.Username(), password, process.Loopback, port, connections)
	if err := os.WriteFile(config, []byte(content), 0o600); err != nil {
		return nil, err
	}
	if err := account.own(config); err != nil {
		return nil, err
	}
	p.process, err = process.Start(process.Command{
		Path: program, Args: []string{config}, Dir: p.dir.Path, LogFile: filepath.Join(p.dir.Path, "log"),
		Credential: account.credential(),
	})
	if err != nil {
		return nil, err
	}
	return p, p.process.WaitReady(ctx, readyTimeout, p.ping)
}

func (p *Pooler) ping(ctx context.Context) error {
	config, err := pgx.ParseConfig(p.URL(maintenanceDB))
	if err != nil {
		return err
	}
	config.DefaultQueryExecMode = pgx.QueryExecModeExec
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return err
	}
	return errors.Join(conn.Ping(ctx), conn.Close(ctx))
}

// URL leads to a database of the server through the pooler.
func (p *Pooler) URL(database string) string {
	to := p.base
	to.Path = "/" + database
	return to.String()
}

// Stop ends it and removes what it kept.
func (p *Pooler) Stop(ctx context.Context) error {
	var err error
	if p.process != nil {
		err = p.process.Stop(ctx)
	}
	return errors.Join(err, p.dir.Remove())
}

func findPooler() (string, bool) {
	for _, dir := range poolerDirs {
		if program, err := exec.LookPath(filepath.Join(dir, "pgbouncer")); err == nil {
			return program, true
		}
	}
	return "", false
}

func findOrInstallPooler(ctx context.Context, log io.Writer) (string, error) {
	if program, found := findPooler(); found {
		return program, nil
	}
	if err := installable(); err != nil {
		return "", fmt.Errorf("PgBouncer is needed, and %w: install the package pgbouncer, for example with apt-get install pgbouncer", err)
	}
	ctx, cancel := context.WithTimeout(ctx, installTimeout)
	defer cancel()
	lock, err := process.WaitLock(ctx, filepath.Join(os.TempDir(), "tokenlease-devenv-pgbouncer.lock"), func(waited time.Duration) {
		fmt.Fprintf(log, "postgres: another process is installing PgBouncer, waiting for it (%s)\n", waited)
	})
	if err != nil {
		return "", err
	}
	defer lock.Unlock()
	if program, found := findPooler(); found {
		return program, nil
	}
	fmt.Fprintln(log, "postgres: no PgBouncer found, installing the package pgbouncer with apt-get")
	updateErr := aptGet(ctx, "update")
	if err := aptGet(ctx, "install", "--yes", "--no-install-recommends", "pgbouncer"); err != nil {
		return "", errors.Join(err, updateErr)
	}
	if program, found := findPooler(); found {
		return program, nil
	}
	return "", errors.New("the installed package brought no program pgbouncer; " + strings.Join(poolerDirs, " ") + " were searched")
}
