package e2e_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/token-lease/operator/hack/devenv/postgres/postgrestest"
)

// How a campaign is asked for; the defaults suit "make test".
const (
	campaignSeedVariable  = "TOKENLEASE_CAMPAIGN_SEED"
	campaignStepsVariable = "TOKENLEASE_CAMPAIGN_STEPS"
	campaignRunsVariable  = "TOKENLEASE_CAMPAIGN_RUNS"
	// campaignManagerVariable names another manager's program, such as one that was
	// built with the race detector.
	campaignManagerVariable = "TOKENLEASE_CAMPAIGN_MANAGER"
	campaignSteps           = 70
	campaignRuns            = 1
	// invariantsEvery is how often the invariants are checked meanwhile, in acts.
	invariantsEvery = 10
)

// Goal: whatever is done to the product, in whatever order, its promises hold,
// and it comes back to a state in which every object says what the ledger says.
// Method: random acts of users, GitOps tools, other hands and outages on real
// servers, while workloads reserve and settle; then everything is brought up
// again, all windows pass, and ledger, objects and the test's own book are
// compared. A seed repeats the acts and their pauses; how processes interleave
// between them differs each time.
func TestCampaign(t *testing.T) {
	t.Parallel()
	seed := setting(t, campaignSeedVariable, uint64(time.Now().UnixNano())%1_000_000)
	steps := setting(t, campaignStepsVariable, campaignSteps)
	runs := setting(t, campaignRunsVariable, campaignRuns)
	fmt.Fprintf(os.Stderr, "campaign: %d run(s) of %d steps, repeat with %s=%d\n", runs, steps, campaignSeedVariable, seed)
	own, server := startOwnCluster(t), postgrestest.Own(t)
	for run := range runs {
		t.Run(fmt.Sprintf("seed=%d", seed+run), func(t *testing.T) {
			c := newCampaign(t, installOn(t, own, server), seed+run)
			c.run(newProgram(seed+run, int(steps)))
		})
		if t.Failed() {
			return // what it left behind would disturb the next one
		}
	}
}

func setting(t *testing.T, variable string, usual uint64) uint64 {
	t.Helper()
	text := os.Getenv(variable)
	if text == "" {
		return usual
	}
	value, err := strconv.ParseUint(text, 10, 32)
	if err != nil {
		t.Fatalf("%s: %v", variable, err)
	}
	return value
}

// handWrite is a limit that another hand has set and that was acknowledged: by an
// operation of the ledger, or by SQL with the number of its audit row.
type handWrite struct {
	key         string
	limit       int64
	operationID string
	sequence    int64
}

// campaign is one run. Its acts come one after another; only the workloads run
// beside them.
type campaign struct {
	t        *testing.T
	in       *installation
	seed     uint64
	program  string // of the managers
	managers [campaignManagers]managerSlot
	// wishes are all specs that were sent for buckets, granted the last grants that
	// were accepted.
	wishes     []bucketWish
	granted    [campaignLeases]map[string]any
	hands      []handWrite
	operations int
	book       *book
	log        []string
	faults     []string
}

func newCampaign(t *testing.T, in *installation, seed uint64) *campaign {
	t.Helper()
	c := &campaign{
		t: t, in: in, seed: seed, program: os.Getenv(campaignManagerVariable), book: &book{excused: map[string]bool{}},
	}
	t.Cleanup(func() {
		for _, fault := range append(c.faults, c.book.faults...) {
			t.Error(fault)
		}
		t.Logf("the acts of seed %d:\n%s", seed, strings.Join(c.log, "\n"))
		for i := range c.managers {
			if m := c.managers[i].manager; m != nil {
				m.endWith(t)
			}
		}
	})
	return c
}

func (c *campaign) note(format string, args ...any) {
	c.log = append(c.log, time.Now().UTC().Format("15:04:05.000 ")+fmt.Sprintf(format, args...))
}

// fault notes what is wrong, once: an invariant that is broken stays so.
func (c *campaign) fault(format string, args ...any) {
	fault := fmt.Sprintf(format, args...)
	if !slices.Contains(c.faults, fault) {
		c.faults = append(c.faults, fault)
		c.note("FAULT %s", fault)
	}
}

func (c *campaign) run(program []act) {
	c.t.Helper()
	endWorkloads := c.startWorkloads()
	for m := range campaignManagers {
		if err := c.startManager(m); err != nil {
			c.t.Fatal(err)
		}
	}
	for i, a := range program {
		time.Sleep(a.pause) // part of the seeded program, not a wait
		err := a.do(c)
		c.note("#%d %s: %v", i, a.what, outcome(err))
		if i%invariantsEvery == 0 {
			c.checkMeanwhile()
		}
	}
	c.bringUp()
	endWorkloads()
	c.settle()
}

func outcome(err error) string {
	if err == nil {
		return "done"
	}
	return err.Error()
}

func (c *campaign) startWorkloads() (end func()) {
	ctx, cancel := context.WithCancel(c.t.Context())
	var running sync.WaitGroup
	for n := range workloads {
		w := &worker{
			number: n, random: rand.New(rand.NewPCG(c.seed, uint64(n)+1)), ledger: c.in.db.ledger, book: c.book,
		}
		for b := range campaignBuckets {
			w.keys = append(w.keys, c.bucketKey(b))
		}
		running.Go(func() { w.run(ctx) })
	}
	end = func() {
		cancel()
		running.Wait()
	}
	c.t.Cleanup(end)
	return end
}

// checkMeanwhile checks the invariants in the middle of everything. A database
// that is down is no fault.
func (c *campaign) checkMeanwhile() {
	ctx, cancel := c.bound(actBound)
	defer cancel()
	broken, err := c.in.db.brokenInvariants(ctx)
	if err != nil {
		c.note("invariants not checked: %v", err)
	}
	for _, b := range broken {
		c.fault("%s", b)
	}
}

// bringUp ends every outage and starts every manager.
func (c *campaign) bringUp() {
	c.t.Helper()
	c.note("everything is brought up")
	if err := c.startDatabase(); err != nil {
		c.t.Fatal(err)
	}
	if err := c.startAPIServer(); err != nil {
		c.t.Fatal(err)
	}
	for m := range campaignManagers {
		if c.managers[m].frozen {
			_ = c.thawManager(m)
		}
		_ = c.startManager(m) // unless it runs
	}
}
