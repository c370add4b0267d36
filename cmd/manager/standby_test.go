package main

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
)

// apiScript answers whether the API server serves our kinds.
type apiScript struct {
	asked   chan struct{}
	answers chan error
}

func (s *apiScript) ask(ctx context.Context) error {
	select {
	case s.asked <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case err := <-s.answers:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Goal: waiting for the API server, standing by and running are told apart, and
// nothing is told any more once the controllers' life is over.
// Method: answer for the API server, and look at what /readyz?verbose says.
func TestControllerStates(t *testing.T) {
	h := newHealth(partLedger, partControllers)
	line := func() string {
		w := httptest.NewRecorder()
		h.ready(w, httptest.NewRequest(http.MethodGet, "/readyz?verbose", nil))
		return strings.Split(w.Body.String(), "\n")[1]
	}
	wait := func(want string) {
		t.Helper()
		deadline := time.Now().Add(time.Minute)
		for line() != want {
			if time.Now().After(deadline) {
				t.Fatalf("the line is %q, want %q", line(), want)
			}
			time.Sleep(time.Millisecond) // the pace of looking; the bound stands above
		}
	}
	script := &apiScript{asked: make(chan struct{}), answers: make(chan error)}
	elected := make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		watchControllers(ctx, elected, time.Millisecond, script.ask, h, logr.Discard())
	}()
	answer := func(err error) {
		<-script.asked
		script.answers <- err
	}

	if got := line(); got != "[-] controllers: not started yet" {
		t.Errorf("before anything is known: %q", got)
	}
	answer(errors.New("connection\nrefused"))
	wait("[-] controllers: waiting for the API server: connection refused")
	answer(nil)
	wait("[+] controllers standing by")
	close(elected)
	answer(nil)
	wait("[+] controllers ok")
	answer(errors.New("gone"))
	wait("[-] controllers: waiting for the API server: gone")
	answer(nil)
	wait("[+] controllers ok")

	<-script.asked // and is not answered any more
	cancel()
	<-ended
	if got := line(); got != "[+] controllers ok" {
		t.Errorf("the end of the controllers was told by who only watches them: %q", got)
	}
}
