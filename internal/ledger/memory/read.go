package memory

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

// Sweep implements ledger.Store.
func (s *Store) Sweep(ctx context.Context, request ledger.SweepRequest) (ledger.SweepResult, error) {
	if err := canceled(ctx); err != nil {
		return ledger.SweepResult{}, err
	}
	started := time.Now()
	result, steps := s.sweep(request)
	s.observeTransitions(steps, time.Since(started))
	return result, nil
}

func (s *Store) sweep(request ledger.SweepRequest) (ledger.SweepResult, []ledger.Transition) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	result := ledger.SweepResult{Failed: map[string]error{}}
	var steps []ledger.Transition
	for _, key := range s.rows.due(s.now(), request) {
		answers, effects, err := s.transact(key, []ledger.Request{ledger.Touch{Key: key}})
		if err == nil {
			err = answers[0].Err
		}
		if err != nil {
			result.Failed[key] = err
			continue
		}
		steps = append(steps, effects.Transitions...)
		if !effects.Empty() {
			result.Touched = append(result.Touched, key)
		}
	}
	result.NextIn = s.rows.nextIn(s.now(), request.SetAside)
	return result, steps
}

// due lists the buckets to touch, the longest overdue first.
func (r *rows) due(now time.Time, request ledger.SweepRequest) []string {
	var due []*ledger.Bucket
	for key, bucket := range r.buckets {
		at := bucket.NextTransitionAt
		if !at.IsZero() && !at.After(now) && !slices.Contains(request.SetAside, key) {
			due = append(due, bucket)
		}
	}
	slices.SortFunc(due, func(a, b *ledger.Bucket) int {
		if order := a.NextTransitionAt.Compare(b.NextTransitionAt); order != 0 {
			return order
		}
		return strings.Compare(a.Key, b.Key)
	})
	due = due[:min(len(due), max(0, request.Limit))]
	keys := make([]string, len(due))
	for i, bucket := range due {
		keys[i] = bucket.Key
	}
	return keys
}

// nextIn is how far off the next transition is; that of a bucket which was set
// aside does not count.
func (r *rows) nextIn(now time.Time, setAside []string) time.Duration {
	next := time.Duration(-1)
	for key, bucket := range r.buckets {
		if bucket.NextTransitionAt.IsZero() || slices.Contains(setAside, key) {
			continue
		}
		in := max(0, bucket.NextTransitionAt.Sub(now))
		if next < 0 || in < next {
			next = in
		}
	}
	return next
}

// Changes implements ledger.Store.
func (s *Store) Changes(ctx context.Context, known []ledger.KnownRevision) ([]ledger.Change, error) {
	if err := canceled(ctx); err != nil {
		return nil, err
	}
	s.mutex.Lock()
	defer s.mutex.Unlock()
	var changes []ledger.Change
	for _, k := range known {
		bucket := s.rows.buckets[k.Key]
		if bucket == nil {
			changes = append(changes, ledger.Change{Key: k.Key})
			continue
		}
		if bucket.Revision != k.Revision || !bucket.CreatedAt.Equal(k.CreatedAt) {
			snapshot := ledger.NewSnapshot(bucket, s.rows.liveRaises(k.Key))
			changes = append(changes, ledger.Change{Key: k.Key, Snapshot: &snapshot})
		}
	}
	return changes, nil
}

// Raise implements ledger.Store.
func (s *Store) Raise(ctx context.Context, cluster, uid string) (*ledger.Raise, error) {
	if err := canceled(ctx); err != nil {
		return nil, err
	}
	s.mutex.Lock()
	defer s.mutex.Unlock()
	var found *ledger.Raise
	for _, ofBucket := range s.rows.raises {
		for _, raise := range ofBucket {
			// The record that the UID names comes before one that it stands for now.
			if raise.Cluster == cluster && (raise.ID == uid || raise.CurrentUID == uid && found == nil) {
				found = raise
			}
		}
	}
	if found != nil {
		return found.Clone(), nil
	}
	return nil, ledger.Errorf(ledger.CodeRaiseNotFound, "No raise is recorded for the object.").
		WithDetails(map[string]any{"uid": uid})
}

// LiveRaises implements ledger.Store.
func (s *Store) LiveRaises(ctx context.Context, cluster string, after ledger.RaisePosition, limit int) ([]*ledger.Raise, error) {
	if err := canceled(ctx); err != nil {
		return nil, err
	}
	s.mutex.Lock()
	defer s.mutex.Unlock()
	var live []*ledger.Raise
	for key := range s.rows.raises {
		for _, raise := range s.rows.liveRaises(key) {
			if raise.Cluster == cluster && compareRaise(raise, after) > 0 {
				live = append(live, raise)
			}
		}
	}
	slices.SortFunc(live, func(a, b *ledger.Raise) int {
		return compareRaise(a, ledger.RaisePosition{BucketKey: b.BucketKey, RaiseID: b.ID})
	})
	return page(live, limit), nil
}

func compareRaise(raise *ledger.Raise, at ledger.RaisePosition) int {
	if order := strings.Compare(raise.BucketKey, at.BucketKey); order != 0 {
		return order
	}
	return strings.Compare(raise.ID, at.RaiseID)
}

// Leases implements ledger.Store.
func (s *Store) Leases(ctx context.Context, bucketKey string, after ledger.LeasePosition, limit int) ([]*ledger.Lease, error) {
	if err := canceled(ctx); err != nil {
		return nil, err
	}
	s.mutex.Lock()
	defer s.mutex.Unlock()
	position := &ledger.Lease{ExpiresAt: after.ExpiresAt, ID: after.LeaseID}
	var leases []*ledger.Lease
	for _, lease := range s.rows.leases[bucketKey] {
		if byExpiryAndID(lease, position) > 0 {
			leases = append(leases, lease.Clone())
		}
	}
	slices.SortFunc(leases, byExpiryAndID)
	return page(leases, limit), nil
}

// Audit implements ledger.Store.
func (s *Store) Audit(ctx context.Context, bucketKey string, afterSequence int64, limit int) ([]ledger.AuditRow, error) {
	if err := canceled(ctx); err != nil {
		return nil, err
	}
	s.mutex.Lock()
	defer s.mutex.Unlock()
	log := s.rows.audit[bucketKey]
	first := min(max(0, afterSequence), int64(len(log)))
	log = page(log[first:], limit)
	rows := make([]ledger.AuditRow, len(log))
	for i, row := range log {
		rows[i] = cloneAudit(row)
	}
	return rows, nil
}

// ActivePastExpiry implements ledger.Store.
func (s *Store) ActivePastExpiry(ctx context.Context) (int64, error) {
	if err := canceled(ctx); err != nil {
		return 0, err
	}
	s.mutex.Lock()
	defer s.mutex.Unlock()
	now := s.now()
	var count int64
	for _, ofBucket := range s.rows.raises {
		for _, raise := range ofBucket {
			if raise.State == ledger.RaiseActive && !raise.ExpiresAt.After(now) {
				count++
			}
		}
	}
	return count, nil
}

// Writable implements ledger.Store.
func (s *Store) Writable(ctx context.Context) error {
	if err := canceled(ctx); err != nil {
		return err
	}
	return nil
}

func page[T any](all []T, limit int) []T { return all[:min(len(all), max(0, limit))] }

// BucketOf implements ledger.Store.
func (s *Store) BucketOf(ctx context.Context, owner ledger.Owner) (string, error) {
	if err := canceled(ctx); err != nil {
		return "", err
	}
	s.mutex.Lock()
	defer s.mutex.Unlock()
	var found *ledger.Bucket
	for _, b := range s.rows.buckets {
		if b.Owner != nil && b.Owner.Namespace == owner.Namespace && b.Owner.Name == owner.Name && b.Owner.Cluster == owner.Cluster &&
			(found == nil || compareOwned(b, found) < 0) {
			found = b
		}
	}
	if found == nil {
		return "", ledger.Errorf(ledger.CodeBucketNotFound, "Bucket does not exist.").
			WithDetails(map[string]any{"namespace": owner.Namespace, "name": owner.Name})
	}
	return found.Key, nil
}

// compareOwned puts the open bucket of an object first, then the latest.
func compareOwned(a, b *ledger.Bucket) int {
	switch {
	case a.ClosedAt == nil && b.ClosedAt != nil:
		return -1
	case a.ClosedAt != nil && b.ClosedAt == nil:
		return 1
	case !a.CreatedAt.Equal(b.CreatedAt):
		return b.CreatedAt.Compare(a.CreatedAt)
	default:
		return strings.Compare(a.Key, b.Key)
	}
}

// Purgeable implements ledger.Store.
func (s *Store) Purgeable(ctx context.Context, after string, limit int) (keys []string, next string, err error) {
	if err := canceled(ctx); err != nil {
		return nil, "", err
	}
	s.mutex.Lock()
	defer s.mutex.Unlock()
	looked := slices.DeleteFunc(slices.Sorted(maps.Keys(s.rows.buckets)), func(key string) bool { return key <= after })
	looked = page(looked, limit)
	for _, key := range looked {
		retention := s.rows.buckets[key].Settings.Retention
		if retention > 0 && s.rows.hasOld(key, s.now().Add(-retention)) {
			keys = append(keys, key)
		}
	}
	if len(looked) == limit && limit > 0 {
		next = looked[limit-1]
	}
	return keys, next, nil
}

func (r *rows) hasOld(key string, cutoff time.Time) bool {
	for _, lease := range r.leases[key] {
		settled := lease.SettledAt == nil || !lease.SettledAt.After(cutoff) && (lease.ImportedAt == nil || !lease.ImportedAt.After(cutoff))
		if !lease.ExpiresAt.After(cutoff) && settled {
			return true
		}
	}
	for _, operation := range r.operations[key] {
		if !operation.At.After(cutoff) && !ledger.IsRaiseOperation(operation.ID) {
			return true
		}
	}
	return false
}

// Usage implements ledger.Store.
func (s *Store) Usage(ctx context.Context, query ledger.UsageQuery) ([]ledger.Usage, error) {
	if err := canceled(ctx); err != nil {
		return nil, err
	}
	s.mutex.Lock()
	defer s.mutex.Unlock()
	lines := slices.Collect(maps.Values(s.rows.rollups[query.BucketKey]))
	for _, lease := range s.rows.leases[query.BucketKey] {
		if lease.State != ledger.LeaseReserved {
			lines = append(lines, ledger.UsageOf(s.rows.buckets[query.BucketKey], lease))
		}
	}
	lines = slices.DeleteFunc(ledger.SumUsage(lines), func(x ledger.Usage) bool {
		return x.Hour.Before(query.From) || !query.To.IsZero() && !x.Hour.Before(query.To) ||
			query.After != nil && x.Position().Compare(*query.After) <= 0
	})
	return lines[:min(len(lines), max(0, query.Limit))], nil
}

// OpenReviews implements ledger.Store.
func (s *Store) OpenReviews(ctx context.Context) (int64, error) {
	if err := canceled(ctx); err != nil {
		return 0, err
	}
	s.mutex.Lock()
	defer s.mutex.Unlock()
	var count int64
	for _, ofBucket := range s.rows.raises {
		for _, raise := range ofBucket {
			if raise.ReviewRequired {
				count++
			}
		}
	}
	return count, nil
}
