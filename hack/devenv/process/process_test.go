package process_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/token-lease/operator/hack/devenv/process"
	"github.com/token-lease/operator/hack/devenv/scratch"
)

const (
	waitTimeout = 30 * time.Second
	// parentVariable makes the test binary play the parent that is killed.
	parentVariable = "TOKENLEASE_TEST_PARENT_DIR"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(parentVariable); dir != "" {
		playParent(dir)
	}
	os.Exit(m.Run())
}

// playParent starts a child from a goroutine whose thread ends at once, tells
// the child's ID and waits for its own death.
func playParent(dir string) {
	owned, err := scratch.New(dir, "orphan")
	if err != nil {
		panic(err)
	}
	started := make(chan int)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		child, err := process.Start(process.Command{
			Path: "/bin/sleep", Args: []string{"3600"}, LogFile: filepath.Join(owned.Path, "log"),
		})
		if err != nil {
			panic(err)
		}
		started <- child.PID()
	}()
	os.Stdout.WriteString(strconv.Itoa(<-started) + "\n")
	time.Sleep(time.Hour) // this process is there to be killed
}

// Goal: a child does not outlive a parent that is killed, nor die with the
// thread that asked for it, and the parent's directory goes with the next one
// that is made. Method: kill -9 a copy of this test that has started a child.
func TestChildEndsWithItsParent(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Log("only Linux ties the life of a child to its parent's")
		return
	}
	dir := t.TempDir()
	parent := exec.Command(os.Args[0])
	parent.Env = append(os.Environ(), parentVariable+"="+dir)
	out, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	line := make([]byte, 32)
	n, err := out.Read(line)
	if err != nil {
		t.Fatal(err)
	}
	child, err := strconv.Atoi(strings.TrimSpace(string(line[:n])))
	if err != nil {
		t.Fatal(err)
	}
	if !alive(child) {
		t.Fatal("the child died with the thread that started it")
	}

	if err := parent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = parent.Wait()
	waitUntil(t, "the child is gone", func() bool { return !alive(child) })

	next, err := scratch.New(dir, "next")
	if err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) != 1 || filepath.Join(dir, entries[0].Name()) != next.Path {
		t.Fatalf("the dead parent's directory is still there: %v", entries)
	}
	for range 2 {
		if err := next.Remove(); err != nil {
			t.Fatal(err)
		}
	}
}

// alive says whether a process runs; one that nobody has waited for does not.
func alive(pid int) bool {
	status, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return false
	}
	_, state, _ := strings.Cut(string(status), ") ")
	return !strings.HasPrefix(state, "Z")
}

func waitUntil(t *testing.T, what string, done func() bool) {
	t.Helper()
	deadline := time.Now().Add(waitTimeout)
	for !done() {
		if time.Now().After(deadline) {
			t.Fatalf("waited %s until %s", waitTimeout, what)
		}
		time.Sleep(10 * time.Millisecond) // the pace of looking; the bound stands above
	}
}

func shell(t *testing.T, script string) *process.Process {
	t.Helper()
	p, err := process.Start(process.Command{
		Path: "/bin/sh", Args: []string{"-c", script}, LogFile: filepath.Join(t.TempDir(), "log"),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Kill() })
	return p
}

// Goal: a process that ignores the request to end is killed and reported.
func TestStopKillsTheStubborn(t *testing.T) {
	p := shell(t, `trap "" TERM; echo ready; while :; do sleep 1; done`)
	waitUntil(t, "the shell ignores SIGTERM", func() bool { return p.LogTail() == "ready" })
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := p.Stop(ctx); !errors.Is(err, process.ErrHadToBeKilled) {
		t.Fatalf("got %v", err)
	}
	if p.Running() {
		t.Fatal("it still runs")
	}
	if err := p.Stop(t.Context()); err != nil {
		t.Fatalf("stopping it again: %v", err)
	}
}

// Goal: a server that ends before it is ready is reported at once, with the
// reason from its log.
func TestWaitReadyShowsTheLog(t *testing.T) {
	p := shell(t, "echo the disk is full >&2; exit 3")
	err := p.WaitReady(t.Context(), waitTimeout, func(context.Context) error { return errors.New("not yet") })
	if err == nil || !strings.Contains(err.Error(), "the disk is full") || !strings.Contains(err.Error(), "exit status 3") {
		t.Fatalf("got %v", err)
	}
	if err := p.Signal(syscall.SIGTERM); err != nil {
		t.Fatalf("a signal to an ended process: %v", err)
	}
}

// Goal: servers do not inherit what would lead them elsewhere.
func TestEnvironment(t *testing.T) {
	for _, name := range []string{"HTTPS_PROXY", "no_proxy", "PGHOST", "KUBECONFIG", "HOME"} {
		t.Setenv(name, "")
	}
	t.Setenv("UNTOUCHED", "yes")
	environment := strings.Join(process.Environment(), "\n") + "\n"
	for _, name := range []string{"HTTPS_PROXY=", "no_proxy=", "PGHOST=", "KUBECONFIG="} {
		if strings.Contains(environment, name) {
			t.Errorf("%s is inherited", name)
		}
	}
	for _, variable := range []string{"UNTOUCHED=yes\n", "HOME=" + os.TempDir() + "\n"} {
		if !strings.Contains(environment, variable) {
			t.Errorf("%q is missing", variable)
		}
	}
}
