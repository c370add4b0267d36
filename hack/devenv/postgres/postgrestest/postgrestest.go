// Package postgrestest gives every test a fresh database on one PostgreSQL
// server that the tests of a package share.
package postgrestest

import (
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/token-lease/operator/hack/devenv/postgres"
)

const (
	startTimeout = 20 * time.Minute // long enough to install the programs first
	stepTimeout  = time.Minute
	// longestPrefix keeps names below PostgreSQL's 63 bytes.
	longestPrefix = 30
)

// shared is the server of this test process, started by the first test that
// needs it.
var shared struct {
	sync.Mutex
	server *postgres.Server
	err    error
}

// Main runs the tests and then stops the shared server, if a test started it:
//
//	func TestMain(m *testing.M) { os.Exit(postgrestest.Main(m)) }
//
// Without it the server still ends with the process, but its directory stays
// until the next server is started.
func Main(m *testing.M) int {
	code := m.Run()
	shared.Lock()
	defer shared.Unlock()
	if shared.server == nil {
		return code
	}
	ctx, cancel := context.WithTimeout(context.Background(), stepTimeout)
	defer cancel()
	if err := shared.server.Stop(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "stop the shared PostgreSQL server:", err)
		return max(code, 1)
	}
	return code
}

// Server returns the shared server. The test fails when there is none: it is
// never skipped. It must not be taken down; a test of an outage starts a server
// of its own with Own.
func Server(t testing.TB) *postgres.Server {
	t.Helper()
	shared.Lock()
	defer shared.Unlock()
	if shared.server == nil && shared.err == nil {
		ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
		defer cancel()
		shared.server, shared.err = postgres.Start(ctx, postgres.Options{NoFsync: true, Log: os.Stderr})
	}
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	return shared.server
}

// Own starts a server for this test alone, which may take it down. It is
// stopped when the test ends.
func Own(t testing.TB) *postgres.Server {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	server, err := postgres.Start(ctx, postgres.Options{Own: true, NoFsync: true})
	if err != nil {
		t.Fatal(err)
	}
	stopAtEnd(t, server)
	return server
}

// Standby starts a server for this test alone that follows another one of its own.
func Standby(t testing.TB, primary *postgres.Server) *postgres.Server {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), stepTimeout)
	defer cancel()
	server, err := primary.StartStandby(ctx)
	if err != nil {
		t.Fatal(err)
	}
	stopAtEnd(t, server)
	return server
}

func stopAtEnd(t testing.TB, server *postgres.Server) {
	t.Helper()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), stepTimeout)
		defer cancel()
		if err := server.Stop(ctx); err != nil {
			t.Error(err)
		}
	})
}

// NewDatabase makes an empty database on the shared server and returns its URL.
// It is dropped when the test ends.
func NewDatabase(t testing.TB) string {
	t.Helper()
	return NewDatabaseOn(t, Server(t))
}

// NewDatabaseOn is NewDatabase on a server of the caller's choice. A server that
// is down when the test ends keeps the database.
func NewDatabaseOn(t testing.TB, server *postgres.Server) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), stepTimeout)
	defer cancel()
	name := databaseName(t.Name())
	if err := server.CreateDatabase(ctx, name); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		select {
		case <-server.Done():
			return
		default:
		}
		ctx, cancel := context.WithTimeout(context.Background(), stepTimeout)
		defer cancel()
		if err := server.DropDatabase(ctx, name); err != nil {
			t.Error(err)
		}
	})
	return server.URL(name)
}

// databaseName shows which test a database belongs to, and is unique also on a
// given server that several packages use at once.
func databaseName(test string) string {
	readable := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9':
			return r
		case r >= 'A' && r <= 'Z':
			return r - 'A' + 'a'
		default:
			return '_'
		}
	}, test)
	readable = readable[:min(len(readable), longestPrefix)]
	return readable + "_" + strings.ToLower(rand.Text()[:12])
}
