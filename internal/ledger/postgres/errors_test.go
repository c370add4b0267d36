package postgres

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/token-lease/operator/internal/ledger"
)

func reply(code, severity, constraint string) error {
	return fmt.Errorf("batch: %w", &pgconn.PgError{
		Code: code, SeverityUnlocalized: severity, ConstraintName: constraint,
		Message: "message of " + code, Detail: "Key (tenant_id)=(secret) exists.",
	})
}

// Goal: each error means one thing, before and after COMMIT may have been sent.
func TestJudgeAndMap(t *testing.T) {
	network := &net.OpError{Op: "read", Err: errors.New("connection reset by peer")}
	for _, c := range []struct {
		name                string
		err                 error
		before, whenWriting certainty
		code                ledger.Code
	}{
		{"condition failed", reply(codeConditionFailed, "ERROR", ""), aborted, aborted, ledger.CodeUnavailable},
		{"bucket inserted by another", reply(codeUniqueViolation, "ERROR", "buckets_pkey"), aborted, aborted, ledger.CodeUnavailable},
		{"lease there already", reply(codeUniqueViolation, "ERROR", "leases_pkey"), aborted, aborted, ledger.CodeStateCorrupt},
		{"statement of another session", reply("26000", "ERROR", ""), disconnected, disconnected, ledger.CodeUnavailable},
		{"audit out of step", reply(codeUniqueViolation, "ERROR", "audit_pkey"), aborted, aborted, ledger.CodeStateCorrupt},
		{"operation recorded already", reply(codeUniqueViolation, "ERROR", "operations_pkey"), aborted, aborted, ledger.CodeStateCorrupt},
		{"broken invariant", reply("23514", "ERROR", "buckets_used_range"), aborted, aborted, ledger.CodeStateCorrupt},
		{"value out of range", reply("22003", "ERROR", ""), aborted, aborted, ledger.CodeStateCorrupt},
		{"deadlock", reply(codeDeadlock, "ERROR", ""), aborted, aborted, ledger.CodeUnavailable},
		{"lock timeout", reply(codeLockNotAvailable, "ERROR", ""), timedOut, timedOut, ledger.CodeUnavailable},
		{"statement timeout", reply(codeQueryCanceled, "ERROR", ""), timedOut, timedOut, ledger.CodeUnavailable},
		{"disk full", reply("53100", "ERROR", ""), timedOut, timedOut, ledger.CodeUnavailable},
		{"read-only", reply(codeReadOnly, "ERROR", ""), disconnected, disconnected, ledger.CodeUnavailable},
		{"idle in transaction", reply(codeIdleTransaction, "FATAL", ""), disconnected, disconnected, ledger.CodeUnavailable},
		{"shut down", reply("57P01", "FATAL", ""), disconnected, ambiguous, ledger.CodeUnavailable},
		{"crash of another backend", reply("57P02", "FATAL", ""), disconnected, ambiguous, ledger.CodeUnavailable},
		{"pooler lost the server", reply("08P01", "ERROR", ""), disconnected, ambiguous, ledger.CodeUnavailable},
		{"completion unknown", reply(codeCompletionUnknow, "ERROR", ""), aborted, ambiguous, ledger.CodeUnavailable},
		{"no migrations", reply(codeUndefinedTable, "ERROR", ""), aborted, aborted, ledger.CodeUnavailable},
		{"no privilege", reply(codeNoPrivilege, "ERROR", ""), aborted, aborted, ledger.CodeUnavailable},
		{"wrong password", &acquireError{reply("28P01", "FATAL", "")}, unreachable, unreachable, ledger.CodeUnavailable},
		{"nobody listens", &acquireError{network}, unreachable, unreachable, ledger.CodeUnavailable},
		{"connection reset", network, disconnected, ambiguous, ledger.CodeUnavailable},
		{"end of stream", io.ErrUnexpectedEOF, disconnected, ambiguous, ledger.CodeUnavailable},
		{"connection found closed", pgconn.ErrConnClosed, disconnected, ambiguous, ledger.CodeUnavailable},
		{"too late", context.DeadlineExceeded, disconnected, ambiguous, ledger.CodeUnavailable},
		{"unreadable value", errors.New("cannot scan NULL into *int64"), aborted, aborted, ledger.CodeStoreContractViolation},
	} {
		t.Run(c.name, func(t *testing.T) {
			before, whenWriting := judge(c.err, false), judge(c.err, true)
			if before != c.before || whenWriting != c.whenWriting {
				t.Errorf("judged %d before COMMIT and %d after, want %d and %d", before, whenWriting, c.before, c.whenWriting)
			}
			mapped := domainError(&failure{certainty: before, err: c.err})
			if mapped.Code != c.code {
				t.Errorf("mapped to %v, want %s", mapped, c.code)
			}
			if strings.Contains(mapped.Message, "secret") {
				t.Errorf("the message shows a value of a row: %s", mapped.Message)
			}
			if whenWriting == ambiguous {
				if mapped := domainError(&failure{certainty: whenWriting, err: c.err}); mapped.Code != ledger.CodeOutcomeUnknown {
					t.Errorf("mapped to %v, want outcome_unknown", mapped)
				}
			}
		})
	}
}

// Goal: messages of servers are bounded and keep whole characters.
func TestMessagesAreCut(t *testing.T) {
	err := domainErrorOf(&pgconn.PgError{Code: "XX000", Message: strings.Repeat("ü", 1<<20)})
	if len(err.Message) > 2*maxCauseLength || strings.Contains(err.Message, "\uFFFD") {
		t.Errorf("the message has %d bytes: %.40q…", len(err.Message), err.Message)
	}
}

// Goal: a connection string that cannot be read is not repeated in the error.
func TestConnectionStringStaysSecret(t *testing.T) {
	for _, text := range []string{"postgres://user:secret@host:notaport/db", "password=secret host=", "secret"} {
		if _, err := parseConnString(text); err != nil && strings.Contains(err.Error(), "secret") {
			t.Errorf("%q: %v", text, err)
		}
	}
}
