package main

import (
	"context"
	"fmt"
	"time"

	"github.com/token-lease/operator/internal/ledger"
	"github.com/token-lease/operator/internal/ledger/postgres"
)

const (
	tokensReserved, tokensUsed = 10, 7
	// plenty is a limit that no measurement reaches.
	plenty = 1 << 50
)

// ledgerContender is this ledger, in process.
type ledgerContender struct {
	store  *postgres.Store
	ledger *ledger.Ledger
	opened int
}

func openLedger(ctx context.Context, url string) (*ledgerContender, error) {
	if _, err := postgres.Migrate(ctx, url); err != nil {
		return nil, err
	}
	store, err := postgres.Open(postgres.Options{
		ConnString: func(context.Context) (string, error) { return url, nil }, Worker: "bench",
	})
	if err != nil {
		return nil, err
	}
	return &ledgerContender{store: store, ledger: ledger.New(store, nil)}, nil
}

func (c *ledgerContender) close() error {
	c.store.Close()
	return nil
}

func (c *ledgerContender) prepare(ctx context.Context, l load, _ time.Duration) error {
	for ; c.opened < l.buckets; c.opened++ {
		if _, err := c.ledger.OpenBucket(ctx, ledger.OpenBucket{Key: bucketName(c.opened), Limit: plenty}); err != nil {
			return err
		}
	}
	return nil
}

func (c *ledgerContender) measure(ctx context.Context, l load, warmUp, window time.Duration) (sample, error) {
	return spend(ctx, l, warmUp, window, c.spend)
}

func (c *ledgerContender) spend(ctx context.Context, bucket string, n int64) error {
	reserved, err := c.ledger.Reserve(ctx, ledger.Reserve{
		Key: bucket, RequestKey: fmt.Sprint(n), Fingerprint: "f", Tokens: tokensReserved,
	})
	if err != nil {
		return err
	}
	_, err = c.ledger.Commit(ctx, ledger.Commit{Key: bucket, LeaseID: reserved.Lease.ID, ActualTokens: tokensUsed})
	return err
}
