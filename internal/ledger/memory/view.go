package memory

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

// load copies what the rules must see of one bucket.
func (r *rows) load(key string, clock time.Time, needs ledger.Needs) *ledger.View {
	view := &ledger.View{
		Key:       key,
		Bucket:    r.buckets[key].Clone(),
		Approvals: map[ledger.ApprovalKey]string{},
	}
	if view.Bucket == nil {
		view.History = r.history(key)
	}
	r.loadLeases(view, clock, needs)
	r.loadPeriods(view, needs)
	r.loadRaises(view, needs)
	if view.Bucket != nil && needs.Oldest > 0 {
		r.loadOldest(view, clock, needs.Oldest)
	}
	for _, id := range unique(needs.OperationIDs) {
		known := slices.ContainsFunc(view.Operations, func(o ledger.OperationRecord) bool { return o.ID == id })
		if record, found := r.operations[key][id]; found && !known {
			view.Operations = append(view.Operations, cloneOperation(record))
		}
	}
	return view
}

// loadOldest copies the records for which the retention may be over, those first whose
// time came first.
func (r *rows) loadOldest(view *ledger.View, clock time.Time, limit int) {
	if view.Bucket.UpdatedAt.After(clock) {
		clock = view.Bucket.UpdatedAt
	}
	retention := view.Bucket.Settings.Retention
	if retention == 0 {
		return
	}
	cutoff := clock.Add(-retention)
	var old []*ledger.Lease
	for _, lease := range r.leases[view.Key] {
		if !lease.ExpiresAt.After(cutoff) {
			old = append(old, lease)
		}
	}
	slices.SortFunc(old, func(a, b *ledger.Lease) int { return cmp.Or(a.ExpiresAt.Compare(b.ExpiresAt), cmp.Compare(a.ID, b.ID)) })
	for _, lease := range old[:min(len(old), limit)] {
		if !slices.ContainsFunc(view.Leases, func(l *ledger.Lease) bool { return l.ID == lease.ID }) {
			view.Leases = append(view.Leases, lease.Clone())
		}
	}
	var operations []ledger.OperationRecord
	for _, operation := range r.operations[view.Key] {
		if !operation.At.After(cutoff) && !ledger.IsRaiseOperation(operation.ID) {
			operations = append(operations, operation)
		}
	}
	slices.SortFunc(operations, func(a, b ledger.OperationRecord) int { return cmp.Or(a.At.Compare(b.At), cmp.Compare(a.ID, b.ID)) })
	for _, operation := range operations[:min(len(operations), limit)] {
		view.Operations = append(view.Operations, cloneOperation(operation))
	}
}

func (r *rows) history(key string) ledger.History {
	log := r.audit[key]
	if len(log) == 0 {
		return ledger.History{}
	}
	h := ledger.History{LastSequence: log[len(log)-1].Sequence}
	for _, row := range slices.Backward(log) {
		if slices.Contains(ledger.LifeCycleEvents(), row.Event) {
			h.LastEvent, h.Cluster, h.Namespace, h.OwnerName = row.Event, row.Cluster, row.Namespace, row.OwnerName
			break
		}
	}
	return h
}

// loadLeases copies the named leases and the overdue ones, by ID.
func (r *rows) loadLeases(view *ledger.View, clock time.Time, needs ledger.Needs) {
	ids := slices.Clone(needs.LeaseIDs)
	for _, hash := range needs.RequestHashes {
		ids = append(ids, r.requests[view.Key][hash])
	}
	if b := view.Bucket; b != nil {
		at := clock
		if b.UpdatedAt.After(at) {
			at = b.UpdatedAt
		}
		for id, lease := range r.leases[view.Key] {
			if lease.State == ledger.LeaseReserved && !lease.ExpiresAt.After(at) {
				ids = append(ids, id)
			}
		}
	}
	for _, id := range unique(ids) {
		if lease, found := r.leases[view.Key][id]; found {
			view.Leases = append(view.Leases, lease.Clone())
		}
	}
}

// loadPeriods copies the ended periods of the leases in the view, and those that are
// asked for.
func (r *rows) loadPeriods(view *ledger.View, needs ledger.Needs) {
	for start, period := range r.periods[view.Key] {
		needed := slices.ContainsFunc(view.Leases, func(l *ledger.Lease) bool { return l.PeriodStart.Equal(start) })
		if needed || needs.LivePeriods && period.ReservedTokens > 0 {
			loaded := *period
			view.Periods = append(view.Periods, &loaded)
		}
	}
}

// loadRaises copies the live raises and the named ones, by ID, and says who spent
// which approval.
func (r *rows) loadRaises(view *ledger.View, needs ledger.Needs) {
	approvals := slices.Clone(needs.Approvals)
	ofBucket := r.raises[view.Key]
	for _, id := range slices.Sorted(maps.Keys(ofBucket)) {
		raise := ofBucket[id]
		live := !raise.State.Ended()
		if live {
			approvals = append(approvals, approvalOf(raise))
		}
		named := slices.Contains(needs.RaiseUIDs, raise.ID) || slices.Contains(needs.RaiseUIDs, raise.CurrentUID) ||
			slices.Contains(needs.Grants, grantOf(raise))
		if live || named {
			view.Raises = append(view.Raises, raise.Clone())
		}
	}
	for _, approval := range approvals {
		if spent, found := r.approvals[approval]; found {
			view.Approvals[approval] = spent.RaiseID
		}
	}
}

// liveRaises are copies of the raises of a bucket that have not ended, by ID.
func (r *rows) liveRaises(key string) []*ledger.Raise {
	var live []*ledger.Raise
	for _, id := range slices.Sorted(maps.Keys(r.raises[key])) {
		if raise := r.raises[key][id]; !raise.State.Ended() {
			live = append(live, raise.Clone())
		}
	}
	return live
}

func approvalOf(raise *ledger.Raise) ledger.ApprovalKey {
	return ledger.ApprovalKey{
		Cluster: raise.Cluster, Namespace: raise.Namespace,
		TenantID: raise.TenantID, ApprovalID: raise.ApprovalID,
	}
}

func grantOf(raise *ledger.Raise) ledger.GrantKey {
	return ledger.GrantKey{
		Cluster: raise.Cluster, Namespace: raise.Namespace, Name: raise.Name,
		ApprovalID: raise.ApprovalID, GrantHash: raise.GrantHash,
	}
}

func unique(names []string) []string {
	sorted := slices.Compact(slices.Sorted(slices.Values(names)))
	if len(sorted) > 0 && sorted[0] == "" {
		sorted = sorted[1:]
	}
	return sorted
}

func cloneOperation(record ledger.OperationRecord) ledger.OperationRecord {
	record.Details = maps.Clone(record.Details)
	return record
}

func cloneAudit(row ledger.AuditRow) ledger.AuditRow {
	row.RequestedLimit = clonePointer(row.RequestedLimit)
	row.PriorLimit = clonePointer(row.PriorLimit)
	row.EffectiveLimit = clonePointer(row.EffectiveLimit)
	row.DeclaredLimit = clonePointer(row.DeclaredLimit)
	row.DueAt = clonePointer(row.DueAt)
	row.Tokens = clonePointer(row.Tokens)
	return row
}

func clonePointer[T any](p *T) *T {
	if p == nil {
		return nil
	}
	v := *p
	return &v
}
