//go:build unix && !linux

package process

import (
	"os/exec"
	"syscall"
)

// attributes puts a child into a process group of its own, so that Ctrl-C in a
// terminal reaches only the parent, which then stops its children in order.
// Only Linux can tie a child's life to its parent's.
func attributes(credential *syscall.Credential) *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Credential: credential}
}

func startBoundToParent(cmd *exec.Cmd) error { return cmd.Start() }
