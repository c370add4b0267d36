// Package scratch makes the temporary directories in which the servers of the
// development environment keep their data. A directory belongs to the process
// that made it, shown by a file lock, which the kernel takes away however the
// process ends. Whoever makes the next directory removes those without owner,
// so that killed test runs do not fill the disk.
package scratch

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/token-lease/operator/hack/devenv/process"
)

const (
	prefix = "tokenlease-devenv-"
	// newPrefix names a directory whose owner has yet to lock it. It gets its name
	// once it is locked, so nobody ever sees it there without an owner.
	newPrefix = "tokenlease-new-devenv-"
	lockName  = ".owner"
	// graceWithoutLock is the age before which a directory is left alone that its
	// owner may be about to lock, or to remove.
	graceWithoutLock = time.Minute
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
	dir, err := own(parent, purpose)
	if err != nil {
		return nil, fmt.Errorf("own a temporary directory: %w", err)
	}
	return dir, nil
}

// own makes a directory, locks it and then gives it its name.
func own(parent, purpose string) (*Dir, error) {
	path, err := os.MkdirTemp(parent, newPrefix+purpose+"-")
	if err != nil {
		return nil, err
	}
	lock, err := process.TryLock(filepath.Join(path, lockName))
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(path))
	}
	named := filepath.Join(parent, prefix+strings.TrimPrefix(filepath.Base(path), newPrefix))
	if err := os.Rename(path, named); err != nil {
		lock.Unlock()
		return nil, errors.Join(err, os.RemoveAll(path))
	}
	return &Dir{Path: named, lock: lock}, nil
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
	for _, path := range append(matches(parent, prefix), matches(parent, newPrefix)...) {
		info, err := os.Lstat(path)
		if err != nil || !info.IsDir() {
			continue
		}
		young := time.Since(info.ModTime()) < graceWithoutLock
		lockPath := filepath.Join(path, lockName)
		_, err = os.Lstat(lockPath)
		switch unnamed := strings.HasPrefix(filepath.Base(path), newPrefix); {
		case young && (err != nil || unnamed):
		case err != nil:
			_ = os.RemoveAll(path)
		default:
			// A lock file made here would come back into a directory that its owner is
			// just removing.
			if lock, err := process.TryLockExisting(lockPath); err == nil {
				_ = os.RemoveAll(path)
				lock.Unlock()
			}
		}
	}
}

// matches lists what is in a directory under names that begin so.
func matches(parent, prefix string) []string {
	paths, err := filepath.Glob(filepath.Join(parent, prefix+"*"))
	if err != nil {
		return nil
	}
	return paths
}
