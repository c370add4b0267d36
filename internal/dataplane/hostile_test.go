package dataplane_test

import (
	"bytes"
	"compress/gzip"
	"crypto/tls"
	"fmt"
	"math/rand/v2"
	"net/http"
	"runtime"
	"strings"
	"testing"
)

// Goal: figures reach the ledger exactly as they were written or not at all: never
// rounded, wrapped, clamped or taken for absent.
func TestFiguresAreExact(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.declare(t, "huge", 1<<53-1)
	w.api.Allow(worker, "tenants/huge", "create", "update", "get")
	mine := w.good(worker)
	const huge = `"bucket": {"namespace": "tenants", "name": "huge"}`
	const most = "9007199254740991"
	for figure, status := range map[string]int{
		"9007199254740992": 400, "9007199254740993": 400, `"9007199254740993"`: 400, "9223372036854775807": 400,
		"9223372036854775808": 400, "18446744073709551617": 400, "9.007199254740993e15": 400, "1e400": 400,
		"-1": 400, "0": 400, `"-1"`: 400, "1.5": 400, `"1.5"`: 400, `"100k"`: 400, `"1_000"`: 400, "1_000": 400, "0o17": 400, "0x10": 400,
		"017": 400, "+1": 400, "NaN": 400, `"NaN"`: 400, "Infinity": 400, "null": 400, "true": 400, `""`: 400, `" 1"`: 400, "[1]": 400, "{}": 400,
		// What is whole stays what it is, however it is written.
		"1e3": 200, "1000.0": 200, `"1000"`: 200,
	} {
		got := w.post(t, mine, "Reserve", fmt.Sprintf(`{%s, "requestKey": %q, "tokens": %s}`, huge, "of "+strings.TrimSpace(figure), figure))
		if got.status != status || status == 200 && !strings.Contains(got.body, `"reservedTokens":"1000"`) {
			t.Errorf("tokens %s: %d %s, want %d", figure, got.status, got.body, status)
		}
	}
	var before, all, after settled
	w.post(t, mine, "GetBucket", `{`+huge+`}`).wantOK(t, "get", &before)
	if before.Bucket.ReservedTokens != "3000" {
		t.Errorf("%s tokens are reserved, want 3000", before.Bucket.ReservedTokens)
	}
	w.post(t, mine, "Reserve", `{`+huge+`, "requestKey": "rest", "tokens": 9007199254737991}`).wantOK(t, "the rest", &all)
	if all.Lease.ReservedTokens != "9007199254737991" || all.Bucket.ReservedTokens != most || all.Bucket.AvailableTokens != "0" {
		t.Errorf("answered %+v", all)
	}
	lease := `{` + huge + `, "leaseId": "` + all.Lease.ID + `"`
	for _, figure := range []string{"-1", "1.5", "9007199254740992", "9007199254740993", "9223372036854775807", `"x"`, "null"} {
		w.post(t, mine, "Commit", lease+`, "actualTokens": `+figure+`}`).wantStatus(t, "commit "+figure, http.StatusBadRequest)
	}
	w.post(t, mine, "Commit", lease+`, "actualTokens": 9007199254737991}`).wantOK(t, "commit all", &after)
	if after.Lease.ActualTokens != "9007199254737991" || after.Bucket.UsedTokens != "9007199254737991" || after.Bucket.ReservedTokens != "3000" {
		t.Errorf("answered %+v", after)
	}
	var nothing settled
	w.post(t, mine, "Reserve", reserveBody("unused", 10)).wantOK(t, "reserve", &nothing)
	w.post(t, mine, "Commit", `{`+ofBucket+`, "leaseId": "`+nothing.Lease.ID+`", "actualTokens": 0}`).wantOK(t, "commit 0", &nothing)
	if nothing.Lease.ActualTokens != "0" || nothing.Lease.State != "LEASE_STATE_COMMITTED" {
		t.Errorf("answered %+v", nothing)
	}
}

func (r reply) wantStatus(t *testing.T, what string, status int) {
	t.Helper()
	if r.status != status {
		t.Errorf("%s: %d %s, want %d", what, r.status, r.body, status)
	}
}

// Goal: what is not a request is refused as such, with a word about what is wrong.
func TestHostileRequests(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	mine := w.good(worker)
	deep := strings.Repeat(`{"bucket":`, 5000) + "1" + strings.Repeat("}", 5000)
	for what, body := range map[string]string{
		"nothing": "", "no JSON": "tokens=5", "a list": "[]", "a word": `"x"`, "null": "null", "cut short": `{"bucket": {`,
		"two objects": `{} {}`, "deep": deep, "deep lists": strings.Repeat("[", 30000), "no UTF-8": "{\"requestKey\": \"\xff\xfe\"}",
		"a field twice":             `{` + ofBucket + `, ` + ofBucket + `, "requestKey": "a", "tokens": 1}`,
		"a field that there is not": `{` + ofBucket + `, "requestKey": "a", "tokens": 1, "tll": "5s"}`,
		"no bucket":                 `{"requestKey": "a", "tokens": 1}`, "an empty bucket": `{"bucket": {}, "requestKey": "a", "tokens": 1}`,
		"a path for a name":   `{"bucket": {"namespace": "tenants", "name": "../secret"}, "requestKey": "a", "tokens": 1}`,
		"a key for a name":    `{"bucket": {"namespace": "tenants", "name": "tenants/pm-4821"}, "requestKey": "a", "tokens": 1}`,
		"a wildcard":          `{"bucket": {"namespace": "tenants", "name": "*"}, "requestKey": "a", "tokens": 1}`,
		"a namespace in caps": `{"bucket": {"namespace": "Tenants", "name": "pm-4821"}, "requestKey": "a", "tokens": 1}`,
		"a long name":         `{"bucket": {"namespace": "tenants", "name": "` + strings.Repeat("a", 64) + `"}, "requestKey": "a", "tokens": 1}`,
		"no key":              `{` + ofBucket + `, "tokens": 1}`, "a long key": reserveBody(strings.Repeat("k", 257), 1),
		"a key with a break": reserveBody("a\nb", 1), "a key with blanks": reserveBody(" a ", 1),
		"a long fingerprint": `{` + ofBucket + `, "requestKey": "a", "tokens": 1, "fingerprint": "` + strings.Repeat("f", 4097) + `"}`,
		"no time":            `{` + ofBucket + `, "requestKey": "a", "tokens": 1, "ttl": "0s"}`, "negative time": `{` + ofBucket + `, "requestKey": "a", "tokens": 1, "ttl": "-5s"}`,
		"too fine a time":  `{` + ofBucket + `, "requestKey": "a", "tokens": 1, "ttl": "0.0001s"}`,
		"too long a time":  `{` + ofBucket + `, "requestKey": "a", "tokens": 1, "ttl": "315576000000s"}`,
		"time in minutes":  `{` + ofBucket + `, "requestKey": "a", "tokens": 1, "ttl": "5m"}`,
		"time as a number": `{` + ofBucket + `, "requestKey": "a", "tokens": 1, "ttl": 5}`,
		"a body too large": `{"fingerprint": "` + strings.Repeat("x", 70<<10) + `"}`,
	} {
		got := w.post(t, mine, "Reserve", body)
		got.wantStatus(t, what, http.StatusBadRequest)
		if !strings.Contains(got.body, `"message"`) {
			t.Errorf("%s: %s says nothing", what, got.body)
		}
	}
	for what, c := range map[string]struct {
		method, path, contentType string
		status                    int
	}{
		"another method": {http.MethodDelete, service + "Reserve", "application/json", http.StatusMethodNotAllowed},
		"another type":   {http.MethodPost, service + "Reserve", "text/plain", http.StatusUnsupportedMediaType},
		"no such method": {http.MethodPost, service + "Drop", "application/json", http.StatusNotFound},
		"no such path":   {http.MethodGet, "/", "", http.StatusNotFound},
	} {
		request, err := http.NewRequestWithContext(t.Context(), c.method, w.URL+c.path, strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		request.Header.Set("Content-Type", c.contentType)
		request.Header.Set("Authorization", "Bearer "+mine)
		w.do(t, request).wantStatus(t, what, c.status)
	}
	for what, headers := range map[string][]string{
		"a packing that nobody knows": {"Content-Encoding", "snappy"}, "a deadline that is no number": {"Connect-Timeout-Ms", "soon"},
		"another version": {"Connect-Protocol-Version", "7"},
	} {
		if got := w.post(t, mine, "GetBucket", `{`+ofBucket+`}`, headers...); got.status < 400 || got.status == http.StatusInternalServerError {
			t.Errorf("%s: %d %s", what, got.status, got.body)
		}
	}
	// A client of HTTP/2 would not even send it.
	plain := *w
	plain.http = &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true}}
	if got := plain.post(t, mine, "GetBucket", `{`+ofBucket+`}`, "X-Large", strings.Repeat("x", 64<<10)); got.status != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("a large header: %d %s", got.status, got.body)
	}
	w.post(t, mine, "GetBucket", `{`+ofBucket+`}`).wantOK(t, "after all that", nil)
}

// Goal: a small body that unpacks to a large one takes no memory, and one whose length is
// not told beforehand is cut off at the same bound.
func TestBodiesAreBounded(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var packed bytes.Buffer
	packer := gzip.NewWriter(&packed)
	block := bytes.Repeat([]byte(" "), 1<<20)
	for range 20 {
		if _, err := packer.Write(block); err != nil {
			t.Fatal(err)
		}
	}
	if err := packer.Close(); err != nil {
		t.Fatal(err)
	}
	w.post(t, w.good(worker), "GetBucket", packed.String(), "Content-Encoding", "gzip").wantStatus(t, "a bomb", http.StatusTooManyRequests)

	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, w.URL+service+"GetBucket", endless{})
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Authorization", "Bearer "+w.good(worker))
	w.do(t, request).wantStatus(t, "an endless body", http.StatusTooManyRequests)
}

// endless is a body that never ends.
type endless struct{}

func (endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = ' '
	}
	return len(p), nil
}

// Goal: hostile bodies by the thousand are each a clear 4xx; none makes the server fail,
// and it keeps nothing of them.
// Method: bodies are drawn at random from a seed that is printed; the heap is compared
// before and after, with room for what a warm server keeps.
func TestHostileBodies(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	methods := []string{"Reserve", "Commit", "Release", "Extend", "GetBucket", "ListLeases", "ListUsage", "ListAudit"}
	mine := w.good(worker)
	const warm, bodies = 300, 3000
	var before runtime.MemStats
	for i := range warm + bodies {
		if i == warm {
			runtime.GC()
			runtime.ReadMemStats(&before)
		}
		got := w.post(t, mine, methods[random.IntN(len(methods))], hostileBody(random))
		if got.status < 400 || got.status > 499 {
			t.Fatalf("body %d: %d %s", i, got.status, got.body)
		}
	}
	var after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&after)
	const room = 8 << 20
	if after.HeapAlloc > before.HeapAlloc+room {
		t.Errorf("the heap grew from %d to %d bytes", before.HeapAlloc, after.HeapAlloc)
	}
}

// hostileBody is a request that no procedure can carry out: one with bytes changed,
// parts repeated or left out, or with nothing but noise.
func hostileBody(random *rand.Rand) string {
	body := []byte(`{"bucket": {"namespace": "tenants", "name": "pm-4821"}, "requestKey": "a", "tokens": 1, "leaseId": "x", "actualTokens": 1, "ttl": "1s", "nothing": 0}`)
	switch random.IntN(4) {
	case 0:
		for range 1 + random.IntN(8) {
			body[random.IntN(len(body))] = byte(random.UintN(256))
		}
		return string(body)
	case 1:
		return string(body[:random.IntN(len(body))])
	case 2:
		at := random.IntN(len(body))
		return string(body[:at]) + strings.Repeat(string(body[at:]), random.IntN(50)) + "!"
	default:
		noise := make([]byte, random.IntN(4096))
		for i := range noise {
			noise[i] = byte(random.UintN(256))
		}
		return string(noise)
	}
}
