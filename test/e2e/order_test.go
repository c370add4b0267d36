package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/internal/ledger"
)

// otherBucket is a bucket like the one of the seed story, under another name.
func (in *installation) otherBucket(name string, changes ...func(*v1alpha1.TokenBucket)) *v1alpha1.TokenBucket {
	return in.bucket(append([]func(*v1alpha1.TokenBucket){named[*v1alpha1.TokenBucket](name)}, changes...)...)
}

// otherLease is a lease like that of the seed story, under another name, for
// another bucket, with an approval of its own.
func (in *installation) otherLease(t *testing.T, bucket, name string, changes ...func(*v1alpha1.TemporaryLimitLease)) *v1alpha1.TemporaryLimitLease {
	t.Helper()
	return in.lease(t, append([]func(*v1alpha1.TemporaryLimitLease){
		named[*v1alpha1.TemporaryLimitLease](name), on(bucket), approvedBy(v1alpha1.Identifier("CHG-" + name)),
	}, changes...)...)
}

// overlap is two raises on one bucket that want to be in force at one time.
type overlap struct {
	bucket string
	// first starts at once, second is stored while first is in force.
	firstEnds, secondStarts, secondEnds time.Duration
	// deleted is the lease that is deleted while first is in force: "first",
	// "second" or none.
	deleted string
	// then are the conditions of both after the earliest end.
	firstThen, secondThen []want
	// limits are L in turn, and ends those of both in the end.
	limits              []int64
	firstEnd, secondEnd []want
}

var (
	revokedActive = []want{isTrue(v1alpha1.ConditionRestored).because(v1alpha1.ReasonRevoked), isTrue(v1alpha1.ConditionEnded)}
	// gone stands for a lease that was deleted.
	gone []want
)

const (
	early = 30 * time.Minute
	late  = 60 * time.Minute
)

var overlaps = []overlap{
	{
		bucket: "first-ends-first", firstEnds: early, secondEnds: late,
		firstThen: restored, secondThen: active, firstEnd: restored, secondEnd: restored,
		limits: []int64{temporary, secondTemporary, normal},
	},
	{
		bucket: "back-to-back", firstEnds: early, secondStarts: early, secondEnds: late,
		firstThen: restored, secondThen: active, firstEnd: restored, secondEnd: restored,
		limits: []int64{temporary, secondTemporary, normal},
	},
	{
		bucket: "window-closes", firstEnds: late, secondEnds: early,
		firstThen: active, secondThen: neverRan(v1alpha1.ReasonWindowMissed), firstEnd: restored, secondEnd: neverRan(v1alpha1.ReasonWindowMissed),
		limits: []int64{temporary, normal},
	},
	{
		bucket: "same-second", firstEnds: early, secondEnds: early,
		firstThen: restored, secondThen: neverRan(v1alpha1.ReasonWindowMissed), firstEnd: restored, secondEnd: neverRan(v1alpha1.ReasonWindowMissed),
		limits: []int64{temporary, normal},
	},
	{
		bucket: "active-deleted", firstEnds: late, secondEnds: late, deleted: "first",
		firstThen: gone, secondThen: active, firstEnd: gone, secondEnd: restored,
		limits: []int64{temporary, secondTemporary, normal},
	},
	{
		bucket: "waiting-deleted", firstEnds: late, secondEnds: late, deleted: "second",
		firstThen: active, secondThen: gone, firstEnd: restored, secondEnd: gone,
		limits: []int64{temporary, normal},
	},
}

func (o overlap) lease(which string) string { return o.bucket + "-" + which }

// Goal: of raises that overlap one is in force at a time, in every order of ending;
// the limit is the normal one when the last has ended, and where one hands over to
// the next there is no moment at the normal limit between them.
// Method: all orders side by side, each on a bucket of its own, while L is watched
// by SQL; the ledger's clock is moved from one end to the next.
func TestOverlappingRaises(t *testing.T) {
	t.Parallel()
	in := install(t)
	in.start(t, "manager-a", managerOptions{})
	begin := in.after(t, 0)
	watches := make([]*limitWatch, len(overlaps))

	stage(t, "one is in force, the other waits")
	for _, o := range overlaps {
		in.create(t, in.otherBucket(o.bucket),
			in.otherLease(t, o.bucket, o.lease("first"), until(begin.Add(o.firstEnds))))
	}
	for i, o := range overlaps {
		in.waitLease(t, o.lease("first"), active)
		watches[i] = watchLimit(t, in.db, in.key(o.bucket))
		second, waits := in.otherLease(t, o.bucket, o.lease("second"), raisedTo(secondTemporary), until(begin.Add(o.secondEnds))), waiting
		if o.secondStarts > 0 {
			from(begin.Add(o.secondStarts))(second)
			waits = pending
		}
		in.create(t, second)
		in.waitLease(t, o.lease("second"), waits)
		in.waitBucketNamed(t, o.bucket, isTrue(v1alpha1.ConditionRaised), isTrue(v1alpha1.ConditionReady))
		if o.deleted != "" {
			deleted := in.otherLease(t, o.bucket, o.lease(o.deleted))
			in.delete(t, deleted)
			in.waitGone(t, deleted)
		}
	}

	stage(t, "the earlier end")
	in.db.moveClockTo(t, begin.Add(early))
	for _, o := range overlaps {
		in.wantBoth(t, o, o.firstThen, o.secondThen)
	}
	stage(t, "the later end")
	in.db.moveClockTo(t, begin.Add(late))
	for i, o := range overlaps {
		in.wantBoth(t, o, o.firstEnd, o.secondEnd)
		in.waitBucketNamed(t, o.bucket, inSync...)
		if seen := watches[i].end(t); !slices.Equal(seen, o.limits) {
			t.Errorf("%s: the limit was %v in turn, want %v", o.bucket, seen, o.limits)
		}
		in.checkHandOver(t, in.key(o.bucket), len(o.limits)-1)
	}
}

func (in *installation) wantBoth(t *testing.T, o overlap, first, second []want) {
	t.Helper()
	for which, wanted := range map[string][]want{"first": first, "second": second} {
		if wanted != nil {
			in.waitLease(t, o.lease(which), wanted)
		}
	}
}

// checkHandOver checks that so many raises ran on a bucket one after the other, each
// activation but the first in the transaction of the restore before it, and that a
// wait was told once.
func (in *installation) checkHandOver(t *testing.T, key string, ran int) {
	t.Helper()
	rows := in.db.rows(t, `
		SELECT event, xmin::text AS written_by, lag(event) OVER w AS before, (lag(xmin::text) OVER w) AS before_written_by
		FROM tokenlease.audit WHERE bucket_key = '`+key+`' WINDOW w AS (ORDER BY sequence) ORDER BY sequence`)
	count := map[string]int{}
	for _, r := range rows {
		event := r.text("event")
		count[event]++
		if event == "RaiseActivated" && count[event] > 1 &&
			(r.text("before") != "RaiseRestored" || r.text("written_by") != r.text("before_written_by")) {
			t.Errorf("%s: activated after %s, not in one transaction with a restore: %v", key, r.text("before"), rows)
		}
	}
	if count["RaiseActivated"] != ran || count["RaiseRestored"] != ran || count["RaiseWaiting"] > 1 {
		t.Errorf("%s: events %v, want %d raises that ran and a wait told once at most", key, count, ran)
	}
}

// Goal: leases that arrive in one apply, for the same instant, do not both raise the
// limit, whichever comes first; the other one has its turn or says that it had none.
func TestRaisesOfOneInstant(t *testing.T) {
	t.Parallel()
	in := install(t)
	in.start(t, "manager-a", managerOptions{})
	startsAt := in.after(t, 0)
	manifest := manifestOf(t, in.bucket(),
		in.otherLease(t, bucketName, "short", from(startsAt), until(startsAt.Add(early))),
		in.otherLease(t, bucketName, "long", from(startsAt), until(startsAt.Add(late))))
	in.mustKubectl(t, manifest, "apply")
	var first, second string
	waitFor(t, "one raise in force and one that waits", func() (bool, string) {
		rows := in.db.rows(t, "SELECT name, state, reason FROM tokenlease.raises ORDER BY state")
		if len(rows) != 2 || rows[0].text("state") != "active" || rows[1].text("reason") != "BucketAlreadyRaised" {
			return false, fmt.Sprint(rows)
		}
		first, second = rows[0].text("name"), rows[1].text("name")
		return true, ""
	})
	in.waitLease(t, first, active)
	in.waitLease(t, second, waiting)

	in.db.moveClockTo(t, startsAt.Add(early))
	if first == "short" {
		in.waitLease(t, "short", restored)
		in.waitLease(t, "long", active)
	} else {
		in.waitLease(t, "short", neverRan(v1alpha1.ReasonWindowMissed))
		in.waitLease(t, "long", active)
	}
	in.db.moveClockTo(t, startsAt.Add(late))
	in.waitLease(t, "long", restored)
	in.waitBucket(t, inSync...)
}

// Goal: a caller that reserves again and again what only a raised limit has room for
// is never refused while one raise hands over to the next, be it that the next one
// was waiting or that it begins where the first one ends.
func TestHandOverUnderLoad(t *testing.T) {
	t.Parallel()
	in := install(t)
	in.start(t, "manager-a", managerOptions{})
	begin := in.after(t, 0)
	buckets := []string{"waiting", "back-to-back"}
	for _, bucket := range buckets {
		in.create(t, in.otherBucket(bucket), in.otherLease(t, bucket, bucket+"-first", until(begin.Add(early))))
		in.waitLease(t, bucket+"-first", active)
	}
	in.create(t,
		in.otherLease(t, "waiting", "waiting-second", until(begin.Add(late))),
		in.otherLease(t, "back-to-back", "back-to-back-second", from(begin.Add(early)), until(begin.Add(late))))
	in.waitLease(t, "waiting-second", waiting)
	in.waitLease(t, "back-to-back-second", pending)

	callers := make([]*caller, len(buckets))
	for i, bucket := range buckets {
		callers[i] = in.call(t, in.key(bucket), normal+1)
		callers[i].waitMore(t)
	}
	in.db.moveClockTo(t, begin.Add(early))
	for i, bucket := range buckets {
		in.waitLease(t, bucket+"-second", active)
		in.waitLease(t, bucket+"-first", restored)
		callers[i].waitMore(t)
		if err := callers[i].end(); err != nil {
			t.Errorf("%s: a caller was refused while one raise handed over to the next: %v", bucket, err)
		}
	}
	in.db.moveClockTo(t, begin.Add(late))
	for _, bucket := range buckets {
		_, err := in.db.ledger.Reserve(call(t), ledger.Reserve{Key: in.key(bucket), RequestKey: "late", Fingerprint: "late", Tokens: normal + 1})
		if !ledger.HasCode(err, ledger.CodeBudgetExceeded) {
			t.Errorf("%s: reserve after the last raise: %v, want %s", bucket, err, ledger.CodeBudgetExceeded)
		}
		in.waitLease(t, bucket+"-second", restored)
		in.db.counters(t, in.key(bucket))
	}
}

// caller reserves and releases one amount again and again.
type caller struct {
	stop     chan struct{}
	running  sync.WaitGroup
	admitted atomic.Int64
	refusal  error
}

// call starts a caller. It ends at the first refusal; that the ledger is busy is
// none.
func (in *installation) call(t *testing.T, key string, tokens int64) *caller {
	t.Helper()
	c := &caller{stop: make(chan struct{})}
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(func() { cancel(); c.running.Wait() })
	c.running.Go(func() {
		for i := 0; c.refusal == nil && ctx.Err() == nil; i++ {
			select {
			case <-c.stop:
				return
			default:
			}
			c.refusal = reserveAndRelease(ctx, in.db.ledger, key, "call-"+strconv.Itoa(i), tokens)
			c.admitted.Add(1)
		}
	})
	return c
}

func reserveAndRelease(ctx context.Context, l *ledger.Ledger, key, requestKey string, tokens int64) error {
	answer, err := l.Reserve(ctx, ledger.Reserve{Key: key, RequestKey: requestKey, Fingerprint: requestKey, Tokens: tokens})
	if err == nil {
		_, err = l.Release(ctx, ledger.Release{Key: key, LeaseID: answer.Lease.ID})
	}
	return err
}

// waitMore waits until the caller has had some more answers, or a refusal.
func (c *caller) waitMore(t *testing.T) {
	t.Helper()
	enough := c.admitted.Load() + 20
	done := make(chan struct{})
	go func() { c.running.Wait(); close(done) }()
	waitFor(t, "the caller to reserve some more", func() (bool, string) {
		select {
		case <-done:
			return true, ""
		default:
			n := c.admitted.Load()
			return n >= enough, strconv.FormatInt(n, 10)
		}
	})
}

func (c *caller) end() error {
	close(c.stop)
	c.running.Wait()
	if errors.Is(c.refusal, context.Canceled) {
		return nil
	}
	return c.refusal
}
