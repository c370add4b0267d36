// Package npm installs npm packages for the programs below hack that run one, with a
// Node of their own: it comes as an npm package, since many machines have an older
// one, or none.
package npm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
)

// Install writes files (package.json, package-lock.json and what they run) into a
// directory of the user's cache and installs what they pin. It returns the directory
// and its Node.
func Install(ctx context.Context, name string, files map[string][]byte, log io.Writer) (dir, node string, err error) {
	program, err := exec.LookPath("npm")
	if err != nil {
		return "", "", errors.New("npm is needed to install the package that is compared with: install Node.js with npm")
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", "", err
	}
	dir = filepath.Join(cache, name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", "", err
	}
	for file, content := range files {
		if err := os.WriteFile(filepath.Join(dir, file), content, 0o600); err != nil {
			return "", "", err
		}
	}
	fmt.Fprintln(log, "npm: installing", name)
	install := exec.CommandContext(ctx, program, "ci", "--no-audit", "--no-fund")
	install.Dir = dir
	if output, err := install.CombinedOutput(); err != nil {
		return "", "", fmt.Errorf("npm ci: %w: %s", err, output)
	}
	return dir, filepath.Join(dir, "node_modules", "node", "bin", "node"), nil
}
