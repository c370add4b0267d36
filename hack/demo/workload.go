package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"time"

	"github.com/token-lease/operator/hack/devenv/process"
)

const (
	account  = "rent-collection"
	audience = "tokenlease"
	role     = "config/rbac/workload_role.yaml"
	roleName = "tokenlease-workload"

	callTimeout = 20 * time.Second
	// maxAnswer bounds what is read of an answer.
	maxAnswer = 64 << 10
)

// workload reserves and commits through the data plane, as a ServiceAccount and as one
// would with curl.
type workload struct {
	address string
	token   string
	http    *http.Client
}

// newWorkload chooses where the data plane listens.
func newWorkload() (*workload, error) {
	port, err := process.FreePort()
	if err != nil {
		return nil, err
	}
	return &workload{address: process.Address(port), http: &http.Client{
		Timeout: callTimeout,
		// The manager makes a certificate for the demo that nobody can verify.
		Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}},
	}}, nil
}

// flags are those of the manager that the workload calls.
func (w *workload) flags() []string {
	return []string{"--data-plane-bind-address=" + w.address, "--data-plane-self-signed", "--data-plane-audience=" + audience}
}

// enrol gives the workload an identity, and the right to draw from buckets here.
func (s *story) enrol(ctx context.Context) error {
	for _, args := range [][]string{
		{"apply", "--filename", filepath.Join(s.env.Root, role)},
		{"create", "serviceaccount", account, "--namespace", namespace},
		{"create", "rolebinding", account, "--namespace", namespace, "--clusterrole=" + roleName, "--serviceaccount=" + namespace + ":" + account},
	} {
		if err := s.kubectl(ctx, args...); err != nil {
			return err
		}
	}
	var token strings.Builder
	err := s.env.Kubectl(ctx, &token, "create", "token", account, "--namespace", namespace, "--audience="+audience)
	s.workload.token = strings.TrimSpace(token.String())
	return err
}

// answer is what the demo reads of the data plane's answers.
type answer struct {
	Lease struct {
		ID string `json:"id"`
	} `json:"lease"`
	Bucket struct {
		Used      string `json:"usedTokens"`
		Limit     string `json:"limitTokens"`
		Available string `json:"availableTokens"`
	} `json:"bucket"`
	Code    string `json:"code"`
	Message string `json:"message"`
	Details []struct {
		Debug json.RawMessage `json:"debug"`
	} `json:"details"`
}

// call posts a request. What cannot be reached yet, or says that it may be repeated, is
// repeated for a while.
func (w *workload) call(ctx context.Context, procedure string, fields map[string]any) (int, answer, error) {
	fields["bucket"] = map[string]string{"namespace": namespace, "name": bucket}
	body, err := json.Marshal(fields)
	if err != nil {
		return 0, answer{}, err
	}
	var status int
	var last answer
	err = waitFor(ctx, "an answer of the data plane", func() (bool, error) {
		status, last, err = w.post(ctx, procedure, body)
		return err == nil && status != http.StatusServiceUnavailable, nil
	})
	return status, last, err
}

func (w *workload) post(ctx context.Context, procedure string, body []byte) (int, answer, error) {
	url := "https://" + w.address + "/tokenlease.v1alpha1.LedgerService/" + procedure
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return 0, answer{}, err
	}
	request.Header.Set("Authorization", "Bearer "+w.token)
	request.Header.Set("Content-Type", "application/json")
	response, err := w.http.Do(request)
	if err != nil {
		return 0, answer{}, err
	}
	text, err := io.ReadAll(io.LimitReader(response.Body, maxAnswer))
	if err := errors.Join(err, response.Body.Close()); err != nil {
		return 0, answer{}, err
	}
	var a answer
	if err := json.Unmarshal(text, &a); err != nil {
		return 0, answer{}, fmt.Errorf("%s was answered with %q: %w", procedure, text, err)
	}
	return response.StatusCode, a, nil
}

// spend reserves tokens and commits the actual figure.
func (s *story) spend(ctx context.Context, reserve, actual int64) error {
	s.requests++
	status, reserved, err := s.workload.call(ctx, "Reserve", map[string]any{"requestKey": fmt.Sprintf("demo-%d", s.requests), "tokens": reserve})
	if err != nil || status != http.StatusOK {
		return fmt.Errorf("reserve %d: HTTP %d, %s %s (%w)", reserve, status, reserved.Code, reserved.Message, err)
	}
	status, committed, err := s.workload.call(ctx, "Commit", map[string]any{"leaseId": reserved.Lease.ID, "actualTokens": actual})
	if err != nil || status != http.StatusOK {
		return fmt.Errorf("commit %d: HTTP %d, %s %s (%w)", actual, status, committed.Code, committed.Message, err)
	}
	b := committed.Bucket
	fmt.Printf("  POST Reserve %d: admitted; POST Commit %d: %s used of %s, %s available\n", reserve, actual, b.Used, b.Limit, b.Available)
	return nil
}

// refused reserves tokens that must not be admitted, and shows how the data plane says so.
func (s *story) refused(ctx context.Context, tokens int64) error {
	s.requests++
	status, refusal, err := s.workload.call(ctx, "Reserve", map[string]any{"requestKey": fmt.Sprintf("demo-%d", s.requests), "tokens": tokens})
	if err != nil || status != http.StatusTooManyRequests || len(refusal.Details) == 0 {
		return fmt.Errorf("reserve %d: HTTP %d, %+v (%w); want %d with details", tokens, status, refusal, err, http.StatusTooManyRequests)
	}
	fmt.Printf("  POST Reserve %d: HTTP %d, %s\n    %s\n", tokens, status, refusal.Message, refusal.Details[0].Debug)
	return nil
}
