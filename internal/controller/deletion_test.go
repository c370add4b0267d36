package controller_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/internal/ledger"
)

// roundsVariable asks for a longer run of TestCreatedAndDeletedAtOnce.
const roundsVariable = "TOKENLEASE_TEST_ROUNDS"

func rounds(t *testing.T) int {
	t.Helper()
	text := os.Getenv(roundsVariable)
	if text == "" {
		return 40
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("%s=%q is no number of rounds", roundsVariable, text)
	}
	return n
}

// Goal: nothing is raised for an object that is being deleted, nothing is stored
// before the finalizer is, and nothing stays behind, however soon the deletion
// follows. Method: a deletion at a random instant of the first 200 ms; the
// seed is told.
func TestCreatedAndDeletedAtOnce(t *testing.T) {
	w := newWorld(t)
	w.createBucket("b")
	w.bucketReady("b")
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	t.Logf("seed %d", seed)
	check := func(r ledger.StoreRaise) {
		lease := &v1alpha1.TemporaryLimitLease{}
		err := kube.Get(w.ctx, client.ObjectKey{Namespace: r.Grant.Namespace, Name: r.Grant.Name}, lease)
		if apierrors.IsNotFound(err) || w.ctx.Err() != nil {
			return // the API server may forget an object whose finalizer it has just stored
		}
		if err != nil || string(lease.UID) == r.Grant.UID && len(lease.Finalizers) == 0 {
			t.Errorf("a raise is stored for an object with finalizers %v (%v)", lease.Finalizers, err)
		}
	}
	w.store.onStore.Store(&check)
	var uids []string
	for round := range rounds(t) {
		lease := w.createLease("l", "b", func(l *v1alpha1.TemporaryLimitLease) {
			l.Spec.ApprovalID = v1alpha1.Identifier(fmt.Sprint("CHG-", round))
		})
		uids = append(uids, string(lease.UID))
		time.Sleep(time.Duration(random.IntN(200)) * time.Millisecond) // the moment, not a wait
		w.remove(lease)
		w.eventuallyGone(lease)
		// The API server may remove the object although its finalizer is stored; then
		// the raise ends right after the object.
		w.eventually("nothing stays behind", func() (string, bool) {
			s := w.snapshot(w.key("b"))
			return show(s), s.Limit == normal && s.PendingRaises == 0
		})
	}
	// A pass that was late would raise the limit only now.
	w.afterPolls(10)
	if s := w.snapshot(w.key("b")); s.Limit != normal || s.PendingRaises != 0 {
		t.Errorf("limit %d, %d raises pending after all leases are gone", s.Limit, s.PendingRaises)
	}
	for _, uid := range uids {
		record, err := w.store.Raise(w.ctx, clusterID, uid)
		if !ledger.HasCode(err, ledger.CodeRaiseNotFound) && (err != nil || !record.State.Ended()) {
			t.Errorf("the raise of %s: %s, %v", uid, show(record), err)
		}
	}
}

// Goal: everything terminates without a hand in any order of deletion, and what
// is gone from the ledger already counts as done.
func TestDeletionInAnyOrder(t *testing.T) {
	w := newWorld(t)
	type made struct {
		name    string
		bucket  *v1alpha1.TokenBucket
		leases  []client.Object
		dropped bool
	}
	var all []made
	for _, name := range []string{"bucket-first", "leases-first", "at-once", "row-gone", "row-gone-leases-first"} {
		for _, policy := range []v1alpha1.DeletionPolicy{v1alpha1.DeletionPolicyRetain, v1alpha1.DeletionPolicyDelete} {
			m := made{name: name + map[v1alpha1.DeletionPolicy]string{"Retain": "-r", "Delete": "-d"}[policy]}
			m.bucket = w.createBucket(m.name, func(b *v1alpha1.TokenBucket) { b.Spec.DeletionPolicy = policy })
			for _, lease := range []string{"a", "b"} {
				m.leases = append(m.leases, w.createLease(m.name+"-"+lease, m.name))
				w.leaseIs(m.name+"-"+lease, "is stored", func(l *v1alpha1.TemporaryLimitLease) bool { return l.Status.BucketKey != "" })
			}
			m.dropped = name == "row-gone" || name == "row-gone-leases-first"
			all = append(all, m)
		}
	}
	for _, m := range all {
		if m.dropped {
			w.store.DropBucket(w.key(m.name))
			w.bucketIs(m.name, "shows that its row is gone", func(b *v1alpha1.TokenBucket) bool {
				return reasonIs(b.Status.Conditions, v1alpha1.ConditionStalled, v1alpha1.ReasonBucketRowMissing)
			})
		}
		removeLeases := func() {
			for _, l := range m.leases {
				w.remove(l)
			}
		}
		switch m.name[:len(m.name)-2] {
		case "bucket-first", "row-gone":
			w.remove(m.bucket)
			w.eventuallyGone(m.bucket)
			removeLeases()
		case "at-once":
			w.remove(m.bucket)
			removeLeases()
		default:
			removeLeases()
			for _, l := range m.leases {
				w.eventuallyGone(l)
			}
			w.remove(m.bucket)
		}
	}
	for _, m := range all {
		w.eventuallyGone(m.bucket)
		for _, l := range m.leases {
			w.eventuallyGone(l)
			record, err := w.store.Raise(w.ctx, clusterID, string(l.GetUID()))
			if err != nil || !record.State.Ended() {
				t.Errorf("%s: the raise is left as %s, %v", m.name, show(record), err)
			}
		}
		snapshot, err := w.ledger.Inspect(w.ctx, w.key(m.name))
		kept := !m.dropped && m.bucket.Spec.DeletionPolicy == v1alpha1.DeletionPolicyRetain
		if kept && (err != nil || !snapshot.Closed || snapshot.Limit != normal) || !kept && !ledger.HasCode(err, ledger.CodeBucketNotFound) {
			t.Errorf("%s: the ledger holds %s, %v", m.name, show(snapshot), err)
		}
	}
}

// Goal: a finalizer removed by force while the ledger is away keeps no limit
// raised: the manager that saw the object ends the raise as soon as it can, and
// any other one at the latest when the raise expires.
func TestFinalizerRemovedByForce(t *testing.T) {
	w := newWorld(t)
	for _, name := range []string{"seen", "unseen"} {
		w.createBucket(name)
		w.createLease(name, name)
	}
	force := func(name string) {
		lease := w.leaseState(name, v1alpha1.RaiseStateActive)
		w.remove(lease)
		w.patch(lease, `{"metadata": {"finalizers": null}}`)
		w.eventuallyGone(lease)
		if s := w.snapshotWhileAway(w.key(name)); s.Limit != temporary {
			t.Errorf("limit %d while the ledger is away, want %d", s.Limit, temporary)
		}
	}
	w.leaseState("seen", v1alpha1.RaiseStateActive)
	w.leaseState("unseen", v1alpha1.RaiseStateActive)
	w.store.down.Store(true)
	force("seen")
	w.store.down.Store(false)
	w.eventually("the raise is revoked", func() (string, bool) {
		s := w.snapshot(w.key("seen"))
		return show(s), s.Limit == normal
	})
	w.stop()
	force("unseen")
	w.run(w.settings)
	w.advance(2 * time.Hour)
	w.eventually("the raise has ended at its time", func() (string, bool) {
		s := w.snapshot(w.key("unseen"))
		return show(s), s.Limit == normal
	})
}

// snapshotWhileAway looks past the fault that the test has set.
func (w *world) snapshotWhileAway(key string) ledger.Snapshot {
	w.Helper()
	changes, err := w.store.Store.Changes(w.ctx, []ledger.KnownRevision{{Key: key}})
	w.must(err)
	if len(changes) != 1 || changes[0].Snapshot == nil {
		w.Fatalf("no bucket %s", key)
	}
	return *changes[0].Snapshot
}
