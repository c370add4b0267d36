package ledger

import (
	"slices"
	"time"
)

// unit is one bucket being worked on: its view, the instant, and what has changed
// so far. Rules check first and change last, so a refused request leaves nothing
// behind but what the touch did.
type unit struct {
	view   *View
	now    time.Time
	worker string
	// trigger is the operation being served.
	trigger Operation
	// badClock refuses everything when the store's clock cannot be right.
	badClock bool

	fx Effects
	// changed is set by a rule that changed anything during the current request,
	// noted by one that only wrote evidence.
	changed, noted bool
	// rowExisted tells an insert from an update at the end.
	rowExisted bool
	rowChanged bool

	leaseByID   map[string]*Lease
	leaseByHash map[Hash]*Lease
	newLeases   map[*Lease]bool
	dirtyLeases map[*Lease]bool
	// extended are those of the stored leases whose expiry has moved.
	extended     map[*Lease]bool
	purged       map[*Lease]bool
	dirtyPeriods map[*Period]bool
	newRaises    map[*Raise]bool
	dirtyRaises  map[*Raise]bool
	// overdue are the leases that the touch has yet to expire, by ExpiresAt.
	overdue []*Lease
}

func newUnit(view *View, clock time.Time, worker string) *unit {
	badClock := instant("clock", clock) != nil
	now := Truncate(clock)
	if view.Bucket != nil {
		now = later(now, view.Bucket.UpdatedAt)
	}
	if view.Approvals == nil {
		view.Approvals = map[ApprovalKey]string{}
	}
	u := &unit{
		view: view, now: now, badClock: badClock, worker: worker, rowExisted: view.Bucket != nil,
		leaseByID: map[string]*Lease{}, leaseByHash: map[Hash]*Lease{},
		newLeases: map[*Lease]bool{}, dirtyLeases: map[*Lease]bool{}, extended: map[*Lease]bool{}, purged: map[*Lease]bool{},
		dirtyPeriods: map[*Period]bool{},
		newRaises:    map[*Raise]bool{}, dirtyRaises: map[*Raise]bool{},
	}
	for _, l := range view.Leases {
		u.index(l)
		if l.State == LeaseReserved && !l.ExpiresAt.After(now) {
			u.overdue = append(u.overdue, l)
		}
	}
	slices.SortFunc(u.overdue, func(a, b *Lease) int { return a.ExpiresAt.Compare(b.ExpiresAt) })
	return u
}

func (u *unit) index(l *Lease) {
	u.leaseByID[l.ID] = l
	u.leaseByHash[l.RequestHash] = l
}

// serve carries out one request: what is due first, then the request, then what
// the request itself has made due.
func (u *unit) serve(request Request) Result {
	u.trigger = request.Operation()
	u.changed, u.noted = false, false
	if u.badClock {
		return Result{Err: Errorf(CodeInvalidClock, "The store's clock is outside the years 1970 to 9999.")}
	}
	if err := u.checkState(); err != nil {
		return Result{Err: err}
	}
	expiredIDs := u.touch()
	result := request.apply(u)
	if op := request.Operation(); (op == OpReapExpired || op == OpTouch) && result.Err == nil {
		result.ExpiredLeaseIDs = expiredIDs
	}
	u.touch()
	if b := u.view.Bucket; b != nil && (u.changed || u.noted || u.rowChanged) {
		// Whatever is written moves the bucket's time, which never runs backwards; only
		// a change moves the revision.
		b.UpdatedAt = u.now
		u.rowChanged = true
		if u.changed {
			b.Revision++
		}
	}
	if result.Err == nil && u.view.Bucket != nil {
		snapshot := NewSnapshot(u.view.Bucket, u.view.Raises)
		result.Snapshot = &snapshot
	}
	if result.Raise != nil {
		result.Raise = result.Raise.Clone()
	}
	if result.Lease != nil {
		result.Lease = result.Lease.Clone()
	}
	return result
}

// checkState refuses to decide on a row that cannot be true.
func (u *unit) checkState() *Error {
	b := u.view.Bucket
	if b == nil {
		return nil
	}
	for _, v := range []int64{b.Limit, b.UsedTokens, b.ReservedTokens, b.UsedTokens + b.ReservedTokens} {
		if v < 0 || v > MaxTokens {
			return corrupt("bucket %q holds the figure %d, which is out of range", b.Key, v)
		}
	}
	if b.Revision >= MaxTokens {
		return corrupt("the revision of bucket %q is exhausted", b.Key)
	}
	return nil
}

// effects collects what must be made durable.
func (u *unit) effects() *Effects {
	b := u.view.Bucket
	switch {
	case u.fx.Row == RowDelete:
	case b != nil && !u.rowExisted:
		u.fx.Row = RowInsert
	case b != nil && u.rowChanged:
		u.fx.Row = RowUpdate
	}
	for _, l := range u.view.Leases {
		switch {
		case u.fx.Row == RowDelete:
			// They go with their bucket.
		case u.purged[l]:
			u.fx.DeleteLeases = append(u.fx.DeleteLeases, l)
		case u.newLeases[l]:
			u.fx.InsertLeases = append(u.fx.InsertLeases, l)
		case u.dirtyLeases[l]:
			u.fx.UpdateLeases = append(u.fx.UpdateLeases, l)
			if u.extended[l] {
				u.fx.ExtendLeases = append(u.fx.ExtendLeases, l)
			}
		}
	}
	for _, p := range u.view.Periods {
		if u.fx.Row != RowDelete && u.dirtyPeriods[p] && !slices.Contains(u.fx.InsertPeriods, p) {
			u.fx.UpdatePeriods = append(u.fx.UpdatePeriods, p)
		}
	}
	if u.fx.Row == RowDelete {
		u.fx.InsertPeriods, u.fx.Usage, u.fx.DeleteOperations = nil, nil, nil
	}
	for _, r := range u.view.Raises {
		switch {
		case u.newRaises[r]:
			u.fx.InsertRaises = append(u.fx.InsertRaises, r)
		case u.dirtyRaises[r]:
			u.fx.UpdateRaises = append(u.fx.UpdateRaises, r)
		}
	}
	return &u.fx
}

func (u *unit) addLease(l *Lease) {
	u.view.Leases = append(u.view.Leases, l)
	u.index(l)
	u.newLeases[l] = true
	u.view.Bucket.LeaseRecords++
	u.changed = true
}

func (u *unit) changeLease(l *Lease) {
	if !u.newLeases[l] {
		u.dirtyLeases[l] = true
	}
	u.changed = true
}

func (u *unit) addRaise(r *Raise) {
	u.view.Raises = append(u.view.Raises, r)
	u.newRaises[r] = true
	u.changed = true
}

// changeRaise marks a record as changed; its version counts changes.
func (u *unit) changeRaise(r *Raise) {
	if !u.newRaises[r] {
		u.dirtyRaises[r] = true
	}
	r.Version++
	u.changed = true
}

// raiseFor finds the record that an object stands for, or stood for.
func (u *unit) raiseFor(uid string) *Raise {
	i := slices.IndexFunc(u.view.Raises, func(r *Raise) bool { return r.ID == uid || r.CurrentUID == uid })
	if i < 0 {
		return nil
	}
	return u.view.Raises[i]
}

func (u *unit) activeRaise() *Raise {
	for _, r := range u.view.Raises {
		if r.State == RaiseActive {
			return r
		}
	}
	return nil
}

// holdsPointer reports whether the limit in force is still the one that the raise
// set: nobody has written it since.
func (u *unit) holdsPointer(r *Raise) bool {
	b := u.view.Bucket
	return b.ActiveRaiseID == r.ID && b.LimitEpoch == r.Epoch && r.AppliedLimit != nil && b.Limit == *r.AppliedLimit
}

// writeLimit is the only place that changes a limit. It advances the epoch and
// points the bucket at the raise that owns the limit, or at none.
func (u *unit) writeLimit(limit int64, raise *Raise) {
	b := u.view.Bucket
	b.Limit = limit
	b.LimitEpoch++
	b.ActiveRaiseID = ""
	if raise != nil {
		b.ActiveRaiseID = raise.ID
		raise.Epoch = b.LimitEpoch
	}
	u.fx.LimitWritten = true
	u.changed = true
}

// operation returns the recorded outcome of an operation ID, nil for none.
func (u *unit) operation(id string) *OperationRecord {
	for i := range u.view.Operations {
		if u.view.Operations[i].ID == id {
			return &u.view.Operations[i]
		}
	}
	return nil
}

func (u *unit) recordOperation(record OperationRecord) {
	record.BucketKey = u.view.Key
	record.At = u.now
	u.view.Operations = append(u.view.Operations, record)
	u.fx.InsertOperations = append(u.fx.InsertOperations, record)
	u.noted = true
}

// audit appends a row and fills in what the bucket knows. A decision not to
// change anything is written down, but it is no change: the revision stays.
func (u *unit) audit(row AuditRow) {
	row.BucketKey, row.At, row.Worker, row.Trigger = u.view.Key, u.now, u.worker, string(u.trigger)
	if b := u.view.Bucket; b != nil {
		b.AuditSequence++
		row.Sequence = b.AuditSequence
		if b.Owner != nil {
			row.Cluster, row.Namespace, row.OwnerName = b.Owner.Cluster, b.Owner.Namespace, b.Owner.Name
		}
		row.BucketScopedKeyID = b.ScopedKeyID
		if row.TenantID == "" {
			row.TenantID = b.TenantID
		}
		row.EffectiveLimit = pointer(b.Limit)
		row.DeclaredLimit = clonePointer(b.DeclaredLimit)
		row.UsedTokens, row.ReservedTokens, row.LimitEpoch = b.UsedTokens, b.ReservedTokens, b.LimitEpoch
	} else {
		h := &u.view.History
		h.LastSequence++
		if slices.Contains(LifeCycleEvents(), row.Event) {
			h.LastEvent = row.Event
		}
		row.Sequence = h.LastSequence
		row.Cluster, row.Namespace, row.OwnerName = h.Cluster, h.Namespace, h.OwnerName
	}
	u.fx.Audit = append(u.fx.Audit, row)
	u.noted = true
}

func pointer[T any](v T) *T { return &v }
