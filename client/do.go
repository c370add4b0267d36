package client

import (
	"context"
	"errors"
	"fmt"
	"time"
)

const (
	// extendPart is which part of its life a lease is extended after: two extensions may
	// fail before it ends.
	extendPart = 3
	// minExtend and maxExtend bound the time between two extensions.
	minExtend = 100 * time.Millisecond
	maxExtend = time.Minute
	// minExtendAttempt is for how long an extension is waited for at least: one that takes
	// less is slow, and not lost.
	minExtendAttempt = time.Second
	// abandonTimeout bounds the cleaning up after a reservation whose answer was not
	// waited for.
	abandonTimeout = time.Second
)

// Do reserves tokens, runs work, and settles with what work says it has really used:
//
//   - a figure is committed, also one that comes with an error, since those tokens are
//     spent;
//   - an error without a figure (0), a panic and a runtime.Goexit release the reservation.
//
// The lease is extended while work runs, however long that is. If it is lost all the same
// (the server says that it has expired), the context of work ends, with the refusal as its
// cause. When ctx ends, that of work does; what work returns then is settled by the same
// rules, for at most Options.SettleTimeout.
//
// A request key that was used before gets the lease of then: work runs if that is still
// reserved, and otherwise Do returns an *Error that says how it was settled.
//
// A commit that the server refuses (CodeCommitExceedsBudget) leaves the lease reserved
// until it expires, with the figure on record: to release it would say that nothing was
// spent. If this process dies, the reservation comes back when its TTL is over.
func (c *Client) Do(ctx context.Context, r Request, work func(ctx context.Context) (actualTokens int64, err error)) (err error) {
	lease, err := c.reserveForWork(ctx, r)
	if err != nil {
		return err
	}
	working, lost := context.WithCancelCause(ctx)
	stop := c.keepAlive(context.WithoutCancel(ctx), lease, r.RequestKey != "", lost)
	returned, actual := false, int64(0)
	defer func() {
		stop()
		settling, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.settleTimeout)
		defer cancel()
		switch {
		case returned && (err == nil || actual > 0):
			_, settled := c.Commit(settling, lease.Bucket, lease.ID, actual)
			err = join(err, "commit", settled)
		default:
			_, settled := c.Release(settling, lease.Bucket, lease.ID)
			err = join(err, "release", settled)
		}
	}()
	actual, err = work(working)
	returned = true
	if err == nil && actual < 0 {
		err = fmt.Errorf("the work says that it used %d tokens", actual)
	}
	return err
}

// join adds how settling went to what the work returned.
func join(err error, step string, settled error) error {
	if settled == nil {
		return err
	}
	return errors.Join(err, fmt.Errorf("%s the lease: %w", step, settled))
}

// reserveForWork reserves, and leaves nothing behind if the caller gives up meanwhile, or
// if all repetitions are used up. In the latter case a key of the caller's own is left as
// it is: another process may be at work under it, and the next Do with it goes on there.
func (c *Client) reserveForWork(ctx context.Context, r Request) (*Lease, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	request := reserveRequest(r)
	answer, err := repeat(ctx, c, c.service.Reserve, request)
	if err != nil {
		if ctx.Err() != nil || r.RequestKey == "" && undecided(err) {
			// The request may have been carried out. Its repetition tells the lease's ID.
			cleaning, cancel := context.WithTimeout(context.WithoutCancel(ctx), abandonTimeout)
			defer cancel()
			if answer, again := try(cleaning, c, c.service.Reserve, request); again == nil {
				_, released := c.Release(cleaning, r.Bucket, answer.GetLease().GetId())
				err = join(err, "release", released)
			}
		}
		return nil, err
	}
	lease, err := readLease(r.Bucket, answer.GetLease())
	if err != nil {
		return nil, err
	}
	if lease.State != Reserved {
		return nil, &Error{
			Code:    "lease_" + string(lease.State),
			Message: fmt.Sprintf("The request key was used before, and its lease is %s; the work was not done again.", lease.State),
			Texts:   map[string]string{"leaseId": lease.ID},
		}
	}
	return lease, nil
}

// undecided reports whether a request that failed may have been carried out all the same.
func undecided(err error) bool {
	var refused *Error
	return errors.As(err, &refused) && worthRepeating(err, refused)
}

// keepAlive extends a lease until it is stopped, also after the caller has given up, since
// work that is winding up still holds its tokens. A lease that may be of an earlier process
// may be about to end, so it is extended at once. It calls lost when the lease is so.
func (c *Client) keepAlive(ctx context.Context, lease *Lease, mayBeOld bool, lost context.CancelCauseFunc) (stop func()) {
	extending, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	every := min(max(lease.TTL/extendPart, minExtend), maxExtend)
	// One that hangs must leave time for the next.
	keeper := *c
	keeper.retry.Attempt = min(c.retry.Attempt, max(every, minExtendAttempt))
	go func() {
		defer close(done)
		for mayBeOld || sleep(extending, every) {
			mayBeOld = false
			_, err := keeper.Extend(extending, lease.Bucket, lease.ID, lease.TTL)
			for _, final := range []string{CodeLeaseExpired, CodeLeaseNotFound, CodeLeaseReleased, CodeLeaseCommitted} {
				if HasCode(err, final) {
					lost(err)
					return
				}
			}
		}
	}()
	return func() {
		cancel()
		<-done
		lost(nil)
	}
}
