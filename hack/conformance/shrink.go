package main

import (
	"context"
	"fmt"
)

// shrinker makes a sequence that differs as small as it can be.
type shrinker struct {
	// compare describes a difference, or none. It may have met the buckets of earlier
	// calls, so each call has buckets of its own.
	compare func(context.Context, sequence) (string, error)
	runs    int
}

// shrink leaves out steps for as long as a difference remains. A run that fails for
// another reason proves nothing, and what it left out stays.
func (r *shrinker) shrink(ctx context.Context, s sequence, difference string) (sequence, string) {
	for size := len(s.steps) / 2; size > 0; size /= 2 {
		for from := 0; from+size <= len(s.steps) && len(s.steps) > size; {
			if r.runs >= mostPlaces || ctx.Err() != nil {
				return s, difference
			}
			smaller := s.without(from, from+size).at(fmt.Sprintf(againPlace, r.runs))
			r.runs++
			found, err := r.compare(ctx, smaller)
			if err != nil || found == "" {
				from += size
				continue
			}
			s, difference = smaller, found
		}
	}
	return s, difference
}
