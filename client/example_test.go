package client_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net/http"
	"os"
	"path/filepath"

	"github.com/token-lease/operator/client"
	"github.com/token-lease/operator/internal/dataplane/dataplanetest"
)

// exampleServer is a data plane with one bucket of 1,000 tokens. A program in a cluster
// has the operator's, and the token that its pod is given.
func exampleServer() (url, tokenFile string, trusting *http.Client, stop func()) {
	plane, err := dataplanetest.Run()
	if err != nil {
		log.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		log.Fatal(err)
	}
	tokenFile = filepath.Join(dir, "token")
	if err := os.WriteFile(tokenFile, []byte(plane.Good(dataplanetest.Worker)), 0o600); err != nil {
		log.Fatal(err)
	}
	return plane.URL, tokenFile, plane.HTTP, func() {
		_ = plane.Stop()
		os.RemoveAll(dir)
	}
}

// Reserve an estimate, do the work, and book what it has really used.
func ExampleClient_Do() {
	url, tokenFile, trusting, stop := exampleServer()
	defer stop()

	c, err := client.New(client.Options{
		URL:       url,       // in a cluster: https://tokenlease.tokenlease-system.svc
		TokenFile: tokenFile, // in a pod: where the projected token is mounted
		// In a cluster, CAFile names the certificates to trust instead.
		HTTPClient: trusting,
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx := context.Background()
	bucket := client.Bucket{Namespace: "tenants", Name: "pm-4821"}

	err = c.Do(ctx, client.Request{Bucket: bucket, Tokens: 400}, func(context.Context) (int64, error) {
		return 350, nil // what the model says that it has used
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	figures, err := c.Figures(ctx, bucket)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Printf("%d of %d tokens used, %d reserved\n", figures.Used, figures.Limit, figures.Reserved)
	// Output: 350 of 1000 tokens used, 0 reserved
}

// Tell a full budget from other failures, and decide what to do.
func ExampleBudgetExceededError() {
	url, tokenFile, trusting, stop := exampleServer()
	defer stop()
	c, err := client.New(client.Options{URL: url, TokenFile: tokenFile, HTTPClient: trusting})
	if err != nil {
		fmt.Println(err)
		return
	}
	_, err = c.Reserve(context.Background(), client.Request{
		Bucket: client.Bucket{Namespace: "tenants", Name: "pm-4821"}, Tokens: 1200,
	})
	var exceeded *client.BudgetExceededError
	if errors.As(err, &exceeded) {
		fmt.Printf("asked for %d tokens, %d are left\n", exceeded.RequestedTokens, exceeded.AvailableTokens)
	}
	// Output: asked for 1200 tokens, 1000 are left
}
