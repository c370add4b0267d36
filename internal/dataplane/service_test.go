package dataplane_test

import (
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/token-lease/operator/internal/ledger"
	v1 "github.com/token-lease/operator/proto/tokenlease/v1alpha1"
	"github.com/token-lease/operator/proto/tokenlease/v1alpha1/tokenleasev1alpha1connect"
)

// Goal: what a person does with curl works from beginning to end, with figures that read
// as they are meant.
func TestStoryInJSON(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	mine := w.good(worker)

	var first, again, committed, released settled
	w.post(t, mine, "Reserve", reserveBody("a", 400)).wantOK(t, "reserve", &first)
	if first.Lease.State != "LEASE_STATE_RESERVED" || first.Lease.ReservedTokens != "400" || first.Bucket.AvailableTokens != "600" {
		t.Errorf("reserve answered %+v", first)
	}
	w.post(t, mine, "Reserve", reserveBody("a", `"400"`)).wantOK(t, "reserve again, with the figure as a string", &again)
	if again.Lease.ID != first.Lease.ID || again.Bucket.ReservedTokens != "400" {
		t.Errorf("the repetition answered %+v", again)
	}
	w.post(t, mine, "Reserve", reserveBody("a", 401)).want(t, "the same key with another figure", http.StatusConflict, "idempotency_conflict")

	full := w.post(t, mine, "Reserve", reserveBody("b", 601))
	full.want(t, "one token too many", http.StatusTooManyRequests, "budget_exceeded")
	if d := full.detail(t); d.Figures["requestedTokens"] != "601" || d.Figures["availableTokens"] != "600" || !d.Retryable || d.RetryAfter != "60s" {
		t.Errorf("the details are %+v", d)
	}
	if got := full.header.Get("Retry-After"); got != "60" {
		t.Errorf("Retry-After is %q, want the seconds to the expiry of the lease that stands", got)
	}

	commit := `{` + ofBucket + `, "leaseId": "` + first.Lease.ID + `", "actualTokens": 350}`
	w.post(t, mine, "Commit", commit).wantOK(t, "commit", &committed)
	if committed.Lease.ActualTokens != "350" || committed.Bucket.UsedTokens != "350" || committed.Bucket.ReservedTokens != "0" {
		t.Errorf("commit answered %+v", committed)
	}
	w.post(t, mine, "Commit", strings.Replace(commit, "350", "351", 1)).want(t, "another figure", http.StatusConflict, "commit_conflict")
	w.post(t, mine, "Release", `{`+ofBucket+`, "leaseId": "`+first.Lease.ID+`"}`).want(t, "release of what was committed", http.StatusConflict, "lease_committed")
	w.post(t, mine, "Commit", `{`+ofBucket+`, "leaseId": "`+first.Lease.ID+`"}`).want(t, "no figure", http.StatusBadRequest, "invalid_input")

	var second settled
	w.post(t, mine, "Reserve", `{`+ofBucket+`, "requestKey": "c", "tokens": 10, "ttl": "30s"}`).wantOK(t, "reserve with a TTL", &second)
	w.post(t, mine, "Release", `{`+ofBucket+`, "leaseId": "`+second.Lease.ID+`"}`).wantOK(t, "release", &released)
	if released.Lease.State != "LEASE_STATE_RELEASED" || released.Bucket.AvailableTokens != "650" {
		t.Errorf("release answered %+v", released)
	}
	w.post(t, mine, "Commit", `{`+ofBucket+`, "leaseId": "`+second.Lease.ID+`", "actualTokens": 1}`).want(t, "commit of what was released", http.StatusConflict, "lease_released")
	w.post(t, mine, "Commit", `{`+ofBucket+`, "leaseId": "no-such-lease", "actualTokens": 1}`).want(t, "a lease that is not there", http.StatusNotFound, "lease_not_found")

	var bucket struct {
		Bucket figures `json:"bucket"`
	}
	w.post(t, mine, "GetBucket", `{`+ofBucket+`}`).wantOK(t, "get the bucket", &bucket)
	if bucket.Bucket != (figures{LimitTokens: "1000", UsedTokens: "350", ReservedTokens: "0", AvailableTokens: "650"}) {
		t.Errorf("the bucket has %+v", bucket.Bucket)
	}
}

// Goal: an expired lease frees its tokens by the ledger's clock, and cannot be committed
// any more.
func TestExpiry(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var lease settled
	w.post(t, w.good(worker), "Reserve", reserveBody("a", 1000)).wantOK(t, "reserve", &lease)
	w.clock.Advance(time.Minute)
	w.post(t, w.good(worker), "Commit", `{`+ofBucket+`, "leaseId": "`+lease.Lease.ID+`", "actualTokens": 1}`).want(t, "late", http.StatusConflict, "lease_expired")
	w.post(t, w.good(worker), "Reserve", reserveBody("b", 1000)).wantOK(t, "reserve what came back", nil)
}

// Goal: leases and audit come in pages that add up to all of them, each once and in
// order.
func TestPages(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	mine := w.good(worker)
	const count = 7
	for i := range count {
		w.post(t, mine, "Reserve", reserveBody(string(rune('a'+i)), 1)).wantOK(t, "reserve", nil)
		w.clock.Advance(time.Millisecond)
	}
	seen := map[string]bool{}
	pages, after := 0, ""
	for {
		var page struct {
			Leases        []struct{ ID string }
			NextPageToken string
		}
		w.post(t, mine, "ListLeases", `{`+ofBucket+`, "pageSize": 3, "pageToken": "`+after+`"}`).wantOK(t, "list", &page)
		for _, lease := range page.Leases {
			if seen[lease.ID] {
				t.Errorf("%s is listed twice", lease.ID)
			}
			seen[lease.ID] = true
		}
		if pages++; page.NextPageToken == "" || pages > count {
			break
		}
		after = page.NextPageToken
	}
	if len(seen) != count || pages != 3 {
		t.Errorf("%d leases on %d pages, want %d on 3", len(seen), pages, count)
	}
	var audit struct {
		Rows []struct{ Sequence, Event, EffectiveLimitTokens string }
	}
	w.post(t, mine, "ListAudit", `{`+ofBucket+`}`).wantOK(t, "audit", &audit)
	if len(audit.Rows) != 1 || audit.Rows[0].Event != "BucketOpened" || audit.Rows[0].EffectiveLimitTokens != "1000" {
		t.Errorf("the audit has %+v", audit.Rows)
	}
	for body, what := range map[string]string{
		`"pageSize": 501`: "too large a page", `"pageSize": -1`: "a negative page", `"pageToken": "e30"`: "an empty place",
		`"pageToken": "###"`: "no place", `"pageToken": "` + strings.Repeat("a", 600) + `"`: "an endless place",
	} {
		w.post(t, mine, "ListLeases", `{`+ofBucket+`, `+body+`}`).want(t, what, http.StatusBadRequest, "invalid_input")
	}
	w.post(t, mine, "ListAudit", `{`+ofBucket+`, "afterSequence": -1}`).want(t, "a negative number", http.StatusBadRequest, "invalid_input")
}

// showing puts a token into what a Connect client sends.
func showing(token string) connect.ClientOption {
	return connect.WithInterceptors(connect.UnaryInterceptorFunc(func(next connect.UnaryFunc) connect.UnaryFunc {
		return func(ctx context.Context, request connect.AnyRequest) (connect.AnyResponse, error) {
			request.Header().Set("Authorization", "Bearer "+token)
			return next(ctx, request)
		}
	}))
}

// Goal: each protocol carries the same answer and the same refusal, with code, figures
// and wait.
func TestProtocols(t *testing.T) {
	t.Parallel()
	for name, options := range map[string][]connect.ClientOption{
		"connect": nil, "connect-json": {connect.WithProtoJSON()}, "grpc": {connect.WithGRPC()}, "grpc-web": {connect.WithGRPCWeb()},
		"compressed": {connect.WithSendGzip()},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			client := tokenleasev1alpha1connect.NewLedgerServiceClient(w.http, w.URL, append(options, showing(w.good(worker)))...)
			bucket := &v1.BucketName{Namespace: namespace, Name: bucketName}
			answer, err := client.Reserve(t.Context(), &v1.ReserveRequest{Bucket: bucket, RequestKey: "a", Tokens: 400})
			if err != nil {
				t.Fatal(err)
			}
			if answer.GetLease().GetReservedTokens() != 400 || answer.GetBucket().GetAvailableTokens() != 600 {
				t.Errorf("answered %v", answer)
			}
			_, err = client.Reserve(t.Context(), &v1.ReserveRequest{Bucket: bucket, RequestKey: "b", Tokens: 601})
			d := detailOf(t, err, connect.CodeResourceExhausted)
			if d.GetCode() != "budget_exceeded" || d.GetFigures()["availableTokens"] != 600 || d.GetRetryAfter().AsDuration() != time.Minute {
				t.Errorf("refused with %v", d)
			}
			if _, err = client.GetBucket(t.Context(), &v1.GetBucketRequest{Bucket: &v1.BucketName{Namespace: namespace, Name: "none"}}); detailOf(t, err, connect.CodeNotFound).GetCode() != "bucket_not_found" {
				t.Errorf("a bucket that is not there: %v", err)
			}
			anonymous := tokenleasev1alpha1connect.NewLedgerServiceClient(w.http, w.URL, options...)
			if _, err = anonymous.GetBucket(t.Context(), &v1.GetBucketRequest{Bucket: bucket}); detailOf(t, err, connect.CodeUnauthenticated).GetCode() != "unauthenticated" {
				t.Errorf("nobody: %v", err)
			}
		})
	}
}

func detailOf(t *testing.T, err error, code connect.Code) *v1.ErrorDetail {
	t.Helper()
	var refusal *connect.Error
	if !errors.As(err, &refusal) || refusal.Code() != code || len(refusal.Details()) != 1 {
		t.Fatalf("%v, want %s with one detail", err, code)
	}
	message, err := refusal.Details()[0].Value()
	if err != nil {
		t.Fatal(err)
	}
	d, ok := message.(*v1.ErrorDetail)
	if !ok {
		t.Fatalf("the detail is a %T", message)
	}
	return d
}

// Goal: reads can be made with GET, as caches and browsers do, and nothing else can.
func TestGet(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	client := tokenleasev1alpha1connect.NewLedgerServiceClient(w.http, w.URL, connect.WithHTTPGet(), connect.WithProtoJSON(), showing(w.good(worker)))
	if _, err := client.GetBucket(t.Context(), &v1.GetBucketRequest{Bucket: &v1.BucketName{Namespace: namespace, Name: bucketName}}); err != nil {
		t.Error(err)
	}
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, w.URL+service+"Reserve?encoding=json&message=%7B%7D", nil)
	if err != nil {
		t.Fatal(err)
	}
	if got := w.do(t, request); got.status != http.StatusMethodNotAllowed {
		t.Errorf("a reservation by GET: %d %s", got.status, got.body)
	}
}

// Goal: only TLS is spoken, in no version that is broken.
func TestTransport(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, strings.Replace(w.URL, "https", "http", 1)+service+"GetBucket", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	if got := w.do(t, request); got.status != http.StatusBadRequest {
		t.Errorf("without TLS: %d", got.status)
	}
	dialer := tls.Dialer{Config: &tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS11}}
	if connection, err := dialer.DialContext(t.Context(), "tcp", strings.TrimPrefix(w.URL, "https://")); err == nil {
		connection.Close()
		t.Error("TLS 1.1 is spoken")
	}
}

// Goal: a bucket with a period says which one is running, and a refusal says when the
// next one begins, if no lease expires before.
func TestPeriods(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.declareWith(t, "hourly", ledger.Declaration{
		Limit: 10, TenantID: "hourly", ConflictPolicy: ledger.ConflictReview, Settings: ledger.DefaultSettings(),
		Period: ledger.PeriodSpec{Every: ledger.CadenceHour, TimeZone: "Etc/UTC"},
	})
	mine := w.good(worker)
	const hourly = `"bucket": {"namespace": "tenants", "name": "hourly"}`
	var lease settled
	w.post(t, mine, "Reserve", `{`+hourly+`, "requestKey": "a", "tokens": 10}`).wantOK(t, "reserve", &lease)
	w.post(t, mine, "Commit", `{`+hourly+`, "leaseId": "`+lease.Lease.ID+`", "actualTokens": 10}`).wantOK(t, "commit", nil)
	w.clock.Advance(time.Second)
	refused := w.post(t, mine, "Reserve", `{`+hourly+`, "requestKey": "b", "tokens": 1}`)
	refused.want(t, "the period is spent", http.StatusTooManyRequests, "budget_exceeded")
	now := w.clock.Now()
	end := now.Truncate(time.Hour).Add(time.Hour)
	wait := int64((end.Sub(now) + time.Second - 1) / time.Second)
	if got := refused.header.Get("Retry-After"); got != strconv.FormatInt(wait, 10) {
		t.Errorf("Retry-After is %q, want the %d seconds to %s", got, wait, end)
	}
	var bucket struct {
		Bucket struct {
			Period struct{ StartedAt, EndsAt time.Time }
		}
	}
	w.post(t, mine, "GetBucket", `{`+hourly+`}`).wantOK(t, "get", &bucket)
	if got := bucket.Bucket.Period; !got.EndsAt.Equal(end) || got.StartedAt.After(now) {
		t.Errorf("the period is %+v, want it to end at %s", got, end)
	}
	w.clock.Set(end)
	w.post(t, mine, "Reserve", `{`+hourly+`, "requestKey": "b", "tokens": 10}`).wantOK(t, "in the next period", nil)
}

// Goal: a refusal for lack of tokens never names the end of the period while a lease may
// expire before, nor the expiry of a lease whose tokens another period gets back.
// Method: more leases than are looked at were settled and expire before the one that
// stands; in the next period that one still stands, and is of the past.
func TestRetryAfterIsOfThisPeriod(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	settings := ledger.DefaultSettings()
	settings.MaxTTL = 24 * time.Hour
	w.declareWith(t, "hourly", ledger.Declaration{
		Limit: 100, TenantID: "hourly", ConflictPolicy: ledger.ConflictReview, Settings: settings,
		Period: ledger.PeriodSpec{Every: ledger.CadenceHour, TimeZone: "Etc/UTC"},
	})
	mine := w.good(worker)
	const hourly = `"bucket": {"namespace": "tenants", "name": "hourly"}`
	var first settled
	w.post(t, mine, "Reserve", `{`+hourly+`, "requestKey": "first", "tokens": 100, "ttl": "90s"}`).wantOK(t, "reserve", &first)
	refused := w.post(t, mine, "Reserve", `{`+hourly+`, "requestKey": "b", "tokens": 1}`)
	if got := refused.header.Get("Retry-After"); got != "90" {
		t.Errorf("Retry-After is %q, and a lease expires in 90 seconds", got)
	}
	w.post(t, mine, "Release", `{`+hourly+`, "leaseId": "`+first.Lease.ID+`"}`).wantOK(t, "release", nil)
	w.clock.Advance(2 * time.Second) // what was found is forgotten
	for i := range 70 {
		var lease settled
		w.post(t, mine, "Reserve", fmt.Sprintf(`{`+hourly+`, "requestKey": "settled-%d", "tokens": 1, "ttl": "60s"}`, i)).wantOK(t, "reserve", &lease)
		w.post(t, mine, "Commit", `{`+hourly+`, "leaseId": "`+lease.Lease.ID+`", "actualTokens": 1}`).wantOK(t, "commit", nil)
	}
	w.post(t, mine, "Reserve", `{`+hourly+`, "requestKey": "stands", "tokens": 30, "ttl": "120s"}`).wantOK(t, "reserve", nil)
	refused = w.post(t, mine, "Reserve", `{`+hourly+`, "requestKey": "b", "tokens": 1}`)
	refused.want(t, "full", http.StatusTooManyRequests, "budget_exceeded")
	if got := refused.header.Get("Retry-After"); got != "" && got != "120" {
		t.Errorf("Retry-After is %q, and a lease expires in 120 seconds", got)
	}

	end := w.clock.Now().Truncate(time.Hour).Add(time.Hour)
	w.clock.Set(end.Add(-time.Second))
	w.post(t, mine, "Reserve", `{`+hourly+`, "requestKey": "long", "tokens": 30, "ttl": "600s"}`).wantOK(t, "reserve", nil)
	w.clock.Set(end.Add(time.Second))
	mine = w.good(worker)
	var all settled
	w.post(t, mine, "Reserve", `{`+hourly+`, "requestKey": "all", "tokens": 100, "ttl": "7200s"}`).wantOK(t, "in the next period", &all)
	refused = w.post(t, mine, "Reserve", `{`+hourly+`, "requestKey": "c", "tokens": 1}`)
	refused.want(t, "full again", http.StatusTooManyRequests, "budget_exceeded")
	if got := refused.header.Get("Retry-After"); got != "3599" {
		t.Errorf("Retry-After is %q, want the 3599 seconds to the end of the period", got)
	}
}

// Goal: usage comes in pages that add up to what the bucket has used, by hour; a bound of
// hours leaves out what lies beyond.
func TestUsage(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for i := range 5 {
		mine := w.good(worker) // the hours pass, and tokens with them
		var lease settled
		w.post(t, mine, "Reserve", reserveBody(string(rune('a'+i)), 10)).wantOK(t, "reserve", &lease)
		w.post(t, mine, "Commit", fmt.Sprintf(`{%s, "leaseId": %q, "actualTokens": %d}`, ofBucket, lease.Lease.ID, i+1)).wantOK(t, "commit", nil)
		w.clock.Advance(time.Hour)
	}
	mine := w.good(worker)
	type page struct {
		Usage []struct {
			Hour                        time.Time
			UsedTokens, CommittedLeases string
			TenantID                    string
		}
		NextPageToken string
	}
	var used []string
	pages, after := 0, ""
	for {
		var p page
		w.post(t, mine, "ListUsage", fmt.Sprintf(`{%s, "pageSize": 2, "pageToken": %q}`, ofBucket, after)).wantOK(t, "usage", &p)
		for _, line := range p.Usage {
			if line.CommittedLeases != "1" || line.TenantID != bucketName || !line.Hour.Equal(line.Hour.Truncate(time.Hour)) {
				t.Errorf("a line is %+v", line)
			}
			used = append(used, line.UsedTokens)
		}
		if pages++; p.NextPageToken == "" || pages > 5 {
			break
		}
		after = p.NextPageToken
	}
	if got := strings.Join(used, " "); got != "1 2 3 4 5" || pages != 3 {
		t.Errorf("used %s on %d pages, want 1 to 5 on 3", got, pages)
	}
	var bounded page
	from := w.clock.Now().Add(-4 * time.Hour).Truncate(time.Hour)
	w.post(t, mine, "ListUsage", fmt.Sprintf(`{%s, "from": %q, "to": %q}`, ofBucket, from.Format(time.RFC3339), from.Add(2*time.Hour).Format(time.RFC3339))).wantOK(t, "two hours", &bounded)
	if len(bounded.Usage) != 2 || bounded.Usage[0].UsedTokens != "2" {
		t.Errorf("the two hours have %+v", bounded.Usage)
	}
	for what, field := range map[string]string{
		"an instant before all": `"from": "1969-12-31T23:59:59Z"`, "a place that is none": `"pageToken": "e30x"`,
		"a place with a NUL": `"pageToken": "` + base64.RawURLEncoding.EncodeToString([]byte(`{"h":1,"t":"\u0000"}`)) + `"`,
		"a place before all": `"pageToken": "` + base64.RawURLEncoding.EncodeToString([]byte(`{"h":-1}`)) + `"`,
		"a place beyond all": `"pageToken": "` + base64.RawURLEncoding.EncodeToString([]byte(`{"h":9223372036854775807}`)) + `"`,
	} {
		w.post(t, mine, "ListUsage", `{`+ofBucket+`, `+field+`}`).want(t, what, http.StatusBadRequest, "invalid_input")
	}
}

// Goal: a repetition that is older than what the bucket remembers is refused, and not
// taken for a new request.
func TestRequestTooOld(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	settings := ledger.DefaultSettings()
	settings.Retention = 24 * time.Hour
	w.declareWith(t, "forgetful", ledger.Declaration{Limit: 10, TenantID: "forgetful", ConflictPolicy: ledger.ConflictReview, Settings: settings})
	reserve := func(key, at string) reply {
		return w.post(t, w.good(worker), "Reserve", fmt.Sprintf(
			`{"bucket": {"namespace": "tenants", "name": "forgetful"}, "requestKey": %q, "tokens": 1, "firstAttemptAt": %q}`, key, at))
	}
	now := w.clock.Now()
	reserve("a", now.Format(time.RFC3339Nano)).wantOK(t, "a new one", nil)
	reserve("b", now.Add(-25*time.Hour).Format(time.RFC3339Nano)).want(t, "one of the day before", http.StatusConflict, "request_too_old")
	reserve("c", "0001-01-01T00:00:00Z").want(t, "out of range", http.StatusBadRequest, "invalid_input")
	reserve("d", "yesterday").want(t, "no instant", http.StatusBadRequest, "")
}
