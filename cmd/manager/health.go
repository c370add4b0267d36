package main

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"

	"github.com/token-lease/operator/internal/ledger"
)

// How often, and for how long at most, the ledger is asked whether it can be
// written.
const (
	probeInterval = 2 * time.Second
	probeTimeout  = 5 * time.Second
)

// health knows how the process is. Readiness means that the process can answer; a
// ledger that cannot be written, or a lost API server, is told but does not make
// it unready: callers then get a proper error and not a refused connection.
type health struct {
	mu       sync.Mutex
	stopping bool
	parts    map[string]partState
}

// partState is how a part is, in a word when it is well, and by what is wrong when
// it is not.
type partState struct {
	well bool
	text string
}

// The words for a part that is well.
const (
	stateOK      = "ok"
	stateStandby = "standing by"
)

func newHealth(parts ...string) *health {
	h := &health{parts: map[string]partState{}}
	for _, part := range parts {
		h.parts[part] = partState{text: "not started yet"}
	}
	return h
}

// well records that a part is well, and how; it reports whether that is news.
func (h *health) well(part, word string) bool { return h.set(part, partState{well: true, text: word}) }

// wrong records what is wrong with a part; it reports whether that is news.
func (h *health) wrong(part, what string) bool { return h.set(part, partState{text: what}) }

func (h *health) set(part string, state partState) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	changed := h.parts[part] != state
	h.parts[part] = state
	return changed
}

func (h *health) stop() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.stopping = true
}

// live answers /healthz: the process runs.
func (h *health) live(w http.ResponseWriter, _ *http.Request) {
	fmt.Fprintln(w, "ok")
}

// ready answers /readyz, with the parts when asked for ?verbose.
func (h *health) ready(w http.ResponseWriter, r *http.Request) {
	h.mu.Lock()
	defer h.mu.Unlock()
	status, answer := http.StatusOK, "ok"
	if h.stopping {
		status, answer = http.StatusServiceUnavailable, "shutting down"
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	if _, verbose := r.URL.Query()["verbose"]; verbose {
		for _, part := range []string{partLedger, partControllers} {
			if state := h.parts[part]; state.well {
				fmt.Fprintf(w, "[+] %s %s\n", part, state.text)
			} else {
				fmt.Fprintf(w, "[-] %s: %s\n", part, strings.ReplaceAll(state.text, "\n", " "))
			}
		}
	}
	fmt.Fprintln(w, answer)
}

// The parts that /readyz?verbose lists.
const (
	partLedger      = "ledger"
	partControllers = "controllers"
)

// probed is what probeLedger needs of a store.
type probed interface {
	Writable(ctx context.Context) error
	Check(ctx context.Context) ([]string, error)
}

// probeLedger keeps asking whether the ledger can be written until the context
// ends, and tells metrics, health and the log when that changes.
func probeLedger(ctx context.Context, store probed, h *health, setWritable func(bool), log logr.Logger) {
	warned := false
	ticker := time.NewTicker(probeInterval)
	defer ticker.Stop()
	for {
		err := probeOnce(ctx, store, &warned, log)
		if ctx.Err() != nil {
			return
		}
		setWritable(err == nil)
		if err != nil {
			if h.wrong(partLedger, err.Error()) {
				log.Error(err, "the ledger cannot be written", "code", ledger.CodeOf(err))
			}
		} else if h.well(partLedger, stateOK) {
			log.Info("the ledger can be written")
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// probeOnce also checks, once it can, that the database promises what the ledger
// promises.
func probeOnce(ctx context.Context, store probed, warned *bool, log logr.Logger) error {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	if err := store.Writable(ctx); err != nil {
		return err
	}
	if *warned {
		return nil
	}
	warnings, err := store.Check(ctx)
	if err != nil {
		return err
	}
	*warned = true
	for _, warning := range warnings {
		log.Info("database setting weakens what the ledger promises", "warning", warning)
	}
	return nil
}
