package controller

import (
	"context"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/internal/ledger"
)

const (
	orphanPage = 200
	// orphanTimeout bounds one look.
	orphanTimeout = time.Minute
	// orphanSecondLook is how soon a suspicion is looked at again.
	orphanSecondLook = 5 * time.Second
)

// orphans looks for live raises whose lease is gone without having ended them: its
// finalizer was removed by hand, or its cluster was restored from a backup.
type orphans struct {
	synced  func(context.Context) bool
	cached  client.Reader
	api     client.Reader
	options Options
	// suspects are raises whose lease was missing at the last look.
	suspects map[string]bool
}

func newOrphans(c cache.Cache, api client.Reader, o Options) *orphans {
	return &orphans{synced: c.WaitForCacheSync, cached: c, api: api, options: o, suspects: map[string]bool{}}
}

// NeedLeaderElection makes the manager run the search on the leader alone.
func (s *orphans) NeedLeaderElection() bool { return true }

// Start runs until the context ends.
func (s *orphans) Start(ctx context.Context) error {
	if !s.synced(ctx) {
		return nil
	}
	for {
		pause := s.options.OrphanInterval
		if len(s.suspects) > 0 {
			pause = min(pause, orphanSecondLook)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait.Jitter(pause, mirrorJitter)):
		}
		if err := s.look(ctx); err != nil {
			log.FromContext(ctx).V(1).Info("cannot look for orphaned raises", "error", err.Error())
		}
	}
}

// look goes through the live raises once and revokes those that were suspects
// before and still are.
func (s *orphans) look(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, orphanTimeout)
	defer cancel()
	missing := map[string]bool{}
	defer func() { s.suspects = missing }()
	var position ledger.RaisePosition
	for {
		raises, err := s.options.Ledger.Store().LiveRaises(ctx, s.options.ClusterID, position, orphanPage)
		if err != nil {
			return err
		}
		for _, raise := range raises {
			if err := s.judge(ctx, raise, missing); err != nil {
				return err
			}
			position = ledger.RaisePosition{BucketKey: raise.BucketKey, RaiseID: raise.ID}
		}
		if len(raises) < orphanPage {
			return nil
		}
	}
}

// judge revokes a raise whose lease was missing twice. Any doubt keeps the raise,
// which ends at its expiry in any case.
func (s *orphans) judge(ctx context.Context, raise *ledger.Raise, missing map[string]bool) error {
	gone, err := s.gone(ctx, raise)
	if err != nil || !gone {
		return err
	}
	if !s.suspects[raise.ID] {
		missing[raise.ID] = true
		return nil
	}
	if inhabited, err := s.inhabited(ctx); err != nil || !inhabited {
		return err
	}
	log.FromContext(ctx).Info("revoking a raise whose lease is gone",
		"raise", raise.ID, "namespace", raise.Namespace, "name", raise.Name, "bucket", raise.BucketKey)
	ctx, cancel := context.WithTimeout(ctx, ledgerTimeout)
	defer cancel()
	_, err = s.options.Ledger.RevokeRaise(ctx, ledger.RevokeRaise{Key: raise.BucketKey, UID: raise.CurrentUID, Actor: actorUnknown})
	if ledger.HasCode(err, ledger.CodeRaiseNotFound) {
		return nil
	}
	return err
}

// gone asks the cache first, and the API server before saying yes. Only a plain
// answer about this very object counts.
func (s *orphans) gone(ctx context.Context, raise *ledger.Raise) (bool, error) {
	key := client.ObjectKey{Namespace: raise.Namespace, Name: raise.Name}
	lease := &storedLease{}
	if err := s.cached.Get(ctx, key, lease); err == nil && string(lease.UID) == raise.CurrentUID {
		return false, nil
	}
	switch err := s.api.Get(ctx, key, lease); {
	case apierrors.IsNotFound(err):
		return true, nil
	case err != nil:
		return false, fmt.Errorf("read %s: %w", key, err)
	case string(lease.UID) == raise.CurrentUID:
		return false, nil
	case lease.unreadable != "":
		return false, nil
	default:
		return !mayStandFor(&lease.TemporaryLimitLease, raise), nil
	}
}

// mayStandFor reports whether a lease of the same name asks for what the raise
// was granted; then it takes the raise over when it is stored.
func mayStandFor(lease *v1alpha1.TemporaryLimitLease, raise *ledger.Raise) bool {
	spec := lease.Spec
	return string(spec.ApprovalID) == raise.ApprovalID && string(spec.ScopedKeyID) == raise.ScopedKeyID &&
		spec.NormalLimit == raise.NormalLimit && spec.TemporaryLimit == raise.TemporaryLimit &&
		onBaseChangeOf(spec.OnBaseChange) == raise.OnBaseChange &&
		(spec.StartsAt == nil || ledger.Truncate(spec.StartsAt.Time).Equal(raise.StartsAt))
}

// inhabited reports whether the API server serves both kinds and holds buckets. A
// missing resource type also answers "not found", and so does a cluster that is
// about to be filled from a backup.
func (s *orphans) inhabited(ctx context.Context) (bool, error) {
	var leases storedLeaseList
	if err := s.api.List(ctx, &leases, client.Limit(1)); err != nil {
		return false, err
	}
	var buckets storedBucketList
	if err := s.api.List(ctx, &buckets, client.Limit(1)); err != nil {
		return false, err
	}
	return len(buckets.Items) > 0, nil
}
