package process

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
)

const (
	// Ports stay below the range from which the usual kernels take the ports of
	// outgoing connections. A port of that range could be taken while its server
	// is down, even by a client that is trying to reach just that server.
	lowestPort  = 15000
	highestPort = 32000
	// portAttempts bounds the search for a free port.
	portAttempts = 100
)

// Loopback is the only address that the servers listen on.
const Loopback = "127.0.0.1"

// ErrPortTaken says that a process that does not ask FreePort took the port before the
// server started; the caller tries another one.
var ErrPortTaken = errors.New("the port is taken")

// claims keeps the ports that this process was given, as locks: until it ends nobody
// else is given one, also if nothing listens there yet, or for a while.
var (
	claimsMutex sync.Mutex
	claims      []*FileLock
)

// claim takes a port for this process. It reports false when somebody has it.
func claim(port int) (bool, error) {
	dir := filepath.Join(os.TempDir(), "tokenlease-ports")
	// Every user of the machine shares the ports, so all of them share this.
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return false, err
	}
	// Nobody can remove another's. It fails for all but whoever made it, who has done so.
	_ = os.Chmod(dir, 0o777|os.ModeSticky)
	lock, err := TryLock(filepath.Join(dir, strconv.Itoa(port)))
	switch {
	case errors.Is(err, ErrLocked), errors.Is(err, os.ErrPermission): // another user's
		return false, nil
	case err != nil:
		return false, err
	}
	claimsMutex.Lock()
	defer claimsMutex.Unlock()
	claims = append(claims, lock)
	return true, nil
}

// FreePort names a loopback port on which nothing listens, and that no other program
// which asks in this way is given until this process ends.
func FreePort() (int, error) {
	for range portAttempts {
		port := lowestPort + rand.IntN(highestPort-lowestPort)
		if claimed, err := claim(port); err != nil || !claimed {
			if err != nil {
				return 0, fmt.Errorf("claim a port: %w", err)
			}
			continue
		}
		listener, err := net.Listen("tcp", Address(port))
		if err != nil {
			continue
		}
		if err := listener.Close(); err != nil {
			return 0, err
		}
		return port, nil
	}
	return 0, fmt.Errorf("no free port on %s between %d and %d in %d attempts", Loopback, lowestPort, highestPort, portAttempts)
}

// Address is the loopback address with the port.
func Address(port int) string {
	return net.JoinHostPort(Loopback, strconv.Itoa(port))
}
