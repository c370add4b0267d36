// Package process runs the servers of the development environment as child
// processes: output to a file, a bounded stop, an end that can be waited for,
// and, on Linux, no child that outlives its parent, not even one killed by
// SIGKILL.
package process

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

const (
	// stopTimeout bounds how long a process may take to end by itself.
	stopTimeout = 20 * time.Second
	// killTimeout bounds the wait for the kernel after SIGKILL.
	killTimeout = 10 * time.Second
	// logTailBytes is how much of the log an error shows.
	logTailBytes = 2000
)

// ErrHadToBeKilled says that a process did not end by itself in time.
var ErrHadToBeKilled = errors.New("had to be killed")

// errExitZero is how an end without error reads where there should be none.
var errExitZero = errors.New("exit status 0")

// Command says what to run.
type Command struct {
	// Path is the program's absolute path.
	Path string
	// Args are its arguments, without the program's name.
	Args []string
	// Env are additions to Environment(), each as NAME=value.
	Env []string
	// Dir is the working directory; empty is the directory of LogFile.
	Dir string
	// LogFile receives standard output and standard error, appended.
	LogFile string
	// Credential is the user to run as; nil is the user of this process.
	Credential *syscall.Credential
	// StopSignal asks for an orderly end; 0 is SIGTERM.
	StopSignal syscall.Signal
}

// Process is a running or ended child.
type Process struct {
	command Command
	cmd     *exec.Cmd
	done    chan struct{}
	exit    error // written before done is closed
}

// Start runs the command. The caller ends it with Stop or Kill.
func Start(command Command) (*Process, error) {
	log, err := os.OpenFile(command.LogFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the log of %s: %w", filepath.Base(command.Path), err)
	}
	defer log.Close()

	cmd := exec.Command(command.Path, command.Args...)
	cmd.Env = append(Environment(), command.Env...)
	cmd.Dir = command.Dir
	if cmd.Dir == "" {
		cmd.Dir = filepath.Dir(command.LogFile)
	}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = attributes(command.Credential)
	if err := startBoundToParent(cmd); err != nil {
		return nil, fmt.Errorf("start %s: %w", command.Path, err)
	}
	p := &Process{command: command, cmd: cmd, done: make(chan struct{})}
	go func() {
		p.exit = cmp.Or(cmd.Wait(), errExitZero)
		close(p.done)
	}()
	return p, nil
}

// PID is the process ID, also after the end.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Done is closed once the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Running says whether the process has not ended yet.
func (p *Process) Running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// State says how the process ended; nil while it runs.
func (p *Process) State() *os.ProcessState {
	if p.Running() {
		return nil
	}
	return p.cmd.ProcessState
}

// Signal sends a signal. A process that has ended is no error.
func (p *Process) Signal(signal syscall.Signal) error {
	err := p.cmd.Process.Signal(signal)
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	return err
}

// Stop asks the process to end and waits for it; one that does not end within
// 20 s, or before the context does, is killed and reported as ErrHadToBeKilled.
// Stopping an ended process does nothing.
func (p *Process) Stop(ctx context.Context) error {
	signal := p.command.StopSignal
	if signal == 0 {
		signal = syscall.SIGTERM
	}
	return p.End(ctx, signal)
}

// Kill ends the process with SIGKILL and waits until it is gone.
func (p *Process) Kill() error {
	if err := p.Signal(syscall.SIGKILL); err != nil {
		return err
	}
	select {
	case <-p.done:
		return nil
	case <-time.After(killTimeout):
		return fmt.Errorf("%s (process %d) is still there %s after SIGKILL", p.Name(), p.PID(), killTimeout)
	}
}

// End is Stop with a signal of the caller's choice.
func (p *Process) End(ctx context.Context, signal syscall.Signal) error {
	if !p.Running() {
		return nil
	}
	if err := p.Signal(signal); err != nil {
		return fmt.Errorf("signal %s: %w", p.Name(), err)
	}
	timeout := time.NewTimer(stopTimeout)
	defer timeout.Stop()
	select {
	case <-p.done:
		return nil
	case <-timeout.C:
	case <-ctx.Done():
	}
	if err := p.Kill(); err != nil {
		return err
	}
	return fmt.Errorf("%s %w because it did not end after the signal %q", p.Name(), ErrHadToBeKilled, signal)
}

// WaitReady calls check until it succeeds. It gives up when the process ends,
// the timeout passes or the context ends; the error then shows the last answer
// of check and the end of the log.
func (p *Process) WaitReady(ctx context.Context, timeout time.Duration, check func(context.Context) error) error {
	caller := ctx
	ctx, cancel := context.WithTimeout(caller, timeout)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	var answer error
	for {
		err := check(ctx)
		if err == nil && p.Running() {
			return nil
		}
		if ctx.Err() == nil {
			answer = err // not the one that only says that time is up
		}
		select {
		case <-p.done:
			return fmt.Errorf("%s ended before it was ready (%w); its log ends with:\n%s", p.Name(), p.exit, p.LogTail())
		case <-ctx.Done():
			if caller.Err() != nil {
				return fmt.Errorf("wait for %s: %w", p.Name(), caller.Err())
			}
			return fmt.Errorf("%s was not ready within %s (%w); its log ends with:\n%s", p.Name(), timeout, cmp.Or(answer, ctx.Err()), p.LogTail())
		case <-tick.C:
		}
	}
}

// LogTail is the end of the log file, for error messages.
func (p *Process) LogTail() string {
	file, err := os.Open(p.command.LogFile)
	if err != nil {
		return err.Error()
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return err.Error()
	}
	start := max(0, info.Size()-logTailBytes)
	tail := make([]byte, info.Size()-start)
	n, _ := file.ReadAt(tail, start)
	return strings.TrimSpace(string(tail[:n]))
}

// Name is the program's name, for messages.
func (p *Process) Name() string { return filepath.Base(p.command.Path) }

// Environment is the environment that the servers and tools run in: the
// caller's own, without what would lead them elsewhere. Proxies are no use on
// loopback, PG* and KUBECONFIG name other servers, and a missing HOME makes
// some programs fail at start.
func Environment() []string {
	clean := slices.DeleteFunc(os.Environ(), func(variable string) bool {
		name, _, _ := strings.Cut(variable, "=")
		upper := strings.ToUpper(name)
		return strings.HasSuffix(upper, "_PROXY") || strings.HasPrefix(name, "PG") ||
			name == "KUBECONFIG" || name == "DATABASE_URL"
	})
	if os.Getenv("HOME") == "" {
		clean = append(clean, "HOME="+os.TempDir())
	}
	return clean
}
