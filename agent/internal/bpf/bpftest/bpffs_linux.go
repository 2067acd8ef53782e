// Package bpftest gives tests a BPF file system of their own.
package bpftest

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// FS mounts a BPF file system in a folder of the test's own and returns the
// folder; it goes when the test ends, and with it every pin and map. Where the
// kernel forbids it, the test is skipped with the proof; an error as root that is
// not a refusal fails it.
func FS(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("bpf", dir, "bpf", 0, ""); err != nil {
		if os.Geteuid() != 0 || errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENODEV) {
			t.Skipf("no BPF file system can be mounted here (uid %d): %v", os.Geteuid(), err)
		}
		t.Fatalf("mount a BPF file system: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount %s: %v", dir, err)
		}
	})
	return dir
}
