package controlplane

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// fakePrograms makes a directory with programs that do nothing.
func fakePrograms(t *testing.T, names ...string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "with space")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// Goal: a complete directory is used as it is, one without the servers is
// refused by name, and one that lacks only what setup-envtest does not bring is
// filled up with programs from elsewhere.
func TestAssetsFromAGivenDirectory(t *testing.T) {
	t.Setenv(CacheVariable, t.TempDir())

	complete := fakePrograms(t, etcd, apiServer, controllerMgr, kubectl)
	t.Setenv(AssetsVariable, complete)
	if dir, err := Assets(t.Context(), nil); err != nil || dir != complete {
		t.Fatalf("got %q, %v, want %q", dir, err, complete)
	}

	t.Setenv(AssetsVariable, fakePrograms(t, apiServer, kubectl))
	if _, err := Assets(t.Context(), nil); err == nil || !strings.Contains(err.Error(), "no program etcd") {
		t.Fatalf("got %v", err)
	}

	given := fakePrograms(t, etcd, apiServer)
	t.Setenv(AssetsVariable, given)
	says(t, filepath.Join(given, apiServer), "Kubernetes v1.40.2")
	onPath := fakePrograms(t, kubectl)
	says(t, filepath.Join(onPath, kubectl), `{"clientVersion": {"gitVersion": "v1.39.0-dispatcher"}}`)
	t.Setenv("PATH", onPath+string(os.PathListSeparator)+os.Getenv("PATH"))
	putBuilt(t, controllerMgr)
	for range 2 { // the second time the links are there
		dir, err := Assets(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range programList {
			if !isExecutable(filepath.Join(dir, p.name)) {
				t.Errorf("%s is missing", p.name)
			}
		}
		if target, err := os.Readlink(filepath.Join(dir, etcd)); err != nil || filepath.Dir(target) != given {
			t.Errorf("etcd is %q, %v, not the given one", target, err)
		}
		if target, err := os.Readlink(filepath.Join(dir, kubectl)); err != nil || filepath.Dir(target) != onPath {
			t.Errorf("kubectl is %q, %v, not the one on the PATH", target, err)
		}
	}
}

// says makes a program print a text.
func says(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte("#!/bin/sh\ncat <<'END'\n"+text+"\nEND\n"), 0o755); err != nil {
		t.Fatal(err)
	}
}

// Goal: a kubectl on the PATH is used only when Kubernetes supports it with the
// server: what is too old, too new or says nothing is passed over.
func TestClientThatDoesNotFit(t *testing.T) {
	for _, test := range []struct {
		client string
		used   bool
	}{
		{`{"clientVersion": {"gitVersion": "v1.32.4-dispatcher"}}`, false},
		{`{"clientVersion": {"gitVersion": "v1.35.9"}}`, false},
		{`{"clientVersion": {"gitVersion": "v1.36.0"}}`, true},
		{`{"clientVersion": {"gitVersion": "v1.37.1+k3s1"}}`, true},
		{`{"clientVersion": {"gitVersion": "v1.38.0-alpha.1"}}`, true},
		{`{"clientVersion": {"gitVersion": "v1.39.0"}}`, false},
		{`{"clientVersion": {"gitVersion": "v2.37.0"}}`, false},
		{`{}`, false},
		{`no version at all`, false},
	} {
		onPath, servers := fakePrograms(t, kubectl), fakePrograms(t, apiServer)
		says(t, filepath.Join(onPath, kubectl), test.client)
		says(t, filepath.Join(servers, apiServer), "Kubernetes v1.37.0")
		t.Setenv("PATH", onPath+string(os.PathListSeparator)+os.Getenv("PATH"))
		b := builder{module: module(t), out: t.TempDir(), log: t.Output()}
		found, err := b.fittingOnPath(t.Context(), kubectl, filepath.Join(servers, apiServer))
		if err != nil || (found != "") != test.used {
			t.Errorf("%s: got %q, %v", test.client, found, err)
		}
	}
}

// Goal: a caller with too little time for a build is told what to do.
func TestBuildInTooShortATime(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	err := builder{module: module(t), out: t.TempDir(), log: t.Output()}.build(ctx, programList[:1])
	if !errors.Is(err, errBuildTime) || !strings.Contains(err.Error(), "go run ./hack/devenv assets") {
		t.Errorf("got %v", err)
	}
}

// putBuilt puts a program where an earlier build would have left it.
func putBuilt(t *testing.T, name string) {
	t.Helper()
	cache, err := cacheDir()
	if err != nil {
		t.Fatal(err)
	}
	out, err := buildDir(cache, module(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(out, name), []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
}

func module(t *testing.T) string {
	t.Helper()
	path, err := filepath.Abs(filepath.Join("..", "..", "controlplane"))
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// Goal: a program is built from the pinned module, once, also when two ask for
// it at the same time, and a build that fails says why and leaves nothing.
// Method: build etcd, the smallest, into an empty directory.
func TestBuild(t *testing.T) {
	out := filepath.Join(t.TempDir(), "with space")
	var logs [2]bytes.Buffer
	results := make(chan error, len(logs))
	for i := range logs {
		b := builder{module: module(t), out: out, log: &logs[i]}
		go func() { results <- b.build(t.Context(), programList[:1]) }()
	}
	for range logs {
		if err := <-results; err != nil {
			t.Fatal(err)
		}
	}
	text := logs[0].String() + logs[1].String()
	if built := strings.Count(text, "built etcd"); built != 1 {
		t.Errorf("etcd was built %d times, want once:\n%s", built, text)
	}
	version, err := exec.CommandContext(t.Context(), filepath.Join(out, etcd), "--version").Output()
	if err != nil || !bytes.Contains(version, []byte("etcd Version: 3.")) {
		t.Errorf("the program says %q, %v", version, err)
	}

	broken := builder{module: module(t), out: out, log: t.Output()}
	err = broken.build(t.Context(), []program{{name: "nothing", packagePath: "k8s.io/kubernetes/cmd/nothing"}})
	if err == nil || !strings.Contains(err.Error(), "k8s.io/kubernetes/cmd/nothing") {
		t.Errorf("got %v", err)
	}
	if isExecutable(filepath.Join(out, "nothing")) {
		t.Error("a failed build left a program")
	}
}

// Goal: the programs report the version of the module they were built from.
func TestLinkerFlags(t *testing.T) {
	flags, err := builder{module: module(t), log: t.Output()}.linkerFlags(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	served, err := exec.CommandContext(t.Context(), filepath.Join(plane.assets, apiServer), "--version").Output()
	if err != nil {
		t.Fatal(err)
	}
	version := strings.TrimPrefix(strings.TrimSpace(string(served)), "Kubernetes ")
	if os.Getenv(AssetsVariable) == "" && !strings.Contains(flags, "gitVersion="+version+" ") {
		t.Errorf("kube-apiserver says %q, the flags are %q", version, flags)
	}
}
