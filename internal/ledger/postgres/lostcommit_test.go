package postgres

import (
	"context"
	"testing"
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

// plainKey is a bucket without a raise.
const plainKey = "tenants/plain"

// committed is one thing that a COMMIT makes durable.
type committed struct {
	name string
	// due is when it is asked for, as a distance from start.
	due time.Duration
	ask func(ctx context.Context, store *Store) error
	// effect reads from the rows whether it stands, evidence how often it was done.
	effect, evidence string
}

var commits = []committed{
	{
		name: "set limit",
		ask: request(ledger.SetLimit{Key: plainKey, ExpectedLimit: 100, Limit: 300, OperationID: "op-1"}, func(r ledger.Result) bool {
			return r.Snapshot.Limit == 300
		}),
		effect:   `SELECT limit_tokens = 300 FROM tokenlease.buckets WHERE bucket_key = 'tenants/plain'`,
		evidence: `SELECT count(*) FROM tokenlease.audit WHERE operation_id = 'op-1'`,
	},
	{
		name: "reserve",
		ask: request(ledger.Reserve{Key: plainKey, RequestKey: "1", Fingerprint: "f", Tokens: 60}, func(r ledger.Result) bool {
			return r.Snapshot.ReservedTokens == 60 && r.Lease.State == ledger.LeaseReserved
		}),
		effect:   `SELECT reserved_tokens = 60 FROM tokenlease.buckets WHERE bucket_key = 'tenants/plain'`,
		evidence: `SELECT count(*) FROM tokenlease.leases`,
	},
	{
		name: "activate",
		due:  time.Minute,
		ask:  sweepOnce,
		effect: `SELECT (b.limit_tokens, r.state) = (300, 'active')
			FROM tokenlease.buckets AS b JOIN tokenlease.raises AS r USING (bucket_key)`,
		evidence: `SELECT count(*) FROM tokenlease.audit WHERE operation_id = 'raise-1:activate'`,
	},
	{
		name: "restore",
		due:  2 * time.Minute,
		ask:  sweepOnce,
		effect: `SELECT (b.limit_tokens, r.state) = (100, 'restored')
			FROM tokenlease.buckets AS b JOIN tokenlease.raises AS r USING (bucket_key)`,
		evidence: `SELECT count(*) FROM tokenlease.audit WHERE operation_id = 'raise-1:restore'`,
	},
}

// request asks for one thing, whose success must show what was done; nil asks for no
// more than success.
func request(request ledger.Request, shows func(ledger.Result) bool) func(context.Context, *Store) error {
	return func(ctx context.Context, store *Store) error {
		result := ledger.New(store, nil).Do(ctx, request)[0]
		switch {
		case result.Err != nil:
			return result.Err
		case shows != nil && !shows(result):
			return ledger.Errorf(ledger.CodeStoreContractViolation, "the answer shows %+v", result.Snapshot)
		default:
			return nil
		}
	}
}

// sweepOnce is one pass of the sweeper that meets the bucket. The server may not have
// noticed yet that the connection of an earlier one is gone, and hold the bucket for it;
// then the pass goes by.
func sweepOnce(ctx context.Context, store *Store) error {
	deadline := time.Now().Add(testTimeout)
	for {
		swept, err := store.Sweep(ctx, ledger.SweepRequest{Limit: 10})
		held := err == nil && len(swept.Failed) == 0 && swept.NextIn == 0
		if err == nil && (len(swept.Failed) != 0 || held && time.Now().After(deadline)) {
			return ledger.Errorf(ledger.CodeStoreContractViolation, "the pass ended as %+v", swept)
		}
		if !held {
			return err
		}
		time.Sleep(5 * time.Millisecond) // the pace of looking; the bound stands above
	}
}

// lossy is a database with a raise of the second minute, a bucket beside it, and a
// store whose connections a proxy can break.
type lossy struct {
	*database
	proxy *proxy
	store *Store
}

func newLossy(t *testing.T, c committed) *lossy {
	t.Helper()
	d := newDatabase(t)
	d.holdClock(start)
	direct := d.store(nil)
	do(t, direct, declared(testOwner(), 1, 100))
	do(t, direct, raised("raise-1", testOwner(), 100, 300, time.Minute, at(time.Minute)))
	do(t, direct, ledger.OpenBucket{Key: plainKey, Limit: 100})
	if c.due > time.Minute {
		d.setClock(start.Add(time.Minute))
		do(t, direct, ledger.Touch{Key: bucketKey})
	}
	d.setClock(start.Add(c.due))
	p := newProxy(d)
	return &lossy{d, p, d.store(func(o *Options) {
		o.ConnString = func(context.Context) (string, error) { return p.url, nil }
		// They bound the wait for an answer that never comes.
		o.LockTimeout, o.StatementTimeout = 100*time.Millisecond, time.Second
	})}
}

// want looks at the rows themselves.
func (l *lossy) want(c committed, done bool) {
	l.t.Helper()
	want := int64(0)
	if done {
		want = 1
	}
	if stands := value[bool](l.database, c.effect); stands != done {
		l.t.Errorf("the effect stands: %v, want %v", stands, done)
	}
	if n := value[int64](l.database, c.evidence); n != want {
		l.t.Errorf("the rows tell of it %d times, want %d", n, want)
	}
	l.wantInvariants()
}

// Goal: a lost answer to COMMIT, or a COMMIT that never arrives, ends in one effect
// and the right answer; a COMMIT that a fresh connection confirms does not stand for
// the work that went with the old one. Method: a proxy that breaks the connection
// there, or keeps the answer, once; the store reconnects by itself.
func TestLostCommit(t *testing.T) {
	for _, c := range commits {
		for _, how := range []loss{answerCut, answerSwallowed, requestCut} {
			t.Run(c.name+"/"+how.name, func(t *testing.T) {
				l := newLossy(t, c)
				lost := l.proxy.loseCommits(1, how)
				if err := c.ask(t.Context(), l.store); err != nil {
					t.Errorf("the answer is %v, want success", err)
				}
				if lost() != 1 {
					t.Errorf("%d COMMITs were lost, want 1", lost())
				}
				l.want(c, true)
				if err := c.ask(t.Context(), l.store); err != nil {
					t.Errorf("repeated: %v", err)
				}
				l.want(c, true)
			})
		}
	}
}

// Goal: when the outcome cannot be found out, the caller learns that, whether it
// stands or not, and the repetition has one effect. Method: every COMMIT is lost, or
// after the first one the server cannot be reached; then the same is asked again.
func TestUnknownOutcome(t *testing.T) {
	for _, c := range commits {
		for _, how := range []loss{answerCut, requestCut, serverGone, serverGoneFirst} {
			t.Run(c.name+"/"+how.name, func(t *testing.T) {
				l := newLossy(t, c)
				lost := l.proxy.loseCommits(1000, how)
				if err := c.ask(t.Context(), l.store); !ledger.HasCode(err, ledger.CodeOutcomeUnknown) {
					t.Errorf("the answer is %v, want outcome_unknown", err)
				}
				if (lost() > 1) == how.forGood || lost() == 0 {
					t.Errorf("%d COMMITs were lost", lost())
				}
				l.want(c, how.arrives)
				l.proxy.hook(nil, nil)
				if err := c.ask(t.Context(), l.store); err != nil {
					t.Errorf("repeated: %v", err)
				}
				l.want(c, true)
			})
		}
	}
}
