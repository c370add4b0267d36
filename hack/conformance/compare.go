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
	// explained counts the exchanges that a difference explains, operations all.
	explained  map[string]int
	operations int
	// attempts makes the buckets of sequences that are run again new ones.
	attempts int
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
	c.operations += len(s.steps)
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
	whole := sequence{settings: s.settings, steps: slices.Clone(s.steps)}
	for _, key := range keys {
		whole.steps = append(whole.steps, step{clock: last, verb: inspect, bucket: key, lease: -1})
	}
	return whole
}

// shrink leaves out steps for as long as a difference remains.
func (c *comparison) shrink(ctx context.Context, s sequence, difference string) (sequence, string) {
	for size := len(s.steps) / 2; size > 0; size /= 2 {
		for from := 0; from+size <= len(s.steps) && len(s.steps) > size; {
			smaller := c.renamed(s.without(from, from+size))
			found, err := c.compare(ctx, smaller)
			if err != nil || found == "" {
				from += size
				continue
			}
			s, difference = smaller, found
		}
	}
	return s, difference
}

// renamed gives a sequence buckets that no earlier run has used.
func (c *comparison) renamed(s sequence) sequence {
	c.attempts++
	again := sequence{settings: s.settings, steps: slices.Clone(s.steps)}
	for i := range again.steps {
		if key := again.steps[i].bucket; len(key) > 0 && key[0] == 's' {
			again.steps[i].bucket = fmt.Sprintf("s%d-%s", c.attempts, key[1:])
		}
	}
	return again
}

// report says what was compared, and refuses a difference that never showed: it would
// be one that nobody needs any more.
func (c *comparison) report(sequences int, seed int64) error {
	for _, subject := range slices.Sorted(maps.Keys(c.explained)) {
		fmt.Printf("conformance: %d exchanges differ as meant: %s\n", c.explained[subject], subject)
	}
	if len(c.explained) < len(differences) && sequences >= 500 {
		return fmt.Errorf("of the differences that are meant (%s) some never showed", subjects())
	}
	fmt.Printf("conformance: %d sequences, %d operations, 0 unexplained differences (seed %d)\n", sequences, c.operations, seed)
	return nil
}
