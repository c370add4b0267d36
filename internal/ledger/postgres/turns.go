package postgres

import (
	"context"
	"sync"

	"github.com/token-lease/operator/internal/ledger"
)

// maxInLine bounds how many callers wait for their turn on one bucket.
const maxInLine = 1024

// turns let one transaction of this process at a time work on a bucket. The others
// wait here, in the order in which they came, instead of in the database, where
// each would keep a connection from the callers of other buckets.
type turns struct {
	mutex sync.Mutex
	lines map[string]*line
}

// line is the callers of one bucket; without callers there is none.
type line struct {
	// turn is full while somebody has the turn.
	turn    chan struct{}
	callers int
}

// tryTake takes the turn if nobody has it.
func (t *turns) tryTake(key string) bool {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	if t.lines[key] != nil {
		return false
	}
	t.join(key).turn <- struct{}{}
	return true
}

// take waits for the turn, in a line of bounded length and no longer than the
// context lasts.
func (t *turns) take(ctx context.Context, key string) error {
	t.mutex.Lock()
	l := t.join(key)
	full := l.callers > maxInLine+1
	t.mutex.Unlock()
	if full {
		t.leave(key)
		return ledger.Errorf(ledger.CodeUnavailable, "Too many callers wait for the bucket. Repeat later.")
	}
	select {
	case l.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		t.leave(key)
		return &failure{certainty: unreachable, err: ctx.Err()}
	}
}

// give passes the turn on.
func (t *turns) give(key string) {
	t.mutex.Lock()
	<-t.lines[key].turn
	t.mutex.Unlock()
	t.leave(key)
}

// join adds a caller to a line.
func (t *turns) join(key string) *line {
	l := t.lines[key]
	if l == nil {
		if t.lines == nil {
			t.lines = map[string]*line{}
		}
		l = &line{turn: make(chan struct{}, 1)}
		t.lines[key] = l
	}
	l.callers++
	return l
}

func (t *turns) leave(key string) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	if l := t.lines[key]; l.callers > 1 {
		l.callers--
	} else {
		delete(t.lines, key)
	}
}
