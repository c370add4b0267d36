package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"syscall"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/internal/ledger"
)

const (
	// sameLimit stands for the limit that is there.
	sameLimit = int64(-1)
	// actBound bounds an act; one that takes servers up or down gets serverBound.
	actBound    = 5 * time.Second
	serverBound = 60 * time.Second
	// goneBound is how long "delete and create again" waits in between.
	goneBound = 2 * time.Second
)

// instantFormat keeps milliseconds, which metav1.Time does not write.
const instantFormat = "2006-01-02T15:04:05.000Z07:00"

func campaignBucketName(b int) string { return fmt.Sprintf("bucket-%d", b) }
func campaignLeaseName(slot int) string {
	return fmt.Sprintf("lease-%d", slot)
}

func (c *campaign) bound(d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(c.t.Context(), d)
}

func (c *campaign) bucketKey(b int) string { return c.in.key(campaignBucketName(b)) }

func (c *campaign) bucketObject(b int) *v1alpha1.TokenBucket {
	return &v1alpha1.TokenBucket{ObjectMeta: metav1.ObjectMeta{Namespace: c.in.namespace, Name: campaignBucketName(b)}}
}

func (c *campaign) leaseObject(slot int) *v1alpha1.TemporaryLimitLease {
	return &v1alpha1.TemporaryLimitLease{ObjectMeta: metav1.ObjectMeta{Namespace: c.in.namespace, Name: campaignLeaseName(slot)}}
}

// applyBucket creates a TokenBucket, or changes its spec. Two buckets belong to
// one tenant, whose approvals they share.
func (c *campaign) applyBucket(wish bucketWish) error {
	ctx, cancel := c.bound(actBound)
	defer cancel()
	b := c.bucketObject(wish.bucket)
	b.Spec = v1alpha1.TokenBucketSpec{
		Limit: wish.limit, TenantID: v1alpha1.Identifier(fmt.Sprintf("tenant-%d", wish.bucket/2)), ScopedKeyID: scopedKeyID,
		Reservations:   v1alpha1.ReservationPolicy{DefaultTTLSeconds: 2, MaxTTLSeconds: 10},
		ConflictPolicy: v1alpha1.ConflictPolicyReview, DeletionPolicy: v1alpha1.DeletionPolicyRetain,
	}
	if wish.overwrite {
		b.Spec.ConflictPolicy = v1alpha1.ConflictPolicyOverwrite
	}
	if wish.deletion {
		b.Spec.DeletionPolicy = v1alpha1.DeletionPolicyDelete
	}
	if wish.mode != "" {
		b.Spec.Raises = &v1alpha1.RaisePolicy{
			Mode: v1alpha1.RaiseMode(wish.mode), MaxLimit: wish.maxLimit, MaxDurationSeconds: int32(wish.maxDuration),
		}
	}
	// Whether it is carried out may stay unknown.
	c.wishes = append(c.wishes, wish)
	spec := asJSON(b.Spec)
	err := c.in.api.Create(ctx, b)
	if !apierrors.IsAlreadyExists(err) {
		return err
	}
	if wish.mode == "" {
		spec = spec[:len(spec)-1] + `,"raises":null}`
	}
	return c.in.api.Patch(ctx, c.bucketObject(wish.bucket), client.RawPatch("application/merge-patch+json", []byte(`{"spec":`+spec+`}`)))
}

func (c *campaign) deleteBucket(b int) error {
	ctx, cancel := c.bound(actBound)
	defer cancel()
	return c.in.api.Delete(ctx, c.bucketObject(b))
}

func (c *campaign) createLease(wish leaseWish) error { return c.createLeases(wish) }

// createLeases creates leases whose instants count from one and the same present.
func (c *campaign) createLeases(wishes ...leaseWish) error {
	ctx, cancel := c.bound(actBound)
	defer cancel()
	now := time.Now().UTC()
	var err error
	for _, wish := range wishes {
		create := c.create
		if wish.replace {
			create = c.replace
		}
		err = errors.Join(err, create(ctx, wish.slot, leaseSpec(wish, now)))
	}
	return err
}

func leaseSpec(wish leaseWish, now time.Time) map[string]any {
	spec := map[string]any{
		"bucketRef":   map[string]any{"name": campaignBucketName(wish.bucket)},
		"normalLimit": wish.normal, "temporaryLimit": wish.temporary,
		"approvalID": fmt.Sprintf("CHG-%d", wish.approval), "scopedKeyID": scopedKeyID, "onBaseChange": "Review",
	}
	if wish.rebase {
		spec["onBaseChange"] = "Rebase"
	}
	starts := now
	if wish.starts {
		starts = now.Add(wish.startsIn)
		spec["startsAt"] = starts.Format(instantFormat)
	}
	spec["expiresAt"] = starts.Add(wish.length).Format(instantFormat)
	return spec
}

func (c *campaign) create(ctx context.Context, slot int, spec map[string]any) error {
	object := &unstructured.Unstructured{Object: map[string]any{"spec": maps.Clone(spec)}}
	object.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind("TemporaryLimitLease"))
	object.SetNamespace(c.in.namespace)
	object.SetName(campaignLeaseName(slot))
	object.SetAnnotations(map[string]string{v1alpha1.RequestedByAnnotation: requestedBy})
	err := c.in.api.Create(ctx, object)
	if err == nil {
		c.granted[slot] = spec
	}
	return err
}

func (c *campaign) deleteLease(slot int) error {
	ctx, cancel := c.bound(actBound)
	defer cancel()
	return c.in.api.Delete(ctx, c.leaseObject(slot))
}

// recreateLease does what a GitOps tool does whose object was deleted, and what a
// script does that replaces one.
func (c *campaign) recreateLease(slot int) error {
	spec := c.granted[slot]
	if spec == nil {
		return errors.New("nothing was granted under this name yet")
	}
	ctx, cancel := c.bound(actBound)
	defer cancel()
	return c.replace(ctx, slot, spec)
}

// replace deletes the lease of the name and creates another.
func (c *campaign) replace(ctx context.Context, slot int, spec map[string]any) error {
	if err := c.in.api.Delete(ctx, c.leaseObject(slot)); err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	for patience := time.Now().Add(goneBound); ; {
		err := c.create(ctx, slot, spec)
		if !apierrors.IsAlreadyExists(err) || time.Now().After(patience) {
			return err
		}
		time.Sleep(waitStep) // the pace of looking; the bound stands above
	}
}

func (c *campaign) shortenLease(slot int, in time.Duration) error {
	ctx, cancel := c.bound(actBound)
	defer cancel()
	patch := fmt.Sprintf(`{"spec":{"expiresAt":%q}}`, time.Now().UTC().Add(in).Format(instantFormat))
	return c.in.api.Patch(ctx, c.leaseObject(slot), client.RawPatch("application/merge-patch+json", []byte(patch)))
}

// setLimit is another decision through the ledger. An unknown outcome is resolved
// by the same operation ID.
func (c *campaign) setLimit(b int, limit int64) error {
	ctx, cancel := c.bound(actBound)
	defer cancel()
	key := c.bucketKey(b)
	before, err := c.in.db.ledger.Inspect(ctx, key)
	if err != nil {
		return err
	}
	if limit == sameLimit {
		limit = before.Limit
	}
	c.operations++
	request := ledger.SetLimit{
		Key: key, ExpectedLimit: before.Limit, Limit: limit, Actor: "campaign", OperationID: fmt.Sprintf("campaign-%d", c.operations),
	}
	_, err = c.in.db.ledger.SetLimit(ctx, request)
	if ledger.HasCode(err, ledger.CodeOutcomeUnknown) {
		_, err = c.in.db.ledger.SetLimit(ctx, request)
	}
	if err == nil && limit != before.Limit {
		c.hands = append(c.hands, handWrite{key: key, operationID: request.OperationID, limit: limit})
	}
	return err
}

// writeLimit is a person with psql.
func (c *campaign) writeLimit(b int, limit int64) error {
	ctx, cancel := c.bound(actBound)
	defer cancel()
	w := handWrite{key: c.bucketKey(b)}
	err := c.in.db.sql.QueryRow(ctx, `
		UPDATE tokenlease.buckets SET limit_tokens = CASE WHEN $2 < 0 THEN limit_tokens ELSE $2 END
		WHERE bucket_key = $1 RETURNING limit_tokens, audit_sequence`, w.key, limit).Scan(&w.limit, &w.sequence)
	if err == nil {
		c.hands = append(c.hands, w)
	}
	return err
}

func (c *campaign) deleteRow(b int) error {
	ctx, cancel := c.bound(actBound)
	defer cancel()
	c.book.excuse(c.bucketKey(b)) // whatever comes of it
	tag, err := c.in.db.sql.Exec(ctx, "DELETE FROM tokenlease.buckets WHERE bucket_key = $1", c.bucketKey(b))
	if err == nil && tag.RowsAffected() == 0 {
		return errors.New("there was no row")
	}
	return err
}

func (c *campaign) forceLease(slot int, alsoDelete bool) error {
	ctx, cancel := c.bound(actBound)
	defer cancel()
	if alsoDelete {
		if err := c.in.api.Delete(ctx, c.leaseObject(slot)); err != nil && !apierrors.IsNotFound(err) {
			return err
		}
	}
	patch := []byte(`{"metadata":{"finalizers":null}}`)
	return c.in.api.Patch(ctx, c.leaseObject(slot), client.RawPatch("application/merge-patch+json", patch))
}

func (c *campaign) wipe(object client.Object) error {
	ctx, cancel := c.bound(actBound)
	defer cancel()
	return c.in.api.Status().Patch(ctx, object, client.RawPatch("application/merge-patch+json", []byte(`{"status":null}`)))
}

func (c *campaign) wipeBucket(b int) error   { return c.wipe(c.bucketObject(b)) }
func (c *campaign) wipeLease(slot int) error { return c.wipe(c.leaseObject(slot)) }

// managerSlot is a manager that comes and goes.
type managerSlot struct {
	*manager
	up, frozen bool
}

// died notes a manager that ended although nobody ended it.
func (c *campaign) died(m int) {
	if s := &c.managers[m]; s.up && !s.Running() {
		s.up = false
		c.fault("manager %d ended by itself: %v", m, s.State())
	}
}

func (c *campaign) killManager(m int) error {
	c.died(m)
	s := &c.managers[m]
	if !s.up {
		return errors.New("it does not run")
	}
	s.up, s.frozen = false, false
	return s.Kill()
}

func (c *campaign) startManager(m int) error {
	c.died(m)
	s := &c.managers[m]
	if s.up {
		return errors.New("it runs")
	}
	started, err := c.in.begin(fmt.Sprintf("manager-%d", m), managerOptions{program: c.program})
	if err != nil {
		return err
	}
	s.manager, s.up, s.frozen = started, true, false
	return nil
}

func (c *campaign) freezeManager(m int) error {
	c.died(m)
	s := &c.managers[m]
	if !s.up || s.frozen {
		return errors.New("it does not run")
	}
	s.frozen = true
	return s.Signal(syscall.SIGSTOP)
}

func (c *campaign) thawManager(m int) error {
	s := &c.managers[m]
	if !s.up || !s.frozen {
		return errors.New("it is not frozen")
	}
	s.frozen = false
	return s.Signal(syscall.SIGCONT)
}

func (c *campaign) stopAPIServer(crash bool) error {
	if crash {
		return c.in.plane.KillAPIServer()
	}
	ctx, cancel := c.bound(serverBound)
	defer cancel()
	return c.in.plane.StopAPIServer(ctx)
}

func (c *campaign) startAPIServer() error {
	ctx, cancel := c.bound(serverBound)
	defer cancel()
	return c.in.plane.StartAPIServer(ctx)
}

func (c *campaign) stopDatabase(crash bool) error {
	ctx, cancel := c.bound(serverBound)
	defer cancel()
	if crash {
		return c.in.db.server.Kill(ctx)
	}
	return c.in.db.server.Halt(ctx)
}

func (c *campaign) startDatabase() error {
	ctx, cancel := c.bound(serverBound)
	defer cancel()
	return c.in.db.server.Resume(ctx)
}
