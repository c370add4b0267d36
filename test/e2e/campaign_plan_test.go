package e2e_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// What a campaign plays with.
const (
	campaignBuckets  = 3
	campaignLeases   = 6
	campaignManagers = 2
	// longestHold bounds, in acts, how long a manager stays frozen or a server down.
	longestHold = 8
	// longestPause bounds the time between two acts.
	longestPause = 700 * time.Millisecond
)

// campaignLimits are what buckets are declared to have and set to; the first is
// the usual one.
var campaignLimits = []int64{1000, 1000, 1000, 1000, 1000, 600, 1500, 0}

var campaignModes = []string{
	"Enforce", "Enforce", "Enforce", "Enforce", "Enforce", "Enforce", "Enforce", "Enforce", "Enforce", "Enforce", "Enforce", "Enforce",
	"ObserveOnly", "ObserveOnly", "Disabled", "",
}

// act is one step of a campaign.
type act struct {
	pause time.Duration
	// what tells the whole act, so that two programs can be compared.
	what string
	do   func(c *campaign) error
}

// bucketWish is a TokenBucket to apply.
type bucketWish struct {
	bucket                int
	limit                 int64
	overwrite, deletion   bool
	mode                  string // "" is none
	maxLimit, maxDuration int64
}

// leaseWish is a TemporaryLimitLease to create. Instants count from the act.
type leaseWish struct {
	slot, bucket      int
	normal, temporary int64
	starts            bool // false is "at once"
	startsIn, length  time.Duration
	approval          int
	// replace deletes the lease that has the name.
	rebase, replace bool
}

// planner draws a program. It knows what it has asked for and nothing of what
// became of it, so the same seed always gives the same program.
type planner struct {
	random *rand.Rand
	acts   []act
	// later are acts that end what an earlier one began, by the step they come at.
	later map[int][]act
	// limits is what each bucket was last declared to have, or set to.
	limits    [campaignBuckets]int64
	approvals int
	// hotBucket and hotLease are those of the latest lease: what happens to them is
	// likely to happen during a raise.
	hotBucket, hotLease int
	// apiBack and databaseBack are the steps from which the servers may go down
	// again: they take their time to come back, and a campaign is not about that.
	apiBack, databaseBack int
}

// newProgram is a pure function of its arguments.
func newProgram(seed uint64, steps int) []act {
	p := &planner{random: rand.New(rand.NewPCG(seed, 0)), later: map[int][]act{}}
	for b := range campaignBuckets {
		wish := bucketWish{bucket: b, limit: campaignLimits[0], mode: "Enforce", maxLimit: 4000, maxDuration: 60}
		p.applyBucket(wish)
	}
	for step := range steps {
		p.acts = append(p.acts, p.later[step]...)
		delete(p.later, step)
		p.draw(step)
	}
	// What ends later than the program does not end: the campaign mends everything.
	return p.acts
}

// choice is one kind of act and how often it comes.
type choice struct {
	weight int
	draw   func(p *planner, step int)
}

var choices = []choice{
	{10, (*planner).drawBucket},
	{2, (*planner).drawDeleteBucket},
	{22, (*planner).drawLease},
	{5, (*planner).drawLeasePair},
	{5, (*planner).drawLeaseAgain},
	{6, (*planner).drawDeleteLease},
	{7, (*planner).drawShorten},
	{5, (*planner).drawSetLimit},
	{9, (*planner).drawSQL},
	{1, (*planner).drawDeleteRow},
	{3, (*planner).drawForce},
	{4, (*planner).drawWipe},
	{3, (*planner).drawKill},
	{6, (*planner).drawStart},
	{4, (*planner).drawFreeze},
	{1, (*planner).drawAPIDown},
	{2, (*planner).drawDatabaseDown},
}

func (p *planner) draw(step int) {
	total := 0
	for _, c := range choices {
		total += c.weight
	}
	at := p.random.IntN(total)
	for _, c := range choices {
		if at < c.weight {
			c.draw(p, step)
			return
		}
		at -= c.weight
	}
}

// add puts an act at the end of the program.
func (p *planner) add(do func(c *campaign) error, format string, args ...any) {
	pause := time.Duration(p.random.Int64N(int64(longestPause)))
	p.acts = append(p.acts, act{pause: pause.Truncate(time.Millisecond), what: fmt.Sprintf(format, args...), do: do})
}

// addLater puts an act some steps further on.
func (p *planner) addLater(step int, what string, do func(c *campaign) error) {
	at := step + 1 + p.random.IntN(longestHold)
	p.later[at] = append(p.later[at], act{what: what, do: do})
}

func (p *planner) chance(percent int) bool { return p.random.IntN(100) < percent }

func pick[T any](p *planner, values ...T) T { return values[p.random.IntN(len(values))] }

func (p *planner) anyBucket() int {
	if p.chance(60) {
		return p.hotBucket
	}
	return p.random.IntN(campaignBuckets)
}

func (p *planner) anyLease() int {
	if p.chance(60) {
		return p.hotLease
	}
	return p.random.IntN(campaignLeases)
}

func (p *planner) seconds(from, to float64) time.Duration {
	d := time.Duration((from + p.random.Float64()*(to-from)) * float64(time.Second))
	if p.chance(50) {
		return d.Round(time.Second)
	}
	return d.Truncate(time.Millisecond)
}

func (p *planner) drawBucket(int) {
	p.applyBucket(bucketWish{
		bucket: p.anyBucket(), limit: pick(p, campaignLimits...),
		overwrite: p.chance(30), deletion: p.chance(40),
		mode:     pick(p, campaignModes...),
		maxLimit: pick[int64](p, 4000, 4000, 4000, 4000, 4000, 4000, 4000, 4000, 2500), maxDuration: pick[int64](p, 60, 60, 60, 60, 60, 60, 60, 60, 5),
	})
}

func (p *planner) applyBucket(wish bucketWish) {
	p.limits[wish.bucket] = wish.limit
	p.add(func(c *campaign) error { return c.applyBucket(wish) }, "apply bucket %+v", wish)
}

func (p *planner) drawDeleteBucket(int) {
	b := p.anyBucket()
	p.add(func(c *campaign) error { return c.deleteBucket(b) }, "delete bucket %d", b)
}

func (p *planner) newLease() leaseWish {
	wish := leaseWish{
		slot: p.random.IntN(campaignLeases), bucket: p.random.IntN(campaignBuckets),
		temporary: pick[int64](p, 2000, 2000, 2400, 3000, 3000, 3000, 3000, 5000),
		starts:    p.chance(60), startsIn: p.seconds(-2, 3), length: p.seconds(0.3, 8),
		rebase: p.chance(50), replace: p.chance(70),
	}
	wish.normal = p.limits[wish.bucket]
	if p.chance(10) {
		wish.normal = pick(p, campaignLimits...)
	}
	if p.approvals > 0 && p.chance(15) {
		wish.approval = 1 + p.random.IntN(p.approvals)
	} else {
		p.approvals++
		wish.approval = p.approvals
	}
	return wish
}

func (p *planner) createLease(wish leaseWish) {
	p.hotBucket, p.hotLease = wish.bucket, wish.slot
	p.add(func(c *campaign) error { return c.createLease(wish) }, "create lease %+v", wish)
}

func (p *planner) drawLease(int) { p.createLease(p.newLease()) }

// drawLeasePair asks for two raises of one bucket: end to start, or both at the
// same instant.
func (p *planner) drawLeasePair(int) {
	first := p.newLease()
	second := first
	first.starts, second.starts = true, true
	second.slot = (first.slot + 1) % campaignLeases
	p.approvals++
	second.approval = p.approvals
	second.temporary = pick[int64](p, 2000, 3000)
	p.hotBucket, p.hotLease = second.bucket, second.slot
	kind := "at the same instant"
	if p.chance(60) {
		kind = "end to start"
		second.startsIn += first.length
	}
	p.add(func(c *campaign) error { return c.createLeases(first, second) }, "create leases %s %+v %+v", kind, first, second)
}

func (p *planner) drawLeaseAgain(int) {
	slot := p.anyLease()
	p.add(func(c *campaign) error { return c.recreateLease(slot) }, "delete lease %d and create the same again", slot)
}

func (p *planner) drawDeleteLease(int) {
	slot := p.anyLease()
	p.add(func(c *campaign) error { return c.deleteLease(slot) }, "delete lease %d", slot)
}

func (p *planner) drawShorten(int) {
	slot, in := p.anyLease(), p.seconds(-1, 3)
	p.add(func(c *campaign) error { return c.shortenLease(slot, in) }, "move the expiry of lease %d to in %s", slot, in)
}

// handLimit is what another hand sets: what is there, what somebody may also
// declare, or what nobody ever does.
func (p *planner) handLimit(b int) int64 {
	limit := sameLimit
	switch roll := p.random.IntN(100); {
	case roll < 45:
		return limit
	case roll < 70:
		limit = pick(p, campaignLimits...)
	default:
		limit = 700 + p.random.Int64N(199)
	}
	p.limits[b] = limit
	return limit
}

func (p *planner) drawSetLimit(int) {
	b := p.anyBucket()
	limit := p.handLimit(b)
	p.add(func(c *campaign) error { return c.setLimit(b, limit) }, "SetLimit of bucket %d to %d", b, limit)
}

func (p *planner) drawSQL(int) {
	b := p.anyBucket()
	limit := p.handLimit(b)
	p.add(func(c *campaign) error { return c.writeLimit(b, limit) }, "SQL: limit of bucket %d to %d", b, limit)
}

func (p *planner) drawDeleteRow(int) {
	b := p.anyBucket()
	p.add(func(c *campaign) error { return c.deleteRow(b) }, "SQL: delete the row of bucket %d", b)
}

func (p *planner) drawForce(int) {
	slot, alsoDelete := p.anyLease(), p.chance(70)
	p.add(func(c *campaign) error { return c.forceLease(slot, alsoDelete) }, "force the finalizer off lease %d, delete it: %v", slot, alsoDelete)
}

func (p *planner) drawWipe(int) {
	if p.chance(30) {
		b := p.anyBucket()
		p.add(func(c *campaign) error { return c.wipeBucket(b) }, "wipe the status of bucket %d", b)
		return
	}
	slot := p.anyLease()
	p.add(func(c *campaign) error { return c.wipeLease(slot) }, "wipe the status of lease %d", slot)
}

func (p *planner) drawKill(int) {
	m := p.random.IntN(campaignManagers)
	p.add(func(c *campaign) error { return c.killManager(m) }, "kill -9 manager %d", m)
}

func (p *planner) drawStart(int) {
	m := p.random.IntN(campaignManagers)
	p.add(func(c *campaign) error { return c.startManager(m) }, "start manager %d unless it runs", m)
}

func (p *planner) drawFreeze(step int) {
	m := p.random.IntN(campaignManagers)
	p.add(func(c *campaign) error { return c.freezeManager(m) }, "SIGSTOP manager %d", m)
	p.addLater(step, fmt.Sprintf("SIGCONT manager %d", m), func(c *campaign) error { return c.thawManager(m) })
}

func (p *planner) drawAPIDown(step int) {
	if step < p.apiBack {
		return
	}
	p.apiBack = step + 5*longestHold
	crash := p.chance(50)
	p.add(func(c *campaign) error { return c.stopAPIServer(crash) }, "stop the API server, crash: %v", crash)
	p.addLater(step, "start the API server", func(c *campaign) error { return c.startAPIServer() })
}

func (p *planner) drawDatabaseDown(step int) {
	if step < p.databaseBack {
		return
	}
	p.databaseBack = step + 3*longestHold
	crash := p.chance(70)
	p.add(func(c *campaign) error { return c.stopDatabase(crash) }, "stop PostgreSQL, crash: %v", crash)
	p.addLater(step, "start PostgreSQL", func(c *campaign) error { return c.startDatabase() })
}

// Goal: a seed repeats the acts of a campaign, one by one, with their pauses.
func TestCampaignProgramIsItsSeed(t *testing.T) {
	t.Parallel()
	tell := func(seed uint64) []string {
		var told []string
		for _, a := range newProgram(seed, 500) {
			told = append(told, fmt.Sprint(a.pause, " ", a.what))
		}
		return told
	}
	if first, second := tell(1), tell(1); !slices.Equal(first, second) {
		t.Error("the same seed gives another program")
	}
	if slices.Equal(tell(1), tell(2)) {
		t.Error("another seed gives the same program")
	}
}
