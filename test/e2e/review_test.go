package e2e_test

import (
	"slices"
	"strconv"
	"strings"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/token-lease/operator/api/v1alpha1"
)

// acknowledge writes, as a person, that the seed story's raise has been looked at.
func (p *person) acknowledge(t *testing.T, words string) error {
	t.Helper()
	body := `{"metadata": {"annotations": {"` + v1alpha1.AcknowledgedAnnotation + `": ` + strconv.Quote(words) + `}}}`
	return p.api.Patch(call(t), p.in.lease(t), client.RawPatch("application/merge-patch+json", []byte(body)))
}

// Goal: a raise that found another limit at its end asks for review until a person who
// may acknowledges it; who did stands in the audit, and neither a tenant nor a manifest
// from Git can do it or undo it.
func TestReview(t *testing.T) {
	t.Parallel()
	in := install(t)
	key := in.key(bucketName)
	m := in.start(t, "manager-a", managerOptions{})
	ada := in.person(t, "ada", "tokenlease-raiser")
	rita := in.person(t, "rita", "tokenlease-reviewer")
	in.create(t, in.bucket())
	if err := ada.api.Create(call(t), in.lease(t)); err != nil {
		t.Fatal(err)
	}
	in.waitLease(t, leaseName, active)
	in.db.setLimit(t, key, permanent)
	in.waitLease(t, leaseName, underReview)
	in.waitOpenReviews(t, m, 1)

	stage(t, "who may not")
	wantRefusal(t, "the raiser acknowledges", ada.acknowledge(t, "fine"),
		"user ada may not acknowledge", "verb review on tokenbuckets/"+bucketName, "tokenlease-reviewer")
	manifest := in.leaseManifest(t, "")
	in.waitLease(t, leaseName, underReview)
	wantRefusal(t, "the reviewer asks for a raise", rita.api.Create(call(t), in.otherLease(t, bucketName, "another")), "temporarylimitleases")

	stage(t, "who may")
	if err := rita.acknowledge(t, "limit is meant to stay, FIN-12"); err != nil {
		t.Fatal(err)
	}
	reviewed := []want{
		isTrue(v1alpha1.ConditionReady), isTrue(v1alpha1.ConditionEnded),
		isFalse(v1alpha1.ConditionReviewRequired).because(v1alpha1.ReasonAcknowledged),
	}
	in.waitLease(t, leaseName, reviewed)
	in.waitOpenReviews(t, m, 0)
	row := in.db.one(t, key, "RaiseReviewed")
	if row.text("actor") != rita.name {
		t.Errorf("acknowledged by %q, want %q", row.text("actor"), rita.name)
	}
	waitFor(t, "the event of it", func() (bool, string) {
		var reasons []string
		for _, e := range in.listEvents(t) {
			reasons = append(reasons, e.Reason)
		}
		return slices.Contains(reasons, v1alpha1.EventReviewRequired) && slices.Contains(reasons, v1alpha1.EventReviewAcknowledged), strings.Join(reasons, " ")
	})

	stage(t, "nobody undoes it")
	names := map[string]string{
		v1alpha1.RequestedByAnnotation: ada.name, v1alpha1.AcknowledgedByAnnotation: rita.name,
		v1alpha1.AcknowledgedAnnotation: "limit is meant to stay, FIN-12",
	}
	for _, args := range [][]string{{"apply"}, {"replace"}, {"apply", "--server-side", "--force-conflicts"}} {
		ada.mustKubectl(t, manifest, args...)
		in.wantNames(t, strings.Join(args, " "), names)
	}
	wantRefusal(t, "the raiser rewrites it", ada.acknowledge(t, "never mind"), "may not acknowledge")
	in.wipeStatus(t)
	in.waitLease(t, leaseName, reviewed)
	in.db.one(t, key, "RaiseReviewed")
	if got := in.db.limit(t, key); got != permanent {
		t.Errorf("the limit is %d, want %d", got, permanent)
	}
}

// waitOpenReviews waits for the figure of the metric.
func (in *installation) waitOpenReviews(t *testing.T, m *manager, want int) {
	t.Helper()
	line := "budget_lease_reviews_open " + strconv.Itoa(want)
	waitFor(t, line, func() (bool, string) {
		_, answer := m.get(t, m.metrics, "/metrics")
		return slices.Contains(strings.Split(answer, "\n"), line), "another figure"
	})
}
