// Package pins owns the folder on the BPF file system below which the agents of
// one stack pin their maps. It mounts the file system where that is missing,
// and leaves neither folder nor mount behind. What the maps hold is not its
// business.
package pins

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// MountPoint is where the BPF file system is expected, by everybody.
const MountPoint = "/sys/fs/bpf"

// ErrUnavailable says that this process can not pin maps: it is not root, or the
// kernel or a container forbids the mount. Agents then keep their maps in
// memory.
var ErrUnavailable = errors.New("no kernel maps")

// ErrInUse says that another stack has the same root.
var ErrInUse = errors.New("in use by another stack")

// Root is a folder below MountPoint, with a lock on it.
type Root struct {
	path    string
	mounted bool
	lock    *os.File
}

// Open creates and locks a folder below MountPoint, which it mounts first if
// need be. What an earlier stack left in the folder is removed.
func Open(path string) (*Root, error) {
	if rel, err := filepath.Rel(MountPoint, path); err != nil || rel == "." || !filepath.IsLocal(rel) {
		return nil, fmt.Errorf("%s is not below %s", path, MountPoint)
	}
	r := &Root{path: path}
	present, err := isBPF(MountPoint)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	if !present {
		if err := unix.Mount("bpf", MountPoint, "bpf", 0, ""); err != nil {
			return nil, fmt.Errorf("%w: mount %s: %w", ErrUnavailable, MountPoint, err)
		}
		r.mounted = true
	}
	if err := r.take(); err != nil {
		return nil, errors.Join(err, r.unmount())
	}
	return r, nil
}

func (r *Root) take() error {
	if err := os.MkdirAll(r.path, 0o700); err != nil {
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	lock, err := os.Open(r.path)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		_ = lock.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return fmt.Errorf("%s: %w", r.path, ErrInUse)
		}
		return fmt.Errorf("lock %s: %w", r.path, err)
	}
	r.lock = lock
	if err := probe(filepath.Join(r.path, "probe")); err != nil {
		_ = errors.Join(os.RemoveAll(r.path), lock.Close()) // the probe's error says more
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	entries, err := os.ReadDir(r.path)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := os.RemoveAll(filepath.Join(r.path, e.Name())); err != nil {
			return fmt.Errorf("old pins: %w", err)
		}
	}
	return nil
}

// probe makes and pins a map like the agents': the folder alone says nothing,
// since anybody may make one.
func probe(path string) error {
	if err := os.RemoveAll(path); err != nil {
		return err
	}
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.LPMTrie, KeySize: 24, ValueSize: 24, MaxEntries: 1, Flags: unix.BPF_F_NO_PREALLOC})
	if err != nil {
		return err
	}
	return errors.Join(m.Pin(path), m.Unpin(), m.Close())
}

// Path is the folder.
func (r *Root) Path() string { return r.path }

// Mounted tells whether Open mounted MountPoint.
func (r *Root) Mounted() bool { return r.mounted }

// Close removes the folder with all pins in it, and unmounts MountPoint if Open
// mounted it and nobody else has put anything there.
func (r *Root) Close() error {
	err := os.RemoveAll(r.path)
	return errors.Join(err, r.lock.Close(), r.unmount())
}

func (r *Root) unmount() error {
	if !r.mounted {
		return nil
	}
	return unmount()
}

// Clean removes what a Root whose process died left behind: the folder at path
// and, if mounted says so, the mount. What is gone already is no error.
func Clean(path string, mounted bool) error {
	present, err := isBPF(MountPoint)
	if err != nil || !present {
		// Unmounting took the pins with it.
		return nil //nolint:nilerr // no such folder: nothing is left there
	}
	if err := os.RemoveAll(path); err != nil {
		return err
	}
	if mounted {
		return unmount()
	}
	return nil
}

// preloaded are what the kernel itself puts on every fresh mount.
var preloaded = []string{"maps.debug", "progs.debug"}

// unmount unmounts MountPoint unless somebody has put something in it.
func unmount() error {
	entries, err := os.ReadDir(MountPoint)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !slices.Contains(preloaded, e.Name()) {
			return nil
		}
	}
	if err := unix.Unmount(MountPoint, 0); err != nil {
		return fmt.Errorf("unmount %s: %w", MountPoint, err)
	}
	return nil
}

func isBPF(path string) (bool, error) {
	var s unix.Statfs_t
	if err := unix.Statfs(path, &s); err != nil {
		return false, &fs.PathError{Op: "statfs", Path: path, Err: err}
	}
	return s.Type == unix.BPF_FS_MAGIC, nil
}
