package main

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
)

// Goal: readiness means that the process can answer; what is wrong with its parts
// is told and changes nothing; shutting down does.
func TestReadiness(t *testing.T) {
	h := newHealth(partLedger, partControllers)
	h.well(partLedger, stateOK)
	h.wrong(partControllers, "no API\nserver")
	get := func(target string) (int, string) {
		w := httptest.NewRecorder()
		h.ready(w, httptest.NewRequest(http.MethodGet, target, nil))
		return w.Code, w.Body.String()
	}
	if code, body := get("/readyz"); code != http.StatusOK || body != "ok\n" {
		t.Errorf("got %d %q", code, body)
	}
	code, body := get("/readyz?verbose")
	if want := "[+] ledger ok\n[-] controllers: no API server\nok\n"; code != http.StatusOK || body != want {
		t.Errorf("got %d %q; want %q", code, body, want)
	}
	h.well(partControllers, stateStandby)
	if _, body := get("/readyz?verbose"); body != "[+] ledger ok\n[+] controllers standing by\nok\n" {
		t.Errorf("a standby says %q", body)
	}
	h.stop()
	if code, _ := get("/readyz"); code != http.StatusServiceUnavailable {
		t.Errorf("got %d while shutting down", code)
	}
}

// Goal: parts run side by side, the failure of one ends all of them, and its error
// comes out.
func TestTogether(t *testing.T) {
	broken := errors.New("broken")
	ended := make(chan struct{})
	stopping := false
	err := together(t.Context(), func() { stopping = true },
		func(context.Context) error { return broken },
		func(ctx context.Context) error { <-ctx.Done(); close(ended); return nil },
	)
	if !errors.Is(err, broken) || !stopping {
		t.Errorf("got %v, stopping %v", err, stopping)
	}
	<-ended
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := together(ctx, func() {}, func(ctx context.Context) error { <-ctx.Done(); return nil }); err != nil {
		t.Errorf("a process that is told to end ends with %v", err)
	}
}

// Goal: a step that hangs does not keep the process, one that ends is waited for.
func TestWithin(t *testing.T) {
	hang := make(chan struct{})
	defer close(hang)
	if within(10*time.Millisecond, func() { <-hang }) {
		t.Error("a step that hangs is said to have ended")
	}
	ended := false
	if !within(time.Minute, func() { ended = true }) || !ended {
		t.Error("a step that ends is not waited for")
	}
}

// Goal: a server lets the request that it is answering finish. Method: a handler
// that waits until the shutdown has begun.
func TestServerFinishesRequests(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	entered := make(chan struct{})
	s, err := listen(ctx, "test", "127.0.0.1:0", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		close(entered)
		<-ctx.Done()
		_, _ = io.WriteString(w, "finished")
	}))
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.serve(ctx) }()
	answers := make(chan string, 1)
	go func() {
		response, err := http.Get("http://" + s.listener.Addr().String())
		if err != nil {
			answers <- err.Error()
			return
		}
		defer response.Body.Close()
		body, _ := io.ReadAll(response.Body)
		answers <- string(body)
	}()
	<-entered
	cancel()
	if got := <-answers; got != "finished" {
		t.Errorf("got %q", got)
	}
	if err := <-served; err != nil {
		t.Error(err)
	}
}

// Goal: an address that is taken is an error at start that says which endpoint.
func TestListenOnTakenAddress(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	if _, err := listen(t.Context(), "metrics", taken.Addr().String(), nil); err == nil || !strings.Contains(err.Error(), "listen for metrics") {
		t.Errorf("got %v", err)
	}
	if s, err := listen(t.Context(), "metrics", "0", nil); s != nil || err != nil {
		t.Errorf("the address 0 gives %v, %v", s, err)
	}
}

// Goal: the URL is read anew each time, and an error never repeats it.
func TestDatabaseURL(t *testing.T) {
	file := filepath.Join(t.TempDir(), "url")
	db := database{file: file}
	for _, test := range []struct{ content, want, wrong string }{
		{content: "postgres://one\n", want: "postgres://one"},
		{content: "  postgres://two  ", want: "postgres://two"},
		{content: " \n", wrong: "is empty"},
		{content: strings.Repeat("x", maxDatabaseURLBytes+1), wrong: "too large"},
	} {
		if err := os.WriteFile(file, []byte(test.content), 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := db.connString(t.Context())
		if got != test.want || (test.wrong == "") != (err == nil) || (err != nil && !strings.Contains(err.Error(), test.wrong)) {
			t.Errorf("%.20q: got %q, %v", test.content, got, err)
		}
	}
	t.Setenv(databaseURLEnvironment, "")
	if _, err := (&database{}).connString(t.Context()); err == nil || !strings.Contains(err.Error(), "--database-url-file") {
		t.Errorf("without any source: %v", err)
	}
}

// probeScript answers the probe of the ledger.
type probeScript struct {
	writable chan error
	checks   int
}

func (p *probeScript) Writable(ctx context.Context) error {
	select {
	case err := <-p.writable:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (p *probeScript) Check(context.Context) ([]string, error) {
	p.checks++
	return []string{"synchronous_commit is off"}, nil
}

// Goal: the probe tells metrics and health when the ledger goes and comes, and
// checks the database's settings once it can.
func TestProbe(t *testing.T) {
	script := &probeScript{writable: make(chan error, 3)}
	script.writable <- errors.New("down")
	script.writable <- nil
	script.writable <- nil
	h := newHealth(partLedger, partControllers)
	var seen []bool
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	probeLedger(ctx, script, h, func(w bool) {
		if seen = append(seen, w); len(seen) == 3 {
			cancel()
		}
	}, logr.Discard())
	if len(seen) != 3 || seen[0] || !seen[1] || !seen[2] || script.checks != 1 {
		t.Errorf("got %v, %d checks", seen, script.checks)
	}
}
