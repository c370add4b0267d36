package main

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Goal: a wrong command line is refused with a text that says what to do, before
// anything is started.
func TestCommandLine(t *testing.T) {
	t.Setenv(databaseURLEnvironment, "postgres://nobody@127.0.0.1:1/none")
	inNamespace(t, false)
	elect := func(flags ...string) []string {
		return append([]string{"run", "--leader-election-namespace=there"}, flags...)
	}
	for _, test := range []struct {
		args []string
		want string
	}{
		{nil, "Usage:"},
		{[]string{"frobnicate"}, `unknown command "frobnicate"`},
		{[]string{"run", "stray"}, `unexpected argument "stray"`},
		{[]string{"run", "--poll-interval=1ns"}, "--poll-interval must lie between 100ms and 1h"},
		{[]string{"run", "--max-concurrent-reconciles=0"}, "--max-concurrent-reconciles must be at least 1"},
		{[]string{"run", "--ledger-max-connections=4"}, "--ledger-max-connections must be at least 6 and at most 1000, not 4"},
		{[]string{"run", "--ledger-max-connections=1001"}, "--ledger-max-connections must be at least 6 and at most 1000, not 1001"},
		{[]string{"run", "--cluster-id= padded"}, "--cluster-id: "},
		{[]string{"run", "--max-raise-duration=0s"}, "--max-raise-duration must lie between 1s and"},
		{[]string{"run", "--approval-pattern=CHG-("}, "--approval-pattern: "},
		{[]string{"run", "--cluster-id=" + strings.Repeat("x", 1000)}, "--cluster-id: "},
		{[]string{"run", "--cluster-id=two\nlines"}, "--cluster-id: "},
		{[]string{"run"}, "--leader-election-namespace is required"},
		{elect("--leader-election-id="), "--leader-election-id must not be empty"},
		{elect("--leader-election-retry-period=0s"), "--leader-election-retry-period must be above 0"},
		{elect("--leader-election-retry-period=-1s"), "--leader-election-retry-period must be above 0"},
		{elect("--leader-election-retry-period=9s"), "must be above 1.2 times --leader-election-retry-period (9s)"},
		{elect("--leader-election-renew-deadline=15s"), "must be above --leader-election-renew-deadline (15s)"},
		{
			elect("--leader-election-lease-duration=900ms", "--leader-election-renew-deadline=800ms", "--leader-election-retry-period=100ms"),
			"must be at least 1s",
		},
		{elect("--data-plane-bind-address=:8443"), "the data plane needs --data-plane-tls-cert-file"},
		{elect("--data-plane-bind-address=:8443", "--data-plane-tls-cert-file=a"), "belong together"},
		{elect("--data-plane-bind-address=:8443", "--data-plane-tls-cert-file=a", "--data-plane-tls-key-file=b", "--data-plane-self-signed"), "exclude each other"},
		{elect("--data-plane-bind-address=:8443", "--data-plane-self-signed", "--data-plane-audience="), "--data-plane-audience must have"},
		{elect("--data-plane-bind-address=:8443", "--data-plane-self-signed", "--data-plane-request-timeout=2m"), "--data-plane-request-timeout must lie between 100ms and 10s"},
		{elect("--data-plane-bind-address=:8443", "--data-plane-self-signed", "--data-plane-max-requests=1"), "--data-plane-max-requests must be at least 2"},
		{elect("--data-plane-bind-address=:8443", "--data-plane-self-signed", "--data-plane-max-connections=0"), "--data-plane-max-connections must be at least 2"},
		{[]string{"migrate", "--no-such-flag"}, "no-such-flag"},
	} {
		var stderr bytes.Buffer
		err := dispatch(t.Context(), test.args, io.Discard, &stderr)
		if err == nil {
			t.Errorf("%v was accepted", test.args)
		} else if text := stderr.String() + err.Error(); !strings.Contains(text, test.want) {
			t.Errorf("%v: got %q; want %q", test.args, text, test.want)
		}
	}
}

// Goal: what is right is not refused: the defaults in a pod, one replica without
// an election outside, and the bounds themselves.
func TestCommandLineThatWorks(t *testing.T) {
	t.Setenv(databaseURLEnvironment, "postgres://nobody@127.0.0.1:1/none")
	for _, test := range []struct {
		inPod bool
		args  []string
	}{
		{true, nil},
		{false, []string{"--leader-elect=false"}},
		{true, []string{"--data-plane-bind-address=:8443", "--data-plane-tls-cert-file=a", "--data-plane-tls-key-file=b"}},
		{true, []string{"--data-plane-bind-address=:8443", "--data-plane-self-signed"}},
		{true, []string{"--data-plane-bind-address=0", "--data-plane-audience="}}, // what is off needs no sense
		{false, []string{"--leader-election-namespace=there", "--ledger-max-connections=1000", "--cluster-id=" + strings.Repeat("x", 253)}},
		{false, []string{"--leader-elect=false", "--leader-election-retry-period=1h", "--ledger-max-connections=6"}},
	} {
		inNamespace(t, test.inPod)
		o, err := parseRun(test.args, io.Discard)
		if err == nil {
			err = o.validate(t.Context())
		}
		if err != nil {
			t.Errorf("%v (in a pod: %v): %v", test.args, test.inPod, err)
		}
	}
}

// inNamespace puts the file in place that tells a pod its namespace, or takes it
// away.
func inNamespace(t *testing.T, there bool) {
	t.Helper()
	before := namespaceFile
	t.Cleanup(func() { namespaceFile = before })
	namespaceFile = filepath.Join(t.TempDir(), "namespace")
	if there {
		if err := os.WriteFile(namespaceFile, []byte("tokenlease-system"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}
