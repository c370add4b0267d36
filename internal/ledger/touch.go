package ledger

import (
	"slices"
	"strings"
	"time"
)

// stepKind orders steps that are due at one instant. Leases expire before any of
// them.
type stepKind int

const (
	stepLostPointer stepKind = iota
	stepRestore
	stepCloseWindow
	stepGraceOver
	stepRoll
	stepStart
)

// step is one thing that time, or another hand, has made due on a raise, or the end
// of the bucket's period.
type step struct {
	kind  stepKind
	dueAt time.Time
	// raise is nil for stepRoll.
	raise *Raise
	// actor is set when somebody other than the raise's own actor made it due.
	actor string
}

// touch performs what is due: raises starting and ending, leases expiring, and the
// period ending, in the order of their instants. It returns the IDs of the leases that
// expired, in byte order, and leaves NextTransitionAt in the future.
func (u *unit) touch() []string {
	b := u.view.Bucket
	if b == nil {
		u.endRaisesOfVanishedBucket()
		return nil
	}
	// Each step ends a raise or marks it as waiting, and each end of another raise
	// can make it wait anew; the bound only guards against a rule that forgets to.
	var ids []string
	n := len(u.view.Raises) + 2
	for range 2 * n * n {
		next, found := u.nextStep()
		if !found {
			break
		}
		ids = append(ids, u.expireLeases(next.dueAt)...)
		u.perform(next)
	}
	ids = append(ids, u.expireLeases(u.now)...)
	slices.Sort(ids)
	u.noteExpired()
	if due := u.nextTransition(); !due.Equal(b.NextTransitionAt) {
		b.NextTransitionAt = due
		u.rowChanged = true
	}
	return ids
}

// nextStep finds the earliest due step; at one instant the kinds decide, then
// the raises' own order.
func (u *unit) nextStep() (step, bool) {
	var due []step
	raised := u.activeRaise() != nil
	for _, r := range u.view.Raises {
		due = u.appendDue(due, r, raised)
	}
	if end := u.view.Bucket.PeriodEnd; !end.IsZero() && !u.now.Before(end) {
		due = append(due, step{kind: stepRoll, dueAt: end})
	}
	if len(due) == 0 {
		return step{}, false
	}
	return slices.MinFunc(due, func(a, b step) int {
		if c := a.dueAt.Compare(b.dueAt); c != 0 {
			return c
		}
		if a.kind != b.kind {
			return int(a.kind) - int(b.kind)
		}
		return compareRaises(a.raise, b.raise)
	}), true
}

// compareRaises orders raises that want to start at one instant: who asked first,
// then by ID.
func compareRaises(a, b *Raise) int {
	if c := a.StartsAt.Compare(b.StartsAt); c != 0 {
		return c
	}
	if c := a.StoredAt.Compare(b.StoredAt); c != 0 {
		return c
	}
	return strings.Compare(a.ID, b.ID)
}

func (u *unit) appendDue(due []step, r *Raise, raised bool) []step {
	switch r.State {
	case RaiseActive:
		if !u.holdsPointer(r) {
			// It was not time that made this due: it comes before everything that
			// did, so that no other raise waits for one that is over.
			return append(due, step{kind: stepLostPointer, raise: r})
		}
		if !u.now.Before(r.ExpiresAt) {
			due = append(due, step{kind: stepRestore, dueAt: r.ExpiresAt, raise: r})
		}
	case RaisePending:
		if !u.now.Before(r.ExpiresAt) {
			due = append(due, step{kind: stepCloseWindow, dueAt: r.ExpiresAt, raise: r})
		}
		if u.now.Before(r.StartsAt) {
			return due
		}
		if u.inGrace(r) && !u.now.Before(r.MismatchSince.Add(MismatchGrace)) {
			due = append(due, step{kind: stepGraceOver, dueAt: r.MismatchSince.Add(MismatchGrace), raise: r})
		}
		if u.startIsDue(r, raised) {
			due = append(due, step{kind: stepStart, dueAt: r.StartsAt, raise: r})
		}
	case RaiseRestoring, RaiseRestored, RaiseFailed:
	}
	return due
}

// startIsDue reports whether trying to start r now would change anything. A raise
// that waits for something has noted so, and is tried again only when that is
// over.
func (u *unit) startIsDue(r *Raise, raised bool) bool {
	if !u.now.Before(r.ExpiresAt) {
		return false
	}
	switch u.effectiveMode() {
	case ModeObserveOnly:
		return r.Reason != ReasonObserveOnly
	case ModeEnforce:
		if raised {
			return r.Reason != ReasonBucketAlreadyRaised
		}
		return r.MismatchSince == nil || u.view.Bucket.Limit == r.NormalLimit
	default:
		return true
	}
}

// inGrace reports whether a raise waits for the limit to become the one that it
// expects. In an observe-only bucket nothing waits.
func (u *unit) inGrace(r *Raise) bool {
	return r.MismatchSince != nil && u.effectiveMode() == ModeEnforce
}

// endRaisesOfVanishedBucket ends raises that have no limit left to be about: an
// active one at once, for review, since it is without effect; a pending one when
// its window is over, because the row may be restored until then.
func (u *unit) endRaisesOfVanishedBucket() {
	for _, r := range u.view.Raises {
		switch {
		case r.State == RaiseActive:
			r.ReviewRequired = true
			u.endWithoutBucket(r, ReasonLimitChanged, r.Actor)
		case r.State == RaisePending && !u.now.Before(r.ExpiresAt):
			u.endWithoutBucket(r, ReasonWindowMissed, r.Actor)
		}
	}
}

func (u *unit) effectiveMode() Mode {
	if m := u.view.Bucket.RaisePolicy.Mode; m != "" {
		return m
	}
	return ModeDisabled
}

// nextTransition is the earliest instant at which time alone makes something due.
// It is in the future, because everything due has been performed.
func (u *unit) nextTransition() time.Time {
	var next time.Time
	consider := func(t time.Time) {
		if next.IsZero() || t.Before(next) {
			next = t
		}
	}
	if end := u.view.Bucket.PeriodEnd; !end.IsZero() {
		consider(end)
	}
	raised := u.activeRaise() != nil
	for _, r := range u.view.Raises {
		switch r.State {
		case RaiseActive:
			consider(r.ExpiresAt)
		case RaisePending:
			consider(r.ExpiresAt)
			if u.now.Before(r.StartsAt) && !raised {
				consider(r.StartsAt)
			}
			if u.inGrace(r) {
				consider(r.MismatchSince.Add(MismatchGrace))
			}
		case RaiseRestoring, RaiseRestored, RaiseFailed:
		}
	}
	return next
}

// expireLeases gives back what overdue leases hold, up to an instant, and returns
// their IDs.
func (u *unit) expireLeases(upTo time.Time) []string {
	var ids []string
	for len(u.overdue) > 0 && !u.overdue[0].ExpiresAt.After(upTo) {
		l := u.overdue[0]
		u.overdue = u.overdue[1:]
		// What was reserved in a period whose row somebody removed is held nowhere.
		if a, found := u.accountOf(l); found {
			u.book(a, 0, -l.ReservedTokens)
		}
		l.State, l.SettledAt = LeaseExpired, pointer(u.now)
		u.changeLease(l)
		ids = append(ids, l.ID)
	}
	return ids
}

// noteExpired moves ExpiredThrough to where the touch has come. That is written
// with the row's next change; when the search for overdue leases came to its bound
// it is one itself, so that the next search goes on from there.
func (u *unit) noteExpired() {
	b := u.view.Bucket
	through := u.now
	if at := u.view.OverdueThrough; !at.IsZero() {
		u.rowChanged = true
		if at.Before(through) {
			through = at
		}
	}
	b.ExpiredThrough = later(b.ExpiredThrough, through)
}
