package ledgertest

import "testing"

// story is one test: it says its goal and method first, in the comment of its
// function.
type story struct {
	name string
	tell func(w *world)
}

// Exercise runs the suite. Each test gets a harness of its own; after each, the
// stored rows must agree with each other.
func Exercise(t *testing.T, newHarness NewHarness) {
	t.Helper()
	for _, subject := range []struct {
		name    string
		stories []story
	}{
		{"Reservations", reservationStories},
		{"Settlement", settlementStories},
		{"Periods", periodStories},
		{"Retention", retentionStories},
		{"Inputs", inputStories},
		{"Batches", batchStories},
		{"Intents", intentStories},
		{"RaisesInTime", raiseTimeStories},
		{"Conflicts", conflictStories},
		{"Grants", grantStories},
		{"Reviews", reviewStories},
		{"Declarations", declarationStories},
		{"Closing", closingStories},
		{"Returning", returningStories},
		{"Evidence", evidenceStories},
	} {
		t.Run(subject.name, func(t *testing.T) {
			for _, s := range subject.stories {
				t.Run(s.name, func(t *testing.T) {
					w := newWorld(t, newHarness)
					s.tell(w)
					w.invariants()
				})
			}
		})
	}
	t.Run("RandomOperations", func(t *testing.T) { testRandomOperations(t, newHarness) })
}
