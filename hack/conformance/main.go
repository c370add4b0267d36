// Command conformance compares this ledger with the npm package that it follows. It
// makes up sequences of operations, with hostile values, replays, conflicts and
// clocks that jump, and runs each on the package and on both of our stores. What they
// answer, codes and details included, and the leases that they keep are equal, but
// for the differences that the package documentation of internal/ledger lists; each
// of those is a rule in differences.go. A sequence that shows another one is made as
// small as it can be and printed.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"
)

const mostSteps = 10_000

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "conformance:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) (err error) {
	seed := flag.Int64("seed", time.Now().UnixNano()%1_000_000, "where the sequences come from; the same seed makes the same ones")
	sequences := flag.Int("sequences", 2_000, "how many sequences are run")
	steps := flag.Int("steps", 28, "how many operations a sequence has")
	flag.Parse()
	if flag.NArg() > 0 || *sequences < 1 || *sequences > mostPlaces || *steps < 1 || *steps > mostSteps {
		return fmt.Errorf("it takes flags only; -sequences is 1 to %d, and -steps 1 to %d", mostPlaces, mostSteps)
	}
	given := map[string]bool{}
	flag.Visit(func(f *flag.Flag) { given[f.Name] = true })
	fmt.Printf("conformance: seed %d\n", *seed)
	reference, err := startPackage(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, reference.close()) }()
	stores, err := openStores(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stores.close()) }()
	c := comparison{reference: reference, stores: stores, explained: map[string]int{}}
	for i := range *sequences {
		s := generate(*seed, i, *steps)
		difference, err := c.compare(ctx, s)
		if err != nil {
			return err
		}
		if difference != "" {
			shrinker := shrinker{compare: c.compare}
			small, difference := shrinker.shrink(ctx, s, difference)
			return fmt.Errorf("sequence %d of seed %d differs: %s\n%s", i, *seed, difference, small)
		}
		if (i+1)%500 == 0 {
			fmt.Printf("conformance: %d of %d sequences\n", i+1, *sequences)
		}
	}
	return c.report(extentOf(*sequences, *steps, given), *seed)
}
