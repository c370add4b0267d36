package e2e_test

import (
	"strings"
	"testing"
)

// Goal: what is wrong is refused at kubectl apply, with a message that says what
// to change. The exhaustive table is beside the types; this shows what a person
// reads.
func TestBadManifests(t *testing.T) {
	t.Parallel()
	in := &installation{cluster: world.cluster, namespace: world.cluster.newNamespace(t)}
	const startsAt, expiresAt = "2030-01-01T10:00:00Z", "2030-01-01T11:00:00Z"
	for _, c := range []struct {
		name, file string
		fields     []string
		wants      []string
	}{
		{"a negative limit", "tokenbucket.yaml", []string{"limit", "-1"}, []string{"spec.limit", "greater than or equal to 0"}},
		{"a limit above 2^53-1", "tokenbucket.yaml", []string{"limit", "9007199254740992"}, []string{"spec.limit", "less than or equal to"}},
		{"a limit in words", "tokenbucket.yaml", []string{"limit", "100k"}, []string{"spec.limit", "integer"}},
		{"a raise mode that there is not", "tokenbucket.yaml", []string{"mode", "Sometimes"}, []string{"spec.raises.mode", `"Enforce"`, `"ObserveOnly"`}},
		{"a raise that lowers", "temporarylimitlease.yaml", []string{"temporaryLimit", "100000"}, []string{"spec.temporaryLimit", "must be above normalLimit"}},
		{"an expiry before the start", "temporarylimitlease.yaml", []string{"startsAt", expiresAt, "expiresAt", startsAt}, []string{"spec.expiresAt", "must be after startsAt"}},
		{"an expiry without offset", "temporarylimitlease.yaml", []string{"expiresAt", `"2030-01-01T11:00:00"`}, []string{"spec.expiresAt"}},
		{"no approval", "temporarylimitlease.yaml", []string{"approvalID", `""`}, []string{"spec.approvalID"}},
		{"a field that there is not", "temporarylimitlease.yaml", []string{"purpose", "x\n  until: 2030"}, []string{`unknown field "spec.until"`}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			output, err := in.kubectl(t.Context(), in.sample(t, c.file, c.fields...), "apply")
			if err == nil {
				t.Fatalf("accepted: %s", output)
			}
			for _, want := range c.wants {
				if !strings.Contains(output, want) {
					t.Errorf("the message does not contain %q: %s", want, output)
				}
			}
		})
	}

	t.Run("a changed grant", func(t *testing.T) {
		t.Parallel()
		in.mustKubectl(t, in.sample(t, "temporarylimitlease.yaml", "startsAt", startsAt, "expiresAt", expiresAt), "apply")
		for _, c := range []struct {
			fields []string
			want   string
		}{
			{[]string{"startsAt", startsAt, "expiresAt", "2030-01-01T12:00:00Z"}, "may only be moved earlier"},
			{[]string{"startsAt", startsAt, "expiresAt", expiresAt, "temporaryLimit", "310000"}, "temporaryLimit is immutable: create another"},
			{[]string{"startsAt", startsAt, "expiresAt", expiresAt, "approvalID", "CHG-2"}, "approvalID is immutable: create another"},
		} {
			output, err := in.kubectl(t.Context(), in.sample(t, "temporarylimitlease.yaml", c.fields...), "apply")
			if err == nil || !strings.Contains(output, c.want) {
				t.Errorf("%v: %v %s, want a refusal with %q", c.fields, err, output, c.want)
			}
		}
	})
}
