package client

import (
	"testing"
	"time"
)

// Goal: what is left out is taken from the defaults, each by itself, and the pauses make
// sense together.
func TestRetryDefaults(t *testing.T) {
	t.Parallel()
	d := DefaultRetry()
	if got := (Retry{}).orDefault(); got != d {
		t.Errorf("nothing given: %+v, want %+v", got, d)
	}
	got := Retry{Attempts: 3, FirstPause: time.Minute}.orDefault()
	want := Retry{Attempts: 3, Elapsed: d.Elapsed, Attempt: d.Attempt, FirstPause: time.Minute, LastPause: time.Minute}
	if got != want {
		t.Errorf("two given: %+v, want %+v", got, want)
	}
	// The pauses alone, cut to half by chance, must outlast what the time permits.
	shortest, pause := time.Duration(0), d.FirstPause
	for range d.Attempts - 1 {
		shortest += pause / 2
		pause = min(2*pause, d.LastPause)
	}
	if shortest < d.Elapsed {
		t.Errorf("%d attempts may be over after %s, before %s have passed", d.Attempts, shortest, d.Elapsed)
	}
}
