package ledgertest

import (
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

var periodStories = []story{
	{"a period ends", periodEnds},
	{"settled after the roll", settledAfterTheRoll},
	{"room in an ended period", roomInEndedPeriod},
	{"expired after the roll", expiredAfterTheRoll},
	{"recorded in an ended period", recordedInEndedPeriod},
	{"nobody came for months", nobodyCameForMonths},
	{"a bucket gains a period", bucketGainsPeriod},
	{"a changed period counts from the next roll", changedPeriod},
	{"a raise across a roll", raiseAcrossRoll},
	{"all that is due at one instant", allAtOneInstant},
	{"deletion waits for ended periods", deletionWaitsForPeriods},
	{"a roll in the middle of a call", rollWithinCall},
	{"periods that cannot be", periodsThatCannotBe},
}

func every(cadence ledger.Cadence) func(*ledger.ApplyDeclared) {
	return func(r *ledger.ApplyDeclared) {
		r.Declaration.Period = ledger.PeriodSpec{Every: cadence, TimeZone: "Etc/UTC"}
	}
}

// wantPeriod checks the bounds of the current period.
func (w *world) wantPeriod(start, end time.Time) {
	w.Helper()
	if p := w.stored(key).CurrentPeriod; p == nil || !p.StartedAt.Equal(start) || !p.EndsAt.Equal(end) {
		w.Errorf("the current period is %+v, want [%v, %v)", p, start, end)
	}
}

// Goal: used and reserved begin at 0 at the end of a period, to the millisecond; until
// then a refusal says when that is.
func periodEnds(w *world) {
	w.Clock().Advance(20 * time.Minute)
	w.declare(100, every(ledger.CadenceHour))
	end := Epoch.Add(time.Hour)
	w.wantPeriod(Epoch, end)
	w.use(60)
	w.reserveFor(40, 2*time.Minute)
	w.Clock().Set(end.Add(-time.Minute))
	w.touch()
	w.use(40)
	w.refuse(w.reservation(1), ledger.CodeBudgetExceeded,
		map[string]any{"requestedTokens": int64(1), "availableTokens": int64(0), "periodEndsAtMs": end.UnixMilli()})
	w.Clock().Set(end.Add(-time.Millisecond))
	w.refuse(w.reservation(1), ledger.CodeBudgetExceeded, nil)
	w.Clock().Set(end)
	w.reserve(100)
	w.wantCounters(0, 100)
	w.wantPeriod(end, end.Add(time.Hour))
	w.Clock().Set(end.Add(time.Hour))
	if swept := w.sweep(10); len(swept.Touched) != 1 || swept.NextIn != time.Hour {
		w.Errorf("the sweeper at the end of a period answers %+v", swept)
	}
	w.wantCounters(0, 0)
}

// Goal: a lease is counted where it was reserved, also when it is settled later, and
// not once more in the new period.
func settledAfterTheRoll(w *world) {
	w.declare(100, every(ledger.CadenceHour))
	w.Clock().Set(Epoch.Add(time.Hour - time.Second))
	committed, released := w.reserve(30), w.reserve(20)
	w.Clock().Advance(time.Second)
	other := w.reserve(100)
	w.wantCounters(0, 100)
	late := w.must(ledger.Commit{Key: key, LeaseID: committed.ID, ActualTokens: 25})
	if s := late.Snapshot; s.UsedTokens != 0 || s.ReservedTokens != 100 {
		w.Errorf("after settling in the ended period the bucket reads %+v", s)
	}
	if !late.Lease.PeriodStart.Equal(Epoch) || !w.lease(other.ID).PeriodStart.Equal(Epoch.Add(time.Hour)) {
		w.Errorf("leases are of %v and %v", late.Lease.PeriodStart, w.lease(other.ID).PeriodStart)
	}
	w.must(ledger.Release{Key: key, LeaseID: released.ID})
	w.must(ledger.Extend{Key: key, LeaseID: other.ID, TTL: 2 * time.Minute})
	w.must(ledger.Commit{Key: key, LeaseID: committed.ID, ActualTokens: 25})
	w.commit(other, 90)
	w.wantCounters(90, 0)
}

// Goal: a strict commit in an ended period may use what that has left, and always what
// it reserved, whatever the limit is now.
func roomInEndedPeriod(w *world) {
	w.declare(100, every(ledger.CadenceHour))
	w.Clock().Set(Epoch.Add(time.Hour - time.Second))
	w.use(50)
	first, second := w.reserve(10), w.reserve(20)
	w.Clock().Advance(time.Second)
	w.declare(5, every(ledger.CadenceHour))
	w.refuse(ledger.Commit{Key: key, LeaseID: first.ID, ActualTokens: 31}, ledger.CodeCommitExceedsBudget,
		map[string]any{"actualTokens": int64(31), "maximumCommit": int64(30), "reservedTokens": int64(10)})
	w.commit(first, 30)
	w.refuse(ledger.Commit{Key: key, LeaseID: second.ID, ActualTokens: 21}, ledger.CodeCommitExceedsBudget,
		map[string]any{"actualTokens": int64(21), "maximumCommit": int64(20), "reservedTokens": int64(20)})
	w.commit(second, 20)
	w.wantCounters(0, 0)
}

// Goal: what expires after the roll gives nothing back to the new period.
func expiredAfterTheRoll(w *world) {
	w.declare(100, every(ledger.CadenceHour))
	w.Clock().Set(Epoch.Add(time.Hour - time.Second))
	before := w.reserveFor(70, time.Minute)
	w.Clock().Advance(time.Second)
	w.reserveFor(100, 10*time.Minute)
	w.Clock().Advance(2 * time.Minute)
	w.touch()
	w.wantLease(before.ID, ledger.LeaseExpired)
	w.wantCounters(0, 100)
	w.refuse(w.reservation(1), ledger.CodeBudgetExceeded, nil)
}

// Goal: actual figures that come long after the period has ended are booked there.
func recordedInEndedPeriod(w *world) {
	both := func(r *ledger.ApplyDeclared) {
		recording(r)
		every(ledger.CadenceHour)(r)
	}
	w.declare(100, both)
	lease := w.reserve(30)
	w.Clock().Advance(5 * time.Hour)
	w.touch()
	late := w.must(ledger.Commit{Key: key, LeaseID: lease.ID, ActualTokens: 300})
	if !late.Lease.Late || late.Snapshot.UsedTokens != 0 {
		w.Errorf("a late commit in an ended period answers %+v, %+v", late.Lease, late.Snapshot)
	}
	w.reserve(100)
}

// Goal: periods that nobody touched are skipped; the bucket is in the one of now.
func nobodyCameForMonths(w *world) {
	w.declare(100, every(ledger.CadenceDay))
	w.use(70)
	at := time.Date(2027, time.March, 3, 3, 3, 3, 0, time.UTC)
	w.Clock().Set(at)
	revision := w.stored(key).Revision
	w.touch()
	w.wantPeriod(time.Date(2027, time.March, 3, 0, 0, 0, 0, time.UTC), time.Date(2027, time.March, 4, 0, 0, 0, 0, time.UTC))
	w.wantCounters(0, 0)
	if got := w.stored(key).Revision; got != revision+1 {
		w.Errorf("rolling over months moved the revision from %d to %d", revision, got)
	}
	w.wantIdle(3)
}

// Goal: declaring a period forgives nothing: what was used counts until its end.
func bucketGainsPeriod(w *world) {
	w.declare(100)
	w.use(90)
	lease := w.reserve(5)
	if p := w.stored(key).CurrentPeriod; p != nil {
		w.Errorf("a bucket without a period has %+v", p)
	}
	created := w.stored(key).CreatedAt
	w.Clock().Advance(30 * time.Second)
	w.declare(100, every(ledger.CadenceHour))
	w.wantPeriod(created, Epoch.Add(time.Hour))
	w.wantCounters(90, 5)
	w.refuse(w.reservation(6), ledger.CodeBudgetExceeded, nil)
	w.must(ledger.Extend{Key: key, LeaseID: lease.ID, TTL: time.Hour})
	w.Clock().Set(Epoch.Add(time.Hour))
	w.touch()
	w.wantCounters(0, 0)
	w.commit(lease, 10)
	w.wantCounters(0, 0)
	w.declare(100)
	w.use(80)
	w.Clock().Advance(time.Hour)
	w.touch()
	if p := w.stored(key).CurrentPeriod; p != nil {
		w.Errorf("after the period was taken away the bucket has %+v", p)
	}
	w.use(30)
	w.Clock().Advance(1000 * time.Hour)
	w.touch()
	w.wantCounters(30, 0)
}

// Goal: the stored end of a period stands, whatever is declared meanwhile.
func changedPeriod(w *world) {
	w.declare(100, every(ledger.CadenceHour))
	w.use(50)
	w.declare(100, every(ledger.CadenceDay))
	end := Epoch.Add(time.Hour)
	w.wantPeriod(Epoch, end)
	w.wantCounters(50, 0)
	w.Clock().Set(end)
	w.touch()
	// The day has begun before, in a period that has ended.
	w.wantPeriod(end, time.Date(2026, time.December, 1, 0, 0, 0, 0, time.UTC))
	w.declare(100, func(r *ledger.ApplyDeclared) {
		r.Declaration.Period = ledger.PeriodSpec{Every: ledger.CadenceMonth, TimeZone: "Asia/Tokyo"}
	})
	w.Clock().Set(time.Date(2026, time.December, 1, 0, 0, 0, 0, time.UTC))
	w.touch()
	w.wantPeriod(w.now(), time.Date(2026, time.December, 31, 15, 0, 0, 0, time.UTC))
}

// Goal: a raise is about the limit, and each period has it; its end is no end of a
// period.
func raiseAcrossRoll(w *world) {
	w.declare(normalLimit, every(ledger.CadenceHour))
	w.Clock().Set(Epoch.Add(50 * time.Minute))
	raise := w.store(w.raiseFrom("raise-1", 0, 20*time.Minute))
	lease := w.reserveFor(temporaryLimit-50, 30*time.Minute)
	w.use(50)
	w.Clock().Set(Epoch.Add(time.Hour))
	w.wantLimit(temporaryLimit)
	w.use(temporaryLimit)
	w.Clock().Set(Epoch.Add(70 * time.Minute))
	w.touch()
	w.wantRaise(raise.ID, ledger.RaiseRestored, ledger.ReasonExpired)
	w.wantLimit(normalLimit)
	w.wantCounters(temporaryLimit, 0)
	// The ended period had the raised limit.
	w.refuse(ledger.Commit{Key: key, LeaseID: lease.ID, ActualTokens: temporaryLimit - 49}, ledger.CodeCommitExceedsBudget, nil)
	w.commit(lease, temporaryLimit-50)
	w.Clock().Set(Epoch.Add(2 * time.Hour))
	w.touch()
	w.reserve(normalLimit)
}

// Goal: at one instant leases expire first, in their period, then raises are restored,
// then the period ends, then raises start. Method: all of them at the full hour.
func allAtOneInstant(w *world) {
	w.declare(normalLimit, every(ledger.CadenceHour))
	w.Clock().Set(Epoch.Add(30 * time.Minute))
	first := w.store(w.raiseFrom("raise-1", 0, 30*time.Minute))
	second := w.store(w.raiseFrom("raise-2", 30*time.Minute, time.Hour, to(400)))
	w.reserveFor(temporaryLimit-20, 30*time.Minute)
	kept := w.reserveFor(20, 40*time.Minute)
	w.Clock().Set(Epoch.Add(time.Hour))
	w.touch()
	w.wantRaise(first.ID, ledger.RaiseRestored, ledger.ReasonExpired)
	w.wantRaise(second.ID, ledger.RaiseActive, ledger.ReasonNone)
	w.wantLimit(400)
	w.wantCounters(0, 0)
	// The period ended at the normal limit: it has that much room beside what is kept.
	w.refuse(ledger.Commit{Key: key, LeaseID: kept.ID, ActualTokens: normalLimit + 1}, ledger.CodeCommitExceedsBudget,
		map[string]any{"actualTokens": int64(normalLimit + 1), "maximumCommit": int64(normalLimit), "reservedTokens": int64(20)})
	w.commit(kept, normalLimit)
	w.wantCounters(0, 0)
}

// Goal: a bucket is not removed while something is reserved in an ended period.
func deletionWaitsForPeriods(w *world) {
	declaration := w.declaration(100, every(ledger.CadenceHour))
	w.must(declaration)
	w.Clock().Set(Epoch.Add(time.Hour - time.Second))
	lease := w.reserve(30)
	w.Clock().Advance(time.Second)
	w.touch()
	request := ledger.CloseBucket{Key: key, Owner: declaration.Owner, Deletion: ledger.DeletionDelete}
	if closing := w.must(request).Closing; closing.Done || closing.ReservedTokens != 30 {
		w.Errorf("closing answers %+v while 30 tokens are reserved in the ended period", closing)
	}
	w.commit(lease, 30)
	if closing := w.must(request).Closing; !closing.Done {
		w.Errorf("closing answers %+v although nothing is reserved", closing)
	}
	// The key can be opened anew, and knows nothing of the periods before.
	w.must(ledger.OpenBucket{Key: key, Limit: 7})
	w.wantCounters(0, 0)
}

// Goal: one call may roll the period and settle in the ended one.
func rollWithinCall(w *world) {
	w.declare(100, every(ledger.CadenceHour))
	w.Clock().Set(Epoch.Add(time.Hour - time.Second))
	first, second := w.reserve(30), w.reserve(30)
	w.Clock().Advance(time.Second)
	reservation := w.reservation(100)
	for i, result := range w.do(
		ledger.Commit{Key: key, LeaseID: first.ID, ActualTokens: 30}, reservation,
		ledger.Release{Key: key, LeaseID: second.ID},
		ledger.Commit{Key: key, LeaseID: w.leaseID(key, reservation.RequestKey), ActualTokens: 99},
	) {
		if result.Err != nil {
			w.Errorf("request %d was refused: %v", i, result.Err)
		}
	}
	w.wantCounters(99, 0)
}

// Goal: a period without a calendar is refused, and changes nothing.
func periodsThatCannotBe(w *world) {
	w.declare(100)
	revision := w.stored(key).Revision
	for _, period := range []ledger.PeriodSpec{
		{Every: "Minute", TimeZone: "Etc/UTC"}, {Every: ledger.CadenceDay, TimeZone: "Europe/Atlantis"}, {Every: ledger.CadenceDay},
	} {
		w.refuse(w.declaration(100, func(r *ledger.ApplyDeclared) { r.Declaration.Period = period }), ledger.CodeInvalidInput, nil)
	}
	if got := w.stored(key).Revision; got != revision {
		w.Errorf("refusals moved the revision from %d to %d", revision, got)
	}
}
