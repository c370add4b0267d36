//go:build faultinjection

package fault

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// The test runs itself as a child that reaches a point three times, and looks at
// how the child ended.
func TestPoint(t *testing.T) {
	if os.Getenv("FAULT_TEST_CHILD") != "" {
		for range 3 {
			Point("here")
			Point("elsewhere")
			os.Stdout.WriteString("passed\n")
		}
		os.Exit(0)
	}
	marker := filepath.Join(t.TempDir(), "once")
	for _, c := range []struct {
		name, fault, once string
		passed            int
		killed            bool
	}{
		{"none", "", "", 3, false},
		{"first time", "here=kill", "", 0, true},
		{"second time", "here=kill:2", "", 1, true},
		{"not reached", "nowhere=kill", "", 3, false},
		{"once", "here=kill", marker, 0, true},
		{"not again", "here=kill", marker, 3, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			child := exec.Command(os.Args[0], "-test.run=^TestPoint$")
			child.Env = append(os.Environ(), "FAULT_TEST_CHILD=1", "TOKENLEASE_FAULT="+c.fault, "TOKENLEASE_FAULT_ONCE_FILE="+c.once)
			output, err := child.Output()
			if passed := strings.Count(string(output), "passed"); passed != c.passed {
				t.Errorf("passed %d times, want %d", passed, c.passed)
			}
			var exit *exec.ExitError
			killed := errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL
			if killed != c.killed {
				t.Errorf("killed = %v (%v), want %v", killed, err, c.killed)
			}
		})
	}
}

// Goal: whoever reaches a point that pauses does not go past it until somebody
// continues the process. Method: what a stopped child has said; one that went on a
// little before it stood still would be seen in some of the rounds.
func TestPause(t *testing.T) {
	for range 20 {
		reader, writer, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		child := exec.Command(os.Args[0], "-test.run=^TestPoint$")
		child.Env = append(os.Environ(), "FAULT_TEST_CHILD=1", "TOKENLEASE_FAULT=here=pause:2")
		child.Stdout = writer
		if err := errors.Join(child.Start(), writer.Close()); err != nil {
			t.Fatal(err)
		}
		var status syscall.WaitStatus
		if _, err := syscall.Wait4(child.Process.Pid, &status, syscall.WUNTRACED, nil); err != nil || !status.Stopped() {
			t.Fatalf("the child did not stop: %v, %v", status, err)
		}
		if err := reader.SetReadDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		if before, err := io.ReadAll(reader); string(before) != "passed\n" || !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("stopped the second time, the child had said %q (%v)", before, err)
		}
		if err := errors.Join(child.Process.Signal(syscall.SIGCONT), reader.SetReadDeadline(time.Time{})); err != nil {
			t.Fatal(err)
		}
		if after, err := io.ReadAll(reader); string(after) != "passed\npassed\n" || err != nil {
			t.Errorf("continued, the child said %q (%v)", after, err)
		}
		if err := errors.Join(child.Wait(), reader.Close()); err != nil {
			t.Error(err)
		}
	}
}
