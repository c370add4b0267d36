// Package controller joins the API server and the ledger: it tells the ledger what
// TokenBuckets and TemporaryLimitLeases ask for, and shows in their status what
// the ledger holds. It decides nothing about limits; the ledger does.
//
// A pass over an object gathers, decides (a pure function), acts (one call of the
// ledger) and reports. Every pass observes the ledger again: generations only tell
// readers what a status is about, they never end a pass early.
//
//   - tokenbucket_*.go, lease_*.go: the two controllers; _controller.go does the
//     I/O, _decide.go and _status.go are pure.
//   - failure.go: what each error of the ledger means for an object.
//   - stored.go: how objects are read, also those that their Go type cannot hold.
//   - report.go: how finalizers, status and events are written.
//   - mirror.go: notices what changed in the ledger without an object changing.
//   - standing.go: remembers what to end when an object is gone all at once.
//   - orphans.go: ends raises whose object is gone without having said so.
//
// # Decisions where the design left room
//
//   - A lease gets its finalizer only when its intent is about to be stored; one
//     that waits for its bucket can be deleted at once. A lease whose raise has
//     ended is only compared with the ledger's record, which needs no bucket.
//   - A finished lease that the ledger knows nothing of is left alone: a ledger
//     that lost its rows must not raise a limit anew.
//   - While the ledger does not answer, Ready is Unknown, Reconciling is true with
//     LedgerUnavailable, and everything else keeps its last known value.
//   - A bucket whose limit somebody else set is Ready, with LimitInSync false; a
//     lease whose limit was changed under it is Ready, with ReviewRequired.
//   - A raise that failed without having run is Stalled, whatever the reason, one
//     on an ObserveOnly bucket included: nobody should take its Ready for a limit
//     that was raised.
//   - An object whose spec cannot be read is Stalled with Undecodable and changes
//     nothing in the ledger: what it stands for there goes on, a raise ends at its
//     time, and deletion settles it by the record and the owner. A status that
//     cannot be read is simply written anew.
//   - Where a rule of the schema fails on the unreadable field, the API server takes
//     no update of the object at all, not even of its status or its finalizers; an
//     event tells it, once for each generation, and correcting the object ends it.
//   - Every condition of a kind is there once the operator has seen the object;
//     what is not known yet is Unknown.
//   - declaredLimit stays in the status of a bucket whose row has vanished: it is
//     the proof that the row existed.
//   - Leases of a bucket are looked at when the bucket changed in more than its
//     usage, and at their own instants; finished ones only for their own events.
//   - An orphaned raise is revoked after two looks, and only while the API server
//     serves both kinds and holds at least one TokenBucket: an empty cluster that
//     is about to be filled from a backup proves nothing.
package controller
