package main

import (
	"context"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/token-lease/operator/api/v1alpha1"
)

// How often, and for how long at most, the API server is asked whether it serves
// our kinds.
const (
	apiProbeInterval = 5 * time.Second
	apiProbeTimeout  = 5 * time.Second
)

// watchControllers tells health and log, until the context ends, whether the
// controllers run, stand by for another replica that does, or lack the API server.
func watchControllers(ctx context.Context, elected <-chan struct{}, interval time.Duration, ask func(context.Context) error, h *health, log logr.Logger) {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	word, awaited := stateStandby, elected
	for {
		asking, cancel := context.WithTimeout(ctx, apiProbeTimeout)
		err := ask(asking)
		cancel()
		if ctx.Err() != nil {
			return // what comes next is not this one's to tell
		}
		select {
		case <-awaited:
			word, awaited = stateOK, nil
		default:
		}
		if err != nil {
			if h.wrong(partControllers, "waiting for the API server: "+err.Error()) {
				log.Error(err, "waiting for the API server")
			}
		} else if h.well(partControllers, word) {
			log.Info("the controllers are well", "state", word)
		}
		select {
		case <-ctx.Done():
			return
		case <-awaited:
			word, awaited = stateOK, nil
		case <-ticker.C:
		}
	}
}

// askAPIServer asks for one object of each of our kinds, by its metadata alone: so
// a CRD that is missing and a right that is missing show as what they are.
func askAPIServer(ctx context.Context, reader client.Reader) error {
	for _, kind := range []string{"TokenBucket", "TemporaryLimitLease"} {
		var list metav1.PartialObjectMetadataList
		list.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind(kind + "List"))
		if err := reader.List(ctx, &list, client.Limit(1)); err != nil {
			return fmt.Errorf("list one %s: %w", kind, err)
		}
	}
	return nil
}
