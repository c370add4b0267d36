// Package postgres keeps the ledger in PostgreSQL (14 or newer).
//
// It knows no rule of the ledger. The calls of a process enter lines, one for each
// bucket (engine.go). A few committers take what has gathered, from as many lines as
// a transaction takes, each line in its turn, and serve it in one transaction of two
// pipelines, so two round trips whatever the number of requests:
//
//  1. BEGIN, the bucket rows that nobody else has locked, then the clock, read by a
//     statement of its own because the locking one reads it before it waits, with
//     the leases whose expiry has come, then the other rows that the rules need;
//  2. what the rules decided, and COMMIT.
//
// While one transaction is committed the next one gathers; a lone call waits for
// nobody. A bucket whose row was not locked is locked by somebody else, or absent. It
// leaves for a lane, where it has transactions of its own, which wait for the lock
// and conclude absence from a read without one: the audit tells whether the row ever
// existed. So do the buckets of a transaction that was refused twice, and then, if it
// must be, each of their requests. Whatever is in the way holds up only its own
// callers. Reads, the sweeper and the checks of health have connections of their own.
//
// A caller can give up. Until the rules were asked it is certain that nothing was
// done; afterwards the outcome is unknown to it, and what it asked for is safe to
// repeat.
//
// The search for overdue leases goes on from where the bucket's last one ended
// (expired_through), over an index of expiries that lists settled leases, too. So
// each lease is passed once, and no index has to cover a lease's state: settling one
// is an update on its page alone. A lease's own ID holds the hash of its request, so
// the primary key finds it by both.
//
// Leases that expired in a pile are settled by a bounded number at a time, the
// oldest first, each time in a transaction of its own that performs what else is
// due; the requests are served once the rest fits.
//
// A row that another hand inserts is put behind what the audit tells of the bucket
// by triggers, which know the ledger by the setting tokenlease.writer of its
// transactions.
//
// Every write checks how many rows it found, and the write of a bucket also that
// nothing has become due since the clock was read. What does not hold raises
// TL001 before COMMIT is reached, and the transaction is run again. So a process
// that was stopped in the middle cannot act late.
//
// No answer leaves before COMMIT is confirmed. When the confirmation is lost the
// requests, which are all repeatable, are run again on another connection, and
// only if that fails too is the outcome unknown to the caller. A transaction that
// neither wrote nor locked a row writes to the server's log, because its COMMIT
// would not wait for it otherwise.
//
// All names are schema-qualified and locks live as long as their transaction. Where
// a connection leads straight to the server its session is bounded as a whole and the
// statements of reserving and settling are prepared; where a pooler stands between,
// statements are unnamed and one-shot and each transaction carries its bounds
// (prepare.go). In both, rows are looked up through indexes whatever the server
// knows of the tables.
//
// The SQL of a table stands in the file named after it.
package postgres
