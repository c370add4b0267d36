package e2e_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/token-lease/operator/api/v1alpha1"
)

const (
	enforce     = v1alpha1.RaiseModeEnforce
	observeOnly = v1alpha1.RaiseModeObserveOnly
	disabled    = v1alpha1.RaiseModeDisabled
)

// observing is a raise whose window runs and that changes nothing.
var observing = []want{
	isTrue(v1alpha1.ConditionReady).because(v1alpha1.ReasonObserveOnly), isFalse(v1alpha1.ConditionActive),
	isFalse(v1alpha1.ConditionEnded), isFalse(v1alpha1.ConditionStalled),
}

// modeSwitch is one way through the modes of a bucket.
type modeSwitch struct {
	bucket string
	// before are the modes from the storing of the raise until its start, during
	// those from then until its expiry.
	before, during []v1alpha1.RaiseMode
	// The conditions of the lease when it is stored, started, switched and ended.
	stored, started, switched, ended []want
	// limits are L in turn.
	limits []int64
	// events is what the audit tells of the raise.
	events string
}

var (
	ranOnce  = []int64{normal, temporary, normal}
	neverSet = []int64{normal}
	refused  = neverRan(v1alpha1.ReasonRaisesDisabled)
	observed = neverRan(v1alpha1.ReasonObserveOnly)
)

const (
	ranEvents      = "RaiseStored RaiseActivated RaiseRestored/Expired"
	observedEvents = "RaiseStored RaiseObserved/ObserveOnly RaiseObserved/ObserveOnly"
	disabledEvents = "RaiseStored RaiseFailed/RaisesDisabled"
)

type modes = []v1alpha1.RaiseMode

var modeSwitches = []modeSwitch{
	// While the raise is pending, the last mode before its start decides.
	{"pending-enforce-observe", modes{enforce, observeOnly}, nil, pending, observing, observing, observed, neverSet, observedEvents},
	{"pending-enforce-disable", modes{enforce, disabled}, nil, pending, refused, refused, refused, neverSet, disabledEvents},
	{"pending-observe-enforce", modes{observeOnly, enforce}, nil, pending, active, active, restored, ranOnce, ranEvents},
	{"pending-observe-disable", modes{observeOnly, disabled}, nil, pending, refused, refused, refused, neverSet, disabledEvents},
	{"pending-disable-enforce", modes{enforce, disabled, enforce}, nil, pending, active, active, restored, ranOnce, ranEvents},
	{"pending-disable-observe", modes{enforce, disabled, observeOnly}, nil, pending, observing, observing, observed, neverSet, observedEvents},
	// What is refused when it is stored stays so.
	{"stored-disable-enforce", modes{disabled, enforce}, nil, refused, refused, refused, refused, neverSet, "RaiseFailed/RaisesDisabled"},
	// What is in force is always restored.
	{"active-enforce-observe", modes{enforce}, modes{observeOnly}, pending, active, active, restored, ranOnce, ranEvents},
	{"active-enforce-disable", modes{enforce}, modes{disabled}, pending, active, active, restored, ranOnce, ranEvents},
	{"active-and-back", modes{enforce}, modes{observeOnly, disabled, enforce}, pending, active, active, restored, ranOnce, ranEvents},
	// What is only observed can still start, once, while its window is open.
	{"observed-enforce", modes{observeOnly}, modes{enforce}, pending, observing, active, restored, ranOnce,
		"RaiseStored RaiseObserved/ObserveOnly RaiseActivated RaiseRestored/Expired"},
	{"observed-disable", modes{observeOnly}, modes{disabled}, pending, observing, refused, refused, neverSet,
		"RaiseStored RaiseObserved/ObserveOnly RaiseFailed/RaisesDisabled"},
	{"observed-and-back", modes{observeOnly}, modes{enforce, observeOnly}, pending, observing, active, restored, ranOnce,
		"RaiseStored RaiseObserved/ObserveOnly RaiseActivated RaiseRestored/Expired"},
}

// Goal: the mode of a bucket can be switched at any moment, in every direction. It
// decides whether a raise starts, and never whether one that has started is
// restored; in ObserveOnly the limit is left alone, and the audit says what would
// have been done.
// Method: every way side by side, each on a bucket of its own, while L is watched by
// SQL; the ledger's clock is moved to the start and to the expiry of all raises.
func TestModeSwitched(t *testing.T) {
	t.Parallel()
	in := install(t)
	in.start(t, "manager-a", managerOptions{})
	startsAt, expiresAt := in.after(t, early), in.after(t, late)
	watches := make([]*limitWatch, len(modeSwitches))

	stage(t, "the raises are stored, and the modes switched")
	for _, s := range modeSwitches {
		in.create(t, in.otherBucket(s.bucket, mode(s.before[0])),
			in.otherLease(t, s.bucket, s.bucket, from(startsAt), until(expiresAt)))
	}
	for i, s := range modeSwitches {
		in.waitLease(t, s.bucket, s.stored)
		watches[i] = watchLimit(t, in.db, in.key(s.bucket))
		in.switchMode(t, s.bucket, s.before[1:])
	}
	stage(t, "the start, and the modes are switched again")
	in.db.moveClockTo(t, startsAt)
	for _, s := range modeSwitches {
		in.waitLease(t, s.bucket, s.started)
		in.switchMode(t, s.bucket, s.during)
	}
	for _, s := range modeSwitches {
		in.waitLease(t, s.bucket, s.switched)
	}
	stage(t, "the expiry")
	in.db.moveClockTo(t, expiresAt)
	for i, s := range modeSwitches {
		in.waitLease(t, s.bucket, s.ended)
		in.waitNoFinalizer(t, s.bucket)
		in.waitBucketNamed(t, s.bucket, inSync...)
		if seen := watches[i].end(t); !slices.Equal(seen, s.limits) {
			t.Errorf("%s: the limit was %v in turn, want %v", s.bucket, seen, s.limits)
		}
		in.checkModeAudit(t, s)
	}
}

// switchMode takes a bucket through modes; each has reached the ledger before the
// next.
func (in *installation) switchMode(t *testing.T, bucket string, through modes) {
	t.Helper()
	for _, m := range through {
		in.patch(t, in.otherBucket(bucket), `{"spec": {"raises": {"mode": %q}}}`, m)
		waitFor(t, bucket+" to be in the mode "+string(m), func() (bool, string) {
			got := query[string](t, in.db, "SELECT raise_mode FROM tokenlease.buckets WHERE bucket_key = $1", in.key(bucket))
			return got == string(m), got
		})
	}
}

// checkModeAudit checks what the audit tells of the raise, and that each observation
// says what would have been done.
func (in *installation) checkModeAudit(t *testing.T, s modeSwitch) {
	t.Helper()
	raise := in.db.raise(t, in.namespace, s.bucket)
	var events, operations []string
	for _, r := range in.db.audit(t, in.key(s.bucket)) {
		if r.text("raise_id") == "" {
			continue // about the bucket
		}
		event := r.text("event")
		if reason := r.text("reason"); reason != "" {
			event += "/" + reason
		}
		events = append(events, event)
		if r.text("event") != "RaiseObserved" {
			continue
		}
		operations = append(operations, r.text("operation_id"))
		if r.text("outcome") != "observed" || r.text("requested_limit_tokens") != "300000" ||
			r.text("prior_limit_tokens") != "120000" || r.text("effective_limit_tokens") != "120000" {
			t.Errorf("%s: observed as %v", s.bucket, r)
		}
	}
	if got := strings.Join(events, " "); got != s.events {
		t.Errorf("%s: the audit tells %q, want %q", s.bucket, got, s.events)
	}
	id := raise.text("raise_id")
	if want := []string{id + ":observe-activate", id + ":observe-restore"}[:len(operations)]; !slices.Equal(operations, want) {
		t.Errorf("%s: observed under %v, want %v", s.bucket, operations, want)
	}
	// Only a raise that was to be enforced at some time spends its approval.
	spent := query[int64](t, in.db, "SELECT count(*) FROM tokenlease.approvals WHERE raise_id = $1", id)
	if s.events == observedEvents && spent != 0 {
		t.Errorf("%s: an observed raise has spent its approval", s.bucket)
	}
	if strings.Contains(s.events, "RaiseActivated") && spent != 1 {
		t.Errorf("%s: a raise ran and its approval was spent %d times", s.bucket, spent)
	}
}
