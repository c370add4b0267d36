package environment

import (
	"bytes"
	"context"
	"crypto/rand"
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
	managerPackage = "./cmd/manager"
	buildTimeout   = 15 * time.Minute
	migrateTimeout = 2 * time.Minute
	kubectlTimeout = 2 * time.Minute
	outputBytes    = 4000
	nameLength     = 12
)

// BuildManager builds the manager into a directory and returns its path.
func BuildManager(ctx context.Context, root, dir string, tags ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, buildTimeout)
	defer cancel()
	path := filepath.Join(dir, "manager")
	args := []string{"build", "-o", path}
	if len(tags) > 0 {
		args = append(args, "-tags", strings.Join(tags, ","))
	}
	cmd := exec.CommandContext(ctx, "go", append(args, managerPackage)...)
	cmd.Dir = root
	// The go command needs the caller's own environment: proxies and caches.
	cmd.Env = os.Environ()
	if err := run(cmd); err != nil {
		return "", fmt.Errorf("build the manager: %w", err)
	}
	return path, nil
}

// Migrate brings the schema of a database up to date with the manager's own
// command.
func Migrate(ctx context.Context, manager, databaseURL string) error {
	ctx, cancel := context.WithTimeout(ctx, migrateTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, manager, "migrate")
	cmd.Env = append(process.Environment(), "DATABASE_URL="+databaseURL)
	if err := run(cmd); err != nil {
		return fmt.Errorf("manager migrate: %w", err)
	}
	return nil
}

// Kubectl runs kubectl as administrator; its standard output goes to out.
func (e *Environment) Kubectl(ctx context.Context, out io.Writer, args ...string) error {
	ctx, cancel := context.WithTimeout(ctx, kubectlTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, e.ControlPlane.Kubectl(), args...)
	cmd.Env = append(process.Environment(), "KUBECONFIG="+e.ControlPlane.KubeconfigPath())
	cmd.Stdout = out
	if err := run(cmd); err != nil {
		return fmt.Errorf("kubectl %s: %w", strings.Join(args, " "), err)
	}
	return nil
}

// run runs a command to its end. The error shows what it wrote last; its
// arguments stay out, since a URL holds a password.
func run(cmd *exec.Cmd) error {
	var output bytes.Buffer
	if cmd.Stdout == nil {
		cmd.Stdout = &output
	}
	cmd.Stderr = &output
	// Children of the command may hold its output open after it was killed.
	cmd.WaitDelay = 10 * time.Second
	if err := cmd.Run(); err != nil {
		tail := output.Bytes()[max(0, output.Len()-outputBytes):]
		return fmt.Errorf("%w: %s", err, bytes.TrimSpace(tail))
	}
	return nil
}

// uniqueName makes a name that no other environment on the same server has.
func uniqueName(prefix string) string {
	return prefix + "_" + strings.ToLower(rand.Text()[:nameLength])
}
