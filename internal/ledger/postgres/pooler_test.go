package postgres

import (
	"context"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	devenv "github.com/token-lease/operator/hack/devenv/postgres"
	"github.com/token-lease/operator/hack/devenv/postgres/postgrestest"
	"github.com/token-lease/operator/internal/ledger"
)

// poolerConnections are few, so that each transaction is likely to have another
// session than the one before.
const poolerConnections = 2

// Goal: a transaction pooler may stand between: no session is relied on, and nothing
// that it refuses is sent. Method: PgBouncer in transaction mode with two
// connections, and the stories that ask most of a connection.
func TestBehindPooler(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), poolerStart)
	defer cancel()
	pooler, err := devenv.StartPooler(ctx, postgrestest.Server(t), poolerConnections, os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
		defer cancel()
		if err := pooler.Stop(ctx); err != nil {
			t.Error(err)
		}
	})
	t.Run("schema changes", func(t *testing.T) { schemaChangesUnderLoad(t, newDatabaseBehind(t, pooler)) })
	t.Run("session state", func(t *testing.T) { sessionState(t, newDatabaseBehind(t, pooler), 0, "0") })
	t.Run("linearizable", func(t *testing.T) {
		d := newDatabaseBehind(t, pooler)
		d.linearizable(d.pooled(), nil)
	})
}

// poolerStart is long enough to install it first.
const poolerStart = 5 * time.Minute

// Goal: neither a schema that changes nor migrations that run again are noticed by
// callers, and no lock of a session stays.
// Method: 200 reservations and 20 raises at once on several processes, while
// three others migrate and a column is added to each table.
func TestSchemaChangesUnderLoad(t *testing.T) { schemaChangesUnderLoad(t, newDatabase(t)) }

func schemaChangesUnderLoad(t *testing.T, d *database) {
	stores := []*Store{d.store(nil), d.store(nil), d.store(nil)}
	var keys []string
	for i := range 20 {
		declaration := turmoilDeclaration(i)
		keys = append(keys, declaration.Key)
		do(t, stores[0], declaration)
	}
	var group sync.WaitGroup
	request := func(n int, r ledger.Request) {
		group.Go(func() {
			if result := ledger.New(stores[n%len(stores)], nil).Do(context.Background(), r)[0]; result.Err != nil {
				t.Errorf("%s: %v", r.Operation(), result.Err)
			}
		})
	}
	for i := range 200 {
		request(i, ledger.Reserve{Key: keys[i%len(keys)], RequestKey: fmt.Sprint(i), Fingerprint: "f", Tokens: 1})
	}
	for i, key := range keys {
		raise := raised(fmt.Sprintf("raise-%d", i), turmoilDeclaration(i).Owner, turmoilLimit, 2*turmoilLimit, hour, nil)
		raise.Key = key
		request(i, raise)
	}
	for range 3 {
		group.Go(func() {
			if applied, err := Migrate(context.Background(), d.pooled()); err != nil || len(applied) != 0 {
				t.Errorf("Migrate = %v, %v; want nothing to do", applied, err)
			}
		})
	}
	for _, table := range []string{"buckets", "leases", "raises", "approvals", "operations", "audit"} {
		d.exec(`ALTER TABLE tokenlease.` + table + ` ADD COLUMN added_later text`)
	}
	group.Wait()
	for what, c := range map[string]struct {
		sql  string
		want int64
	}{
		"tokens are reserved":        {`SELECT sum(reserved_tokens)::bigint FROM tokenlease.buckets`, 200},
		"buckets are raised":         {`SELECT count(*) FROM tokenlease.buckets WHERE limit_tokens = 2000`, 20},
		"locks of sessions are left": {`SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'`, 0},
	} {
		if n := value[int64](d, c.sql); n != c.want {
			t.Errorf("%d %s, want %d", n, what, c.want)
		}
	}
	d.wantInvariants()
}
