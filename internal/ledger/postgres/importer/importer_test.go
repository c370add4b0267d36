package importer

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/token-lease/operator/hack/devenv/postgres/postgrestest"
	"github.com/token-lease/operator/internal/ledger"
	"github.com/token-lease/operator/internal/ledger/postgres"
)

func TestMain(m *testing.M) { os.Exit(postgrestest.Main(m)) }

// recorded is a document that the package has written: one lease in each state, and
// one whose request key is escaped. What is asked for was "summarize:" and the
// request key.
//
//go:embed testdata/bucket.json
var recorded string

const (
	bucketKey  = "tenants/pm-4821"
	packageDDL = `CREATE TABLE token_lease_buckets (
		bucket_key text PRIMARY KEY, revision bigint NOT NULL DEFAULT 1, state jsonb NOT NULL,
		updated_at timestamptz NOT NULL DEFAULT now())`
)

// place is a source and a target.
type place struct {
	t              *testing.T
	source, target string
	conn           *pgx.Conn
	store          *postgres.Store
	ledger         *ledger.Ledger
}

func newPlace(t *testing.T, apart bool) *place {
	t.Helper()
	p := &place{t: t, target: postgrestest.NewDatabase(t)}
	p.source = p.target
	if apart {
		p.source = postgrestest.NewDatabase(t)
	}
	if _, err := postgres.Migrate(t.Context(), p.target); err != nil {
		t.Fatal(err)
	}
	conn, err := pgx.Connect(t.Context(), p.source)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	p.conn = conn
	p.store, err = postgres.Open(postgres.Options{
		ConnString: func(context.Context) (string, error) { return p.target, nil }, Worker: "test",
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.store.Close)
	p.ledger = ledger.New(p.store, nil)
	p.exec(packageDDL)
	return p
}

func (p *place) exec(sql string, args ...any) {
	p.t.Helper()
	if _, err := p.conn.Exec(p.t.Context(), sql, args...); err != nil {
		p.t.Fatal(err)
	}
}

// put stores a document under a key, moved in time so that the bucket was last
// updated an hour ago; change may damage it.
func (p *place) put(key string, change func(state map[string]any)) {
	p.t.Helper()
	state := documentOf(p.t, key, time.Now().Add(-time.Minute))
	if change != nil {
		change(state)
	}
	encoded, err := json.Marshal(state)
	if err != nil {
		p.t.Fatal(err)
	}
	p.exec(`INSERT INTO token_lease_buckets (bucket_key, revision, state) VALUES ($1, ($2::jsonb ->> 'revision')::numeric::bigint, $2::jsonb)`,
		key, string(encoded))
}

// documentOf is the recorded one under a key, last updated at an instant. Hashes are
// those of the recorded key, as nothing recomputes them.
func documentOf(t *testing.T, key string, updatedAt time.Time) map[string]any {
	t.Helper()
	var state map[string]any
	if err := json.Unmarshal([]byte(recorded), &state); err != nil {
		t.Fatal(err)
	}
	state["bucket"] = key
	shift := float64(updatedAt.UnixMilli()) - state["updatedAt"].(float64)
	move := func(of map[string]any, fields ...string) {
		for _, field := range fields {
			if at, ok := of[field].(float64); ok {
				of[field] = at + shift
			}
		}
	}
	move(state, "createdAt", "updatedAt")
	for _, lease := range state["leases"].(map[string]any) {
		move(lease.(map[string]any), "createdAt", "expiresAt", "settledAt")
	}
	return state
}

// run imports, and returns what was reported of buckets.
func (p *place) run(change func(*Options)) (Summary, map[string]string) {
	p.t.Helper()
	reasons := map[string]string{}
	o := Options{Source: p.source, Target: p.target, Report: func(bucket string, outcome Outcome, reason error) {
		reasons[bucket] = string(outcome) + ": " + reason.Error()
	}}
	if change != nil {
		change(&o)
	}
	summary, err := Run(p.t.Context(), o)
	if err != nil {
		p.t.Fatal(err)
	}
	return summary, reasons
}

func (p *place) wantCounts(s Summary, imported, already, skipped int) {
	p.t.Helper()
	if s.Buckets[Imported] != imported || s.Buckets[AlreadyImported] != already || s.Buckets[Skipped] != skipped || s.Buckets[Failed] != 0 {
		p.t.Errorf("the summary is %+v, want %d imported, %d already, %d skipped", s, imported, already, skipped)
	}
}

// leaseOf finds an imported lease by the request key that it was made for.
func (p *place) leaseID(request string) string {
	p.t.Helper()
	order := map[string]int{"committed": 0, "released": 1, "expired": 2, "long": 3, `quote"<&>` + "\u2028x": 4}
	return fmt.Sprintf("9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6%d", order[request])
}

// Goal: after the move the ledger answers as the package would have: usage stands,
// old requests are recognised, leases settle under their old IDs, and the package can
// write no more; a second run changes nothing; a TokenBucket adopts the bucket.
// Method: a document that the package has written, in one database and in two.
func TestMove(t *testing.T) {
	for _, apart := range []bool{false, true} {
		t.Run(fmt.Sprintf("apart=%v", apart), func(t *testing.T) {
			p := newPlace(t, apart)
			p.put(bucketKey, nil)
			dry, _ := p.run(func(o *Options) { o.DryRun = true })
			p.wantCounts(dry, 1, 0, 0)
			if _, err := p.ledger.Inspect(t.Context(), bucketKey); !ledger.HasCode(err, ledger.CodeBucketNotFound) {
				t.Errorf("after the dry run: %v, want no bucket", err)
			}
			p.exec(`UPDATE token_lease_buckets SET updated_at = now()`)

			summary, _ := p.run(nil)
			p.wantCounts(summary, 1, 0, 0)
			if summary.Leases != 5 || summary.UsedTokens != 250 || summary.ReservedTokens != 320 {
				t.Errorf("the summary is %+v, want 5 leases, 250 used, 320 reserved", summary)
			}
			p.checkReplays()
			again, _ := p.run(nil)
			p.wantCounts(again, 0, 1, 0)
			for _, sql := range []string{
				`UPDATE token_lease_buckets SET revision = revision + 1`, `DELETE FROM token_lease_buckets`,
				`INSERT INTO token_lease_buckets VALUES ('tenants/pm-4821', 1, '{}') ON CONFLICT (bucket_key) DO UPDATE SET revision = 9`,
			} {
				if _, err := p.conn.Exec(t.Context(), sql); err == nil || !strings.Contains(err.Error(), "was moved to the ledger of the token-lease operator") {
					t.Errorf("%s: %v, want it to be refused", sql, err)
				}
			}
			p.exec(`INSERT INTO token_lease_buckets (bucket_key, state) VALUES ('another', '{}')`)
			adopted, err := p.ledger.ApplyDeclared(t.Context(), ledger.ApplyDeclared{
				Key: bucketKey, Generation: 1, Owner: ledger.Owner{Cluster: "c", Namespace: "tenants", Name: "pm-4821", UID: "u", CreatedAt: time.Now()},
				Declaration: ledger.Declaration{
					Limit: 1000, TenantID: "t", Settings: ledger.DefaultSettings(), ConflictPolicy: ledger.ConflictReview,
					Raises: ledger.RaisePolicy{Mode: ledger.ModeDisabled},
				},
			})
			if err != nil || adopted.Owner == nil || adopted.UsedTokens != 275 {
				t.Errorf("adopted: %+v, %v", adopted, err)
			}
		})
	}
}

func (p *place) checkReplays() {
	t := p.t
	t.Helper()
	reserve := func(request string, tokens int64, ttl time.Duration) (ledger.LeaseResult, error) {
		return p.ledger.Reserve(t.Context(), ledger.Reserve{
			Key: bucketKey, RequestKey: request, Fingerprint: "summarize:" + request, Tokens: tokens, TTL: ttl,
		})
	}
	for _, c := range []struct {
		request string
		tokens  int64
		ttl     time.Duration
		state   ledger.LeaseState
	}{
		{"committed", 400, time.Minute, ledger.LeaseCommitted}, {"committed", 400, 0, ledger.LeaseCommitted},
		{"released", 100, time.Minute, ledger.LeaseReleased}, {"expired", 50, time.Second, ledger.LeaseExpired},
		{"long", 300, time.Hour, ledger.LeaseReserved}, {`quote"<&>` + "\u2028x", 20, 90 * time.Second, ledger.LeaseReserved},
	} {
		replayed, err := reserve(c.request, c.tokens, c.ttl)
		if err != nil || replayed.Lease.ID != p.leaseID(c.request) || replayed.Lease.State != c.state || replayed.Lease.ImportedAt == nil {
			t.Errorf("the replay of %q answers %+v, %v", c.request, replayed.Lease, err)
		}
		if _, err := reserve(c.request, c.tokens+1, c.ttl); !ledger.HasCode(err, ledger.CodeIdempotencyConflict) {
			t.Errorf("%q with other tokens: %v, want idempotency_conflict", c.request, err)
		}
	}
	committed, err := p.ledger.Commit(t.Context(), ledger.Commit{Key: bucketKey, LeaseID: p.leaseID("long"), ActualTokens: 25})
	if err != nil || committed.Bucket.UsedTokens != 275 || committed.Bucket.ReservedTokens != 20 || committed.Bucket.LeaseRecords != 5 {
		t.Errorf("the commit answers %+v, %v", committed.Bucket, err)
	}
	released, err := p.ledger.Release(t.Context(), ledger.Release{Key: bucketKey, LeaseID: p.leaseID(`quote"<&>` + "\u2028x")})
	if err != nil || released.Bucket.ReservedTokens != 0 {
		t.Errorf("the release answers %+v, %v", released.Bucket, err)
	}
}

// Goal: what is damaged, dated in the future or not possible here is named and left
// alone, the others go on. Method: one field wrong at a time.
func TestSkipped(t *testing.T) {
	p := newPlace(t, false)
	lease := func(state map[string]any, n int) map[string]any {
		return state["leases"].(map[string]any)[fmt.Sprintf("9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6%d", n)].(map[string]any)
	}
	damages := map[string]struct {
		change func(map[string]any)
		reason string
	}{
		"version":  {func(s map[string]any) { s["schemaVersion"] = 2 }, "schemaVersion is 2"},
		"key":      {func(s map[string]any) { s["bucket"] = "other" }, "state.bucket"},
		"fraction": {func(s map[string]any) { s["limit"] = 1000.5 }, "the number 1000.5 is not a whole one"},
		"huge":     {func(s map[string]any) { s["limit"] = json.Number("9007199254740992") }, "the number 9007199254740992"},
		"negative": {func(s map[string]any) { s["usedTokens"] = -1 }, "the number -1"},
		"sums":     {func(s map[string]any) { s["usedTokens"] = 251 }, "the leases sum up to 250"},
		"limit":    {func(s map[string]any) { s["limit"] = 500 }, "above the limit"},
		"text":     {func(s map[string]any) { s["limit"] = "1000" }, "state.limit is not a whole number"},
		"unknown":  {func(s map[string]any) { s["note"] = 1.5 }, "the number 1.5 is not a whole one"},
		"":         {nil, "bucket must be a trimmed"},
		"no lease": {func(s map[string]any) { s["leases"] = []any{} }, "state.leases is not an object"},
		"request":  {func(s map[string]any) { delete(s["requests"].(map[string]any), lease(s, 0)["requestHash"].(string)) }, "5 leases and 4 requests"},
		"hash":     {func(s map[string]any) { lease(s, 1)["requestHash"] = "ABC" }, "requestHash is not a SHA-256"},
		"state":    {func(s map[string]any) { lease(s, 1)["state"] = "lost" }, `state is "lost"`},
		"settled":  {func(s map[string]any) { lease(s, 0)["settledAt"] = nil }, "settledAt"},
		"actual":   {func(s map[string]any) { lease(s, 1)["actualTokens"] = 5 }, "actualTokens does not fit"},
		"name":     {func(s map[string]any) { lease(s, 2)["id"] = "other" }, "id is"},
		"future": {func(s map[string]any) {
			ahead := documentOf(t, "future", time.Now().Add(time.Hour))
			for field, value := range ahead {
				s[field] = value
			}
		}, "in the future"},
		"cafe\u0301": {nil, "NFC"},
	}
	for key, damage := range damages {
		p.put(key, damage.change)
	}
	p.put(bucketKey, nil)
	p.put("taken", nil)
	if _, err := p.ledger.OpenBucket(t.Context(), ledger.OpenBucket{Key: "taken", Limit: 5}); err != nil {
		t.Fatal(err)
	}
	for _, dry := range []bool{true, false} {
		summary, reasons := p.run(func(o *Options) { o.DryRun = dry })
		p.wantCounts(summary, 1, 0, len(damages)+1)
		for key, damage := range damages {
			if !strings.HasPrefix(reasons[key], "skipped: ") || !strings.Contains(reasons[key], damage.reason) {
				t.Errorf("%s: %q, want it to tell of %q", key, reasons[key], damage.reason)
			}
		}
		if !strings.Contains(reasons["taken"], "knows a bucket of this key already") {
			t.Errorf("taken: %q", reasons["taken"])
		}
	}
	// Who was left alone can still be written.
	p.exec(`UPDATE token_lease_buckets SET updated_at = now() WHERE bucket_key <> $1`, bucketKey)
	if s, err := p.ledger.Inspect(t.Context(), "taken"); err != nil || s.Limit != 5 || s.LeaseRecords != 0 {
		t.Errorf("the ledger's own bucket is %+v, %v", s, err)
	}
	chosen, reasons := p.run(func(o *Options) { o.Buckets = []string{bucketKey, "absent"} })
	p.wantCounts(chosen, 0, 1, 1)
	if !strings.Contains(reasons["absent"], "no such bucket") {
		t.Errorf("absent: %q", reasons["absent"])
	}
}

// Goal: the package's own role, which owns nothing, is refused what has moved, in
// every way to write it, and can write what has not. Method: such a role, which can
// also tell ledgers apart, as whoever runs an import must.
func TestRoleOfThePackage(t *testing.T) {
	p := newPlace(t, false)
	p.put(bucketKey, nil)
	p.put("stays", nil)
	role := fmt.Sprintf("importer_app_%d", time.Now().UnixNano())
	p.exec(`CREATE ROLE ` + role)
	p.exec(`GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON token_lease_buckets TO ` + role)
	t.Cleanup(func() {
		if _, err := p.conn.Exec(context.Background(), `RESET ROLE; DROP OWNED BY `+role+`; DROP ROLE `+role); err != nil {
			t.Error(err)
		}
	})
	summary, _ := p.run(func(o *Options) { o.Buckets = []string{bucketKey} })
	p.wantCounts(summary, 1, 0, 0)
	p.exec(`SET ROLE ` + role)
	p.exec(`UPDATE token_lease_buckets SET updated_at = now() WHERE bucket_key = 'stays'`)
	p.exec(ledgerID)
	for _, sql := range []string{
		`UPDATE token_lease_buckets SET updated_at = now() WHERE bucket_key = 'tenants/pm-4821'`,
		`UPDATE token_lease_buckets SET bucket_key = 'elsewhere' WHERE bucket_key = 'tenants/pm-4821'`,
		`DELETE FROM token_lease_buckets WHERE bucket_key = 'tenants/pm-4821'`,
		`TRUNCATE token_lease_buckets`,
	} {
		if _, err := p.conn.Exec(t.Context(), sql); err == nil || !strings.Contains(err.Error(), "was moved to the ledger") {
			t.Errorf("%s: %v, want it to be refused", sql, err)
		}
	}
}

// Goal: "already imported" is said of this very move only. Method: the same key in
// another source, the same source into another ledger, a source that was written past
// its fence, one that was restored without it, and a fence that a run has left to a
// key which the ledger has got since.
func TestNotTheSameMove(t *testing.T) {
	p, other := newPlace(t, true), newPlace(t, true)
	p.put(bucketKey, nil)
	other.put(bucketKey, nil)
	summary, _ := p.run(nil)
	p.wantCounts(summary, 1, 0, 0)
	refused := func(what, want string, change func(*Options)) {
		t.Helper()
		summary, reasons := p.run(change)
		p.wantCounts(summary, 0, 0, 1)
		if !strings.Contains(reasons[bucketKey], want) {
			t.Errorf("%s: %q, want it to tell of %q", what, reasons[bucketKey], want)
		}
	}
	refused("another source", "did not come from here", func(o *Options) { o.Source = other.source })
	refused("another ledger", "moved to another ledger", func(o *Options) { o.Target = other.target })
	p.exec(`ALTER TABLE token_lease_buckets DISABLE TRIGGER USER`)
	p.exec(`UPDATE token_lease_buckets SET revision = revision + 1, state = jsonb_set(state, '{revision}', to_jsonb(revision + 1))`)
	refused("written past the fence", "past the fence", nil)
	p.exec(`DELETE FROM token_lease_moved`)
	refused("restored without the fence", "did not come from here", nil)
	p.fence("")
	refused("a fence that was left", "delete its row of token_lease_moved", nil)
	// The other source was let alone.
	other.exec(`UPDATE token_lease_buckets SET updated_at = now()`)
}

// Goal: what cannot work at all says what to change, without the password.
func TestCannotWork(t *testing.T) {
	p := newPlace(t, false)
	p.exec(`DROP TABLE token_lease_buckets`)
	_, err := Run(t.Context(), Options{Source: p.source, Target: p.target, Report: func(string, Outcome, error) {}})
	if err == nil || !strings.Contains(err.Error(), "has no table token_lease_buckets") {
		t.Errorf("without the table: %v", err)
	}
	_, err = Run(t.Context(), Options{Source: "postgres://user:hunter2@%zz", Target: p.target})
	if err == nil || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("with a URL that is none: %v", err)
	}
	if errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
