package postgres

import (
	"context"
	"slices"

	"github.com/jackc/pgx/v5"
)

// hotStatements are what reserving and settling takes. Parsing and planning them
// anew costs several times what running them does.
var hotStatements = []string{
	lockFreeBuckets, lockBuckets, clockAndOverdueLeases, liveRaises, leasesByRequest,
	lookUpByBitmap, updateCounters, insertLeases, updateLeases,
}

// ownSession marks connections that lead straight to a server's session.
const ownSession = "own session"

func isOwnSession(conn *pgx.Conn) bool { return conn.PgConn().CustomData()[ownSession] != nil }

// prepareConnection looks whether a connection leads straight to the server. Then its
// session belongs to it: it is bounded as a whole, and the statements that are run
// most are prepared. Behind a pooler, which may give each transaction another
// session, both go along with each transaction. The two are told apart by the number
// of the server's process: a pooler shows its clients another one.
func (s *Store) prepareConnection(ctx context.Context, conn *pgx.Conn) error {
	var pid uint32
	if err := conn.QueryRow(ctx, `SELECT pg_backend_pid()`).Scan(&pid); err != nil {
		return err
	}
	if pid != conn.PgConn().PID() {
		return nil
	}
	if _, err := conn.Exec(ctx, setBounds, s.bounds(s.sharedLockTimeout(), false)...); err != nil {
		return err
	}
	conn.PgConn().CustomData()[ownSession] = true
	for _, sql := range hotStatements {
		// A statement whose name is its text is used wherever that text is sent.
		if _, err := conn.Prepare(ctx, sql, sql); err != nil {
			if slices.Contains(codesOfMissing, sqlState(err)) {
				// The ledger is not migrated yet: whoever asks is told so.
				return nil
			}
			return err
		}
	}
	return nil
}
