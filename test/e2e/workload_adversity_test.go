package e2e_test

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/client-go/util/cert"

	"github.com/token-lease/operator/client"
)

// Goal: while the API server is down nobody new is let in, and is told that it may be
// repeated; who was let in goes on until what is known of it is too old, and from then on
// is refused likewise, never let in unasked. Once it is back, all goes on by itself.
func TestWorkloadWithoutAPIServer(t *testing.T) {
	t.Parallel()
	own := startOwnCluster(t)
	in := installOn(t, own, world.postgres)
	m := in.start(t, "manager-a", managerOptions{dataPlane: true})
	in.workload(t, []*manager{m})
	known := in.token(t, in.namespace, workloadName, workloadAudience)
	fresh := in.token(t, in.namespace, workloadName, workloadAudience)
	ask := func(token, key string) answer {
		return m.post(t, token, "Reserve", about(in.namespace, bucketName, reserving(key, 1)))
	}
	ask(known, "before").wantOK(t, "before")
	letIn := time.Now()
	if err := own.plane.StopAPIServer(t.Context()); err != nil {
		t.Fatal(err)
	}
	// A slow machine may have used the time up that an answer is kept; then nothing is
	// to be seen here.
	if got := ask(known, "known"); time.Since(letIn) < 25*time.Second && got.status != http.StatusOK {
		t.Errorf("who is known: %d %s", got.status, got.body)
	}
	refused := ask(fresh, "fresh")
	refused.want(t, "who is new", http.StatusServiceUnavailable, "review_unavailable")
	if refused.header.Get("Retry-After") == "" {
		t.Error("it is not told when to come back")
	}
	m.post(t, withClaim(t, known, "aud", []string{"else"}), "Reserve", about(in.namespace, bucketName, reserving("x", 1))).
		want(t, "what needs no review", http.StatusUnauthorized, "unauthenticated")
	waitFor(t, "what was known to be too old", func() (bool, string) {
		got := ask(known, "known")
		return got.status == http.StatusServiceUnavailable && got.code() == "review_unavailable", got.body
	})
	if held := time.Since(letIn); held > revokedBound {
		t.Errorf("what was known was relied on for %s", held)
	}
	if err := own.plane.StartAPIServer(t.Context()); err != nil {
		t.Fatal(err)
	}
	for what, token := range map[string]string{"who was known": known, "who was new": fresh} {
		waitFor(t, what+" to be let in again", func() (bool, string) {
			got := ask(token, "after "+what)
			return got.status == http.StatusOK, got.body
		})
	}
}

// Goal: a manager that is told to end in the middle of traffic answers what it has begun:
// what a caller was told is in the ledger, and what it was not told is refused in a way
// that a client repeats at another replica. It ends in time.
func TestWorkloadsWhileManagerEnds(t *testing.T) {
	t.Parallel()
	in := install(t)
	m := in.start(t, "manager-a", managerOptions{dataPlane: true})
	bucket := in.workload(t, []*manager{m})
	c := in.newClient(t, m, client.Retry{Attempts: 1})
	const workers = 16
	var reserved, committed atomic.Int64
	busy := make(chan struct{}, workers)
	var running sync.WaitGroup
	for n := range workers {
		running.Go(func() {
			for i := 0; ; i++ {
				lease, err := c.Reserve(t.Context(), client.Request{Bucket: bucket, Tokens: 2})
				if err == nil {
					reserved.Add(2)
					if _, err = c.Commit(t.Context(), bucket, lease.ID, 1); err == nil {
						committed.Add(1)
						reserved.Add(-2)
					}
				}
				if err != nil {
					if !client.HasCode(err, client.CodeServerUnreachable) {
						t.Errorf("worker %d: %v", n, err)
					}
					return
				}
				if i == 5 {
					busy <- struct{}{}
				}
			}
		})
	}
	for range workers {
		select {
		case <-busy:
		case <-time.After(waitBound):
			t.Fatal("the traffic does not begin")
		}
	}
	m.terminate(t)
	running.Wait()
	used, left := in.db.tokens(t, in.key(bucketName))
	if used != committed.Load() || left != reserved.Load() {
		t.Errorf("used %d and reserved %d tokens, while callers were told %d and %d", used, left, committed.Load(), reserved.Load())
	}
	t.Logf("%d commits were answered before the end", committed.Load())
}

// writeCertificate puts a certificate for 127.0.0.1 into a directory, as a Secret is
// mounted, and returns a file with what to trust.
func writeCertificate(t *testing.T, dir string) (caFile string) {
	t.Helper()
	certificate, key, err := cert.GenerateSelfSignedCertKey("127.0.0.1", []net.IP{net.IPv4(127, 0, 0, 1)}, nil)
	if err != nil {
		t.Fatal(err)
	}
	trusted, err := os.CreateTemp(dir, "ca-")
	if err != nil {
		t.Fatal(err)
	}
	defer trusted.Close()
	if _, err := trusted.Write(certificate); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{"tls.key": key, "tls.crt": certificate} {
		next := filepath.Join(dir, name+".next")
		if err := os.WriteFile(next, content, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(next, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	return trusted.Name()
}

// Goal: with a mounted certificate a client verifies whom it shows its token to; a renewed
// certificate is taken up by the running manager, and a client that trusts another one
// does not show its token.
func TestWorkloadCertificate(t *testing.T) {
	t.Parallel()
	in := install(t)
	dir, err := newDir("certificates")
	if err != nil {
		t.Fatal(err)
	}
	first := writeCertificate(t, dir)
	m := in.start(t, "manager-a", managerOptions{dataPlane: true, certificates: dir})
	bucket := in.workload(t, []*manager{m})
	trusting := func(caFile string) *client.Client {
		t.Helper()
		file := filepath.Join(in.dir, "token")
		if err := os.WriteFile(file, []byte(in.token(t, in.namespace, workloadName, workloadAudience)), 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := client.New(client.Options{URL: "https://" + m.dataPlane, TokenFile: file, CAFile: caFile, Retry: client.Retry{Attempts: 1}})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	if _, err := trusting(first).Figures(call(t), bucket); err != nil {
		t.Error(err)
	}
	second := writeCertificate(t, dir)
	waitFor(t, "the renewed certificate to be shown", func() (bool, string) {
		_, err := trusting(second).Figures(call(t), bucket)
		return err == nil, fmt.Sprint(err)
	})
	if _, err := trusting(first).Figures(call(t), bucket); !client.HasCode(err, client.CodeServerUnreachable) || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("a client that trusts another certificate: %v", err)
	}
}
