package ipcache

import (
	"maps"
	"net/netip"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/eniplane/eniplane/internal/prefix"
)

// The dumb model: for each owner its set with what it says, for each prefix the
// number learnt while somebody wanted it.
type model struct {
	sets    map[Owner]map[netip.Prefix]Metadata
	numbers map[netip.Prefix]uint32
}

func (m *model) forgetUnwanted() {
	for p := range m.numbers {
		if len(m.owners(p)) == 0 {
			delete(m.numbers, p)
		}
	}
}

func (m *model) owners(p netip.Prefix) []Owner {
	var owners []Owner
	for o, s := range m.sets {
		if _, ok := s[p]; ok {
			owners = append(owners, o)
		}
	}
	slices.SortFunc(owners, CompareOwners)
	return owners
}

func (m *model) wanted() Entries {
	all := make(Entries)
	for p, n := range m.numbers {
		e := Entry{Number: n}
		owners := m.owners(p)
		slices.SortStableFunc(owners, func(a, b Owner) int { return int(m.sets[b][p].Source) - int(m.sets[a][p].Source) })
		for _, o := range owners {
			if k := m.sets[o][p].EncryptKey; e.EncryptKey == 0 {
				e.EncryptKey = k
			}
		}
		all[p] = e
	}
	return all
}

func TestCacheAgainstModel(t *testing.T) {
	prefixes := []netip.Prefix{}
	for _, p := range []string{"10.0.0.0/8", "10.0.0.0/16", "10.0.0.0/24", "10.0.0.1/32", "fd00::/8", "fd00::1/128"} {
		prefixes = append(prefixes, netip.MustParsePrefix(p))
	}
	owners := []Owner{owner(KindRestore, "n"), owner(KindNetworkPolicy, "a"), owner(KindNetworkPolicy, "b"), owner(KindLocal, "c")}
	rapid.Check(t, func(t *rapid.T) {
		c := NewCache(Config{})
		m := &model{sets: map[Owner]map[netip.Prefix]Metadata{}, numbers: map[netip.Prefix]uint32{}}
		// What a reader of Changes alone would have in its map.
		followed := make(Entries)
		drawOwner := func(t *rapid.T) Owner { return rapid.SampledFrom(owners).Draw(t, "owner") }
		drawPrefix := func(t *rapid.T) netip.Prefix { return rapid.SampledFrom(prefixes).Draw(t, "prefix") }
		drawMeta := func(t *rapid.T) Metadata {
			return Metadata{
				Source:     Source(rapid.IntRange(0, 2).Draw(t, "source")),
				EncryptKey: rapid.Uint8Range(0, 2).Draw(t, "key"),
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"replace": func(t *rapid.T) {
				o, s := drawOwner(t), make(map[netip.Prefix]Metadata)
				for _, p := range prefixes {
					if rapid.Bool().Draw(t, p.String()) {
						s[p] = drawMeta(t)
					}
				}
				c.Replace(o, s)
				m.sets[o] = maps.Clone(s)
			},
			"upsert": func(t *rapid.T) {
				o, p, meta := drawOwner(t), drawPrefix(t), drawMeta(t)
				c.Upsert(o, p, meta)
				if m.sets[o] == nil {
					m.sets[o] = make(map[netip.Prefix]Metadata)
				}
				m.sets[o][p] = meta
			},
			"remove": func(t *rapid.T) {
				o, p := drawOwner(t), drawPrefix(t)
				_, held := m.sets[o][p]
				if c.Remove(o, p) != held {
					t.Fatalf("removing %s from %s: held is %v", p, o, held)
				}
				delete(m.sets[o], p)
			},
			"remove owner": func(t *rapid.T) {
				o := drawOwner(t)
				c.RemoveOwner(o)
				delete(m.sets, o)
			},
			"learn": func(t *rapid.T) {
				p, n := drawPrefix(t), rapid.Uint32Range(1000, 1003).Draw(t, "number")
				c.Learn(p, n, 1)
				if len(m.owners(p)) > 0 {
					m.numbers[p] = n
				}
			},
			"": func(t *rapid.T) {
				m.forgetUnwanted()
				want := m.wanted()
				if got := c.AllWanted(); !maps.Equal(got, want) {
					t.Fatalf("wanted %v, model %v", got, want)
				}
				for p := range c.Changes() {
					if e, ok := c.Wanted(p); ok {
						followed[p] = e
					} else {
						delete(followed, p)
					}
				}
				if !maps.Equal(followed, want) {
					t.Fatalf("following the changes gives %v, model %v", followed, want)
				}
				for _, p := range prefixes {
					if got := c.OwnersOf(p); !slices.Equal(got, m.owners(p)) {
						t.Fatalf("owners of %s: %v, model %v", p, got, m.owners(p))
					}
				}
				for _, o := range owners {
					if got := c.Prefixes(o); !slices.Equal(got, slices.SortedFunc(maps.Keys(m.sets[o]), prefix.Compare)) {
						t.Fatalf("prefixes of %s: %v", o, got)
					}
				}
			},
		})
	})
}

func TestTableAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		table, entries := &Table{}, make(Entries)
		drawPrefix := func(t *rapid.T) netip.Prefix {
			addr := drawAddr(t)
			return netip.PrefixFrom(addr, rapid.IntRange(0, addr.BitLen()).Draw(t, "bits")).Masked()
		}
		t.Repeat(map[string]func(*rapid.T){
			"set": func(t *rapid.T) {
				p, e := drawPrefix(t), Entry{Number: rapid.Uint32Range(1, 5).Draw(t, "number")}
				table.Set(p, e)
				entries[p] = e
			},
			"delete": func(t *rapid.T) {
				p := drawPrefix(t)
				table.Delete(p)
				delete(entries, p)
			},
			"": func(t *rapid.T) {
				if table.Len() != len(entries) {
					t.Fatalf("%d entries, model %d", table.Len(), len(entries))
				}
				addr := drawAddr(t)
				best, found := netip.Prefix{}, false
				for p := range entries {
					if p.Contains(addr) && (!found || p.Bits() > best.Bits()) {
						best, found = p, true
					}
				}
				if p, e, ok := table.Lookup(addr); ok != found || p != best || e != entries[best] {
					t.Fatalf("%s: found %s %v %v, model %s %v", addr, p, e, ok, best, found)
				}
				for n := range uint32(6) {
					var want []netip.Prefix
					for p, e := range entries {
						if e.Number == n {
							want = append(want, p)
						}
					}
					slices.SortFunc(want, prefix.Compare)
					if got := table.WithNumber(n); !slices.Equal(got, want) {
						t.Fatalf("number %d: %v, model %v", n, got, want)
					}
				}
			},
		})
	})
}

// drawAddr draws from few addresses, so that prefixes overlap.
func drawAddr(t *rapid.T) netip.Addr {
	b := rapid.SliceOfN(rapid.SampledFrom([]byte{0, 1, 0x80, 0xff}), 4, 4).Draw(t, "bytes")
	if rapid.Bool().Draw(t, "v4") {
		return netip.AddrFrom4([4]byte(b))
	}
	a := netip.MustParseAddr("fd00::").As16()
	copy(a[12:], b)
	return netip.AddrFrom16(a)
}
