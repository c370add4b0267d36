//go:build faultinjection

package fault

import (
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
)

// plan is what the environment asked for when the process started.
type plan struct {
	name   string
	signal syscall.Signal
	// at is the how-manieth time of reaching the point acts.
	at       int64
	onceFile string
}

var (
	current = parse(os.Getenv("TOKENLEASE_FAULT"), os.Getenv("TOKENLEASE_FAULT_ONCE_FILE"))
	reached atomic.Int64
)

// parse panics on a plan that it does not understand: a test that injects nothing
// would prove nothing.
func parse(text, onceFile string) *plan {
	if text == "" {
		return nil
	}
	name, action, found := strings.Cut(text, "=")
	verb, count, counted := strings.Cut(action, ":")
	p := &plan{name: name, at: 1, onceFile: onceFile}
	if counted {
		at, err := strconv.ParseInt(count, 10, 64)
		if err != nil || at < 1 {
			panic(fmt.Sprintf("fault: TOKENLEASE_FAULT=%q: the count must be a positive number", text))
		}
		p.at = at
	}
	switch {
	case found && name != "" && verb == "kill":
		p.signal = syscall.SIGKILL
	case found && name != "" && verb == "pause":
		p.signal = syscall.SIGSTOP
	default:
		panic(fmt.Sprintf("fault: TOKENLEASE_FAULT=%q: want name=kill or name=pause", text))
	}
	return p
}

// Point marks a place at which tests may end or stop the process.
func Point(name string) {
	if current == nil || current.name != name || reached.Add(1) != current.at || !current.claim() {
		return
	}
	// The signal stops or ends the other threads first, and this one a little later,
	// which must not go on meanwhile. Only a stopped process is ever continued.
	continued := make(chan os.Signal, 1)
	signal.Notify(continued, syscall.SIGCONT)
	defer signal.Stop(continued)
	if err := syscall.Kill(os.Getpid(), current.signal); err != nil {
		panic(fmt.Sprintf("fault: signal %v: %v", current.signal, err))
	}
	<-continued
}

// claim reports whether nobody acted before, and notes that somebody does now.
func (p *plan) claim() bool {
	if p.onceFile == "" {
		return true
	}
	file, err := os.OpenFile(p.onceFile, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return false
	}
	return file.Close() == nil
}
