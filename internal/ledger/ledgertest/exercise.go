package ledgertest

import "testing"

// Exercise runs the suite. Each test gets a harness of its own.
func Exercise(t *testing.T, newHarness NewHarness) {
	t.Helper()
}
