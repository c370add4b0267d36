package controller

import (
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/cli-utils/pkg/kstatus/status"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/internal/ledger"
)

// kstatusOf is what Flux and `kustomize wait` make of an object. It checks that Argo
// CD makes the same of it, by the script that is shipped.
func kstatusOf(t *testing.T, object any) status.Status {
	t.Helper()
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(object)
	if err != nil {
		t.Fatal(err)
	}
	result, err := status.Compute(&unstructured.Unstructured{Object: content})
	if err != nil {
		t.Fatal(err)
	}
	kind := "TokenBucket"
	if _, lease := object.(*v1alpha1.TemporaryLimitLease); lease {
		kind = "TemporaryLimitLease"
	}
	wantHealth(t, healthScripts(t)[kind], content, result.Status)
	return result.Status
}

// wantWhole checks what holds of the conditions in every state.
func wantWhole(t *testing.T, list []metav1.Condition, kinds []string, generation int64) {
	t.Helper()
	if len(list) != len(kinds) {
		t.Errorf("%d conditions, want %d", len(list), len(kinds))
	}
	for _, kind := range kinds {
		c := meta.FindStatusCondition(list, kind)
		switch {
		case c == nil:
			t.Errorf("%s is absent", kind)
		case c.ObservedGeneration < 1 || c.ObservedGeneration > generation || c.Reason == "" ||
			len(c.Message) >= v1alpha1.MaxConditionMessageBytes:
			t.Errorf("%+v", c)
		}
	}
	if meta.IsStatusConditionTrue(list, v1alpha1.ConditionReconciling) && meta.IsStatusConditionTrue(list, v1alpha1.ConditionStalled) {
		t.Error("both reconciling and stalled")
	}
}

var (
	kstatusConditions = []string{v1alpha1.ConditionReady, v1alpha1.ConditionReconciling, v1alpha1.ConditionStalled}
	bucketConditions  = append(kstatusConditions[:3:3], limitConditions...)
	leaseConditions   = append(kstatusConditions[:3:3], v1alpha1.ConditionActive, v1alpha1.ConditionRestored,
		v1alpha1.ConditionEnded, v1alpha1.ConditionReviewRequired)
)

// Goal: a lease that waits, runs or has run blocks nobody; one that never ran has
// failed; nothing is green before its generation was seen. In every state
// all conditions are there, and Ended is true in the final ones.
func TestLeaseKstatus(t *testing.T) {
	ledgerError := func(code ledger.Code) *failure { return failureOf(ledger.Errorf(code, "words")) }
	review := func(r *ledger.Raise) { ran(r); r.ReviewRequired, r.ObservedLimit = true, ptr.To[int64](180) }
	cases := []struct {
		name   string
		record *ledger.Raise
		failed *failure
		want   status.Status
	}{
		{"pending", testRaise(ledger.RaisePending, ""), nil, status.CurrentStatus},
		{"waits its turn", testRaise(ledger.RaisePending, ledger.ReasonBucketAlreadyRaised), nil, status.CurrentStatus},
		{"waits for its limit", testRaise(ledger.RaisePending, ledger.ReasonLimitMismatch), nil, status.CurrentStatus},
		{"observed", testRaise(ledger.RaisePending, ledger.ReasonObserveOnly), nil, status.CurrentStatus},
		{"active", testRaise(ledger.RaiseActive, ""), nil, status.CurrentStatus},
		{"restored", testRaise(ledger.RaiseRestored, ledger.ReasonExpired), nil, status.CurrentStatus},
		{"revoked", testRaise(ledger.RaiseRestored, ledger.ReasonRevoked), nil, status.CurrentStatus},
		{"bucket closed while active", testRaise(ledger.RaiseRestored, ledger.ReasonBucketClosed), nil, status.CurrentStatus},
		{"limit changed while active", testRaise(ledger.RaiseFailed, ledger.ReasonLimitChanged, review), nil, status.CurrentStatus},
		{"bucket missing", nil, waitForBucket(leaseInput{lease: testLease()}), status.InProgressStatus},
		{"bucket not ready", nil, waitForBucket(leaseInput{lease: testLease(), bucket: testBucket(), bucketUnreadable: true}), status.InProgressStatus},
		{"generation not in the ledger", nil, ledgerError(ledger.CodeBucketNotReady), status.InProgressStatus},
		{"too many", nil, ledgerError(ledger.CodeRaiseLimit), status.InProgressStatus},
		{"ledger away", nil, ledgerError(ledger.CodeUnavailable), status.InProgressStatus},
		{"ledger away while active", testRaise(ledger.RaiseActive, ""), ledgerError(ledger.CodeOutcomeUnknown), status.InProgressStatus},
		{"recorded with other inputs", testRaise(ledger.RaiseActive, ""), ledgerError(ledger.CodeRaiseConflict), status.FailedStatus},
		{"refused value", nil, ledgerError(ledger.CodeInvalidInput), status.FailedStatus},
		{"bucket row missing", nil, ledgerError(ledger.CodeBucketRowMissing), status.FailedStatus},
		{"unreadable", nil, undecodable("spec.expiresAt"), status.FailedStatus},
		{"unreadable while active", testRaise(ledger.RaiseActive, ""), undecodable("spec.expiresAt"), status.FailedStatus},
	}
	for _, reason := range []ledger.Reason{
		ledger.ReasonLimitChanged, ledger.ReasonWindowMissed, ledger.ReasonRevoked, ledger.ReasonBucketClosed,
		ledger.ReasonApprovalAlreadyUsed, ledger.ReasonObserveOnly, ledger.ReasonRaisesDisabled, ledger.ReasonPolicyRefused,
	} {
		cases = append(cases, struct {
			name   string
			record *ledger.Raise
			failed *failure
			want   status.Status
		}{"never ran: " + string(reason), testRaise(ledger.RaiseFailed, reason), nil, status.FailedStatus})
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			l := testLease()
			l.Status.ObservedGeneration = -1
			if got := kstatusOf(t, l); got != status.InProgressStatus {
				t.Errorf("freshly created: %s", got)
			}
			l.Status = leaseStatus(l, c.record, c.failed, testNow)
			if got := kstatusOf(t, l); got != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
			wantWhole(t, l.Status.Conditions, leaseConditions, l.Generation)
			ended := c.record != nil && c.record.State.Ended()
			if meta.IsStatusConditionTrue(l.Status.Conditions, v1alpha1.ConditionEnded) != ended ||
				c.failed == nil && ended && meta.FindStatusCondition(l.Status.Conditions, v1alpha1.ConditionEnded).Message == "" {
				t.Errorf("ended %v: %+v", ended, l.Status.Conditions)
			}
			l.Generation++
			if got := kstatusOf(t, l); got != status.InProgressStatus {
				t.Errorf("generation not seen: %s", got)
			}
			l.DeletionTimestamp = ptr.To(metav1.NewTime(testNow))
			if got := kstatusOf(t, l); got != status.TerminatingStatus {
				t.Errorf("deleted: %s", got)
			}
		})
	}
}

// Goal: a limit that somebody else set, or a raised or overdrawn one, blocks no
// sync; what needs a hand has failed; what comes by itself is in progress.
func TestBucketKstatus(t *testing.T) {
	ledgerError := func(code ledger.Code) bucketFinding {
		return bucketFinding{failure: failureOf(ledger.Errorf(code, "words"))}
	}
	foreign := decideBucket(testBucket(func(b *v1alpha1.TokenBucket) { b.Spec.BucketKey = "other/b" }), "", "cluster", false)
	for _, c := range []struct {
		name  string
		found bucketFinding
		want  status.Status
	}{
		{"in sync", bucketFinding{snapshot: testSnapshot()}, status.CurrentStatus},
		{"raised", bucketFinding{snapshot: raisedSnapshot()}, status.CurrentStatus},
		{"over its limit", bucketFinding{snapshot: testSnapshot(func(s *ledger.Snapshot) { s.OverLimitTokens = 10 })}, status.CurrentStatus},
		{"another's limit", bucketFinding{snapshot: testSnapshot(func(s *ledger.Snapshot) { s.BaseLimit = 40 })}, status.CurrentStatus},
		{"ledger away", ledgerError(ledger.CodeUnavailable), status.InProgressStatus},
		{"outcome unknown", ledgerError(ledger.CodeOutcomeUnknown), status.InProgressStatus},
		{"conflict", ledgerError(ledger.CodeOwnerConflict), status.FailedStatus},
		{"row missing", ledgerError(ledger.CodeBucketRowMissing), status.FailedStatus},
		{"refused value", ledgerError(ledger.CodeInvalidInput), status.FailedStatus},
		{"older than the ledger", ledgerError(ledger.CodeStaleGeneration), status.FailedStatus},
		{"broken row", ledgerError(ledger.CodeStateCorrupt), status.FailedStatus},
		{"foreign key", bucketFinding{failure: foreign.refuse}, status.FailedStatus},
		{"unreadable", bucketFinding{failure: undecodable("spec.limit")}, status.FailedStatus},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, before := range []bucketFinding{{}, {snapshot: raisedSnapshot()}} {
				b := testBucket()
				b.Status.ObservedGeneration = -1
				if got := kstatusOf(t, b); got != status.InProgressStatus {
					t.Errorf("freshly created: %s", got)
				}
				if before.snapshot != nil {
					b.Status = bucketStatus(b, before, testNow)
				}
				b.Status = bucketStatus(b, c.found, testNow)
				if got := kstatusOf(t, b); got != c.want {
					t.Errorf("%s, want %s", got, c.want)
				}
				wantWhole(t, b.Status.Conditions, bucketConditions, b.Generation)
				b.Generation++
				if got := kstatusOf(t, b); got != status.InProgressStatus {
					t.Errorf("generation not seen: %s", got)
				}
			}
		})
	}
}

// Goal: a bucket that closes is terminating, all conditions are there, and it
// shows no raise that the closing has ended.
func TestClosingBucketKstatus(t *testing.T) {
	for _, reserved := range []int64{0, 40} {
		b := testBucket(func(b *v1alpha1.TokenBucket) { b.DeletionTimestamp = ptr.To(metav1.NewTime(testNow)) })
		b.Status = bucketStatus(b, bucketFinding{snapshot: raisedSnapshot()}, testNow)
		b.Generation++
		b.Status = bucketStatus(b, bucketFinding{closing: &ledger.Closing{Done: reserved == 0, ReservedTokens: reserved}}, testNow)
		if got := kstatusOf(t, b); got != status.TerminatingStatus {
			t.Errorf("%s", got)
		}
		wantWhole(t, b.Status.Conditions, bucketConditions, b.Generation)
		if b.Status.ActiveRaise != nil || b.Status.Limit != nil || meta.IsStatusConditionTrue(b.Status.Conditions, v1alpha1.ConditionRaised) {
			t.Errorf("a closed bucket shows a raise: %+v", b.Status)
		}
	}
}

// Goal: no message of a bucket changes with its usage, or every reservation would
// be a status write.
func TestMessagesHoldStill(t *testing.T) {
	b := testBucket()
	messages := func(s *ledger.Snapshot) string {
		var all []string
		for _, c := range bucketStatus(b, bucketFinding{snapshot: s}, testNow).Conditions {
			all = append(all, c.Message)
		}
		return strings.Join(all, "\n")
	}
	used := func(tokens int64) func(*ledger.Snapshot) {
		return func(s *ledger.Snapshot) { s.UsedTokens, s.ReservedTokens, s.OverLimitTokens = tokens, tokens/2, tokens }
	}
	if a, b := messages(testSnapshot(used(500))), messages(testSnapshot(used(700))); a != b {
		t.Errorf("messages tell usage:\n%s\n%s", a, b)
	}
	closing := func(reserved int64) string {
		var all []string
		for _, c := range bucketStatus(b, bucketFinding{closing: &ledger.Closing{ReservedTokens: reserved}}, testNow).Conditions {
			all = append(all, c.Message)
		}
		return strings.Join(all, "\n")
	}
	if a, b := closing(5), closing(7); a != b {
		t.Errorf("messages tell usage:\n%s\n%s", a, b)
	}
	for _, record := range []*ledger.Raise{testRaise(ledger.RaisePending, ""), testRaise(ledger.RaiseActive, "")} {
		l := testLease()
		first := leaseStatus(l, record, nil, testNow)
		record.Version++
		l.Status = first
		second := leaseStatus(l, record, nil, testNow.Add(time.Minute))
		for i := range first.Conditions {
			if first.Conditions[i] != second.Conditions[i] {
				t.Errorf("%+v became %+v", first.Conditions[i], second.Conditions[i])
			}
		}
	}
}
