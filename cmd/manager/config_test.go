package main

import (
	"bytes"
	"flag"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func configFile(t *testing.T, content string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// Goal: a file says what flags say, by their names, and the command line wins.
func TestConfigFile(t *testing.T) {
	file := configFile(t, `
# a comment
database-url-file: /etc/tokenlease/database-url
poll-interval: 3s
usage-interval: 2m
leader-elect: false
max-concurrent-reconciles: 7
ledger-max-connections: 12
cluster-id: "0815"
zap-log-level: error
zap-encoder: json
zap-stacktrace-level: panic
zap-time-encoding: epoch
zap-devel: false
`)
	o, err := parseRun([]string{
		"--usage-interval=30s", "--zap-log-level=debug", "--zap-encoder=console", "--zap-stacktrace-level=error", "--zap-time-encoding=rfc3339",
		"--zap-devel", "--config=" + file, "--ledger-max-connections=20",
	}, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if o.database.file != "/etc/tokenlease/database-url" || o.controllers.PollInterval != 3*time.Second || o.leaderElection.enabled ||
		o.controllers.MaxConcurrentReconciles != 7 || o.controllers.ClusterID != "0815" {
		t.Errorf("the file is not followed: %+v", o)
	}
	if o.controllers.UsageInterval != 30*time.Second || o.ledger.MaxConnections != 20 {
		t.Errorf("the command line does not win: %s, %d", o.controllers.UsageInterval, o.ledger.MaxConnections)
	}
	if !o.log.Development {
		t.Error("the command line does not win over zap-devel")
	}
	if _, err := parseRun([]string{"--config=" + configFile(t, "")}, io.Discard); err != nil {
		t.Errorf("an empty file: %v", err)
	}
}

// Goal: each flag of "manager run" can stand in a file. Method: write the defaults of
// all flags there are into one, as texts.
func TestConfigFileKnowsEachFlag(t *testing.T) {
	fs := flag.NewFlagSet("manager run", flag.ContinueOnError)
	(&runOptions{}).bind(fs)
	var content strings.Builder
	fs.VisitAll(func(f *flag.Flag) {
		if strings.HasPrefix(f.Name, "zap-") && f.DefValue == "" {
			return // these have no text for their default
		}
		content.WriteString(f.Name + ": \"" + f.DefValue + "\"\n")
	})
	if _, err := parseRun([]string{"--config=" + configFile(t, content.String())}, io.Discard); err != nil {
		t.Errorf("%v in\n%s", err, content.String())
	}
}

// Goal: what a file cannot mean is refused at start, with its name; also where the
// command line has another value.
func TestConfigFileThatIsWrong(t *testing.T) {
	t.Setenv(databaseURLEnvironment, "postgres://nobody@127.0.0.1:1/none")
	for _, test := range []struct{ content, want string }{
		{"pol-interval: 3s", `"pol-interval" is no flag`},
		{"config: other.yaml", `"config" is no flag`},
		{"poll-interval: 3s\npoll-interval: 4s", "already set"},
		{"poll-interval: soon", `poll-interval cannot be "soon"`},
		{"usage-interval: soon", `usage-interval cannot be "soon"`},
		{"poll-interval: [3s]", "poll-interval must be a text, a number or a boolean"},
		{"poll-interval:", "poll-interval must be a text, a number or a boolean"},
		{"leader-elect: perhaps", `leader-elect cannot be "perhaps"`},
		{"- poll-interval", "one value for each name"},
		{"a: b: c", "config.yaml"},
		{"poll-interval: 1ns", "--poll-interval must lie between 100ms and 1h"},
		{"# " + strings.Repeat("x", maxConfigBytes), "too large"},
	} {
		var stderr bytes.Buffer
		err := dispatch(t.Context(), []string{"run", "--leader-elect=false", "--usage-interval=1s", "--config=" + configFile(t, test.content)}, io.Discard, &stderr)
		if err == nil {
			t.Errorf("%.40q was accepted", test.content)
		} else if text := stderr.String() + err.Error(); !strings.Contains(text, test.want) {
			t.Errorf("%.40q: got %q; want %q", test.content, text, test.want)
		}
	}
	err := dispatch(t.Context(), []string{"migrate", "--config=" + filepath.Join(t.TempDir(), "none")}, io.Discard, io.Discard)
	if err == nil || !strings.Contains(err.Error(), "--config: open ") {
		t.Errorf("a file that there is not: %v", err)
	}
}
