package memory

import (
	"slices"
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

// transaction makes effects durable and can take back what it did.
type transaction struct {
	*rows
	clock time.Time
	undo  []func()
}

func (t *transaction) rollBack() {
	for i := len(t.undo) - 1; i >= 0; i-- {
		t.undo[i]()
	}
	t.undo = nil
}

// put sets an entry and remembers what was there.
func put[K comparable, V any](t *transaction, table map[K]V, key K, value V) {
	before, found := table[key]
	t.undo = append(t.undo, func() {
		if found {
			table[key] = before
		} else {
			delete(table, key)
		}
	})
	table[key] = value
}

// remove deletes an entry and remembers what was there.
func remove[K comparable, V any](t *transaction, table map[K]V, key K) {
	before, found := table[key]
	if !found {
		return
	}
	t.undo = append(t.undo, func() { table[key] = before })
	delete(table, key)
}

// tableOf returns a bucket's part of a table, made if it is absent.
func tableOf[K comparable, V any](t *transaction, tables map[string]map[K]V, key string) map[K]V {
	if tables[key] == nil {
		put(t, tables, key, map[K]V{})
	}
	return tables[key]
}

// apply writes the effects in the order in which the PostgreSQL store does: the
// bucket's row, what is purged, leases, periods, raises, approvals, operations, audit.
func (t *transaction) apply(view *ledger.View, effects *ledger.Effects) *ledger.Error {
	for _, step := range []func(*ledger.View, *ledger.Effects) *ledger.Error{
		t.writeBucket, t.purge, t.writeLeases, t.writePeriods, t.checkExpired, t.writeRaises,
		t.writeApprovals, t.writeOperations, t.writeAudit,
	} {
		if err := step(view, effects); err != nil {
			return err
		}
	}
	return nil
}

func (t *transaction) writeBucket(view *ledger.View, effects *ledger.Effects) *ledger.Error {
	before := t.buckets[view.Key]
	switch effects.Row {
	case ledger.RowUnchanged:
		return nil
	case ledger.RowInsert:
		if before != nil {
			return violation("bucket %q exists already", view.Key)
		}
	case ledger.RowUpdate:
		if before == nil {
			return violation("bucket %q does not exist", view.Key)
		}
		if err := checkBucketUpdate(before, view.Bucket, effects.LimitWritten); err != nil {
			return err
		}
	case ledger.RowDelete:
		if before == nil {
			return violation("bucket %q does not exist", view.Key)
		}
		remove(t, t.buckets, view.Key)
		remove(t, t.leases, view.Key)
		remove(t, t.requests, view.Key)
		remove(t, t.periods, view.Key)
		remove(t, t.rollups, view.Key)
		remove(t, t.operations, view.Key)
		return nil
	}
	if err := checkBucket(view.Bucket, t.clock); err != nil {
		return err
	}
	put(t, t.buckets, view.Key, view.Bucket.Clone())
	return nil
}

// purge removes what is forgotten, and keeps what it has used.
func (t *transaction) purge(view *ledger.View, effects *ledger.Effects) *ledger.Error {
	for _, lease := range effects.DeleteLeases {
		if t.leases[view.Key][lease.ID] == nil || t.leases[view.Key][lease.ID].State == ledger.LeaseReserved {
			return violation("lease %q cannot be purged", lease.ID)
		}
		remove(t, t.leases[view.Key], lease.ID)
		remove(t, t.requests[view.Key], lease.RequestHash)
	}
	for _, id := range effects.DeleteOperations {
		remove(t, t.operations[view.Key], id)
	}
	for _, usage := range effects.Usage {
		table := tableOf(t, t.rollups, view.Key)
		lines := []ledger.Usage{usage}
		if before, found := table[usage.Position()]; found {
			lines = append(lines, before)
		}
		put(t, table, usage.Position(), ledger.SumUsage(lines)[0])
	}
	return nil
}

func (t *transaction) writeLeases(view *ledger.View, effects *ledger.Effects) *ledger.Error {
	for _, lease := range effects.InsertLeases {
		if _, found := t.leases[view.Key][lease.ID]; found {
			return violation("lease %q exists already", lease.ID)
		}
		if _, found := t.requests[view.Key][lease.RequestHash]; found {
			return violation("lease %q repeats a request key", lease.ID)
		}
		if err := t.writeLease(view.Key, lease); err != nil {
			return err
		}
		put(t, tableOf(t, t.requests, view.Key), lease.RequestHash, lease.ID)
	}
	for _, lease := range effects.UpdateLeases {
		before, found := t.leases[view.Key][lease.ID]
		if !found {
			return violation("lease %q does not exist", lease.ID)
		}
		if before.RequestHash != lease.RequestHash {
			return violation("lease %q changes its request key", lease.ID)
		}
		if err := t.writeLease(view.Key, lease); err != nil {
			return err
		}
	}
	return nil
}

func (t *transaction) writeLease(key string, lease *ledger.Lease) *ledger.Error {
	if t.buckets[key] == nil {
		return violation("lease %q has no bucket", lease.ID)
	}
	if err := checkLease(key, lease); err != nil {
		return err
	}
	put(t, tableOf(t, t.leases, key), lease.ID, lease.Clone())
	return nil
}

func (t *transaction) writePeriods(view *ledger.View, effects *ledger.Effects) *ledger.Error {
	for _, period := range effects.InsertPeriods {
		if t.periods[view.Key][period.StartedAt] != nil {
			return violation("the period of %s of bucket %q exists already", period.StartedAt, view.Key)
		}
	}
	for _, period := range effects.UpdatePeriods {
		if t.periods[view.Key][period.StartedAt] == nil {
			return violation("the period of %s of bucket %q does not exist", period.StartedAt, view.Key)
		}
	}
	for _, period := range slices.Concat(effects.InsertPeriods, effects.UpdatePeriods) {
		if !tokens(period.Limit) || !tokens(period.UsedTokens) || !tokens(period.ReservedTokens) ||
			!tokens(period.UsedTokens+period.ReservedTokens) || !period.EndedAt.After(period.StartedAt) || period.BucketKey != view.Key {
			return violation("the period %+v of bucket %q cannot be", *period, view.Key)
		}
		written := *period
		put(t, tableOf(t, t.periods, view.Key), period.StartedAt, &written)
	}
	return nil
}

// checkExpired refuses a bucket that says of a reserved lease that it has expired.
func (t *transaction) checkExpired(view *ledger.View, effects *ledger.Effects) *ledger.Error {
	b := t.buckets[view.Key]
	if b == nil || effects.Row == ledger.RowUnchanged {
		return nil
	}
	for _, lease := range t.leases[view.Key] {
		if lease.State == ledger.LeaseReserved && !lease.ExpiresAt.After(b.ExpiredThrough) {
			return violation("lease %q of bucket %q has not expired by %s", lease.ID, view.Key, b.ExpiredThrough)
		}
	}
	return nil
}

func (t *transaction) writeRaises(view *ledger.View, effects *ledger.Effects) *ledger.Error {
	table := tableOf(t, t.raises, view.Key)
	for _, raise := range effects.InsertRaises {
		if bucket, found := t.bucketOfRaise(raise.Cluster, raise.ID); found {
			return violation("raise %q exists already, on bucket %q", raise.ID, bucket)
		}
		if err := checkRaise(view.Key, raise); err != nil {
			return err
		}
		put(t, table, raise.ID, raise.Clone())
	}
	for _, raise := range effects.UpdateRaises {
		before, found := table[raise.ID]
		if !found {
			return violation("raise %q does not exist", raise.ID)
		}
		if raise.Version <= before.Version {
			return violation("raise %q goes from version %d to %d", raise.ID, before.Version, raise.Version)
		}
		if err := checkRaise(view.Key, raise); err != nil {
			return err
		}
		put(t, table, raise.ID, raise.Clone())
	}
	if len(effects.InsertRaises) == 0 && len(effects.UpdateRaises) == 0 {
		return nil
	}
	return checkRaisesOfBucket(view.Key, table)
}

// bucketOfRaise finds a raise by ID on any bucket: one object asks for one raise.
func (t *transaction) bucketOfRaise(cluster, id string) (string, bool) {
	for key, table := range t.raises {
		if raise, found := table[id]; found && raise.Cluster == cluster {
			return key, true
		}
	}
	return "", false
}

func (t *transaction) writeApprovals(_ *ledger.View, effects *ledger.Effects) *ledger.Error {
	for _, freed := range effects.FreeApprovals {
		if t.approvals[freed.Approval].RaiseID != freed.RaiseID {
			return violation("approval %q is not spent by raise %q", freed.Approval.ApprovalID, freed.RaiseID)
		}
		remove(t, t.approvals, freed.Approval)
	}
	for _, spent := range effects.SpendApprovals {
		if by, found := t.approvals[spent.Approval]; found {
			return violation("approval %q is spent already, by raise %q", spent.Approval.ApprovalID, by.RaiseID)
		}
		put(t, t.approvals, spent.Approval, spent)
	}
	return nil
}

func (t *transaction) writeOperations(view *ledger.View, effects *ledger.Effects) *ledger.Error {
	for _, record := range effects.InsertOperations {
		table := tableOf(t, t.operations, view.Key)
		if _, found := table[record.ID]; found {
			return violation("operation %q is recorded already", record.ID)
		}
		put(t, table, record.ID, cloneOperation(record))
	}
	return nil
}

func (t *transaction) writeAudit(view *ledger.View, effects *ledger.Effects) *ledger.Error {
	log := t.audit[view.Key]
	for _, row := range effects.Audit {
		if err := checkAudit(view.Key, int64(len(log)), row); err != nil {
			return err
		}
		if hasEffect(log, row) {
			return violation("operation %q has had its effect already", row.OperationID)
		}
		log = append(log, cloneAudit(row))
	}
	if bucket := t.buckets[view.Key]; bucket != nil && bucket.AuditSequence != int64(len(log)) {
		return violation("bucket %q counts %d audit rows, not %d", view.Key, bucket.AuditSequence, len(log))
	}
	if len(effects.Audit) > 0 {
		put(t, t.audit, view.Key, log)
	}
	return nil
}

// hasEffect reports whether a raise was put in force, or taken back, by the row's
// operation before.
func hasEffect(log []ledger.AuditRow, row ledger.AuditRow) bool {
	if row.Event != ledger.AuditRaiseActivated && row.Event != ledger.AuditRaiseRestored {
		return false
	}
	return slices.ContainsFunc(log, func(earlier ledger.AuditRow) bool {
		return earlier.Event == row.Event && earlier.OperationID == row.OperationID
	})
}
