// Package postgres keeps the ledger in PostgreSQL (14 or newer).
//
// It knows no rule of the ledger. A call's requests are grouped by bucket and
// served in one transaction of two pipelines, so two round trips whatever the
// number of requests:
//
//  1. BEGIN, the transaction's bounds, the bucket rows locked in byte order of
//     their keys, then the clock, read by a statement of its own because the
//     locking one reads it before it waits, then the rows that the rules need;
//  2. what the rules decided, and COMMIT.
//
// Rows that do not exist take a third: the audit tells whether they ever did.
//
// One transaction of a process at a time works on a bucket. Other callers of the
// bucket wait in line without a connection, and reads, the sweeper and the checks of
// health have connections of their own, so that a bucket that somebody has locked
// holds up its own callers only.
//
// Leases that expired in a pile are settled by a bounded number at a time, the
// oldest first, each time in a transaction of its own that performs what else is
// due; the requests are served once the rest fits. ReapExpired names the leases of
// its own transaction, not those that were settled before it.
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
// All names are schema-qualified, locks live as long as their transaction, and
// statements are unnamed and one-shot, so a transaction pooler can stand between.
//
// The SQL of a table stands in the file named after it.
package postgres
