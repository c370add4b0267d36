package importer

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/token-lease/operator/internal/ledger"
)

// Goal: a run that ended between its two steps is finished by the next one, and two
// runs at once import each bucket once. Method: the fence alone, then runs.
func TestInterruptedAndAtOnce(t *testing.T) {
	p := newPlace(t, true)
	const buckets = 20
	for i := range buckets {
		p.put(fmt.Sprint("b", i), nil)
	}
	p.exec(createFence)
	p.fence("LIMIT 5")
	var mutex sync.Mutex
	var runs sync.WaitGroup
	total := map[Outcome]int{}
	for range 3 {
		runs.Go(func() {
			summary, err := Run(t.Context(), Options{Source: p.source, Target: p.target, Report: func(bucket string, outcome Outcome, reason error) {
				t.Errorf("%s %s: %v", bucket, outcome, reason)
			}})
			if err != nil {
				t.Error(err)
			}
			mutex.Lock()
			defer mutex.Unlock()
			for outcome, n := range summary.Buckets {
				total[outcome] += n
			}
		})
	}
	runs.Wait()
	if total[Imported] != buckets || total[AlreadyImported] != 2*buckets {
		t.Errorf("three runs at once: %v, want %d imported once", total, buckets)
	}
}

// fence marks buckets as a run does that ends before it writes them.
func (p *place) fence(which string) {
	p.t.Helper()
	conn, err := pgx.Connect(p.t.Context(), p.target)
	if err != nil {
		p.t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.Background()) }()
	var id string
	if err := conn.QueryRow(p.t.Context(), ledgerID).Scan(&id); err != nil {
		p.t.Fatal(err)
	}
	p.exec(`INSERT INTO token_lease_moved (bucket_key, revision, ledger_id) SELECT bucket_key, revision, $1 FROM token_lease_buckets `+which, id)
}

// Goal: a move that was not confirmed beside the source is finished into the same
// ledger and refused into another, where the bucket would be spent twice; who follows
// the error's advice gets on. Method: one run that cannot write its confirmation, and
// one that ended before it wrote the bucket; then another ledger.
func TestLostConfirmation(t *testing.T) {
	p, other := newPlace(t, true), newPlace(t, true)
	p.put("written", nil)
	p.exec(createFence)
	p.exec(`
		CREATE FUNCTION lose_confirmation() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'lost'; END $$;
		CREATE TRIGGER lose BEFORE UPDATE ON token_lease_moved FOR EACH ROW EXECUTE FUNCTION lose_confirmation()`)
	summary, reasons := p.run(nil)
	if summary.Buckets[Failed] != 1 || !strings.Contains(reasons["written"], "lost") {
		t.Fatalf("without the confirmation: %+v, %v", summary, reasons)
	}
	p.exec(`DROP TRIGGER lose ON token_lease_moved`)
	p.put("not written", nil)
	p.fence("WHERE bucket_key = 'not written'")

	for _, dry := range []bool{true, false} {
		summary, reasons = p.run(func(o *Options) { o.Target, o.DryRun = other.target, dry })
		p.wantCounts(summary, 0, 0, 2)
		for key, reason := range reasons {
			if !strings.Contains(reason, "its move to another ledger (database ") || !strings.Contains(reason, "delete its row of token_lease_moved") {
				t.Errorf("%s into another ledger: %q", key, reason)
			}
			if _, err := other.ledger.Inspect(t.Context(), key); !ledger.HasCode(err, ledger.CodeBucketNotFound) {
				t.Errorf("%s in the other ledger: %v, want no bucket", key, err)
			}
		}
	}
	p.exec(`DELETE FROM token_lease_moved WHERE bucket_key = 'not written'`)
	summary, _ = p.run(func(o *Options) { o.Target, o.Buckets = other.target, []string{"not written"} })
	p.wantCounts(summary, 1, 0, 0)
	summary, _ = p.run(func(o *Options) { o.Buckets = []string{"written"} })
	p.wantCounts(summary, 0, 1, 0)
	summary, reasons = p.run(func(o *Options) { o.Target = other.target })
	p.wantCounts(summary, 0, 1, 1)
	if !strings.Contains(reasons["written"], "it was moved to another ledger (database ") {
		t.Errorf("once it is confirmed: %q", reasons["written"])
	}
}

// Goal: a ledger that lost what it had, as one restored from an older backup, is not
// given the bucket again unasked. Method: a confirmed move, and the ledger emptied.
func TestLedgerThatLostIt(t *testing.T) {
	p := newPlace(t, false)
	p.put(bucketKey, nil)
	summary, _ := p.run(nil)
	p.wantCounts(summary, 1, 0, 0)
	p.exec(`SET session_replication_role = replica`) // the audit can only grow otherwise
	p.exec(`TRUNCATE tokenlease.buckets, tokenlease.leases, tokenlease.audit, tokenlease.raises`)
	summary, reasons := p.run(nil)
	p.wantCounts(summary, 0, 0, 1)
	if !strings.Contains(reasons[bucketKey], "does not have it any more: bring it back") {
		t.Errorf("%q", reasons[bucketKey])
	}
}

// Goal: a writer of the package who has begun when its bucket is moved either comes
// before the move, and is moved along, or is refused. Method: each side waits for the
// other one's lock: under both isolations that a database may have by default, with
// the package's lock and without it.
func TestWritersInTheWay(t *testing.T) {
	for _, isolation := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead} {
		t.Run(string(isolation)+"/before", func(t *testing.T) {
			p := newPlace(t, false)
			p.put(bucketKey, nil)
			p.exec(createFence) // so that what is waited for is the bucket
			writer := p.begin(isolation)
			if _, err := writer.Exec(t.Context(), `UPDATE token_lease_buckets SET revision = revision + 1,
				state = jsonb_set(jsonb_set(state, '{limit}', '2000'), '{revision}', to_jsonb(revision + 1))`); err != nil {
				t.Fatal(err)
			}
			done := p.runAside()
			p.awaitLockWait()
			if err := writer.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			if summary := <-done; summary.Buckets[Imported] != 1 {
				t.Errorf("the summary is %+v", summary)
			}
			if got, err := p.ledger.Inspect(t.Context(), bucketKey); err != nil || got.Limit != 2000 {
				t.Errorf("the ledger has the limit %d (%v), want what the writer wrote, 2000", got.Limit, err)
			}
		})
		t.Run(string(isolation)+"/after", func(t *testing.T) {
			p := newPlace(t, false)
			p.put(bucketKey, nil)
			p.exec(createFence)
			// Somebody has the package's lock; a writer and then the import wait for it.
			holder := p.begin(pgx.ReadCommitted)
			first, second := advisoryKeys(bucketKey)
			if _, err := holder.Exec(t.Context(), lockBucket, first, second); err != nil {
				t.Fatal(err)
			}
			done := p.runAside()
			p.awaitLockWait()
			writer := p.begin(isolation)
			if _, err := writer.Exec(t.Context(), `SELECT 1 FROM token_lease_buckets`); err != nil {
				t.Fatal(err)
			}
			if err := holder.Rollback(t.Context()); err != nil {
				t.Fatal(err)
			}
			if summary := <-done; summary.Buckets[Imported] != 1 {
				t.Errorf("the summary is %+v", summary)
			}
			_, err := writer.Exec(t.Context(), `UPDATE token_lease_buckets SET updated_at = now()`)
			if err == nil {
				err = writer.Commit(t.Context())
			}
			if err == nil {
				t.Error("the writer came past the fence")
			}
		})
	}
}

func (p *place) begin(isolation pgx.TxIsoLevel) pgx.Tx {
	p.t.Helper()
	conn, err := pgx.Connect(p.t.Context(), p.source)
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { _ = conn.Close(context.Background()) })
	tx, err := conn.BeginTx(p.t.Context(), pgx.TxOptions{IsoLevel: isolation})
	if err != nil {
		p.t.Fatal(err)
	}
	return tx
}

// runAside imports while the test goes on.
func (p *place) runAside() <-chan Summary {
	done := make(chan Summary, 1)
	go func() {
		summary, err := Run(context.Background(), Options{Source: p.source, Target: p.target, Report: func(bucket string, outcome Outcome, reason error) {
			p.t.Errorf("%s %s: %v", bucket, outcome, reason)
		}})
		if err != nil {
			p.t.Error(err)
		}
		done <- summary
	}()
	return done
}

// awaitLockWait waits until somebody waits for a lock in the source.
func (p *place) awaitLockWait() {
	p.t.Helper()
	for deadline := time.Now().Add(time.Minute); ; {
		var waiting bool
		if err := p.conn.QueryRow(p.t.Context(), `SELECT EXISTS (SELECT FROM pg_stat_activity
			WHERE datname = current_database() AND wait_event_type = 'Lock')`).Scan(&waiting); err != nil {
			p.t.Fatal(err)
		}
		if waiting {
			return
		}
		if time.Now().After(deadline) {
			p.t.Fatal("nobody waits for a lock")
		}
	}
}

// Goal: a run whose sessions are killed is finished by the next one: each bucket is
// here once, whole, and nobody writes it there. Method: an administrator who ends the
// sessions of runs until one gets through.
func TestKilledRuns(t *testing.T) {
	p := newPlace(t, true)
	const buckets = 30
	for i := range buckets {
		p.put(fmt.Sprint("b", i), nil)
	}
	killer, err := pgx.Connect(t.Context(), p.source)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = killer.Close(context.Background()) }()
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		// The pause is how often a session is ended; nothing is waited for.
		for tick := time.NewTicker(30 * time.Millisecond); ; {
			select {
			case <-stop:
				return
			case <-tick.C:
			}
			if _, err := killer.Exec(context.Background(), `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
				WHERE pid <> pg_backend_pid() AND application_name = $1`, runName); err != nil {
				t.Error(err)
				return
			}
		}
	}()
	named := func(url string) string { return url + "&application_name=" + runName }
	for range 10 {
		_, _ = Run(t.Context(), Options{Source: named(p.source), Target: named(p.target), Report: func(string, Outcome, error) {}})
	}
	close(stop)
	<-stopped
	summary, reasons := p.run(nil)
	if !summary.Complete() || summary.Buckets[Imported]+summary.Buckets[AlreadyImported] != buckets {
		t.Errorf("the last run: %+v, %v", summary, reasons)
	}
	for i := range buckets {
		s, err := p.ledger.Inspect(t.Context(), fmt.Sprint("b", i))
		if err != nil || s.UsedTokens != 250 || s.LeaseRecords != 5 {
			t.Errorf("bucket %d is %+v, %v", i, s, err)
		}
	}
	if _, err := p.conn.Exec(t.Context(), `UPDATE token_lease_buckets SET updated_at = now()`); err == nil {
		t.Error("the package can still write")
	}
}

const runName = "import-to-be-killed"
