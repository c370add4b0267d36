// Command bench measures reserving and committing, durably, side by side: this
// ledger, the npm package that it follows, what one would write by hand, the row
// writes alone, and Redis. All run in one process after another on one machine, in
// turns, so that what drifts hits all of them; their ratios are what to look at.
//
// An operation is one reserve or one commit. A caller reserves, then commits, in a
// loop; its latency is that of both together. The last line is JSON.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"runtime/pprof"
	"syscall"
	"time"
)

type options struct {
	repeat     int
	window     time.Duration
	growth     []int
	only       *regexp.Regexp
	cpuProfile string
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) (err error) {
	o := options{growth: []int{0, 10_000, 1_000_000}}
	quick := flag.Bool("quick", false, "measure each point once and shortly: for a look, not for a statement")
	only := flag.String("only", "", "measure only what matches this expression, such as 'ledger 1/256' or 'growth'")
	flag.IntVar(&o.repeat, "repeat", 3, "how often each point is measured; the median counts")
	flag.DurationVar(&o.window, "window", 3*time.Second, "how long each point is measured, after a warm-up of a third of it")
	flag.StringVar(&o.cpuProfile, "cpuprofile", "", "write a profile of this process to this file")
	statements := flag.Bool("statements", false, "show instead where the time goes in the server, statement by statement")
	flag.Parse()
	if flag.NArg() > 0 || o.repeat < 1 || o.window < 100*time.Millisecond {
		return errors.New("it takes flags only, -repeat of at least 1 and -window of at least 100ms; see -help")
	}
	if *quick {
		o.repeat, o.window, o.growth = 1, time.Second, []int{0, 10_000, 100_000}
	}
	if o.only, err = regexp.Compile(*only); err != nil {
		return fmt.Errorf("-only: %w", err)
	}
	if o.cpuProfile != "" {
		file, err := os.Create(o.cpuProfile)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, file.Close()) }()
		if err := pprof.StartCPUProfile(file); err != nil {
			return err
		}
		defer pprof.StopCPUProfile()
	}
	if *statements {
		return showStatements(ctx, o, os.Stdout)
	}
	bench, err := newBench(ctx, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, bench.close()) }()
	if err := bench.measureAll(ctx); err != nil {
		return err
	}
	return bench.report.print(os.Stdout)
}
