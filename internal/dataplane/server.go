package dataplane

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	stdlog "log"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"connectrpc.com/grpchealth"
	"connectrpc.com/grpcreflect"
	"github.com/go-logr/logr"
	"golang.org/x/net/netutil"

	"github.com/token-lease/operator/internal/ledger"
	"github.com/token-lease/operator/proto/tokenlease/v1alpha1/tokenleasev1alpha1connect"
)

// Limits bound what callers can take of a replica.
type Limits struct {
	// Connections may be open at a time; more wait to be accepted.
	Connections int
	// Streams may be open at a time on one connection.
	Streams int
	// Requests may be in work at a time; more are refused. One caller may have half, those
	// whose token is not known yet a quarter. What is for everybody, which is health and
	// the description of the protocol, may have a sixteenth beside them.
	Requests int
	// RequestTimeout bounds one request from its header to its answer.
	RequestTimeout time.Duration
	// BodyBytes bounds a body, packed and unpacked. The largest request that is in order
	// has 26 KiB: a fingerprint all of whose characters are escaped.
	BodyBytes int64
	// HeaderBytes bounds a header.
	HeaderBytes int
}

// DefaultLimits are those of "manager run" without flags.
func DefaultLimits() Limits {
	return Limits{
		Connections: 4096, Streams: 1024, Requests: 4096, RequestTimeout: MaxRequestTimeout,
		BodyBytes: 32 << 10, HeaderBytes: 16 << 10,
	}
}

const (
	readHeaderTimeout = 5 * time.Second
	idleTimeout       = 2 * time.Minute
	// compressFrom is the size in bytes from which an answer is packed: what says one
	// lease costs more to pack than to send.
	compressFrom = 4 << 10
	// maxLists are read at a time, and maxListsWaiting wait: a page costs the database far
	// more than the look for a bucket, and both share few connections.
	maxLists        = 1
	maxListsWaiting = 63
	// MaxRequestTimeout bounds what a request may be given: an ending process waits a
	// little longer, so that none is cut off.
	MaxRequestTimeout = 10 * time.Second
	// drainBound is how long requests in work may take to end at shutdown.
	drainBound = MaxRequestTimeout + 2*time.Second
)

// Options are what a Server is made of. All are required, but for Now.
type Options struct {
	Ledger *ledger.Ledger
	// Cluster answers the identity of the cluster that owns the buckets.
	Cluster func(ctx context.Context) (string, error)
	// TokenReviews and AccessReviews ask the API server.
	TokenReviews  tokenReviewer
	AccessReviews accessReviewer
	// Audience is what tokens must be made for.
	Audience string
	Limits   Limits
	Observer Observer
	Log      logr.Logger
	// Now is the clock of caches and tokens; time.Now if it is nil.
	Now func() time.Time
}

// Server serves the data plane.
type Server struct {
	options Options
	handler http.Handler
	// draining is set once no new request should come.
	draining atomic.Bool
}

// New returns a server that does not serve yet.
func New(o Options) *Server {
	if o.Now == nil {
		o.Now = time.Now
	}
	s := &Server{options: o}
	d := &door{
		authenticator: newAuthenticator(o.TokenReviews, o.Audience, o.Now, o.Observer),
		share:         max(1, o.Limits.Requests/2), strangers: make(chan struct{}, max(1, o.Limits.Requests/4)),
		log: o.Log, inside: map[string]int{},
	}
	implementation := &service{
		ledger: o.Ledger, finder: newFinder(o.Ledger.Store().BucketOf, o.Cluster, o.Now),
		authorizer: newAuthorizer(o.AccessReviews, o.Now, o.Observer),
		lists:      newLane(maxLists, maxListsWaiting), expiries: newExpiries(o.Ledger.Store(), o.Now),
	}
	all := connect.WithHandlerOptions(
		jsonCodecs(), connect.WithReadMaxBytes(int(o.Limits.BodyBytes)), connect.WithCompressMinBytes(compressFrom),
		connect.WithInterceptors(interceptor{log: o.Log}), connect.WithRecover(recovered(o.Log)),
	)
	mux := http.NewServeMux()
	mux.Handle(tokenleasev1alpha1connect.NewLedgerServiceHandler(implementation, all, connect.WithRequestGate(d.gate)))
	// Health and the description of the protocol are for everybody.
	mux.Handle(grpchealth.NewHandler(healthOf{s}, all))
	reflector := grpcreflect.NewStaticReflector(tokenleasev1alpha1connect.LedgerServiceName, grpchealth.HealthV1ServiceName)
	mux.Handle(grpcreflect.NewHandlerV1(reflector, all))
	mux.Handle(grpcreflect.NewHandlerV1Alpha(reflector, all))
	s.handler = &guard{
		next: mux, limits: o.Limits, places: make(chan struct{}, o.Limits.Requests),
		public:   make(chan struct{}, max(1, o.Limits.Requests/16)),
		observer: o.Observer, writer: connect.NewErrorWriter(),
	}
	return s
}

// Handler is the whole of the service, without the transport.
func (s *Server) Handler() http.Handler { return s.handler }

// Serve answers on the listener until the context ends, then lets requests in work
// finish.
func (s *Server) Serve(ctx context.Context, listener net.Listener, certificate func(*tls.ClientHelloInfo) (*tls.Certificate, error)) error {
	limits := s.options.Limits
	server := &http.Server{
		Handler:           s.handler,
		ReadHeaderTimeout: readHeaderTimeout,
		ReadTimeout:       limits.RequestTimeout,
		// An answer that nobody reads must not be kept for ever.
		WriteTimeout:                 2 * limits.RequestTimeout,
		IdleTimeout:                  idleTimeout,
		MaxHeaderBytes:               limits.HeaderBytes,
		DisableGeneralOptionsHandler: true,
		HTTP2:                        &http.HTTP2Config{MaxConcurrentStreams: limits.Streams},
		TLSConfig: &tls.Config{
			MinVersion: tls.VersionTLS12, GetCertificate: certificate, NextProtos: []string{"h2", "http/1.1"},
		},
		ErrorLog: stdlog.New(logWriter{s.options.Log}, "", 0),
	}
	failed := make(chan error, 1)
	go func() { failed <- server.ServeTLS(netutil.LimitListener(listener, limits.Connections), "", "") }()
	select {
	case err := <-failed:
		return fmt.Errorf("serve the data plane: %w", err)
	case <-ctx.Done():
	}
	s.draining.Store(true)
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainBound)
	defer cancel()
	if err := server.Shutdown(grace); err != nil {
		// Every request is over by then; a connection that somebody keeps open is no
		// reason for the process to fail.
		s.options.Log.Info("connections were still open at the end of the drain", "waited", drainBound.String(), "reason", err.Error())
		return server.Close()
	}
	return nil
}

// logWriter takes what net/http has to say about connections: of use to whoever looks
// for it, and not a thing that strangers may fill the log with.
type logWriter struct{ log logr.Logger }

// Write implements io.Writer.
func (w logWriter) Write(text []byte) (int, error) {
	w.log.V(1).Info("connection", "message", string(text[:min(len(text), 500)]))
	return len(text), nil
}

// healthOf answers gRPC's health service: that this replica takes requests. A ledger
// that cannot be reached is no reason to go away: callers get an answer that says so.
type healthOf struct{ server *Server }

// Check implements grpchealth.Checker.
func (h healthOf) Check(_ context.Context, request *grpchealth.CheckRequest) (*grpchealth.CheckResponse, error) {
	switch request.Service {
	case "", tokenleasev1alpha1connect.LedgerServiceName:
	default:
		return nil, connect.NewError(connect.CodeNotFound, errors.New("no such service"))
	}
	if h.server.draining.Load() {
		return &grpchealth.CheckResponse{Status: grpchealth.StatusNotServing}, nil
	}
	return &grpchealth.CheckResponse{Status: grpchealth.StatusServing}, nil
}
