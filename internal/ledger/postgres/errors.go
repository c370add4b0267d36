package postgres

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/token-lease/operator/internal/ledger"
)

// Error codes of PostgreSQL, and of this schema (TL), that something is done about.
const (
	codeConditionFailed  = "TL001"
	codeAppendOnly       = "TL002"
	codeEpochBack        = "TL003"
	codeReadOnly         = "25006"
	codeIdleTransaction  = "25P03"
	codeLockNotAvailable = "55P03"
	codeQueryCanceled    = "57014"
	codeDeadlock         = "40P01"
	codeSerialization    = "40001"
	codeCompletionUnknow = "40003"
	codeUniqueViolation  = "23505"
	codeUndefinedTable   = "42P01"
	codeUndefinedSchema  = "3F000"
	codeUndefinedFunc    = "42883"
	codeUndefinedColumn  = "42703"
	codeNoPrivilege      = "42501"

	classInvalidAuthorization = "28"
	classConnection           = "08"
	classIntegrity            = "23"
	classData                 = "22"
	classResources            = "53"
)

// codesOfStatements say that a prepared statement is not what this process takes it
// for: somebody between it and the server has changed the session, or the tables
// have changed. Another connection prepares its own.
var codesOfStatements = []string{"26000", "42P05", "0A000"}

// codesOfMissing say that the schema, or a right to it, is not there.
var codesOfMissing = []string{
	codeUndefinedTable, codeUndefinedSchema, codeUndefinedFunc, codeUndefinedColumn, codeNoPrivilege,
}

// maxCauseLength bounds what of a server's message is passed on, in bytes.
const maxCauseLength = 300

func classOf(code string) string {
	if len(code) < 2 {
		return code
	}
	return code[:2]
}

// certainty is what is known of a failed transaction, and what helps.
type certainty int

const (
	// aborted: nothing was done; deciding again on what is there now may help.
	aborted certainty = iota
	// timedOut: nothing was done within the bounds; somebody holds a lock, or the
	// server is slow. Running it again at once would only wait again.
	timedOut
	// disconnected: nothing was done; another connection may help.
	disconnected
	// unreachable: no connection can be had now.
	unreachable
	// ambiguous: the connection was lost when COMMIT may have been carried out.
	ambiguous
)

// failure is an error of a transaction with what it means.
type failure struct {
	certainty certainty
	err       error
}

func (f *failure) Error() string { return f.err.Error() }
func (f *failure) Unwrap() error { return f.err }

// failed judges an error of a transaction. committing says whether COMMIT may
// have reached the server; caller is the context of whoever waits for it.
func (s *Store) failed(caller context.Context, err error, committing bool) *failure {
	f := &failure{certainty: judge(err, committing), err: err}
	if f.certainty == disconnected || f.certainty == ambiguous {
		// A caller who gives up says nothing about the server, and must not cost the
		// others their connections.
		if caller.Err() == nil && sqlState(err) != codeIdleTransaction {
			// The server went away or was demoted: its other connections are of no
			// use either, and each would cost an attempt.
			for _, pool := range s.pools() {
				pool.Reset()
			}
		}
	}
	return f
}

func judge(err error, committing bool) certainty {
	var notConnected *acquireError
	if errors.As(err, &notConnected) {
		return unreachable
	}
	var reply *pgconn.PgError
	if !errors.As(err, &reply) {
		return judgeWithoutReply(err, committing)
	}
	switch code := reply.Code; {
	case code == codeIdleTransaction:
		// It ended before it had read anything of the second pipeline.
		return disconnected
	case committing && (code == codeCompletionUnknow || classOf(code) == classConnection || isFatal(reply)):
		return ambiguous
	case code == codeReadOnly, classOf(code) == classConnection, isFatal(reply), slices.Contains(codesOfStatements, code):
		return disconnected
	case code == codeLockNotAvailable, code == codeQueryCanceled, classOf(code) == classResources:
		return timedOut
	default:
		return aborted
	}
}

// mayChange reports whether what the server refused depends on what others do at
// the same time.
func mayChange(err error) bool {
	if errors.Is(err, errRowAppeared) {
		return true
	}
	var reply *pgconn.PgError
	if !errors.As(err, &reply) {
		return false
	}
	switch reply.Code {
	case codeConditionFailed, codeDeadlock, codeSerialization:
		return true
	case codeUniqueViolation:
		// A bucket without a row has no lock; an approval belongs to no bucket.
		return slices.Contains([]string{"buckets_pkey", "approvals_pkey", "audit_pkey"}, reply.ConstraintName)
	default:
		return false
	}
}

// judgeWithoutReply judges an error that did not come from the server. What pgx
// says about safety is not asked: a connection that broke after a pipeline was
// sent is reported as "conn closed", and that as safe.
func judgeWithoutReply(err error, committing bool) certainty {
	switch {
	case !isConnectionError(err):
		// A value that cannot be sent or read: the rules or the rows are at fault.
		return aborted
	case committing:
		return ambiguous
	default:
		return disconnected
	}
}

// isConnectionError tells the loss of a connection from values that could not be
// converted, which pgx reports as plain errors.
func isConnectionError(err error) bool {
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) || pgconn.Timeout(err) {
		return true
	}
	var conversion interface{ SafeToRetry() bool }
	return errors.As(err, &conversion) || isNetworkError(err)
}

func isFatal(reply *pgconn.PgError) bool {
	severity := reply.SeverityUnlocalized
	if severity == "" {
		severity = reply.Severity
	}
	return severity == "FATAL" || severity == "PANIC"
}

func sqlState(err error) string {
	var reply *pgconn.PgError
	if errors.As(err, &reply) {
		return reply.Code
	}
	return ""
}

// domainError is the one place where what PostgreSQL or its driver says becomes
// an error of the ledger. Messages are cut, and hold neither credentials nor
// values of rows: a server's DETAIL is not passed on.
func domainError(err error) *ledger.Error {
	var f *failure
	if errors.As(err, &f) && f.certainty == ambiguous {
		return ledger.Errorf(ledger.CodeOutcomeUnknown,
			"The connection to the ledger was lost around COMMIT. Repeat the same request: that is safe and tells.").WithCause(err)
	}
	var domain *ledger.Error
	if errors.As(err, &domain) {
		return domain
	}
	var reply *pgconn.PgError
	if errors.As(err, &reply) {
		return domainErrorOf(reply).WithCause(err)
	}
	var broken *rulesError
	if errors.As(err, &broken) {
		return ledger.Errorf(ledger.CodeStateCorrupt, "The ledger cannot decide on what it has stored of the bucket; its log says where.").WithCause(err)
	}
	if errors.Is(err, errRowAppeared) {
		return ledger.Errorf(ledger.CodeUnavailable, "Others kept changing the same rows. Repeat later.").WithCause(err)
	}
	if f == nil || f.certainty != aborted {
		return ledger.Errorf(ledger.CodeUnavailable, "The ledger could not be reached in time: %s", cut(unreachableReason(err))).WithCause(err)
	}
	return ledger.Errorf(ledger.CodeStoreContractViolation, "The ledger's database answered what cannot be read.").WithCause(err)
}

func domainErrorOf(reply *pgconn.PgError) *ledger.Error {
	switch code := reply.Code; {
	case code == codeConditionFailed, code == codeDeadlock, code == codeSerialization,
		code == codeUniqueViolation && (reply.ConstraintName == "buckets_pkey" || reply.ConstraintName == "approvals_pkey"):
		return ledger.Errorf(ledger.CodeUnavailable, "Others kept changing the same rows. Repeat later.")
	case classOf(code) == classIntegrity, classOf(code) == classData, code == codeAppendOnly, code == codeEpochBack:
		return ledger.Errorf(ledger.CodeStateCorrupt,
			"The ledger's database refused a row that breaks %s (%s).", cut(named(reply.ConstraintName)), code)
	case code == codeLockNotAvailable:
		return ledger.Errorf(ledger.CodeUnavailable, "Somebody else holds the bucket. Repeat later.")
	case code == codeQueryCanceled:
		return ledger.Errorf(ledger.CodeUnavailable, "The ledger's database was too slow. Repeat later.")
	case code == codeReadOnly:
		return ledger.Errorf(ledger.CodeUnavailable, "The ledger's database is read-only. Repeat later.")
	case code == codeUndefinedTable, code == codeUndefinedSchema, code == codeUndefinedFunc:
		return ledger.Errorf(ledger.CodeUnavailable, "The ledger's database lacks migrations: run manager migrate.")
	case code == codeNoPrivilege:
		return ledger.Errorf(ledger.CodeUnavailable, "The ledger's role lacks a privilege: run manager migrate with the runtime role.")
	case classOf(code) == classInvalidAuthorization:
		return ledger.Errorf(ledger.CodeUnavailable, "The ledger's database refuses the credentials (%s).", code)
	default:
		return ledger.Errorf(ledger.CodeUnavailable, "The ledger's database answered %s: %s", code, cut(reply.Message))
	}
}

func named(constraint string) string {
	if constraint == "" {
		return "its rules"
	}
	return "constraint " + constraint
}

// unreachableReason describes why there is no connection without repeating the
// driver's text, which names hosts, users and databases.
func unreachableReason(err error) string {
	var text *connectionStringError
	switch {
	case errors.As(err, &text):
		return "the connection string cannot be used"
	case errors.Is(err, errRefusedRecently):
		return errRefusedRecently.Error()
	case errors.Is(err, pgconn.ErrStandbyConnection):
		return "only a standby answered, which cannot be written"
	case errors.Is(err, context.Canceled):
		return "the caller gave up"
	case errors.Is(err, context.DeadlineExceeded), pgconn.Timeout(err):
		return "no answer in time"
	default:
		return "no connection"
	}
}

// cut bounds a text without breaking a character.
func cut(message string) string {
	message = strings.ToValidUTF8(message, "?")
	if len(message) <= maxCauseLength {
		return message
	}
	end := maxCauseLength
	for end > 0 && !utf8.RuneStart(message[end]) {
		end--
	}
	return fmt.Sprintf("%s…", message[:end])
}

func isNetworkError(err error) bool {
	var network net.Error
	return errors.As(err, &network) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, net.ErrClosed) || errors.Is(err, pgconn.ErrConnClosed)
}
