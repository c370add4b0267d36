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

func (c *packageContender) prepare(context.Context, load, time.Duration) error { return nil }

// measure uses new buckets each time: one that keeps leases gets slower with each.
func (c *packageContender) measure(ctx context.Context, l load, warmUp, window time.Duration) (sample, error) {
	c.round++
	node := exec.CommandContext(ctx, c.node, "driver.mjs",
		strconv.Itoa(l.callers), strconv.Itoa(l.buckets),
		strconv.FormatInt(warmUp.Milliseconds(), 10), strconv.FormatInt(window.Milliseconds(), 10), strconv.Itoa(c.round))
	node.Dir = c.dir
	node.Env = append(os.Environ(), "BENCH_DATABASE_URL="+c.url)
	var stderr bytes.Buffer
	node.Stderr = &stderr
	output, err := node.Output()
	if err != nil {
		return sample{}, fmt.Errorf("%w: %s", err, stderr.Bytes())
	}
	var told struct {
		LatenciesMs []float64 `json:"latenciesMs"`
		// InWindow counts operations after the warm-up, Operations all of them.
		InWindow   float64 `json:"inWindow"`
		Operations int64   `json:"operations"`
	}
	if err := json.Unmarshal(output, &told); err != nil {
		return sample{}, err
	}
	latencies := make([]time.Duration, len(told.LatenciesMs))
	for i, ms := range told.LatenciesMs {
		latencies[i] = time.Duration(ms * float64(time.Millisecond))
	}
	s := sampleOf(latencies, window)
	s.PerSecond = told.InWindow / window.Seconds()
	s.operations = told.Operations
	return s, nil
}
