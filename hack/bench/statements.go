package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/token-lease/operator/hack/devenv/postgres"
)

// logStatements has the server note how long each step of each statement took.
const logStatements = "log_min_duration_statement=0"

// statementPoints are what is looked at: the two figures in which the ledger is
// furthest from what it is compared with.
var statementPoints = []point{{theLedger, lone}, {byHand, lone}, {theLedger, hot}, {rawLookUps, hot}}

// showStatements tells where the server's time goes: it runs each point once, in a
// server of its own that logs every statement, and prints the median time of each step.
// Logging makes everything slower, so these are for comparison with one another.
func showStatements(ctx context.Context, o options, w io.Writer) (err error) {
	for _, p := range statementPoints {
		if err := showStatementsOf(ctx, o, p, w); err != nil {
			return fmt.Errorf("%s: %w", p, err)
		}
	}
	return nil
}

func showStatementsOf(ctx context.Context, o options, p point, w io.Writer) (err error) {
	b := &bench{options: o, contenders: map[string]contender{}, report: newReport()}
	defer func() { err = errors.Join(err, b.close()) }()
	b.server, err = postgres.Start(ctx, postgres.Options{Own: true, Settings: append([]string{logStatements}, serverSettings...), Log: os.Stderr})
	if err != nil {
		return err
	}
	c, err := b.open(ctx, p.subject)
	if err != nil {
		return err
	}
	if err := c.prepare(ctx, p.load, o.window/3); err != nil {
		return err
	}
	offset, err := os.Stat(b.server.LogFile())
	if err != nil {
		return err
	}
	if _, err := c.measure(ctx, p.load, 0, o.window); err != nil {
		return err
	}
	log, err := os.Open(b.server.LogFile())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, log.Close()) }()
	if _, err := log.Seek(offset.Size(), io.SeekStart); err != nil {
		return err
	}
	steps, err := readSteps(log)
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "%s, median milliseconds in the server, logged:\n", p)
	return printSteps(w, steps)
}

// step is one phase of one statement.
type step struct{ phase, statement string }

var (
	stepLine  = regexp.MustCompile(`LOG:  duration: ([0-9.]+) ms  (parse|bind|execute|statement)[^:]*: ?(.*)$`)
	otherLine = regexp.MustCompile(`^\d{4}-\d\d-\d\d `)
)

// readSteps reads the durations from a server's log. A statement's text may go on for
// some lines; its first words name it.
func readSteps(log io.Reader) (map[step][]float64, error) {
	const nameLength = 60
	steps := map[step][]float64{}
	var current step
	var duration float64
	end := func() {
		if current.phase != "" {
			text := strings.Join(strings.Fields(current.statement), " ")
			current.statement = text[:min(len(text), nameLength)]
			steps[current] = append(steps[current], duration)
		}
		current = step{}
	}
	scanner := bufio.NewScanner(log)
	scanner.Buffer(nil, 64<<20)
	for scanner.Scan() {
		line := scanner.Text()
		if found := stepLine.FindStringSubmatch(line); found != nil {
			end()
			current = step{found[2], found[3]}
			var err error
			if duration, err = strconv.ParseFloat(found[1], 64); err != nil {
				return nil, err
			}
			continue
		}
		if otherLine.MatchString(line) {
			end()
		} else if len(current.statement) < 2*nameLength {
			current.statement += " " + line
		}
	}
	end()
	return steps, scanner.Err()
}

// printSteps leaves out what was not run often: opening and preparing.
func printSteps(w io.Writer, steps map[step][]float64) error {
	type row struct {
		step
		count  int
		median float64
	}
	var rows []row
	most := 0
	for _, durations := range steps {
		most = max(most, len(durations))
	}
	for s, durations := range steps {
		if len(durations)*4 < most {
			continue
		}
		slices.Sort(durations)
		rows = append(rows, row{s, len(durations), durations[len(durations)/2]})
	}
	slices.SortFunc(rows, func(a, b row) int {
		return cmp.Or(cmp.Compare(b.median, a.median), cmp.Compare(a.statement, b.statement), cmp.Compare(a.phase, b.phase))
	})
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, r := range rows {
		fmt.Fprintf(table, "  %.3f\t%d times\t%s\t%s\n", r.median, r.count, r.phase, r.statement)
	}
	return table.Flush()
}
