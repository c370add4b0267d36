package dataplane

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"github.com/go-logr/logr"

	"github.com/token-lease/operator/internal/ledger"
	"github.com/token-lease/operator/proto/tokenlease/v1alpha1/tokenleasev1alpha1connect"
)

// Labels of requests that never reached a procedure or a rule.
const (
	labelOther   = "other"
	labelInvalid = "invalid_request"
	labelOK      = "ok"
)

// servicePath is where the procedures are that a caller must be known for.
const servicePath = "/" + tokenleasev1alpha1connect.LedgerServiceName + "/"

// Observer is told of what was served.
type Observer interface {
	// ObserveRequest is called once a request is answered. procedure is a method of
	// LedgerService or "other"; code is "ok", one of the ledger's or one of this package's.
	ObserveRequest(procedure, code string, duration time.Duration)
	// ObserveReview is called for each question to the API server: review is token or
	// access, outcome yes, no or error.
	ObserveReview(review, outcome string)
}

// visit is what is noted about a request on its way.
type visit struct {
	code string
	// leave is called when the request ends.
	leave func()
}

type visitKey struct{}

func visitOf(ctx context.Context) *visit {
	if v, ok := ctx.Value(visitKey{}).(*visit); ok {
		return v
	}
	return &visit{}
}

// guard stands before every handler: it bounds how many requests are in work, how long
// one may take and how much it may send, and counts them.
type guard struct {
	next   http.Handler
	limits Limits
	// places are for requests to LedgerService, public ones for what is for everybody.
	places, public chan struct{}

	observer Observer
	writer   *connect.ErrorWriter
}

// ServeHTTP implements http.Handler.
func (g *guard) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	started := time.Now()
	v := &visit{}
	procedure := labelOf(r.URL.Path)
	defer func() {
		if v.leave != nil {
			v.leave()
		}
		if v.code == "" {
			v.code = labelInvalid
		}
		g.observer.ObserveRequest(procedure, v.code, time.Since(started))
	}()
	places := g.public
	if strings.HasPrefix(r.URL.Path, servicePath) {
		places = g.places
	}
	select {
	case places <- struct{}{}:
		defer func() { <-places }()
	default:
		g.refuse(w, r, v, ledger.Errorf(codeOverloaded, "This replica has as many requests in work as it may."))
		return
	}
	if r.ContentLength > g.limits.BodyBytes {
		g.refuse(w, r, v, ledger.Errorf(ledger.CodeInvalidInput, "The body must have at most %d bytes.", g.limits.BodyBytes))
		return
	}
	ctx, cancel := context.WithTimeout(context.WithValue(r.Context(), visitKey{}, v), g.limits.RequestTimeout)
	defer cancel()
	r = r.WithContext(ctx)
	r.Body = http.MaxBytesReader(w, r.Body, g.limits.BodyBytes)
	g.next.ServeHTTP(w, r)
}

func (g *guard) refuse(w http.ResponseWriter, r *http.Request, v *visit, err *ledger.Error) {
	v.code = string(err.Code)
	_ = g.writer.Write(w, r, answer(err)) // whoever does not read it has gone
}

// labelOf is the procedure of a path, one of few.
func labelOf(path string) string {
	name, ours := strings.CutPrefix(path, servicePath)
	switch name {
	case "Reserve", "Commit", "Release", "Extend", "GetBucket", "ListLeases", "ListUsage", "ListAudit":
		if ours {
			return name
		}
	}
	return labelOther
}

// door lets callers in who are known, each with a bounded share of what is in work.
type door struct {
	authenticator *authenticator
	share         int
	// strangers are the places of those whose token is not known.
	strangers chan struct{}
	log       logr.Logger

	mutex sync.Mutex
	// inside counts the requests in work by user name; who has none is not in it.
	inside map[string]int
}

// gate is a connect.RequestGateFunc: it runs before anything of the body is read.
func (d *door) gate(ctx context.Context, _ connect.Spec, _ connect.Peer, header http.Header) (context.Context, error) {
	user, err := d.authenticator.authenticate(ctx, header, d.strangers)
	if err == nil && !d.enter(user.Username) {
		err = ledger.Errorf(codeOverloaded, "This caller has as many requests in work as it may.")
	}
	v := visitOf(ctx)
	if err != nil {
		v.code = string(codeOf(err))
		logFailure(d.log, err)
		return nil, answer(err)
	}
	v.leave = func() { d.exit(user.Username) }
	return context.WithValue(ctx, callerKey{}, user), nil
}

func (d *door) enter(name string) bool {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	if d.inside[name] >= d.share {
		return false
	}
	d.inside[name]++
	return true
}

func (d *door) exit(name string) {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	if d.inside[name]--; d.inside[name] <= 0 {
		delete(d.inside, name)
	}
}

// logFailure writes down what callers are not told: why a thing failed that should not.
// A fault is told in any case, and what may be repeated only to whoever looks for it, since
// all callers meet it while the database or the API server is away.
func logFailure(log logr.Logger, err error) {
	status, known := statusOf[codeOf(err)]
	switch {
	case !known || status == connect.CodeInternal:
		log.Error(nil, "a request failed", "code", codeOf(err), "error", err.Error(), "cause", causeOf(err))
	case status == connect.CodeUnavailable:
		log.V(1).Info("a request failed", "code", codeOf(err), "error", err.Error(), "cause", causeOf(err))
	}
}

// causeOf is the innermost error of a chain.
func causeOf(err error) string {
	for {
		inner := errors.Unwrap(err)
		if inner == nil {
			return err.Error()
		}
		err = inner
	}
}
