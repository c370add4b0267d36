package ledger

import (
	"strings"
	"sync"
	"time"
	_ "time/tzdata" // the time zones, wherever the process runs
)

// Cadence is how often a bucket begins anew.
type Cadence string

// Cadences. All are of the calendar in the bucket's time zone.
const (
	CadenceHour  Cadence = "Hour"
	CadenceDay   Cadence = "Day"
	CadenceWeek  Cadence = "Week" // from Monday
	CadenceMonth Cadence = "Month"
	CadenceYear  Cadence = "Year"
)

// PeriodSpec says when a bucket begins anew. The zero value means never.
type PeriodSpec struct {
	Every Cadence
	// TimeZone is a name of the IANA time zone database, such as Europe/Berlin.
	TimeZone string
}

// maxTimeZoneLength bounds the name of a time zone, in bytes.
const maxTimeZoneLength = 64

func (p PeriodSpec) validate() error {
	if p == (PeriodSpec{}) {
		return nil
	}
	switch p.Every {
	case CadenceHour, CadenceDay, CadenceWeek, CadenceMonth, CadenceYear:
	default:
		return invalid("period.every", "period.every must be Hour, Day, Week, Month or Year, not %q.", p.Every)
	}
	if _, err := locationOf(p.TimeZone); err != nil {
		return invalid("period.timeZone", "period.timeZone %q is not a name of the IANA time zone database, such as Etc/UTC or Europe/Berlin.", p.TimeZone)
	}
	return nil
}

// locations keeps the time zones that were asked for: their number is bounded by the
// database, as only those that exist are kept.
var locations sync.Map

func locationOf(name string) (*time.Location, error) {
	if known, ok := locations.Load(name); ok {
		return known.(*time.Location), nil
	}
	if len(name) > maxTimeZoneLength || meansAnother(name) {
		return nil, invalid("period.timeZone", "period.timeZone is missing, too long, or no name of the database.")
	}
	location, err := time.LoadLocation(name)
	if err != nil {
		return nil, err
	}
	locations.Store(name, location)
	return location, nil
}

// meansAnother reports whether a name, though it can be loaded, is none of the database:
// the empty one and Local are Go's own, and the others are files beside the database,
// which mean another zone on each machine or are on some only.
func meansAnother(name string) bool {
	switch name {
	case "", "Local", "localtime", "posixrules":
		return true
	default:
		return strings.HasPrefix(name, "posix/") || strings.HasPrefix(name, "right/")
	}
}

// bounds are the calendar period that holds an instant: [start, end).
func (p PeriodSpec) bounds(at time.Time) (start, end time.Time) {
	location, err := locationOf(p.TimeZone)
	if err != nil {
		// It was known to the process that stored it. Without its zone the calendar of
		// UTC is better than no end.
		location = time.UTC
	}
	local := at.In(location)
	year, month, day := local.Date()
	switch p.Every {
	case CadenceHour:
		past := time.Duration(local.Minute())*time.Minute + time.Duration(local.Second())*time.Second +
			time.Duration(local.Nanosecond())
		start = local.Add(-past)
		return Truncate(start), Truncate(start.Add(time.Hour))
	case CadenceWeek:
		const daysOfWeek = 7
		monday := day - int(local.Weekday()+daysOfWeek-time.Monday)%daysOfWeek
		start, end = startOfDay(year, month, monday, location), startOfDay(year, month, monday+daysOfWeek, location)
	case CadenceMonth:
		start, end = startOfDay(year, month, 1, location), startOfDay(year, month+1, 1, location)
	case CadenceYear:
		start, end = startOfDay(year, time.January, 1, location), startOfDay(year+1, time.January, 1, location)
	default:
		start, end = startOfDay(year, month, day, location), startOfDay(year, month, day+1, location)
	}
	return Truncate(start), Truncate(end)
}

// startOfDay is the first instant of a day, which is not midnight where clocks are
// put forward over it, and the earlier midnight where they are put back over it.
func startOfDay(year int, month time.Month, day int, location *time.Location) time.Time {
	midnight := time.Date(year, month, day, 0, 0, 0, 0, time.UTC)
	first := time.Time{}
	for _, around := range []time.Duration{-24 * time.Hour, 24 * time.Hour} {
		_, offset := midnight.Add(around).In(location).Zone()
		candidate := midnight.Add(-time.Duration(offset) * time.Second).In(location)
		if candidate.Hour() == 0 && candidate.Minute() == 0 && candidate.Day() == midnight.Day() &&
			(first.IsZero() || candidate.Before(first)) {
			first = candidate
		}
	}
	if !first.IsZero() {
		return first
	}
	// There is no midnight: the day begins when the clocks have been put forward.
	_, offset := midnight.Add(-24 * time.Hour).In(location).Zone()
	begins, _ := midnight.Add(-time.Duration(offset) * time.Second).In(location).ZoneBounds()
	return begins
}

// Period is one that has ended while leases of it may be left. They settle in it.
type Period struct {
	BucketKey string
	// StartedAt is the zero time for the time before the bucket's first period.
	StartedAt, EndedAt time.Time
	// Limit is what was in force at the end.
	Limit          int64
	UsedTokens     int64
	ReservedTokens int64
}

// PeriodBounds are the current period of a bucket, [StartedAt, EndsAt).
type PeriodBounds struct{ StartedAt, EndsAt time.Time }

// beginFirstPeriod gives a bucket that has none the period that holds now. What was
// counted so far counts in it: declaring a period forgives nothing. A new bucket's
// period has its calendar start, an old one's has none that is known.
func (u *unit) beginFirstPeriod(isNew bool) {
	b := u.view.Bucket
	if b.Period == (PeriodSpec{}) || !b.PeriodEnd.IsZero() {
		return
	}
	start, end := b.Period.bounds(u.now)
	if isNew {
		b.PeriodStart = start
	}
	b.PeriodEnd = end
	u.changed = true
}

// roll ends the bucket's period and begins the one that holds now; those between,
// which nobody touched, are skipped.
func (u *unit) roll() {
	b := u.view.Bucket
	if b.UsedTokens > 0 || b.ReservedTokens > 0 || b.LeaseRecords > 0 {
		ended := &Period{
			BucketKey: b.Key, StartedAt: b.PeriodStart, EndedAt: b.PeriodEnd,
			Limit: b.Limit, UsedTokens: b.UsedTokens, ReservedTokens: b.ReservedTokens,
		}
		u.view.Periods = append(u.view.Periods, ended)
		u.fx.InsertPeriods = append(u.fx.InsertPeriods, ended)
	}
	b.UsedTokens, b.ReservedTokens = 0, 0
	b.PeriodStart, b.PeriodEnd = b.PeriodEnd, time.Time{}
	if b.Period != (PeriodSpec{}) {
		start, end := b.Period.bounds(u.now)
		// Under a changed spec the calendar may begin before the last period ended.
		b.PeriodStart, b.PeriodEnd = later(b.PeriodStart, start), end
	}
	u.changed = true
}

// account is where a lease is counted: its bucket, or the period in which it was
// reserved.
type account struct {
	limit          int64
	used, reserved *int64
	// period is nil for the bucket's current one.
	period *Period
}

// accountOf finds where a lease is counted.
func (u *unit) accountOf(l *Lease) (account, bool) {
	b := u.view.Bucket
	if l.PeriodStart.Equal(b.PeriodStart) {
		return account{limit: b.Limit, used: &b.UsedTokens, reserved: &b.ReservedTokens}, true
	}
	for _, p := range u.view.Periods {
		if p.StartedAt.Equal(l.PeriodStart) {
			return account{limit: p.Limit, used: &p.UsedTokens, reserved: &p.ReservedTokens, period: p}, true
		}
	}
	return account{}, false
}

// book changes what an account counts.
func (u *unit) book(a account, used, reserved int64) {
	*a.used += used
	*a.reserved += reserved
	if a.period != nil {
		u.dirtyPeriods[a.period] = true
	}
}

func periodMissing(l *Lease) *Error {
	return corrupt("lease %s was reserved in a period of which the ledger has no row; it cannot be settled", l.ID)
}
