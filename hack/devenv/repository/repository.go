// Package repository finds the working tree that a program was started in.
package repository

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

const modulePath = "github.com/token-lease/operator"

// Root is the directory of the operator's go.mod: the working directory or the
// nearest one above it.
func Root() (string, error) {
	start, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for dir := start; ; dir = filepath.Dir(dir) {
		content, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && declares(string(content)) {
			return dir, nil
		}
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return "", err
		}
		if dir == filepath.Dir(dir) {
			return "", fmt.Errorf("%s is not inside a clone of %s: run this from within one", start, modulePath)
		}
	}
}

func declares(goMod string) bool {
	for line := range strings.Lines(goMod) {
		if strings.TrimSpace(line) == "module "+modulePath {
			return true
		}
	}
	return false
}
