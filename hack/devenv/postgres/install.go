package postgres

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/token-lease/operator/hack/devenv/process"
)

const (
	installTimeout = 15 * time.Minute
	// clusterConfigDir is read by Debian's postgresql-common before it creates a
	// cluster for a newly installed server.
	clusterConfigDir = "/etc/postgresql-common/createcluster.d"
	noClusterConfig  = "create_main_cluster = false\n"
	outputTailBytes  = 1500
)

// installer adds server programs to the machine.
type installer struct {
	// lock is a file that one process at a time holds while it installs: apt-get's
	// own lock makes a second one fail where it updates its lists.
	lock string
	// installable says why it cannot be used, or nil when it can.
	installable func() error
	install     func(context.Context) error
}

var debian = installer{lock: "/run/tokenlease-devenv-install.lock", installable: installable, install: install}

// findOrInstall returns server programs, or one error that names every way out.
func findOrInstall(ctx context.Context, log io.Writer, with installer) (programs, error) {
	found, passedOver, ok := find(ctx)
	if ok {
		return found, nil
	}
	reason := with.installable()
	if reason == nil {
		if found, passedOver, reason = with.inTurn(ctx, log); reason == nil {
			return found, nil
		}
	}
	if len(passedOver) > 0 {
		reason = fmt.Errorf("%w; passed over: %s", reason, strings.Join(passedOver, ", "))
	}
	return programs{}, fmt.Errorf(`no PostgreSQL server (version %d or newer) was found and none could be installed: %w
Do one of these:
  - set %s to the URL of a superuser of a server,
    for example postgres://postgres:secret@127.0.0.1:5432/postgres
  - install the server programs (initdb and postgres), for example with
    "apt-get install postgresql", "dnf install postgresql-server" or "brew install postgresql@17",
    and put their directory on the PATH if they are not found there
  - run this as root on a machine with apt-get`, oldestMajor, reason, URLVariable)
}

// inTurn installs, unless another process has done so meanwhile.
func (i installer) inTurn(ctx context.Context, log io.Writer) (found programs, passedOver []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, installTimeout)
	defer cancel()
	lock, err := process.WaitLock(ctx, i.lock, func(waited time.Duration) {
		fmt.Fprintf(log, "postgres: another process is installing, waiting for it (%s)\n", waited)
	})
	if err != nil {
		return programs{}, nil, err
	}
	defer lock.Unlock()
	found, passedOver, ok := find(ctx)
	if ok {
		return found, nil, nil
	}
	fmt.Fprintln(log, "postgres: no server programs found, installing the package postgresql with apt-get")
	if err := i.install(ctx); err != nil {
		return programs{}, passedOver, err
	}
	if found, passedOver, ok = find(ctx); !ok {
		return programs{}, passedOver, errors.New("the installed package brought no server programs that can be used")
	}
	return found, nil, nil
}

// installable says why apt-get cannot be used, or nil when it can.
func installable() error {
	if _, err := exec.LookPath("apt-get"); err != nil {
		return errors.New("there is no apt-get here")
	}
	if os.Geteuid() != 0 {
		return errors.New("apt-get needs root")
	}
	return nil
}

// install adds the server programs to the machine, without the cluster that
// Debian otherwise creates and starts with them.
func install(ctx context.Context) error {
	if err := os.MkdirAll(clusterConfigDir, 0o755); err != nil {
		return err
	}
	config := filepath.Join(clusterConfigDir, "tokenlease-devenv.conf")
	if err := os.WriteFile(config, []byte(noClusterConfig), 0o644); err != nil {
		return err
	}
	defer os.Remove(config)

	// An update that fails for one source of many does not matter if the
	// installation succeeds, so it is reported only if that fails too.
	updateErr := aptGet(ctx, "update")
	installErr := aptGet(ctx, "install", "--yes", "--no-install-recommends", "postgresql")
	if installErr != nil {
		return errors.Join(installErr, updateErr)
	}
	return nil
}

func aptGet(ctx context.Context, args ...string) error {
	args = append([]string{"-o", "DPkg::Lock::Timeout=120"}, args...)
	cmd := exec.CommandContext(ctx, "apt-get", args...)
	// Unlike the servers, apt-get needs the proxies of the caller's environment.
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C")
	text, err := cmd.CombinedOutput()
	if err != nil {
		tail := text[max(0, len(text)-outputTailBytes):]
		return fmt.Errorf("apt-get %s: %w: %s", strings.Join(args[2:], " "), err, strings.TrimSpace(string(tail)))
	}
	return nil
}
