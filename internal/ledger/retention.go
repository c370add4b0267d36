package ledger

import (
	"cmp"
	"slices"
	"time"
)

// Usage is what leases with the same properties have used. It stays when they are
// purged.
type Usage struct {
	// PeriodStart is that of the bucket's period in which they were reserved, and Hour
	// the UTC hour of their admission.
	PeriodStart, Hour time.Time
	// Cluster, Namespace and TenantID are the bucket's.
	Cluster, Namespace, TenantID string
	// ScopedKeyID and RaiseID are the leases': the bucket's at admission.
	ScopedKeyID, RaiseID string
	// Late is set on what was committed after expiry.
	Late bool

	UsedTokens int64
	// Leases are counted by the state that they ended in.
	Committed, Released, Expired int64
}

// UsagePosition is a place in a bucket's list of usage, in the order of its fields.
type UsagePosition struct {
	PeriodStart, Hour            time.Time
	Cluster, Namespace, TenantID string
	ScopedKeyID, RaiseID         string
	Late                         bool
}

// Position is where a line stands in the list.
func (x Usage) Position() UsagePosition {
	return UsagePosition{x.PeriodStart, x.Hour, x.Cluster, x.Namespace, x.TenantID, x.ScopedKeyID, x.RaiseID, x.Late}
}

// Compare orders positions.
func (p UsagePosition) Compare(other UsagePosition) int {
	late := func(p UsagePosition) int {
		if p.Late {
			return 1
		}
		return 0
	}
	return cmp.Or(p.PeriodStart.Compare(other.PeriodStart), p.Hour.Compare(other.Hour),
		cmp.Compare(p.Cluster, other.Cluster), cmp.Compare(p.Namespace, other.Namespace), cmp.Compare(p.TenantID, other.TenantID),
		cmp.Compare(p.ScopedKeyID, other.ScopedKeyID), cmp.Compare(p.RaiseID, other.RaiseID), cmp.Compare(late(p), late(other)))
}

// UsageQuery asks for a bucket's usage.
type UsageQuery struct {
	BucketKey string
	// From and To bound the hours of admission, [from, to); the zero time does not.
	From, To time.Time
	// After is the last position that is known; nil begins at the first.
	After *UsagePosition
	Limit int
}

// UsageOf is the usage of one lease of a bucket. One that is not settled has used
// nothing.
func UsageOf(b *Bucket, l *Lease) Usage {
	x := Usage{
		PeriodStart: l.PeriodStart, Hour: l.CreatedAt.UTC().Truncate(time.Hour),
		TenantID: b.TenantID, ScopedKeyID: l.ScopedKeyID, RaiseID: l.RaiseID, Late: l.Late,
	}
	if b.Owner != nil {
		x.Cluster, x.Namespace = b.Owner.Cluster, b.Owner.Namespace
	}
	switch l.State {
	case LeaseCommitted:
		x.UsedTokens, x.Committed = *l.ActualTokens, 1
	case LeaseReleased:
		x.Released = 1
	case LeaseExpired:
		x.Expired = 1
	case LeaseReserved:
	}
	return x
}

// SumUsage adds up what stands in the same position, in order.
func SumUsage(lines []Usage) []Usage {
	slices.SortFunc(lines, func(a, b Usage) int { return a.Position().Compare(b.Position()) })
	var sums []Usage
	for _, x := range lines {
		if n := len(sums); n > 0 && sums[n-1].Position().Compare(x.Position()) == 0 {
			sum := &sums[n-1]
			sum.UsedTokens += x.UsedTokens
			sum.Committed += x.Committed
			sum.Released += x.Released
			sum.Expired += x.Expired
			continue
		}
		sums = append(sums, x)
	}
	return sums
}

// apply forgets what is older than the bucket's retention. Counters do not change: what
// was used stays used.
func (r Purge) apply(u *unit) Result {
	b := u.view.Bucket
	if b == nil {
		return Result{Err: u.notFound()}
	}
	purged := Purged{}
	if b.Settings.Retention == 0 {
		return Result{Purged: &purged}
	}
	cutoff := u.now.Add(-b.Settings.Retention)
	// Leases that have to stay are read with those behind them.
	read := 0
	for _, l := range u.view.Leases {
		if u.purged[l] || l.ExpiresAt.After(cutoff) {
			continue
		}
		read++
		if int(purged.Leases) < r.Limit && purgeable(l, cutoff) {
			u.forget(l)
			purged.Leases++
		}
	}
	for _, o := range u.view.Operations {
		if int(purged.Operations) < r.Limit && !o.At.After(cutoff) && !IsRaiseOperation(o.ID) {
			u.fx.DeleteOperations = append(u.fx.DeleteOperations, o.ID)
			purged.Operations++
		}
	}
	u.view.Operations = slices.DeleteFunc(u.view.Operations, func(o OperationRecord) bool {
		return slices.Contains(u.fx.DeleteOperations, o.ID)
	})
	if purged.Leases > 0 {
		b.LeaseRecords -= purged.Leases
		b.PurgedThrough = later(b.PurgedThrough, cutoff)
		u.fx.Usage = SumUsage(u.fx.Usage)
		u.changed = true
	}
	u.noted = u.noted || purged.Operations > 0
	purged.More = purged.Leases > 0 && read >= r.Limit || int(purged.Operations) == r.Limit
	return Result{Purged: &purged}
}

// purgeable reports whether nothing can happen to a lease any more that would have to
// be remembered. Its expiry counts too, so that one index finds what is old.
func purgeable(l *Lease, cutoff time.Time) bool {
	return l.SettledAt != nil && !l.SettledAt.After(cutoff) && !l.ExpiresAt.After(cutoff) &&
		(l.ImportedAt == nil || !l.ImportedAt.After(cutoff))
}

func (u *unit) forget(l *Lease) {
	u.purged[l] = true
	delete(u.leaseByID, l.ID)
	delete(u.leaseByHash, l.RequestHash)
	u.fx.Usage = append(u.fx.Usage, UsageOf(u.view.Bucket, l))
}
