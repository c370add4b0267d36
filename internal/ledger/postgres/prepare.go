package postgres

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// hotStatements are what reserving and settling takes. Parsing and planning them
// anew costs several times what running them does.
var hotStatements = []string{
	boundTransaction, lockFreeBuckets, lockBuckets, readClock, overdueLeases, liveRaises, leasesByRequest,
	updateCounters, insertLeases, updateLeases,
}

// prepareHotStatements prepares them on a connection that leads straight to the
// server. Behind a pooler, which may give each transaction another session,
// statements are sent whole each time. The two are told apart by the number of the
// server's process: a pooler shows its clients another one.
func prepareHotStatements(ctx context.Context, conn *pgx.Conn) error {
	var pid uint32
	if err := conn.QueryRow(ctx, `SELECT pg_backend_pid()`).Scan(&pid); err != nil {
		return err
	}
	if pid != conn.PgConn().PID() {
		return nil
	}
	for _, sql := range hotStatements {
		// A statement whose name is its text is used wherever that text is sent.
		if _, err := conn.Prepare(ctx, sql, sql); err != nil {
			if code := sqlState(err); code == codeUndefinedTable || code == codeUndefinedSchema || code == codeUndefinedFunc || code == codeUndefinedColumn || code == codeNoPrivilege {
				// The ledger is not migrated yet: whoever asks is told so.
				return nil
			}
			return err
		}
	}
	return nil
}
