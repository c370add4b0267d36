// Command golangci-lint is golangci-lint with the Kubernetes API linter
// compiled in. The linter is published as a plug-in, and a plug-in has to be
// part of the program; importing it here pins both in one go.mod, so that
// nothing is installed by hand and every machine lints alike.
package main

import (
	"os"
	"runtime"
	"runtime/debug"

	"github.com/golangci/golangci-lint/v2/pkg/commands"
	"github.com/golangci/golangci-lint/v2/pkg/exitcodes"

	_ "sigs.k8s.io/kube-api-linter" // Registers the linter named kubeapilinter.
)

func main() {
	info := commands.BuildInfo{GoVersion: runtime.Version(), Version: pinnedVersion()}
	if err := commands.Execute(info); err != nil { // Execute has printed it.
		os.Exit(exitcodes.Failure)
	}
}

// pinnedVersion is the version of golangci-lint that go.mod names.
func pinnedVersion() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	for _, dependency := range info.Deps {
		if dependency.Path == "github.com/golangci/golangci-lint/v2" {
			return dependency.Version
		}
	}
	return "unknown"
}
