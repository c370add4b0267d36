package main

import (
	"strings"
	"time"

	"golang.org/x/text/unicode/norm"

	"github.com/token-lease/operator/internal/ledger"
)

// exchange is one step with both answers.
type exchange struct {
	index    int
	step     step
	settings ledger.ReservationSettings
	theirs   answer
	ours     ourAnswer
}

// difference is one that is meant. Its subject is that of the table in the package
// documentation of internal/ledger.
type difference struct {
	subject string
	// explains reports whether the two answers differ in this way, and in no other.
	explains func(exchange) bool
}

var differences = []difference{
	{"bucket keys", func(e exchange) bool {
		return !norm.NFC.IsNormalString(e.step.bucket) && e.ours.Code == string(ledger.CodeInvalidInput) && e.ours.Details["field"] == "bucket"
	}},
	// The driver has the package look at the bucket after such a refusal, so that what
	// is due has been done on both sides.
	{"where defaults live", func(e exchange) bool {
		return beyondMaximum(e) && e.ours.Code == string(ledger.CodeBucketNotFound)
	}},
	{"replay without a TTL: before the maximum", func(e exchange) bool {
		return beyondMaximum(e) && e.ours.Code == string(ledger.CodeIdempotencyConflict)
	}},
	{"replay without a TTL: that of the original", func(e exchange) bool {
		return e.step.verb == reserve && e.step.ttl == 0 && e.theirs.Code == string(ledger.CodeIdempotencyConflict) &&
			e.ours.Lease != nil && e.ours.Lease.ID < e.index && e.ours.Lease.ExpiresAt-e.ours.Lease.CreatedAt != e.settings.DefaultTTL.Milliseconds()
	}},
	{"updatedAt", func(e exchange) bool {
		if e.ours.Bucket == nil || e.theirs.Bucket == nil || e.ours.Bucket.UpdatedAt <= e.theirs.Bucket.UpdatedAt ||
			e.ours.Bucket.UpdatedAt != e.ours.evidence.UnixMilli() {
			return false
		}
		same := *e.ours.Bucket
		same.UpdatedAt = e.theirs.Bucket.UpdatedAt
		ours := e.ours.answer
		ours.Bucket = &same
		return ours.String() == listed(e.theirs, e.step).String()
	}},
}

// replaysWithoutTTL reports whether a reservation names no TTL and was answered with a
// lease that has another one than the default: it is the original's.
func replaysWithoutTTL(s step, settings ledger.ReservationSettings, ours ledger.Result) bool {
	return s.verb == reserve && s.ttl == 0 && ours.Lease != nil && ours.Lease.TTL != settings.DefaultTTL
}

func beyondMaximum(e exchange) bool {
	_, maximum := e.theirs.Details["maxTtlMs"]
	return e.step.verb == reserve && e.step.ttl > e.settings.MaxTTL && e.theirs.Code == string(ledger.CodeInvalidInput) && maximum
}

// listed leaves out what our ledger answers only when it is asked: the leases of
// a bucket.
func listed(theirs answer, s step) answer {
	if theirs.Bucket != nil && s.verb != inspect {
		b := *theirs.Bucket
		b.Leases = nil
		theirs.Bucket = &b
	}
	return theirs
}

// clocks are the instants that the package is given. Where evidence that the package
// does not keep has moved a bucket's time here, the package's clock stands there, too:
// no decision on a bucket is made before its time.
func clocks(s sequence, ours []ourAnswer) []time.Time {
	all := make([]time.Time, len(s.steps))
	for i, step := range s.steps {
		all[i] = step.clock
		if before := ours[i].evidenceBefore; before.After(all[i]) {
			all[i] = before
		}
	}
	return all
}

// explanation finds the difference that explains an exchange: its subject, or
// nothing.
func explanation(e exchange) string {
	for _, d := range differences {
		if d.explains(e) {
			return d.subject
		}
	}
	return ""
}

// subjects are those of all differences.
func subjects() string {
	var all []string
	for _, d := range differences {
		all = append(all, d.subject)
	}
	return strings.Join(all, ", ")
}
