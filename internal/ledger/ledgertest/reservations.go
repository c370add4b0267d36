package ledgertest

import (
	"slices"
	"strings"
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

var reservationStories = []story{
	{"life of a lease", lifeOfALease},
	{"bucket not found", bucketNotFound},
	{"open bucket", openBucket},
	{"set limit", setLimit},
	{"set limit repeats its outcome", setLimitRepeats},
	{"budget exceeded", budgetExceeded},
	{"idempotent reserve", idempotentReserve},
	{"replay without TTL after the default changed", replayAfterDefaultChanged},
	{"replay above a lowered maximum TTL", replayAboveLoweredMaximum},
	{"record limit", recordLimit},
	{"precedence of refusals", precedence},
	{"unknown lease IDs", unknownLeaseIDs},
	{"commit", commitFigures},
	{"commit above the reservation", commitAboveReservation},
	{"refused commit stays visible", refusedCommitStaysVisible},
	{"settling a settled lease", settlingTwice},
	{"expiry is half-open", expiryIsHalfOpen},
	{"many overdue leases at once", manyOverdue},
	{"refusal writes nothing unless something expired", refusalWritesNothing},
	{"refused attempts burn no keys", refusedAttemptsBurnNoKeys},
}

// Goal: the whole way of one lease, with every figure that callers see.
// Method: reserve, commit, and look at the answers and at what is stored.
func lifeOfALease(w *world) {
	w.open(1000)
	opened := w.stored(key)
	if opened.Limit != 1000 || opened.BaseLimit != 1000 || opened.AvailableTokens != 1000 || opened.Revision != 1 ||
		opened.Owner != nil || opened.DeclaredLimit != nil || !opened.CreatedAt.Equal(w.now()) || !opened.UpdatedAt.Equal(w.now()) {
		w.Errorf("a new bucket reads %+v", opened)
	}
	if opened.Settings != ledger.DefaultSettings() {
		w.Errorf("a new bucket has the settings %+v", opened.Settings)
	}
	w.Clock().Advance(time.Second)
	reserved := w.must(ledger.Reserve{Key: key, RequestKey: "r", Fingerprint: "f", Tokens: 400, TTL: time.Minute})
	l := reserved.Lease
	if l.ID != w.leaseID(key, "r") || l.BucketKey != key || l.State != ledger.LeaseReserved || l.ReservedTokens != 400 ||
		l.ActualTokens != nil || l.SettledAt != nil || l.TTL != time.Minute ||
		!l.CreatedAt.Equal(w.now()) || !l.ExpiresAt.Equal(w.now().Add(time.Minute)) {
		w.Errorf("the new lease reads %+v", l)
	}
	if s := reserved.Snapshot; s.ReservedTokens != 400 || s.AvailableTokens != 600 || s.Revision != 2 || s.LeaseRecords != 1 {
		w.Errorf("after reserving the bucket reads %+v", s)
	}
	w.Clock().Advance(time.Second)
	committed := w.must(ledger.Commit{Key: key, LeaseID: l.ID, ActualTokens: 250})
	if l := committed.Lease; l.State != ledger.LeaseCommitted || l.ActualTokens == nil || *l.ActualTokens != 250 ||
		l.ReservedTokens != 400 || l.SettledAt == nil || !l.SettledAt.Equal(w.now()) {
		w.Errorf("the committed lease reads %+v", l)
	}
	s := committed.Snapshot
	if s.UsedTokens != 250 || s.ReservedTokens != 0 || s.AvailableTokens != 750 || s.Revision != 3 || !s.UpdatedAt.Equal(w.now()) {
		w.Errorf("after committing the bucket reads %+v", s)
	}
	stored := w.lease(l.ID)
	if stored.State != ledger.LeaseCommitted || *stored.ActualTokens != 250 || !stored.SettledAt.Equal(w.now()) {
		w.Errorf("the stored lease reads %+v", stored)
	}
}

// Goal: each verb that needs a bucket says so, with the key.
// Method: call all of them on an empty ledger; a touch is no error.
func bucketNotFound(w *world) {
	details := map[string]any{"bucket": key}
	for _, request := range []ledger.Request{
		ledger.SetLimit{Key: key, ExpectedLimit: 1, Limit: 2},
		w.reservation(1),
		ledger.Commit{Key: key, LeaseID: "lease-1"},
		ledger.Release{Key: key, LeaseID: "lease-1"},
		ledger.ReapExpired{Key: key},
		ledger.Inspect{Key: key},
	} {
		w.refuse(request, ledger.CodeBucketNotFound, details)
	}
	if result := w.must(ledger.Touch{Key: key}); result.Snapshot != nil {
		w.Errorf("touching an absent bucket shows %+v", result.Snapshot)
	}
	if w.raw(key) != nil || len(w.audit()) != 0 {
		w.Errorf("refusals have made a bucket")
	}
}

// Goal: opening is idempotent for one limit and refused for another.
func openBucket(w *world) {
	settings := ledger.ReservationSettings{DefaultTTL: time.Second, MaxTTL: time.Minute, MaxRecords: 7, Settlement: ledger.SettlementStrict}
	w.openWith(100, settings)
	again := w.must(ledger.OpenBucket{Key: key, Limit: 100})
	if again.Snapshot.Revision != 1 || again.Snapshot.Settings != settings {
		w.Errorf("opening again changed the bucket to %+v", again.Snapshot)
	}
	w.refuse(ledger.OpenBucket{Key: key, Limit: 101}, ledger.CodeBucketLimitConflict,
		map[string]any{"expectedLimit": int64(101), "actualLimit": int64(100)})
	w.must(ledger.OpenBucket{Key: "zero", Limit: 0})
	w.refuse(ledger.Reserve{Key: "zero", RequestKey: "r", Fingerprint: "f", Tokens: 1}, ledger.CodeBudgetExceeded,
		map[string]any{"requestedTokens": int64(1), "availableTokens": int64(0)})
	w.wantEvents(ledger.AuditBucketOpened, "", 1)
}

// Goal: SetLimit compares and sets, never below what is allocated.
func setLimit(w *world) {
	w.open(100)
	w.use(30)
	w.reserve(20)
	revision := w.stored(key).Revision
	w.refuse(ledger.SetLimit{Key: key, ExpectedLimit: 99, Limit: 10}, ledger.CodeLimitChanged,
		map[string]any{"expectedLimit": int64(99), "actualLimit": int64(100)})
	w.refuse(ledger.SetLimit{Key: key, ExpectedLimit: 100, Limit: 49}, ledger.CodeLimitBelowAllocated,
		map[string]any{"limit": int64(49), "allocated": int64(50)})
	if got := w.stored(key).Revision; got != revision {
		w.Errorf("refusals moved the revision from %d to %d", revision, got)
	}
	w.setLimit(100, 50)
	if s := w.stored(key); s.Limit != 50 || s.AvailableTokens != 0 || s.OverLimitTokens != 0 {
		w.Errorf("after lowering to what is allocated the bucket reads %+v", s)
	}
	w.refuse(w.reservation(1), ledger.CodeBudgetExceeded, map[string]any{"availableTokens": int64(0)})
	w.setLimit(50, 60)
	w.reserve(10)
	w.wantEvents(ledger.AuditLimitSet, "", 4) // two of them refused
	for _, row := range w.audit() {
		if row.Event == ledger.AuditLimitSet && row.Outcome == ledger.OutcomeApplied && (row.Actor != "finops" || row.OperationID == "" || row.RequestedLimit == nil) {
			w.Errorf("the audit of a set limit reads %+v", row)
		}
	}
}

// Goal: one operation ID has one effect and one outcome.
// Method: repeat a success after the limit has moved on, a refusal after it would
// succeed, and the ID with other inputs.
func setLimitRepeats(w *world) {
	w.open(100)
	first := ledger.SetLimit{Key: key, ExpectedLimit: 100, Limit: 200, OperationID: "op-1", Actor: "finops"}
	w.must(first)
	w.setLimit(200, 150)
	w.must(first)
	w.wantLimit(150)
	w.refuse(ledger.SetLimit{Key: key, ExpectedLimit: 100, Limit: 201, OperationID: "op-1"}, ledger.CodeOperationConflict, nil)

	refused := ledger.SetLimit{Key: key, ExpectedLimit: 999, Limit: 300, OperationID: "op-2"}
	details := map[string]any{"expectedLimit": int64(999), "actualLimit": int64(150)}
	w.refuse(refused, ledger.CodeLimitChanged, details)
	w.setLimit(150, 999)
	w.refuse(refused, ledger.CodeLimitChanged, details)
	w.wantLimit(999)
	w.wantEvents(ledger.AuditLimitSet, "", 4)
}

// Goal: what does not fit is refused with the figures, and the last token fits.
func budgetExceeded(w *world) {
	w.open(100)
	w.use(40)
	w.reserve(35)
	w.refuse(w.reservation(26), ledger.CodeBudgetExceeded,
		map[string]any{"requestedTokens": int64(26), "availableTokens": int64(25)})
	w.reserve(25)
	w.refuse(w.reservation(1), ledger.CodeBudgetExceeded,
		map[string]any{"requestedTokens": int64(1), "availableTokens": int64(0)})
	w.wantCounters(40, 60)
}

// Goal: a repeated request gets its lease back, a different one under the same
// key is refused.
// Method: repeat in each state of the lease, then change each input.
func idempotentReserve(w *world) {
	w.open(100)
	request := ledger.Reserve{Key: key, RequestKey: "k", Fingerprint: "f", Tokens: 10, TTL: time.Minute}
	lease := w.must(request).Lease
	revision := w.stored(key).Revision
	replay := func(state ledger.LeaseState) {
		w.Helper()
		if again := w.must(request).Lease; again.ID != lease.ID || again.State != state {
			w.Errorf("the replay answers lease %s in state %s, want %s in %s", again.ID, again.State, lease.ID, state)
		}
	}
	replay(ledger.LeaseReserved)
	for name, changed := range map[string]ledger.Reserve{
		"tokens":      {Key: key, RequestKey: "k", Fingerprint: "f", Tokens: 20, TTL: time.Minute},
		"ttl":         {Key: key, RequestKey: "k", Fingerprint: "f", Tokens: 10, TTL: time.Second},
		"fingerprint": {Key: key, RequestKey: "k", Fingerprint: "g", Tokens: 10, TTL: time.Minute},
		"too many":    {Key: key, RequestKey: "k", Fingerprint: "f", Tokens: 1000, TTL: time.Minute},
	} {
		if err := w.refuse(changed, ledger.CodeIdempotencyConflict, nil); err.Retryable() {
			w.Errorf("a conflict over %s invites to a retry", name)
		}
	}
	if got := w.stored(key).Revision; got != revision {
		w.Errorf("replays moved the revision from %d to %d", revision, got)
	}
	w.commit(lease, 5)
	replay(ledger.LeaseCommitted)
	w.Clock().Advance(time.Hour)
	replay(ledger.LeaseCommitted)

	request = ledger.Reserve{Key: key, RequestKey: "k2", Fingerprint: "f", Tokens: 10, TTL: time.Minute}
	lease = w.must(request).Lease
	w.must(ledger.Release{Key: key, LeaseID: lease.ID})
	replay(ledger.LeaseReleased)

	request.RequestKey = "k3"
	lease = w.must(request).Lease
	w.Clock().Advance(time.Minute)
	replay(ledger.LeaseExpired)
	w.wantCounters(5, 0)

	w.must(ledger.OpenBucket{Key: "other", Limit: 10})
	w.must(ledger.Reserve{Key: "other", RequestKey: "k", Fingerprint: "another", Tokens: 1})
}

// Goal: a changed default breaks no retry.
func replayAfterDefaultChanged(w *world) {
	w.declare(100)
	request := ledger.Reserve{Key: key, RequestKey: "k", Fingerprint: "f", Tokens: 10}
	lease := w.must(request).Lease
	if lease.TTL != ledger.DefaultTTL {
		w.Errorf("a reservation without TTL lives %v", lease.TTL)
	}
	w.declare(100, func(r *ledger.ApplyDeclared) { r.Declaration.Settings.DefaultTTL = 5 * time.Second })
	if again := w.must(request).Lease; again.ID != lease.ID {
		w.Errorf("the replay made lease %s", again.ID)
	}
	request.TTL = ledger.DefaultTTL
	if again := w.must(request).Lease; again.ID != lease.ID {
		w.Errorf("the replay that names the old default made lease %s", again.ID)
	}
	request.TTL = 5 * time.Second
	w.refuse(request, ledger.CodeIdempotencyConflict, nil)
	if fresh := w.reserve(1); fresh.TTL != 5*time.Second {
		w.Errorf("a new reservation lives %v", fresh.TTL)
	}
}

// Goal: a lowered maximum refuses new leases and no replay.
func replayAboveLoweredMaximum(w *world) {
	w.declare(100)
	request := ledger.Reserve{Key: key, RequestKey: "k", Fingerprint: "f", Tokens: 10, TTL: 30 * time.Minute}
	lease := w.must(request).Lease
	w.declare(100, func(r *ledger.ApplyDeclared) { r.Declaration.Settings.MaxTTL = time.Minute })
	if again := w.must(request).Lease; again.ID != lease.ID {
		w.Errorf("the replay made lease %s", again.ID)
	}
	request.RequestKey = "k2"
	w.refuse(request, ledger.CodeInvalidInput, map[string]any{"ttlMs": int64(1_800_000), "maxTtlMs": int64(60_000)})
	w.reserveFor(1, time.Minute)
}

// Goal: the bound on records is a typed refusal that replays pass.
// Method: fill it with settled leases, then reserve, replay, and lift the bound.
func recordLimit(w *world) {
	const records = 20
	bounded := func(n int64) func(*ledger.ApplyDeclared) {
		return func(r *ledger.ApplyDeclared) { r.Declaration.Settings.MaxRecords = n }
	}
	w.declare(1_000_000, bounded(records))
	oldest := ledger.Reserve{Key: key, RequestKey: "oldest", Fingerprint: "f", Tokens: 1}
	first := w.must(oldest).Lease
	w.commit(first, 1)
	for range records - 1 {
		w.use(1)
	}
	w.refuse(w.reservation(1), ledger.CodeBucketRecordLimit, map[string]any{"maxLeasesPerBucket": int64(records)})
	if again := w.must(oldest).Lease; again.ID != first.ID {
		w.Errorf("the oldest replay made lease %s", again.ID)
	}
	w.wantCounters(records, 0)
	w.declare(1_000_000, bounded(records+1))
	w.reserve(1)
	w.refuse(w.reservation(1), ledger.CodeBucketRecordLimit, nil)
	w.declare(1_000_000, bounded(0))
	w.reserve(1)
	if got := w.stored(key).LeaseRecords; got != records+2 {
		w.Errorf("the bucket counts %d leases", got)
	}
}

// Goal: where several refusals apply, the package's order decides.
func precedence(w *world) {
	settings := ledger.ReservationSettings{DefaultTTL: time.Second, MaxTTL: time.Minute, MaxRecords: 1}
	w.openWith(10, settings)
	lease := w.must(ledger.Reserve{Key: key, RequestKey: "k", Fingerprint: "f", Tokens: 10}).Lease
	// A conflict comes before the record limit and the budget.
	w.refuse(ledger.Reserve{Key: key, RequestKey: "k", Fingerprint: "f", Tokens: 11}, ledger.CodeIdempotencyConflict, nil)
	// The TTL comes before the record limit, that before the budget.
	w.refuse(ledger.Reserve{Key: key, RequestKey: "n", Fingerprint: "f", Tokens: 1, TTL: time.Hour}, ledger.CodeInvalidInput, nil)
	w.refuse(ledger.Reserve{Key: key, RequestKey: "n", Fingerprint: "f", Tokens: 1}, ledger.CodeBucketRecordLimit, nil)
	w.must(ledger.OpenBucket{Key: "b", Limit: 10})
	w.must(ledger.Reserve{Key: "b", RequestKey: "k", Fingerprint: "f", Tokens: 10})
	w.refuse(ledger.Reserve{Key: "b", RequestKey: "n", Fingerprint: "f", Tokens: 1}, ledger.CodeBudgetExceeded, nil)
	// The expected limit comes before the allocation.
	w.refuse(ledger.SetLimit{Key: key, ExpectedLimit: 11, Limit: 1}, ledger.CodeLimitChanged, nil)
	// The bucket comes before the lease.
	w.refuse(ledger.Commit{Key: "absent", LeaseID: lease.ID}, ledger.CodeBucketNotFound, nil)
}

// Goal: an ID that the ledger did not make names no lease, however much it looks
// like one. Method: the ID of a lease, changed in each of its parts.
func unknownLeaseIDs(w *world) {
	w.open(100)
	id := w.reserve(5).ID
	w.Clock().Advance(time.Millisecond)
	createdAt, hash, _ := strings.Cut(id, ".")
	_, later, _ := strings.Cut(w.leaseID(key, "another"), ".")
	for _, unknown := range []string{
		createdAt, createdAt + ".", hash[1:], createdAt + "." + hash + "A", "0" + id, "A" + id,
		strings.ToUpper("1a"+createdAt) + "." + hash, createdAt + "." + later, w.leaseID(key, "another"),
		strings.Replace(w.leaseID(key, "k"), later, hash, 1), createdAt + "x." + hash,
		"3a9f4d0e-7f43-4f4b-9d0c-0d3b6b7f7d1e", "lease",
	} {
		w.refuse(ledger.Commit{Key: key, LeaseID: unknown, ActualTokens: 1}, ledger.CodeLeaseNotFound, map[string]any{"leaseId": unknown})
	}
	w.must(ledger.Commit{Key: key, LeaseID: id, ActualTokens: 1})
}

// Goal: a commit may be anything from 0 to what was reserved.
func commitFigures(w *world) {
	w.open(100)
	for _, actual := range []int64{0, 1, 10} {
		w.commit(w.reserve(10), actual)
	}
	w.wantCounters(11, 0)
	zero := w.reserve(5)
	w.commit(zero, 0)
	if stored := w.wantLease(zero.ID, ledger.LeaseCommitted); stored.ActualTokens == nil || *stored.ActualTokens != 0 {
		w.Errorf("a commit of 0 reads %+v", stored)
	}
	w.refuse(ledger.Commit{Key: key, LeaseID: "unknown", ActualTokens: 1}, ledger.CodeLeaseNotFound,
		map[string]any{"leaseId": "unknown"})
	w.refuse(ledger.Release{Key: key, LeaseID: "unknown"}, ledger.CodeLeaseNotFound, map[string]any{"leaseId": "unknown"})
}

// Goal: more than was reserved is booked as far as the bucket has room beside the
// other reservations.
func commitAboveReservation(w *world) {
	w.open(100)
	w.use(20)
	w.reserve(30)
	lease := w.reserve(10)
	revision := w.stored(key).Revision
	w.refuse(ledger.Commit{Key: key, LeaseID: lease.ID, ActualTokens: 51}, ledger.CodeCommitExceedsBudget,
		map[string]any{"actualTokens": int64(51), "maximumCommit": int64(50), "reservedTokens": int64(10)})
	if got := w.stored(key).Revision; got != revision {
		w.Errorf("a refused commit moved the revision from %d to %d", revision, got)
	}
	w.commit(lease, 50)
	w.wantCounters(70, 30)
}

// Goal: tokens that were spent but refused stay visible.
// Method: refuse figures of several sizes before and after expiry.
func refusedCommitStaysVisible(w *world) {
	w.open(1000)
	w.use(900)
	lease := w.reserve(50)
	for _, actual := range []int64{200, 300, 250} {
		w.refuse(ledger.Commit{Key: key, LeaseID: lease.ID, ActualTokens: actual}, ledger.CodeCommitExceedsBudget, nil)
	}
	stored := w.wantLease(lease.ID, ledger.LeaseReserved)
	if stored.RefusedTokens == nil || *stored.RefusedTokens != 300 || stored.RefusedCommits != 3 {
		w.Errorf("after three refused commits the lease reads %+v", stored)
	}
	w.Clock().Advance(ledger.DefaultTTL)
	w.refuse(ledger.Commit{Key: key, LeaseID: lease.ID, ActualTokens: 310}, ledger.CodeLeaseExpired,
		map[string]any{"leaseId": lease.ID})
	w.refuse(ledger.Commit{Key: key, LeaseID: lease.ID, ActualTokens: 40}, ledger.CodeLeaseExpired, nil)
	stored = w.wantLease(lease.ID, ledger.LeaseExpired)
	if *stored.RefusedTokens != 310 || stored.RefusedCommits != 5 {
		w.Errorf("after late commits the lease reads %+v", stored)
	}
	w.wantCounters(900, 0)
}

// Goal: every pair of finishers of one lease has its documented answer.
func settlingTwice(w *world) {
	w.open(100)
	committed, released, expired := w.reserve(10), w.reserve(10), w.reserveFor(10, time.Second)
	w.commit(committed, 7)
	w.must(ledger.Release{Key: key, LeaseID: released.ID})
	w.Clock().Advance(time.Second)
	w.touch()
	revision := w.stored(key).Revision

	if again := w.must(ledger.Commit{Key: key, LeaseID: committed.ID, ActualTokens: 7}).Lease; *again.ActualTokens != 7 {
		w.Errorf("the replayed commit answers %+v", again)
	}
	w.refuse(ledger.Commit{Key: key, LeaseID: committed.ID, ActualTokens: 8}, ledger.CodeCommitConflict,
		map[string]any{"actualTokens": int64(7)})
	w.refuse(ledger.Release{Key: key, LeaseID: committed.ID}, ledger.CodeLeaseCommitted, map[string]any{"leaseId": committed.ID})
	w.refuse(ledger.Commit{Key: key, LeaseID: released.ID, ActualTokens: 1}, ledger.CodeLeaseReleased,
		map[string]any{"leaseId": released.ID})
	if again := w.must(ledger.Release{Key: key, LeaseID: released.ID}).Lease; again.State != ledger.LeaseReleased {
		w.Errorf("the repeated release answers %+v", again)
	}
	if again := w.must(ledger.Release{Key: key, LeaseID: expired.ID}).Lease; again.State != ledger.LeaseExpired {
		w.Errorf("releasing an expired lease answers %+v", again)
	}
	if got := w.stored(key).Revision; got != revision {
		w.Errorf("repetitions moved the revision from %d to %d", revision, got)
	}
	w.wantCounters(7, 0)
}

// Goal: a lease lives in [created, expires): at the instant of expiry it is over.
func expiryIsHalfOpen(w *world) {
	w.open(100)
	last, late := w.reserveFor(60, time.Minute), w.reserveFor(40, time.Minute)
	w.Clock().Set(last.ExpiresAt.Add(-time.Millisecond))
	w.commit(last, 60)
	w.refuse(w.reservation(1), ledger.CodeBudgetExceeded, nil)
	w.Clock().Advance(time.Millisecond)
	w.refuse(ledger.Commit{Key: key, LeaseID: late.ID, ActualTokens: 40}, ledger.CodeLeaseExpired, nil)
	if stored := w.wantLease(late.ID, ledger.LeaseExpired); !stored.SettledAt.Equal(late.ExpiresAt) {
		w.Errorf("the lease expired at %v and was settled at %v", late.ExpiresAt, stored.SettledAt)
	}
	w.reserve(40)
	w.wantCounters(60, 40)
}

// Goal: many overdue leases expire at once, and each is told once.
// Method: 300 leases of which 200 are overdue at several instants; reap twice.
func manyOverdue(w *world) {
	w.open(10_000)
	var overdue []string
	requests := make([]ledger.Request, 0, 300)
	for i := range 300 {
		r := w.reservation(int64(i%7 + 1))
		r.TTL = time.Minute
		if i%3 != 0 {
			r.TTL = time.Duration(i%5+1) * time.Second
		}
		requests = append(requests, r)
	}
	var kept int64
	for _, result := range w.do(requests...) {
		if result.Err != nil {
			w.Fatalf("reserving: %v", result.Err)
		}
		if result.Lease.TTL == time.Minute {
			kept += result.Lease.ReservedTokens
		} else {
			overdue = append(overdue, result.Lease.ID)
		}
	}
	slices.Sort(overdue)
	w.Clock().Advance(5 * time.Second)
	revision := w.stored(key).Revision
	reaped := w.must(ledger.ReapExpired{Key: key})
	if !slices.Equal(reaped.ExpiredLeaseIDs, overdue) {
		w.Errorf("reaping told %d leases, want %d in byte order", len(reaped.ExpiredLeaseIDs), len(overdue))
	}
	if reaped.Snapshot.ReservedTokens != kept || reaped.Snapshot.Revision != revision+1 {
		w.Errorf("after reaping the bucket reads %+v, want %d reserved", reaped.Snapshot, kept)
	}
	if again := w.must(ledger.ReapExpired{Key: key}); len(again.ExpiredLeaseIDs) != 0 || again.Snapshot.Revision != revision+1 {
		w.Errorf("reaping again told %v", again.ExpiredLeaseIDs)
	}
}

// Goal: a refusal changes nothing, but what time made due stands.
func refusalWritesNothing(w *world) {
	w.open(10)
	w.reserveFor(10, time.Second)
	before := w.stored(key)
	w.refuse(w.reservation(1), ledger.CodeBudgetExceeded, nil)
	if after := w.stored(key); after.Revision != before.Revision || !after.UpdatedAt.Equal(before.UpdatedAt) {
		w.Errorf("a refusal changed the bucket from %+v to %+v", before, after)
	}
	w.Clock().Advance(time.Second)
	w.refuse(w.reservation(11), ledger.CodeBudgetExceeded, map[string]any{"availableTokens": int64(10)})
	after := w.stored(key)
	if after.Revision != before.Revision+1 || after.ReservedTokens != 0 || !after.UpdatedAt.Equal(w.now()) {
		w.Errorf("after a refusal that expired a lease the bucket reads %+v", after)
	}
}

// Goal: a refused key is no final answer, and a refusal counts for nothing.
// Method: 50 requests of which 10 fit; the limit is raised for a while, and those that
// were refused ask again with what they asked at first: 10 more fit.
func refusedAttemptsBurnNoKeys(w *world) {
	w.declare(10)
	requests := make([]ledger.Request, 50)
	for i := range requests {
		requests[i] = w.reservation(1)
	}
	ask := func(requests []ledger.Request) (refused []ledger.Request) {
		for _, request := range requests {
			if result := w.do(request)[0]; result.Err != nil {
				w.wantRefusal(result, ledger.CodeBudgetExceeded, map[string]any{"availableTokens": int64(0)})
				refused = append(refused, request)
			}
		}
		return refused
	}
	refused := ask(requests)
	if len(refused) != 40 {
		w.Fatalf("%d of 50 were refused under a limit of 10", len(refused))
	}
	w.wantCounters(0, 10)
	w.store(w.raiseFrom("raise-1", 0, time.Hour, to(20), func(r *ledger.StoreRaise) { r.Grant.NormalLimit = 10 }))
	w.wantRaise("raise-1", ledger.RaiseActive, ledger.ReasonNone)
	if got := len(refused) - len(ask(refused)); got != 10 {
		w.Errorf("%d of those refused were admitted under a limit of 20, want 10", got)
	}
	if got := len(ask(requests)); got != 30 {
		w.Errorf("%d of 50 were refused when all asked again, want 30: the others are replays", got)
	}
	w.wantCounters(0, 20)
}
