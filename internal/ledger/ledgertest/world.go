package ledgertest

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

// tester is what both testing.T and rapid.T offer.
type tester interface {
	Helper()
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
}

// The names of the story that most tests tell: the launch of tenant pm_4821.
const (
	key         = "tenants/pm-4821"
	cluster     = "cluster-1"
	namespace   = "tenants"
	bucketName  = "pm-4821"
	bucketUID   = "bucket-uid-1"
	tenantID    = "pm_4821"
	scopedKeyID = "key_pm_4821_rent_v3"
	raiseName   = "pm-4821-launch"
	approvalID  = "CHG-20881"
	requester   = "system:serviceaccount:finops:launch"

	normalLimit    = 100
	temporaryLimit = 300
)

// world is a harness with short words for what tests do with it.
type world struct {
	tester
	Harness
	ctx    context.Context
	ledger *ledger.Ledger
	// generation is the latest one declared; uid the declaring incarnation.
	generation int64
	owner      ledger.Owner
	sequence   int
}

func newWorld(t *testing.T, newHarness NewHarness) *world {
	t.Helper()
	return worldOn(t.Context(), t, newHarness(t))
}

func worldOn(ctx context.Context, t tester, harness Harness) *world {
	return &world{
		tester: t, Harness: harness, ctx: ctx, ledger: ledger.New(harness.Store(), nil),
		owner: ledger.Owner{
			Cluster: cluster, Namespace: namespace, Name: bucketName, UID: bucketUID,
			CreatedAt: harness.Clock().Now(),
		},
	}
}

func (w *world) now() time.Time { return w.Clock().Now() }

// next makes up an identifier that was not used before in this world.
func (w *world) next(prefix string) string {
	w.sequence++
	return fmt.Sprintf("%s-%d", prefix, w.sequence)
}

// complete fills in the identifiers that the ledger would make up, so that a
// request repeats exactly.
func (w *world) complete(request ledger.Request) ledger.Request {
	switch r := request.(type) {
	case ledger.SetLimit:
		if r.OperationID == "" {
			r.OperationID = w.next("set-limit")
		}
		return r
	default:
		return request
	}
}

// do carries out requests in one call.
func (w *world) do(requests ...ledger.Request) []ledger.Result {
	w.Helper()
	for i := range requests {
		requests[i] = w.complete(requests[i])
	}
	results := w.ledger.Do(w.ctx, requests...)
	if len(results) != len(requests) {
		w.Fatalf("%d requests were given %d results", len(requests), len(results))
	}
	return results
}

// must carries out a request that has to succeed.
func (w *world) must(request ledger.Request) ledger.Result {
	w.Helper()
	result := w.do(request)[0]
	if result.Err != nil {
		w.Fatalf("%s on %q was refused: %v (details %v)", request.Operation(), request.Bucket(), result.Err, result.Err.Details)
	}
	return result
}

// refuse carries out a request that has to be refused with the code, and with the
// given details among others.
func (w *world) refuse(request ledger.Request, code ledger.Code, details map[string]any) *ledger.Error {
	w.Helper()
	result := w.do(request)[0]
	w.wantRefusal(result, code, details)
	return result.Err
}

func (w *world) wantRefusal(result ledger.Result, code ledger.Code, details map[string]any) {
	w.Helper()
	if result.Err == nil {
		w.Fatalf("succeeded, want %s", code)
	}
	if result.Err.Code != code {
		w.Fatalf("was refused with %v (details %v), want %s", result.Err, result.Err.Details, code)
	}
	if result.Err.Message == "" {
		w.Errorf("%s comes without a message", code)
	}
	if result.Lease != nil || result.Raise != nil || result.Closing != nil || result.Snapshot != nil {
		w.Errorf("the refusal %s comes with an answer: %+v", code, result)
	}
	for name, want := range details {
		if got := result.Err.Details[name]; !reflect.DeepEqual(got, want) {
			w.Errorf("%s has the detail %s = %v (%T), want %v", code, name, got, got, want)
		}
	}
}

// raw is the bucket as it is stored, without performing what is due; nil if there
// is none.
func (w *world) raw(bucket string) *ledger.Snapshot {
	w.Helper()
	changes, err := w.Store().Changes(w.ctx, []ledger.KnownRevision{{Key: bucket}})
	if err != nil {
		w.Fatalf("reading bucket %q: %v", bucket, err)
	}
	if len(changes) != 1 || changes[0].Key != bucket {
		w.Fatalf("asked for bucket %q, got %+v", bucket, changes)
	}
	return changes[0].Snapshot
}

// stored is raw for a bucket that must exist.
func (w *world) stored(bucket string) *ledger.Snapshot {
	w.Helper()
	snapshot := w.raw(bucket)
	if snapshot == nil {
		w.Fatalf("bucket %q does not exist", bucket)
	}
	return snapshot
}

// touch performs what is due on the bucket.
func (w *world) touch() {
	w.Helper()
	w.must(ledger.Touch{Key: key})
}

func (w *world) touchAt(at time.Time) {
	w.Helper()
	w.Clock().Set(at)
	w.touch()
}

func (w *world) wantLimit(want int64) {
	w.Helper()
	if got := w.stored(key).Limit; got != want {
		w.Fatalf("the limit is %d, want %d", got, want)
	}
}

func (w *world) wantCounters(used, reserved int64) {
	w.Helper()
	s := w.stored(key)
	if s.UsedTokens != used || s.ReservedTokens != reserved {
		w.Fatalf("used %d and reserved %d, want %d and %d", s.UsedTokens, s.ReservedTokens, used, reserved)
	}
}

// invariants checks all stored rows.
func (w *world) invariants() {
	w.Helper()
	if err := w.Invariants(w.ctx); err != nil {
		w.Fatalf("the stored rows contradict each other: %v", err)
	}
}

// open makes the bucket without an owner.
func (w *world) open(limit int64) {
	w.Helper()
	w.must(ledger.OpenBucket{Key: key, Limit: limit})
}

func (w *world) openWith(limit int64, settings ledger.ReservationSettings) {
	w.Helper()
	w.must(ledger.OpenBucket{Key: key, Limit: limit, Settings: settings})
}

// reserve takes tokens for a new request.
func (w *world) reserve(tokens int64) *ledger.Lease {
	w.Helper()
	return w.must(w.reservation(tokens)).Lease
}

func (w *world) reserveFor(tokens int64, ttl time.Duration) *ledger.Lease {
	w.Helper()
	request := w.reservation(tokens)
	request.TTL = ttl
	return w.must(request).Lease
}

func (w *world) reservation(tokens int64) ledger.Reserve {
	return ledger.Reserve{Key: key, RequestKey: w.next("request"), Fingerprint: "fingerprint", Tokens: tokens}
}

// leaseID is the ID of the lease that a request key would be given now. It is made
// here once more, from its description, for keys that JSON does not escape.
func (w *world) leaseID(bucketKey, requestKey string) string {
	hash := sha256.Sum256(fmt.Appendf(nil, "[%q,%q]", bucketKey, requestKey))
	return strconv.FormatInt(w.now().UnixMilli(), 36) + "." + base64.RawURLEncoding.EncodeToString(hash[:])
}

func (w *world) commit(lease *ledger.Lease, tokens int64) {
	w.Helper()
	w.must(ledger.Commit{Key: key, LeaseID: lease.ID, ActualTokens: tokens})
}

// use reserves and commits tokens.
func (w *world) use(tokens int64) {
	w.Helper()
	w.commit(w.reserve(tokens), tokens)
}

func (w *world) setLimit(expected, limit int64) {
	w.Helper()
	w.must(ledger.SetLimit{Key: key, ExpectedLimit: expected, Limit: limit, Actor: "finops"})
}

func (w *world) override(limit int64) {
	w.Helper()
	if err := w.OverrideLimit(w.ctx, key, limit); err != nil {
		w.Fatalf("writing the limit by another hand: %v", err)
	}
}

func (w *world) drop() {
	w.Helper()
	if err := w.DropBucket(w.ctx, key); err != nil {
		w.Fatalf("dropping the bucket by another hand: %v", err)
	}
}

// declaration is the next generation of what the bucket's owner asks for.
func (w *world) declaration(limit int64, changes ...func(*ledger.ApplyDeclared)) ledger.ApplyDeclared {
	w.generation++
	request := ledger.ApplyDeclared{
		Key: key, Owner: w.owner, Generation: w.generation,
		Declaration: ledger.Declaration{
			Limit: limit, TenantID: tenantID, ScopedKeyID: scopedKeyID,
			Settings: ledger.DefaultSettings(), ConflictPolicy: ledger.ConflictReview,
			Raises: ledger.RaisePolicy{Mode: ledger.ModeEnforce, MaxLimit: 1000, MaxDuration: 2 * time.Hour},
		},
	}
	for _, change := range changes {
		change(&request)
	}
	return request
}

func (w *world) declare(limit int64, changes ...func(*ledger.ApplyDeclared)) *ledger.Snapshot {
	w.Helper()
	return w.must(w.declaration(limit, changes...)).Snapshot
}

func withMode(mode ledger.Mode) func(*ledger.ApplyDeclared) {
	return func(r *ledger.ApplyDeclared) { r.Declaration.Raises.Mode = mode }
}

func withPolicy(maxLimit int64, maxDuration time.Duration) func(*ledger.ApplyDeclared) {
	return func(r *ledger.ApplyDeclared) {
		r.Declaration.Raises.MaxLimit, r.Declaration.Raises.MaxDuration = maxLimit, maxDuration
	}
}

func overwriting(r *ledger.ApplyDeclared) { r.Declaration.ConflictPolicy = ledger.ConflictOverwrite }

// raiseFrom asks for a raise from normalLimit to temporaryLimit in a window that
// is given as distances from now.
func (w *world) raiseFrom(uid string, from, to time.Duration, changes ...func(*ledger.StoreRaise)) ledger.StoreRaise {
	startsAt := w.now().Add(from)
	request := ledger.StoreRaise{
		Key: key, BucketUID: w.owner.UID, BucketGeneration: w.generation,
		Grant: ledger.Grant{
			UID: uid, CreatedAt: w.now(), Cluster: cluster, Namespace: namespace, Name: uid, TenantID: tenantID, ScopedKeyID: scopedKeyID,
			NormalLimit: normalLimit, TemporaryLimit: temporaryLimit,
			StartsAt: &startsAt, ExpiresAt: w.now().Add(to),
			ApprovalID: "approval-" + uid, Actor: requester, Purpose: "a launch", OnBaseChange: ledger.BaseChangeReview,
		},
	}
	for _, change := range changes {
		change(&request)
	}
	return request
}

func rebasing(r *ledger.StoreRaise) { r.Grant.OnBaseChange = ledger.BaseChangeRebase }

func to(limit int64) func(*ledger.StoreRaise) {
	return func(r *ledger.StoreRaise) { r.Grant.TemporaryLimit = limit }
}

func underApproval(id string) func(*ledger.StoreRaise) {
	return func(r *ledger.StoreRaise) { r.Grant.ApprovalID = id }
}

// known is a bucket as somebody who has just looked at it knows it.
func (w *world) known(bucket string) ledger.KnownRevision {
	w.Helper()
	s := w.stored(bucket)
	return ledger.KnownRevision{Key: bucket, Revision: s.Revision, CreatedAt: s.CreatedAt}
}

// store stores the intent of a raise.
func (w *world) store(request ledger.StoreRaise) *ledger.Raise {
	w.Helper()
	return w.must(request).Raise
}

// raised declares the bucket and puts one raise in force for half an hour.
func (w *world) raised(changes ...func(*ledger.StoreRaise)) *ledger.Raise {
	w.Helper()
	w.declare(normalLimit)
	raise := w.store(w.raiseFrom("raise-1", 0, 30*time.Minute, changes...))
	w.wantRaise(raise.ID, ledger.RaiseActive, ledger.ReasonNone)
	return raise
}

func (w *world) revoke(uid string) *ledger.Raise {
	w.Helper()
	return w.must(ledger.RevokeRaise{Key: key, UID: uid, Actor: requester}).Raise
}

// raise is the record as it is stored.
func (w *world) raise(uid string) *ledger.Raise {
	w.Helper()
	raise, err := w.Store().Raise(w.ctx, cluster, uid)
	if err != nil {
		w.Fatalf("reading raise %q: %v", uid, err)
	}
	return raise
}

func (w *world) wantRaise(uid string, state ledger.RaiseState, reason ledger.Reason) *ledger.Raise {
	w.Helper()
	raise := w.raise(uid)
	if raise.State != state || raise.Reason != reason {
		w.Fatalf("raise %q is %s/%s, want %s/%s", uid, raise.State, raise.Reason, state, reason)
	}
	return raise
}

// wantReview is wantRaise for a raise that ran and found another limit at its end.
func (w *world) wantReview(uid string) {
	w.Helper()
	if raise := w.wantRaise(uid, ledger.RaiseFailed, ledger.ReasonLimitChanged); !raise.ReviewRequired {
		w.Errorf("raise %q asks for no review", uid)
	}
}

// audit is the bucket's whole audit.
func (w *world) audit() []ledger.AuditRow {
	w.Helper()
	const pageSize = 50
	var all []ledger.AuditRow
	for {
		rows, err := w.Store().Audit(w.ctx, key, int64(len(all)), pageSize)
		if err != nil {
			w.Fatalf("reading the audit: %v", err)
		}
		all = append(all, rows...)
		for i, row := range all {
			if row.Sequence != int64(i)+1 {
				w.Fatalf("audit row %d is numbered %d", i+1, row.Sequence)
			}
		}
		if len(rows) < pageSize {
			return all
		}
	}
}

// events counts the audit rows of an event, for all raises or for one.
func (w *world) events(event ledger.AuditEvent, raiseID string) int {
	w.Helper()
	count := 0
	for _, row := range w.audit() {
		if row.Event == event && (raiseID == "" || row.RaiseID == raiseID) {
			count++
		}
	}
	return count
}

func (w *world) wantEvents(event ledger.AuditEvent, raiseID string, want int) {
	w.Helper()
	if got := w.events(event, raiseID); got != want {
		w.Fatalf("the audit holds %s %d times for %q, want %d: %v", event, got, raiseID, want, w.eventNames())
	}
}

func (w *world) eventNames() []string {
	var names []string
	for _, row := range w.audit() {
		names = append(names, fmt.Sprintf("%s(%s %s %s)", row.Event, row.RaiseID, row.Outcome, row.Reason))
	}
	return names
}

// wantIdle checks that time has nothing left to do: repeated touches write
// nothing, and the sweeper finds nothing due.
func (w *world) wantIdle(touches int) {
	w.Helper()
	before, auditBefore := w.stored(key), w.audit()
	for range touches {
		w.touch()
	}
	after := w.stored(key)
	if after.Revision != before.Revision || after.LimitEpoch != before.LimitEpoch || !after.UpdatedAt.Equal(before.UpdatedAt) {
		w.Fatalf("%d idle touches changed the bucket from %+v to %+v", touches, before, after)
	}
	if auditAfter := w.audit(); len(auditAfter) != len(auditBefore) {
		w.Fatalf("idle touches wrote to the audit: %v", w.eventNames()[len(auditBefore):])
	}
	w.wantNothingDue()
}

// wantNothingDue checks that the last touch left the next transition in the
// future.
func (w *world) wantNothingDue() {
	w.Helper()
	sweep := w.sweep(100)
	if len(sweep.Touched) != 0 || sweep.NextIn == 0 {
		w.Fatalf("after a touch the sweeper still finds %v due, the next in %v", sweep.Touched, sweep.NextIn)
	}
}

func (w *world) sweep(limit int, setAside ...string) ledger.SweepResult {
	w.Helper()
	result, err := w.Store().Sweep(w.ctx, ledger.SweepRequest{Limit: limit, SetAside: setAside})
	if err != nil {
		w.Fatalf("sweeping: %v", err)
	}
	for _, bucket := range slices.Sorted(maps.Keys(result.Failed)) {
		w.Fatalf("sweeping %q: %v", bucket, result.Failed[bucket])
	}
	return result
}

func (w *world) leases() []*ledger.Lease {
	w.Helper()
	leases, err := w.Store().Leases(w.ctx, key, ledger.LeasePosition{}, 10_000)
	if err != nil {
		w.Fatalf("reading leases: %v", err)
	}
	return leases
}

func (w *world) lease(id string) *ledger.Lease {
	w.Helper()
	for _, lease := range w.leases() {
		if lease.ID == id {
			return lease
		}
	}
	w.Fatalf("lease %q does not exist", id)
	return nil
}

func (w *world) wantLease(id string, state ledger.LeaseState) *ledger.Lease {
	w.Helper()
	lease := w.lease(id)
	if lease.State != state {
		w.Fatalf("lease %q is %s, want %s", id, lease.State, state)
	}
	return lease
}
