package ledgertest

import (
	"fmt"
	"slices"
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

var retentionStories = []story{
	{"purged after retention", purgedAfterRetention},
	{"kept for ever", keptForEver},
	{"what is not purged", notPurged},
	{"usage adds up", usageAddsUp},
	{"usage in pages", usageInPages},
	{"requests that are too old", requestsTooOld},
	{"retention shortened and lengthened", retentionChanges},
	{"operations are forgotten", operationsForgotten},
	{"purged and asked for again in one call", purgedWithinCall},
	{"purging makes room for records", purgingMakesRoom},
	{"purged in ended periods", purgedInEndedPeriods},
	{"a deleted bucket leaves no usage to the next one", deletedUsage},
}

const retention = 24 * time.Hour

func retaining(d time.Duration) func(*ledger.ApplyDeclared) {
	return func(r *ledger.ApplyDeclared) { r.Declaration.Settings.Retention = d }
}

// purge purges until nothing more is old, and returns how many leases are gone.
func (w *world) purge(limit int) int64 {
	w.Helper()
	var gone int64
	for range 100 {
		purged := w.must(ledger.Purge{Key: key, Limit: limit}).Purged
		if purged.Leases > int64(limit) || purged.Operations > int64(limit) {
			w.Fatalf("a purge of %d removed %+v", limit, purged)
		}
		gone += purged.Leases
		if !purged.More {
			return gone
		}
	}
	w.Fatalf("purging finds no end")
	return gone
}

func (w *world) purgeableBuckets() []string {
	w.Helper()
	// One bucket at a time, so that each page is gone through.
	var all []string
	after := ""
	for range 100 {
		keys, next, err := w.Store().Purgeable(w.ctx, after, 1)
		if err != nil {
			w.Fatalf("Purgeable: %v", err)
		}
		all = append(all, keys...)
		if next == "" {
			return all
		}
		after = next
	}
	w.Fatalf("the list of buckets has no end")
	return nil
}

func (w *world) usage() []ledger.Usage {
	w.Helper()
	lines, err := w.Store().Usage(w.ctx, ledger.UsageQuery{BucketKey: key, Limit: 1000})
	if err != nil {
		w.Fatalf("Usage: %v", err)
	}
	return lines
}

// wantUsed checks the sum of all usage.
func (w *world) wantUsed(want int64) {
	w.Helper()
	var used int64
	for _, x := range w.usage() {
		used += x.UsedTokens
	}
	if used != want {
		w.Errorf("the usage adds up to %d, want %d: %+v", used, want, w.usage())
	}
}

// Goal: a lease is purged to the millisecond once it was settled, and its expiry had
// passed, for as long as the retention is; its usage stays, and the counters with it.
func purgedAfterRetention(w *world) {
	w.declare(1000, retaining(retention))
	leases := []*ledger.Lease{w.reserve(10), w.reserve(20), w.reserve(30)}
	w.commit(leases[0], 7)
	w.must(ledger.Release{Key: key, LeaseID: leases[1].ID})
	w.Clock().Set(leases[0].ExpiresAt)
	w.touch()
	w.Clock().Set(leases[0].ExpiresAt.Add(retention - time.Millisecond))
	if n := w.purge(10); n != 0 || len(w.purgeableBuckets()) != 0 {
		w.Errorf("%d leases were purged a millisecond early", n)
	}
	w.Clock().Advance(time.Millisecond)
	if keys := w.purgeableBuckets(); !slices.Equal(keys, []string{key}) {
		w.Errorf("%q can be purged, want %q", keys, key)
	}
	revision := w.stored(key).Revision
	if n := w.purge(2); n != 3 {
		w.Errorf("%d leases were purged, want 3", n)
	}
	if s := w.stored(key); s.LeaseRecords != 0 || s.UsedTokens != 7 || s.Revision == revision {
		w.Errorf("after purging the bucket reads %+v", s)
	}
	for _, lease := range leases {
		w.refuse(ledger.Commit{Key: key, LeaseID: lease.ID, ActualTokens: 7}, ledger.CodeLeaseNotFound, nil)
	}
	want := ledger.Usage{
		Hour: Epoch, Cluster: cluster, Namespace: namespace, TenantID: tenantID, ScopedKeyID: scopedKeyID,
		UsedTokens: 7, Committed: 1, Released: 1, Expired: 1,
	}
	if lines := w.usage(); len(lines) != 1 || lines[0] != want {
		w.Errorf("the usage is %+v, want %+v", lines, want)
	}
	if len(w.purgeableBuckets()) != 0 {
		w.Errorf("a purged bucket can be purged")
	}
}

// Goal: without a retention nothing is ever purged.
func keptForEver(w *world) {
	w.open(100)
	lease := w.reserve(10)
	w.commit(lease, 5)
	w.Clock().Advance(100 * 365 * 24 * time.Hour)
	if n := w.purge(10); n != 0 || len(w.purgeableBuckets()) != 0 {
		w.Errorf("%d leases were purged", n)
	}
	w.wantLease(lease.ID, ledger.LeaseCommitted)
	w.refuse(ledger.Purge{Key: key, Limit: 0}, ledger.CodeInvalidInput, nil)
	w.refuse(ledger.Purge{Key: key, Limit: ledger.MaxPurge + 1}, ledger.CodeInvalidInput, nil)
	w.refuse(ledger.Purge{Key: "absent", Limit: 1}, ledger.CodeBucketNotFound, nil)
}

// Goal: what can still be settled stays, however old, and counts from its settling.
func notPurged(w *world) {
	w.declare(1000, retaining(retention), func(r *ledger.ApplyDeclared) {
		recording(r)
		retaining(retention)(r)
		r.Declaration.Settings.MaxTTL = 1000 * time.Hour
	})
	held := w.reserveFor(10, 1000*time.Hour)
	late := w.reserve(20)
	forgotten := w.reserve(30)
	w.Clock().Advance(500 * time.Hour)
	// Nobody has touched the bucket: it is only now that they are found expired.
	if n := w.purge(10); n != 0 {
		w.Errorf("%d leases were purged that had just expired", n)
	}
	w.commit(late, 25)
	w.Clock().Advance(retention)
	if n := w.purge(10); n != 2 {
		w.Errorf("%d leases were purged, want those that were settled", n)
	}
	w.refuse(ledger.Release{Key: key, LeaseID: forgotten.ID}, ledger.CodeLeaseNotFound, nil)
	w.commit(held, 10)
	w.wantCounters(35, 0)
	w.wantUsed(35)
}

// Goal: usage is told apart by hour, key, raise and lateness, adds up to what was used,
// and reads the same before and after purging.
func usageAddsUp(w *world) {
	w.declare(normalLimit, retaining(retention), recording, retaining(retention))
	w.use(10)
	w.Clock().Set(Epoch.Add(time.Hour - time.Millisecond))
	w.use(5)
	w.Clock().Advance(time.Millisecond)
	w.use(3)
	late := w.reserveFor(2, time.Second)
	raise := w.store(w.raiseFrom("raise-1", 0, time.Hour))
	w.use(20)
	w.Clock().Advance(time.Minute)
	w.commit(late, 4)
	w.declare(normalLimit, recording, retaining(retention), func(r *ledger.ApplyDeclared) { r.Declaration.ScopedKeyID = "key_v4" })
	w.use(1)
	w.Clock().Advance(2 * time.Hour)
	w.touch()
	w.must(ledger.Release{Key: key, LeaseID: w.reserve(50).ID})
	before := w.usage()
	w.wantUsed(43)
	type of struct {
		hour       int
		key, raise string
		late       bool
	}
	got := map[of]int64{}
	for _, x := range before {
		got[of{int(x.Hour.Sub(Epoch) / time.Hour), x.ScopedKeyID, x.RaiseID, x.Late}] = x.UsedTokens
	}
	for line, tokens := range map[of]int64{
		{0, scopedKeyID, "", false}: 15, {1, scopedKeyID, "", false}: 3, {1, scopedKeyID, "", true}: 4,
		{1, scopedKeyID, raise.ID, false}: 20, {1, "key_v4", raise.ID, false}: 1, {3, "key_v4", "", false}: 0,
	} {
		if used, found := got[line]; !found || used != tokens {
			w.Errorf("the usage of %+v is %d, want %d", line, used, tokens)
		}
	}
	w.Clock().Advance(retention + time.Hour)
	for range 3 {
		w.must(ledger.Purge{Key: key, Limit: 2})
		if after := w.usage(); !slices.Equal(before, after) {
			w.Errorf("purging changed the usage from %+v to %+v", before, after)
		}
	}
	w.purge(10)
	if after := w.usage(); !slices.Equal(before, after) || w.stored(key).LeaseRecords != 0 {
		w.Errorf("purging changed the usage from %+v to %+v", before, after)
	}
	w.wantCounters(43, 0)
}

// Goal: usage is read in pages and within bounds of time, each line once.
func usageInPages(w *world) {
	w.declare(1000, retaining(retention))
	for range 5 {
		w.use(2)
		w.Clock().Advance(time.Hour)
	}
	w.Clock().Advance(retention - 2*time.Hour)
	w.purge(10)
	var pages []ledger.Usage
	query := ledger.UsageQuery{BucketKey: key, Limit: 2}
	for range 10 {
		lines, err := w.Store().Usage(w.ctx, query)
		if err != nil {
			w.Fatalf("Usage: %v", err)
		}
		if len(lines) == 0 {
			break
		}
		pages = append(pages, lines...)
		last := lines[len(lines)-1].Position()
		query.After = &last
	}
	if all := w.usage(); len(all) != 5 || !slices.Equal(pages, all) {
		w.Errorf("in pages the usage is %+v, at once %+v", pages, all)
	}
	lines, err := w.Store().Usage(w.ctx, ledger.UsageQuery{BucketKey: key, From: Epoch.Add(time.Hour), To: Epoch.Add(3 * time.Hour), Limit: 10})
	if err != nil || len(lines) != 2 || !lines[0].Hour.Equal(Epoch.Add(time.Hour)) || !lines[1].Hour.Equal(Epoch.Add(2*time.Hour)) {
		w.Errorf("of two hours the usage is %+v, %v", lines, err)
	}
	if lines, err := w.Store().Usage(w.ctx, ledger.UsageQuery{BucketKey: "absent", Limit: 10}); err != nil || len(lines) != 0 {
		w.Errorf("a bucket that is not there has used %+v, %v", lines, err)
	}
}

// Goal: an old request is replayed or refused as too old, never charged twice.
func requestsTooOld(w *world) {
	w.declare(1000, retaining(retention))
	request := w.reservation(10)
	first := w.now()
	request.FirstAttemptAt = &first
	lease := w.must(request).Lease
	w.commit(lease, 10)
	w.Clock().Set(lease.ExpiresAt.Add(retention))
	if again := w.must(request).Lease; again.ID != lease.ID || again.State != ledger.LeaseCommitted {
		w.Errorf("before purging the replay answers %+v", again)
	}
	w.purge(10)
	refusal := w.refuse(request, ledger.CodeRequestTooOld, map[string]any{"firstAttemptAtMs": first.UnixMilli(), "keptFromMs": w.now().Add(-retention).UnixMilli()})
	if refusal.Retryable() {
		w.Errorf("%v can be repeated", refusal)
	}
	within := w.reservation(10)
	recent := w.now().Add(-retention)
	within.FirstAttemptAt = &recent
	w.must(within)
	// Without the instant it is a new request.
	request.FirstAttemptAt = nil
	if again := w.must(request).Lease; again.ID == lease.ID {
		w.Errorf("the new lease has the ID of the purged one")
	}
	w.wantCounters(10, 20)
}

// Goal: what was purged under a shorter retention stays too old under a longer one.
func retentionChanges(w *world) {
	w.declare(1000, retaining(time.Hour))
	request := w.reservation(10)
	first := w.now()
	request.FirstAttemptAt = &first
	w.commit(w.must(request).Lease, 10)
	w.Clock().Advance(2 * time.Hour)
	if n := w.purge(10); n != 1 {
		w.Fatalf("%d leases were purged", n)
	}
	w.declare(1000, retaining(1000*time.Hour))
	w.refuse(request, ledger.CodeRequestTooOld, nil)
	w.declare(1000)
	w.refuse(request, ledger.CodeRequestTooOld, nil)
	w.wantCounters(10, 0)
}

// Goal: operations are remembered as long as leases; those of raises for good.
func operationsForgotten(w *world) {
	w.declare(normalLimit, retaining(retention))
	raise := w.store(w.raiseFrom("raise-1", 0, time.Minute))
	w.Clock().Advance(time.Minute)
	w.touch()
	w.wantRaise(raise.ID, ledger.RaiseRestored, ledger.ReasonExpired)
	for i := range 3 {
		w.must(ledger.SetLimit{Key: key, ExpectedLimit: normalLimit, Limit: normalLimit, OperationID: fmt.Sprint("op-", i)})
	}
	other := ledger.SetLimit{Key: key, ExpectedLimit: 1, Limit: 2, OperationID: "op-1"}
	w.refuse(other, ledger.CodeOperationConflict, nil)
	w.Clock().Advance(retention)
	if keys := w.purgeableBuckets(); !slices.Equal(keys, []string{key}) {
		w.Errorf("%q can be purged, want %q", keys, key)
	}
	if purged := w.must(ledger.Purge{Key: key, Limit: 2}).Purged; purged.Operations != 2 || !purged.More {
		w.Errorf("purged %+v, want two operations", purged)
	}
	w.purge(10)
	w.refuse(other, ledger.CodeLimitChanged, nil)
	w.Clock().Advance(2 * retention)
	w.purge(10)
	if len(w.purgeableBuckets()) != 0 {
		w.Errorf("the operations of a raise can be purged")
	}
}

// Goal: one call may purge a lease and make another of the same request.
func purgedWithinCall(w *world) {
	w.declare(1000, retaining(retention))
	request := w.reservation(10)
	old := w.must(request).Lease
	w.commit(old, 10)
	w.Clock().Set(old.ExpiresAt.Add(retention))
	results := w.do(request, ledger.Purge{Key: key, Limit: 10}, ledger.Release{Key: key, LeaseID: old.ID}, request)
	if results[0].Lease == nil || results[0].Lease.ID != old.ID {
		w.Errorf("before purging: %+v", results[0])
	}
	w.wantRefusal(results[2], ledger.CodeLeaseNotFound, nil)
	if results[3].Lease == nil || results[3].Lease.ID == old.ID {
		w.Errorf("after purging: %+v", results[3])
	}
	w.wantCounters(10, 10)
	if s := w.stored(key); s.LeaseRecords != 1 {
		w.Errorf("%d leases are kept, want 1", s.LeaseRecords)
	}
}

// Goal: a bucket that is full of records takes reservations again once they are purged.
func purgingMakesRoom(w *world) {
	w.declare(1000, func(r *ledger.ApplyDeclared) { r.Declaration.Settings.MaxRecords = 3 }, func(r *ledger.ApplyDeclared) {
		r.Declaration.Settings.Retention = retention
	})
	for range 3 {
		w.use(1)
	}
	w.refuse(w.reservation(1), ledger.CodeBucketRecordLimit, map[string]any{"maxLeasesPerBucket": int64(3)})
	w.Clock().Advance(retention + ledger.DefaultTTL)
	w.purge(10)
	w.reserve(1)
	w.wantCounters(3, 1)
}

// Goal: what was used in a period that has ended stays in its row and in the usage.
func purgedInEndedPeriods(w *world) {
	w.declare(100, every(ledger.CadenceHour), retaining(retention))
	w.use(40)
	w.Clock().Advance(time.Hour)
	w.use(50)
	w.Clock().Advance(retention)
	w.purge(1)
	w.wantCounters(0, 0)
	lines := w.usage()
	if len(lines) != 2 || !lines[0].PeriodStart.Equal(Epoch) || lines[0].UsedTokens != 40 || !lines[1].PeriodStart.Equal(Epoch.Add(time.Hour)) || lines[1].UsedTokens != 50 {
		w.Errorf("the usage is %+v", lines)
	}
}

// Goal: who opens a deleted bucket's key anew begins with nothing.
func deletedUsage(w *world) {
	declaration := w.declaration(100, retaining(retention))
	w.must(declaration)
	w.use(40)
	w.Clock().Advance(2 * retention)
	w.purge(10)
	w.wantUsed(40)
	w.must(ledger.CloseBucket{Key: key, Owner: declaration.Owner, Deletion: ledger.DeletionDelete})
	w.open(100)
	w.wantCounters(0, 0)
	w.wantUsed(0)
}
