package postgres

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Goal: of several installations the newest is taken, one that is too old is
// passed over, and an empty machine gets an error that names each way out.
// Method: scripts that only tell a version, as the only installations.
func TestFindPrefersTheNewest(t *testing.T) {
	root := filepath.Join(t.TempDir(), "with space")
	t.Setenv("PATH", t.TempDir())
	restore := placesByVersion
	t.Cleanup(func() { placesByVersion = restore })
	placesByVersion = []string{filepath.Join(root, "postgresql", "*", "bin")}

	install := func(version string) {
		dir := filepath.Join(root, "postgresql", version, "bin")
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		script := "#!/bin/sh\necho 'postgres (PostgreSQL) " + version + "'\n"
		for _, program := range []string{"initdb", "postgres"} {
			if err := os.WriteFile(filepath.Join(dir, program), []byte(script), 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}

	if _, _, ok := find(t.Context()); ok {
		t.Fatal("found a server on an empty machine")
	}
	install("9")
	_, err := findOrInstall(t.Context(), t.Output())
	if err == nil {
		t.Fatal("a server of version 9 was accepted")
	}
	for _, part := range []string{URLVariable, "apt-get install postgresql", "older than 14"} {
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
