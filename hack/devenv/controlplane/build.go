package controlplane

import (
	"bytes"
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
	// linkerFlags give the programs the version that clients ask for. The first
	// value is the version, then its major and minor parts.
	linkerFlags = "-s -w" +
		" -X k8s.io/component-base/version.gitVersion=%s" +
		" -X k8s.io/component-base/version.gitMajor=%s" +
		" -X k8s.io/component-base/version.gitMinor=%s"
	versionModule = "k8s.io/kubernetes"

	buildTimeout     = time.Hour
	progressInterval = 15 * time.Second
	buildOutputBytes = 4000
)

// builder builds programs of the module into a directory.
type builder struct {
	module, out string
	log         io.Writer
}

// errBuildTime says what to do where the caller's time is too short for a build.
var errBuildTime = errors.New("the control plane's programs were not built in the time that was given; " +
	"build them beforehand, which happens once: go run ./hack/devenv assets")

// build builds what is still missing once this process has its turn. A program
// appears in the directory complete or not at all.
func (b builder) build(ctx context.Context, missing []program) error {
	if len(missing) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, buildTimeout)
	defer cancel()
	err := b.buildInTurn(ctx, missing)
	if err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return fmt.Errorf("%w (%w)", errBuildTime, err)
	}
	return err
}

func (b builder) buildInTurn(ctx context.Context, missing []program) error {
	if err := os.MkdirAll(b.out, 0o755); err != nil {
		return err
	}
	lock, err := b.waitForTurn(ctx)
	if err != nil {
		return err
	}
	defer lock.Unlock()

	flags, err := b.linkerFlags(ctx)
	if err != nil {
		return err
	}
	fmt.Fprintf(b.log, "controlplane: building into %s, which happens once\n", b.out)
	for i, p := range missing {
		final := filepath.Join(b.out, p.name)
		if isExecutable(final) {
			continue // built by the process that had the turn before
		}
		label := fmt.Sprintf("%s (%d of %d)", p.name, i+1, len(missing))
		partial := filepath.Join(b.out, "."+p.name+".partial")
		err := b.goCommand(ctx, label, "build", "-trimpath", "-ldflags", flags, "-o", partial, p.packagePath)
		if err != nil {
			return errors.Join(err, os.RemoveAll(partial))
		}
		if err := os.Rename(partial, final); err != nil {
			return err
		}
	}
	return nil
}

// waitForTurn takes the lock of the output directory.
func (b builder) waitForTurn(ctx context.Context) (*process.FileLock, error) {
	return process.WaitLock(ctx, filepath.Join(b.out, ".lock"), func(waited time.Duration) {
		fmt.Fprintf(b.log, "controlplane: another process is building, waiting for it (%s)\n", waited)
	})
}

// version is that of Kubernetes in the module, where alone it is written down.
func (b builder) version(ctx context.Context) (string, error) {
	text, err := b.command(ctx, "list", "-m", "-f", "{{.Version}}", versionModule).Output()
	if err != nil {
		return "", fmt.Errorf("ask for the version of %s in %s: %w%s", versionModule, b.module, err, stderrOf(err))
	}
	return strings.TrimSpace(string(text)), nil
}

// linkerFlags tell the programs their version.
func (b builder) linkerFlags(ctx context.Context) (string, error) {
	version, err := b.version(ctx)
	if err != nil {
		return "", err
	}
	parts := strings.SplitN(strings.TrimPrefix(version, "v"), ".", 3)
	if len(parts) != 3 {
		return "", fmt.Errorf("%s in %s has the version %q, not one like v1.2.3", versionModule, b.module, version)
	}
	return fmt.Sprintf(linkerFlags, version, parts[0], parts[1]), nil
}

func stderrOf(err error) string {
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return ": " + strings.TrimSpace(string(exit.Stderr))
	}
	return ""
}

// goCommand runs the go command and tells every 15 s that it still does.
func (b builder) goCommand(ctx context.Context, label string, args ...string) error {
	var output bytes.Buffer
	cmd := b.command(ctx, args...)
	cmd.Stdout, cmd.Stderr = &output, &output
	started := time.Now()
	fmt.Fprintf(b.log, "controlplane: building %s\n", label)
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("build %s: %w", label, err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	tick := time.NewTicker(progressInterval)
	defer tick.Stop()
	for {
		select {
		case err := <-done:
			if err != nil {
				tail := output.Bytes()[max(0, output.Len()-buildOutputBytes):]
				return fmt.Errorf("build %s: %w\n%s", label, err, bytes.TrimSpace(tail))
			}
			fmt.Fprintf(b.log, "controlplane: built %s in %s\n", label, elapsed(started))
			return nil
		case <-tick.C:
			fmt.Fprintf(b.log, "controlplane: still building %s (%s)\n", label, elapsed(started))
		}
	}
}

// command is a go command in the module. It keeps the caller's environment, for
// the module proxy and the caches, but for what would build another thing.
func (b builder) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = b.module
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off", "GOFLAGS=-mod=readonly", "GOOS=", "GOARCH=", "PWD="+b.module)
	// The compilers that go started hold its output open for a moment after it
	// was killed.
	cmd.WaitDelay = 10 * time.Second
	return cmd
}

func elapsed(since time.Time) time.Duration { return time.Since(since).Round(time.Second) }
