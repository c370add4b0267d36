package controlplane

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/token-lease/operator/hack/devenv/repository"
)

const (
	// AssetsVariable names a directory with ready-made programs, as setup-envtest
	// makes one.
	AssetsVariable = "KUBEBUILDER_ASSETS"
	// CacheVariable moves the directory in which built programs are kept.
	CacheVariable = "TOKENLEASE_DEVENV_CACHE"

	cacheName       = "tokenlease-devenv"
	moduleDir       = "hack/controlplane"
	cacheKeyLength  = 16
	kubectl         = "kubectl"
	apiServer       = "kube-apiserver"
	controllerMgr   = "kube-controller-manager"
	etcd            = "etcd"
	executableModes = 0o111
)

// program is one of the control plane's programs and how it is had.
type program struct {
	name        string
	packagePath string
	// given: a directory of AssetsVariable must have it. The others are built
	// when it has not, because setup-envtest does not bring them all.
	given bool
	// onPath: the one on the PATH will do, where its version fits the server's.
	onPath bool
}

// programList is in the order of building: the quick one first.
var programList = []program{
	{name: etcd, packagePath: "go.etcd.io/etcd/server/v3", given: true},
	{name: apiServer, packagePath: "k8s.io/kubernetes/cmd/kube-apiserver", given: true},
	{name: controllerMgr, packagePath: "k8s.io/kubernetes/cmd/kube-controller-manager"},
	{name: kubectl, packagePath: "k8s.io/kubernetes/cmd/kubectl", onPath: true},
}

// Assets returns a directory that holds etcd, kube-apiserver,
// kube-controller-manager and kubectl. They come from the directory that
// AssetsVariable names, or from an earlier build, or are built now from the
// module in hack/controlplane, which takes minutes; kubectl may also be the one
// on the PATH, within one minor version of the server. Progress goes to log, one line each; nil discards it.
func Assets(ctx context.Context, log io.Writer) (string, error) {
	if log == nil {
		log = io.Discard
	}
	given := os.Getenv(AssetsVariable)
	paths := make(map[string]string, len(programList))
	var missing []program
	for _, p := range programList {
		path, err := findGiven(p, given)
		if err != nil {
			return "", err
		}
		if path == "" {
			missing = append(missing, p)
			continue
		}
		paths[p.name] = path
	}
	cache, err := cacheDir()
	if err != nil {
		return "", err
	}
	if len(missing) > 0 {
		root, err := repository.Root()
		if err != nil {
			return "", fmt.Errorf("build the development control plane: %w; or set %s to a directory with its programs", err, AssetsVariable)
		}
		b := builder{module: filepath.Join(root, moduleDir), log: log}
		if b.out, err = buildDir(cache, b.module); err != nil {
			return "", err
		}
		if missing, err = b.useBuiltOrPath(ctx, missing, paths); err != nil {
			return "", err
		}
		if err := b.build(ctx, missing); err != nil {
			return "", err
		}
		for _, p := range missing {
			paths[p.name] = filepath.Join(b.out, p.name)
		}
	}
	return directoryOf(paths, cache)
}

// findGiven looks a program up in the given directory; empty means not there.
func findGiven(p program, given string) (string, error) {
	if given == "" {
		return "", nil
	}
	absolute, err := filepath.Abs(given)
	if err != nil {
		return "", err
	}
	path := filepath.Join(absolute, p.name)
	if isExecutable(path) {
		return path, nil
	}
	if p.given {
		return "", fmt.Errorf("%s is set to %s, which has no program %s: correct it, or unset it to have the programs built",
			AssetsVariable, given, p.name)
	}
	return "", nil
}

// useBuiltOrPath notes the programs that need no building and returns the rest.
func (b builder) useBuiltOrPath(ctx context.Context, wanted []program, paths map[string]string) ([]program, error) {
	var missing []program
	for _, p := range wanted {
		if built := filepath.Join(b.out, p.name); isExecutable(built) {
			paths[p.name] = built
			continue
		}
		if p.onPath {
			found, err := b.fittingOnPath(ctx, p.name, paths[apiServer])
			if err != nil {
				return nil, err
			}
			if found != "" {
				paths[p.name] = found
				continue
			}
		}
		missing = append(missing, p)
	}
	return missing, nil
}

// cacheDir is where programs are kept between runs.
func cacheDir() (string, error) {
	if dir := os.Getenv(CacheVariable); dir != "" {
		return filepath.Abs(dir)
	}
	user, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("no directory to keep built programs in: %w; set %s to one", err, CacheVariable)
	}
	return filepath.Join(user, cacheName), nil
}

// buildDir is the directory for what this version of the module builds here.
func buildDir(cache, module string) (string, error) {
	hash := sha256.New()
	fmt.Fprintf(hash, "%s/%s %s\n", runtime.GOOS, runtime.GOARCH, linkerFlags)
	for _, name := range []string{"go.mod", "go.sum"} {
		content, err := os.ReadFile(filepath.Join(module, name))
		if err != nil {
			return "", err
		}
		fmt.Fprintf(hash, "%s %d\n", name, len(content))
		hash.Write(content)
	}
	return filepath.Join(cache, hex.EncodeToString(hash.Sum(nil))[:cacheKeyLength]), nil
}

// directoryOf returns the directory that holds all the programs. When they lie
// in several, it makes one with links to them, named by what it links to.
func directoryOf(paths map[string]string, cache string) (string, error) {
	var all []string
	dirs := make(map[string]bool)
	for _, path := range paths {
		all = append(all, path)
		dirs[filepath.Dir(path)] = true
	}
	if len(dirs) == 1 {
		return filepath.Dir(all[0]), nil
	}
	slices.Sort(all)
	sum := sha256.Sum256([]byte(strings.Join(all, "\x00")))
	linked := filepath.Join(cache, "links-"+hex.EncodeToString(sum[:])[:cacheKeyLength])
	if err := os.MkdirAll(linked, 0o755); err != nil {
		return "", err
	}
	for name, path := range paths {
		// Another process may be making the same links: what counts is that they
		// are there.
		if err := os.Symlink(path, filepath.Join(linked, name)); err != nil && !errors.Is(err, os.ErrExist) {
			return "", err
		}
	}
	return linked, nil
}

func isExecutable(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular() && info.Mode().Perm()&executableModes != 0
}
