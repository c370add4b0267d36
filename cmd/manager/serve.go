package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"
)

// Bounds of the plain HTTP servers.
const (
	readHeaderTimeout = 5 * time.Second
	readTimeout       = 10 * time.Second
	writeTimeout      = 30 * time.Second
	idleTimeout       = 60 * time.Second
	maxHeaderBytes    = 16 << 10
	serverGrace       = 5 * time.Second
)

// server is one HTTP endpoint of the process.
type server struct {
	name     string
	listener net.Listener
	http     *http.Server
}

// listen binds the address at once, so that a wrong one fails the start. The
// address "0" switches the endpoint off; listen then returns nil.
func listen(ctx context.Context, name, address string, handler http.Handler) (*server, error) {
	if address == "0" || address == "" {
		return nil, nil
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("listen for %s on %s: %w", name, address, err)
	}
	return &server{name: name, listener: listener, http: &http.Server{
		Handler: handler, ReadHeaderTimeout: readHeaderTimeout, ReadTimeout: readTimeout,
		WriteTimeout: writeTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeaderBytes,
	}}, nil
}

// serve answers until the context ends, then lets running requests finish.
func (s *server) serve(ctx context.Context) error {
	failed := make(chan error, 1)
	go func() { failed <- s.http.Serve(s.listener) }()
	select {
	case err := <-failed:
		return fmt.Errorf("serve %s: %w", s.name, err)
	case <-ctx.Done():
	}
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), serverGrace)
	defer cancel()
	if err := s.http.Shutdown(grace); err != nil {
		return errors.Join(fmt.Errorf("shut %s down: %w", s.name, err), s.http.Close())
	}
	return nil
}
