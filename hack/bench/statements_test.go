package main

import (
	"strings"
	"testing"
)

// Goal: durations are read from a server's log by phase and by the first words of the
// statement, over several lines, and what is no duration is left out.
func TestReadSteps(t *testing.T) {
	log := `2026-12-01 04:10:26.035 UTC [24668] bench LOG:  duration: 0.008 ms  bind stmt_d3: 
	SELECT clock.now,
		number
	FROM a
2026-12-01 04:10:26.035 UTC [24668] bench DETAIL:  parameters: $1 = 'x'
2026-12-01 04:10:26.036 UTC [24668] bench LOG:  duration: 0.100 ms  execute <unnamed>: COMMIT
2026-12-01 04:10:26.036 UTC [24668] bench LOG:  checkpoint starting: time
2026-12-01 04:10:26.037 UTC [24668] bench LOG:  duration: 0.300 ms  execute <unnamed>: COMMIT
2026-12-01 04:10:26.038 UTC [24668] bench LOG:  duration: 1.500 ms  statement: begin
`
	steps, err := readSteps(strings.NewReader(log))
	if err != nil {
		t.Fatal(err)
	}
	if got := steps[step{"execute", "COMMIT"}]; len(got) != 2 || got[0] != 0.1 || got[1] != 0.3 {
		t.Errorf("COMMIT took %v", got)
	}
	if got := steps[step{"bind", "SELECT clock.now, number FROM a"}]; len(got) != 1 || got[0] != 0.008 {
		t.Errorf("the read took %v of %v", got, steps)
	}
	if len(steps) != 3 {
		t.Errorf("%d steps were read: %v", len(steps), steps)
	}
}
