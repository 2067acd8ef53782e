// Package ipcachemap reads a pinned ipcache map as another program would: from
// its bytes alone, with no code of the agent that wrote them. The layout is
// Cilium's cilium_ipcache_v2 (v1.18 and newer), little-endian.
package ipcachemap

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"
)

const (
	keySize, valueSize = 24, 24
	staticBits         = 32 // of the prefix length: cluster id, padding, family
	familyIPv4         = 1
	familyIPv6         = 2
)

// ErrLayout says that a map, a key or a value is not of the layout.
var ErrLayout = errors.New("not of layout cilium_ipcache_v2")

// Entry is one entry of the map.
type Entry struct {
	Prefix netip.Prefix
	Number uint32
	Key    [keySize]byte
	Value  [valueSize]byte
}

// Read returns the entries of the map pinned at a path, in the order of their
// prefixes. The map is only read.
func Read(pin string) ([]Entry, error) {
	m, err := open(pin)
	if err != nil {
		return nil, err
	}
	defer func() { _ = m.Close() }()
	// An iteration starts over when its place is deleted meanwhile.
	seen := make(map[netip.Prefix]Entry)
	var e Entry
	iterator := m.Iterate()
	for iterator.Next(&e.Key, &e.Value) {
		if err := e.decode(); err != nil {
			return nil, err
		}
		seen[e.Prefix] = e
	}
	if err := iterator.Err(); err != nil {
		return nil, fmt.Errorf("read %s: %w", pin, err)
	}
	entries := make([]Entry, 0, len(seen))
	for _, e := range seen {
		entries = append(entries, e)
	}
	slices.SortFunc(entries, func(a, b Entry) int { return a.Prefix.Compare(b.Prefix) })
	return entries, nil
}

// Lookup returns, for each prefix, the number that the kernel finds for it, by
// its longest match. 0 means that nothing matches.
func Lookup(pin string, prefixes ...netip.Prefix) ([]uint32, error) {
	m, err := open(pin)
	if err != nil {
		return nil, err
	}
	defer func() { _ = m.Close() }()
	numbers := make([]uint32, len(prefixes))
	for i, p := range prefixes {
		key := Key(p)
		var value [valueSize]byte
		switch err := m.Lookup(&key, &value); {
		case errors.Is(err, ebpf.ErrKeyNotExist):
		case err != nil:
			return nil, fmt.Errorf("look up %s in %s: %w", p, pin, err)
		default:
			numbers[i] = binary.LittleEndian.Uint32(value[:4])
		}
	}
	return numbers, nil
}

// Key returns the key of a prefix.
func Key(p netip.Prefix) [keySize]byte {
	var key [keySize]byte
	binary.LittleEndian.PutUint32(key[:4], uint32(staticBits+p.Bits()))
	if p.Addr().Is4() {
		key[7] = familyIPv4
	} else {
		key[7] = familyIPv6
	}
	copy(key[8:], p.Addr().AsSlice())
	return key
}

func open(pin string) (*ebpf.Map, error) {
	m, err := ebpf.LoadPinnedMap(pin, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", pin, err)
	}
	if m.Type() != ebpf.LPMTrie || m.KeySize() != keySize || m.ValueSize() != valueSize {
		err := fmt.Errorf("%s: %w: %s with keys of %d and values of %d bytes", pin, ErrLayout, m.Type(), m.KeySize(), m.ValueSize())
		return nil, errors.Join(err, m.Close())
	}
	return m, nil
}

// decode fills Prefix and Number from Key and Value.
func (e *Entry) decode() error {
	var addr netip.Addr
	switch e.Key[7] {
	case familyIPv4:
		addr = netip.AddrFrom4([4]byte(e.Key[8:12]))
		if [12]byte(e.Key[12:]) != [12]byte{} {
			return fmt.Errorf("key %x: %w: bytes behind an IPv4 address", e.Key, ErrLayout)
		}
	case familyIPv6:
		addr = netip.AddrFrom16([16]byte(e.Key[8:]))
	default:
		return fmt.Errorf("key %x: %w: family %d", e.Key, ErrLayout, e.Key[7])
	}
	if [3]byte(e.Key[4:7]) != [3]byte{} {
		return fmt.Errorf("key %x: %w: cluster id or padding", e.Key, ErrLayout)
	}
	bits := int64(binary.LittleEndian.Uint32(e.Key[:4])) - staticBits
	if bits < 0 || bits > int64(addr.BitLen()) {
		return fmt.Errorf("key %x: %w: %d prefix bits", e.Key, ErrLayout, bits)
	}
	e.Prefix = netip.PrefixFrom(addr, int(bits))
	if e.Prefix != e.Prefix.Masked() {
		return fmt.Errorf("key %x: %w: host bits in %s", e.Key, ErrLayout, e.Prefix)
	}
	e.Number = binary.LittleEndian.Uint32(e.Value[:4])
	return nil
}
