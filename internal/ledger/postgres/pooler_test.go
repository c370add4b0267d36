package postgres

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/token-lease/operator/internal/ledger"
)

// The tests of this package also run behind a transaction pooler. With PgBouncer
// that is by hand, since it needs to be installed and to find the server:
//
//	[databases]
//	* = host=127.0.0.1 port=5432
//	[pgbouncer]
//	listen_addr = 127.0.0.1
//	listen_port = 6432
//	auth_type = trust
//	auth_file = users.txt
//	pool_mode = transaction
//	default_pool_size = 2
//	admin_users = postgres
//
// in pgbouncer.ini, a line `"postgres" ""` in users.txt, and then
//
//	TOKENLEASE_TEST_DATABASE_URL='postgres://postgres@127.0.0.1:5432/postgres?sslmode=disable' \
//	TOKENLEASE_TEST_POOLER=127.0.0.1:6432 go test ./internal/ledger/postgres \
//	-skip 'TestUnconfirmedByStandby|TestOutage|TestPasswordRotation|TestCheckWarns'
//
// leaves out only tests of the server itself: servers of their own, passwords, and
// settings that a pooled connection does not read anew.

// Goal: neither a schema that changes nor migrations that run again are noticed by
// callers, and no lock of a session stays, directly and behind a transaction pooler.
// Method: 200 reservations and 20 raises at once on several processes, while
// three others migrate and a column is added to each table.
func TestSchemaChangesUnderLoad(t *testing.T) {
	d := newDatabase(t)
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
