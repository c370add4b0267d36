package scratch

import (
	"os"
	"sync"
	"testing"
)

// Goal: processes that start at the same time do not remove each other's new
// directories. Method: many owners at once; their locks exclude one another as
// those of processes do.
func TestNewDirectoriesStay(t *testing.T) {
	parent := t.TempDir()
	var owners sync.WaitGroup
	for range 8 {
		owners.Go(func() {
			for range 100 {
				dir, err := New(parent, "test")
				if err != nil {
					t.Error(err)
					return
				}
				if _, err := os.Stat(dir.Path); err != nil {
					t.Error(err)
				}
				if err := dir.Remove(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	owners.Wait()
}
