package ledgertest

import (
	"fmt"
	"slices"
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

var evidenceStories = []story{
	{"the seed story's audit", seedStory},
	{"idle touches write nothing", idleTouches},
	{"sweep touches what is due", sweepTouches},
	{"sweep leaves out what was set aside", sweepSetsAside},
	{"changes", changesAreTold},
	{"pages of leases", leasePages},
	{"pages of the audit", auditPages},
	{"live raises", liveRaisePages},
	{"finding a raise", findingRaise},
	{"active past expiry", activePastExpiry},
	{"a writable ledger", writable},
}

func (w *world) liveRaises() []*ledger.Raise {
	w.Helper()
	live, err := w.Store().LiveRaises(w.ctx, cluster, ledger.RaisePosition{}, 1000)
	if err != nil {
		w.Fatalf("reading live raises: %v", err)
	}
	return live
}

// Goal: finance can tell from the audit alone what happened.
// Method: the launch of pm_4821 from 120,000 to 300,000 and back under usage, each
// field of each row.
func seedStory(w *world) {
	const normal, temporary = 120_000, 300_000
	w.declare(normal, withPolicy(400_000, 2*time.Hour), func(r *ledger.ApplyDeclared) { r.Actor = "gitops" })
	opened := w.now()
	w.Clock().Advance(time.Minute)
	request := w.raiseFrom("uid-launch", time.Minute, 31*time.Minute, underApproval(approvalID), func(r *ledger.StoreRaise) {
		r.Grant.Name, r.Grant.NormalLimit, r.Grant.TemporaryLimit = raiseName, normal, temporary
	})
	w.store(request)
	stored := w.now()
	w.use(100_000)
	w.reserveFor(10_000, time.Hour)
	startsAt, expiresAt := *request.Grant.StartsAt, request.Grant.ExpiresAt
	w.touchAt(startsAt.Add(time.Second))
	w.use(50_000)
	w.Clock().Set(expiresAt.Add(2 * time.Second))
	w.sweep(10)

	rows := w.audit()
	bucketRow := ledger.AuditRow{
		BucketKey: key, Cluster: cluster, Namespace: namespace, OwnerName: bucketName, TenantID: tenantID,
		BucketScopedKeyID: scopedKeyID, Worker: WorkerName, DeclaredLimit: at[int64](normal),
	}
	raiseRow := bucketRow
	raiseRow.RaiseID, raiseRow.ScopedKeyID, raiseRow.ApprovalID, raiseRow.Actor = "uid-launch", scopedKeyID, approvalID, requester
	raiseRow.RequestedLimit = at[int64](temporary)

	open := bucketRow
	open.Event, open.Outcome, open.Sequence, open.Actor, open.Trigger = ledger.AuditBucketOpened, ledger.OutcomeApplied, 1, "gitops", string(ledger.OpApplyDeclare)
	open.RequestedLimit, open.EffectiveLimit, open.At = at[int64](normal), at[int64](normal), opened

	intent := raiseRow
	intent.Event, intent.Outcome, intent.Sequence, intent.RaiseVersion = ledger.AuditRaiseStored, ledger.OutcomeApplied, 2, 1
	intent.Trigger, intent.PriorLimit, intent.EffectiveLimit = string(ledger.OpStoreRaise), at[int64](normal), at[int64](normal)
	intent.DueAt, intent.At = &startsAt, stored

	activate := raiseRow
	activate.Event, activate.Outcome, activate.Sequence, activate.RaiseVersion = ledger.AuditRaiseActivated, ledger.OutcomeApplied, 3, 2
	activate.OperationID, activate.Trigger = "uid-launch:activate", string(ledger.OpTouch)
	activate.PriorLimit, activate.EffectiveLimit, activate.LimitEpoch = at[int64](normal), at[int64](temporary), 1
	activate.UsedTokens, activate.ReservedTokens = 100_000, 10_000
	activate.DueAt, activate.At = &startsAt, startsAt.Add(time.Second)

	restore := raiseRow
	restore.Event, restore.Outcome, restore.Sequence, restore.RaiseVersion = ledger.AuditRaiseRestored, ledger.OutcomeApplied, 4, 3
	restore.Reason, restore.OperationID, restore.Trigger = ledger.ReasonExpired, "uid-launch:restore", string(ledger.OpTouch)
	restore.PriorLimit, restore.EffectiveLimit, restore.LimitEpoch = at[int64](temporary), at[int64](normal), 2
	restore.UsedTokens, restore.ReservedTokens = 150_000, 10_000
	restore.DueAt, restore.At = &expiresAt, expiresAt.Add(2*time.Second)

	want := []ledger.AuditRow{open, intent, activate, restore}
	if len(rows) != len(want) {
		w.Fatalf("the audit holds %v", w.eventNames())
	}
	for i := range want {
		if got, wanted := describe(rows[i]), describe(want[i]); got != wanted {
			w.Errorf("audit row %d:\n got %s\nwant %s", i+1, got, wanted)
		}
	}
}

func at[T any](v T) *T { return &v }

// describe writes an audit row with what its pointers point to.
func describe(r ledger.AuditRow) string {
	limits := make([]string, 0, 4)
	for _, limit := range []*int64{r.RequestedLimit, r.PriorLimit, r.EffectiveLimit, r.DeclaredLimit} {
		if limit == nil {
			limits = append(limits, "-")
		} else {
			limits = append(limits, fmt.Sprint(*limit))
		}
	}
	due := "-"
	if r.DueAt != nil {
		due = r.DueAt.UTC().String()
	}
	instant := r.At.UTC().String()
	r.RequestedLimit, r.PriorLimit, r.EffectiveLimit, r.DeclaredLimit, r.DueAt, r.At = nil, nil, nil, nil, nil, time.Time{}
	return fmt.Sprintf("requested, prior, effective, declared %v; due %s; at %s; %+v", limits, due, instant, r)
}

// Goal: time that changes nothing writes nothing, in every kind of state.
func idleTouches(w *world) {
	const touches = 100
	w.declare(normalLimit)
	w.reserveFor(10, time.Hour)
	w.wantIdle(touches)
	w.store(w.raiseFrom("planned", time.Minute, 10*time.Minute))
	w.wantIdle(touches)
	w.touchAt(Epoch.Add(time.Minute))
	w.wantIdle(touches)
	w.store(w.raiseFrom("waiting", 0, 20*time.Minute, func(r *ledger.StoreRaise) { r.Grant.NormalLimit = 50 }))
	w.wantIdle(touches)
	w.touchAt(Epoch.Add(10 * time.Minute))
	w.wantRaise("waiting", ledger.RaisePending, ledger.ReasonLimitMismatch)
	w.wantIdle(touches)
	w.Clock().Advance(ledger.MismatchGrace)
	w.touch()
	w.wantRaise("waiting", ledger.RaiseFailed, ledger.ReasonLimitChanged)
	w.wantIdle(touches)
	w.declare(normalLimit, withMode(ledger.ModeObserveOnly))
	w.store(w.raiseFrom("observed", 0, 10*time.Minute))
	w.wantIdle(touches)
	w.override(120)
	w.touch()
	w.wantIdle(touches)
	w.close(ledger.DeletionRetain)
	w.wantIdle(touches)
}

// declareMany opens buckets with a raise each that is due to end one minute after
// the other, and returns their keys in that order.
func (w *world) declareMany(count int) []string {
	w.Helper()
	keys := make([]string, count)
	for i := range keys {
		// The order of the keys is not the order of the instants.
		keys[i] = fmt.Sprintf("%s-%02d", namespace, count-i)
		declare := w.declaration(normalLimit)
		declare.Key, declare.Generation, declare.Owner.Name = keys[i], 1, keys[i]
		raise := w.raiseFrom("raise-"+keys[i], 0, time.Duration(i+1)*time.Minute)
		raise.Key, raise.BucketGeneration = keys[i], 1
		for _, result := range w.do(declare, raise) {
			if result.Err != nil {
				w.Fatalf("opening %q: %v", keys[i], result.Err)
			}
		}
	}
	return keys
}

// Goal: a pass touches due buckets only, the longest overdue first, at most as
// many as asked, and says when to come back.
func sweepTouches(w *world) {
	keys := w.declareMany(6)
	if sweep := w.sweep(10); len(sweep.Touched) != 0 || sweep.NextIn != time.Minute {
		w.Errorf("before anything is due, sweeping gives %+v", sweep)
	}
	w.Clock().Set(Epoch.Add(4 * time.Minute))
	first := w.sweep(3)
	slices.Sort(first.Touched)
	want := slices.Sorted(slices.Values(keys[:3]))
	if !slices.Equal(first.Touched, want) || first.NextIn != 0 {
		w.Errorf("a pass over 3 of 4 due buckets gives %+v, want %v", first, want)
	}
	second := w.sweep(3)
	if !slices.Equal(second.Touched, keys[3:4]) || second.NextIn != time.Minute {
		w.Errorf("the next pass gives %+v, want %v", second, keys[3:4])
	}
	for i, name := range keys {
		want := int64(temporaryLimit)
		if i < 4 {
			want = normalLimit
		}
		if got := w.stored(name).Limit; got != want {
			w.Errorf("bucket %q has the limit %d, want %d", name, got, want)
		}
	}
	w.Clock().Set(Epoch.Add(time.Hour))
	if sweep := w.sweep(0); len(sweep.Touched) != 0 {
		w.Errorf("a pass of no size touched %v", sweep.Touched)
	}
	w.sweep(10)
	if sweep := w.sweep(10); len(sweep.Touched) != 0 || sweep.NextIn >= 0 {
		w.Errorf("with nothing due ever, sweeping gives %+v", sweep)
	}
}

// Goal: a bucket that was set aside holds up nobody, and does not keep the sweeper
// awake.
func sweepSetsAside(w *world) {
	keys := w.declareMany(3)
	w.Clock().Set(Epoch.Add(2 * time.Minute))
	sweep := w.sweep(1, keys[0])
	if !slices.Equal(sweep.Touched, keys[1:2]) || sweep.NextIn != time.Minute {
		w.Errorf("with %q set aside, sweeping gives %+v", keys[0], sweep)
	}
	if got := w.stored(keys[0]).Limit; got != temporaryLimit {
		w.Errorf("the bucket that was set aside has the limit %d", got)
	}
	sweep = w.sweep(10)
	if !slices.Equal(sweep.Touched, keys[:1]) {
		w.Errorf("once it is not set aside, sweeping gives %+v", sweep)
	}
}

// Goal: one query tells which buckets are not as they are known, and performs
// nothing.
func changesAreTold(w *world) {
	raise := w.raised()
	w.store(w.raiseFrom("planned", time.Hour, 2*time.Hour))
	w.must(ledger.OpenBucket{Key: "other", Limit: 5})
	known := func() []ledger.KnownRevision {
		return []ledger.KnownRevision{w.known("other"), w.known(key)}
	}
	read := func(known []ledger.KnownRevision) []ledger.Change {
		w.Helper()
		changes, err := w.Store().Changes(w.ctx, known)
		if err != nil {
			w.Fatalf("reading changes: %v", err)
		}
		return changes
	}
	before := known()
	if changes := read(before); len(changes) != 0 {
		w.Errorf("nothing changed, and that is told as %+v", changes)
	}
	if changes := read(nil); len(changes) != 0 {
		w.Errorf("nothing known, and that is told as %+v", changes)
	}
	w.reserve(10)
	changes := read(before)
	if len(changes) != 1 || changes[0].Key != key || changes[0].Snapshot.ReservedTokens != 10 {
		w.Fatalf("one change is told as %+v", changes)
	}
	s := changes[0].Snapshot
	if s.ActiveRaise == nil || s.ActiveRaise.ID != raise.ID || s.PendingRaises != 1 || s.BaseLimit != normalLimit || s.Limit != temporaryLimit {
		w.Errorf("the change reads %+v", s)
	}
	w.Clock().Set(raise.ExpiresAt)
	if s := w.stored(key); s.Limit != temporaryLimit {
		w.Errorf("reading changes restored the limit")
	}
	changes = read([]ledger.KnownRevision{{Key: "absent", Revision: 3}, {Key: "absent-too"}, {Key: "other"}})
	slices.SortFunc(changes, func(a, b ledger.Change) int { return len(a.Key) - len(b.Key) })
	if len(changes) != 3 || changes[0].Snapshot == nil || changes[1].Snapshot != nil || changes[2].Snapshot != nil {
		w.Errorf("absent buckets are told as %+v", changes)
	}
	w.override(77)
	if changes := read(before); len(changes) != 1 || changes[0].Snapshot.Limit != 77 {
		w.Errorf("another hand's limit is told as %+v", changes)
	}
}

// Goal: leases are listed in pages, in the order in which they expire.
func leasePages(w *world) {
	w.open(1000)
	var want []string
	for i := range 25 {
		if i%3 == 0 {
			w.Clock().Advance(time.Millisecond)
		}
		want = append(want, w.must(ledger.Reserve{
			Key: key, RequestKey: w.next("k"), Fingerprint: "f", Tokens: 1,
		}).Lease.ID)
	}
	// Of those that expire at one instant, the ID decides.
	slices.Sort(want)
	w.must(ledger.OpenBucket{Key: "other", Limit: 10})
	w.must(ledger.Reserve{Key: "other", RequestKey: "k", Fingerprint: "f", Tokens: 1})
	var got []string
	var position ledger.LeasePosition
	for {
		page, err := w.Store().Leases(w.ctx, key, position, 7)
		if err != nil {
			w.Fatalf("reading leases: %v", err)
		}
		for _, lease := range page {
			got = append(got, lease.ID)
			position = ledger.LeasePosition{ExpiresAt: lease.ExpiresAt, LeaseID: lease.ID}
		}
		if len(page) < 7 {
			break
		}
	}
	if !slices.Equal(got, want) {
		w.Errorf("pages list %v, want %v", got, want)
	}
	if none, err := w.Store().Leases(w.ctx, "absent", ledger.LeasePosition{}, 7); err != nil || len(none) != 0 {
		w.Errorf("an absent bucket lists %v, %v", none, err)
	}
}

// Goal: the audit is listed in pages above a number.
func auditPages(w *world) {
	w.open(100)
	for i := range int64(9) {
		w.setLimit(100+i, 101+i)
	}
	page, err := w.Store().Audit(w.ctx, key, 4, 3)
	if err != nil || len(page) != 3 || page[0].Sequence != 5 || page[2].Sequence != 7 {
		w.Errorf("the page above 4 is %+v, %v", page, err)
	}
	for _, after := range []int64{10, 1000} {
		if page, err := w.Store().Audit(w.ctx, key, after, 3); err != nil || len(page) != 0 {
			w.Errorf("the page above %d is %+v, %v", after, page, err)
		}
	}
}

// Goal: live raises of one cluster are listed over all buckets, in pages.
func liveRaisePages(w *world) {
	keys := w.declareMany(4)
	foreign := w.declaration(normalLimit)
	foreign.Key, foreign.Generation, foreign.Owner.Cluster = "foreign", 1, "another"
	w.must(foreign)
	raise := w.raiseFrom("raise-foreign", 0, time.Hour)
	raise.Key, raise.BucketGeneration, raise.Grant.Cluster = "foreign", 1, "another"
	w.store(raise)
	w.must(ledger.RevokeRaise{Key: keys[1], UID: "raise-" + keys[1]})
	want := []string{"raise-" + keys[0], "raise-" + keys[2], "raise-" + keys[3]}
	slices.Sort(want)
	var got []string
	var position ledger.RaisePosition
	for {
		page, err := w.Store().LiveRaises(w.ctx, cluster, position, 2)
		if err != nil {
			w.Fatalf("reading live raises: %v", err)
		}
		for _, r := range page {
			got = append(got, r.ID)
			position = ledger.RaisePosition{BucketKey: r.BucketKey, RaiseID: r.ID}
		}
		if len(page) < 2 {
			break
		}
	}
	if !slices.Equal(got, want) {
		w.Errorf("live raises are %v, want %v", got, want)
	}
}

// Goal: a raise is found by its ID and by the UID of the object that stands for
// it, within its cluster.
func findingRaise(w *world) {
	w.declare(normalLimit)
	request := w.raiseFrom("uid-1", 0, time.Hour)
	w.store(request)
	request.Grant.UID = "uid-2"
	w.store(request)
	for _, uid := range []string{"uid-1", "uid-2"} {
		if r := w.raise(uid); r.ID != "uid-1" || r.CurrentUID != "uid-2" {
			w.Errorf("looking up %q finds %+v", uid, r)
		}
	}
	for _, where := range [][2]string{{"another", "uid-1"}, {cluster, "uid-3"}, {cluster, ""}} {
		if _, err := w.Store().Raise(w.ctx, where[0], where[1]); !ledger.HasCode(err, ledger.CodeRaiseNotFound) {
			w.Errorf("looking up %v gives %v", where, err)
		}
	}
}

// Goal: the gauge shows what nobody has restored yet, and goes back.
func activePastExpiry(w *world) {
	w.declareMany(3)
	count := func(want int64) {
		w.Helper()
		if got, err := w.Store().ActivePastExpiry(w.ctx); err != nil || got != want {
			w.Errorf("%d raises are active past their expiry (%v), want %d", got, err, want)
		}
	}
	w.Clock().Set(Epoch.Add(time.Minute - time.Millisecond))
	count(0)
	w.Clock().Set(Epoch.Add(2 * time.Minute))
	count(2)
	w.sweep(10)
	count(0)
}

func writable(w *world) {
	if err := w.Store().Writable(w.ctx); err != nil {
		w.Errorf("an empty ledger is not writable: %v", err)
	}
}
