package process

import (
	"os/exec"
	"runtime"
	"sync"
	"syscall"
)

// attributes puts a child into a process group of its own, so that Ctrl-C in a
// terminal reaches only the parent, which then stops its children in order.
// The parent's death reaches them as SIGKILL: each of these servers recovers
// from it, and a wedged one cannot ignore it.
func attributes(credential *syscall.Credential) *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Credential: credential, Pdeathsig: syscall.SIGKILL}
}

type launch struct {
	cmd    *exec.Cmd
	result chan<- error
}

// launches feeds the one goroutine that starts children. The kernel sends the
// parent-death signal when the thread that forked ends, not the process; this
// goroutine keeps its thread for as long as the process lives.
var launches = sync.OnceValue(func() chan<- launch {
	requests := make(chan launch)
	go func() {
		runtime.LockOSThread()
		for request := range requests {
			request.result <- request.cmd.Start()
		}
	}()
	return requests
})

func startBoundToParent(cmd *exec.Cmd) error {
	result := make(chan error, 1)
	launches() <- launch{cmd: cmd, result: result}
	return <-result
}
