package postgres

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/token-lease/operator/hack/devenv/process"
)

const (
	// oldestMajor is the oldest PostgreSQL that is used when found.
	oldestMajor    = 14
	programTimeout = 30 * time.Second
)

// programs are the server programs of one PostgreSQL installation.
type programs struct {
	initdb, postgres string
	version          string
}

// placesByVersion are where installations lie that do not put their server
// programs on the PATH.
var placesByVersion = []string{
	"/usr/lib/postgresql/*/bin",                                  // Debian, Ubuntu
	"/usr/pgsql-*/bin",                                           // PGDG packages on Red Hat and SUSE
	"/usr/lib/postgresql*/bin",                                   // SUSE
	"/usr/libexec/postgresql*",                                   // Alpine
	"/opt/homebrew/opt/postgresql@*/bin",                         // Homebrew on Apple silicon
	"/usr/local/opt/postgresql@*/bin",                            // Homebrew on Intel
	"/Applications/Postgres.app/Contents/Versions/*/bin",         // Postgres.app
	"/usr/local/pgsql/bin",                                       // built from source
	"/opt/local/lib/postgresql*/bin", "/usr/local/postgres*/bin", // MacPorts and others
}

// find returns the first usable installation. The second result tells what was
// looked at and passed over.
func find(ctx context.Context) (found programs, passedOver []string, ok bool) {
	for _, dir := range candidateDirs(ctx) {
		candidate := programs{initdb: filepath.Join(dir, "initdb"), postgres: filepath.Join(dir, "postgres")}
		if !executable(candidate.initdb) || !executable(candidate.postgres) {
			continue
		}
		version, err := output(ctx, candidate.postgres, "--version")
		if err != nil {
			passedOver = append(passedOver, fmt.Sprintf("%s (does not run: %v)", dir, err))
			continue
		}
		if major := majorVersion(version); major < oldestMajor {
			passedOver = append(passedOver, fmt.Sprintf("%s (version %d is older than %d)", dir, major, oldestMajor))
			continue
		}
		candidate.version = version
		return candidate, passedOver, true
	}
	return programs{}, passedOver, false
}

// candidateDirs lists directories that may hold the server programs, the best
// first, each once.
func candidateDirs(ctx context.Context) []string {
	var dirs []string
	add := func(dir string) {
		if dir != "" && !slices.Contains(dirs, dir) {
			dirs = append(dirs, dir)
		}
	}
	if path, err := exec.LookPath("postgres"); err == nil {
		// A link on the PATH leads to the directory where initdb is, too.
		if resolved, err := filepath.EvalSymlinks(path); err == nil {
			path = resolved
		}
		add(filepath.Dir(path))
	}
	if path, err := exec.LookPath("pg_config"); err == nil {
		if dir, err := output(ctx, path, "--bindir"); err == nil {
			add(dir)
		}
	}
	for _, pattern := range placesByVersion {
		matches, _ := filepath.Glob(pattern)
		slices.SortStableFunc(matches, func(a, b string) int {
			return cmp.Compare(majorOfPlace(b), majorOfPlace(a))
		})
		for _, dir := range matches {
			add(dir)
		}
	}
	return dirs
}

var firstNumber = regexp.MustCompile(`\d+`)

// majorOfPlace reads the version from a path like /usr/lib/postgresql/15/bin.
func majorOfPlace(dir string) int {
	return majorVersion(filepath.Base(strings.TrimSuffix(dir, "/bin")))
}

// majorVersion reads the first number of "postgres (PostgreSQL) 15.3" or of
// "pgsql-15"; 0 when there is none.
func majorVersion(text string) int {
	number, err := strconv.Atoi(firstNumber.FindString(text))
	if err != nil {
		return 0
	}
	return number
}

func executable(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular() && info.Mode().Perm()&0o111 != 0
}

func output(ctx context.Context, path string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, programTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env = process.Environment()
	text, err := cmd.Output()
	return strings.TrimSpace(string(text)), err
}
