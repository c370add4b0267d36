package e2e_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/internal/ledger"
)

// Goal: the main job, as a user sees it. 120,000 tokens become 300,000 for a
// while and come back by themselves; what is admitted follows the limit at every
// stage; kubectl, conditions, metrics and audit agree with SQL.
// Method: apply the published samples with other dates, act as a workload in each
// stage, and watch L by SQL from beginning to end. The ledger's clock is moved from
// stage to stage.
func TestSeedStory(t *testing.T) {
	t.Parallel()
	in := install(t)
	key := in.key(bucketName)
	m := in.start(t, "manager-a", managerOptions{})

	stage(t, "declare the budget")
	in.mustKubectl(t, in.sample(t, "tokenbucket.yaml"), "apply")
	in.waitConditions(t, "tokenbucket/"+bucketName, "Ready")
	first := in.mustReserve(t, "before-1", 50_000)
	in.mustCommit(t, first, 40_000)
	in.wantRefused(t, "before-2", 100_000, ledger.CodeBudgetExceeded)
	in.waitRow(t, "tokenbuckets", map[string]string{
		"NAME": bucketName, "LIMIT": "120000", "DECLARED": "120000", "USED": "40000", "RESERVED": "0",
		"AVAILABLE": "80000", "RAISED-BY": "", "RAISED-UNTIL": "", "READY": "True",
	})

	stage(t, "ask for the raise")
	startsAt, expiresAt := in.after(t, early), in.after(t, late)
	watched := watchLimit(t, in.db, key)
	in.mustKubectl(t, in.sample(t, "temporarylimitlease.yaml",
		"startsAt", startsAt.Format(time.RFC3339), "expiresAt", expiresAt.Format(time.RFC3339)), "apply")
	in.waitConditions(t, "temporarylimitlease/"+leaseName, "Ready")

	stage(t, "raised")
	in.db.moveClockTo(t, startsAt)
	in.waitConditions(t, "temporarylimitlease/"+leaseName, "Active")
	second := in.mustReserve(t, "before-2", 100_000) // what was refused before
	in.mustCommit(t, second, 60_000)
	in.waitRow(t, "temporarylimitleases", map[string]string{
		"NAME": leaseName, "BUCKET": bucketName, "STATE": "Active", "NORMAL": "120000", "TEMPORARY": "300000",
		"EXPIRES": expiresAt.Format(time.RFC3339), "READY": "True", "REASON": "Active", "REVIEW": "False",
		"STARTS": startsAt.Format(time.RFC3339), "APPROVAL": approvalID, "REQUESTED-BY": requestedBy,
	})
	in.waitRow(t, "tokenbuckets", map[string]string{
		"LIMIT": "300000", "DECLARED": "120000", "USED": "100000", "AVAILABLE": "200000",
		"RAISED-BY": leaseName, "RAISED-UNTIL": expiresAt.Format(time.RFC3339), "READY": "True", "USED-PERCENT": "33",
	})
	in.waitBucket(t, isTrue(v1alpha1.ConditionRaised), isTrue(v1alpha1.ConditionLimitInSync), isTrue(v1alpha1.ConditionReady))

	stage(t, "restored")
	in.db.moveClockTo(t, expiresAt)
	in.waitConditions(t, "temporarylimitlease/"+leaseName, "Ended")
	lease := in.waitLease(t, leaseName, restored)
	in.waitBucket(t, inSync...)
	in.wantRefused(t, "after-1", 50_000, ledger.CodeBudgetExceeded)
	third := in.mustReserve(t, "after-2", 20_000)
	in.mustCommit(t, third, 20_000)
	in.waitRow(t, "tokenbuckets", map[string]string{
		"LIMIT": "120000", "USED": "120000", "AVAILABLE": "0", "RAISED-BY": "", "USED-PERCENT": "100", "OVER-LIMIT": "0",
	})
	in.waitNoFinalizer(t, leaseName)

	stage(t, "evidence")
	watched.check(t, startsAt, expiresAt)
	in.db.counters(t, key)
	checkStatus(t, in, lease)
	checkEvidence(t, in, lease, startsAt, expiresAt)
	checkMetrics(t, m)
	in.wantEvents(t, v1alpha1.EventBucketOpened, v1alpha1.EventRaiseStored, v1alpha1.EventRaiseActivated, v1alpha1.EventRaiseRestored)
	m.terminate(t)
}

// sample is a file of config/samples, in the namespace of the test, with other
// values of some fields.
func (in *installation) sample(t *testing.T, name string, fields ...string) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(world.root, "config", "samples", name))
	if err != nil {
		t.Fatal(err)
	}
	text := string(content)
	for i, set := 0, append([]string{"namespace", in.namespace}, fields...); i < len(set); i += 2 {
		line := regexp.MustCompile(`(?m)^(\s*` + set[i] + `:).*$`)
		if !line.MatchString(text) {
			t.Fatalf("the sample %s has no field %s", name, set[i])
		}
		text = line.ReplaceAllString(text, "${1} "+set[i+1])
	}
	return text
}

// waitConditions is "kubectl wait", as users write it in their scripts.
func (in *installation) waitConditions(t *testing.T, object, condition string) {
	t.Helper()
	in.mustKubectl(t, "", "wait", "--namespace", in.namespace, object, "--for=condition="+condition,
		fmt.Sprintf("--timeout=%.0fs", waitBound.Seconds()))
}

// waitRow waits until kubectl get prints these cells for the only object of a kind.
func (in *installation) waitRow(t *testing.T, kind string, cells map[string]string) {
	t.Helper()
	waitFor(t, "kubectl get "+kind+" to show "+asJSON(cells), func() (bool, string) {
		output := in.mustKubectl(t, "", "get", kind, "--namespace", in.namespace, "--output=wide")
		rows := table(output)
		if len(rows) != 1 {
			return false, output
		}
		for heading, cell := range cells {
			if got, ok := rows[0][heading]; !ok || got != cell {
				return false, fmt.Sprintf("%s is %q in\n%s", heading, got, output)
			}
		}
		return true, output
	})
}

// limitSample is L at an instant of the ledger's clock.
type limitSample struct {
	at    time.Time
	limit int64
}

type limitWatch struct {
	stop    chan struct{}
	done    sync.WaitGroup
	samples []limitSample
	err     error
	// last is the value that was seen last.
	last atomic.Int64
}

// watchLimit reads L, and again and again until end is called. The first look is over
// when it returns.
func watchLimit(t *testing.T, d *database, key string) *limitWatch {
	t.Helper()
	w := &limitWatch{stop: make(chan struct{})}
	ctx := t.Context()
	if w.look(ctx, d, key); w.err != nil {
		t.Fatalf("watch the limit: %v", w.err)
	}
	w.done.Go(func() {
		for w.err == nil {
			select {
			case <-w.stop:
				w.look(ctx, d, key)
				return
			case <-ctx.Done():
				return
			case <-time.After(20 * time.Millisecond):
			}
			w.look(ctx, d, key)
		}
	})
	return w
}

func (w *limitWatch) look(ctx context.Context, d *database, key string) {
	var s limitSample
	w.err = d.sql.QueryRow(ctx, `SELECT tokenlease.ledger_now(), limit_tokens FROM tokenlease.buckets WHERE bucket_key = $1`, key).
		Scan(&s.at, &s.limit)
	if w.err == nil {
		w.samples = append(w.samples, s)
		w.last.Store(s.limit)
	}
}

// waitSeen waits until the watch has seen L at a value, which a fast change could
// otherwise hide from it.
func (w *limitWatch) waitSeen(t *testing.T, limit int64) {
	t.Helper()
	waitFor(t, "the watch to see the limit", func() (bool, string) {
		last := w.last.Load()
		return last == limit, fmt.Sprint(last)
	})
}

// end ends the watch, and returns the values of L in turn.
func (w *limitWatch) end(t *testing.T) []int64 {
	t.Helper()
	close(w.stop)
	w.done.Wait()
	if w.err != nil {
		t.Fatalf("watch the limit: %v", w.err)
	}
	var seen []int64
	for _, s := range w.samples {
		if len(seen) == 0 || seen[len(seen)-1] != s.limit {
			seen = append(seen, s.limit)
		}
	}
	return seen
}

// check ends the watch. L must have been the normal limit, then the temporary
// one, then the normal one for good: never raised before the start, never back
// before the expiry. How soon after each instant it moved depends on the machine.
func (w *limitWatch) check(t *testing.T, startsAt, expiresAt time.Time) {
	t.Helper()
	w.wantInTurn(t, normal, temporary, normal)
	raised := false
	for _, s := range w.samples {
		raised = raised || s.limit == temporary
		if s.limit == temporary && s.at.Before(startsAt) {
			t.Errorf("raised at %s, before the start at %s", s.at, startsAt)
		}
		if s.limit == normal && raised && s.at.Before(expiresAt) {
			t.Errorf("back at %s, before the expiry at %s", s.at, expiresAt)
		}
	}
}

// checkStatus compares the lease's status with the ledger's record.
func checkStatus(t *testing.T, in *installation, lease *v1alpha1.TemporaryLimitLease) {
	t.Helper()
	raise, s := in.db.raise(t, in.namespace, leaseName), lease.Status
	if s.State != v1alpha1.RaiseStateRestored || s.RequestedBy != requestedBy || s.BucketKey != in.key(bucketName) || s.TenantID != tenantID {
		t.Errorf("status %s", asJSON(s))
	}
	if s.Operations == nil || s.Operations.Activate != string(lease.UID)+":activate" || s.Operations.Restore != string(lease.UID)+":restore" {
		t.Errorf("operations %s, want those of %s", asJSON(s.Operations), lease.UID)
	}
	activated, ended := raise.instant(t, "activated_at"), raise.instant(t, "ended_at")
	if s.ActivatedAt == nil || !s.ActivatedAt.Time.Equal(activated) || s.RestoredAt == nil || !s.RestoredAt.Time.Equal(ended) {
		t.Errorf("activatedAt %v, restoredAt %v, want %s and %s", s.ActivatedAt, s.RestoredAt, activated, ended)
	}
	lag := ended.Sub(raise.instant(t, "expires_at")).Milliseconds()
	if s.RestoreLagMilliseconds == nil || *s.RestoreLagMilliseconds != lag {
		t.Errorf("restoreLagMilliseconds %s, want %d", asJSON(s.RestoreLagMilliseconds), lag)
	}
	if s.ObservedLimit == nil {
		t.Error("no observedLimit")
	}
}

// checkEvidence looks at every field that finance relies on.
func checkEvidence(t *testing.T, in *installation, lease *v1alpha1.TemporaryLimitLease, startsAt, expiresAt time.Time) {
	t.Helper()
	key := in.key(bucketName)
	wantEvents := "BucketOpened RaiseStored RaiseActivated RaiseRestored/Expired"
	if got := strings.Join(in.db.events(t, key), " "); got != wantEvents {
		t.Errorf("audit %q, want %q", got, wantEvents)
	}
	always := map[string]string{
		"bucket_key": key, "outcome": "applied", "raise_id": string(lease.UID),
		"cluster": in.clusterID, "namespace": in.namespace, "owner_name": bucketName,
		"tenant_id": tenantID, "scoped_key_id": scopedKeyID, "bucket_scoped_key_id": scopedKeyID,
		"approval_id": approvalID, "actor": requestedBy, "worker": "manager-a",
		"requested_limit_tokens": "300000", "declared_limit_tokens": "120000",
		"reserved_tokens": "0",
	}
	for _, c := range []struct {
		event        string
		want         map[string]string
		due          time.Time
		raiseVersion string
	}{
		{"RaiseActivated", map[string]string{
			"operation_id": string(lease.UID) + ":activate", "prior_limit_tokens": "120000", "effective_limit_tokens": "300000",
			"used_tokens": "40000", "limit_epoch": "1", "reason": "",
		}, startsAt, "2"},
		{"RaiseRestored", map[string]string{
			"operation_id": string(lease.UID) + ":restore", "prior_limit_tokens": "300000", "effective_limit_tokens": "120000",
			"used_tokens": "100000", "limit_epoch": "2", "reason": "Expired",
		}, expiresAt, "3"},
	} {
		r := in.db.one(t, key, c.event)
		for _, fields := range []map[string]string{always, c.want, {"raise_version": c.raiseVersion}} {
			for column, value := range fields {
				if got := r.text(column); got != value {
					t.Errorf("%s: %s is %q, want %q", c.event, column, got, value)
				}
			}
		}
		if r.text("trigger_operation") == "" {
			t.Errorf("%s does not say what triggered it", c.event)
		}
		if due := r.instant(t, "due_at"); !due.Equal(c.due) {
			t.Errorf("%s: due at %s, want %s", c.event, due, c.due)
		}
		if at := r.instant(t, "recorded_at"); at.Before(c.due) {
			t.Errorf("%s: done at %s, before it was due at %s", c.event, at, c.due)
		}
	}
}

// checkMetrics looks for each name that dashboards and alerts rest on.
func checkMetrics(t *testing.T, m *manager) {
	t.Helper()
	m.wantMetrics(t, map[string]float64{
		`budget_lease_restore_lag_seconds_count`:                                  1,
		`budget_lease_active_past_expiry`:                                         0,
		`budget_lease_limit_conflicts_total{reason="LimitChanged"}`:               0,
		`budget_lease_transitions_total{outcome="applied",transition="activate"}`: 1,
		`budget_lease_transitions_total{outcome="applied",transition="restore"}`:  1,
		`budget_lease_transitions_total{outcome="applied",transition="revoke"}`:   0,
		`tokenlease_ledger_writable`:                                              1,
	})
	got := m.scrape(t)
	for _, operation := range []string{"apply_declared", "store_raise"} {
		for _, series := range []string{
			`tokenlease_ledger_operations_total{code="ok",operation="` + operation + `"}`,
			`tokenlease_ledger_operation_duration_seconds_count{operation="` + operation + `"}`,
		} {
			if got[series] < 1 {
				t.Errorf("%s is %v, want at least 1", series, got[series])
			}
		}
	}
}

// wantEvents waits until the namespace has events with these reasons, each once:
// events tell transitions, not repetitions.
func (in *installation) wantEvents(t *testing.T, reasons ...string) {
	t.Helper()
	waitFor(t, "the events "+asJSON(reasons), func() (bool, string) {
		count := map[string]int{}
		for _, e := range in.listEvents(t) {
			count[e.Reason] += max(1, seriesCount(e))
		}
		for _, reason := range reasons {
			if count[reason] != 1 {
				return false, asJSON(count)
			}
		}
		return true, ""
	})
}
