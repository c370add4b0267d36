package postgres

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
)

// Goal: of several installations the newest is taken, one that is too old is
// passed over, and an empty machine gets an error that names each way out.
// Method: scripts that only tell a version, as the only installations.
func TestFindPrefersTheNewest(t *testing.T) {
	root := emptyMachine(t)
	install := func(version string) {
		if err := installFake(root, version); err != nil {
			t.Fatal(err)
		}
	}

	if _, _, ok := find(t.Context()); ok {
		t.Fatal("found a server on an empty machine")
	}
	install("9")
	_, err := findOrInstall(t.Context(), t.Output(), debian)
	if err == nil {
		t.Fatal("a server of version 9 was accepted")
	}
	for _, part := range []string{URLVariable, "URL of a superuser", "apt-get install postgresql", "older than 14"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("the error does not name %q: %v", part, err)
		}
	}
	install("15")
	install("16")
	found, _, ok := find(t.Context())
	if !ok || !strings.Contains(found.postgres, filepath.Join("16", "bin")) || !strings.HasSuffix(found.version, " 16") {
		t.Fatalf("found %+v", found)
	}
}

// emptyMachine makes find look below a directory of its own, and nowhere else.
func emptyMachine(t *testing.T) (root string) {
	t.Helper()
	root = filepath.Join(t.TempDir(), "with space")
	t.Setenv("PATH", t.TempDir())
	restore := placesByVersion
	t.Cleanup(func() { placesByVersion = restore })
	placesByVersion = []string{filepath.Join(root, "postgresql", "*", "bin")}
	return root
}

// installFake puts programs there that tell a version and do nothing else.
func installFake(root, version string) error {
	dir := filepath.Join(root, "postgresql", version, "bin")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	script := "#!/bin/sh\necho 'postgres (PostgreSQL) " + version + "'\n"
	for _, program := range []string{"initdb", "postgres"} {
		if err := os.WriteFile(filepath.Join(dir, program), []byte(script), 0o755); err != nil {
			return err
		}
	}
	return nil
}

// Goal: of several that need the programs on a fresh machine, as packages of tests
// do, one installs them and the others wait and find them.
func TestOneInstalls(t *testing.T) {
	root := emptyMachine(t)
	var installs atomic.Int32
	arrived := make(chan struct{}, 3)
	with := installer{
		lock: filepath.Join(t.TempDir(), "lock"),
		installable: func() error {
			arrived <- struct{}{}
			return nil
		},
		install: func(ctx context.Context) error {
			installs.Add(1)
			for range cap(arrived) { // all have found nothing
				select {
				case <-arrived:
				case <-ctx.Done():
					return ctx.Err()
				}
			}
			return installFake(root, "16")
		},
	}
	results := make(chan error, cap(arrived))
	for range cap(arrived) {
		go func() {
			found, err := findOrInstall(t.Context(), t.Output(), with)
			if err == nil && found.postgres == "" {
				err = errors.New("no programs and no error")
			}
			results <- err
		}()
	}
	for range cap(arrived) {
		if err := <-results; err != nil {
			t.Error(err)
		}
	}
	if got := installs.Load(); got != 1 {
		t.Errorf("installed %d times, want once", got)
	}
}
