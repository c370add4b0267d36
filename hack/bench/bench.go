package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/token-lease/operator/hack/devenv/postgres"
)

// serverSettings are those of a small server in production, for all who use it.
var serverSettings = []string{
	"shared_buffers=1GB", "max_wal_size=8GB", "checkpoint_timeout=15min", "max_connections=300", "wal_buffers=16MB",
}

const stopTimeout = 30 * time.Second

// load is how much is asked for at once.
type load struct{ buckets, callers int }

func (l load) String() string { return fmt.Sprintf("%d/%d", l.buckets, l.callers) }

// contender is one way to reserve and commit.
type contender interface {
	// prepare makes what a load needs and does not count.
	prepare(ctx context.Context, load load, warmUp time.Duration) error
	// measure runs a load for warmUp and then for window.
	measure(ctx context.Context, load load, warmUp, window time.Duration) (sample, error)
	close() error
}

// The contenders, and the loads that each is measured at.
const (
	theLedger  = "ledger"
	thePackage = "package"
	byHand     = "for-update"
	rawWrites  = "raw"
	rawLookUps = "raw+look-ups"
	theRedis   = "redis"
	withLeases = "growth"
	withPurge  = "purge"
	dataPlane  = "data-plane"
)

var hot, spread, lone = load{1, 256}, load{1000, 256}, load{1, 1}

var loads = []struct {
	name  string
	loads []load
}{
	{theLedger, []load{lone, {1, 64}, hot, {1, 1024}, {1000, 64}, spread, {1000, 1024}}},
	{dataPlane, []load{lone, {1, 64}, hot, {1, 1024}, spread, {1000, 1024}}},
	{byHand, []load{lone, {1, 64}, hot, {1000, 64}, spread}},
	{theRedis, []load{lone, {1, 64}, hot, {1, 1024}, spread}},
	{thePackage, []load{lone, hot, spread}},
}

type bench struct {
	options    options
	server     *postgres.Server
	admin      *pgx.Conn
	contenders map[string]contender
	report     report
}

func newBench(ctx context.Context, o options) (_ *bench, err error) {
	b := &bench{options: o, contenders: map[string]contender{}, report: newReport()}
	b.report.setup = setup{
		CPUs: runtime.NumCPU(), Platform: runtime.Version() + " " + runtime.GOOS + "/" + runtime.GOARCH, Rounds: o.repeat, Window: o.window,
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.close())
		}
	}()
	b.server, err = postgres.Start(ctx, postgres.Options{Own: true, Settings: serverSettings, Log: os.Stderr})
	if err != nil {
		return nil, err
	}
	if b.admin, err = pgx.Connect(ctx, b.server.URL("postgres")); err != nil {
		return nil, err
	}
	rows, err := b.admin.Query(ctx, reportedSettings, []string{
		"server_version", "fsync", "synchronous_commit", "full_page_writes", "wal_level", "wal_sync_method", "wal_compression",
		"wal_buffers", "max_wal_size", "commit_delay", "checkpoint_timeout", "shared_buffers", "max_connections",
	})
	if err != nil {
		return nil, err
	}
	b.report.setup.PostgreSQL, err = pgx.CollectRows(rows, pgx.RowToStructByPos[setting])
	return b, err
}

const reportedSettings = `
SELECT name, current_setting(name) FROM unnest($1::text[]) WITH ORDINALITY AS wanted (name, place) ORDER BY place`

// open makes a contender ready when it is first needed.
func (b *bench) open(ctx context.Context, name string) (contender, error) {
	if c := b.contenders[name]; c != nil {
		return c, nil
	}
	database := "bench_" + strings.NewReplacer("-", "_", "+", "_").Replace(name)
	url := b.server.URL(database)
	if name != theRedis && name != withLeases && name != withPurge {
		if err := b.server.CreateDatabase(ctx, database); err != nil {
			return nil, err
		}
	}
	var c contender
	var err error
	switch name {
	case theLedger:
		c, err = openLedger(ctx, url)
	case dataPlane:
		c, err = openPlane(ctx, url)
	case byHand:
		c, err = openForUpdate(ctx, url)
	case thePackage:
		c, err = openPackage(ctx, url)
	case rawWrites:
		c, err = openRaw(ctx, url, b.report.batch(), false)
	case rawLookUps:
		c, err = openRaw(ctx, url, b.report.batch(), true)
	case theRedis:
		c, err = b.openRedis(ctx)
	case withLeases:
		c = &growth{server: b.server, sizes: map[int]*ledgerContender{}}
	case withPurge:
		c = &growth{server: b.server, sizes: map[int]*ledgerContender{}, purged: true}
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	b.contenders[name] = c
	return c, nil
}

func (b *bench) openRedis(ctx context.Context) (*redisContender, error) {
	c, err := openRedis(ctx)
	if err != nil {
		return nil, err
	}
	if b.report.setup.Redis, err = c.settings(ctx); err != nil {
		return nil, errors.Join(err, c.close())
	}
	return c, nil
}

func (b *bench) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	var errs []error
	for _, c := range b.contenders {
		errs = append(errs, c.close())
	}
	if b.admin != nil {
		errs = append(errs, b.admin.Close(ctx))
	}
	if b.server != nil {
		errs = append(errs, b.server.Stop(ctx))
	}
	return errors.Join(errs...)
}

func (b *bench) measureAll(ctx context.Context) error {
	for round := range b.options.repeat {
		fmt.Fprintf(os.Stderr, "bench: round %d of %d\n", round+1, b.options.repeat)
		// Each load is measured with all contenders before the next one is.
		for _, l := range loads[0].loads {
			for _, c := range loads {
				for _, other := range c.loads {
					if other == l {
						if err := b.measure(ctx, c.name, l); err != nil {
							return err
						}
					}
				}
			}
			if l == hot {
				if err := b.measure(ctx, rawWrites, l); err != nil {
					return err
				}
				if err := b.measure(ctx, rawLookUps, l); err != nil {
					return err
				}
			}
		}
		for i, leases := range b.options.growth {
			if err := b.measure(ctx, withLeases, load{leases, hot.callers}); err != nil {
				return err
			}
			if i == len(b.options.growth)-1 {
				if err := b.measure(ctx, withPurge, load{leases, hot.callers}); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func (b *bench) measure(ctx context.Context, name string, l load) error {
	if !b.options.only.MatchString(name + " " + l.String()) {
		return nil
	}
	c, err := b.open(ctx, name)
	if err != nil {
		return err
	}
	if err := c.prepare(ctx, l, b.options.window/3); err != nil {
		return fmt.Errorf("%s for %s: %w", name, l, err)
	}
	// What one leaves behind is not the next one's to write.
	if _, err := b.admin.Exec(ctx, `CHECKPOINT`); err != nil {
		return err
	}
	runtime.GC()
	before, err := b.gauges(ctx, c)
	if err != nil {
		return err
	}
	s, err := c.measure(ctx, l, b.options.window/3, b.options.window)
	if err != nil {
		return fmt.Errorf("%s at %s: %w", name, l, err)
	}
	after, err := b.gauges(ctx, c)
	if err != nil {
		return err
	}
	s.addGauges(before, after, name)
	b.report.add(point{name, l}, s)
	fmt.Fprintf(os.Stderr, "bench: %-10s %9s %9.0f operations/s, p50 %.2f ms\n", name, l, s.PerSecond, s.P50)
	return nil
}

// gauges are what a measurement is the difference of.
type gauges struct {
	wal, transactions, aof int64
	allocated              uint64
}

func (b *bench) gauges(ctx context.Context, c contender) (g gauges, err error) {
	// Each transaction that writes has a number of its own, and the next one's is the
	// end of a snapshot.
	err = b.admin.QueryRow(ctx, `SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn,
		pg_snapshot_xmax(pg_current_snapshot())::text::bigint`).Scan(&g.wal, &g.transactions)
	if err != nil {
		return g, err
	}
	if redis, ok := c.(*redisContender); ok {
		if g.aof, err = redis.appended(ctx); err != nil {
			return g, err
		}
	}
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	g.allocated = memory.TotalAlloc
	return g, nil
}
