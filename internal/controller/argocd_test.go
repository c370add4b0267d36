package controller

import (
	"os"
	"testing"

	lua "github.com/yuin/gopher-lua"
	"sigs.k8s.io/cli-utils/pkg/kstatus/status"
	"sigs.k8s.io/yaml"
)

const argoCDHealth = "../../docs/gitops/argocd/health.yaml"

// healthScripts are the scripts that are shipped for Argo CD, by kind.
func healthScripts(t *testing.T) map[string]string {
	t.Helper()
	content, err := os.ReadFile(argoCDHealth)
	if err != nil {
		t.Fatal(err)
	}
	var patch struct {
		Data map[string]string `json:"data"`
	}
	if err := yaml.UnmarshalStrict(content, &patch); err != nil {
		t.Fatal(err)
	}
	scripts := map[string]string{}
	for _, kind := range []string{"TokenBucket", "TemporaryLimitLease"} {
		script, found := patch.Data["resource.customizations.health.budget.tokenlease.dev_"+kind]
		if !found {
			t.Fatalf("no script for %s", kind)
		}
		scripts[kind] = script
	}
	if len(patch.Data) != len(scripts) {
		t.Errorf("%d keys for %d kinds", len(patch.Data), len(scripts))
	}
	return scripts
}

// wantHealth checks that Argo CD's judgement of an object is that of kstatus.
func wantHealth(t *testing.T, script string, object map[string]any, judged status.Status) {
	t.Helper()
	want := map[status.Status]string{
		status.CurrentStatus: "Healthy", status.InProgressStatus: "Progressing",
		status.TerminatingStatus: "Progressing", status.FailedStatus: "Degraded",
	}[judged]
	got, message := healthOf(t, script, object)
	if got != want || message == "" {
		t.Errorf("Argo CD says %q (%s), want %s as kstatus says %s", got, message, want, judged)
	}
}

// healthOf runs a script as Argo CD does: with the object as `obj`, the basic
// functions and nothing else.
func healthOf(t *testing.T, script string, object map[string]any) (health, message string) {
	t.Helper()
	state := lua.NewState(lua.Options{SkipOpenLibs: true})
	defer state.Close()
	state.SetContext(t.Context())
	state.Push(state.NewFunction(lua.OpenBase))
	state.Call(0, 0)
	state.SetGlobal("obj", luaValue(state, object))
	if err := state.DoString(script); err != nil {
		t.Fatal(err)
	}
	answer, ok := state.Get(-1).(*lua.LTable)
	if !ok {
		t.Fatalf("the script returns %s", state.Get(-1).Type())
	}
	return answer.RawGetString("status").String(), answer.RawGetString("message").String()
}

func luaValue(state *lua.LState, value any) lua.LValue {
	switch v := value.(type) {
	case map[string]any:
		table := state.NewTable()
		for key, field := range v {
			table.RawSetString(key, luaValue(state, field))
		}
		return table
	case []any:
		table := state.NewTable()
		for _, item := range v {
			table.Append(luaValue(state, item))
		}
		return table
	case string:
		return lua.LString(v)
	case bool:
		return lua.LBool(v)
	case int64:
		return lua.LNumber(v)
	case float64:
		return lua.LNumber(v)
	default:
		return lua.LNil
	}
}

// Goal: Argo CD takes an object for healthy only once the operator has spoken, and
// tells what a person has to decide although it blocks nothing. The states of both
// kinds, one by one, are compared where kstatus is.
func TestArgoCDHealth(t *testing.T) {
	condition := func(kind, value, message string) any {
		return map[string]any{"type": kind, "status": value, "message": message}
	}
	object := func(generation int64, conditions ...any) map[string]any {
		return map[string]any{
			"metadata": map[string]any{"generation": int64(2)},
			"status":   map[string]any{"observedGeneration": generation, "conditions": conditions},
		}
	}
	ready := condition("Ready", "True", "in the ledger")
	for _, c := range []struct {
		name            string
		object          map[string]any
		health, message string
	}{
		{"no status", map[string]any{"metadata": map[string]any{"generation": int64(1)}}, "Progressing", "Waiting for the operator."},
		{"no conditions", object(2), "Progressing", "Waiting for the operator."},
		{"an old generation", object(1, ready), "Progressing", "Waiting for the operator."},
		{"ready", object(2, ready), "Healthy", "in the ledger"},
		{"to be reviewed", object(2, ready, condition("ReviewRequired", "True", "decide")), "Healthy", "decide"},
		{"another's limit", object(2, ready, condition("LimitInSync", "False", "theirs")), "Healthy", "theirs"},
		{"unknown", object(2, condition("Ready", "Unknown", "no answer")), "Progressing", "no answer"},
		{"stalled", object(2, condition("Ready", "False", "no"), condition("Stalled", "True", "change it")), "Degraded", "change it"},
	} {
		for kind, script := range healthScripts(t) {
			if health, message := healthOf(t, script, c.object); health != c.health || message != c.message {
				t.Errorf("%s, %s: %s (%s), want %s (%s)", kind, c.name, health, message, c.health, c.message)
			}
		}
	}
}
