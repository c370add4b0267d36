package ledgertest

import (
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

var settlementStories = []story{
	{"strict and recording side by side", strictAndRecording},
	{"late commit", lateCommit},
	{"recording stays in range", recordingStaysInRange},
	{"a released lease stays released", releasedStaysReleased},
	{"refused figures in the audit", refusedFiguresInAudit},
	{"policy changes", settlementChanges},
	{"extend", extend},
	{"extending what is settled", extendSettled},
	{"extend within the bucket's bounds", extendBounds},
	{"extend in one call with the rest", extendInOneCall},
	{"holders", holders},
	{"bucket of an object", bucketOfObject},
}

func recording(r *ledger.ApplyDeclared) {
	r.Declaration.Settings.Settlement = ledger.SettlementRecordActual
}

// Goal: what was spent beyond the limit is refused by one policy and booked by the
// other, and visible under both. Method: limit 1000, 900 used, 50 reserved, 300 spent.
func strictAndRecording(w *world) {
	for _, policy := range []ledger.SettlementPolicy{ledger.SettlementStrict, ledger.SettlementRecordActual} {
		w.declare(1000, func(r *ledger.ApplyDeclared) {
			r.Key, r.Owner.Name, r.Owner.UID = string(policy), string(policy), string(policy)
			r.Declaration.Settings.Settlement = policy
		})
		bucket := string(policy)
		reserve := func(tokens int64) string {
			return w.must(ledger.Reserve{Key: bucket, RequestKey: w.next("r"), Fingerprint: "f", Tokens: tokens}).Lease.ID
		}
		w.must(ledger.Commit{Key: bucket, LeaseID: reserve(900), ActualTokens: 900})
		commit := ledger.Commit{Key: bucket, LeaseID: reserve(50), ActualTokens: 300}
		if policy == ledger.SettlementStrict {
			w.refuse(commit, ledger.CodeCommitExceedsBudget,
				map[string]any{"actualTokens": int64(300), "maximumCommit": int64(100), "reservedTokens": int64(50)})
			continue
		}
		for range 2 {
			result := w.must(commit)
			if s := result.Snapshot; s.UsedTokens != 1200 || s.ReservedTokens != 0 || s.AvailableTokens != 0 || s.OverLimitTokens != 200 {
				w.Errorf("with the actual figure booked the bucket reads %+v", s)
			}
			if result.Lease.Late || result.Lease.RefusedCommits != 0 {
				w.Errorf("the lease reads %+v", result.Lease)
			}
		}
		w.refuse(ledger.Reserve{Key: bucket, RequestKey: "more", Fingerprint: "f", Tokens: 1}, ledger.CodeBudgetExceeded, nil)
	}
}

// Goal: tokens that were spent by a task that ran too long are booked once, marked as
// late, and a repetition or another figure is answered as for any commit.
func lateCommit(w *world) {
	w.declare(100, recording)
	lease := w.reserveFor(60, time.Minute)
	w.Clock().Advance(time.Minute)
	w.touch()
	w.wantCounters(0, 0)
	other := w.reserve(100)
	for range 2 {
		late := w.must(ledger.Commit{Key: key, LeaseID: lease.ID, ActualTokens: 80})
		if l := late.Lease; l.State != ledger.LeaseCommitted || !l.Late || *l.ActualTokens != 80 || !l.SettledAt.Equal(w.now()) {
			w.Errorf("the late lease reads %+v", l)
		}
		if s := late.Snapshot; s.UsedTokens != 80 || s.ReservedTokens != 100 || s.OverLimitTokens != 80 {
			w.Errorf("with the late figure the bucket reads %+v", s)
		}
	}
	w.refuse(ledger.Commit{Key: key, LeaseID: lease.ID, ActualTokens: 81}, ledger.CodeCommitConflict, map[string]any{"actualTokens": int64(80)})
	w.refuse(ledger.Release{Key: key, LeaseID: lease.ID}, ledger.CodeLeaseCommitted, nil)
	w.commit(other, 100)
	if stored := w.wantLease(lease.ID, ledger.LeaseCommitted); !stored.Late {
		w.Errorf("the stored lease reads %+v", stored)
	}
	if stored := w.wantLease(other.ID, ledger.LeaseCommitted); stored.Late {
		w.Errorf("a lease in time reads %+v", stored)
	}
	w.wantCounters(180, 0)
}

// Goal: what is booked never leaves the range in which figures are exact.
func recordingStaysInRange(w *world) {
	w.declare(100, recording)
	w.commit(w.reserve(10), ledger.MaxTokens-50)
	w.setLimit(100, ledger.MaxTokens)
	w.reserve(20)
	lease := w.reserve(10)
	w.refuse(ledger.Commit{Key: key, LeaseID: lease.ID, ActualTokens: 31}, ledger.CodeCommitExceedsBudget,
		map[string]any{"actualTokens": int64(31), "maximumCommit": int64(30), "reservedTokens": int64(10)})
	w.commit(lease, 30)
	w.wantCounters(ledger.MaxTokens-20, 20)
}

// Goal: who gave a reservation back cannot book on it, under either policy.
func releasedStaysReleased(w *world) {
	w.declare(100, recording)
	lease := w.reserve(10)
	w.must(ledger.Release{Key: key, LeaseID: lease.ID})
	w.refuse(ledger.Commit{Key: key, LeaseID: lease.ID, ActualTokens: 5}, ledger.CodeLeaseReleased, nil)
	w.wantCounters(0, 0)
}

// Goal: the audit tells of refused figures, each with its lease and why, and of no
// more than the bound for one lease. Method: figures that rise twenty times.
func refusedFiguresInAudit(w *world) {
	const bound = 10
	w.declare(100)
	lease := w.reserve(10)
	w.refuse(ledger.Commit{Key: key, LeaseID: lease.ID, ActualTokens: 150}, ledger.CodeCommitExceedsBudget, nil)
	w.refuse(ledger.Commit{Key: key, LeaseID: lease.ID, ActualTokens: 140}, ledger.CodeCommitExceedsBudget, nil)
	w.Clock().Advance(ledger.DefaultTTL)
	w.refuse(ledger.Commit{Key: key, LeaseID: lease.ID, ActualTokens: 151}, ledger.CodeLeaseExpired, nil)
	var rows []ledger.AuditRow
	for _, row := range w.audit() {
		if row.Event == ledger.AuditCommitRefused {
			rows = append(rows, row)
		}
	}
	if len(rows) != 2 {
		w.Fatalf("%d rows tell of refused figures, want those that were the highest: %+v", len(rows), rows)
	}
	for i, want := range []struct {
		tokens int64
		reason ledger.Reason
	}{{150, ledger.ReasonExceedsBudget}, {151, ledger.ReasonLeaseExpired}} {
		if row := rows[i]; row.Tokens == nil || *row.Tokens != want.tokens || row.Reason != want.reason || row.LeaseID != lease.ID ||
			row.Outcome != ledger.OutcomeRefused || *row.EffectiveLimit != 100 {
			w.Errorf("row %d reads %+v, want %+v", i, row, want)
		}
	}
	for n := range int64(20) {
		w.refuse(ledger.Commit{Key: key, LeaseID: lease.ID, ActualTokens: 200 + n}, ledger.CodeLeaseExpired, nil)
	}
	if n := w.events(ledger.AuditCommitRefused, ""); n > bound {
		w.Errorf("one lease has led to %d audit rows", n)
	}
	if stored := w.wantLease(lease.ID, ledger.LeaseExpired); *stored.RefusedTokens != 219 || stored.RefusedCommits != 23 {
		w.Errorf("the lease reads %+v", stored)
	}
}

// Goal: the policy in force when a lease is settled decides, and a bucket that was
// opened without one is strict.
func settlementChanges(w *world) {
	w.open(100)
	if s := w.stored(key); s.Settings.Settlement != ledger.SettlementStrict {
		w.Errorf("a bucket without a policy has %q", s.Settings.Settlement)
	}
	lease := w.reserve(10)
	w.refuse(ledger.Commit{Key: key, LeaseID: lease.ID, ActualTokens: 101}, ledger.CodeCommitExceedsBudget, nil)
	declaration := w.declaration(100, recording)
	revision := w.must(declaration).Snapshot.Revision
	if again := w.must(declaration).Snapshot; again.Settings.Settlement != ledger.SettlementRecordActual || again.Revision != revision {
		w.Errorf("declared again the bucket reads %+v", again)
	}
	w.commit(lease, 101)
	w.wantCounters(101, 0)
}

// Goal: a holder that needs longer keeps its lease; expiry moves later only.
func extend(w *world) {
	w.open(100)
	lease := w.reserveFor(60, time.Minute)
	w.Clock().Advance(30 * time.Second)
	want := w.now().Add(time.Minute)
	for range 2 {
		extended := w.must(ledger.Extend{Key: key, LeaseID: lease.ID, TTL: time.Minute}).Lease
		if !extended.ExpiresAt.Equal(want) || extended.TTL != time.Minute || extended.State != ledger.LeaseReserved {
			w.Errorf("the extended lease reads %+v, want it to live until %v", extended, want)
		}
	}
	if shorter := w.must(ledger.Extend{Key: key, LeaseID: lease.ID, TTL: time.Second}).Lease; !shorter.ExpiresAt.Equal(want) {
		w.Errorf("extending by less moved the expiry to %v", shorter.ExpiresAt)
	}
	w.Clock().Set(want.Add(-time.Millisecond))
	w.refuse(w.reservation(41), ledger.CodeBudgetExceeded, nil)
	if stored := w.wantLease(lease.ID, ledger.LeaseReserved); !stored.ExpiresAt.Equal(want) {
		w.Errorf("the stored lease expires at %v", stored.ExpiresAt)
	}
	w.Clock().Advance(time.Millisecond)
	w.refuse(ledger.Extend{Key: key, LeaseID: lease.ID, TTL: time.Minute}, ledger.CodeLeaseExpired, map[string]any{"leaseId": lease.ID})
	w.wantLease(lease.ID, ledger.LeaseExpired)
	w.wantCounters(0, 0)
}

// Goal: what is settled, or not there, is not extended.
func extendSettled(w *world) {
	w.open(100)
	committed, released := w.reserve(10), w.reserve(10)
	w.commit(committed, 1)
	w.must(ledger.Release{Key: key, LeaseID: released.ID})
	revision := w.stored(key).Revision
	w.refuse(ledger.Extend{Key: key, LeaseID: committed.ID}, ledger.CodeLeaseCommitted, map[string]any{"leaseId": committed.ID})
	w.refuse(ledger.Extend{Key: key, LeaseID: released.ID}, ledger.CodeLeaseReleased, map[string]any{"leaseId": released.ID})
	w.refuse(ledger.Extend{Key: key, LeaseID: "unknown"}, ledger.CodeLeaseNotFound, map[string]any{"leaseId": "unknown"})
	w.refuse(ledger.Extend{Key: "absent", LeaseID: released.ID}, ledger.CodeBucketNotFound, nil)
	if got := w.stored(key).Revision; got != revision {
		w.Errorf("refusals moved the revision from %d to %d", revision, got)
	}
}

// Goal: the bucket's settings bound an extension as they bound a reservation, and a
// closed bucket grants none.
func extendBounds(w *world) {
	declaration := w.declaration(100, func(r *ledger.ApplyDeclared) {
		r.Declaration.Settings.DefaultTTL, r.Declaration.Settings.MaxTTL = 20*time.Second, time.Minute
	})
	w.must(declaration)
	lease := w.reserveFor(10, 10*time.Second)
	if extended := w.must(ledger.Extend{Key: key, LeaseID: lease.ID}).Lease; !extended.ExpiresAt.Equal(w.now().Add(20 * time.Second)) {
		w.Errorf("without a TTL the lease was extended to %v", extended.ExpiresAt)
	}
	w.refuse(ledger.Extend{Key: key, LeaseID: lease.ID, TTL: time.Minute + time.Millisecond}, ledger.CodeInvalidInput,
		map[string]any{"ttlMs": int64(60_001), "maxTtlMs": int64(60_000)})
	w.refuse(ledger.Extend{Key: key, LeaseID: lease.ID, TTL: -time.Second}, ledger.CodeInvalidInput, nil)
	w.refuse(ledger.Extend{Key: key, LeaseID: lease.ID, TTL: time.Microsecond}, ledger.CodeInvalidInput, nil)
	w.must(ledger.CloseBucket{Key: key, Owner: declaration.Owner, Deletion: ledger.DeletionRetain})
	w.refuse(ledger.Extend{Key: key, LeaseID: lease.ID}, ledger.CodeBucketClosed, nil)
	w.commit(lease, 10)
}

// Goal: a lease may be made, extended and settled in one call.
func extendInOneCall(w *world) {
	w.open(100)
	reservation := w.reservation(10)
	id := w.leaseID(key, reservation.RequestKey)
	stored := w.reserve(10)
	results := w.do(
		reservation, ledger.Extend{Key: key, LeaseID: id, TTL: time.Hour}, ledger.Commit{Key: key, LeaseID: id, ActualTokens: 4},
		ledger.Extend{Key: key, LeaseID: stored.ID, TTL: time.Hour}, ledger.Commit{Key: key, LeaseID: stored.ID, ActualTokens: 5})
	for i, result := range results {
		if result.Err != nil {
			w.Errorf("request %d was refused: %v", i, result.Err)
		}
	}
	for _, id := range []string{id, stored.ID} {
		if l := w.wantLease(id, ledger.LeaseCommitted); !l.ExpiresAt.Equal(w.now().Add(time.Hour)) {
			w.Errorf("the stored lease reads %+v", l)
		}
	}
	w.wantCounters(9, 0)
}

// Goal: a lease is its holder's: another holder finds nothing, and its request key is
// no way in. One without a holder is everybody's, and who names none speaks for all.
func holders(w *world) {
	w.open(100)
	request := w.reservation(10)
	request.Holder = "alice"
	lease := w.must(request).Lease
	if lease.Holder != "alice" {
		w.Errorf("the lease is held by %q", lease.Holder)
	}
	missing := map[string]any{"leaseId": lease.ID}
	w.refuse(ledger.Commit{Key: key, LeaseID: lease.ID, ActualTokens: 5, Holder: "bob"}, ledger.CodeLeaseNotFound, missing)
	w.refuse(ledger.Release{Key: key, LeaseID: lease.ID, Holder: "bob"}, ledger.CodeLeaseNotFound, missing)
	w.refuse(ledger.Extend{Key: key, LeaseID: lease.ID, Holder: "bob"}, ledger.CodeLeaseNotFound, missing)
	foreign := request
	foreign.Holder = "bob"
	w.refuse(foreign, ledger.CodeIdempotencyConflict, nil)
	if again := w.must(request).Lease; again.ID != lease.ID {
		w.Errorf("the replay answers %+v", again)
	}
	w.must(ledger.Extend{Key: key, LeaseID: lease.ID, Holder: "alice"})
	w.must(ledger.Commit{Key: key, LeaseID: lease.ID, ActualTokens: 5, Holder: "alice"})
	if stored := w.lease(lease.ID); stored.Holder != "alice" {
		w.Errorf("the stored lease is held by %q", stored.Holder)
	}
	w.must(ledger.Release{Key: key, LeaseID: w.reserve(5).ID, Holder: "bob"})
	request = w.reservation(5)
	request.Holder = "alice"
	w.must(ledger.Release{Key: key, LeaseID: w.must(request).Lease.ID})
	w.refuse(ledger.Release{Key: key, LeaseID: lease.ID, Holder: " bob"}, ledger.CodeInvalidInput, nil)
}

// Goal: the bucket of an object is found whatever its key and the object's UID, and
// after the object came back under another key it is the open one.
func bucketOfObject(w *world) {
	declaration := w.declaration(100)
	owner := declaration.Owner
	find := func() (string, error) {
		return w.Store().BucketOf(w.ctx, ledger.Owner{Cluster: owner.Cluster, Namespace: owner.Namespace, Name: owner.Name})
	}
	if found, err := find(); !ledger.HasCode(err, ledger.CodeBucketNotFound) {
		w.Errorf("before there is one: %q, %v", found, err)
	}
	w.must(declaration)
	if found, err := find(); err != nil || found != key {
		w.Errorf("found %q, %v; want %q", found, err, key)
	}
	w.must(ledger.CloseBucket{Key: key, Owner: owner, Deletion: ledger.DeletionRetain})
	if found, err := find(); err != nil || found != key {
		w.Errorf("closed: found %q, %v; want %q", found, err, key)
	}
	declaration.Key, declaration.Owner.UID = "elsewhere", "another"
	w.must(declaration)
	if found, err := find(); err != nil || found != "elsewhere" {
		w.Errorf("found %q, %v; want the open one", found, err)
	}
	for _, other := range []ledger.Owner{
		{Cluster: "other", Namespace: owner.Namespace, Name: owner.Name},
		{Cluster: owner.Cluster, Namespace: "other", Name: owner.Name},
		{Cluster: owner.Cluster, Namespace: owner.Namespace, Name: "other"},
	} {
		if found, err := w.Store().BucketOf(w.ctx, other); !ledger.HasCode(err, ledger.CodeBucketNotFound) {
			w.Errorf("another object's bucket is %q, %v", found, err)
		}
	}
}
