package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"
	"time"

	"github.com/token-lease/operator/internal/ledger"
	"github.com/token-lease/operator/internal/ledger/postgres"
)

// Bounds of flags.
const (
	maxConnections          = 1000
	maxConcurrentReconciles = 1000
	maxRaiseDuration        = 366 * 24 * time.Hour
	// leaderJitter is how much longer than the retry period the wait between two
	// tries of the leader election may be: a renewal needs time for one.
	leaderJitter = 1.2
)

// namespaceFile tells a pod which namespace it runs in.
var namespaceFile = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

// validate refuses a command line that cannot work, before anything is started.
func (o *runOptions) validate(ctx context.Context) error {
	if _, err := o.database.connString(ctx); err != nil {
		return err
	}
	for _, f := range []struct {
		name  string
		value time.Duration
	}{
		{"poll-interval", o.controllers.PollInterval}, {"usage-interval", o.controllers.UsageInterval},
		{"ledger-lock-timeout", o.ledger.LockTimeout}, {"ledger-statement-timeout", o.ledger.StatementTimeout},
		{"ledger-idle-in-transaction-timeout", o.ledger.IdleInTransactionTimeout},
	} {
		if f.value < 100*time.Millisecond || f.value > time.Hour {
			return fmt.Errorf("--%s must lie between 100ms and 1h, not %s", f.name, f.value)
		}
	}
	for _, f := range []struct {
		name                    string
		value, minimum, maximum int
	}{
		{"max-concurrent-reconciles", o.controllers.MaxConcurrentReconciles, 1, maxConcurrentReconciles},
		{"ledger-max-connections", o.ledger.MaxConnections, postgres.MinConnections, maxConnections},
	} {
		if f.value < f.minimum || f.value > f.maximum {
			return fmt.Errorf("--%s must be at least %d and at most %d, not %d", f.name, f.minimum, f.maximum, f.value)
		}
	}
	if o.controllers.ClusterID != "" {
		if err := ledger.ValidateClusterID(o.controllers.ClusterID); err != nil {
			return fmt.Errorf("--cluster-id: %w", err)
		}
	}
	if d := o.controllers.MaxRaiseDuration; d < time.Second || d > maxRaiseDuration {
		return fmt.Errorf("--max-raise-duration must lie between 1s and %s, not %s", maxRaiseDuration, d)
	}
	o.controllers.ActorOptional = !o.requireActor
	if o.approvalPattern != "" {
		pattern, err := regexp.Compile("^(?:" + o.approvalPattern + ")$")
		if err != nil {
			return fmt.Errorf("--approval-pattern: %w", err)
		}
		o.controllers.ApprovalPattern = pattern
	}
	for ns := range strings.SplitSeq(o.trustedNamespaces, ",") {
		if ns = strings.TrimSpace(ns); ns != "" {
			o.controllers.TrustedNamespaces = append(o.controllers.TrustedNamespaces, ns)
		}
	}
	if err := o.dataPlane.validate(); err != nil {
		return err
	}
	return o.leaderElection.validate()
}

// validate refuses times with which no leader could ever stay one, and an election
// that has no place to be held in.
func (l *leaderElection) validate() error {
	if !l.enabled {
		return nil
	}
	if l.id == "" {
		return errors.New("--leader-election-id must not be empty")
	}
	shortestRenewal := time.Duration(leaderJitter * float64(l.retryPeriod))
	switch {
	case l.retryPeriod <= 0:
		return fmt.Errorf("--leader-election-retry-period must be above 0, not %s", l.retryPeriod)
	case l.renewDeadline <= shortestRenewal:
		return fmt.Errorf("--leader-election-renew-deadline (%s) must be above %.1f times --leader-election-retry-period (%s)",
			l.renewDeadline, leaderJitter, l.retryPeriod)
	case l.leaseDuration <= l.renewDeadline:
		return fmt.Errorf("--leader-election-lease-duration (%s) must be above --leader-election-renew-deadline (%s)",
			l.leaseDuration, l.renewDeadline)
	case l.leaseDuration < time.Second:
		return fmt.Errorf("--leader-election-lease-duration must be at least 1s, not %s: a Lease holds whole seconds", l.leaseDuration)
	}
	if l.namespace != "" {
		return nil
	}
	if _, err := os.Stat(namespaceFile); err != nil {
		return errors.New("outside a cluster --leader-election-namespace is required, or --leader-elect=false where no other replica runs")
	}
	return nil
}
