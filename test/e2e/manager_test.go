package e2e_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/token-lease/operator/hack/devenv/process"
)

const (
	// endBound is what "manager run" promises about its end after SIGTERM, with
	// what a slow machine may add.
	endBound     = 30 * time.Second
	logTailBytes = 24 << 10
)

// managerOptions say how one process differs from the others of its installation.
type managerOptions struct {
	// program is the manager's path; empty is the one that users get.
	program string
	// env are further variables as NAME=value.
	env []string
	// dataPlane serves workloads, with a certificate that the manager makes itself, or
	// with tls.crt and tls.key of the directory certificates.
	dataPlane    bool
	certificates string
	// args are further flags, which win over those that every manager gets.
	args []string
}

// manager is one process of an installation.
type manager struct {
	*process.Process
	worker          string
	metrics, health string // addresses
	dataPlane       string // its address, if it is served
	logFile         string
}

// start starts a manager with the worker's name and waits until it answers.
func (in *installation) start(t *testing.T, worker string, options managerOptions) *manager {
	t.Helper()
	m := in.launch(t, worker, options)
	waitFor(t, worker+" to be ready", func() (bool, string) {
		if !m.Running() {
			t.Fatalf("%s ended before it was ready:\n%s", worker, m.LogTail())
		}
		status, answer := m.get(t, m.health, "/readyz")
		return status == http.StatusOK, answer
	})
	return m
}

// launch starts a manager and does not wait. The manager ends with the test.
func (in *installation) launch(t *testing.T, worker string, options managerOptions) *manager {
	t.Helper()
	m, err := in.begin(worker, options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.endWith(t) })
	return m
}

// begin starts a manager that the caller ends.
func (in *installation) begin(worker string, options managerOptions) (*manager, error) {
	m := &manager{worker: worker, logFile: filepath.Join(in.dir, worker+".log")}
	addresses := []*string{&m.metrics, &m.health}
	if options.dataPlane {
		addresses = append(addresses, &m.dataPlane)
	}
	for _, address := range addresses {
		port, err := process.FreePort()
		if err != nil {
			return nil, err
		}
		*address = process.Address(port)
	}
	if options.program == "" {
		options.program = world.manager
	}
	args := []string{
		"run",
		"--worker=" + worker,
		"--kubeconfig=" + in.kubeconfig,
		"--database-url-file=" + in.databaseURLFile,
		"--metrics-bind-address=" + m.metrics,
		"--health-probe-bind-address=" + m.health,
		"--usage-interval=1s",
		"--poll-interval=300ms",
		"--leader-election-namespace=" + in.election,
		"--leader-election-lease-duration=5s",
		"--leader-election-renew-deadline=4s",
		"--leader-election-retry-period=500ms",
	}
	if in.clusterID != "" {
		args = append(args, "--cluster-id="+in.clusterID)
	}
	if options.dataPlane {
		args = append(args, "--data-plane-bind-address="+m.dataPlane)
		if options.certificates == "" {
			args = append(args, "--data-plane-self-signed")
		} else {
			args = append(args, "--data-plane-tls-cert-file="+filepath.Join(options.certificates, "tls.crt"),
				"--data-plane-tls-key-file="+filepath.Join(options.certificates, "tls.key"))
		}
	}
	args = append(args, options.args...)
	started, err := process.Start(process.Command{
		Path: options.program, Args: args, Env: options.env, LogFile: m.logFile,
	})
	if err != nil {
		return nil, err
	}
	m.Process = started
	return m, nil
}

// endWith ends the manager, and prints the end of its log if the test has failed.
// Managers of one name share a file.
func (m *manager) endWith(t *testing.T) {
	if err := m.Kill(); err != nil {
		t.Error(err)
	}
	if !t.Failed() {
		return
	}
	content, err := os.ReadFile(m.logFile)
	if err != nil {
		t.Log(err)
		return
	}
	t.Logf("the log of %s (process %d) ends with:\n%s", m.worker, m.PID(), content[max(0, len(content)-logTailBytes):])
}

// kill9 ends the manager as kill -9 does.
func (m *manager) kill9(t *testing.T) {
	t.Helper()
	if err := m.Kill(); err != nil {
		t.Fatal(err)
	}
}

// terminate sends SIGTERM and checks that the manager ends by itself, within its
// bound, with exit code 0.
func (m *manager) terminate(t *testing.T) {
	t.Helper()
	if err := m.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	select {
	case <-m.Done():
	case <-time.After(endBound):
		t.Fatalf("%s had not ended %s after SIGTERM", m.worker, endBound)
	}
	if code := m.State().ExitCode(); code != 0 {
		t.Errorf("%s ended with %v after SIGTERM, want exit code 0:\n%s", m.worker, m.State(), m.LogTail())
	}
}

// get asks one of the manager's endpoints; status 0 means that nothing answers.
func (m *manager) get(t *testing.T, address, path string) (status int, body string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), callBound)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, err.Error()
	}
	defer response.Body.Close()
	content, err := io.ReadAll(response.Body)
	if err != nil {
		return 0, err.Error()
	}
	return response.StatusCode, string(content)
}

// standingBy is what part says of the controllers while another replica runs them.
const standingBy = "standing by"

// part is what /readyz?verbose says of a part: "" when it runs and all is well.
func (m *manager) part(t *testing.T, name string) (wrong string) {
	t.Helper()
	status, body := m.get(t, m.health, "/readyz?verbose")
	if status != http.StatusOK {
		return fmt.Sprintf("not ready: %d %s", status, body)
	}
	for line := range strings.Lines(body) {
		line = strings.TrimSpace(line)
		if line == "[+] "+name+" ok" {
			return ""
		}
		if rest, found := strings.CutPrefix(line, "[-] "+name+": "); found {
			return rest
		}
		if word, found := strings.CutPrefix(line, "[+] "+name+" "); found {
			return word
		}
	}
	return "not mentioned in " + body
}

// waitPart waits until /readyz?verbose shows a part as well, or as not.
func (m *manager) waitPart(t *testing.T, name string, well bool) {
	t.Helper()
	waitFor(t, fmt.Sprintf("%s to show %s well=%v", m.worker, name, well), func() (bool, string) {
		wrong := m.part(t, name)
		return (wrong == "") == well, wrong
	})
}

// waitLacksAPIServer waits until a manager says that it has no API server, and why.
func (m *manager) waitLacksAPIServer(t *testing.T) {
	t.Helper()
	waitFor(t, m.worker+" to say that the API server does not answer", func() (bool, string) {
		wrong := m.part(t, "controllers")
		return strings.Contains(wrong, "connection refused"), wrong
	})
}

// scrape reads /metrics: from a series, as it is printed, to its value.
func (m *manager) scrape(t *testing.T) map[string]float64 {
	t.Helper()
	status, body := m.get(t, m.metrics, "/metrics")
	if status != http.StatusOK {
		t.Fatalf("GET /metrics of %s: %d %s", m.worker, status, body)
	}
	values := map[string]float64{}
	lines := bufio.NewScanner(strings.NewReader(body))
	for lines.Scan() {
		line := lines.Text()
		i := strings.LastIndexByte(line, ' ')
		if strings.HasPrefix(line, "#") || i < 0 {
			continue
		}
		value, err := strconv.ParseFloat(line[i+1:], 64)
		if err != nil {
			t.Fatalf("GET /metrics of %s: %q", m.worker, line)
		}
		values[line[:i]] = value
	}
	return values
}

// wantMetrics waits until the series have these values.
func (m *manager) wantMetrics(t *testing.T, want map[string]float64) {
	t.Helper()
	waitFor(t, "the metrics of "+m.worker, func() (bool, string) {
		got := m.scrape(t)
		var wrong []string
		for series, value := range want {
			if found, ok := got[series]; !ok || found != value {
				wrong = append(wrong, fmt.Sprintf("%s is %v (present: %v), want %v", series, found, ok, value))
			}
		}
		return len(wrong) == 0, strings.Join(wrong, "; ")
	})
}
