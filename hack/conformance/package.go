package main

import (
	"bufio"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// The package runs on the Node that comes as an npm package, since it needs a newer
// one than many machines have.
//
//go:embed driver.mjs
var driver []byte

//go:embed package.json
var packageJSON []byte

//go:embed package-lock.json
var packageLock []byte

// npmPackage is the npm package in a process of its own.
type npmPackage struct {
	node    *exec.Cmd
	input   io.WriteCloser
	answers *bufio.Reader
}

func startPackage(ctx context.Context) (*npmPackage, error) {
	dir, err := installPackage(ctx)
	if err != nil {
		return nil, err
	}
	p := &npmPackage{node: exec.CommandContext(ctx, filepath.Join(dir, "node_modules", "node", "bin", "node"), "driver.mjs")}
	p.node.Dir, p.node.Stderr = dir, os.Stderr
	if p.input, err = p.node.StdinPipe(); err != nil {
		return nil, err
	}
	output, err := p.node.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.answers = bufio.NewReader(output)
	return p, p.node.Start()
}

func installPackage(ctx context.Context) (dir string, err error) {
	npm, err := exec.LookPath("npm")
	if err != nil {
		return "", errors.New("npm is needed to install the package that is compared with: install Node.js with npm")
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	dir = filepath.Join(cache, "tokenlease-conformance")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	for name, content := range map[string][]byte{"driver.mjs": driver, "package.json": packageJSON, "package-lock.json": packageLock} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			return "", err
		}
	}
	fmt.Println("conformance: installing the npm package")
	install := exec.CommandContext(ctx, npm, "ci", "--no-audit", "--no-fund")
	install.Dir = dir
	if output, err := install.CombinedOutput(); err != nil {
		return "", fmt.Errorf("npm ci: %w: %s", err, output)
	}
	return dir, nil
}

func (p *npmPackage) close() error {
	return errors.Join(p.input.Close(), p.node.Wait())
}

// run runs a sequence on an empty ledger of the package. The package is given clocks
// of its own: see differences.go.
func (p *npmPackage) run(s sequence, clocks []time.Time) ([]answer, error) {
	line, err := s.line(clocks)
	if err != nil {
		return nil, err
	}
	if _, err := p.input.Write(append(line, '\n')); err != nil {
		return nil, err
	}
	text, err := p.answers.ReadBytes('\n')
	if err != nil {
		return nil, fmt.Errorf("the package's process ended: %w", err)
	}
	var answers []answer
	if err := json.Unmarshal(text, &answers); err != nil {
		return nil, err
	}
	for i := range answers {
		if b := answers[i].Bucket; b != nil {
			b.Records = int64(len(b.Leases))
		}
	}
	return answers, nil
}
