package postgres

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/token-lease/operator/internal/ledger"
)

// The environment of a child: another process with a store of its own, which asks
// for one thing and says what it was told.
const (
	childVariable     = "TOKENLEASE_CHILD"
	childURLVariable  = "TOKENLEASE_CHILD_URL"
	childIdleVariable = "TOKENLEASE_CHILD_IDLE_TIMEOUT"
	childName         = "frozen"
)

// childAnswer is what a child prints.
type childAnswer struct {
	Code  ledger.Code
	Error string
}

// childRequests are what a child can be told to ask for; a sweep is none of them.
var childRequests = map[string]ledger.Request{
	"reserve":       ledger.Reserve{Key: bucketKey, RequestKey: "1", Fingerprint: "f", Tokens: 200},
	"set limit":     ledger.SetLimit{Key: bucketKey, ExpectedLimit: 300, Limit: 250, OperationID: "op-1"},
	"apply":         declared(testOwner(), 2, 180),
	"activate":      ledger.Touch{Key: bucketKey},
	"restore":       ledger.Touch{Key: bucketKey},
	"revoke":        ledger.RevokeRaise{Key: bucketKey, UID: "raise-1"},
	"close":         ledger.CloseBucket{Key: bucketKey, Owner: testOwner(), Deletion: ledger.DeletionRetain},
	"store a raise": raised("raise-3", testOwner(), 100, 300, time.Minute, &start),
}

// runChild is the whole child.
func runChild() error {
	idle, err := time.ParseDuration(os.Getenv(childIdleVariable))
	if err != nil {
		return err
	}
	store, err := Open(Options{
		ConnString:               func(context.Context) (string, error) { return os.Getenv(childURLVariable), nil },
		Worker:                   childName,
		ApplicationName:          childName,
		LockTimeout:              testTimeout,
		StatementTimeout:         testTimeout,
		IdleInTransactionTimeout: idle,
	})
	if err != nil {
		return err
	}
	defer store.Close()
	var answer childAnswer
	if asked := os.Getenv(childVariable); asked == "sweep" {
		_, err = store.Sweep(context.Background(), ledger.SweepRequest{Limit: 10})
	} else if result := ledger.New(store, nil).Do(context.Background(), childRequests[asked])[0]; result.Err != nil {
		answer.Code, err = result.Err.Code, result.Err
	}
	if err != nil {
		answer.Error = err.Error()
	}
	return json.NewEncoder(os.Stdout).Encode(answer)
}

// child is a process that stands still at a fault point.
type child struct {
	t       *testing.T
	command *exec.Cmd
	stdout  *bufio.Reader
}

// freeze starts a child and waits until it stands still.
func freeze(t *testing.T, program, url, asked, point string, idle time.Duration) *child {
	t.Helper()
	c := &child{t: t, command: exec.Command(program)}
	c.command.Env = append(os.Environ(), childVariable+"="+asked, childURLVariable+"="+url,
		childIdleVariable+"="+idle.String(), "TOKENLEASE_FAULT="+point+"=pause")
	c.command.Stderr = os.Stderr
	stdout, err := c.command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	c.stdout = bufio.NewReader(stdout)
	if err := c.command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// It has ended already, unless the test failed.
		_ = c.command.Process.Kill()
		_ = c.command.Wait()
	})
	eventually(t, "the child standing still", func() bool {
		status, err := os.ReadFile(filepath.Join("/proc", fmt.Sprint(c.command.Process.Pid), "stat"))
		if err != nil {
			t.Fatal(err)
		}
		_, fields, _ := bytes.Cut(status, []byte(") "))
		if bytes.HasPrefix(fields, []byte("Z")) {
			t.Fatalf("the child ended before it reached %s", point)
		}
		return bytes.HasPrefix(fields, []byte("T"))
	})
	return c
}

// thaw lets the child go on and answers what it was told.
func (c *child) thaw() childAnswer {
	c.t.Helper()
	if err := c.command.Process.Signal(syscall.SIGCONT); err != nil {
		c.t.Fatal(err)
	}
	line, err := c.stdout.ReadBytes('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		c.t.Fatal(err)
	}
	var answer childAnswer
	if err := json.Unmarshal(line, &answer); err != nil {
		c.t.Fatalf("the child said %q: %v", line, err)
	}
	return answer
}

// faultyProgram builds this test as a program in which fault points act.
func faultyProgram(t *testing.T) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "store.test")
	build := exec.Command("go", "test", "-c", "-vet=off", "-tags", "faultinjection", "-o", program, ".")
	if output, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, output)
	}
	return program
}

// frozenCase is one kind of transaction that is frozen in the middle.
type frozenCase struct {
	asked string
	// frozenAt is the database's time when the process stops, thawedAt when it goes
	// on. Times are distances from start; the first raise runs from 0 to a minute,
	// or with starts later than 0 is still to start.
	starts, frozenAt, thawedAt time.Duration
	// next adds a second raise that follows the first one without a gap.
	next bool
	code ledger.Code
	want frozenState
}

// frozenState is how a bucket must stand at the end.
type frozenState struct {
	limit  int64
	raises string
}

var frozenCases = []frozenCase{
	{"reserve", 0, 0, time.Minute, false, ledger.CodeBudgetExceeded, frozenState{100, "raise-1 restored/Expired"}},
	{"set limit", 0, 0, time.Minute, false, ledger.CodeLimitChanged, frozenState{100, "raise-1 restored/Expired"}},
	{"apply", 0, 0, time.Minute, false, "", frozenState{180, "raise-1 restored/Expired"}},
	{"revoke", 0, 0, time.Minute, false, "", frozenState{100, "raise-1 restored/Expired"}},
	{"close", 0, 0, time.Minute, false, "", frozenState{100, "raise-1 restored/Expired"}},
	{"store a raise", 0, 0, time.Minute, false, "", frozenState{100, "raise-1 restored/Expired, raise-3 failed/WindowMissed"}},
	{"activate", time.Minute, time.Minute, 2 * time.Minute, false, "", frozenState{100, "raise-1 failed/WindowMissed"}},
	{"restore", 0, time.Minute, 2 * time.Minute, true, "", frozenState{100, "raise-1 restored/Expired, raise-2 failed/WindowMissed"}},
	{"sweep", 0, time.Minute, 2 * time.Minute, true, "", frozenState{100, "raise-1 restored/Expired, raise-2 failed/WindowMissed"}},
	{"restore", 0, time.Minute, time.Minute + time.Second, true, "", frozenState{300, "raise-1 restored/Expired, raise-2 active/"}},
	{"sweep", 0, time.Minute, time.Minute + time.Second, true, "", frozenState{300, "raise-1 restored/Expired, raise-2 active/"}},
}

// Goal: a process that is stopped between lock and write cannot act late, whatever
// it was about to do, and holds up nobody beyond the bound of its transaction.
// Method: a real process stops itself at a named point, before the rules
// decide or after; the database's clock passes a transition; then it goes on
// either at once, while it still has the lock, or after somebody else has used the
// bucket, which the server's bound alone makes possible.
func TestFrozenProcess(t *testing.T) {
	program := faultyProgram(t)
	all := &databases{parent: t}
	for i, c := range frozenCases {
		for j, meanwhile := range []bool{false, true} {
			point := []string{"ledger.locked", "ledger.before-write"}[(i+j)%2]
			name := fmt.Sprintf("%s until %v at %s, used meanwhile=%v", c.asked, c.thawedAt, point, meanwhile)
			t.Run(name, func(t *testing.T) { c.run(t, all.take(t), program, point, meanwhile) })
		}
	}
	t.Run("after COMMIT", func(t *testing.T) { frozenAfterCommit(t, all.take(t), program) })
}

func (c frozenCase) run(t *testing.T, d *database, program, point string, meanwhile bool) {
	d.setClock(start)
	owner := testOwner()
	direct := d.store(func(o *Options) { o.LockTimeout, o.StatementTimeout = testTimeout, testTimeout })
	do(t, direct, declared(owner, 1, 100))
	from := start.Add(c.starts)
	do(t, direct, raised("raise-1", owner, 100, 300, time.Minute, &from))
	if c.next {
		from = from.Add(time.Minute)
		do(t, direct, raised("raise-2", owner, 100, 300, time.Minute, &from))
	}
	d.setClock(start.Add(c.frozenAt))
	idle := testTimeout
	if meanwhile {
		idle = 100 * time.Millisecond
	}
	process := freeze(t, program, d.url, c.asked, point, idle)
	d.setClock(start.Add(c.thawedAt))
	if meanwhile {
		do(t, direct, ledger.Inspect{Key: bucketKey})
	}
	if answer := process.thaw(); answer.Code != c.code || (answer.Error != "") != (c.code != "") {
		t.Errorf("the thawed process was told %+v, want %q", answer, c.code)
	}
	bucket := do(t, direct, ledger.Inspect{Key: bucketKey}).Snapshot
	raises := value[string](d, `SELECT string_agg(raise_id || ' ' || state || '/' || coalesce(reason, ''), ', ' ORDER BY raise_id)
		FROM tokenlease.raises`)
	if got := (frozenState{bucket.Limit, raises}); got != c.want || bucket.ReservedTokens != 0 {
		t.Errorf("the bucket ends with %+v and %d reserved, want %+v and nothing", got, bucket.ReservedTokens, c.want)
	}
	d.wantInvariants()
}

// Goal: what was confirmed before the process stopped stands, once. Method: it
// stops after COMMIT and before the answer, and goes on after the expiry.
func frozenAfterCommit(t *testing.T, d *database, program string) {
	t.Helper()
	d.setClock(start)
	owner := testOwner()
	direct := d.store(nil)
	do(t, direct, declared(owner, 1, 100))
	do(t, direct, raised("raise-1", owner, 100, 300, time.Minute, &start))
	process := freeze(t, program, d.url, "reserve", "ledger.committed", testTimeout)
	d.setClock(start.Add(time.Minute))
	bucket := do(t, direct, ledger.Inspect{Key: bucketKey}).Snapshot
	if answer := process.thaw(); answer != (childAnswer{}) {
		t.Errorf("the thawed process was told %+v, want success: its reservation was confirmed in time", answer)
	}
	if bucket.Limit != 100 || value[int64](d, `SELECT count(*) FROM tokenlease.leases`) != 1 {
		t.Errorf("the bucket is %+v, want the limit 100 and one lease", bucket)
	}
	d.wantInvariants()
}

// Goal: every transaction bounds itself, and leaves nothing of it to the session.
// Method: what the settings are within one and after it. The bound of a whole
// transaction exists from PostgreSQL 17 on.
func TestTransactionBounds(t *testing.T) {
	d := newDatabase(t)
	store := d.store(func(o *Options) {
		o.LockTimeout, o.StatementTimeout, o.IdleInTransactionTimeout = time.Second, 2*time.Second, 3*time.Second
	})
	read := func(conn *pgx.Conn) (settings string) {
		t.Helper()
		if err := conn.QueryRow(t.Context(), `SELECT concat_ws(' ', current_setting('lock_timeout'), current_setting('statement_timeout'),
			current_setting('idle_in_transaction_session_timeout'), current_setting('tcp_keepalives_idle'),
			coalesce(current_setting('transaction_timeout', true), '5s'))`).Scan(&settings); err != nil {
			t.Fatal(err)
		}
		return settings
	}
	lent, err := store.pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer lent.Release()
	outside := read(lent.Conn())
	tx := &transaction{store: store, conn: lent.Conn(), terms: terms{lockTimeout: time.Second}}
	batch := &pgx.Batch{}
	tx.queueBegin(batch)
	if err := tx.send(t.Context(), batch); err != nil {
		t.Fatal(err)
	}
	if inside := read(lent.Conn()); inside != "1s 2s 3s 5 5s" {
		t.Errorf("in a transaction the bounds are %q", inside)
	}
	if _, err := lent.Exec(t.Context(), rollbackTransaction); err != nil {
		t.Fatal(err)
	}
	if after := read(lent.Conn()); after != outside {
		t.Errorf("after the transaction the session's bounds are %q, before it %q", after, outside)
	}
}

// wantInvariants checks the rows without going through the rules.
func (d *database) wantInvariants() {
	d.t.Helper()
	rows, err := d.conn.Query(d.t.Context(), violations)
	if err != nil {
		d.t.Fatal(err)
	}
	found, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		d.t.Fatal(err)
	}
	for _, violation := range found {
		d.t.Error(violation)
	}
}
