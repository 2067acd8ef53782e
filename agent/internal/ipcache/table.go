package ipcache

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/eniplane/eniplane/internal/prefix"
)

// Table is a set of entries with the two look-ups that a map does not offer: by
// address, as the kernel's longest-prefix-match trie does it, and by number. The
// zero value is an empty table. It is not safe for concurrent use.
type Table struct {
	entries  Entries
	lengths  [2][129]int // entries per family (IPv4, IPv6) and prefix length
	byNumber map[uint32]map[netip.Prefix]struct{}
	single   map[uint32]netip.Prefix // numbers with one prefix, nearly all
}

// Set adds or replaces the entry of a canonical prefix.
func (t *Table) Set(p netip.Prefix, e Entry) {
	if t.entries == nil {
		t.entries = make(Entries)
		t.byNumber = make(map[uint32]map[netip.Prefix]struct{})
		t.single = make(map[uint32]netip.Prefix)
	}
	if old, ok := t.entries[p]; ok {
		t.unindex(old.Number, p)
	} else {
		t.lengths[family(p.Addr())][p.Bits()]++
	}
	t.entries[p] = e
	t.index(e.Number, p)
}

// Delete removes the entry of a prefix, if there is one.
func (t *Table) Delete(p netip.Prefix) {
	old, ok := t.entries[p]
	if !ok {
		return
	}
	delete(t.entries, p)
	t.lengths[family(p.Addr())][p.Bits()]--
	t.unindex(old.Number, p)
}

// Get returns the entry of exactly this prefix.
func (t *Table) Get(p netip.Prefix) (Entry, bool) {
	e, ok := t.entries[p]
	return e, ok
}

// Lookup returns the longest prefix that contains the address, with its entry.
// An IPv4-mapped address is looked up as IPv4; a zone is ignored.
func (t *Table) Lookup(addr netip.Addr) (netip.Prefix, Entry, bool) {
	addr = addr.Unmap().WithZone("")
	if !addr.IsValid() {
		return netip.Prefix{}, Entry{}, false
	}
	lengths := &t.lengths[family(addr)]
	for bits := addr.BitLen(); bits >= 0; bits-- {
		if lengths[bits] == 0 {
			continue
		}
		p := netip.PrefixFrom(addr, bits).Masked()
		if e, ok := t.entries[p]; ok {
			return p, e, true
		}
	}
	return netip.Prefix{}, Entry{}, false
}

// WithNumber returns the prefixes that have a number, sorted. None gives nil.
func (t *Table) WithNumber(number uint32) []netip.Prefix {
	if p, ok := t.single[number]; ok {
		return []netip.Prefix{p}
	}
	return slices.SortedFunc(maps.Keys(t.byNumber[number]), prefix.Compare)
}

// Len returns how many entries there are.
func (t *Table) Len() int { return len(t.entries) }

// Entries returns the entries themselves, not a copy: read them only, and not
// while the table changes.
func (t *Table) Entries() Entries { return t.entries }

func (t *Table) index(number uint32, p netip.Prefix) {
	if set, ok := t.byNumber[number]; ok {
		set[p] = struct{}{}
		return
	}
	if other, ok := t.single[number]; ok {
		delete(t.single, number)
		t.byNumber[number] = map[netip.Prefix]struct{}{other: {}, p: {}}
		return
	}
	t.single[number] = p
}

func (t *Table) unindex(number uint32, p netip.Prefix) {
	if set, ok := t.byNumber[number]; ok {
		delete(set, p)
		if len(set) == 0 {
			delete(t.byNumber, number)
		}
		return
	}
	delete(t.single, number)
}

func family(a netip.Addr) int {
	if a.Is4() {
		return 0
	}
	return 1
}
