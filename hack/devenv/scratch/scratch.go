// Package scratch makes the temporary directories in which the servers of the
// development environment keep their data. A directory belongs to the process
// that made it, shown by a file lock, which the kernel takes away however the
// process ends. Whoever makes the next directory removes those without owner,
// so that killed test runs do not fill the disk.
package scratch

import (
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/token-lease/operator/hack/devenv/process"
)

const (
	prefix   = "tokenlease-devenv-"
	lockName = ".owner"
	// graceWithoutLock is the age before which a directory without lock file is
	// left alone: its owner may be about to lock it.
	graceWithoutLock = time.Minute
	// ownAttempts bounds how often a new directory is lost to another process.
	ownAttempts = 5
)

// Dir is a temporary directory owned by this process.
type Dir struct {
	// Path is its absolute path.
	Path string

	lock *process.FileLock
}

// New makes a directory below parent (empty: the system's temporary directory).
func New(parent, purpose string) (*Dir, error) {
	if parent == "" {
		parent = os.TempDir()
	}
	removeAbandoned(parent)
	var err error
	for range ownAttempts {
		var dir *Dir
		if dir, err = own(parent, purpose); err == nil {
			return dir, nil
		}
	}
	return nil, fmt.Errorf("own a temporary directory: %w", err)
}

// own makes a directory and locks it. Another process may take it for abandoned
// between the two: then it holds the lock, or has removed what was locked.
func own(parent, purpose string) (*Dir, error) {
	path, err := os.MkdirTemp(parent, prefix+purpose+"-")
	if err != nil {
		return nil, err
	}
	lockPath := filepath.Join(path, lockName)
	lock, err := process.TryLock(lockPath)
	if err != nil {
		return nil, err
	}
	if _, err := os.Lstat(lockPath); err != nil {
		lock.Unlock()
		return nil, err
	}
	return &Dir{Path: path, lock: lock}, nil
}

// Remove deletes the directory and all that is in it. Nothing happens the
// second time.
func (d *Dir) Remove() error {
	err := os.RemoveAll(d.Path)
	d.lock.Unlock()
	return err
}

// removeAbandoned is a courtesy: what it cannot remove, another user's
// directory for example, stays.
func removeAbandoned(parent string) {
	paths, err := filepath.Glob(filepath.Join(parent, prefix+"*"))
	if err != nil {
		return
	}
	for _, path := range paths {
		info, err := os.Lstat(path)
		if err != nil || !info.IsDir() {
			continue
		}
		lockPath := filepath.Join(path, lockName)
		if _, err := os.Lstat(lockPath); err != nil {
			if time.Since(info.ModTime()) > graceWithoutLock {
				_ = os.RemoveAll(path)
			}
			continue
		}
		// A lock file made here would come back into a directory that its owner is
		// just removing.
		if lock, err := process.TryLockExisting(lockPath); err == nil {
			_ = os.RemoveAll(path)
			lock.Unlock()
		}
	}
}
