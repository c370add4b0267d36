package process

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
)

// ErrLocked says that another process holds the lock.
var ErrLocked = errors.New("locked by another process")

// FileLock is an exclusive lock that ends with its process at the latest.
// Children do not inherit it.
type FileLock struct {
	file   *os.File
	unlock sync.Once
}

// TryLock takes the lock, or returns ErrLocked at once.
func TryLock(path string) (*FileLock, error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	err = syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if err == nil {
		return &FileLock{file: file}, nil
	}
	_ = file.Close()
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return nil, ErrLocked
	}
	return nil, fmt.Errorf("lock %s: %w", path, err)
}

// Unlock gives the lock back. Nothing happens the second time.
func (l *FileLock) Unlock() {
	l.unlock.Do(func() { _ = l.file.Close() })
}
