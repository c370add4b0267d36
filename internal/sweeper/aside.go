package sweeper

import (
	"context"
	"slices"
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

// asideBucket is a bucket whose touch failed.
type asideBucket struct {
	until   time.Time
	backOff time.Duration
}

// putAside keeps a bucket out of the next passes. It reports false when there are
// too many to remember this one.
func (s *Sweeper) putAside(key string, reason error) bool {
	bucket, known := s.aside[key]
	if !known && len(s.aside) >= maxSetAside {
		s.log.Error(reason, "touch failed; too many buckets fail to remember this one", "bucket", key)
		return false
	}
	bucket.backOff = min(max(2*bucket.backOff, minAside), maxAside)
	bucket.until = s.now().Add(bucket.backOff)
	s.aside[key] = bucket
	s.log.Error(reason, "touch failed; the bucket is set aside", "bucket", key, "for", bucket.backOff.String())
	return true
}

// ripe lists the buckets whose back-off is over, those first that have waited for
// longest.
func (s *Sweeper) ripe() []string {
	now := s.now()
	var keys []string
	for key, bucket := range s.aside {
		if !now.Before(bucket.until) {
			keys = append(keys, key)
		}
	}
	slices.SortFunc(keys, func(a, b string) int { return s.aside[a].until.Compare(s.aside[b].until) })
	return keys[:min(len(keys), DefaultBatch)]
}

// startRetry touches ripe buckets while the passes go on, one lot at a time.
// Touching a bucket that is no longer due, or gone, does no harm and succeeds.
func (s *Sweeper) startRetry(ctx context.Context) {
	keys := s.ripe()
	if s.retrying != nil || len(keys) == 0 {
		return
	}
	touches := make([]ledger.Request, len(keys))
	for i, key := range keys {
		touches[i] = ledger.Touch{Key: key}
	}
	retrying := make(chan map[string]*ledger.Error, 1)
	s.retrying = retrying
	go func() {
		ctx, cancel := context.WithTimeout(ctx, passTimeout)
		defer cancel()
		outcomes := map[string]*ledger.Error{}
		for i, result := range s.store.Do(ctx, touches) {
			outcomes[keys[i]] = result.Err
		}
		retrying <- outcomes
	}()
}

// noteRetry takes back the buckets whose retry succeeded, once it has ended.
func (s *Sweeper) noteRetry() {
	select {
	case outcomes := <-s.retrying:
		s.retrying = nil
		for key, reason := range outcomes {
			if reason == nil {
				delete(s.aside, key)
			} else {
				s.putAside(key, reason)
			}
		}
	default:
	}
}

// awaitRetry waits for a retry that is under way; it ends with its context.
func (s *Sweeper) awaitRetry() {
	if s.retrying != nil {
		<-s.retrying
		s.retrying = nil
	}
}
