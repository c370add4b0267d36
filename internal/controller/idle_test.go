package controller_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/internal/ledger"
)

const (
	idleBuckets = 200
	// idlePolls is how many looks of the mirror make an idle time.
	idlePolls = 40
	idleUsage = time.Second
)

// writes counts the status writes of a manager, by object.
type writes struct {
	mutex sync.Mutex
	of    map[string]int
}

func (c *writes) hook(s *settings) {
	s.hooks.SubResourcePatch = func(ctx context.Context, to client.Client, subresource string, object client.Object, patch client.Patch, options ...client.SubResourcePatchOption) error {
		err := to.SubResource(subresource).Patch(ctx, object, patch, options...)
		c.mutex.Lock()
		defer c.mutex.Unlock()
		c.of[object.GetNamespace()+"/"+object.GetName()]++
		return err
	}
}

func (c *writes) counts() map[string]int {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	return maps.Clone(c.of)
}

// idleLease is a kind of leases that have nothing more to do, on bucket b000 to
// b049: one of each kind in turn.
type idleLease struct {
	name, bucket string
	want         func(*v1alpha1.TemporaryLimitLease) bool
	change       func(*v1alpha1.TemporaryLimitLease)
}

func idleLeases(w *world) []idleLease {
	in := func(hours int) metav1.Time { return metav1.NewTime(w.now().Add(time.Duration(hours) * time.Hour)) }
	has := func(state v1alpha1.RaiseState, reason string) func(*v1alpha1.TemporaryLimitLease) bool {
		return func(l *v1alpha1.TemporaryLimitLease) bool {
			return l.Status.State == state && reasonIs(l.Status.Conditions, v1alpha1.ConditionReady, reason)
		}
	}
	var all []idleLease
	for i := range 5 {
		add := func(kind, bucket string, want func(*v1alpha1.TemporaryLimitLease) bool, change func(*v1alpha1.TemporaryLimitLease)) {
			all = append(all, idleLease{fmt.Sprintf("%s-%d", kind, i), bucket, want, change})
		}
		own := func(kind int) string { return fmt.Sprintf("b%03d", 10*i+kind) }
		add("a-active", own(0), has(v1alpha1.RaiseStateActive, v1alpha1.ReasonActive), func(*v1alpha1.TemporaryLimitLease) {})
		add("waits-turn", own(0), has(v1alpha1.RaiseStatePending, v1alpha1.ReasonBucketAlreadyRaised), func(*v1alpha1.TemporaryLimitLease) {})
		add("later", own(1), has(v1alpha1.RaiseStatePending, v1alpha1.ReasonPending), func(l *v1alpha1.TemporaryLimitLease) { l.Spec.StartsAt = ptr.To(in(9)) })
		add("restored", own(2), has(v1alpha1.RaiseStateRestored, v1alpha1.ReasonRestored), func(l *v1alpha1.TemporaryLimitLease) { l.Spec.ExpiresAt = in(1) })
		add("missed", own(3), has(v1alpha1.RaiseStateFailed, v1alpha1.ReasonWindowMissed), func(l *v1alpha1.TemporaryLimitLease) { l.Spec.ExpiresAt = in(-1) })
		add("mismatch", own(4), has(v1alpha1.RaiseStateFailed, v1alpha1.ReasonLimitChanged), func(l *v1alpha1.TemporaryLimitLease) { l.Spec.NormalLimit = normal + 1 })
		add("changed", own(5), has(v1alpha1.RaiseStateFailed, v1alpha1.ReasonLimitChanged), func(*v1alpha1.TemporaryLimitLease) {})
		add("refused", own(6), has(v1alpha1.RaiseStateFailed, v1alpha1.ReasonPolicyRefused), func(l *v1alpha1.TemporaryLimitLease) { l.Spec.TemporaryLimit = 1 << 40 })
		add("observed", "observe", has(v1alpha1.RaiseStatePending, v1alpha1.ReasonObserveOnly), func(*v1alpha1.TemporaryLimitLease) {})
		add("no-bucket", "none", has(v1alpha1.RaiseStatePending, v1alpha1.ReasonBucketNotFound), func(*v1alpha1.TemporaryLimitLease) {})
	}
	return all
}

// Goal: while nothing happens, nothing is written: no object, no row, no audit;
// nor is any decision repeated. Traffic on one bucket is shown on that bucket
// alone, at most once in the usage interval. Method: counts of polls, not
// time.
func TestIdleAtScale(t *testing.T) {
	written := &writes{of: map[string]int{}}
	w := newWorld(t, written.hook, func(s *settings) {
		s.options.UsageInterval = idleUsage
		s.options.OrphanInterval = 100 * time.Millisecond
	})
	w.createIdle()
	versions := w.eventuallyIdle()
	served, before := w.store.served.Load(), written.counts()
	w.afterPolls(idlePolls)
	if now := w.versions(); !maps.Equal(now, versions) {
		t.Errorf("written while idle: %s", difference(versions, now))
	}
	if n := w.store.served.Load() - served; n != 0 {
		t.Errorf("%d requests to the ledger while idle", n)
	}
	if now := written.counts(); !maps.Equal(now, before) {
		t.Errorf("status writes while idle: %s", difference(before, now))
	}

	busy, started := "busy", time.Now()
	for i := 0; written.counts()[w.key(busy)] < before[w.key(busy)]+3; i++ {
		if time.Since(started) > waitTimeout {
			t.Fatal("the usage is not shown")
		}
		w.commit(w.key(busy), w.reserve(w.key(busy), fmt.Sprint(i), 1), 1)
		w.afterPolls(1)
	}
	now := written.counts()
	most := int(time.Since(started)/idleUsage) + 1
	if n := now[w.key(busy)] - before[w.key(busy)]; n > most {
		t.Errorf("%d status writes of a busy bucket, want at most %d", n, most)
	}
	now[w.key(busy)] = before[w.key(busy)]
	if !maps.Equal(now, before) {
		t.Errorf("traffic on one bucket wrote others: %s", difference(before, now))
	}
}

// createIdle creates the buckets and leases and waits until each lease is in its
// state.
func (w *world) createIdle() {
	w.Helper()
	long := func(b *v1alpha1.TokenBucket) { b.Spec.Raises.MaxDurationSeconds = 24 * 60 * 60 }
	for i := range idleBuckets - 2 {
		w.createBucket(fmt.Sprintf("b%03d", i), long)
	}
	w.createBucket("observe", long, func(b *v1alpha1.TokenBucket) { b.Spec.Raises.Mode = v1alpha1.RaiseModeObserveOnly })
	w.createBucket("busy", func(b *v1alpha1.TokenBucket) { b.Spec.Limit = 1 << 40 })
	leases := idleLeases(w)
	for _, l := range leases {
		w.createLease(l.name, l.bucket, func(lease *v1alpha1.TemporaryLimitLease) {
			lease.Spec.ExpiresAt = metav1.NewTime(w.now().Add(10 * time.Hour))
			l.change(lease)
		})
		switch {
		case strings.HasPrefix(l.name, "a-active"):
			w.leaseIs(l.name, "is active", l.want)
		case strings.HasPrefix(l.name, "changed"):
			w.leaseState(l.name, v1alpha1.RaiseStateActive)
			w.must(w.store.OverrideLimit(w.key(l.bucket), 2*normal))
		}
	}
	for _, l := range leases {
		if strings.HasPrefix(l.name, "restored") {
			w.leaseState(l.name, v1alpha1.RaiseStateActive)
		}
	}
	w.leaseIs("mismatch-4", "waits for its limit", func(l *v1alpha1.TemporaryLimitLease) bool {
		return reasonIs(l.Status.Conditions, v1alpha1.ConditionReady, v1alpha1.ReasonLimitMismatch)
	})
	w.advance(2 * time.Hour)
	for _, l := range leases {
		w.leaseIs(l.name, "is in its state", l.want)
	}
}

// versions are the versions of all objects, and of all rows with their audit.
func (w *world) versions() map[string]int {
	w.Helper()
	versions := map[string]int{}
	number := func(version string) int {
		var n int
		_, err := fmt.Sscan(version, &n)
		w.must(err)
		return n
	}
	var buckets v1alpha1.TokenBucketList
	var leases v1alpha1.TemporaryLimitLeaseList
	w.must(kube.List(w.ctx, &buckets, client.InNamespace(w.namespace)))
	w.must(kube.List(w.ctx, &leases, client.InNamespace(w.namespace)))
	for _, l := range leases.Items {
		versions["lease "+l.Name] = number(l.ResourceVersion)
	}
	known := make([]ledger.KnownRevision, len(buckets.Items))
	for i, b := range buckets.Items {
		versions["bucket "+b.Name] = number(b.ResourceVersion)
		known[i].Key = w.key(b.Name)
	}
	changes, err := w.store.Store.Changes(w.ctx, known)
	w.must(err)
	for _, c := range changes {
		if c.Snapshot != nil {
			versions["revision of "+c.Key] = int(c.Snapshot.Revision)
		}
		rows, err := w.store.Audit(w.ctx, c.Key, 0, 1000)
		w.must(err)
		versions["audit of "+c.Key] = len(rows)
	}
	return versions
}

// eventuallyIdle waits until two looks that lie many polls apart agree.
func (w *world) eventuallyIdle() map[string]int {
	w.Helper()
	last := w.versions()
	w.eventually("nothing is written any more", func() (string, bool) {
		w.afterPolls(idlePolls)
		before := last
		last = w.versions()
		return difference(before, last), maps.Equal(before, last)
	})
	return last
}

// afterPolls waits until the mirror has looked so many times.
func (w *world) afterPolls(count int64) {
	w.Helper()
	target := w.store.polls.Load() + count
	w.eventually("the mirror has looked", func() (string, bool) {
		return fmt.Sprint(w.store.polls.Load(), " of ", target), w.store.polls.Load() >= target
	})
}

func difference(before, after map[string]int) string {
	var lines []string
	for _, name := range slices.Sorted(maps.Keys(after)) {
		if before[name] != after[name] {
			lines = append(lines, fmt.Sprintf("%s: %d became %d", name, before[name], after[name]))
		}
	}
	return strings.Join(lines, "\n")
}
