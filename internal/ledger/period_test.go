package ledger

import (
	"testing"
	"time"
)

// Goal: periods are those of the calendar where the bucket is, whatever the clocks do
// there. Method: an instant of each kind of day, and the bounds in local time.
func TestPeriodBounds(t *testing.T) {
	const layout = "2006-01-02T15:04:05Z07:00"
	for _, c := range []struct {
		name, zone, at string
		every          Cadence
		start, end     string
		length         time.Duration
	}{
		{"an hour", "Etc/UTC", "2026-11-30T18:59:59Z", CadenceHour, "2026-11-30T18:00:00Z", "2026-11-30T19:00:00Z", time.Hour},
		{"an hour where it begins at the half", "Asia/Kolkata", "2026-11-30T18:40:00Z", CadenceHour, "2026-12-01T00:00:00+05:30", "2026-12-01T01:00:00+05:30", time.Hour},
		{"the first of two hours with one name", "Europe/Berlin", "2026-10-25T00:30:00Z", CadenceHour, "2026-10-25T02:00:00+02:00", "2026-10-25T02:00:00+01:00", time.Hour},
		{"the second of them", "Europe/Berlin", "2026-10-25T01:30:00Z", CadenceHour, "2026-10-25T02:00:00+01:00", "2026-10-25T03:00:00+01:00", time.Hour},
		{"a day", "Etc/UTC", "2026-02-28T23:59:59Z", CadenceDay, "2026-02-28T00:00:00Z", "2026-03-01T00:00:00Z", 24 * time.Hour},
		{"a day of 23 hours", "Europe/Berlin", "2026-03-29T10:00:00Z", CadenceDay, "2026-03-29T00:00:00+01:00", "2026-03-30T00:00:00+02:00", 23 * time.Hour},
		{"a day of 25 hours", "Europe/Berlin", "2026-10-25T10:00:00Z", CadenceDay, "2026-10-25T00:00:00+02:00", "2026-10-26T00:00:00+01:00", 25 * time.Hour},
		{"a day that begins at one", "America/Asuncion", "2023-10-01T12:00:00Z", CadenceDay, "2023-10-01T01:00:00-03:00", "2023-10-02T00:00:00-03:00", 23 * time.Hour},
		{"the day before it", "America/Asuncion", "2023-09-30T12:00:00Z", CadenceDay, "2023-09-30T00:00:00-04:00", "2023-10-01T01:00:00-03:00", 24 * time.Hour},
		{"a day with two midnights", "America/Havana", "2026-11-01T12:00:00Z", CadenceDay, "2026-11-01T00:00:00-04:00", "2026-11-02T00:00:00-05:00", 25 * time.Hour},
		{"the day before a day that was left out", "Pacific/Apia", "2011-12-30T00:00:00Z", CadenceDay, "2011-12-29T00:00:00-10:00", "2011-12-31T00:00:00+14:00", 24 * time.Hour},
		{"a week from Monday", "Etc/UTC", "2026-11-30T00:00:00Z", CadenceWeek, "2026-11-30T00:00:00Z", "2026-12-07T00:00:00Z", 7 * 24 * time.Hour},
		{"a week on its Sunday", "Etc/UTC", "2026-11-29T23:59:59Z", CadenceWeek, "2026-11-23T00:00:00Z", "2026-11-30T00:00:00Z", 7 * 24 * time.Hour},
		{"a week over a new year", "Etc/UTC", "2027-01-01T12:00:00Z", CadenceWeek, "2026-12-28T00:00:00Z", "2027-01-04T00:00:00Z", 7 * 24 * time.Hour},
		{"a week with a change of the clocks", "Europe/Berlin", "2026-03-25T12:00:00Z", CadenceWeek, "2026-03-23T00:00:00+01:00", "2026-03-30T00:00:00+02:00", 7*24*time.Hour - time.Hour},
		{"a month of 31 days", "Etc/UTC", "2026-01-31T23:59:59Z", CadenceMonth, "2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z", 31 * 24 * time.Hour},
		{"February in a leap year", "Etc/UTC", "2028-02-29T12:00:00Z", CadenceMonth, "2028-02-01T00:00:00Z", "2028-03-01T00:00:00Z", 29 * 24 * time.Hour},
		{"December", "Asia/Tokyo", "2026-12-31T14:59:59Z", CadenceMonth, "2026-12-01T00:00:00+09:00", "2027-01-01T00:00:00+09:00", 31 * 24 * time.Hour},
		{"a year", "Asia/Tokyo", "2026-12-31T15:00:00Z", CadenceYear, "2027-01-01T00:00:00+09:00", "2028-01-01T00:00:00+09:00", 365 * 24 * time.Hour},
	} {
		at, err := time.Parse(layout, c.at)
		if err != nil {
			t.Fatal(err)
		}
		spec := PeriodSpec{Every: c.every, TimeZone: c.zone}
		if err := spec.validate(); err != nil {
			t.Fatal(err)
		}
		start, end := spec.bounds(at)
		location, err := time.LoadLocation(c.zone)
		if err != nil {
			t.Fatal(err)
		}
		if got := start.In(location).Format(layout); got != c.start {
			t.Errorf("%s begins at %s, want %s", c.name, got, c.start)
		}
		if got := end.In(location).Format(layout); got != c.end {
			t.Errorf("%s ends at %s, want %s", c.name, got, c.end)
		}
		if got := end.Sub(start); got != c.length {
			t.Errorf("%s lasts %v, want %v", c.name, got, c.length)
		}
	}
}

// Goal: one period follows the other, none is empty and each holds the instant that
// it was asked for. Method: from end to end through fifteen years of zones that have
// changed their clocks in every way.
func TestPeriodsFollowEachOther(t *testing.T) {
	from, to := time.Date(2010, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(2025, 1, 1, 0, 0, 0, 0, time.UTC)
	for _, zone := range []string{
		"Etc/UTC", "Europe/Berlin", "America/St_Johns", "America/Havana", "America/Asuncion", "Asia/Beirut", "Asia/Gaza",
		"Africa/Cairo", "Pacific/Apia", "Australia/Lord_Howe", "Asia/Kathmandu", "Antarctica/Troll",
	} {
		for _, every := range []Cadence{CadenceHour, CadenceDay, CadenceWeek, CadenceMonth, CadenceYear} {
			spec := PeriodSpec{Every: every, TimeZone: zone}
			u := &unit{view: &View{Bucket: &Bucket{Period: spec}}, now: from}
			u.beginFirstPeriod(true)
			b := u.view.Bucket
			for b.PeriodEnd.Before(to) {
				before := *b
				// Someone comes by at the very end of it, or somewhat later.
				u.now = b.PeriodEnd
				u.roll()
				if !b.PeriodStart.Equal(before.PeriodEnd) || !b.PeriodEnd.After(b.PeriodStart) {
					t.Fatalf("%s in %s: [%v, %v) is followed by [%v, %v)", every, zone,
						before.PeriodStart, before.PeriodEnd, b.PeriodStart, b.PeriodEnd)
				}
			}
		}
	}
}

// Goal: what is no period is refused with what to change.
func TestPeriodSpecs(t *testing.T) {
	for _, bad := range []PeriodSpec{
		{Every: "Minute", TimeZone: "Etc/UTC"}, {Every: CadenceDay}, {TimeZone: "Etc/UTC"}, {Every: CadenceDay, TimeZone: "Local"},
		{Every: CadenceDay, TimeZone: "localtime"}, {Every: CadenceDay, TimeZone: "right/Europe/Berlin"},
		{Every: CadenceDay, TimeZone: "Europe/Atlantis"}, {Every: CadenceDay, TimeZone: "../../etc/passwd"},
		{Every: CadenceDay, TimeZone: string(make([]byte, maxTimeZoneLength+1))},
	} {
		if err := bad.validate(); !HasCode(err, CodeInvalidInput) {
			t.Errorf("%+v: %v, want invalid_input", bad, err)
		}
	}
	if err := (PeriodSpec{}).validate(); err != nil {
		t.Errorf("no period: %v", err)
	}
}
