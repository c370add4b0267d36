package main

import "testing"

// Goal: a run that compared too little fails, unless less was asked for. Method: runs
// with and without flags, each held against what it should have done.
func TestExtent(t *testing.T) {
	for _, c := range []struct {
		what             string
		sequences, steps int
		flags            []string
		did, operations  int
		ok               bool
	}{
		{"all of it", 2_000, 28, nil, 2_000, 56_000, true},
		{"defaults that are too low", 1_000, 28, nil, 1_000, 28_000, false},
		{"too few steps by default", 2_000, 10, nil, 2_000, 20_000, false},
		{"ended early", 2_000, 28, nil, 1_999, 55_972, false},
		{"few by flag", 10, 28, []string{"sequences"}, 10, 280, true},
		{"few by flag, and ended early", 10, 28, []string{"sequences"}, 9, 252, false},
		{"short by flag", 2_000, 5, []string{"steps"}, 2_000, 10_000, true},
		{"short by flag, and fewer than ever asked for", 2_000, 5, []string{"steps"}, 1_000, 10_000, false},
		{"more by flag", 5_000, 28, []string{"sequences"}, 1_999, 55_972, false},
		{"another flag", 1_000, 28, []string{"seed"}, 1_000, 28_000, false},
	} {
		given := map[string]bool{}
		for _, name := range c.flags {
			given[name] = true
		}
		if err := extentOf(c.sequences, c.steps, given).check(c.did, c.operations); (err == nil) != c.ok {
			t.Errorf("%s: %v", c.what, err)
		}
	}
}
