package postgres

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"

	"github.com/token-lease/operator/internal/ledger"
	"github.com/token-lease/operator/internal/sweeper"
)

const (
	turmoilBuckets   = 8
	turmoilLimit     = 1000
	turmoilProcesses = 3
	turmoilWorkers   = 6
	turmoilRounds    = 40
	// turmoilRepeats bounds how often a worker repeats what it got no answer to.
	turmoilRepeats = 50
)

// turmoil is a ledger under many hands, and a book of what they were told.
type turmoil struct {
	*database
	stores []*Store

	mutex sync.Mutex
	// leases holds what each lease must be by what was confirmed last; an empty
	// state for one whose reservation was refused.
	leases map[string]bookedLease
	// raises counts what StoreRaise confirmed.
	raises map[string]ledger.RaiseState
}

type bookedLease struct {
	bucket string
	state  ledger.LeaseState
	tokens int64
}

// Goal: whatever is asked at once, in whatever order of buckets, and whichever
// connections die meanwhile, no deadlock happens, what was confirmed is durable
// and is done once, and the rows agree with each other. Method: workers on several
// stores ask for random things on several buckets per call, sweepers run, sessions
// are terminated at random; then the rows are compared with a book.
func TestTurmoil(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	d := &turmoil{database: newDatabase(t), leases: map[string]bookedLease{}, raises: map[string]ledger.RaiseState{}}
	for range turmoilProcesses {
		d.stores = append(d.stores, d.store(func(o *Options) { o.MaxConnections = 6 }))
	}
	for i := range turmoilBuckets {
		do(t, d.stores[0], turmoilDeclaration(i))
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var others, workers sync.WaitGroup
	for _, store := range d.stores[:2] {
		others.Go(func() { sweeper.New(store, quietObserver{}, logr.Discard()).Run(ctx) })
	}
	killer := d.connect()
	killed := 0
	others.Go(func() {
		for ctx.Err() == nil {
			var n int
			err := killer.QueryRow(ctx, `SELECT count(pg_terminate_backend(pid)) FROM (
				SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'tokenlease'
				ORDER BY random() LIMIT 1) AS one`).Scan(&n)
			if err != nil && ctx.Err() == nil {
				t.Error(err)
			}
			killed += n
			select {
			case <-ctx.Done():
			case <-time.After(40 * time.Millisecond):
			}
		}
	})
	for w := range turmoilWorkers {
		workers.Go(func() {
			worker := &turmoilWorker{turmoil: d, random: rand.New(rand.NewPCG(seed, uint64(w))), name: fmt.Sprintf("w%d", w)}
			for round := range turmoilRounds {
				worker.round(round)
			}
		})
	}
	workers.Wait()
	eventually(t, "the end of all raises", func() bool {
		return value[int64](d.database, `SELECT count(*) FROM tokenlease.raises WHERE state IN ('pending', 'active')`) == 0
	})
	cancel()
	others.Wait()
	if killed == 0 {
		t.Error("no session was terminated")
	}
	d.compare()
}

func turmoilDeclaration(i int) ledger.ApplyDeclared {
	owner := testOwner()
	owner.Name, owner.UID = fmt.Sprintf("b%d", i), fmt.Sprintf("uid-%d", i)
	declaration := declared(owner, 1, turmoilLimit)
	declaration.Key = fmt.Sprintf("tenants/b%d", i)
	return declaration
}

// turmoilWorker asks for things and writes down what it is told.
type turmoilWorker struct {
	*turmoil
	random *rand.Rand
	name   string
	open   []bookedID
}

type bookedID struct{ bucket, id string }

// round is one call on several buckets, repeated until everything in it is
// answered.
func (w *turmoilWorker) round(round int) {
	var requests []ledger.Request
	for i, bucket := range w.random.Perm(turmoilBuckets)[:2+w.random.IntN(4)] {
		requests = append(requests, w.request(bucket, fmt.Sprintf("%s-%d-%d", w.name, round, i)))
	}
	l := ledger.New(w.stores[w.random.IntN(len(w.stores))], nil)
	for range turmoilRepeats {
		var unanswered []ledger.Request
		for i, result := range l.Do(context.Background(), requests...) {
			if result.Err != nil && sqlState(result.Err) == codeDeadlock {
				w.t.Errorf("a deadlock reached the caller: %v", result.Err)
			}
			if result.Err != nil && result.Err.Retryable() {
				unanswered = append(unanswered, requests[i])
			} else {
				w.write(requests[i], result)
			}
		}
		if requests = unanswered; len(requests) == 0 {
			return
		}
	}
	w.t.Errorf("%s: no answer to %+v", w.name, requests)
}

func (w *turmoilWorker) request(i int, id string) ledger.Request {
	declaration := turmoilDeclaration(i)
	bucket := declaration.Key
	switch w.random.IntN(8) {
	case 0, 1, 2:
		return ledger.Reserve{Key: bucket, RequestKey: id, Fingerprint: "f", Tokens: 1 + w.random.Int64N(80),
			TTL: time.Duration(50+w.random.IntN(2000)) * time.Millisecond}
	case 3, 4:
		for at, lease := range w.open {
			if lease.bucket != bucket {
				continue
			}
			w.open = append(w.open[:at], w.open[at+1:]...)
			if w.random.IntN(3) == 0 {
				return ledger.Release{Key: bucket, LeaseID: lease.id}
			}
			return ledger.Commit{Key: bucket, LeaseID: lease.id, ActualTokens: 1 + w.random.Int64N(10)}
		}
		return ledger.ReapExpired{Key: bucket}
	case 5, 6:
		request := raised("raise-"+id, declaration.Owner, turmoilLimit, 2*turmoilLimit,
			time.Duration(20+w.random.IntN(400))*time.Millisecond, nil)
		request.Key = bucket
		// Few approvals, so that they are contested, also from two buckets at once.
		request.Grant.ApprovalID = fmt.Sprintf("CHG-%d", w.random.IntN(60))
		return request
	default:
		declaration.Declaration.Raises.Mode = ledger.ModeEnforce
		if w.random.IntN(4) == 0 {
			declaration.Declaration.Raises.Mode = ledger.ModeObserveOnly
		}
		declaration.Generation = 2 + time.Now().UnixMicro()
		return declaration
	}
}

func (w *turmoilWorker) write(request ledger.Request, result ledger.Result) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	switch r := request.(type) {
	case ledger.Reserve:
		if result.Err != nil {
			return
		}
		w.leases[result.Lease.ID] = bookedLease{r.Key, ledger.LeaseReserved, r.Tokens}
		w.open = append(w.open, bookedID{r.Key, result.Lease.ID})
	case ledger.Commit:
		if result.Err == nil {
			w.leases[r.LeaseID] = bookedLease{r.Key, ledger.LeaseCommitted, r.ActualTokens}
		}
	case ledger.Release:
		if result.Err == nil && result.Lease.State == ledger.LeaseReleased {
			w.leases[r.LeaseID] = bookedLease{r.Key, ledger.LeaseReleased, 0}
		}
	case ledger.StoreRaise:
		if result.Err == nil {
			w.raises[r.Grant.UID] = result.Raise.State
		}
	}
}

// compare holds the rows against the book and against each other.
func (d *turmoil) compare() {
	d.t.Helper()
	d.wantInvariants()
	for id, booked := range d.leases {
		found := value[string](d.database, `SELECT coalesce((SELECT state || ' ' || coalesce(actual_tokens, 0)
			FROM tokenlease.leases WHERE bucket_key = $1 AND lease_id = $2), 'none')`, booked.bucket, id)
		var want map[string]bool
		switch booked.state {
		case ledger.LeaseReserved:
			// Time, or a commit that was refused, may have ended it since.
			want = map[string]bool{"reserved 0": true, "expired 0": true}
		case ledger.LeaseCommitted:
			want = map[string]bool{fmt.Sprintf("committed %d", booked.tokens): true}
		case ledger.LeaseReleased:
			want = map[string]bool{"released 0": true}
		}
		if !want[found] {
			d.t.Errorf("lease %s of %s is %q; the book says %+v", id, booked.bucket, found, booked)
		}
	}
	if n := value[int64](d.database, `SELECT count(*) FROM tokenlease.leases`); n != int64(len(d.leases)) {
		d.t.Errorf("%d leases are stored; %d were confirmed, and what was refused must leave none", n, len(d.leases))
	}
	for id := range d.raises {
		if n := value[int64](d.database, `SELECT count(*) FROM tokenlease.raises WHERE raise_id = $1`, id); n != 1 {
			d.t.Errorf("raise %s was confirmed and is stored %d times", id, n)
		}
	}
	for what, sql := range map[string]string{
		"approvals that put two raises in force": `SELECT count(*) FROM (
			SELECT approval_id FROM tokenlease.raises WHERE activated_at IS NOT NULL GROUP BY approval_id HAVING count(*) > 1) AS twice`,
		"raises in force whose approval is another's": `SELECT count(*) FROM tokenlease.raises AS r
			WHERE r.activated_at IS NOT NULL AND NOT EXISTS (SELECT FROM tokenlease.approvals AS a
				WHERE a.approval_id = r.approval_id AND a.raise_id = r.raise_id)`,
		"raises activated or restored other than once": `SELECT count(*) FROM (
			SELECT r.raise_id FROM tokenlease.raises AS r
			LEFT JOIN tokenlease.audit AS a ON a.bucket_key = r.bucket_key AND a.raise_id = r.raise_id
				AND a.event IN ('RaiseActivated', 'RaiseRestored')
			WHERE r.activated_at IS NOT NULL
			GROUP BY r.raise_id HAVING count(*) <> 2) AS wrong`,
		"buckets that did not return to their limit": fmt.Sprintf(`SELECT count(*) FROM tokenlease.buckets
			WHERE limit_tokens <> %d OR active_raise_id IS NOT NULL`, turmoilLimit),
		"sessions that are still in a transaction": `SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND state LIKE 'idle in transaction%'`,
		"deadlocks": `SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()`,
	} {
		if n := value[int64](d.database, sql); n != 0 {
			d.t.Errorf("%d %s", n, what)
		}
	}
	activated := value[int64](d.database, `SELECT count(*) FROM tokenlease.raises WHERE activated_at IS NOT NULL`)
	contested := value[int64](d.database, `SELECT count(*) FROM tokenlease.raises WHERE reason = 'ApprovalAlreadyUsed'`)
	d.t.Logf("%d leases and %d raises in the book, %d raises ran, %d found their approval used", len(d.leases), len(d.raises), activated, contested)
	if activated == 0 || contested == 0 {
		d.t.Error("the turmoil was none")
	}
}

type quietObserver struct{}

// ObserveSweep implements sweeper.Observer.
func (quietObserver) ObserveSweep(int, int) {}
