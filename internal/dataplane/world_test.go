package dataplane_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/token-lease/operator/internal/dataplane"
	"github.com/token-lease/operator/internal/dataplane/dataplanetest"
	"github.com/token-lease/operator/internal/ledger"
	"github.com/token-lease/operator/internal/ledger/ledgertest"
	"github.com/token-lease/operator/proto/tokenlease/v1alpha1/tokenleasev1alpha1connect"
)

const (
	audience   = dataplanetest.Audience
	namespace  = dataplanetest.Namespace
	bucketName = dataplanetest.BucketName
	limit      = dataplanetest.Limit
	worker     = dataplanetest.Worker
	other      = dataplanetest.Other
	service    = "/" + tokenleasev1alpha1connect.LedgerServiceName + "/"
	// testBound bounds a test against a server that does not answer.
	testBound = 20 * time.Second
)

type apiServer = dataplanetest.APIServer

// world is a data plane over the memory store, on a real port.
type world struct {
	*dataplanetest.Plane
	api   *apiServer
	clock *ledgertest.ManualClock
	http  *http.Client
}

func newWorld(t *testing.T, changes ...func(*dataplane.Options)) *world {
	t.Helper()
	p := dataplanetest.Start(t, changes...)
	return &world{Plane: p, api: p.API, clock: p.Clock, http: p.HTTP}
}

func (w *world) declare(t *testing.T, name string, limit int64) {
	t.Helper()
	dataplanetest.Declare(t, w.Ledger, name, limit)
}

// declareWith declares a bucket as asked, which the worker may use.
func (w *world) declareWith(t *testing.T, name string, declaration ledger.Declaration) {
	t.Helper()
	_, err := w.Ledger.ApplyDeclared(t.Context(), ledger.ApplyDeclared{
		Key:        namespace + "/" + name,
		Owner:      ledger.Owner{Cluster: dataplanetest.Cluster, Namespace: namespace, Name: name, UID: "uid-of-" + name, CreatedAt: w.clock.Now()},
		Generation: 1, Declaration: declaration,
	})
	if err != nil {
		t.Fatal(err)
	}
	w.api.Allow(worker, namespace+"/"+name, "create", "update", "get")
}

func (w *world) good(subject string) string { return w.Good(subject) }

// reply is an answer as curl shows it.
type reply struct {
	status int
	header http.Header
	body   string
}

// post asks in JSON, as curl does.
func (w *world) post(t *testing.T, token, method, body string, headers ...string) reply {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, w.URL+service+method, bytes.NewReader([]byte(body)))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	if token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	for i := 0; i < len(headers); i += 2 {
		request.Header.Add(headers[i], headers[i+1])
	}
	return w.do(t, request)
}

func (w *world) do(t *testing.T, request *http.Request) reply {
	t.Helper()
	response, err := w.http.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return reply{status: response.StatusCode, header: response.Header, body: string(text)}
}

// code is the code in the details of a refusal.
func (r reply) code(t *testing.T) string {
	t.Helper()
	return r.detail(t).Code
}

// detail is what curl shows of the details.
type detail struct {
	Code       string            `json:"code"`
	Figures    map[string]string `json:"figures"`
	Texts      map[string]string `json:"texts"`
	Retryable  bool              `json:"retryable"`
	RetryAfter string            `json:"retryAfter"`
}

func (r reply) detail(t *testing.T) detail {
	t.Helper()
	var refusal struct {
		Details []struct {
			Debug detail `json:"debug"`
		} `json:"details"`
	}
	if err := json.Unmarshal([]byte(r.body), &refusal); err != nil {
		t.Fatalf("%d %s: %v", r.status, r.body, err)
	}
	if len(refusal.Details) == 0 {
		return detail{}
	}
	return refusal.Details[0].Debug
}

// want checks status and code of a refusal.
func (r reply) want(t *testing.T, what string, status int, code string) {
	t.Helper()
	if r.status != status || r.code(t) != code {
		t.Errorf("%s: %d %s, want %d with the code %q", what, r.status, r.body, status, code)
	}
}

// wantOK checks that a request was carried out, and reads its answer.
func (r reply) wantOK(t *testing.T, what string, into any) {
	t.Helper()
	if r.status != http.StatusOK {
		t.Fatalf("%s: %d %s", what, r.status, r.body)
	}
	if into == nil {
		return
	}
	if err := json.Unmarshal([]byte(r.body), into); err != nil {
		t.Fatalf("%s: %s: %v", what, r.body, err)
	}
}

// settled is what these tests read of an answer about a lease.
type settled struct {
	Lease struct {
		ID             string `json:"id"`
		State          string `json:"state"`
		ReservedTokens string `json:"reservedTokens"`
		ActualTokens   string `json:"actualTokens"`
		ExpiresAt      string `json:"expiresAt"`
		Holder         string `json:"holder"`
	} `json:"lease"`
	Bucket figures `json:"bucket"`
}

type figures struct {
	LimitTokens     string `json:"limitTokens"`
	UsedTokens      string `json:"usedTokens"`
	ReservedTokens  string `json:"reservedTokens"`
	AvailableTokens string `json:"availableTokens"`
}

const ofBucket = `"bucket": {"namespace": "tenants", "name": "pm-4821"}`

func reserveBody(key string, tokens any) string {
	return fmt.Sprintf(`{%s, "requestKey": %q, "tokens": %v}`, ofBucket, key, tokens)
}
