package main

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"unicode/utf16"
)

// length is a key's length as the package counts it.
func length(key string) int { return len(utf16.Encode([]rune(key))) }

// Goal: shrinking changes no key's length, so that a difference at the longest key is
// still one when it is shrunk, and runs nothing twice in the same buckets. Method:
// generated sequences that differ for as long as a bucket is there whose key is at the
// border, or beyond it; every third run fails for another reason.
func TestShrinkingKeepsKeysAsLong(t *testing.T) {
	const longest = 200
	atBorder := func(s step) bool { return s.verb == reserve && length(s.bucket) >= longest }
	shrunk := 0
	for n := range 300 {
		s := generate(7, n, 28)
		if !slices.ContainsFunc(s.steps, atBorder) {
			continue
		}
		lengths := map[int]bool{}
		for _, step := range s.steps {
			lengths[length(step.bucket)] = true
		}
		places := map[string]bool{s.place: true}
		r := shrinker{}
		r.compare = func(_ context.Context, smaller sequence) (string, error) {
			if places[smaller.place] {
				t.Fatalf("%q is run in twice", smaller.place)
			}
			places[smaller.place] = true
			for _, step := range smaller.steps {
				if !lengths[length(step.bucket)] {
					t.Fatalf("no key was %d long, and %q is", length(step.bucket), step.bucket)
				}
				if strings.Contains(step.bucket, s.place) {
					t.Fatalf("the bucket %q was there before", step.bucket)
				}
			}
			if r.runs%3 == 0 {
				return "", errors.New("no answer")
			}
			if slices.ContainsFunc(smaller.steps, atBorder) {
				return "still there", nil
			}
			return "", nil
		}
		small, difference := r.shrink(t.Context(), s, "there")
		if !slices.ContainsFunc(small.steps, atBorder) || len(small.steps) >= len(s.steps) || difference != "still there" {
			t.Errorf("sequence %d of %d steps is shrunk to %q\n%s", n, len(s.steps), difference, small)
		}
		shrunk++
	}
	if shrunk < 10 {
		t.Errorf("only %d sequences have a key at the border", shrunk)
	}
}

// Goal: what is left out of a sequence takes no lease of another step with it.
// Method: a reservation, two that settle it, and one of them left out.
func TestWithout(t *testing.T) {
	s := sequence{place: "s0/", steps: []step{
		{verb: openBucket, lease: -1}, {verb: reserve, lease: -1}, {verb: release, lease: 1}, {verb: commit, lease: 1},
	}}
	if got := s.without(0, 1).steps; len(got) != 3 || got[1].lease != 0 || got[2].lease != 0 {
		t.Errorf("without the opening: %+v", got)
	}
	if got := s.without(1, 2).steps; len(got) != 3 || got[1].lease != -1 || got[1].leaseID != "never-made" {
		t.Errorf("without the reservation: %+v", got)
	}
}
