package controller

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/internal/ledger"
)

func testSnapshot(change ...func(*ledger.Snapshot)) *ledger.Snapshot {
	s := &ledger.Snapshot{
		Key: "ns/b", Limit: 100, BaseLimit: 100, DeclaredLimit: ptr.To[int64](100), DeclaredGeneration: 3,
		UsedTokens: 30, ReservedTokens: 20, AvailableTokens: 50, Revision: 1,
	}
	for _, f := range change {
		f(s)
	}
	return s
}

func raisedSnapshot() *ledger.Snapshot {
	return testSnapshot(func(s *ledger.Snapshot) {
		s.Limit, s.AvailableTokens = 300, 250
		s.ActiveRaise = &ledger.Raise{Name: "l", TemporaryLimit: 300, ExpiresAt: testNow.Add(time.Hour + 500*time.Millisecond)}
	})
}

// summary lists the conditions as Type=Status/Reason, with + for True.
func summary(conditions []metav1.Condition, kinds ...string) string {
	var parts []string
	for _, kind := range kinds {
		text := kind + " absent"
		if c := meta.FindStatusCondition(conditions, kind); c != nil {
			text = kind + map[metav1.ConditionStatus]string{"True": "+", "False": "-", "Unknown": "?"}[c.Status] + c.Reason
		}
		parts = append(parts, text)
	}
	return strings.Join(parts, " ")
}

// Goal: the conditions tell the state, and change only with it.
func TestBucketStatus(t *testing.T) {
	ledgerError := func(code ledger.Code) bucketFinding {
		return bucketFinding{failure: failureOf(ledger.Errorf(code, "words"))}
	}
	for _, c := range []struct {
		name  string
		found bucketFinding
		want  string
	}{
		{"in sync", bucketFinding{snapshot: testSnapshot()},
			"Ready+Ready Reconciling-Ready Stalled-Ready LimitInSync+LimitApplied Raised-NotRaised OverLimit-WithinLimit"},
		{"raised", bucketFinding{snapshot: raisedSnapshot()},
			"Ready+Ready Reconciling-Ready Stalled-Ready LimitInSync+Raised Raised+Raised OverLimit-WithinLimit"},
		{"another's limit", bucketFinding{snapshot: testSnapshot(func(s *ledger.Snapshot) { s.Limit, s.BaseLimit = 40, 40; s.OverLimitTokens = 10 })},
			"Ready+Ready Reconciling-Ready Stalled-Ready LimitInSync-LimitChanged Raised-NotRaised OverLimit+OverLimit"},
		{"conflict", ledgerError(ledger.CodeOwnerConflict),
			"Ready-Conflict Reconciling-Conflict Stalled+Conflict LimitInSync?Conflict Raised?Conflict OverLimit?Conflict"},
		{"row missing", ledgerError(ledger.CodeBucketRowMissing),
			"Ready-BucketRowMissing Reconciling-BucketRowMissing Stalled+BucketRowMissing LimitInSync?BucketRowMissing Raised?BucketRowMissing OverLimit?BucketRowMissing"},
		{"refused value", ledgerError(ledger.CodeInvalidInput),
			"Ready-InvalidSpec Reconciling-InvalidSpec Stalled+InvalidSpec LimitInSync?InvalidSpec Raised?InvalidSpec OverLimit?InvalidSpec"},
		{"ledger away", ledgerError(ledger.CodeUnavailable),
			"Ready?LedgerUnavailable Reconciling+LedgerUnavailable Stalled-LedgerUnavailable LimitInSync?LedgerUnavailable Raised?LedgerUnavailable OverLimit?LedgerUnavailable"},
		{"broken row", ledgerError(ledger.CodeStateCorrupt),
			"Ready-InternalError Reconciling-InternalError Stalled+InternalError LimitInSync?InternalError Raised?InternalError OverLimit?InternalError"},
		{"closing", bucketFinding{closing: &ledger.Closing{ReservedTokens: 7}},
			"Ready-ReservationsOpen Reconciling+ReservationsOpen Stalled-ReservationsOpen LimitInSync?Deleting Raised-NotRaised OverLimit?Deleting"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := testBucket()
			b.Status = bucketStatus(b, c.found, testNow)
			got := summary(b.Status.Conditions, "Ready", "Reconciling", "Stalled", "LimitInSync", "Raised", "OverLimit")
			if got != c.want {
				t.Errorf("conditions\n%s, want\n%s", got, c.want)
			}
			for _, condition := range b.Status.Conditions {
				if condition.ObservedGeneration != 3 || !condition.LastTransitionTime.Time.Equal(testNow) {
					t.Errorf("condition %+v", condition)
				}
			}
			if again := bucketStatus(b, c.found, testNow.Add(time.Hour)); !equality.Semantic.DeepEqual(again, b.Status) {
				t.Errorf("the same finding later changed the status to %+v", again)
			}
		})
	}
}

// Goal: an outage changes no figure, and does not pass the new generation off as
// seen; a row that is gone leaves the proof that it existed.
func TestBucketStatusKeepsWhatIsKnown(t *testing.T) {
	b := testBucket()
	b.Status = bucketStatus(b, bucketFinding{snapshot: raisedSnapshot()}, testNow)
	if got := b.Status; *got.Limit != 300 || *got.DeclaredLimit != 100 || *got.UsedPercent != 10 ||
		*got.AvailableTokens != 250 || got.ActiveRaise.ExpiresAt.Nanosecond() != 0 {
		t.Errorf("status %+v", got)
	}
	before := *b.Status.DeepCopy()
	b.Generation = 4
	away := bucketStatus(b, bucketFinding{failure: failureOf(errors.New("a password in a cause"))}, testNow)
	if away.ObservedGeneration != 3 {
		t.Errorf("observed generation %d while the ledger is away, want 3", away.ObservedGeneration)
	}
	for _, c := range away.Conditions {
		if strings.Contains(c.Message, "password") {
			t.Errorf("the message tells a cause: %q", c.Message)
		}
	}
	away.Conditions, away.ObservedGeneration = before.Conditions, before.ObservedGeneration
	if !equality.Semantic.DeepEqual(away, before) {
		t.Errorf("figures changed while the ledger is away: %+v", away)
	}
	gone := bucketStatus(b, bucketFinding{failure: failureOf(ledger.Errorf(ledger.CodeBucketRowMissing, "gone"))}, testNow)
	if gone.Limit != nil || gone.UsedTokens != nil || gone.ActiveRaise != nil || ptr.Deref(gone.DeclaredLimit, 0) != 100 {
		t.Errorf("a row that is gone leaves %+v", gone)
	}
}

// Goal: only usage is held back; a limit, a condition or a raise never is.
func TestOnlyUsageDiffers(t *testing.T) {
	b := testBucket()
	before := bucketStatus(b, bucketFinding{snapshot: testSnapshot()}, testNow)
	b.Status = before
	for _, c := range []struct {
		name   string
		change func(*ledger.Snapshot)
		want   bool
	}{
		{"nothing", func(*ledger.Snapshot) {}, false},
		{"usage", func(s *ledger.Snapshot) { s.UsedTokens, s.ReservedTokens, s.AvailableTokens = 50, 0, 50 }, true},
		{"usage over the limit", func(s *ledger.Snapshot) { s.UsedTokens, s.OverLimitTokens = 101, 21 }, false},
		{"limit", func(s *ledger.Snapshot) { s.Limit, s.BaseLimit = 90, 90 }, false},
		{"usage and pending", func(s *ledger.Snapshot) { s.UsedTokens, s.PendingRaises = 50, 1 }, false},
	} {
		after := bucketStatus(b, bucketFinding{snapshot: testSnapshot(c.change)}, testNow)
		if got := onlyUsageDiffers(&before, &after); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
	fresh := v1alpha1.TokenBucketStatus{ObservedGeneration: -1}
	if onlyUsageDiffers(&fresh, &before) {
		t.Error("the first status was held back")
	}
}

func recorded(records, maximum int64) *ledger.Snapshot {
	return testSnapshot(func(s *ledger.Snapshot) { s.LeaseRecords, s.Settings.MaxRecords = records, maximum })
}

// Goal: each transition is told once, a repetition never.
func TestBucketNotices(t *testing.T) {
	b := testBucket()
	steps := []struct {
		name     string
		snapshot *ledger.Snapshot
		want     []string
	}{
		{"first", testSnapshot(), []string{v1alpha1.EventBucketOpened}},
		{"again", testSnapshot(), nil},
		{"raised", raisedSnapshot(), nil},
		{"declared", testSnapshot(func(s *ledger.Snapshot) {
			s.Limit, s.BaseLimit, s.DeclaredLimit = 40, 40, ptr.To[int64](40)
			s.OverLimitTokens = 10
		}),
			[]string{v1alpha1.EventDeclaredLimitApplied, v1alpha1.EventOverLimit}},
		{"another hand", testSnapshot(func(s *ledger.Snapshot) { s.DeclaredLimit = ptr.To[int64](40) }),
			[]string{v1alpha1.EventLimitConflict, v1alpha1.EventWithinLimit}},
		{"half the records", recorded(5, 10), []string{v1alpha1.EventDeclaredLimitApplied}},
		{"nearly all of them", recorded(9, 10), []string{v1alpha1.EventNearRecordLimit}},
		{"all of them", recorded(10, 10), nil},
		{"after purging", recorded(2, 10), nil},
		{"nearly all again", recorded(9, 10), []string{v1alpha1.EventNearRecordLimit}},
		{"without a bound", recorded(1000, 0), nil},
	}
	for _, step := range steps {
		found := bucketFinding{snapshot: step.snapshot}
		before := b.Status
		b.Status = bucketStatus(b, found, testNow)
		var got []string
		for _, n := range bucketNotices(&before, &b.Status, found) {
			got = append(got, n.reason)
		}
		if !slices.Equal(got, step.want) {
			t.Errorf("%s: told %v, want %v", step.name, got, step.want)
		}
	}
	reopened := bucketFinding{snapshot: testSnapshot(func(s *ledger.Snapshot) { s.Revision = 9 })}
	if got := bucketNotices(&v1alpha1.TokenBucketStatus{}, &b.Status, reopened); got[0].reason != v1alpha1.EventBucketReopened {
		t.Errorf("a bucket with a history: %v", got)
	}
}

// Goal: no text outgrows a condition, and none is cut within a character.
func TestBounded(t *testing.T) {
	if got := bounded("short"); got != "short" {
		t.Errorf("%q", got)
	}
	for length := range 8 {
		got := bounded(strings.Repeat("x", length) + strings.Repeat("ü", v1alpha1.MaxConditionMessageBytes))
		if len(got) >= v1alpha1.MaxConditionMessageBytes || strings.ToValidUTF8(got, "") != got || !strings.HasSuffix(got, "...") {
			t.Errorf("%d bytes, valid %v", len(got), strings.ToValidUTF8(got, "") == got)
		}
	}
}

// Goal: anything may stand in the annotation; what reaches the audit is one
// trimmed line within its bounds.
func TestActorOf(t *testing.T) {
	for annotation, want := range map[string]string{
		"":                                      "unknown",
		" \t\uFEFF ":                            "unknown",
		" Ada\nL. ":                             "Ada L.",
		"a\x00b\x7fc\xff":                       "a b c?",
		strings.Repeat("x", 600):                strings.Repeat("x", 512),
		strings.Repeat("x", 511) + "\U0001F600": strings.Repeat("x", 511),
		strings.Repeat("x", 511) + " y":         strings.Repeat("x", 511),
		strings.Repeat("\U0001F600", 300):       strings.Repeat("\U0001F600", 256),
	} {
		b := testBucket(func(b *v1alpha1.TokenBucket) {
			b.Annotations = map[string]string{v1alpha1.RequestedByAnnotation: annotation}
		})
		if got := actorOf(b); got != want {
			t.Errorf("%q became %q, want %q", annotation, got, want)
		}
	}
}
