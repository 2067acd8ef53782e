package bpf

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"sync/atomic"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"

	"github.com/eniplane/eniplane/agent/internal/plan"
)

const (
	// mapName is the name of Cilium's map; the kernel keeps its first 15 bytes.
	mapName = "cilium_ipcache_v2"
	// dumpBatch is how many entries one system call of a dump reads.
	dumpBatch = 4096
	// dumpBound ends a dump that a concurrent writer sends back to the start
	// again and again, after so many times the map's size.
	dumpBound = 4
)

// Config says which map to open.
type Config struct {
	// PinPath is where the map is, or will be, pinned. Required.
	PinPath string
	// MaxEntries is the size of a new map; 0 means DefaultMaxEntries. A map that
	// exists keeps its own.
	MaxEntries uint32
}

// Kernel is a pinned map of the kernel. It is safe for concurrent use, but only
// one writer knows what it has written.
type Kernel struct {
	m       *ebpf.Map
	info    Info
	noBatch atomic.Bool // the kernel has no batches for this type of map (before 5.13)
}

// Open opens the pinned map, or creates and pins it. Errors are ErrLayout and
// ErrUnavailable, wrapped, and others of the kernel. Nothing that exists is
// changed.
func Open(config Config) (*Kernel, error) {
	if config.PinPath == "" {
		return nil, errors.New("no path for the pin")
	}
	if config.MaxEntries == 0 {
		config.MaxEntries = DefaultMaxEntries
	}
	if err := onBPFFS(filepath.Dir(config.PinPath)); err != nil {
		return nil, err
	}
	k, err := openPinned(config.PinPath)
	if errors.Is(err, fs.ErrNotExist) {
		return create(config)
	}
	return k, err
}

func openPinned(path string) (*Kernel, error) {
	m, err := ebpf.LoadPinnedMap(path, nil)
	if err != nil {
		return nil, fmt.Errorf("open the map pinned at %s: %w", path, unavailable(err))
	}
	if err := checkLayout(m); err != nil {
		_ = m.Close() // only read
		return nil, fmt.Errorf("map pinned at %s: %w", path, err)
	}
	return &Kernel{m: m, info: Info{PinPath: path, Layout: LayoutV2, MaxEntries: m.MaxEntries(), Existed: true}}, nil
}

func checkLayout(m *ebpf.Map) error {
	var k Key
	var v Value
	switch {
	case m.Type() != ebpf.LPMTrie:
		return fmt.Errorf("%w: type %s, want %s", ErrLayout, m.Type(), ebpf.LPMTrie)
	case int(m.KeySize()) != len(k):
		return fmt.Errorf("%w: key of %d bytes, want %d", ErrLayout, m.KeySize(), len(k))
	case int(m.ValueSize()) != len(v):
		return fmt.Errorf("%w: value of %d bytes, want %d", ErrLayout, m.ValueSize(), len(v))
	}
	return nil
}

func create(config Config) (*Kernel, error) {
	// Before Linux 5.11 maps count as locked memory. Where this is refused the
	// creation says so.
	limitErr := rlimit.RemoveMemlock()
	m, err := ebpf.NewMap(&ebpf.MapSpec{
		Name:       mapName[:15],
		Type:       ebpf.LPMTrie,
		KeySize:    uint32(len(Key{})),
		ValueSize:  uint32(len(Value{})),
		MaxEntries: config.MaxEntries,
		Flags:      unix.BPF_F_NO_PREALLOC,
	})
	if err != nil {
		return nil, fmt.Errorf("create a map: %w", errors.Join(unavailable(err), limitErr))
	}
	err = os.MkdirAll(filepath.Dir(config.PinPath), 0o700)
	if err == nil {
		err = m.Pin(config.PinPath)
	}
	if err != nil {
		_ = m.Close() // nothing was written
		if errors.Is(err, fs.ErrExist) || errors.Is(err, unix.EEXIST) {
			return openPinned(config.PinPath) // somebody was faster
		}
		return nil, fmt.Errorf("pin the map at %s: %w", config.PinPath, unavailable(err))
	}
	return &Kernel{m: m, info: Info{PinPath: config.PinPath, Layout: LayoutV2, MaxEntries: config.MaxEntries}}, nil
}

// onBPFFS checks that a folder, or where it would be made, is on a BPF file system.
func onBPFFS(dir string) error {
	for {
		var st unix.Statfs_t
		err := unix.Statfs(dir, &st)
		if err == nil {
			if uint32(st.Type) != unix.BPF_FS_MAGIC {
				return fmt.Errorf("%w: %s is on no BPF file system", ErrUnavailable, dir)
			}
			return nil
		}
		if !errors.Is(err, fs.ErrNotExist) || dir == filepath.Dir(dir) {
			return fmt.Errorf("%w: %s: %w", ErrUnavailable, dir, err)
		}
		dir = filepath.Dir(dir)
	}
}

// unavailable adds ErrUnavailable to an error that says that the kernel lets us
// have no map at all.
func unavailable(err error) error {
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, unix.ENOSYS) || errors.Is(err, ebpf.ErrNotSupported) {
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	return err
}

// Info tells what the map is.
func (k *Kernel) Info() Info { return k.info }

// Upsert writes entries in order, in place where the prefix is there already,
// and returns those that were refused; all others were written.
func (k *Kernel) Upsert(items []plan.Item) []Refusal {
	keys, values := make([]Key, len(items)), make([]Value, len(items))
	for i, item := range items {
		keys[i], values[i] = EncodeKey(item.Prefix), EncodeValue(item.Entry)
	}
	var refused []Refusal
	k.each(len(items),
		func(from int) (int, error) { return k.m.BatchUpdate(keys[from:], values[from:], nil) },
		func(i int) error { return k.m.Put(&keys[i], &values[i]) },
		func(i int, err error) {
			if errors.Is(err, unix.ENOSPC) {
				err = fmt.Errorf("%w: %w", ErrFull, err)
			}
			refused = append(refused, refusal(items[i].Prefix, err))
		})
	return refused
}

// Delete removes prefixes; one that is absent is done already. It returns those
// that are still there.
func (k *Kernel) Delete(prefixes []netip.Prefix) []Refusal {
	keys := make([]Key, len(prefixes))
	for i, p := range prefixes {
		keys[i] = EncodeKey(p)
	}
	var refused []Refusal
	k.each(len(prefixes),
		func(from int) (int, error) { return k.m.BatchDelete(keys[from:], nil) },
		func(i int) error { return k.m.Delete(&keys[i]) },
		func(i int, err error) {
			if !errors.Is(err, ebpf.ErrKeyNotExist) {
				refused = append(refused, refusal(prefixes[i], err))
			}
		})
	return refused
}

// each applies n elements with as few calls as possible. A batch stops at the
// first element that fails and tells how many went before; that one is failed,
// and the batch goes on behind it.
func (k *Kernel) each(n int, batch func(from int) (int, error), one func(i int) error, failed func(i int, err error)) {
	i := 0
	for i < n && !k.noBatch.Load() {
		done, err := batch(i)
		switch {
		case err == nil:
			return
		case errors.Is(err, ebpf.ErrNotSupported):
			k.noBatch.Store(true)
			continue
		case done < 0 || done >= n-i:
			// The kernel refused the call itself and counted nothing. Only single
			// writes tell now.
			i += k.oneByOne(i, n, one, failed)
			continue
		}
		failed(i+done, err)
		i += done + 1
	}
	k.oneByOne(i, n, one, failed)
}

func (k *Kernel) oneByOne(from, n int, one func(i int) error, failed func(i int, err error)) int {
	for i := from; i < n; i++ {
		if err := one(i); err != nil {
			failed(i, err)
		}
	}
	return n - from
}

// Lookup returns what the datapath finds for an address.
func (k *Kernel) Lookup(addr netip.Addr) (Value, bool, error) {
	addr = addr.Unmap().WithZone("")
	key := EncodeKey(netip.PrefixFrom(addr, addr.BitLen()))
	var v Value
	switch err := k.m.Lookup(&key, &v); {
	case err == nil:
		return v, true, nil
	case errors.Is(err, ebpf.ErrKeyNotExist):
		return Value{}, false, nil
	default:
		return Value{}, false, fmt.Errorf("look up %s: %w", addr, err)
	}
}

// Dump returns every entry once, in any order. It is no snapshot: what changes
// meanwhile may be seen before or after. A key met twice, as happens when the
// entry at which the kernel stood was deleted, counts with its later value. If
// the error is ErrPartial, what was read is returned with it.
func (k *Kernel) Dump(ctx context.Context) ([]Raw, error) {
	seen := make(map[Key]Value)
	err := k.dump(ctx, seen)
	all := make([]Raw, 0, len(seen))
	for key, value := range seen {
		all = append(all, Raw{Key: key, Value: value})
	}
	return all, err
}

func (k *Kernel) dump(ctx context.Context, seen map[Key]Value) error {
	limit := dumpBound * (int(k.info.MaxEntries) + dumpBatch)
	keys, values := make([]Key, dumpBatch), make([]Value, dumpBatch)
	var cursor ebpf.MapBatchCursor
	for read := 0; !k.noBatch.Load(); {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("%w: %w", ErrPartial, err)
		}
		n, err := k.m.BatchLookup(&cursor, keys, values, nil)
		for i := range n { // the last batch comes with an error
			seen[keys[i]] = values[i]
		}
		read += n
		switch {
		case errors.Is(err, ebpf.ErrKeyNotExist):
			return nil
		case errors.Is(err, ebpf.ErrNotSupported):
			k.noBatch.Store(true)
		case err != nil:
			return fmt.Errorf("%w after %d entries: %w", ErrPartial, len(seen), err)
		case read > limit:
			return fmt.Errorf("%w: %d entries read of a map of %d", ErrPartial, read, k.info.MaxEntries)
		}
	}
	var key Key
	var value Value
	it := k.m.Iterate()
	for it.Next(&key, &value) {
		seen[key] = value
	}
	if err := it.Err(); err != nil {
		return fmt.Errorf("%w after %d entries: %w", ErrPartial, len(seen), err)
	}
	return nil
}

// Close gives up the handle. The pin, and with it the map, stays.
func (k *Kernel) Close() error {
	if err := k.m.Close(); err != nil {
		return fmt.Errorf("close the map: %w", err)
	}
	return nil
}
