package ledger

import (
	"testing"
	"time"
)

// Goal: a clock that cannot be right decides nothing. Method: a view without a
// row, and instants around the bounds.
func TestClockOutOfRange(t *testing.T) {
	for _, test := range []struct {
		name  string
		clock time.Time
		want  Code
	}{
		{"before 1970", time.Unix(-1, 0), CodeInvalidClock},
		{"1970", time.Unix(0, 0), ""},
		{"the last instant", maxInstant, ""},
		{"after 9999", maxInstant.Add(time.Second), CodeInvalidClock},
		{"the zero time", time.Time{}, CodeInvalidClock},
	} {
		t.Run(test.name, func(t *testing.T) {
			view := &View{Key: "b"}
			results, effects := Run(view, test.clock, "w", []Request{OpenBucket{Key: "b", Limit: 1}})
			var code Code
			if results[0].Err != nil {
				code = results[0].Err.Code
			}
			if code != test.want || effects.Empty() != (test.want != "") {
				t.Errorf("got %q, %+v", code, effects)
			}
		})
	}
}

// Goal: a bucket that points at a raise which nobody would end admits nothing, and
// a decision on its limit heals it. Method: a view as another hand leaves it that
// removed the raise's row, or restored the bucket's row from a backup.
func TestPointerWithoutRaise(t *testing.T) {
	view := &View{Key: "b", Bucket: &Bucket{
		Key: "b", Limit: 300, ActiveRaiseID: "gone", LimitEpoch: 1, Revision: 1, AuditSequence: 1,
		Settings: DefaultSettings(), CreatedAt: time.Unix(1000, 0), UpdatedAt: time.Unix(1000, 0),
	}}
	reserve := Reserve{Key: "b", RequestKey: "k", Fingerprint: "f", Tokens: 1}
	setLimit := SetLimit{Key: "b", ExpectedLimit: 300, Limit: 100, OperationID: "o"}
	results, _ := Run(view, time.Unix(2000, 0), "w", []Request{reserve, setLimit, reserve})
	for i, want := range []Code{CodeStateCorrupt, "", ""} {
		var code Code
		if err := results[i].Err; err != nil {
			code = err.Code
		}
		if code != want {
			t.Errorf("request %d was answered %q, want %q", i, code, want)
		}
	}
}

// Goal: a lease that is made after the clock went back expires like any other. Method:
// a search for overdue leases that came to its bound, and found none to expire; then a
// clock of an hour before, as after a failover.
func TestClockBackAfterSearch(t *testing.T) {
	begin := time.Unix(100_000, 0).UTC()
	bucket := &Bucket{
		Key: "b", Limit: 1, Revision: 1, AuditSequence: 1, Settings: DefaultSettings(), CreatedAt: begin, UpdatedAt: begin,
	}
	searched := &View{Key: "b", Bucket: bucket, OverdueThrough: begin.Add(time.Hour)}
	if _, effects := Run(searched, begin.Add(time.Hour), "w", []Request{Touch{Key: "b"}}); effects.Row != RowUpdate || bucket.Revision != 1 {
		t.Fatalf("the search led to %+v and %+v", effects, bucket)
	}
	reserve := Reserve{Key: "b", RequestKey: "k", Fingerprint: "f", Tokens: 1, TTL: time.Second}
	results, _ := Run(&View{Key: "b", Bucket: bucket}, begin, "w", []Request{reserve})
	if lease := results[0].Lease; lease == nil || !lease.ExpiresAt.After(bucket.ExpiredThrough) {
		t.Errorf("the lease is %+v, and leases were expired through %s: it is never found", lease, bucket.ExpiredThrough)
	}
}
