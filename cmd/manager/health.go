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
	parts    map[string]string // part -> what is wrong, "" when nothing is
}

func newHealth(parts ...string) *health {
	h := &health{parts: map[string]string{}}
	for _, part := range parts {
		h.parts[part] = "not started yet"
	}
	return h
}

// set records the state of a part; it reports whether that is news.
func (h *health) set(part, wrong string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	changed := h.parts[part] != wrong
	h.parts[part] = wrong
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
			if wrong := h.parts[part]; wrong != "" {
				fmt.Fprintf(w, "[-] %s: %s\n", part, strings.ReplaceAll(wrong, "\n", " "))
			} else {
				fmt.Fprintf(w, "[+] %s ok\n", part)
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
		wrong := ""
		if err != nil {
			wrong = err.Error()
		}
		if h.set(partLedger, wrong) {
			if err != nil {
				log.Error(err, "the ledger cannot be written", "code", ledger.CodeOf(err))
			} else {
				log.Info("the ledger can be written")
			}
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
