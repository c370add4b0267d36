package main

import (
	"bytes"
	"context"
	"net/url"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/token-lease/operator/hack/devenv/postgres/postgrestest"
)

func TestMain(m *testing.M) { os.Exit(postgrestest.Main(m)) }

// Goal: the migration waits for a database that comes up later, and says so.
// Method: take the server down, migrate, and bring the server up once the
// migration says that it waits.
func TestMigrateWaitsForTheDatabase(t *testing.T) {
	server := postgrestest.Own(t)
	t.Setenv(databaseURLEnvironment, postgrestest.NewDatabaseOn(t, server))
	if err := server.Halt(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	var stdout, stderr lines
	ended := make(chan error, 1)
	go func() { ended <- dispatch(ctx, []string{"migrate"}, &stdout, &stderr) }()
	for !strings.Contains(stderr.String(), "waiting for the database, up to 5m0s: ") {
		select {
		case err := <-ended:
			t.Fatalf("the migration did not wait: %v", err)
		case <-time.After(10 * time.Millisecond):
		}
	}
	if err := server.Resume(ctx); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(stdout.String(), "applied ") {
		t.Errorf("the migration says %q", stdout.String())
	}
	if got := strings.Count(stderr.String(), "\n"); got > 3 {
		t.Errorf("the wait was told in %d lines, which is not one now and then:\n%s", got, stderr.String())
	}
}

// Goal: credentials that are refused and a database that does not exist end the
// migration at once, and a server that never comes within its bound, each with the
// reason and without the password.
func TestMigrateThatCannotWork(t *testing.T) {
	right, err := url.Parse(postgrestest.NewDatabase(t))
	if err != nil {
		t.Fatal(err)
	}
	user, elsewhere, nowhere := *right, *right, *right
	user.User = url.UserPassword("nobody_of_that_name", "hunter2")
	elsewhere.Path = "/no_such_database"
	nowhere.Host = "127.0.0.1:1"
	for _, test := range []struct {
		url     url.URL
		timeout string
		want    string
		waits   bool
	}{
		{user, "2m", "nobody_of_that_name", false},
		{elsewhere, "2m", "no_such_database", false},
		{nowhere, "100ms", "127.0.0.1:1", true},
	} {
		t.Setenv(databaseURLEnvironment, test.url.String())
		var stdout, stderr lines
		err := dispatch(t.Context(), []string{"migrate", "--timeout=" + test.timeout}, &stdout, &stderr)
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %v", test.want, err)
			continue
		}
		text := stderr.String() + err.Error()
		if password, _ := test.url.User.Password(); strings.Contains(text, password) {
			t.Errorf("%s: the password is told", test.want)
		}
		if waited := strings.Contains(text, "waiting for the database"); waited != test.waits {
			t.Errorf("%s: waited is %v: %s", test.want, waited, text)
		}
	}
}

// Goal: a process that only waits changes nothing, says what it waits for, and goes on
// once another one has migrated; it ends within its bound where nobody does.
func TestMigrateWaitOnly(t *testing.T) {
	t.Setenv(databaseURLEnvironment, postgrestest.NewDatabase(t))
	var stdout, stderr lines
	err := dispatch(t.Context(), []string{"migrate", "--wait-only", "--timeout=100ms"}, &stdout, &stderr)
	// On a slow machine it does not even reach the database within that.
	if err == nil || !strings.Contains(err.Error(), "wait for the schema: ") && !strings.Contains(err.Error(), "reach the database: ") {
		t.Errorf("without anybody who migrates: %v", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- dispatch(t.Context(), []string{"migrate", "--wait-only"}, &stdout, &stderr) }()
	for !strings.Contains(stderr.String(), "waiting for the schema, up to 5m0s: ") {
		select {
		case err := <-ended:
			t.Fatalf("it did not wait: %v\n%s", err, stderr.String())
		case <-time.After(10 * time.Millisecond):
		}
	}
	if !strings.Contains(stderr.String(), "run manager migrate") {
		t.Errorf("it does not say what is missing: %s", stderr.String())
	}
	if err := dispatch(t.Context(), []string{"migrate"}, &stdout, &stderr); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if !strings.Contains(stdout.String(), "applied ") {
		t.Errorf("nothing was left to the migration: %s", stdout.String())
	}
	err = dispatch(t.Context(), []string{"migrate", "--wait-only", "--runtime-role=r"}, &stdout, &stderr)
	if err == nil || !strings.Contains(err.Error(), "grants nothing") {
		t.Errorf("with a role: %v", err)
	}
}

// lines is a buffer for two goroutines.
type lines struct {
	mu     sync.Mutex
	buffer bytes.Buffer
}

func (l *lines) Write(text []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buffer.Write(text)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buffer.String()
}
