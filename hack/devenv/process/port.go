package process

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
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

// ErrPortTaken says that another process took the port between FreePort and
// the start of the server; the caller tries another one.
var ErrPortTaken = errors.New("the port is taken")

// FreePort names a loopback port on which nothing listens.
func FreePort() (int, error) {
	for range portAttempts {
		port := lowestPort + rand.IntN(highestPort-lowestPort)
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
