package postgres

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"

	"github.com/token-lease/operator/hack/devenv/scratch"
)

// account is the operating-system user that the server runs as; nil is the user
// of this process.
type account struct {
	name     string
	uid, gid int
}

// unprivilegedAccount picks a user for root, as whom PostgreSQL refuses to run.
func unprivilegedAccount() (*account, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		found, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, uidErr := strconv.Atoi(found.Uid)
		gid, gidErr := strconv.Atoi(found.Gid)
		if uidErr == nil && gidErr == nil && uid != 0 {
			return &account{name: name, uid: uid, gid: gid}, nil
		}
	}
	return nil, errors.New("PostgreSQL does not run as root, and there is no user postgres or nobody to run it as: " +
		"run this as an ordinary user, or set " + URLVariable)
}

func (a *account) credential() *syscall.Credential {
	if a == nil {
		return nil
	}
	return &syscall.Credential{Uid: uint32(a.uid), Gid: uint32(a.gid)}
}

func (a *account) own(path string) error {
	if a == nil {
		return nil
	}
	return os.Chown(path, a.uid, a.gid)
}

// scratch makes the server's directory where the account can get at it: root's
// TMPDIR may be closed to others.
func (a *account) scratch() (*scratch.Dir, error) {
	if a == nil {
		return scratch.New("", "postgres")
	}
	for _, parent := range []string{os.TempDir(), "/tmp", "/var/tmp"} {
		if !openToAll(parent) {
			continue
		}
		dir, err := scratch.New(parent, "postgres")
		if err != nil {
			return nil, err
		}
		return dir, a.own(dir.Path)
	}
	return nil, fmt.Errorf("user %s, as whom PostgreSQL runs here, cannot reach %s: set TMPDIR to a directory open to all", a.name, os.TempDir())
}

// openToAll says whether everybody may pass through the directory and all those
// above it.
func openToAll(dir string) bool {
	dir, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return false
	}
	for ; ; dir = filepath.Dir(dir) {
		info, err := os.Stat(dir)
		if err != nil || info.Mode().Perm()&0o001 == 0 {
			return false
		}
		if dir == filepath.Dir(dir) {
			return true
		}
	}
}
