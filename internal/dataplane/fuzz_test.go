package dataplane_test

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/token-lease/operator/internal/dataplane"
	"github.com/token-lease/operator/internal/dataplane/dataplanetest"
	"github.com/token-lease/operator/internal/ledger"
	"github.com/token-lease/operator/internal/ledger/ledgertest"
)

// newHandler is a data plane without a transport, for as many requests as can be made.
func newHandler(tb testing.TB) (http.Handler, *ledger.Ledger, string) {
	tb.Helper()
	clock := ledgertest.NewClock()
	options, _, err := dataplanetest.Options(clock)
	if err != nil {
		tb.Fatal(err)
	}
	return dataplane.New(options).Handler(), options.Ledger, dataplanetest.Token(worker, audience, clock.Now().Add(time.Hour))
}

// FuzzRequests sends bodies of any kind to every procedure.
//
// Goal: whatever is sent, the answer is that of a request or a clear refusal, never a
// failure of the server; and tokens are reserved only by a request that was answered so.
func FuzzRequests(f *testing.F) {
	types := []string{"application/json", "application/proto", "application/grpc", "application/grpc-web+json"}
	methods := []string{"Reserve", "Commit", "Release", "Extend", "GetBucket", "ListLeases", "ListUsage", "ListAudit"}
	for _, body := range []string{
		"", "{}", reserveBody("a", 1), reserveBody("a", `"1"`), reserveBody("a", "1e0"), reserveBody("a", "9007199254740993"),
		`{` + ofBucket + `, "leaseId": "x", "actualTokens": 0}`, `{` + ofBucket + `, "leaseId": "x", "ttl": "1.5s"}`,
		`{` + ofBucket + `, "pageSize": 1, "pageToken": "eyJ0IjoxLCJsIjoieCJ9"}`, `{` + ofBucket + `, "afterSequence": "1"}`,
		`{` + ofBucket + `, "from": "2026-11-30T18:00:00Z", "to": "2026-11-30T19:00:00+01:00", "pageToken": "eyJoIjoxfQ"}`,
		"\n\x12\n\ntenants\x12\x07pm-4821\x12\x01a\x18\x01", "\x00\x00\x00\x00\x02{}", "\x01\x00\x00\x00\x02{}", "\x00\xff\xff\xff\xff", "\xff",
		`{"bucket": {"namespace": "\ud800", "name": ""}}`, `[[[[[[[[[[[[[[[[[[[[`,
	} {
		for i := range types {
			for j := range methods {
				if (i+j+len(body))%3 == 0 { // a part of all pairs is enough to begin with
					f.Add(uint8(i), uint8(j), []byte(body))
				}
			}
		}
	}
	f.Fuzz(func(t *testing.T, contentType, method uint8, body []byte) {
		handler, l, token := newHandler(t)
		request := httptest.NewRequestWithContext(t.Context(), http.MethodPost, service+methods[int(method)%len(methods)], bytes.NewReader(body))
		request.Header.Set("Content-Type", types[int(contentType)%len(types)])
		request.Header.Set("Authorization", "Bearer "+token)
		recorder := httptest.NewRecorder()
		handler.ServeHTTP(recorder, request)
		if recorder.Code >= 500 {
			t.Errorf("%d %s", recorder.Code, recorder.Body)
		}
		snapshot, err := l.Inspect(t.Context(), namespace+"/"+bucketName)
		if err != nil {
			t.Fatal(err)
		}
		reserved := snapshot.ReservedTokens > 0
		if snapshot.UsedTokens != 0 || snapshot.ReservedTokens > limit || reserved && method%uint8(len(methods)) != 0 {
			t.Errorf("used %d, reserved %d", snapshot.UsedTokens, snapshot.ReservedTokens)
		}
	})
}

// FuzzTokens shows what may stand in a header.
//
// Goal: nothing but a token of a known subject is let in.
func FuzzTokens(f *testing.F) {
	now := ledgertest.NewClock().Now()
	f.Add("Bearer " + dataplanetest.Token("system:serviceaccount:tenants:stranger", audience, now.Add(time.Hour)))
	f.Add("Bearer " + dataplanetest.Token(worker, "else", now.Add(time.Hour)))
	f.Add("bearer " + dataplanetest.JWT(map[string]any{}, map[string]any{"iss": "", "sub": worker, "aud": audience, "exp": 1e20}))
	f.Add("Bearer ")
	f.Add("Bearer a.b.c")
	f.Add("Basic YTpi")
	f.Fuzz(func(t *testing.T, value string) {
		handler, _, _ := newHandler(t)
		request := httptest.NewRequestWithContext(t.Context(), http.MethodPost, service+"GetBucket", bytes.NewReader([]byte(`{`+ofBucket+`}`)))
		request.Header.Set("Content-Type", "application/json")
		request.Header["Authorization"] = []string{value}
		recorder := httptest.NewRecorder()
		handler.ServeHTTP(recorder, request)
		if subject := dataplanetest.SubjectOf(value); recorder.Code < 500 && (subject == worker || subject == other) {
			return // the fuzzer has put a good one together; no signature is checked here
		}
		if recorder.Code != http.StatusUnauthorized {
			t.Errorf("%d %s", recorder.Code, recorder.Body)
		}
	})
}
