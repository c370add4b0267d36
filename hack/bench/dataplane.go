package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/token-lease/operator/client"
	"github.com/token-lease/operator/internal/dataplane"
	"github.com/token-lease/operator/internal/dataplane/dataplanetest"
	"github.com/token-lease/operator/internal/ledger"
)

// planeConnections is how many processes the callers of the data plane stand for: each
// has a client, and with it a connection, of its own.
const planeConnections = 16

// planeContender is this ledger behind the data plane: over loopback with TLS, with the
// public Go client. Who calls is known from the caches, as it is nearly always.
type planeContender struct {
	*ledgerContender
	plane     *dataplanetest.Plane
	clients   []*client.Client
	tokenFile string
	declared  int
}

func openPlane(ctx context.Context, url string) (_ *planeContender, err error) {
	c := &planeContender{}
	if c.ledgerContender, err = openLedger(ctx, url); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.close())
		}
	}()
	c.plane, err = dataplanetest.Run(func(o *dataplane.Options) { o.Ledger, o.Now = c.ledger, time.Now })
	if err != nil {
		return nil, err
	}
	file, err := os.CreateTemp("", "tokenlease-bench-token-*")
	if err != nil {
		return nil, err
	}
	c.tokenFile = file.Name()
	_, err = file.WriteString(dataplanetest.Token(dataplanetest.Worker, dataplanetest.Audience, time.Now().Add(24*time.Hour)))
	if err := errors.Join(err, file.Close()); err != nil {
		return nil, err
	}
	for range planeConnections {
		one, err := client.New(client.Options{URL: c.plane.URL, TokenFile: c.tokenFile, HTTPClient: &http.Client{Transport: &http.Transport{
			TLSClientConfig:   &tls.Config{InsecureSkipVerify: true},
			ForceAttemptHTTP2: true,
		}}})
		if err != nil {
			return nil, err
		}
		c.clients = append(c.clients, one)
	}
	return c, nil
}

func (c *planeContender) close() error {
	var errs []error
	if c.plane != nil {
		errs = append(errs, c.plane.Stop())
	}
	if c.tokenFile != "" {
		errs = append(errs, os.Remove(c.tokenFile))
	}
	return errors.Join(append(errs, c.ledgerContender.close())...)
}

func (c *planeContender) prepare(ctx context.Context, l load, _ time.Duration) error {
	for ; c.declared < l.buckets; c.declared++ {
		name := planeBucket(bucketName(c.declared))
		_, err := c.ledger.ApplyDeclared(ctx, ledger.ApplyDeclared{
			Key: dataplanetest.Namespace + "/" + name, Generation: 1,
			Owner: ledger.Owner{
				Cluster: dataplanetest.Cluster, Namespace: dataplanetest.Namespace, Name: name, UID: name, CreatedAt: time.Now(),
			},
			Declaration: ledger.Declaration{
				Limit: plenty, TenantID: name, ConflictPolicy: ledger.ConflictReview, Settings: ledger.DefaultSettings(),
			},
		})
		if err != nil {
			return err
		}
		c.plane.API.Allow(dataplanetest.Worker, dataplanetest.Namespace+"/"+name, "create", "update")
	}
	return nil
}

// planeBucket is the name of a TokenBucket for a bucket of the other contenders.
func planeBucket(bucket string) string { return strings.ReplaceAll(bucket, "/", "-") }

func (c *planeContender) measure(ctx context.Context, l load, warmUp, window time.Duration) (sample, error) {
	return spend(ctx, l, warmUp, window, func(ctx context.Context, bucket string, n int64) error {
		one := c.clients[n%planeConnections]
		name := client.Bucket{Namespace: dataplanetest.Namespace, Name: planeBucket(bucket)}
		lease, err := one.Reserve(ctx, client.Request{Bucket: name, Tokens: tokensReserved, RequestKey: fmt.Sprint(n)})
		if err != nil {
			return err
		}
		_, err = one.Commit(ctx, name, lease.ID, tokensUsed)
		return err
	})
}
