package postgres

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	waitInterval = time.Second
	// waitReportInterval bounds how often a waiting program repeats itself.
	waitReportInterval = 30 * time.Second
)

// Codes of a server that is there and will take connections later.
var codesOfComing = []string{
	"57P03",          // it starts, stops or recovers
	"57P01", "57P02", // it was told to end, or one of its processes crashed
	"53300", // too many connections
}

// WaitForServer waits, until the context ends, for a server that takes the
// connection. It tries once a second; report is told why it waits, at first and
// then now and again. What waiting does not mend ends it at once: a connection
// string that cannot be read, credentials that are refused (trying them again and
// again may lock the account), a database that does not exist.
func WaitForServer(ctx context.Context, connString func(context.Context) (string, error), report func(reason string)) error {
	ticker := time.NewTicker(waitInterval)
	defer ticker.Stop()
	var reported time.Time
	for {
		err := connectOnce(ctx, connString)
		if err == nil {
			return nil
		}
		if ctx.Err() != nil || !comesLater(err) {
			return oneLine(err)
		}
		if time.Since(reported) >= waitReportInterval {
			reported = time.Now()
			report(oneLine(err).Error())
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", ctx.Err(), oneLine(err))
		case <-ticker.C:
		}
	}
}

func connectOnce(ctx context.Context, connString func(context.Context) (string, error)) error {
	text, err := connString(ctx)
	if err != nil {
		return &connectionStringError{err}
	}
	config, err := parseConnString(text)
	if err != nil {
		return err
	}
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	return conn.Ping(ctx)
}

// comesLater tells a server that is down or starting from one that has refused.
func comesLater(err error) bool {
	if code := sqlState(err); code != "" {
		return slices.Contains(codesOfComing, code) || classOf(code) == classConnection
	}
	return isNetworkError(err) || errors.Is(err, context.DeadlineExceeded)
}

// oneLine is an error of the driver, which writes one for each address, in one
// line.
func oneLine(err error) error {
	return &lineError{text: strings.Join(strings.Fields(err.Error()), " "), err: err}
}

type lineError struct {
	text string
	err  error
}

func (e *lineError) Error() string { return e.text }
func (e *lineError) Unwrap() error { return e.err }
