package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"sigs.k8s.io/yaml"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/hack/devenv/environment"
	"github.com/token-lease/operator/hack/devenv/process"
	"github.com/token-lease/operator/internal/ledger"
	"github.com/token-lease/operator/internal/ledger/postgres"
)

const (
	samples   = "config/samples"
	namespace = "tenants"
	bucket    = "pm-4821"
	lease     = "pm-4821-launch"
	bucketKey = namespace + "/" + bucket

	normalLimit    = 120_000
	temporaryLimit = 300_000
	// large fits the raised budget only.
	large = 150_000

	poll = 200 * time.Millisecond
)

// story holds what the chapters share.
type story struct {
	env     *environment.Environment
	manager *process.Process
	store   *postgres.Store
	// workload draws from the budget through the manager's data plane.
	workload *workload
	// ledger stands for another process than the manager, on the same database.
	ledger *ledger.Ledger
	sql    *pgx.Conn
	// requests counts the workload's requests, for their keys.
	requests int
}

func newStory(ctx context.Context, e *environment.Environment) (*story, error) {
	w, err := newWorkload()
	if err != nil {
		return nil, err
	}
	s := &story{env: e, workload: w}
	url := e.DatabaseURL
	store, err := postgres.Open(postgres.Options{
		ConnString: func(context.Context) (string, error) { return url, nil },
		Worker:     "demo-workload",
	})
	if err != nil {
		return nil, fmt.Errorf("open the ledger: %w", err)
	}
	s.store, s.ledger = store, ledger.New(store, nil)
	if s.sql, err = pgx.Connect(ctx, url); err != nil {
		store.Close()
		return nil, fmt.Errorf("connect to the database: %w", err)
	}
	return s, nil
}

func (s *story) close() {
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	if s.manager != nil && s.manager.Running() {
		_ = s.manager.Stop(ctx)
	}
	_ = s.sql.Close(ctx)
	s.store.Close()
}

func (s *story) managerLog() string {
	if s.manager == nil {
		return ""
	}
	return "\nThe manager's log ends with:\n" + s.manager.LogTail()
}

func (s *story) startManager() error {
	manager, err := process.Start(s.env.ManagerCommand(append(s.workload.flags(),
		"--metrics-bind-address=0", "--health-probe-bind-address=0", "--worker=demo-manager", "--usage-interval=1s",
		"--leader-election-lease-duration=4s", "--leader-election-renew-deadline=3s", "--leader-election-retry-period=500ms",
	)...))
	if err != nil {
		return fmt.Errorf("start the manager: %w", err)
	}
	s.manager = manager
	fmt.Printf("The manager runs (pid %d).\n", manager.PID())
	return nil
}

// declareBudget applies the sample budget and draws from it.
func (s *story) declareBudget(ctx context.Context) error {
	if err := s.startManager(); err != nil {
		return err
	}
	for _, file := range []string{"namespace.yaml", "tokenbucket.yaml"} {
		if err := s.kubectl(ctx, "apply", "--filename", filepath.Join(s.env.Root, samples, file)); err != nil {
			return err
		}
	}
	if err := s.kubectl(ctx, "wait", "--namespace", namespace, "tokenbucket/"+bucket, "--for=condition=Ready", "--timeout=90s"); err != nil {
		return err
	}
	if err := s.enrol(ctx); err != nil {
		return err
	}
	if err := s.spend(ctx, 50_000, 42_000); err != nil {
		return err
	}
	if err := s.refused(ctx, large); err != nil {
		return err
	}
	return s.show(ctx, normalLimit)
}

// raise applies the sample lease, with a window that begins now.
func (s *story) raise(ctx context.Context) error {
	file, err := s.leaseManifest(ctx)
	if err != nil {
		return err
	}
	if err := s.kubectl(ctx, "apply", "--filename", file); err != nil {
		return err
	}
	if err := s.kubectl(ctx, "wait", "--namespace", namespace, "temporarylimitlease/"+lease, "--for=condition=Active", "--timeout=1m"); err != nil {
		return err
	}
	if err := s.spend(ctx, large, 61_500); err != nil {
		return err
	}
	return s.show(ctx, temporaryLimit)
}

// leaseManifest writes the sample with a window of its own: from now on, by the
// clock that decides.
func (s *story) leaseManifest(ctx context.Context) (string, error) {
	text, err := os.ReadFile(filepath.Join(s.env.Root, samples, "temporarylimitlease.yaml"))
	if err != nil {
		return "", err
	}
	var manifest map[string]any
	if err := yaml.Unmarshal(text, &manifest); err != nil {
		return "", fmt.Errorf("read the sample: %w", err)
	}
	spec, ok := manifest["spec"].(map[string]any)
	if !ok {
		return "", errors.New("the sample has no spec")
	}
	var now time.Time
	if err := s.sql.QueryRow(ctx, "SELECT tokenlease.ledger_now()").Scan(&now); err != nil {
		return "", fmt.Errorf("read the ledger's clock: %w", err)
	}
	delete(spec, "startsAt")
	spec["expiresAt"] = now.Add(window).UTC().Format(time.RFC3339)
	edited, err := json.Marshal(manifest)
	if err != nil {
		return "", err
	}
	file := filepath.Join(s.env.Dir, "lease.json")
	return file, os.WriteFile(file, edited, 0o600)
}

func (s *story) killManager(ctx context.Context) error {
	if err := s.manager.Kill(); err != nil {
		return err
	}
	limit, err := s.limit(ctx)
	if err != nil {
		return err
	}
	raise, err := s.currentRaise(ctx)
	if err != nil {
		return err
	}
	fmt.Printf("The manager is gone. The database holds the limit %d; the raise is %s until %s.\n",
		limit, raise.State, raise.ExpiresAt.Format(time.TimeOnly))
	if limit != temporaryLimit || raise.State != ledger.RaiseActive {
		return fmt.Errorf("the raise was over before the manager was killed; the machine is too slow for a window of %s", window)
	}
	fmt.Println("Waiting for the expiry, by the database's clock ...")
	return waitFor(ctx, "the expiry", func() (bool, error) {
		var over bool
		err := s.sql.QueryRow(ctx, "SELECT tokenlease.ledger_now() >= $1", raise.ExpiresAt).Scan(&over)
		return over, err
	})
}

// reserveAfterExpiry shows the first promise: an expired raise admits nothing
// more, whatever is down.
func (s *story) reserveAfterExpiry(ctx context.Context) error {
	limit, err := s.limit(ctx)
	if err != nil {
		return err
	}
	fmt.Println("The API server still shows what the manager wrote last:")
	if err := s.get(ctx); err != nil {
		return err
	}
	fmt.Printf("Nobody has touched the bucket yet, so its row still holds %d. Another process reserves, on the same database:\n", limit)
	if err := s.refusedDirectly(ctx, large); err != nil {
		return err
	}
	if limit, err = s.limit(ctx); err != nil {
		return err
	}
	fmt.Printf("The row holds %d now: the refused request itself has restored it.\n", limit)
	if limit != normalLimit {
		return fmt.Errorf("the limit is %d; want %d", limit, normalLimit)
	}
	return s.spendDirectly(ctx, 10_000, 9_000)
}

func (s *story) restartManager(ctx context.Context) error {
	if err := s.startManager(); err != nil {
		return err
	}
	if err := s.kubectl(ctx, "wait", "--namespace", namespace, "temporarylimitlease/"+lease, "--for=condition=Restored", "--timeout=90s"); err != nil {
		return err
	}
	if err := s.spend(ctx, 5_000, 4_000); err != nil {
		return err
	}
	return s.show(ctx, normalLimit)
}

func (s *story) printAudit(ctx context.Context) error {
	rows, err := s.store.Audit(ctx, bucketKey, 0, 100)
	if err != nil {
		return err
	}
	var restores int
	for _, r := range rows {
		if r.Event == ledger.AuditRaiseRestored {
			restores++
		}
		fmt.Printf("%2d  %s  %-15s %-8s limit %s -> %s  used %d  reserved %d  by %s in %s (%s)  actor %s  approval %s  %s\n",
			r.Sequence, r.At.Format("15:04:05.000"), r.Event, r.Outcome, number(r.PriorLimit), number(r.EffectiveLimit),
			r.UsedTokens, r.ReservedTokens, r.Worker, r.Trigger, orDash(string(r.Reason)), orDash(r.Actor), orDash(r.ApprovalID), r.OperationID)
	}
	if restores != 1 {
		return fmt.Errorf("the audit holds %d restores; want 1", restores)
	}
	return nil
}

// spendDirectly does what spend does without the data plane, which ends with the
// manager: from another process on the same database.
func (s *story) spendDirectly(ctx context.Context, reserve, actual int64) error {
	reserved, err := s.reserve(ctx, reserve)
	if err != nil {
		return fmt.Errorf("reserve %d: %w", reserve, err)
	}
	committed, err := s.ledger.Commit(ctx, ledger.Commit{Key: bucketKey, LeaseID: reserved.Lease.ID, ActualTokens: actual})
	if err != nil {
		return fmt.Errorf("commit %d: %w", actual, err)
	}
	fmt.Printf("  reserve %d: admitted; commit %d: %d used of %d, %d available\n",
		reserve, actual, committed.Bucket.UsedTokens, committed.Bucket.Limit, committed.Bucket.AvailableTokens)
	return nil
}

// refusedDirectly is to refused as spendDirectly is to spend.
func (s *story) refusedDirectly(ctx context.Context, tokens int64) error {
	_, err := s.reserve(ctx, tokens)
	var refusal *ledger.Error
	if !errors.As(err, &refusal) || refusal.Code != ledger.CodeBudgetExceeded {
		return fmt.Errorf("reserve %d: got %w; want %s", tokens, err, ledger.CodeBudgetExceeded)
	}
	fmt.Printf("  reserve %d: refused, %s, %v available\n", tokens, refusal.Code, refusal.Details["availableTokens"])
	return nil
}

func (s *story) reserve(ctx context.Context, tokens int64) (ledger.LeaseResult, error) {
	s.requests++
	return s.ledger.Reserve(ctx, ledger.Reserve{
		Key: bucketKey, RequestKey: fmt.Sprintf("demo-%d", s.requests), Fingerprint: fmt.Sprint(tokens), Tokens: tokens,
	})
}

// show prints what a user sees, once the status has caught up with the ledger.
func (s *story) show(ctx context.Context, limit int64) error {
	snapshot, err := s.ledger.Inspect(ctx, bucketKey)
	if err != nil {
		return err
	}
	for field, value := range map[string]int64{"limit": limit, "usedTokens": snapshot.UsedTokens} {
		err := s.env.Kubectl(ctx, io.Discard, "wait", "--namespace", namespace, "tokenbucket/"+bucket,
			fmt.Sprintf("--for=jsonpath={.status.%s}=%d", field, value), "--timeout=90s")
		if err != nil {
			return err
		}
	}
	return s.get(ctx)
}

func (s *story) get(ctx context.Context) error {
	fmt.Println("$ kubectl get tokenbuckets,temporarylimitleases")
	return s.kubectl(ctx, "get", "--namespace", namespace, "tokenbuckets,temporarylimitleases")
}

func (s *story) kubectl(ctx context.Context, args ...string) error {
	return s.env.Kubectl(ctx, os.Stdout, args...)
}

// limit is the cap in force, read with SQL.
func (s *story) limit(ctx context.Context) (int64, error) {
	var limit int64
	err := s.sql.QueryRow(ctx, "SELECT limit_tokens FROM tokenlease.buckets WHERE bucket_key = $1", bucketKey).Scan(&limit)
	if err != nil {
		return 0, fmt.Errorf("read the limit: %w", err)
	}
	return limit, nil
}

func (s *story) currentRaise(ctx context.Context) (*ledger.Raise, error) {
	var object v1alpha1.TemporaryLimitLease
	var text strings.Builder
	if err := s.env.Kubectl(ctx, &text, "get", "--namespace", namespace, "temporarylimitlease", lease, "--output=json"); err != nil {
		return nil, err
	}
	if err := json.Unmarshal([]byte(text.String()), &object); err != nil {
		return nil, fmt.Errorf("read the lease: %w", err)
	}
	var cluster string
	err := s.sql.QueryRow(ctx, "SELECT owner_cluster FROM tokenlease.buckets WHERE bucket_key = $1", bucketKey).Scan(&cluster)
	if err != nil {
		return nil, fmt.Errorf("read the bucket's owner: %w", err)
	}
	return s.store.Raise(ctx, cluster, string(object.UID))
}

func waitFor(ctx context.Context, what string, reached func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, stateTimeout)
	defer cancel()
	ticker := time.NewTicker(poll)
	defer ticker.Stop()
	for {
		if done, err := reached(); err != nil || done {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w", what, ctx.Err())
		case <-ticker.C:
		}
	}
}

func number(n *int64) string {
	if n == nil {
		return "-"
	}
	return fmt.Sprint(*n)
}

func orDash(text string) string {
	if text == "" {
		return "-"
	}
	return text
}
