package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

// The verbs, as the package names them.
const (
	openBucket  = "openBucket"
	setLimit    = "setLimit"
	reserve     = "reserve"
	commit      = "commit"
	release     = "release"
	reapExpired = "reapExpired"
	inspect     = "inspect"
)

// sequence is some operations on an empty ledger. Its buckets' keys have its place in
// them, so that no other sequence meets them.
type sequence struct {
	place    string
	settings ledger.ReservationSettings
	steps    []step
}

// Places: a sequence is generated in one, and each time that it is run again it has
// another. All are of one length, so a key at the longest that is allowed stays that.
const (
	generatedPlace = "s%07d/"
	againPlace     = "r%07d/"
	mostPlaces     = 10_000_000
)

// at is the sequence in another place, with keys as long as they were.
func (s sequence) at(place string) sequence {
	again := sequence{place: place, settings: s.settings, steps: slices.Clone(s.steps)}
	for i := range again.steps {
		again.steps[i].bucket = strings.ReplaceAll(again.steps[i].bucket, s.place, place)
	}
	return again
}

// step is one operation at an instant.
type step struct {
	clock       time.Time
	verb        string
	bucket      string
	limit       int64
	expected    int64
	requestKey  string
	fingerprint string
	tokens      int64
	ttl         time.Duration
	// lease is the step that made the lease, or -1: then leaseID is meant.
	lease   int
	leaseID string
	actual  int64
}

// request is the step for our ledger; ids are the leases that earlier steps were
// answered with.
func (s step) request(settings ledger.ReservationSettings, ids map[int]string) ledger.Request {
	leaseID := s.leaseID
	if s.lease >= 0 {
		leaseID = "never-made"
		if id, made := ids[s.lease]; made {
			leaseID = id
		}
	}
	switch s.verb {
	case openBucket:
		return ledger.OpenBucket{Key: s.bucket, Limit: s.limit, Settings: settings}
	case setLimit:
		return ledger.SetLimit{Key: s.bucket, ExpectedLimit: s.expected, Limit: s.limit}
	case reserve:
		return ledger.Reserve{Key: s.bucket, RequestKey: s.requestKey, Fingerprint: s.fingerprint, Tokens: s.tokens, TTL: s.ttl}
	case commit:
		return ledger.Commit{Key: s.bucket, LeaseID: leaseID, ActualTokens: s.actual}
	case release:
		return ledger.Release{Key: s.bucket, LeaseID: leaseID}
	case reapExpired:
		return ledger.ReapExpired{Key: s.bucket}
	default:
		return ledger.Inspect{Key: s.bucket}
	}
}

// input is the step for the package.
func (s step) input() map[string]any {
	input := map[string]any{"bucket": s.bucket}
	switch s.verb {
	case openBucket:
		input["limit"] = s.limit
	case setLimit:
		input["expectedLimit"], input["limit"] = s.expected, s.limit
	case reserve:
		input["requestKey"], input["fingerprint"], input["tokens"] = s.requestKey, s.fingerprint, s.tokens
		if s.ttl != 0 {
			input["ttlMs"] = float64(s.ttl) / float64(time.Millisecond)
		}
	case commit:
		input["actualTokens"] = s.actual
		fallthrough
	case release:
		if s.lease < 0 {
			input["leaseId"] = s.leaseID
		}
	}
	return input
}

// line is the sequence for the driver, with the clocks that the package is given.
func (s sequence) line(clocks []time.Time) ([]byte, error) {
	steps := make([]map[string]any, len(s.steps))
	for i, step := range s.steps {
		steps[i] = map[string]any{"clock": clocks[i].UnixMilli(), "verb": step.verb, "input": step.input()}
		if step.lease >= 0 {
			steps[i]["lease"] = step.lease
		}
	}
	return json.Marshal(map[string]any{
		"options": map[string]any{
			"defaultTtlMs": s.settings.DefaultTTL.Milliseconds(), "maxTtlMs": s.settings.MaxTTL.Milliseconds(),
			"maxLeasesPerBucket": s.settings.MaxRecords,
		},
		"steps": steps,
	})
}

// String prints a sequence so that it can be told to somebody.
func (s sequence) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%+v\n", s.settings)
	for i, step := range s.steps {
		input, err := json.Marshal(step.input())
		if err != nil {
			input = []byte(err.Error())
		}
		fmt.Fprintf(&b, "%3d  %s  %s %s", i, step.clock.Format("15:04:05.000"), step.verb, input)
		if step.lease >= 0 {
			fmt.Fprintf(&b, " of the lease of step %d", step.lease)
		}
		b.WriteByte('\n')
	}
	return b.String()
}

// without leaves steps out; what referred to them refers to no lease.
func (s sequence) without(from, to int) sequence {
	smaller := sequence{place: s.place, settings: s.settings}
	for i, step := range s.steps {
		switch {
		case i >= from && i < to:
			continue
		case step.lease >= to:
			step.lease -= to - from
		case step.lease >= from:
			step.lease, step.leaseID = -1, "never-made"
		}
		smaller.steps = append(smaller.steps, step)
	}
	return smaller
}
