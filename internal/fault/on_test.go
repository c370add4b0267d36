//go:build faultinjection

package fault

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
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
