package dataplane

import (
	"context"
	"errors"
	"net/http"
	"runtime/debug"

	"connectrpc.com/connect"
	"github.com/go-logr/logr"

	"github.com/token-lease/operator/internal/ledger"
)

// interceptor turns what the service refuses into what the protocols carry, and notes
// how each request ended.
type interceptor struct{ log logr.Logger }

var _ connect.Interceptor = interceptor{}

// WrapUnary implements connect.Interceptor.
func (i interceptor) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, request connect.AnyRequest) (connect.AnyResponse, error) {
		response, err := next(ctx, request)
		return response, i.end(ctx, err)
	}
}

// WrapStreamingHandler implements connect.Interceptor.
func (i interceptor) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, connection connect.StreamingHandlerConn) error {
		return i.end(ctx, next(ctx, connection))
	}
}

// WrapStreamingClient implements connect.Interceptor.
func (i interceptor) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

func (i interceptor) end(ctx context.Context, err error) error {
	v := visitOf(ctx)
	if err == nil {
		v.code = labelOK
		return nil
	}
	var protocol *connect.Error
	if errors.As(err, &protocol) { // health and reflection speak the protocols themselves
		v.code = protocol.Code().String()
		return err
	}
	v.code = string(codeOf(err))
	logFailure(i.log, err)
	return answer(err)
}

// recovered answers for a handler that panicked.
func recovered(log logr.Logger) func(context.Context, connect.Spec, http.Header, any) error {
	return func(_ context.Context, spec connect.Spec, _ http.Header, value any) error {
		log.Error(nil, "a handler panicked", "procedure", spec.Procedure, "value", value, "stack", string(debug.Stack()))
		return ledger.Errorf(codeInternal, "The server failed; its log says why.")
	}
}
