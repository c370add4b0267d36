package controller

import (
	"context"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/token-lease/operator/internal/ledger"
)

const (
	mirrorChunk   = 500
	mirrorTimeout = 10 * time.Second
	mirrorJitter  = 0.2
	// mirrorLongestPause bounds the back-off, so that recovery is prompt.
	mirrorLongestPause = 5 * time.Second
)

// mirror notices what changed in the ledger, by one query for many buckets, and
// wakes the controllers for just those; when the ledger stops answering it wakes
// them all, so that conditions show it. A bucket's status is made of what that one
// query found. It decides nothing: a pass that has anything to change asks the
// ledger itself.
type mirror struct {
	cache   cache.Cache
	options Options
	buckets *queue
	leases  *queue
	// snapshots hands what the query found to the controller that is woken for it.
	snapshots *perObject[*ledger.Snapshot]
	clock     func() time.Time
	known     map[string]*mirrored
	// outage: the ledger does not answer, and the controllers have been told.
	outage bool
}

// mirrored is a bucket as the mirror last saw it.
type mirrored struct {
	revision  int64
	createdAt time.Time
	snapshot  *ledger.Snapshot
	shape     shape
	// toldAt is when the controllers were last woken.
	toldAt time.Time
	// usage: figures have changed since then, or the bucket is absent, in which
	// case no revision tells whether it came and went between two looks.
	usage bool
}

// shape is what is shown at once when it changes; the rest are usage figures.
type shape struct {
	present, closed, overLimit bool
	ownerUID                   string
	limit, baseLimit           int64
	declaredLimit              int64
	declaredGeneration         int64
	epoch                      int64
	activeRaise                string
	activeVersion              int64
	pendingRaises              int64
	// decisions moves with each step of a raise, also one that only changes why it
	// waits, which nothing else in here shows.
	decisions int64
}

func newMirror(c cache.Cache, o Options, buckets, leases *queue, snapshots *perObject[*ledger.Snapshot]) *mirror {
	return &mirror{cache: c, options: o, buckets: buckets, leases: leases, snapshots: snapshots, clock: time.Now, known: map[string]*mirrored{}}
}

// NeedLeaderElection makes the manager run the mirror on the leader alone.
func (m *mirror) NeedLeaderElection() bool { return true }

// Start runs until the context ends.
func (m *mirror) Start(ctx context.Context) error {
	if !m.cache.WaitForCacheSync(ctx) || !m.buckets.wait(ctx) || !m.leases.wait(ctx) {
		return nil
	}
	pause := m.options.PollInterval
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		}
		if err := m.pass(ctx); err != nil {
			log.FromContext(ctx).V(1).Info("cannot look for changed buckets", "error", err.Error())
			pause = max(min(2*pause, mirrorLongestPause), m.options.PollInterval)
			m.tellOutage(ctx)
		} else {
			pause, m.outage = m.options.PollInterval, false
		}
		timer.Reset(wait.Jitter(pause, mirrorJitter))
	}
}

// tellOutage wakes every bucket once an outage. A pass that fails as well shows it
// in the conditions, also to the leases, and comes back by itself until it is over.
func (m *mirror) tellOutage(ctx context.Context) {
	if m.outage || ctx.Err() != nil {
		return
	}
	declarants, err := m.declarants(ctx)
	if err != nil {
		return
	}
	m.outage = true
	for _, objects := range declarants {
		for _, object := range objects {
			// What was found before the outage would hide it.
			m.snapshots.forget(object)
			m.buckets.add(object)
		}
	}
}

// pass asks for changes once.
func (m *mirror) pass(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, mirrorTimeout)
	defer cancel()
	declarants, err := m.declarants(ctx)
	if err != nil {
		return err
	}
	for key := range m.known {
		if declarants[key] == nil {
			delete(m.known, key)
		}
	}
	known := make([]ledger.KnownRevision, 0, len(declarants))
	for key := range declarants {
		last := ledger.KnownRevision{Key: key}
		if seen := m.known[key]; seen != nil {
			last.Revision, last.CreatedAt = seen.revision, seen.createdAt
		}
		known = append(known, last)
	}
	for chunk := range slices.Chunk(known, mirrorChunk) {
		changes, err := m.options.Ledger.Store().Changes(ctx, chunk)
		if err != nil {
			return err
		}
		for _, change := range changes {
			if err := m.note(ctx, change, declarants[change.Key]); err != nil {
				return err
			}
		}
	}
	m.tellUsage(declarants)
	return nil
}

// note compares a bucket with what was seen before, and wakes its objects when
// more than usage has changed.
func (m *mirror) note(ctx context.Context, change ledger.Change, objects []client.ObjectKey) error {
	now := shapeOf(change.Snapshot)
	var revision int64
	var createdAt time.Time
	if change.Snapshot != nil {
		revision, createdAt = change.Snapshot.Revision, change.Snapshot.CreatedAt
	}
	seen := m.known[change.Key]
	if seen != nil && seen.shape == now {
		seen.usage = seen.usage || !now.present || seen.revision != revision
		seen.revision, seen.createdAt, seen.snapshot = revision, createdAt, change.Snapshot
		return nil
	}
	for _, object := range objects {
		m.wakeBucket(object, change.Snapshot)
		if err := m.wakeLeases(ctx, object); err != nil {
			return err
		}
	}
	m.known[change.Key] = &mirrored{revision: revision, createdAt: createdAt, snapshot: change.Snapshot, shape: now, toldAt: m.clock()}
	return nil
}

// tellUsage wakes buckets whose figures have changed, each at most once in the
// interval in which its status may be written for that.
func (m *mirror) tellUsage(declarants map[string][]client.ObjectKey) {
	now := m.clock()
	for key, seen := range m.known {
		if !seen.usage || now.Sub(seen.toldAt) < m.options.UsageInterval {
			continue
		}
		seen.usage, seen.toldAt = false, now
		for _, object := range declarants[key] {
			m.wakeBucket(object, seen.snapshot)
		}
	}
}

// wakeBucket wakes the controller for a bucket and gives it what the query found,
// nil for a bucket that is not there.
func (m *mirror) wakeBucket(object client.ObjectKey, found *ledger.Snapshot) {
	m.snapshots.store(object, found)
	m.buckets.add(object)
}

func shapeOf(s *ledger.Snapshot) shape {
	if s == nil {
		return shape{}
	}
	now := shape{
		present: true, closed: s.Closed, overLimit: s.OverLimitTokens > 0,
		limit: s.Limit, baseLimit: s.BaseLimit, declaredGeneration: s.DeclaredGeneration,
		epoch: s.LimitEpoch, pendingRaises: s.PendingRaises, decisions: s.AuditSequence,
	}
	if s.Owner != nil {
		now.ownerUID = s.Owner.UID
	}
	if s.DeclaredLimit != nil {
		now.declaredLimit = *s.DeclaredLimit
	}
	if s.ActiveRaise != nil {
		now.activeRaise, now.activeVersion = s.ActiveRaise.ID, s.ActiveRaise.Version
	}
	return now
}

// declarants lists the TokenBuckets by key. Several may claim one key: all of them
// are told, so that the next one takes over where the first has gone. A key that
// the ledger would not take must not spoil the query for the others.
func (m *mirror) declarants(ctx context.Context) (map[string][]client.ObjectKey, error) {
	var list storedBucketList
	if err := m.cache.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		return nil, err
	}
	byKey := make(map[string][]client.ObjectKey, len(list.Items))
	for i := range list.Items {
		b := &list.Items[i]
		key := knownKeyOf(&b.TokenBucket, b.unreadable)
		if keyAllowed(&b.TokenBucket, m.options.trusts(b.Namespace)) && ledger.ValidateBucketKey(key) == nil {
			byKey[key] = append(byKey[key], client.ObjectKeyFromObject(b))
		}
	}
	return byKey, nil
}

func (m *mirror) wakeLeases(ctx context.Context, bucket client.ObjectKey) error {
	keys, err := unsettledLeases(ctx, m.cache, bucket)
	for _, key := range keys {
		m.leases.add(key)
	}
	return err
}
