package e2e_test

import (
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/client"
	"github.com/token-lease/operator/hack/devenv/postgres/postgrestest"
	"github.com/token-lease/operator/proto/tokenlease/v1alpha1/tokenleasev1alpha1connect"
)

// newClient is a client of one manager, as the ServiceAccount of the workload.
func (in *installation) newClient(t *testing.T, m *manager, retry client.Retry) *client.Client {
	t.Helper()
	file := filepath.Join(in.dir, "token")
	if err := os.WriteFile(file, []byte(in.token(t, in.namespace, workloadName, workloadAudience)), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := client.New(client.Options{URL: "https://" + m.dataPlane, TokenFile: file, HTTPClient: overTLS, Retry: retry})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// workload makes the story's bucket and an account that may draw from it, on managers
// that are started.
func (in *installation) workload(t *testing.T, replicas []*manager, changes ...func(*v1alpha1.TokenBucket)) client.Bucket {
	t.Helper()
	in.create(t, in.bucket(changes...))
	in.waitBucket(t, inSync...)
	in.account(t, in.namespace, workloadName)
	in.permit(t, "draw", workloadName, []string{bucketName}, "create", "update", "get")
	token := in.token(t, in.namespace, workloadName, workloadAudience)
	for _, m := range replicas {
		waitFor(t, m.worker+" to let the workload in", func() (bool, string) {
			got := m.post(t, token, "GetBucket", about(in.namespace, bucketName, ""))
			return got.status == 200, got.body
		})
	}
	return client.Bucket{Namespace: in.namespace, Name: bucketName}
}

// tokens are the bucket's counters, as SQL has them, which must be the sums over its
// leases.
func (d *database) tokens(t *testing.T, key string) (used, reserved int64) {
	t.Helper()
	d.counters(t, key)
	return query[int64](t, d, "SELECT used_tokens FROM tokenlease.buckets WHERE bucket_key = $1", key),
		query[int64](t, d, "SELECT reserved_tokens FROM tokenlease.buckets WHERE bucket_key = $1", key)
}

// Goal: of 64 clients on each of two replicas that reserve from one bucket at once, as
// many are admitted as the limit has tokens, and not one more; a raise is seen by both
// replicas at the same instant, for the next reserve on each.
func TestTwoReplicasOneLimit(t *testing.T) {
	t.Parallel()
	in := install(t)
	replicas := []*manager{
		in.start(t, "manager-a", managerOptions{dataPlane: true}), in.start(t, "manager-b", managerOptions{dataPlane: true}),
	}
	const limit, raised, perReplica, each = 1000, 1500, 64, 3
	bucket := in.workload(t, replicas, func(b *v1alpha1.TokenBucket) {
		b.Spec.Limit = limit
		// What is reserved outlives the raise.
		b.Spec.Reservations = v1alpha1.ReservationPolicy{DefaultTTLSeconds: 86_400, MaxTTLSeconds: 86_400}
	})
	clients := []*client.Client{in.newClient(t, replicas[0], client.Retry{}), in.newClient(t, replicas[1], client.Retry{})}

	var admitted atomic.Int64
	rush := func() {
		var running sync.WaitGroup
		for n := range 2 * perReplica {
			running.Go(func() {
				for {
					_, err := clients[n%2].Reserve(t.Context(), client.Request{Bucket: bucket, Tokens: each})
					if client.HasCode(err, client.CodeBudgetExceeded) {
						return
					}
					if err != nil {
						t.Errorf("client %d: %v", n, err)
						return
					}
					admitted.Add(each)
				}
			})
		}
		running.Wait()
	}
	rush()
	const fits = limit / each * each
	if _, reserved := in.db.tokens(t, in.key(bucketName)); admitted.Load() != fits || reserved != fits {
		t.Errorf("%d tokens were admitted and %d are reserved, want %d", admitted.Load(), reserved, fits)
	}

	stage(t, "a raise admits on both at once")
	lease := in.lease(t)
	lease.Spec.NormalLimit, lease.Spec.TemporaryLimit = limit, raised
	in.create(t, lease)
	in.waitLease(t, leaseName, active)
	for i, c := range clients {
		if _, err := c.Reserve(t.Context(), client.Request{Bucket: bucket, Tokens: each}); err != nil {
			t.Errorf("replica %d, the moment the raise is active: %v", i, err)
		}
		admitted.Add(each)
	}
	rush()
	if _, reserved := in.db.tokens(t, in.key(bucketName)); admitted.Load() != raised || reserved != raised {
		t.Errorf("%d tokens were admitted and %d are reserved, want %d", admitted.Load(), reserved, raised)
	}

	stage(t, "and ends on both at once")
	in.passExpiry(t, leaseName)
	for i, c := range clients {
		_, err := c.Reserve(t.Context(), client.Request{Bucket: bucket, Tokens: 1})
		var exceeded *client.BudgetExceededError
		if !errors.As(err, &exceeded) || exceeded.AvailableTokens != 0 {
			t.Errorf("replica %d, the moment the raise is over: %v", i, err)
		}
	}
}

// Goal: while PostgreSQL is down in the middle of traffic, callers are told 503 within
// their deadline, and a client gets through once it is back: each piece of work is booked
// once, and nothing stays reserved.
// Method: a server of its own, killed as a crash does; all the time that it is down, a
// caller looks at what it is told.
func TestWorkloadOutlastsDatabase(t *testing.T) {
	t.Parallel()
	server := postgrestest.Own(t)
	in := installOn(t, world.cluster, server)
	m := in.start(t, "manager-a", managerOptions{dataPlane: true, args: []string{"--data-plane-request-timeout=3s"}})
	bucket := in.workload(t, []*manager{m})
	c := in.newClient(t, m, client.Retry{})
	token := in.token(t, in.namespace, workloadName, workloadAudience)

	const workers, each, outage = 8, 10, time.Minute
	var booked atomic.Int64
	started, down, back := make(chan struct{}, workers), make(chan struct{}), make(chan struct{})
	var running sync.WaitGroup
	for n := range workers {
		running.Go(func() {
			for i := range each {
				err := c.Do(t.Context(), client.Request{Bucket: bucket, Tokens: 10}, func(context.Context) (int64, error) {
					if i == each/2 { // in the middle of the work
						started <- struct{}{}
						<-down
						if n%2 == 0 { // half of them settle while it is down, the others after
							return 7, nil
						}
						<-back
					}
					return 7, nil
				})
				if err != nil {
					t.Errorf("worker %d, work %d: %v", n, i, err)
					return
				}
				booked.Add(7)
			}
		})
	}
	for range workers {
		<-started
	}
	if err := server.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	close(down)
	stage(t, "while it is down")
	for stopped := time.Now(); time.Since(stopped) < outage; time.Sleep(waitStep) { // callers come all the time
		asked := time.Now()
		got := m.post(t, token, "Reserve", about(in.namespace, bucketName, reserving("while down", 1)))
		if took := time.Since(asked); got.status != 503 || got.header.Get("Retry-After") == "" || took > 10*time.Second {
			t.Errorf("after %s: %d %s, Retry-After %q, want 503 soon", took, got.status, got.body, got.header.Get("Retry-After"))
		}
		if code := got.code(); code != "ledger_unavailable" && code != "outcome_unknown" {
			t.Errorf("the code is %q", code)
		}
	}
	if err := server.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	close(back)
	running.Wait()
	used, reserved := in.db.tokens(t, in.key(bucketName))
	if booked.Load() != workers*each*7 || used != booked.Load() || reserved != 0 {
		t.Errorf("booked %d, used %d, reserved %d, want %d, as much, and nothing", booked.Load(), used, reserved, workers*each*7)
	}
	m.post(t, token, "GetBucket", about(in.namespace, bucketName, "")).wantOK(t, "after all")
}

// Goal: work that runs many times as long as the TTL keeps its lease in the ledger, and a
// client that dies in the middle of work leaves nothing but a reservation that ends with
// its TTL.
func TestWorkloadAndTTL(t *testing.T) {
	t.Parallel()
	in := install(t)
	m := in.start(t, "manager-a", managerOptions{dataPlane: true})
	bucket := in.workload(t, []*manager{m})
	c := in.newClient(t, m, client.Retry{})
	const ttl = time.Second
	err := c.Do(t.Context(), client.Request{Bucket: bucket, Tokens: 10, TTL: ttl}, func(ctx context.Context) (int64, error) {
		in.db.waitPast(t, in.db.now(t).Add(4*ttl))
		return 7, context.Cause(ctx)
	})
	if err != nil {
		t.Error(err)
	}
	used, reserved := in.db.tokens(t, in.key(bucketName))
	if used != 7 || reserved != 0 {
		t.Errorf("used %d, reserved %d", used, reserved)
	}

	stage(t, "a client that dies")
	lease, err := c.Reserve(t.Context(), client.Request{Bucket: bucket, Tokens: 10, TTL: ttl})
	if err != nil {
		t.Fatal(err)
	}
	in.db.waitPast(t, lease.ExpiresAt)
	waitFor(t, "its tokens to be back", func() (bool, string) {
		figures, err := c.Figures(t.Context(), bucket)
		return err == nil && figures.Reserved == 0 && figures.Used == 7, fmt.Sprintf("%+v, %v", figures, err)
	})
	if _, err := c.Commit(t.Context(), bucket, lease.ID, 1); !client.HasCode(err, client.CodeLeaseExpired) {
		t.Errorf("its late commit: %v", err)
	}
}

// Goal: callers that vanish at any point leave nothing behind but reservations that end
// with their TTL: the whole budget is usable again, nothing was spent, and the manager's
// connections to the database are free.
// Method: a third gives up at a random instant of its request, a third closes its
// connection in the middle of the answer, a third is never heard of again.
func TestWorkloadsVanish(t *testing.T) {
	t.Parallel()
	in := install(t)
	m := in.start(t, "manager-a", managerOptions{dataPlane: true})
	bucket := in.workload(t, []*manager{m}, func(b *v1alpha1.TokenBucket) { b.Spec.Limit = 1000 })
	c := in.newClient(t, m, client.Retry{Attempts: 1})
	token := in.token(t, in.namespace, workloadName, workloadAudience)
	const ttl = 3 * time.Second
	var running sync.WaitGroup
	for n := range 99 {
		running.Go(func() {
			switch n % 3 {
			case 0:
				ctx, cancel := context.WithTimeout(t.Context(), rand.N(10*time.Millisecond))
				defer cancel()
				_, _ = c.Reserve(ctx, client.Request{Bucket: bucket, Tokens: 5, TTL: ttl}) // admitted or not, nobody knows
			case 1:
				in.hangUp(t, m, token, fmt.Sprintf(`"requestKey": "hang up %d", "tokens": 5, "ttl": "3s"`, n))
			default:
				if _, err := c.Reserve(t.Context(), client.Request{Bucket: bucket, Tokens: 5, TTL: ttl}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	running.Wait()
	in.db.waitPast(t, in.db.now(t).Add(ttl))
	if figures, err := c.Figures(t.Context(), bucket); err != nil || figures != (client.Figures{Limit: 1000, Available: 1000}) {
		t.Errorf("%+v, %v", figures, err)
	}
	in.db.tokens(t, in.key(bucketName))
	leases := query[int64](t, in.db, "SELECT count(*) FROM tokenlease.leases WHERE bucket_key = $1", in.key(bucketName))
	expired := query[int64](t, in.db, "SELECT count(*) FROM tokenlease.leases WHERE bucket_key = $1 AND state = 'expired'", in.key(bucketName))
	if leases < 33 || expired != leases {
		t.Errorf("of %d leases %d have expired, want all, and at least those of the callers that got an answer", leases, expired)
	}
	waitFor(t, "no connection to be in a transaction", func() (bool, string) {
		open := query[int64](t, in.db, "SELECT count(*) FROM pg_stat_activity WHERE usename = $1 AND state LIKE '%in transaction%'", in.db.role)
		return open == 0, fmt.Sprint(open)
	})
	if _, err := c.Reserve(t.Context(), client.Request{Bucket: bucket, Tokens: 1000}); err != nil {
		t.Errorf("the whole budget: %v", err)
	}
}

// hangUp reserves over a connection of its own and closes it when the answer begins.
func (in *installation) hangUp(t *testing.T, m *manager, token, fields string) {
	connection, err := (&tls.Dialer{Config: &tls.Config{InsecureSkipVerify: true}}).DialContext(t.Context(), "tcp", m.dataPlane)
	if err != nil {
		t.Error(err)
		return
	}
	defer connection.Close()
	body := about(in.namespace, bucketName, fields)
	request := fmt.Sprintf("POST /%s/Reserve HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
		tokenleasev1alpha1connect.LedgerServiceName, token, len(body), body)
	if _, err := connection.Write([]byte(request)); err != nil {
		t.Error(err)
		return
	}
	if _, err := connection.Read(make([]byte, 1)); err != nil {
		t.Error(err)
	}
}

// Goal: figures up to the largest that JSON has exactly pass from a workload to the
// database and back digit by digit; what lies above is refused and changes nothing.
func TestWorkloadFiguresAreExact(t *testing.T) {
	t.Parallel()
	in := install(t)
	m := in.start(t, "manager-a", managerOptions{dataPlane: true})
	const most = int64(1<<53 - 1)
	in.workload(t, []*manager{m}, func(b *v1alpha1.TokenBucket) { b.Spec.Limit = most })
	token := in.token(t, in.namespace, workloadName, workloadAudience)
	revision := query[int64](t, in.db, "SELECT revision FROM tokenlease.buckets WHERE bucket_key = $1", in.key(bucketName))
	for _, figure := range []string{"9007199254740992", "9007199254740993", `"9007199254740993"`, "9223372036854775808", "1.5", "-1", "0", "1e400", `"100k"`, "null"} {
		got := m.post(t, token, "Reserve", about(in.namespace, bucketName, `"requestKey": "a", "tokens": `+figure))
		if got.status != 400 {
			t.Errorf("%s: %d %s", figure, got.status, got.body)
		}
	}
	if got := query[int64](t, in.db, "SELECT revision FROM tokenlease.buckets WHERE bucket_key = $1", in.key(bucketName)); got != revision {
		t.Errorf("the refusals moved the revision from %d to %d", revision, got)
	}
	m.post(t, token, "Reserve", about(in.namespace, bucketName, fmt.Sprintf(`"requestKey": "all", "tokens": %d`, most))).wantOK(t, "reserve all")
	if _, reserved := in.db.tokens(t, in.key(bucketName)); reserved != most {
		t.Errorf("%d are reserved, want %d", reserved, most)
	}
	got := m.post(t, token, "Reserve", about(in.namespace, bucketName, reserving("one more", 1)))
	got.want(t, "one more", 429, "budget_exceeded")
}

// Goal: who may look after a bucket reads its leases, usage and evidence in pages, and
// releases what another left behind; a page token that was made up is refused, whatever
// the database would say to it.
func TestWorkloadAuditor(t *testing.T) {
	t.Parallel()
	in := install(t)
	m := in.start(t, "manager-a", managerOptions{dataPlane: true})
	bucket := in.workload(t, []*manager{m})
	c := in.newClient(t, m, client.Retry{})
	in.account(t, in.namespace, "auditor")
	in.mustKubectl(t, "", "create", "rolebinding", "auditor", "--clusterrole=tokenlease-tokenbucket-auditor",
		"--serviceaccount="+in.namespace+":auditor", "--namespace="+in.namespace)
	auditor := in.token(t, in.namespace, "auditor", workloadAudience)
	var left *client.Lease
	for n := range int64(3) {
		lease, err := c.Reserve(t.Context(), client.Request{Bucket: bucket, Tokens: 10})
		if err != nil {
			t.Fatal(err)
		}
		if left = lease; n < 2 {
			if _, err := c.Commit(t.Context(), bucket, lease.ID, 5+n); err != nil {
				t.Fatal(err)
			}
		}
	}
	waitFor(t, "the auditor's role to be known", func() (bool, string) {
		got := m.post(t, auditor, "ListLeases", about(in.namespace, bucketName, ""))
		return got.status == 200, got.body
	})
	var page struct {
		Leases        []struct{ ID string }
		NextPageToken string
	}
	seen := 0
	for range 3 {
		got := m.post(t, auditor, "ListLeases", about(in.namespace, bucketName, fmt.Sprintf(`"pageSize": 1, "pageToken": %q`, page.NextPageToken)))
		got.wantOK(t, "a page of leases")
		page.NextPageToken = ""
		if err := json.Unmarshal([]byte(got.body), &page); err != nil {
			t.Fatal(err)
		}
		seen += len(page.Leases)
	}
	if seen != 3 || page.NextPageToken != "" {
		t.Errorf("%d leases on three pages of one, and then %q", seen, page.NextPageToken)
	}
	for method, want := range map[string]string{"ListUsage": `"usedTokens":"11"`, "ListAudit": `"event":"BucketOpened"`} {
		got := m.post(t, auditor, method, about(in.namespace, bucketName, ""))
		if got.status != 200 || !strings.Contains(got.body, want) {
			t.Errorf("%s: %d %s, want %s", method, got.status, got.body, want)
		}
	}
	for _, method := range []string{"ListLeases", "ListUsage"} {
		for _, place := range []string{`{"t":1,"l":"\u0000","h":1}`, `{"t":9223372036854775807,"l":"a","h":9223372036854775807}`, `{"h":1,"t":"\u0000"}`, `[]`} {
			token := base64.RawURLEncoding.EncodeToString([]byte(place))
			m.post(t, auditor, method, about(in.namespace, bucketName, fmt.Sprintf(`"pageToken": %q`, token))).want(t, method+" "+place, 400, "invalid_input")
		}
	}
	m.post(t, auditor, "Reserve", about(in.namespace, bucketName, reserving("x", 1))).want(t, "reserve", 404, "bucket_not_found")
	m.post(t, auditor, "Release", about(in.namespace, bucketName, fmt.Sprintf(`"leaseId": %q`, left.ID))).wantOK(t, "release what was left")
	if _, reserved := in.db.tokens(t, in.key(bucketName)); reserved != 0 {
		t.Errorf("%d tokens are reserved still", reserved)
	}
}
