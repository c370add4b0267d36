package ledger

import "time"

// Run applies requests on one bucket in their order, at one instant, and answers
// each. It is a pure function of its arguments: it reads no clock and does no
// I/O. The view is changed in place; what must be made durable is in the effects.
//
// clock is the store's clock, read after the bucket's row was locked; the
// bucket's instant is the later of it and the bucket's UpdatedAt, so time never
// runs backwards on a bucket. worker names the process, for the audit.
func Run(view *View, clock time.Time, worker string, requests []Request) ([]Result, *Effects) {
	u := newUnit(view, clock, worker)
	results := make([]Result, len(requests))
	for i, request := range requests {
		results[i] = u.serve(request)
	}
	return results, u.effects()
}
