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
	"time"

	"github.com/token-lease/operator/hack/devenv/npm"
)

// The package and what drives it.
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
	dir, node, err := npm.Install(ctx, "tokenlease-conformance", map[string][]byte{
		"driver.mjs": driver, "package.json": packageJSON, "package-lock.json": packageLock,
	}, os.Stdout)
	if err != nil {
		return nil, err
	}
	p := &npmPackage{node: exec.CommandContext(ctx, node, "driver.mjs")}
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
