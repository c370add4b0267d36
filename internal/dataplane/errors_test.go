package dataplane

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"strconv"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/token-lease/operator/internal/ledger"
)

// Goal: every code that the ledger can refuse with has a status, chosen on purpose.
// Method: the constants are read from the ledger's source, so that a new one is missed
// here at once.
func TestEveryCodeHasAStatus(t *testing.T) {
	t.Parallel()
	file, err := parser.ParseFile(token.NewFileSet(), "../ledger/errors.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	ast.Inspect(file, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok || len(spec.Values) != 1 {
			return true
		}
		if typed, ok := spec.Type.(*ast.Ident); !ok || typed.Name != "Code" {
			return true
		}
		literal, ok := spec.Values[0].(*ast.BasicLit)
		if !ok {
			return true
		}
		code, err := strconv.Unquote(literal.Value)
		if err != nil {
			t.Fatal(err)
		}
		found++
		if _, known := statusOf[ledger.Code(code)]; !known {
			t.Errorf("%s has no status", code)
		}
		return true
	})
	if found < 20 {
		t.Errorf("only %d codes were found; the source is not what this test takes it for", found)
	}
}

// Goal: what may be repeated says so and says when; what was not refused by the ledger
// tells nothing of its inside.
func TestAnswer(t *testing.T) {
	t.Parallel()
	full := ledger.Errorf(ledger.CodeBudgetExceeded, "full")
	for _, c := range []struct {
		err        error
		status     connect.Code
		retryAfter string
	}{
		{full, connect.CodeResourceExhausted, ""},
		{&waiting{error: full, atLeast: 1500 * time.Millisecond}, connect.CodeResourceExhausted, "2"},
		{&waiting{error: full, atLeast: time.Millisecond}, connect.CodeResourceExhausted, "1"},
		{ledger.Errorf(ledger.CodeUnavailable, "down"), connect.CodeUnavailable, "1"},
		{ledger.Errorf(ledger.CodeOutcomeUnknown, "cut"), connect.CodeUnavailable, "1"},
		{fmt.Errorf("wrapped: %w", ledger.Errorf(ledger.CodeLeaseExpired, "late")), connect.CodeAborted, ""},
		{errors.New("password=secret"), connect.CodeInternal, ""},
		{ledger.Errorf("a_code_of_tomorrow", "new"), connect.CodeInternal, ""},
	} {
		got := answer(c.err)
		if got.Code() != c.status || got.Meta().Get("Retry-After") != c.retryAfter || len(got.Details()) != 1 {
			t.Errorf("%v: %v, Retry-After %q, want %v and %q", c.err, got, got.Meta().Get("Retry-After"), c.status, c.retryAfter)
		}
		if got.Message() == "password=secret" {
			t.Error("the inside is told")
		}
	}
}
