package main

import (
	"encoding/json"
	"math"
	"strings"
	"testing"
	"time"
)

// measured is a report of three rounds in which the ledger is twice as fast as
// anything else, more or less.
func measured() report {
	r := newReport()
	r.setup = setup{
		CPUs: 2, Platform: "go linux/amd64", Rounds: 3, Window: 3 * time.Second,
		PostgreSQL: []setting{{"server_version", "15.1"}, {"fsync", "on"}, {"synchronous_commit", "on"}},
		Redis:      []setting{{"redis_version", "7.0"}, {"appendfsync", "always"}},
	}
	nan := math.NaN()
	for _, round := range []float64{100, 90, 120} {
		for _, l := range []load{lone, hot, spread} {
			r.add(point{byHand, l}, sample{PerSecond: 100, P50: 4, P95: 5, P99: 6, WAL: 500, AOF: nan, Allocated: 70, Batch: 1})
			r.add(point{thePackage, l}, sample{PerSecond: 100, P50: nan, P95: nan, P99: nan, WAL: 900, AOF: nan, Allocated: nan, Batch: 1})
			r.add(point{theRedis, l}, sample{PerSecond: 100, P50: 4, P95: 5, P99: 6, WAL: nan, AOF: 300, Allocated: 60, Batch: nan})
			r.add(point{theLedger, l}, sample{PerSecond: 2 * round, P50: 2, P95: 2.5, P99: 3.14159, WAL: 400, AOF: nan, Allocated: 80, Batch: 31.6})
		}
		r.add(point{rawWrites, hot}, sample{PerSecond: 100, P50: 1, P95: 1, P99: 1, WAL: 350, AOF: nan, Allocated: 20, Batch: 32})
		r.add(point{withLeases, load{0, hot.callers}}, sample{PerSecond: 100})
		r.add(point{withLeases, load{1_000_000, hot.callers}}, sample{PerSecond: 90})
	}
	return r
}

// printed is what a report prints, and its last line decoded.
func printed(t *testing.T, r report) (lines []string, told map[string]any) {
	t.Helper()
	var out strings.Builder
	if err := r.print(&out); err != nil {
		t.Fatal(err)
	}
	lines = strings.Split(strings.TrimSpace(out.String()), "\n")
	last, found := strings.CutPrefix(lines[len(lines)-1], "bench: ")
	if !found {
		t.Fatalf("the last line is %q", lines[len(lines)-1])
	}
	if err := json.Unmarshal([]byte(last), &told); err != nil {
		t.Fatal(err)
	}
	return lines, told
}

// asJSON is a value in the form in which it can be compared.
func asJSON(t *testing.T, value any) string {
	t.Helper()
	text, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// Goal: the last line of a report is JSON with every ratio and its range, with each
// point's figures, null where there is none, and with what was measured on. Method: a
// report whose figures are plain.
func TestReportLine(t *testing.T) {
	r := measured()
	if r.batch() != 32 {
		t.Errorf("the batch is %d, want 32", r.batch())
	}
	_, told := printed(t, r)
	ranges := told["ratio_ranges"].(map[string]any)
	for key, want := range map[string]string{
		"hot256_vs_package": "[2,1.8,2.4]", "hot256_vs_for_update": "[2,1.8,2.4]", "hot_share_of_raw": "[2,1.8,2.4]",
		"spread256_vs_for_update": "[2,1.8,2.4]", "hot256_vs_redis": "[2,1.8,2.4]",
		"lone_p50_vs_for_update": "[0.5,0.5,0.5]", "growth_1m_vs_empty": "[0.9,0.9,0.9]",
	} {
		span, _ := ranges[key].(map[string]any)
		if got := asJSON(t, []any{told[key], span["min"], span["max"]}); got != want {
			t.Errorf("%s is %s, want %s", key, got, want)
		}
	}
	points := map[string]string{}
	for _, p := range told["points"].([]any) {
		p := p.(map[string]any)
		points[asJSON(t, []any{p["subject"], p["callers"], p["buckets"], p["leases_kept"]})] = asJSON(t, []any{
			p["operations_per_second"], p["latency_ms"],
			p["wal_bytes_per_operation"], p["aof_bytes_per_operation"], p["memory_bytes_per_operation"],
		})
	}
	for key, want := range map[string]string{
		`["ledger",256,1,null]`:  `[{"max":240,"median":200,"min":180},{"p50":2,"p95":2.5,"p99":3.142},400,null,80]`,
		`["package",256,1,null]`: `[{"max":100,"median":100,"min":100},{"p50":null,"p95":null,"p99":null},900,null,null]`,
		`["redis",1,1,null]`:     `[{"max":100,"median":100,"min":100},{"p50":4,"p95":5,"p99":6},null,300,60]`,
	} {
		if points[key] != want {
			t.Errorf("%s: %s, want %s", key, points[key], want)
		}
	}
	if _, there := points[`["raw",1,1,null]`]; !there {
		t.Errorf("the points are %v, want the row writes of one connection", points)
	}
	if _, there := points[`["growth",256,1,1000000]`]; !there || len(points) != 15 {
		t.Errorf("the points are %v, want 15 with the growth", points)
	}
	for key, want := range map[string]string{
		"cpus": "2", "rounds": "3", "window_seconds": "3",
		"postgresql": `{"fsync":"on","server_version":"15.1","synchronous_commit":"on"}`,
		"redis":      `{"appendfsync":"always","redis_version":"7.0"}`,
	} {
		if got := asJSON(t, told[key]); got != want {
			t.Errorf("%s is %s, want %s", key, got, want)
		}
	}
	if about := asJSON(t, told["about"]); !strings.Contains(about, "bytes that this process allocated per operation") {
		t.Errorf("it does not say what the memory is: %s", about)
	}
}

// Goal: the table has what the JSON has, and its head says what was measured on.
// Method: the same figures.
func TestReportTable(t *testing.T) {
	lines, _ := printed(t, measured())
	var rows []string
	for _, line := range lines {
		rows = append(rows, strings.Join(strings.Fields(line), " "))
	}
	text := strings.Join(rows, "\n") + "\n"
	for _, want := range []string{
		"measured on 2 CPUs, go linux/amd64; 3 rounds, windows of 3s",
		"PostgreSQL, as it reports itself: server_version 15.1, fsync on, synchronous_commit on\n",
		"Redis, as it reports itself: redis_version 7.0, appendfsync always\n",
		"memory bytes: bytes that this process allocated per operation",
		"\nledger 1/256 200 180 240 2.00 2.50 3.14 400 - 80 32\n",
		"\npackage 1000/256 100 100 100 - - - 900 - - 1\n",
		"\nredis 1/1 100 100 100 4.00 5.00 6.00 - 300 60 -\n",
		"\nhot256_vs_package 2.000 1.800 2.400\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the report lacks %q:\n%s", want, text)
		}
	}
}

// Goal: what was left out is not told as if it were 0. Method: a report of one point.
func TestReportOfOnePoint(t *testing.T) {
	r := newReport()
	r.add(point{theLedger, hot}, sample{PerSecond: 200})
	_, told := printed(t, r)
	for _, kind := range ratioKinds {
		if value, there := told[kind.name]; there {
			t.Errorf("%s is %v, and was not measured", kind.name, value)
		}
	}
	if told["redis"] != nil {
		t.Errorf("Redis is %v, and was not measured", told["redis"])
	}
}
