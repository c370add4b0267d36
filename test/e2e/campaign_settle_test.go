package e2e_test

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/token-lease/operator/api/v1alpha1"
)

// badLog is what no manager ever writes.
var badLog = regexp.MustCompile(`(?m)^.*(panic:|"panic"|DATA RACE|fatal error:|state_corrupt|store_contract_violation).*$`)

// settle waits until everything has come to rest and compares what there is.
func (c *campaign) settle() {
	c.t.Helper()
	c.book.resolve(call(c.t), c.in.db.ledger)
	c.waitWindows()
	c.giveUpVanished()
	c.waitAgreement()
	c.checkMeanwhile()
	c.compareBook()
	c.checkHands()
	c.checkDeclared()

	c.tally()

	c.note("the namespace is deleted")
	if err := c.in.api.Delete(call(c.t), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: c.in.namespace}}); err != nil {
		c.t.Fatal(err)
	}
	c.in.waitGone(c.t, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: c.in.namespace}})
	c.in.checkInvariants(c.t)
	for m := range campaignManagers {
		c.died(m)
		c.checkLog(m)
	}
}

// tally notes what happened, so that a campaign in which nothing did is noticed.
func (c *campaign) tally() {
	c.t.Helper()
	for _, r := range c.in.db.rows(c.t, `
		SELECT event || coalesce('/' || reason, '') AS what, count(*) AS times FROM tokenlease.audit GROUP BY 1
		UNION ALL SELECT 'lease ' || state || CASE WHEN raise_id IS NULL THEN '' ELSE ' under a raise' END, count(*) FROM tokenlease.leases GROUP BY 1
		ORDER BY 1`) {
		c.note("%s times %s", r.text("times"), r.text("what"))
	}
}

// waitWindows waits until no raise can start any more: neither one that the ledger
// knows nor one that waits as an object for its bucket.
func (c *campaign) waitWindows() {
	c.t.Helper()
	last := c.in.db.now(c.t)
	for _, r := range c.in.db.rows(c.t, "SELECT max(expires_at) AS at FROM tokenlease.raises HAVING count(*) > 0") {
		if at := r.instant(c.t, "at"); at.After(last) {
			last = at
		}
	}
	var leases v1alpha1.TemporaryLimitLeaseList
	if err := c.in.api.List(call(c.t), &leases, client.InNamespace(c.in.namespace)); err != nil {
		c.t.Fatal(err)
	}
	for _, l := range leases.Items {
		if l.Spec.ExpiresAt.After(last) {
			last = l.Spec.ExpiresAt.Time
		}
	}
	c.in.db.waitPast(c.t, last)
}

// giveUpVanished does what a person does about a bucket whose row somebody deleted:
// it stays stalled until its TokenBucket is deleted.
func (c *campaign) giveUpVanished() {
	c.t.Helper()
	for b := range campaignBuckets {
		if !c.book.isExcused(c.bucketKey(b)) || c.in.db.limit(c.t, c.bucketKey(b)) >= 0 {
			continue
		}
		c.note("bucket %d has no row: deleting its object: %s", b, outcome(c.deleteBucket(b)))
	}
}

// waitAgreement waits until objects and ledger agree.
func (c *campaign) waitAgreement() {
	c.t.Helper()
	deadline := time.Now().Add(waitBound)
	for {
		differences := c.differences()
		if len(differences) == 0 {
			return
		}
		if time.Now().After(deadline) {
			for _, d := range differences {
				c.fault("after %s: %s", waitBound, d)
			}
			c.t.FailNow()
		}
		time.Sleep(waitStep) // the pace of looking; the bound stands above
	}
}

// differences are all ways in which things are not at rest.
func (c *campaign) differences() (found []string) {
	differ := func(format string, args ...any) { found = append(found, fmt.Sprintf(format, args...)) }
	var buckets v1alpha1.TokenBucketList
	var leases v1alpha1.TemporaryLimitLeaseList
	for _, list := range []client.ObjectList{&buckets, &leases} {
		if err := c.in.api.List(call(c.t), list, client.InNamespace(c.in.namespace)); err != nil {
			differ("list: %v", err)
			return found
		}
	}
	rows := map[string]row{}
	for _, r := range c.in.db.rows(c.t, "SELECT * FROM tokenlease.buckets") {
		rows[r.text("bucket_key")] = r
	}
	raises := map[string]row{}
	for _, r := range c.in.db.rows(c.t, "SELECT * FROM tokenlease.raises") {
		raises[r.text("current_uid")] = r
		if state := r.text("state"); state != "restored" && state != "failed" {
			differ("raise %s of %s is still %s although its window is over: %v", r.text("raise_id"), r.text("name"), state, r)
		}
	}
	declared := map[string]bool{}
	for i := range buckets.Items {
		b := &buckets.Items[i]
		declared[c.in.key(b.Name)] = true
		if d := bucketDiffers(b, rows[c.in.key(b.Name)]); d != "" {
			differ("bucket %s: %s; status %s; row %v", b.Name, d, asJSON(b.Status), rows[c.in.key(b.Name)])
		}
	}
	for key, r := range rows {
		if !declared[key] && r.text("closed_at") == "" {
			differ("the bucket %s is open, and nobody declares it: %v", key, r)
		}
	}
	for i := range leases.Items {
		l := &leases.Items[i]
		if d := leaseDiffers(l, raises[string(l.UID)], rows[c.in.key(l.Spec.BucketRef.Name)]); d != "" {
			differ("lease %s: %s; finalizers %v; status %s; raise %v", l.Name, d, l.Finalizers, asJSON(l.Status), raises[string(l.UID)])
		}
	}
	return found
}

// is reports whether a condition is about the present generation and so.
func is(conditions []metav1.Condition, generation int64, w want) bool {
	return met(conditions, generation, []want{w})
}

// bucketDiffers tells how a TokenBucket differs from its row.
func bucketDiffers(b *v1alpha1.TokenBucket, r row) string {
	s := b.Status
	figure := func(p *int64) string { return fmt.Sprint(ptr.Deref(p, -1)) }
	condition := func(kind string, value bool) bool {
		w := isFalse(kind)
		if value {
			w = isTrue(kind)
		}
		return is(s.Conditions, b.Generation, w)
	}
	switch {
	case !b.DeletionTimestamp.IsZero():
		return "it is still being deleted"
	case r == nil:
		return "it has no row"
	case r.text("owner_uid") != string(b.UID) || r.text("closed_at") != "":
		return "the row is not this object's, or closed"
	case s.ObservedGeneration != b.Generation || !condition(v1alpha1.ConditionReady, true):
		return "it is not ready"
	case r.text("declared_limit_tokens") != fmt.Sprint(b.Spec.Limit) || figure(s.DeclaredLimit) != fmt.Sprint(b.Spec.Limit):
		return "the declared limit is not the spec's"
	case figure(s.Limit) != r.text("limit_tokens"):
		return "the limit shown is another one"
	case figure(s.UsedTokens) != r.text("used_tokens") || figure(s.ReservedTokens) != r.text("reserved_tokens"):
		return "the usage shown is another one"
	case !condition(v1alpha1.ConditionRaised, false):
		return "it is shown as raised"
	case !condition(v1alpha1.ConditionLimitInSync, r.text("limit_tokens") == fmt.Sprint(b.Spec.Limit)):
		return "LimitInSync is wrong"
	case !condition(v1alpha1.ConditionOverLimit, ptr.Deref(s.UsedTokens, 0)+ptr.Deref(s.ReservedTokens, 0) > ptr.Deref(s.Limit, 0)):
		return "OverLimit is wrong"
	}
	return ""
}

// leaseDiffers tells how a TemporaryLimitLease differs from its raise. Without one
// it must be waiting for a bucket that does not take it.
func leaseDiffers(l *v1alpha1.TemporaryLimitLease, raise, bucket row) string {
	s := l.Status
	switch {
	case !l.DeletionTimestamp.IsZero():
		return "it is still being deleted"
	case raise == nil && bucket != nil && bucket.text("closed_at") == "":
		return "it has no raise, although its bucket is there"
	case s.ObservedGeneration != l.Generation:
		return "the status is about another generation"
	case raise == nil && is(s.Conditions, l.Generation, isFalse(v1alpha1.ConditionEnded)):
		return ""
	case raise == nil:
		return "it shows an end and has no raise"
	case string(s.State) != strings.ToUpper(raise.text("state")[:1])+raise.text("state")[1:]:
		return "the state shown is another one"
	case !is(s.Conditions, l.Generation, isTrue(v1alpha1.ConditionEnded)) || !is(s.Conditions, l.Generation, isFalse(v1alpha1.ConditionActive)):
		return "its end is not shown"
	case meta.IsStatusConditionTrue(s.Conditions, v1alpha1.ConditionReviewRequired) != (raise.text("review_required") == "true"):
		return "ReviewRequired is wrong"
	case len(l.Finalizers) > 0:
		return "it is held although it is over"
	}
	return ""
}

func (c *campaign) compareBook() {
	c.t.Helper()
	c.book.compare(
		c.in.db.rows(c.t, "SELECT * FROM tokenlease.leases"),
		c.in.db.rows(c.t, "SELECT bucket_key, created_at FROM tokenlease.buckets"))
}

// checkHands checks that each acknowledged decision of another hand is in the
// audit. That none was overwritten by a restore is an invariant.
func (c *campaign) checkHands() {
	c.t.Helper()
	for _, w := range c.hands {
		found := c.in.db.rows(c.t, `
			SELECT effective_limit_tokens FROM tokenlease.audit
			WHERE bucket_key = $1 AND effective_limit_tokens = $2 AND outcome = 'applied'
			  AND (event = 'LimitSet' AND operation_id = $3 OR event = 'LimitChangedOutsideLedger' AND sequence = $4)`,
			w.key, w.limit, w.operationID, w.sequence)
		if len(found) != 1 {
			c.fault("the acknowledged write %+v is in the audit %d times", w, len(found))
		}
	}
}

// checkDeclared checks that a declaration replaced another hand's limit only where
// a spec asked for that limit and for overwriting, or had declared the other
// hand's limit and so made it its own.
func (c *campaign) checkDeclared() {
	c.t.Helper()
	for _, r := range c.in.db.rows(c.t, limitChain+`
		SELECT c.bucket_key, c.sequence, c.prior_limit_tokens, c.effective_limit_tokens
		FROM chain AS c JOIN owners AS o USING (bucket_key, sequence)
		WHERE c.event = 'LimitDeclared' AND o.event IN ('LimitSet', 'LimitChangedOutsideLedger')`) {
		allowed := slices.ContainsFunc(c.wishes, func(w bucketWish) bool {
			return c.bucketKey(w.bucket) == r.text("bucket_key") &&
				(w.overwrite && fmt.Sprint(w.limit) == r.text("effective_limit_tokens") || fmt.Sprint(w.limit) == r.text("prior_limit_tokens"))
		})
		if !allowed {
			c.fault("promise 2: a declaration replaced another hand's limit: %v", r)
		}
	}
}

// checkLog looks for what must not happen inside a manager.
func (c *campaign) checkLog(m int) {
	c.t.Helper()
	content, err := os.ReadFile(c.managers[m].logFile)
	if err != nil {
		c.t.Fatal(err)
	}
	for _, line := range badLog.FindAllString(string(content), maxFaultsShown) {
		c.fault("the log of manager %d: %s", m, line)
	}
}
