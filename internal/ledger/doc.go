// Package ledger keeps token budgets. It holds the rules and nothing else: a
// bucket's rules are pure functions of its rows, an instant and a request (Run).
// Stores beneath it make their effects durable: memory for tests and development,
// postgres for everything else. It imports neither Kubernetes nor SQL.
//
// # Where to find what
//
//   - request.go: the verbs and what they answer; validate.go: what input they
//     accept; errors.go: every code that a caller can meet.
//   - rules_leases.go: reserving and settling; rules_limit.go: who may set a
//     limit; rules_raise.go: intents of raises; rules_steps.go and touch.go: what
//     time makes due; period.go: the calendar; retention.go: what is forgotten, and
//     the usage that stays.
//   - store.go: the contract with stores; run.go: where they enter the rules.
//   - The command hack/conformance compares all this with the npm package.
//
// # Differences from token-lease@0.1.0
//
// Verbs, codes, their precedence and idempotency are those of the published npm
// package, with these differences:
//
//	subject                  | the package             | here
//	where defaults live      | configured by process   | default TTL, maximum TTL and maximum records are stored with the
//	                         |                         | bucket, so the maximum TTL is judged after the bucket was found and
//	                         |                         | what is due on it was done
//	replay without a TTL     | takes the default of    | takes the TTL of the original; a replay is recognised before its TTL
//	                         | the moment              | is compared with the maximum, so changed settings break no retry
//	maximum records          | 10,000 unless set       | no bound unless set
//	lease IDs                | made by the process; a  | the creation instant and the request hash, so an ID names one lease
//	                         | second use is refused   | for ever and there is no lease_id_collision
//	snapshots                | list all leases         | counters; leases are read in pages, by expiry
//	OpenBucket, raised       | bucket_limit_conflict   | compares with the limit that the restore will return to
//	below allocated          | cannot happen           | a restore or a lower declared limit may leave used + reserved above the
//	                         |                         | limit: available is 0, nothing is admitted, holders commit up to what
//	                         |                         | they reserved, or release
//	over-usage, late commit  | refused                 | refused under Strict, the default: the highest figure and the count stay
//	                         |                         | on the lease, and the audit tells of the highest ones. Under RecordActual
//	                         |                         | the figure of a reserved or expired lease is booked, also above the
//	                         |                         | limit; a released lease stays released
//	settled leases           | kept for ever, at most  | purged once they were settled, and their expiry has passed, for longer
//	                         | 10,000                  | than the bucket's retention; their usage is added to rollups, which
//	                         |                         | together with the leases add up to the counters. The expiry counts so
//	                         |                         | that no further index is written by settling. Imported leases count
//	                         |                         | from the import. As long as retention a request is recognised, and an
//	                         |                         | operation ID; a Reserve that carries the instant of its first attempt
//	                         |                         | is refused with request_too_old after that (the instant is compared
//	                         |                         | with the ledger's clock)
//	periods                  | -                       | used and reserved begin at 0 at the end of a calendar period; what was
//	                         |                         | reserved before settles in its period, within what that has left
//	extending                | -                       | Extend moves a reserved lease's expiry to max(now + ttl, current); ttl
//	                         |                         | above the bucket's maximum is invalid_input
//	holders                  | -                       | a lease may belong to a holder, for whom alone it can be settled
//	bucket keys              | any trimmed string      | also valid UTF-8 in normalisation form NFC
//	SetLimit                 | ambiguous after a lost  | takes an operation ID: the same ID has the same outcome
//	                         | acknowledgement         |
//	closed bucket            | -                       | bucket_closed for Reserve and Extend; settling works
//	updatedAt                | moves with the revision | also moves when only evidence was written: a SetLimit that changed
//	                         |                         | nothing or was refused, a refused actual figure; and with the timer, or
//	                         |                         | with how far a long search for overdue leases has come
//	repeated after trouble   | -                       | a request that the store repeated after an ambiguous error tells of the
//	                         |                         | bucket as it is at the repetition, as if its caller had repeated it
//	vanished row             | bucket_not_found        | OpenBucket and ApplyDeclared refuse with bucket_row_missing: it is
//	                         |                         | never opened again with used = 0
//
// # Decisions where the design left room
//
//   - Starts of pending raises are in the bucket's timer in every mode, so that a
//     refusal or an observation happens at its instant and not at whichever touch
//     comes next; only while another raise is active they are not.
//   - An approval is spent when the intent is stored under Enforce, before the
//     window has closed; in an observe-only bucket at activation, should the mode
//     have changed by then. A raise that ends as ObserveOnly gives it back.
//   - Every SetLimit that finds its bucket is kept as an operation, a refused one
//     too, with an audit row; neither changes the bucket's revision.
//   - Incarnations of an owner are ordered by creation timestamp. Within one
//     second, the UID that was retired last is the one refused.
//   - A raise is linked to newer objects only, by creation timestamp. A bucket has
//     at most MaxLiveRaises raises that have not ended.
//   - A raise in force whose bucket's row has vanished ends at the next look with
//     LimitChanged, for review: it is without effect.
//   - A bucket whose pointer names no active raise, as after a restore of its row
//     by hand, admits nothing until somebody decides on its limit.
//   - Deleting the owner of a bucket whose row had vanished ends the bucket's
//     history (BucketForgotten), after which the key may be opened anew.
package ledger
