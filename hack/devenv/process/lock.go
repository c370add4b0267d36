package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"
)

const (
	lockInterval       = 250 * time.Millisecond
	lockReportInterval = 15 * time.Second
)

// ErrLocked says that another process holds the lock.
var ErrLocked = errors.New("locked by another process")

// FileLock is an exclusive lock that ends with its process at the latest.
// Children do not inherit it.
type FileLock struct {
	file   *os.File
	unlock sync.Once
}

// TryLock takes the lock, or returns ErrLocked at once. The file is made if there is
// none.
func TryLock(path string) (*FileLock, error) { return tryLock(path, os.O_CREATE) }

// TryLockExisting is TryLock for a file that is there; it makes none.
func TryLockExisting(path string) (*FileLock, error) { return tryLock(path, 0) }

func tryLock(path string, flag int) (*FileLock, error) {
	file, err := os.OpenFile(path, flag|os.O_RDWR|syscall.O_NOFOLLOW, 0o600)
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

// WaitLock takes the lock once it is free, or fails when the context ends. report
// is told now and again for how long this has waited for another process.
func WaitLock(ctx context.Context, path string, report func(waited time.Duration)) (*FileLock, error) {
	started, reported := time.Now(), time.Time{}
	tick := time.NewTicker(lockInterval)
	defer tick.Stop()
	for {
		lock, err := TryLock(path)
		if !errors.Is(err, ErrLocked) {
			return lock, err
		}
		if time.Since(reported) >= lockReportInterval {
			reported = time.Now()
			report(time.Since(started).Round(time.Second))
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for the process that holds %s: %w", path, ctx.Err())
		case <-tick.C:
		}
	}
}

// Unlock gives the lock back. Nothing happens the second time.
func (l *FileLock) Unlock() {
	l.unlock.Do(func() { _ = l.file.Close() })
}
