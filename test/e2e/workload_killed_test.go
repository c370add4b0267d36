package e2e_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/token-lease/operator/client"
	"github.com/token-lease/operator/hack/devenv/process"
)

// victimEnvironment makes this program a workload: URL, token file, namespace and bucket,
// divided by blanks.
const victimEnvironment = "TOKENLEASE_E2E_VICTIM"

const (
	victimTTL       = 2 * time.Second
	victimEstimate  = 5
	victimActual    = 3
	victimLife      = time.Minute // it ends by itself if nobody kills it
	victimSentence  = "work done\n"
	victimSentences = 3
)

// runVictim does work until it is killed, if this process is to be one.
func runVictim() (asked bool, err error) {
	fields := strings.Fields(os.Getenv(victimEnvironment))
	if len(fields) == 0 {
		return false, nil
	}
	if len(fields) != 4 {
		return true, fmt.Errorf("%s has %d fields", victimEnvironment, len(fields))
	}
	c, err := client.New(client.Options{URL: fields[0], TokenFile: fields[1], HTTPClient: overTLS})
	if err != nil {
		return true, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), victimLife)
	defer cancel()
	request := client.Request{Bucket: client.Bucket{Namespace: fields[2], Name: fields[3]}, Tokens: victimEstimate, TTL: victimTTL}
	for ctx.Err() == nil {
		err := c.Do(ctx, request, func(context.Context) (int64, error) { return victimActual, nil })
		if err != nil {
			return true, err
		}
		fmt.Print(victimSentence)
	}
	return true, nil
}

// Goal: a client that is killed at any point of its work costs nobody anything: what it
// has reserved comes back with its TTL, what it has booked stays booked, once, and there
// is nothing else.
// Method: processes of their own that do short work one after the other are killed with
// kill -9, each a random time after it has begun.
func TestWorkloadsKilled(t *testing.T) {
	t.Parallel()
	in := install(t)
	m := in.start(t, "manager-a", managerOptions{dataPlane: true})
	in.workload(t, []*manager{m})
	tokenFile := filepath.Join(in.dir, "victims-token")
	if err := os.WriteFile(tokenFile, []byte(in.token(t, in.namespace, workloadName, workloadAudience)), 0o600); err != nil {
		t.Fatal(err)
	}
	const victims = 8
	var alive []*process.Process
	for n := range victims {
		victim, err := process.Start(process.Command{
			Path: os.Args[0], LogFile: filepath.Join(in.dir, fmt.Sprintf("victim-%d", n)),
			Env: []string{fmt.Sprintf("%s=https://%s %s %s %s", victimEnvironment, m.dataPlane, tokenFile, in.namespace, bucketName)},
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := victim.Kill(); err != nil {
				t.Error(err)
			}
		})
		alive = append(alive, victim)
	}
	told := func(n int) int64 {
		t.Helper()
		text, err := os.ReadFile(filepath.Join(in.dir, fmt.Sprintf("victim-%d", n)))
		if err != nil {
			t.Fatal(err)
		}
		return int64(strings.Count(string(text), victimSentence))
	}
	for n, victim := range alive {
		waitFor(t, "a client to work", func() (bool, string) { return told(n) >= victimSentences, victim.LogTail() })
	}
	var running sync.WaitGroup
	for _, victim := range alive {
		running.Go(func() {
			time.Sleep(rand.N(200 * time.Millisecond)) // so that it is anywhere in its work
			if err := victim.Kill(); err != nil {
				t.Error(err)
			}
		})
	}
	running.Wait()
	in.db.waitPast(t, in.db.now(t).Add(victimTTL))
	token := in.token(t, in.namespace, workloadName, workloadAudience)
	m.post(t, token, "GetBucket", about(in.namespace, bucketName, "")).wantOK(t, "get")
	used, reserved := in.db.tokens(t, in.key(bucketName))
	committed := query[int64](t, in.db, "SELECT count(*) FROM tokenlease.leases WHERE bucket_key = $1 AND state = 'committed'", in.key(bucketName))
	expired := query[int64](t, in.db, "SELECT count(*) FROM tokenlease.leases WHERE bucket_key = $1 AND state = 'expired'", in.key(bucketName))
	if reserved != 0 || used != committed*victimActual {
		t.Errorf("used %d for %d committed leases, reserved %d", used, committed, reserved)
	}
	sum := int64(0)
	for n := range victims {
		sum += told(n)
	}
	// Each has been told of all its commits but the last one, at most.
	if committed < sum || committed > sum+victims || expired > victims {
		t.Errorf("%d committed and %d expired leases of %d clients that were told of %d commits", committed, expired, victims, sum)
	}
	t.Logf("%d committed and %d expired leases of %d killed clients", committed, expired, victims)
}
