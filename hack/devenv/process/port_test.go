package process

import "testing"

// Goal: nobody is given a port that somebody else was given, although nothing listens
// there. Method: more ports than a random choice would give without a repetition.
func TestPortsAreGivenOnce(t *testing.T) {
	const ports = 500
	given := map[int]bool{}
	for range ports {
		port, err := FreePort()
		if err != nil {
			t.Fatal(err)
		}
		if given[port] {
			t.Fatalf("port %d was given twice", port)
		}
		given[port] = true
		// Another process that looks for it does not get it either.
		if claimed, err := claim(port); err != nil || claimed {
			t.Fatalf("port %d could be claimed again: %v", port, err)
		}
	}
}
