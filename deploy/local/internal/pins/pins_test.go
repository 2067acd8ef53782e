package pins

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"testing"
)

func TestOpenRefusesOtherPlaces(t *testing.T) {
	for _, path := range []string{"/tmp/x", MountPoint, MountPoint + "/../x", "/", ""} {
		if r, err := Open(path); err == nil {
			_ = r.Close()
			t.Errorf("%q was taken", path)
		}
	}
}

func TestRoot(t *testing.T) {
	path := filepath.Join(MountPoint, "eniplane-test-"+strconv.Itoa(os.Getpid()))
	before, err := isBPF(MountPoint)
	if err != nil {
		t.Skipf("no %s: %v", MountPoint, err)
	}
	r, err := Open(path)
	if errors.Is(err, ErrUnavailable) && os.Geteuid() != 0 {
		t.Skipf("not root: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	if r.Mounted() == before {
		t.Errorf("mounted before: %v, by us: %v", before, r.Mounted())
	}
	if _, err := Open(path); !errors.Is(err, ErrInUse) {
		t.Errorf("second Open: %v", err)
	}
	if err := os.MkdirAll(filepath.Join(path, "node-1"), 0o700); err != nil {
		t.Fatal(err)
	}
	// A crash: the lock goes, the rest stays.
	if err := r.lock.Close(); err != nil {
		t.Fatal(err)
	}
	again, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	if entries, err := os.ReadDir(path); err != nil || len(entries) != 0 {
		t.Errorf("old pins: %v, %v", entries, err)
	}
	if err := again.Close(); err != nil {
		t.Fatal(err)
	}
	if err := Clean(path, r.Mounted()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is left behind: %v", path, err)
	}
	if after, err := isBPF(MountPoint); err != nil || after != before {
		entries, _ := os.ReadDir(MountPoint)
		if len(entries) <= len(preloaded) {
			t.Errorf("mounted before: %v, after: %v (%v)", before, after, err)
		}
	}
	if err := Clean(path, false); err != nil {
		t.Errorf("cleaning what is clean: %v", err)
	}
}
