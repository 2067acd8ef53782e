package bpf

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"path/filepath"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"github.com/eniplane/eniplane/agent/internal/bpf/bpftest"
	"github.com/eniplane/eniplane/agent/internal/ipcache"
	"github.com/eniplane/eniplane/agent/internal/plan"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/testsize"
)

// edge is what Kernel and Memory have in common.
type edge interface {
	Upsert(items []plan.Item) []Refusal
	Delete(prefixes []netip.Prefix) []Refusal
	Lookup(addr netip.Addr) (Value, bool, error)
	Dump(ctx context.Context) ([]Raw, error)
	Info() Info
	Close() error
}

// eachEdge runs one contract on both maps, and on the kernel's once more as if
// it had no batches.
func eachEdge(t *testing.T, contract func(t *testing.T, open func(testing.TB, uint32) edge)) {
	t.Run("memory", func(t *testing.T) {
		contract(t, func(_ testing.TB, size uint32) edge { return NewMemory(size) })
	})
	for name, noBatch := range map[string]bool{"kernel": false, "kernel without batches": true} {
		t.Run(name, func(t *testing.T) {
			fs := bpftest.FS(t)
			n := 0
			contract(t, func(t testing.TB, size uint32) edge {
				n++
				k, err := Open(Config{PinPath: filepath.Join(fs, "node", fmt.Sprint("map-", n)), MaxEntries: size})
				if err != nil {
					t.Fatal(err)
				}
				k.noBatch.Store(noBatch)
				return k
			})
		})
	}
}

func item(p string, number uint32) plan.Item {
	return plan.Item{Prefix: netip.MustParsePrefix(p), Entry: ipcache.Entry{Number: number}}
}

func host(i int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), 32)
}

func dump(t testing.TB, e edge) ipcache.Entries {
	t.Helper()
	raw, err := e.Dump(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	all := make(ipcache.Entries)
	for _, r := range raw {
		p, err := DecodeKey(r.Key)
		if err != nil {
			t.Fatal(err)
		}
		if _, ok := all[p]; ok {
			t.Fatalf("%s dumped twice", p)
		}
		all[p] = DecodeValue(r.Value)
	}
	return all
}

func TestUpsertLookupDelete(t *testing.T) {
	eachEdge(t, func(t *testing.T, open func(testing.TB, uint32) edge) {
		m := open(t, 100)
		defer func() { _ = m.Close() }()
		if r := m.Upsert([]plan.Item{item("10.0.0.0/8", 1), item("10.1.0.0/16", 2), item("fd00::/8", 3)}); r != nil {
			t.Fatal(r)
		}
		for addr, want := range map[string]uint32{"10.2.0.1": 1, "10.1.0.1": 2, "::ffff:10.1.0.1": 2, "fd00::1": 3, "11.0.0.1": 0, "fe80::1": 0} {
			v, ok, err := m.Lookup(netip.MustParseAddr(addr))
			if err != nil || ok != (want != 0) || ok && DecodeValue(v).Number != want {
				t.Errorf("%s: %d %v %v, want %d", addr, DecodeValue(v).Number, ok, err, want)
			}
		}
		if r := m.Upsert([]plan.Item{item("10.1.0.0/16", 9)}); r != nil {
			t.Fatal(r)
		}
		// Absent ones, covered or not, are done already and stop nothing.
		var gone []netip.Prefix
		for _, p := range []string{"10.1.0.0/24", "10.1.0.0/16", "192.0.2.0/24", "fd00::/8", "fd00::/9"} {
			gone = append(gone, netip.MustParsePrefix(p))
		}
		if r := m.Delete(gone); r != nil {
			t.Fatal(r)
		}
		if got := dump(t, m); !maps.Equal(got, ipcache.Entries{netip.MustParsePrefix("10.0.0.0/8"): {Number: 1}}) {
			t.Errorf("left: %v", got)
		}
		if m.Upsert(nil) != nil || m.Delete(nil) != nil {
			t.Error("nothing to do was refused")
		}
	})
}

// cilium#47894: a map of ten and eleven prefixes.
func TestB37FullMap(t *testing.T) {
	eachEdge(t, func(t *testing.T, open func(testing.TB, uint32) edge) {
		m := open(t, 10)
		defer func() { _ = m.Close() }()
		var items []plan.Item
		for i := range 16 {
			items = append(items, plan.Item{Prefix: host(i), Entry: ipcache.Entry{Number: uint32(100 + i)}})
		}
		refused := m.Upsert(items[:11])
		if len(refused) != 1 || refused[0].Prefix != host(10) || refused[0].Reason != reason.MapFull || !errors.Is(refused[0].Err, ErrFull) {
			t.Fatalf("refused %v", refused)
		}
		// What is there is written in place behind ones that do not fit.
		refused = m.Upsert([]plan.Item{items[11], {Prefix: host(3), Entry: ipcache.Entry{Number: 7}}, items[12], {Prefix: host(4), Entry: ipcache.Entry{Number: 8}}})
		if len(refused) != 2 || refused[0].Prefix != host(11) || refused[1].Prefix != host(12) {
			t.Fatalf("refused %v", refused)
		}
		got := dump(t, m)
		if len(got) != 10 || got[host(3)].Number != 7 || got[host(4)].Number != 8 || got[host(0)].Number != 100 {
			t.Fatalf("holds %v", got)
		}
		if r := m.Delete([]netip.Prefix{host(10), host(0)}); r != nil {
			t.Fatal(r)
		}
		if r := m.Upsert(items[10:11]); r != nil {
			t.Fatalf("refused with room: %v", r)
		}
	})
}

func TestDumpOfMany(t *testing.T) {
	n := testsize.Pick(20000, 512000)
	eachEdge(t, func(t *testing.T, open func(testing.TB, uint32) edge) {
		m := open(t, uint32(n))
		defer func() { _ = m.Close() }()
		want := make(ipcache.Entries, n)
		items := make([]plan.Item, 0, n)
		for i := range n {
			e := ipcache.Entry{Number: uint32(1<<24 + i)}
			want[host(i)] = e
			items = append(items, plan.Item{Prefix: host(i), Entry: e})
		}
		if r := m.Upsert(items); r != nil {
			t.Fatalf("%d refused", len(r))
		}
		if got := dump(t, m); !maps.Equal(got, want) {
			t.Errorf("dumped %d entries, want %d", len(got), len(want))
		}
	})
}

// A dump while entries come and go ends, and has every entry that did not change.
func TestDumpUnderChange(t *testing.T) {
	eachEdge(t, func(t *testing.T, open func(testing.TB, uint32) edge) {
		const stable, churned = 9000, 3000
		m := open(t, stable+churned)
		defer func() { _ = m.Close() }()
		var keep, churn []plan.Item
		var gone []netip.Prefix
		for i := range stable {
			keep = append(keep, plan.Item{Prefix: host(i * 2), Entry: ipcache.Entry{Number: uint32(i + 1)}})
		}
		for i := range churned {
			churn = append(churn, plan.Item{Prefix: host(i*2 + 1), Entry: ipcache.Entry{Number: 5}})
			gone = append(gone, host(i*2+1))
		}
		if r := m.Upsert(keep); r != nil {
			t.Fatal(r)
		}
		stop := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					m.Upsert(churn)
					m.Delete(gone)
				}
			}
		})
		for range 20 {
			raw, err := m.Dump(context.Background())
			if errors.Is(err, ErrPartial) {
				continue // allowed, and said
			}
			if err != nil {
				t.Fatal(err)
			}
			got := make(ipcache.Entries, len(raw))
			for _, r := range raw {
				p, err := DecodeKey(r.Key)
				if err != nil {
					t.Fatal(err)
				}
				got[p] = DecodeValue(r.Value)
			}
			for _, i := range keep {
				if got[i.Prefix] != i.Entry {
					t.Fatalf("%s is missing from a dump of %d", i.Prefix, len(got))
				}
			}
		}
		close(stop)
		wg.Wait()
	})
}

// cilium#11612, #14427, #48945: user space and datapath disagree.
func TestB32LookupEqualsTheDatapath(t *testing.T) {
	eachEdge(t, func(t *testing.T, open func(testing.TB, uint32) edge) {
		rapid.Check(t, func(rt *rapid.T) {
			m := open(t, 64)
			defer func() { _ = m.Close() }()
			table := &ipcache.Table{}
			for range rapid.IntRange(0, 40).Draw(rt, "writes") {
				p := drawPrefix(rt)
				if rapid.IntRange(0, 4).Draw(rt, "delete") == 0 {
					table.Delete(p)
					m.Delete([]netip.Prefix{p})
					continue
				}
				e := ipcache.Entry{Number: rapid.Uint32Range(1, 1000).Draw(rt, "number")}
				table.Set(p, e)
				if r := m.Upsert([]plan.Item{{Prefix: p, Entry: e}}); r != nil {
					rt.Fatal(r)
				}
			}
			for range 20 {
				addr := drawPrefix(rt).Addr()
				_, want, found := table.Lookup(addr)
				v, ok, err := m.Lookup(addr)
				if err != nil || ok != found || ok && DecodeValue(v) != want {
					rt.Fatalf("%s: map %v %v %v, table %v %v", addr, DecodeValue(v), ok, err, want, found)
				}
			}
		})
	})
}

// cilium#4172: a number that changes is one write, and no reader misses the prefix.
func TestB26bChangeInPlace(t *testing.T) {
	eachEdge(t, func(t *testing.T, open func(testing.TB, uint32) edge) {
		m := open(t, 100)
		defer func() { _ = m.Close() }()
		m.Upsert([]plan.Item{item("10.0.0.0/8", 1)})
		var wg sync.WaitGroup
		wg.Go(func() {
			for n := range uint32(2000) {
				m.Upsert([]plan.Item{item("10.0.0.0/8", n+1)})
			}
		})
		defer wg.Wait()
		for range 5000 {
			if _, ok, err := m.Lookup(netip.MustParseAddr("10.1.1.1")); !ok || err != nil {
				t.Fatalf("missed the prefix: %v", err)
			}
		}
	})
}
