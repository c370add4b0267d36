package controlplane

import (
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"time"

	"github.com/token-lease/operator/hack/devenv/process"
)

const (
	versionTimeout = 30 * time.Second
	// supportedSkew is how many minor versions Kubernetes lets kubectl be away from
	// the server.
	supportedSkew = 1
)

// fittingOnPath returns the client on the PATH if its version fits the server's:
// the given server's, or else the one that is built from the module. Empty means
// that there is none that fits.
func (b builder) fittingOnPath(ctx context.Context, name, server string) (string, error) {
	found, err := exec.LookPath(name)
	if err != nil {
		return "", nil //nolint:nilerr // that there is none is an answer
	}
	version := ""
	if server != "" {
		version, _ = versionOf(ctx, server, "--version")
	}
	if version == "" {
		if version, err = b.version(ctx); err != nil {
			return "", err
		}
	}
	client, err := kubectlVersion(ctx, found)
	if err != nil || !fits(client, version) {
		fmt.Fprintf(b.log, "controlplane: %s on the PATH (version %q) does not fit a server of version %s\n", name, client, version)
		return "", nil //nolint:nilerr // one that cannot tell its version is not used
	}
	return filepath.Abs(found)
}

func kubectlVersion(ctx context.Context, path string) (string, error) {
	text, err := versionOf(ctx, path, "version", "--client", "--output=json")
	if err != nil {
		return "", err
	}
	var answer struct {
		ClientVersion struct {
			GitVersion string `json:"gitVersion"`
		} `json:"clientVersion"`
	}
	if err := json.Unmarshal([]byte(text), &answer); err != nil {
		return "", err
	}
	return answer.ClientVersion.GitVersion, nil
}

func versionOf(ctx context.Context, path string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, versionTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env = process.Environment()
	text, err := cmd.Output()
	return string(text), err
}

var majorMinor = regexp.MustCompile(`\bv(\d{1,4})\.(\d{1,4})\b`)

// fits compares two texts that hold versions like v1.32.4-something.
func fits(client, server string) bool {
	c, s := majorMinor.FindStringSubmatch(client), majorMinor.FindStringSubmatch(server)
	if c == nil || s == nil || c[1] != s[1] {
		return false
	}
	clientMinor, clientErr := strconv.Atoi(c[2])
	serverMinor, serverErr := strconv.Atoi(s[2])
	return clientErr == nil && serverErr == nil &&
		clientMinor-serverMinor <= supportedSkew && serverMinor-clientMinor <= supportedSkew
}
