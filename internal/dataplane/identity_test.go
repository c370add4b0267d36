package dataplane_test

import (
	"context"
	"encoding/base64"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"connectrpc.com/grpcreflect"

	"github.com/token-lease/operator/internal/dataplane"
	"github.com/token-lease/operator/internal/dataplane/dataplanetest"
	"github.com/token-lease/operator/internal/ledger"
)

// Goal: a token that its own claims already speak against is refused with 401, and the
// API server is not asked; neither are malformed headers passed on.
func TestTokensRefusedUnasked(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	now := w.clock.Now()
	claims := func(change func(map[string]any)) string {
		c := map[string]any{"iss": "i", "sub": worker, "aud": []string{audience}, "exp": now.Add(time.Hour).Unix()}
		change(c)
		return dataplanetest.JWT(map[string]any{"alg": "RS256"}, c)
	}
	for name, token := range map[string]string{
		"none": "", "a word": "secret", "two parts": "a.b", "four parts": w.good(worker) + ".a", "not base64": "?.?.?",
		"no JSON": "YQ.YQ.YQ", "a list": dataplanetest.JWT(map[string]any{}, []int{1}), "an empty signature": strings.TrimSuffix(w.good(worker), "c2lnbmF0dXJl"),
		"another audience":          dataplanetest.Token(worker, "https://kubernetes.default.svc", now.Add(time.Hour)),
		"no audience":               claims(func(c map[string]any) { delete(c, "aud") }),
		"audience a number":         claims(func(c map[string]any) { c["aud"] = 7 }),
		"expired":                   dataplanetest.Token(worker, audience, now.Add(-time.Minute)),
		"no expiry":                 claims(func(c map[string]any) { delete(c, "exp") }),
		"expiry a text":             claims(func(c map[string]any) { c["exp"] = "never" }),
		"expiry at the end of time": claims(func(c map[string]any) { c["exp"] = 1e300 }),
		"no subject":                claims(func(c map[string]any) { delete(c, "sub") }),
		"no issuer":                 claims(func(c map[string]any) { delete(c, "iss") }),
		"too long":                  claims(func(c map[string]any) { c["pad"] = strings.Repeat("a", 8<<10) }),
		"padded base64":             strings.Replace(w.good(worker), ".", "=.", 1),
	} {
		got := w.post(t, token, "GetBucket", `{`+ofBucket+`}`)
		got.want(t, name, http.StatusUnauthorized, "unauthenticated")
		if got.header.Get("WWW-Authenticate") != "Bearer" {
			t.Errorf("%s: WWW-Authenticate is %q", name, got.header.Get("WWW-Authenticate"))
		}
	}
	w.post(t, "", "GetBucket", `{`+ofBucket+`}`, "Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte("a:b"))).
		want(t, "another scheme", http.StatusUnauthorized, "unauthenticated")
	w.post(t, w.good(worker), "GetBucket", `{`+ofBucket+`}`, "Authorization", "Bearer "+w.good(other)).
		want(t, "two tokens", http.StatusUnauthorized, "unauthenticated")
	if tokens, access := w.api.Asked(); tokens != 0 || access != 0 {
		t.Errorf("the API server was asked %d times about tokens and %d about access", tokens, access)
	}
}

// Goal: what the API server does not vouch for is refused: a token that it does not
// know, and one that it knows without having checked the audience.
func TestTokensRefusedByReview(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.post(t, w.good("system:serviceaccount:tenants:stranger"), "GetBucket", `{`+ofBucket+`}`).
		want(t, "unknown", http.StatusUnauthorized, "unauthenticated")
	for name, audiences := range map[string][]string{"no audience": {}, "another audience": {"https://kubernetes.default.svc"}} {
		w := newWorld(t)
		w.api.Set(func(a *apiServer) { a.Audiences = audiences })
		w.post(t, w.good(worker), "GetBucket", `{`+ofBucket+`}`).want(t, name, http.StatusUnauthorized, "unauthenticated")
	}
}

// Goal: headers that speak for somebody else change nothing, neither what is allowed nor
// who holds a lease.
func TestForgedHeaders(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, headers := range [][]string{
		{"Impersonate-User", worker}, {"Impersonate-User", "system:admin", "Impersonate-Group", "system:masters"},
		{"X-Remote-User", worker, "X-Remote-Group", "system:masters"}, {"X-Forwarded-User", worker}, {"Impersonate-Uid", "0"},
		{"Impersonate-Extra-Scopes", "all"},
	} {
		w.post(t, w.good(other), "GetBucket", `{`+ofBucket+`}`, headers...).
			want(t, fmt.Sprint(headers), http.StatusNotFound, "bucket_not_found")
		w.post(t, w.good(worker), "GetBucket", `{`+ofBucket+`}`, headers...).wantOK(t, fmt.Sprint(headers), nil)
		w.post(t, "", "GetBucket", `{`+ofBucket+`}`, headers...).
			want(t, fmt.Sprint(headers), http.StatusUnauthorized, "unauthenticated")
	}
}

// Goal: a caller cannot tell a bucket that it may not use from one that is not there,
// whatever it tries: status, headers and body are the same but for the name it sent.
func TestNothingLeaks(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.declare(t, "secret", 77)
	bodies := map[string]string{
		"Reserve": `"requestKey": "a", "tokens": 1`, "Commit": `"leaseId": "a", "actualTokens": 1`, "Release": `"leaseId": "a"`,
		"Extend": `"leaseId": "a"`, "GetBucket": ``, "ListLeases": ``, "ListUsage": ``, "ListAudit": ``,
	}
	for method, rest := range bodies {
		answers := map[string]reply{}
		for _, name := range []string{"secret", "absent"} {
			body := fmt.Sprintf(`{"bucket": {"namespace": "tenants", "name": %q}`, name)
			if rest != "" {
				body += ", " + rest
			}
			got := w.post(t, w.good(worker), method, body+"}")
			got.want(t, method+" "+name, http.StatusNotFound, "bucket_not_found")
			// The detail's bytes hold the name too.
			got.body = strings.ReplaceAll(got.body, name, "NAME")
			if before, after, found := strings.Cut(got.body, `"value":"`); found {
				_, after, _ = strings.Cut(after, `"`)
				got.body = before + after
			}
			got.header.Del("Date")
			answers[name] = got
		}
		if a, b := answers["secret"], answers["absent"]; a.body != b.body || fmt.Sprint(a.header) != fmt.Sprint(b.header) {
			t.Errorf("%s tells them apart:\n%s %v\n%s %v", method, a.body, a.header, b.body, b.header)
		}
	}
}

// Goal: each verb needs its own right, on this very bucket.
func TestVerbs(t *testing.T) {
	t.Parallel()
	calls := map[string]string{
		"Reserve": `{` + ofBucket + `, "requestKey": "z", "tokens": 1}`, "Commit": `{` + ofBucket + `, "leaseId": "x", "actualTokens": 1}`,
		"Release": `{` + ofBucket + `, "leaseId": "x"}`, "GetBucket": `{` + ofBucket + `}`,
		"ListLeases": `{` + ofBucket + `}`, "ListUsage": `{` + ofBucket + `}`, "ListAudit": `{` + ofBucket + `}`,
	}
	needs := map[string]string{
		"create": "Reserve", "update": "Commit Release", "delete": "Release", "get": "GetBucket", "list": "ListLeases", "usage": "ListUsage", "audit": "ListAudit",
	}
	for verb, opens := range needs {
		w := newWorld(t)
		w.api.Allow(other, namespace+"/"+bucketName, verb)
		for method, body := range calls {
			got := w.post(t, w.good(other), method, body)
			closed := got.status == http.StatusNotFound && got.code(t) == "bucket_not_found"
			if want := !strings.Contains(opens, method); closed != want {
				t.Errorf("with %s alone, %s answers %d %s", verb, method, got.status, got.body)
			}
		}
	}
}

// Goal: answers are kept, so that the API server is not asked for each request, and no
// longer than they may be: what was taken away is gone after 30 seconds, what was given
// is there after 10, and no token outlives its own expiry.
func TestKeptAnswers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	get := func(token string) reply { return w.post(t, token, "GetBucket", `{`+ofBucket+`}`) }
	mine := w.good(worker)
	for range 5 {
		get(mine).wantOK(t, "get", nil)
	}
	if tokens, access := w.api.Asked(); tokens != 1 || access != 1 {
		t.Errorf("for 5 requests the API server was asked %d and %d times", tokens, access)
	}
	w.api.Set(func(a *apiServer) { clear(a.May) })
	w.clock.Advance(29 * time.Second)
	get(mine).wantOK(t, "within 30 seconds", nil)
	w.clock.Advance(2 * time.Second)
	get(mine).want(t, "after 30 seconds", http.StatusNotFound, "bucket_not_found")

	w.api.Allow(worker, namespace+"/"+bucketName, "get")
	w.clock.Advance(9 * time.Second)
	get(mine).want(t, "within 10 seconds", http.StatusNotFound, "bucket_not_found")
	w.clock.Advance(2 * time.Second)
	get(mine).wantOK(t, "after 10 seconds", nil)

	w.api.Set(func(a *apiServer) { a.Users[worker] = false })
	w.clock.Advance(31 * time.Second)
	get(mine).want(t, "the account is gone", http.StatusUnauthorized, "unauthenticated")

	w.api.Set(func(a *apiServer) { a.Users[worker] = true })
	brief := dataplanetest.Token(worker, audience, w.clock.Now().Add(5*time.Second))
	get(brief).wantOK(t, "a brief token", nil)
	w.clock.Advance(20 * time.Second)
	get(brief).want(t, "a brief token past its end", http.StatusUnauthorized, "unauthenticated")
}

// Goal: while the API server does not answer, nobody new is let in; the refusal says that
// it may be repeated, and is not remembered. Who was let in before stays in for as long
// as answers are kept.
func TestAPIServerDown(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.api.Allow(other, namespace+"/"+bucketName, "get")
	get := func(subject string) reply { return w.post(t, w.good(subject), "GetBucket", `{`+ofBucket+`}`) }
	get(worker).wantOK(t, "before", nil)
	w.api.Set(func(a *apiServer) { a.Down = true })
	get(worker).wantOK(t, "who is known", nil)
	refused := get(other)
	refused.want(t, "who is new", http.StatusServiceUnavailable, "review_unavailable")
	if !refused.detail(t).Retryable || refused.header.Get("Retry-After") != "1" {
		t.Errorf("the refusal says %+v, Retry-After %q", refused.detail(t), refused.header.Get("Retry-After"))
	}
	w.clock.Advance(31 * time.Second)
	get(worker).want(t, "who was known", http.StatusServiceUnavailable, "review_unavailable")
	w.api.Set(func(a *apiServer) { a.Down = false })
	get(other).wantOK(t, "once it is back", nil)
}

// Goal: callers who ask the same at once share one review; and a flood of tokens that
// nobody knows is turned away beyond a bound, while who is known goes on.
func TestReviewsAreBounded(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.post(t, w.good(worker), "GetBucket", `{`+ofBucket+`}`).wantOK(t, "known", nil)
	before, _ := w.api.Asked()
	open := make(chan struct{})
	w.api.Set(func(a *apiServer) { a.Wait = open })

	const same, flood = 20, 400
	replies := make(chan reply, same+flood)
	var running sync.WaitGroup
	ask := func(token string) {
		running.Go(func() { replies <- w.post(t, token, "GetBucket", `{`+ofBucket+`}`) })
	}
	for range same {
		ask(w.good(other))
	}
	for i := range flood {
		ask(w.good(fmt.Sprintf("system:serviceaccount:tenants:made-up-%d", i)))
	}
	// 32 are asked and 256 wait; all above are turned away while those still hang.
	turnedAway := 0
	for turnedAway < same+flood-same-32-256 {
		select {
		case r := <-replies:
			r.want(t, "beyond the bound", http.StatusServiceUnavailable, "overloaded")
			turnedAway++
		case <-time.After(testBound):
			t.Fatalf("only %d were turned away", turnedAway)
		}
		if turnedAway == 1 {
			w.post(t, w.good(worker), "GetBucket", `{`+ofBucket+`}`).wantOK(t, "known, during the flood", nil)
		}
	}
	close(open)
	running.Wait()
	after, _ := w.api.Asked()
	if after-before > 32+256+1 {
		t.Errorf("%d tokens were reviewed", after-before)
	}
}

// Goal: neither strangers nor a caller who asks for one bucket after the other keep the API
// server from being asked about somebody else.
// Method: reviews of made-up tokens hang, and so does what is asked about one caller, of
// both far more than are asked at a time; another caller asks for a bucket for the first time.
func TestReviewsAreShared(t *testing.T) {
	t.Parallel()
	const flood = 400
	w := newWorld(t)
	for _, known := range []string{worker, other} {
		w.post(t, w.good(known), "GetBucket", `{"bucket": {"namespace": "tenants", "name": "known"}}`).
			want(t, "known", http.StatusNotFound, "bucket_not_found")
	}
	open := make(chan struct{})
	w.api.Set(func(a *apiServer) {
		a.Wait = open
		a.WaitFor = func(subject string) bool { return subject != worker }
	})
	replies := make(chan reply, 2*flood)
	var running sync.WaitGroup
	for i := range flood {
		running.Go(func() {
			replies <- w.post(t, w.good(fmt.Sprintf("system:serviceaccount:tenants:made-up-%d", i)), "GetBucket", `{`+ofBucket+`}`)
		})
		running.Go(func() {
			replies <- w.post(t, w.good(other), "GetBucket", fmt.Sprintf(`{"bucket": {"namespace": "tenants", "name": "made-up-%d"}}`, i))
		})
	}
	// Strangers beyond the bound are turned away, and the rest hangs.
	for range flood - 32 - 256 {
		select {
		case r := <-replies:
			r.wantStatus(t, "beyond the bounds", http.StatusServiceUnavailable)
		case <-time.After(testBound):
			t.Fatal("too few were turned away")
		}
	}
	w.post(t, w.good(worker), "GetBucket", `{`+ofBucket+`}`).wantOK(t, "somebody else", nil)
	close(open)
	running.Wait()
}

// Goal: one caller cannot take all places: beyond its share it is turned away, and
// another caller is served.
func TestShareOfOneCaller(t *testing.T) {
	t.Parallel()
	block := make(chan struct{})
	asked := make(chan struct{}, 16)
	w := newWorld(t, func(o *dataplane.Options) {
		o.Limits.Requests = 8
		o.Cluster = func(ctx context.Context) (string, error) {
			asked <- struct{}{}
			select {
			case <-block:
			case <-ctx.Done():
			}
			return dataplanetest.Cluster, ctx.Err()
		}
	})
	w.post(t, w.good(worker), "GetBucket", `{"bucket": {"namespace": "tenants", "name": "forbidden"}}`).
		want(t, "known", http.StatusNotFound, "bucket_not_found")
	// Each asks for a bucket of its own, since those who ask for one share the look.
	var running sync.WaitGroup
	done := make(chan reply, 4)
	for i := range 4 {
		name := fmt.Sprintf("one-%d", i)
		w.declare(t, name, limit)
		w.api.Allow(worker, "tenants/"+name, "get")
		running.Go(func() {
			done <- w.post(t, w.good(worker), "GetBucket", fmt.Sprintf(`{"bucket": {"namespace": "tenants", "name": %q}}`, name))
		})
	}
	for range 4 {
		select {
		case <-asked:
		case <-time.After(testBound):
			t.Fatal("a request did not get inside")
		}
	}
	w.post(t, w.good(worker), "GetBucket", `{`+ofBucket+`}`).want(t, "a fifth", http.StatusServiceUnavailable, "overloaded")
	w.post(t, w.good(other), "GetBucket", `{"bucket": {"namespace": "tenants", "name": "forbidden"}}`).
		want(t, "another caller", http.StatusNotFound, "bucket_not_found")
	close(block)
	running.Wait()
	for range 4 {
		(<-done).wantOK(t, "a request inside", nil)
	}
}

// Goal: a caller who asks for many pages at once leaves the database to the others: pages
// are read one after the other, one caller has a share of those that wait, and what others
// do beside that goes on.
func TestListsAreBounded(t *testing.T) {
	t.Parallel()
	const flood = 100
	open, reading := make(chan struct{}), make(chan struct{}, 2*flood)
	w := newWorld(t, func(o *dataplane.Options) {
		o.Ledger = ledger.New(slowLists{o.Ledger.Store(), reading, open}, nil)
	})
	w.api.Allow(other, namespace+"/"+bucketName, "audit", "get")
	replies := make(chan reply, flood)
	for range flood {
		go func() { replies <- w.post(t, w.good(worker), "ListAudit", `{`+ofBucket+`}`) }()
	}
	for range flood - 32 {
		select {
		case r := <-replies:
			r.want(t, "beyond the share", http.StatusServiceUnavailable, "overloaded")
		case <-time.After(testBound):
			t.Fatal("too few were turned away")
		}
	}
	if len(reading) != 1 {
		t.Errorf("%d pages are read at a time", len(reading))
	}
	w.post(t, w.good(other), "GetBucket", `{`+ofBucket+`}`).wantOK(t, "beside that", nil)
	listed := make(chan reply, 1)
	go func() { listed <- w.post(t, w.good(other), "ListAudit", `{`+ofBucket+`}`) }()
	close(open)
	(<-listed).wantOK(t, "another caller's page", nil)
	for range 32 {
		(<-replies).wantOK(t, "a page that waited", nil)
	}
}

// slowLists is a store whose pages wait to be let go.
type slowLists struct {
	ledger.Store

	reading, open chan struct{}
}

func (s slowLists) Audit(ctx context.Context, key string, after int64, limit int) ([]ledger.AuditRow, error) {
	s.reading <- struct{}{}
	select {
	case <-s.open:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	return s.Store.Audit(ctx, key, after, limit)
}

// Goal: strangers who hold on to what is for everybody, or wait to be reviewed, take no
// places of callers that are known.
func TestStrangersTakeNoPlaces(t *testing.T) {
	t.Parallel()
	const places = 8
	w := newWorld(t, func(o *dataplane.Options) { o.Limits.Requests = places })
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	w.post(t, w.good(worker), "GetBucket", `{`+ofBucket+`}`).wantOK(t, "known", nil)

	reflecting := grpcreflect.NewClient(w.http, w.URL, connect.WithGRPC())
	held, turnedAway := 0, 0
	for range 2 * places {
		stream := reflecting.NewStream(ctx)
		if _, err := stream.ListServices(); err == nil {
			held++ // it is in work until it is closed
		} else if connect.CodeOf(err) == connect.CodeUnavailable {
			turnedAway++
		} else {
			t.Fatal(err)
		}
	}
	if held == 0 || turnedAway == 0 {
		t.Errorf("%d streams are held and %d were turned away", held, turnedAway)
	}
	w.post(t, w.good(worker), "GetBucket", `{`+ofBucket+`}`).wantOK(t, "beside streams", nil)

	open := make(chan struct{})
	w.api.Set(func(a *apiServer) { a.Wait = open })
	replies := make(chan reply, 2*places)
	for range 2 * places {
		go func() { replies <- w.post(t, w.good("made-up"), "GetBucket", `{`+ofBucket+`}`) }()
	}
	for range places { // the others wait
		select {
		case r := <-replies:
			r.wantStatus(t, "beyond the bound", http.StatusServiceUnavailable)
		case <-time.After(testBound):
			t.Fatal("too few were turned away")
		}
	}
	w.post(t, w.good(worker), "GetBucket", `{`+ofBucket+`}`).wantOK(t, "beside strangers", nil)
	close(open)
	for range places {
		<-replies
	}
}

// Goal: a lease belongs to the subject that reserved it: to another one that may use the
// bucket it is not there, whatever it tries; only who may delete leases releases it. A
// request key of one subject is not another's either.
func TestHolders(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.api.Allow(other, namespace+"/"+bucketName, "create", "update")
	var lease settled
	w.post(t, w.good(worker), "Reserve", reserveBody("a", 10)).wantOK(t, "reserve", &lease)
	if lease.Lease.Holder != worker {
		t.Errorf("the lease belongs to %q", lease.Lease.Holder)
	}
	id := `"leaseId": "` + lease.Lease.ID + `"`
	theirs, mine := w.good(other), w.good(worker)
	w.post(t, theirs, "Commit", `{`+ofBucket+`, `+id+`, "actualTokens": 1}`).want(t, "commit", http.StatusNotFound, "lease_not_found")
	w.post(t, theirs, "Release", `{`+ofBucket+`, `+id+`}`).want(t, "release", http.StatusNotFound, "lease_not_found")
	w.post(t, theirs, "Extend", `{`+ofBucket+`, `+id+`, "ttl": "60s"}`).want(t, "extend", http.StatusNotFound, "lease_not_found")
	w.post(t, theirs, "Reserve", reserveBody("a", 10)).want(t, "the same key", http.StatusConflict, "idempotency_conflict")

	var extended settled
	w.clock.Advance(30 * time.Second)
	w.post(t, mine, "Extend", `{`+ofBucket+`, `+id+`, "ttl": "120.5s"}`).wantOK(t, "extend", &extended)
	if want := w.clock.Now().Add(120500 * time.Millisecond).UTC().Format("2006-01-02T15:04:05.000Z"); extended.Lease.ExpiresAt != want {
		t.Errorf("extended to %s, want %s", extended.Lease.ExpiresAt, want)
	}
	w.post(t, mine, "Extend", `{`+ofBucket+`, `+id+`, "ttl": "2h"}`).want(t, "not a duration", http.StatusBadRequest, "")
	w.post(t, mine, "Extend", `{`+ofBucket+`, `+id+`, "ttl": "7200s"}`).want(t, "above the maximum", http.StatusBadRequest, "invalid_input")

	w.api.Allow(other, namespace+"/"+bucketName, "delete")
	w.clock.Advance(11 * time.Second)
	var released settled
	w.post(t, theirs, "Release", `{`+ofBucket+`, `+id+`}`).wantOK(t, "release by one who may delete", &released)
	if released.Lease.State != "LEASE_STATE_RELEASED" || released.Bucket.ReservedTokens != "0" {
		t.Errorf("answered %+v", released)
	}
	w.post(t, theirs, "Commit", `{`+ofBucket+`, `+id+`, "actualTokens": 1}`).want(t, "commit still", http.StatusNotFound, "lease_not_found")
}
