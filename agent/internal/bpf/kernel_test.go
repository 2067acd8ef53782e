package bpf

import (
	"bytes"
	"context"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/eniplane/eniplane/agent/internal/bpf/bpftest"
	"github.com/eniplane/eniplane/agent/internal/plan"
)

func TestOpenAgainKeepsTheMap(t *testing.T) {
	pin := filepath.Join(bpftest.FS(t), "eniplane", "node-1", "cilium_ipcache_v2")
	k, err := Open(Config{PinPath: pin, MaxEntries: 10})
	if err != nil {
		t.Fatal(err)
	}
	if k.Info().Existed {
		t.Error("a new map existed before")
	}
	k.Upsert([]plan.Item{item("10.0.0.0/8", 16777217)})
	if err := k.Close(); err != nil {
		t.Fatal(err)
	}
	k, err = Open(Config{PinPath: pin, MaxEntries: 20})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = k.Close() }()
	if info := k.Info(); !info.Existed || info.MaxEntries != 10 || info.PinPath != pin {
		t.Errorf("info %+v", info)
	}
	if got := dump(t, k); got[netip.MustParsePrefix("10.0.0.0/8")].Number != 16777217 {
		t.Errorf("holds %v", got)
	}
	// The bytes as any other program reads them.
	m, err := ebpf.LoadPinnedMap(pin, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = m.Close() }()
	value, err := m.LookupBytes(unhex(t, "40 00 00 00 00 00 00 01 0a 01 02 03 00 00 00 00 00 00 00 00 00 00 00 00"))
	if want := unhex(t, "01 00 00 01 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00"); err != nil || !bytes.Equal(value, want) {
		t.Errorf("value % x, %v", value, err)
	}
	if info, err := m.Info(); err != nil || info.Flags != unix.BPF_F_NO_PREALLOC {
		t.Errorf("flags %x, %v", info.Flags, err)
	}
}

func TestOpenRefusesAnotherLayout(t *testing.T) {
	dir := bpftest.FS(t)
	for name, spec := range map[string]*ebpf.MapSpec{
		"hash": {Type: ebpf.Hash, KeySize: 24, ValueSize: 24, MaxEntries: 10},
		"v1":   {Type: ebpf.LPMTrie, KeySize: 24, ValueSize: 12, MaxEntries: 10, Flags: unix.BPF_F_NO_PREALLOC},
		"key":  {Type: ebpf.LPMTrie, KeySize: 8, ValueSize: 24, MaxEntries: 10, Flags: unix.BPF_F_NO_PREALLOC},
	} {
		t.Run(name, func(t *testing.T) {
			pin := filepath.Join(dir, name)
			m, err := ebpf.NewMap(spec)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = m.Close() }()
			if err := m.Pin(pin); err != nil {
				t.Fatal(err)
			}
			if _, err := Open(Config{PinPath: pin}); !errors.Is(err, ErrLayout) {
				t.Errorf("opened: %v", err)
			}
			if _, err := os.Stat(pin); err != nil {
				t.Errorf("the pin is gone: %v", err)
			}
		})
	}
}

func TestOpenWithoutABPFFileSystem(t *testing.T) {
	if _, err := Open(Config{PinPath: filepath.Join(t.TempDir(), "x", "map")}); !errors.Is(err, ErrUnavailable) {
		t.Errorf("opened: %v", err)
	}
}

// A dump that a deletion sends back to the start meets keys again.
func TestDumpAfterItsCursorIsDeleted(t *testing.T) {
	k, err := Open(Config{PinPath: filepath.Join(bpftest.FS(t), "map"), MaxEntries: 3 * dumpBatch})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = k.Close() }()
	var items []plan.Item
	for i := range 2 * dumpBatch {
		items = append(items, plan.Item{Prefix: host(i), Entry: item("10.0.0.0/8", 7).Entry})
	}
	if r := k.Upsert(items); r != nil {
		t.Fatal(r)
	}
	keys, values := make([]Key, dumpBatch), make([]Value, dumpBatch)
	var cursor ebpf.MapBatchCursor
	n, err := k.m.BatchLookup(&cursor, keys, values, nil)
	if err != nil {
		t.Fatal(err)
	}
	last := keys[n-1]
	if err := k.m.Delete(&last); err != nil {
		t.Fatal(err)
	}
	n, err = k.m.BatchLookup(&cursor, keys, values, nil)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		t.Fatal(err)
	}
	t.Logf("after the deletion the kernel gives %d more, first % x", n, keys[0])
	raw, err := k.Dump(context.Background())
	if err != nil || len(raw) != 2*dumpBatch-1 {
		t.Errorf("dumped %d, %v", len(raw), err)
	}
}

// A foreign writer's host bits are masked, and a cancelled dump says so.
func TestDumpOfForeignWrites(t *testing.T) {
	k, err := Open(Config{PinPath: filepath.Join(bpftest.FS(t), "map"), MaxEntries: 100})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = k.Close() }()
	key := EncodeKey(netip.MustParsePrefix("10.1.1.0/24"))
	key[11] = 77
	value := EncodeValue(item("10.0.0.0/8", 5).Entry)
	if err := k.m.Put(&key, &value); err != nil {
		t.Fatal(err)
	}
	if got := dump(t, k); len(got) != 1 || got[netip.MustParsePrefix("10.1.1.0/24")].Number != 5 {
		t.Errorf("dumped %v", got)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := k.Dump(ctx); !errors.Is(err, ErrPartial) || !errors.Is(err, context.Canceled) {
		t.Errorf("a cancelled dump: %v", err)
	}
}
