package ledger

import (
	"testing"
	"time"
)

// Goal: a clock that cannot be right decides nothing. Method: a view without a
// row, and instants around the bounds.
func TestClockOutOfRange(t *testing.T) {
	for _, test := range []struct {
		name  string
		clock time.Time
		want  Code
	}{
		{"before 1970", time.Unix(-1, 0), CodeInvalidClock},
		{"1970", time.Unix(0, 0), ""},
		{"the last instant", maxInstant, ""},
		{"after 9999", maxInstant.Add(time.Second), CodeInvalidClock},
		{"the zero time", time.Time{}, CodeInvalidClock},
	} {
		t.Run(test.name, func(t *testing.T) {
			view := &View{Key: "b"}
			results, effects := Run(view, test.clock, "w", []Request{OpenBucket{Key: "b", Limit: 1}})
			var code Code
			if results[0].Err != nil {
				code = results[0].Err.Code
			}
			if code != test.want || effects.Empty() != (test.want != "") {
				t.Errorf("got %q, %+v", code, effects)
			}
		})
	}
}
