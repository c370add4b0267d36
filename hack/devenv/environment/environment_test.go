package environment_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/jackc/pgx/v5"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/token-lease/operator/hack/devenv/environment"
	"github.com/token-lease/operator/hack/devenv/postgres"
	"github.com/token-lease/operator/hack/devenv/postgres/postgrestest"
	"github.com/token-lease/operator/hack/devenv/process"
)

const stopTimeout = time.Minute

func TestMain(m *testing.M) {
	log.SetLogger(logr.Discard())
	os.Exit(postgrestest.Main(m))
}

// Goal: what Start returns is ready for the manager, which gets the rights of its
// ServiceAccount only, and Stop leaves nothing behind, not even on a server that
// goes on. Method: a given server, looked at from outside.
func TestEnvironment(t *testing.T) {
	server := postgrestest.Server(t)
	e, err := environment.Start(t.Context(), environment.Options{
		Postgres: postgres.Options{URL: server.URL("postgres")}, Log: t.Output(),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stop(t, e) })

	conn, err := pgx.Connect(t.Context(), e.DatabaseURL)
	if err != nil {
		t.Fatal(err)
	}
	var migrated bool
	err = conn.QueryRow(t.Context(),
		"SELECT count(*) > 0 FROM pg_tables WHERE schemaname NOT IN ('pg_catalog', 'information_schema')").Scan(&migrated)
	if err != nil || !migrated {
		t.Errorf("the database holds tables: %v, %v", migrated, err)
	}
	var samples bytes.Buffer
	if err := e.Kubectl(t.Context(), &samples, "get", "tokenbuckets", "--all-namespaces"); err != nil {
		t.Error(err)
	}
	for question, want := range map[string]string{
		"patch tokenbuckets.budget.tokenlease.dev --subresource=status": "yes",
		"delete tokenbuckets.budget.tokenlease.dev":                     "no",
	} {
		if got := managerMay(t, e, question); got != want {
			t.Errorf("may the manager %s: %s, want %s", question, got, want)
		}
	}

	_ = conn.Close(t.Context())
	stop(t, e)
	stop(t, e)
	if _, err := os.Stat(e.Dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is still there: %v", e.Dir, err)
	}
	if conn, err := pgx.Connect(t.Context(), e.DatabaseURL); err == nil {
		_ = conn.Close(t.Context())
		t.Error("the database is still there")
	}
}

func stop(t *testing.T, e *environment.Environment) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	if err := e.Stop(ctx); err != nil {
		t.Error(err)
	}
}

func managerMay(t *testing.T, e *environment.Environment, question string) string {
	t.Helper()
	args := append([]string{"auth", "can-i", "--all-namespaces"}, strings.Fields(question)...)
	cmd := exec.CommandContext(t.Context(), e.ControlPlane.Kubectl(), args...)
	cmd.Env = append(process.Environment(), "KUBECONFIG="+e.ManagerKubeconfig())
	answer, _ := cmd.Output() // "no" exits with 1
	return strings.TrimSpace(string(answer))
}
