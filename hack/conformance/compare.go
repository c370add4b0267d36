package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
)

// comparison runs sequences on the package and on our stores.
type comparison struct {
	reference *npmPackage
	stores    *stores
	// explained counts the exchanges that a difference explains, the others all that
	// was compared to its end.
	explained             map[string]int
	sequences, operations int
}

// compare runs a sequence everywhere and describes the first difference that is not
// meant.
func (c *comparison) compare(ctx context.Context, s sequence) (string, error) {
	s = withInspections(s)
	var ours [][]ourAnswer
	for _, l := range c.stores.ledgers() {
		answers, err := l.run(ctx, s)
		if err != nil {
			return "", err
		}
		ours = append(ours, answers)
	}
	theirs, err := c.reference.run(s, clocks(s, ours[0]))
	if err != nil {
		return "", err
	}
	for i, step := range s.steps {
		if inMemory, inPostgres := ours[0][i].String(), ours[1][i].String(); inMemory != inPostgres {
			return fmt.Sprintf("step %d: memory answers\n  %s\npostgres\n  %s", i, inMemory, inPostgres), nil
		}
		e := exchange{i, step, s.settings, theirs[i], ours[0][i]}
		if listed(e.theirs, step).String() == e.ours.String() {
			continue
		}
		subject := explanation(e)
		if subject == "" {
			return fmt.Sprintf("step %d: the package answers\n  %s\nthis ledger\n  %s", i, listed(e.theirs, step), e.ours), nil
		}
		c.explained[subject]++
	}
	c.sequences++
	c.operations += len(s.steps)
	return "", nil
}

// withInspections looks at each bucket in the end, leases included.
func withInspections(s sequence) sequence {
	last := s.steps[len(s.steps)-1].clock
	var keys []string
	for _, step := range s.steps {
		if !slices.Contains(keys, step.bucket) {
			keys = append(keys, step.bucket)
		}
	}
	whole := sequence{place: s.place, settings: s.settings, steps: slices.Clone(s.steps)}
	for _, key := range keys {
		whole.steps = append(whole.steps, step{clock: last, verb: inspect, bucket: key, lease: -1})
	}
	return whole
}

// report says what was compared, and refuses a difference that never showed: it would
// be one that nobody needs any more.
func (c *comparison) report(wanted extent, seed int64) error {
	for _, subject := range slices.Sorted(maps.Keys(c.explained)) {
		fmt.Printf("conformance: %d exchanges differ as meant: %s\n", c.explained[subject], subject)
	}
	if len(c.explained) < len(differences) && c.sequences >= 500 {
		return fmt.Errorf("of the differences that are meant (%s) some never showed", subjects())
	}
	fmt.Printf("conformance: %d sequences, %d operations, 0 unexplained differences (seed %d)\n", c.sequences, c.operations, seed)
	return wanted.check(c.sequences, c.operations)
}
