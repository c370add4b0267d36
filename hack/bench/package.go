package main

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/token-lease/operator/hack/devenv/npm"
)

// The npm package runs in a process of its own.
//
//go:embed driver.mjs
var driver []byte

//go:embed package.json
var packageJSON []byte

//go:embed package-lock.json
var packageLock []byte

// packageContender is the npm package with its PostgreSQL store.
type packageContender struct {
	dir, node, url string
	round          int
}

func openPackage(ctx context.Context, url string) (*packageContender, error) {
	dir, node, err := npm.Install(ctx, "tokenlease-bench", map[string][]byte{
		"driver.mjs": driver, "package.json": packageJSON, "package-lock.json": packageLock,
	}, os.Stderr)
	if err != nil {
		return nil, err
	}
	schema, err := os.ReadFile(filepath.Join(dir, "node_modules", "token-lease", "schema", "postgres.sql"))
	if err != nil {
		return nil, err
	}
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close(ctx) }()
	if _, err := conn.Exec(ctx, string(schema)); err != nil {
		return nil, err
	}
	return &packageContender{dir: dir, node: node, url: url}, nil
}

func (c *packageContender) close() error { return nil }

// prepare opens new buckets each time: one that keeps leases gets slower with each.
func (c *packageContender) prepare(ctx context.Context, l load, _ time.Duration) error {
	c.round++
	_, err := c.drive(ctx, "open", l, 0, 0)
	return err
}

func (c *packageContender) measure(ctx context.Context, l load, warmUp, window time.Duration) (sample, error) {
	output, err := c.drive(ctx, "spend", l, warmUp, window)
	if err != nil {
		return sample{}, err
	}
	var told struct {
		// LatenciesMs are those of pairs that were under way within the window.
		LatenciesMs []float64 `json:"latenciesMs"`
		// InWindow counts operations within the window, Operations all of them.
		InWindow   int64 `json:"inWindow"`
		Operations int64 `json:"operations"`
	}
	if err := json.Unmarshal(output, &told); err != nil {
		return sample{}, err
	}
	seen := tally{all: told.Operations, inWindow: told.InWindow}
	for _, ms := range told.LatenciesMs {
		seen.latencies = append(seen.latencies, time.Duration(ms*float64(time.Millisecond)))
	}
	return seen.sample(window), nil
}

// drive runs the driver to its end and returns what it printed.
func (c *packageContender) drive(ctx context.Context, mode string, l load, warmUp, window time.Duration) ([]byte, error) {
	node := exec.CommandContext(ctx, c.node, "driver.mjs", mode,
		strconv.Itoa(l.callers), strconv.Itoa(l.buckets),
		strconv.FormatInt(warmUp.Milliseconds(), 10), strconv.FormatInt(window.Milliseconds(), 10), strconv.Itoa(c.round))
	node.Dir = c.dir
	node.Env = append(os.Environ(), "BENCH_DATABASE_URL="+c.url)
	var stderr bytes.Buffer
	node.Stderr = &stderr
	output, err := node.Output()
	if err != nil {
		return nil, fmt.Errorf("%w: %s", err, stderr.Bytes())
	}
	return output, nil
}
