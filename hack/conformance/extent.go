package main

import "fmt"

// extent is how much has to be compared at least.
type extent struct{ sequences, operations int }

// enough is what a statement about the two ledgers rests on.
var enough = extent{sequences: 2_000, operations: 50_000}

// extentOf is what a run has to reach: enough, or less where the flags that were given
// ask for less.
func extentOf(sequences, steps int, given map[string]bool) extent {
	wanted := enough
	if given["sequences"] {
		wanted.sequences = min(wanted.sequences, sequences)
	}
	if given["sequences"] || given["steps"] {
		wanted.operations = min(wanted.operations, sequences*steps)
	}
	return wanted
}

// check refuses a run that compared less.
func (e extent) check(sequences, operations int) error {
	if sequences < e.sequences || operations < e.operations {
		return fmt.Errorf("%d sequences and %d operations were compared, and a run that says something has %d and %d at least",
			sequences, operations, e.sequences, e.operations)
	}
	return nil
}
