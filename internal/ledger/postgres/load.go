package postgres

import (
	"errors"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/token-lease/operator/internal/ledger"
)

// maxOverdue bounds how many leases whose expiry has come a transaction looks
// through, whatever the number of its buckets; leastOverdue is what each bucket has
// of it at least.
const (
	maxOverdue   = 4_000
	leastOverdue = 100
)

// loader reads, in one pipeline, what the rules need to see of some buckets.
type loader struct {
	clock  time.Time
	views  map[string]*ledger.View
	needed needed
	// before are the buckets as they were read.
	before map[string]ledger.Bucket
	// known are the leases in the views.
	known map[string]map[ledger.Hash]bool
	// overdueLimit is how many leases of each bucket are looked through.
	overdueLimit int64
	// livePeriods are the buckets of which the ended periods are asked for.
	livePeriods map[string]bool
}

// needed are the Needs of all requests, as the columns of the statements that
// look them up: each list beside the keys of the buckets that it is about.
type needed struct {
	requestKeys                 []string
	requestHashes               [][]byte
	leaseKeys, leaseIDs         []string
	operationKeys, operationIDs []string
	raiseKeys, raiseUIDs        []string
	grantKeys                   []string
	grants                      []ledger.GrantKey
	approvalKeys                []string
	approvals                   []ledger.ApprovalKey
	oldestKeys                  []string
	oldest                      []int64
}

func (n *needed) add(key string, needs ledger.Needs) {
	add := func(keys, values *[]string, more []string) {
		for _, value := range more {
			*keys = append(*keys, key)
			*values = append(*values, value)
		}
	}
	add(&n.leaseKeys, &n.leaseIDs, needs.LeaseIDs)
	for _, hash := range needs.RequestHashes {
		n.requestKeys = append(n.requestKeys, key)
		n.requestHashes = append(n.requestHashes, hash[:])
	}
	add(&n.operationKeys, &n.operationIDs, needs.OperationIDs)
	add(&n.raiseKeys, &n.raiseUIDs, needs.RaiseUIDs)
	for _, grant := range needs.Grants {
		n.grantKeys = append(n.grantKeys, key)
		n.grants = append(n.grants, grant)
	}
	if needs.Oldest > 0 {
		n.oldestKeys, n.oldest = append(n.oldestKeys, key), append(n.oldest, int64(needs.Oldest))
	}
	for _, approval := range needs.Approvals {
		n.approvalKeys = append(n.approvalKeys, key)
		n.approvals = append(n.approvals, approval)
	}
}

func newLoader(groups []*group) *loader {
	l := &loader{views: map[string]*ledger.View{}, before: map[string]ledger.Bucket{}, known: map[string]map[ledger.Hash]bool{}, livePeriods: map[string]bool{}}
	for _, g := range groups {
		l.view(g.key)
		for _, c := range g.calls {
			for _, needs := range c.needs {
				l.needed.add(g.key, needs)
				if needs.LivePeriods {
					l.livePeriods[g.key] = true
				}
			}
		}
	}
	return l
}

func (l *loader) view(key string) *ledger.View {
	view := l.views[key]
	if view == nil {
		view = &ledger.View{Key: key, Approvals: map[ledger.ApprovalKey]string{}}
		l.views[key] = view
	}
	return view
}

func (l *loader) keys() []string {
	keys := make([]string, 0, len(l.views))
	for key := range l.views {
		keys = append(keys, key)
	}
	return keys
}

// missing are the buckets of groups without a row.
func (l *loader) missing(groups []*group) []string {
	var keys []string
	for _, g := range groups {
		if l.view(g.key).Bucket == nil {
			keys = append(keys, g.key)
		}
	}
	return keys
}

// each calls read for every row of a queued statement.
func each(query *pgx.QueuedQuery, read func(pgx.Rows) error) {
	query.Query(func(rows pgx.Rows) error {
		defer rows.Close()
		for rows.Next() {
			if err := read(rows); err != nil {
				return err
			}
		}
		return rows.Err()
	})
}

func (l *loader) queueLock(batch *pgx.Batch, statement string) {
	each(batch.Queue(statement, l.keys()), l.readBucket)
}

func (l *loader) queueLockDue(batch *pgx.Batch, request ledger.SweepRequest) {
	setAside := request.SetAside
	if setAside == nil {
		setAside = []string{}
	}
	each(batch.Queue(lockDueBuckets, setAside, request.Limit), l.readBucket)
}

func (l *loader) readBucket(rows pgx.Rows) error {
	bucket, err := scanBucket(rows)
	if err == nil {
		l.view(bucket.Key).Bucket = bucket
		l.before[bucket.Key] = *bucket
	}
	return err
}

// queueReads queues the clock and the rows of the locked buckets.
func (l *loader) queueReads(batch *pgx.Batch) {
	keys := l.keys()
	l.overdueLimit = int64(max(leastOverdue, maxOverdue/max(1, len(keys))))
	each(batch.Queue(clockAndOverdueLeases, keys, l.overdueLimit), l.readOverdue)
	each(batch.Queue(liveRaises, keys), l.readLiveRaise)
	n := &l.needed
	if len(n.leaseIDs) > 0 {
		each(batch.Queue(importedLeases, n.leaseKeys, n.leaseIDs), l.readLease)
	}
	if len(n.requestHashes) > 0 {
		each(batch.Queue(leasesByRequest, n.requestKeys, n.requestHashes), l.readLease)
	}
	l.queueOldest(batch)
	if len(n.raiseUIDs) > 0 {
		each(batch.Queue(raisesByUID, n.raiseKeys, n.raiseUIDs), l.readRaise)
	}
	if len(n.grants) > 0 {
		each(batch.Queue(raisesByGrant, n.grantKeys,
			column(n.grants, func(g ledger.GrantKey) string { return g.Cluster }),
			column(n.grants, func(g ledger.GrantKey) string { return g.Namespace }),
			column(n.grants, func(g ledger.GrantKey) string { return g.Name }),
			column(n.grants, func(g ledger.GrantKey) string { return g.ApprovalID }),
			column(n.grants, func(g ledger.GrantKey) string { return g.GrantHash })), l.readRaise)
	}
	if len(n.operationIDs) > 0 {
		each(batch.Queue(neededOperations, n.operationKeys, n.operationIDs), l.readOperation)
	}
	if len(n.approvals) > 0 {
		key := func(k ledger.ApprovalKey) ledger.ApprovalKey { return k }
		each(batch.Queue(neededApprovals, approvalKeys(n.approvals, key)...), l.readApproval)
	}
}

// errRowAppeared ends a transaction that did not find a bucket which exists now.
var errRowAppeared = errors.New("a bucket was opened in the meantime")

// queueHistories queues what remains known of the buckets that have no row.
func (l *loader) queueHistories(batch *pgx.Batch, missing []string) {
	each(batch.Queue(histories, missing, lifeCycleEvents), func(rows pgx.Rows) error {
		var key string
		var appeared bool
		var h ledger.History
		err := rows.Scan(&key, &appeared, &h.LastSequence, into(&h.LastEvent),
			into(&h.Cluster), into(&h.Namespace), into(&h.OwnerName))
		if err != nil {
			return err
		}
		if appeared {
			return errRowAppeared
		}
		l.view(key).History = h
		return nil
	})
}

func (l *loader) readOverdue(rows pgx.Rows) error {
	var number int64
	var row leaseRow
	targets := append([]any{&number}, row.targets()...)
	none := rows.RawValues()[1] == nil
	if none {
		clear(targets)
	}
	if err := rows.Scan(append([]any{instant{&l.clock}}, targets...)...); err != nil || none {
		return err
	}
	lease := row.value()
	view := l.view(lease.BucketKey)
	if number >= l.overdueLimit {
		view.OverdueThrough = lease.ExpiresAt
	}
	if lease.State == ledger.LeaseReserved {
		l.addLease(lease)
	}
	return nil
}

// addLease adds a lease to its view, unless that has it already.
func (l *loader) addLease(lease *ledger.Lease) {
	known := l.known[lease.BucketKey]
	if known == nil {
		known = map[ledger.Hash]bool{}
		l.known[lease.BucketKey] = known
	}
	if !known[lease.RequestHash] {
		known[lease.RequestHash] = true
		view := l.view(lease.BucketKey)
		view.Leases = append(view.Leases, lease)
	}
}

// piled reports whether more leases of a bucket may be overdue than its view holds.
func piled(view *ledger.View) bool { return !view.OverdueThrough.IsZero() }

func (l *loader) readLease(rows pgx.Rows) error {
	lease, err := scanLease(rows)
	if err != nil {
		return err
	}
	l.addLease(lease)
	return nil
}

func (l *loader) readLiveRaise(rows pgx.Rows) error {
	var spentBy string
	raise := &ledger.Raise{}
	if err := rows.Scan(append(raiseTargets(raise), into(&spentBy))...); err != nil {
		return err
	}
	view := l.addRaise(raise)
	if spentBy != "" {
		view.Approvals[ledger.ApprovalKey{
			Cluster: raise.Cluster, Namespace: raise.Namespace,
			TenantID: raise.TenantID, ApprovalID: raise.ApprovalID,
		}] = spentBy
	}
	return nil
}

func (l *loader) readRaise(rows pgx.Rows) error {
	raise, err := scanRaise(rows)
	if err == nil {
		l.addRaise(raise)
	}
	return err
}

func (l *loader) addRaise(raise *ledger.Raise) *ledger.View {
	view := l.view(raise.BucketKey)
	if !slices.ContainsFunc(view.Raises, func(other *ledger.Raise) bool { return other.ID == raise.ID }) {
		view.Raises = append(view.Raises, raise)
	}
	return view
}

func (l *loader) readOperation(rows pgx.Rows) error {
	operation, err := scanOperation(rows)
	if err != nil {
		return err
	}
	view := l.view(operation.BucketKey)
	if !slices.ContainsFunc(view.Operations, func(o ledger.OperationRecord) bool { return o.ID == operation.ID }) {
		view.Operations = append(view.Operations, operation)
	}
	return nil
}

// readApproval puts an approval into the views of all buckets that asked for it.
func (l *loader) readApproval(rows pgx.Rows) error {
	var key ledger.ApprovalKey
	var spentBy string
	if err := rows.Scan(&key.Cluster, &key.Namespace, &key.TenantID, &key.ApprovalID, &spentBy); err != nil {
		return err
	}
	for i, asked := range l.needed.approvals {
		if asked == key {
			l.view(l.needed.approvalKeys[i]).Approvals[key] = spentBy
		}
	}
	return nil
}
