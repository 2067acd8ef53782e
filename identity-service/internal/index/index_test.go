package index_test

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/eniplane/eniplane/identity-service/internal/index"
	"github.com/eniplane/eniplane/identity-service/internal/ledger"
)

func TestLookupIsTheLongestHeldPrefix(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := newBook(0)
		// Two bits of address make overlaps of every kind.
		draw := rapid.Custom(func(t *rapid.T) netip.Prefix {
			if rapid.Bool().Draw(t, "v6") {
				a := netip.AddrFrom16([16]byte{0x20, 1, 15: byte(rapid.IntRange(0, 3).Draw(t, "low"))})
				return netip.PrefixFrom(a, rapid.SampledFrom([]int{1, 16, 64, 126, 127, 128}).Draw(t, "bits")).Masked()
			}
			a := netip.AddrFrom4([4]byte{10, 0, 0, byte(rapid.IntRange(0, 3).Draw(t, "low"))})
			return netip.PrefixFrom(a, rapid.SampledFrom([]int{1, 8, 24, 30, 31, 32}).Draw(t, "bits")).Masked()
		})
		b.hold("a", "x", rapid.SliceOf(draw).Draw(t, "x")...)
		b.hold("a", "y", rapid.SliceOf(draw).Draw(t, "y")...)
		b.drop("a", "y") // Has numbers, but nobody holds it.
		held := b.held(index.Cluster)
		for _, addr := range []string{"10.0.0.0", "10.0.0.1", "10.0.0.2", "10.0.0.3", "11.0.0.0", "2001::", "2001::1", "2001::3", "::ffff:10.0.0.1", "ff00::1"} {
			a := netip.MustParseAddr(addr)
			var want netip.Prefix
			for p := range held {
				if p.Contains(a.Unmap()) && (!want.IsValid() || p.Bits() > want.Bits()) {
					want = p
				}
			}
			got, ok := b.x.Lookup(a, 1)
			if got.Prefix != want || ok != want.IsValid() || got.Number != held[want] {
				t.Fatalf("%s: %+v, want %v of %v", addr, got, want, held)
			}
		}
	})
}

// Damage concerns what it damages and nothing else.
func TestDamageIsReportedAndHarmless(t *testing.T) {
	ten, eleven := netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("11.0.0.0/8")
	for _, tc := range []struct {
		name    string
		records func(b *book) []index.Record
		about   string
	}{
		{"a key that nobody writes", func(*book) []index.Record {
			return []index.Record{index.Malformed{Key: "/x", Err: errors.New("who wrote that")}}
		}, "/x"},
		{"a holding of a set that is gone", func(*book) []index.Record {
			d := ledger.Body("gone")
			return []index.Record{index.Holding{ID: ledger.HoldingID{Session: "b", Owner: "o"}, Holding: ledger.Holding{Set: d}}}
		}, "held, but not stored"},
		{"a set that misses a part", func(*book) []index.Record {
			d := ledger.Body("half")
			return []index.Record{index.SetMeta{Set: d, Parts: 2, Prefixes: 3}}
		}, "do not add up"},
		{"the number of a held prefix was deleted", func(b *book) []index.Record {
			return []index.Record{index.Prefix{Grant: ledger.Grant{Prefix: ten}, Deleted: true}}
		}, "was deleted"},
		{"a number of a prefix that does not have it", func(*book) []index.Record {
			return []index.Record{index.Number{Grant: ledger.Grant{Prefix: ten, Number: 900}}}
		}, "number 900"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b := newBook(0)
			b.hold("a", "x", ten, eleven)
			b.commit(tc.records(b)...)
			broken := b.x.Broken()
			found := false
			for what, why := range broken {
				found = found || strings.Contains(what+" "+why, tc.about)
			}
			if !found || b.x.Sizes().Broken != len(broken) {
				t.Errorf("reported %v", broken)
			}
			b.hold("a", "y", eleven)
			for p, n := range b.held(index.Cluster) {
				if id, ok := b.x.Identity(p, 1); !ok || id.Number != n || id.HolderCount == 0 {
					t.Errorf("%s is %+v", p, id)
				}
			}
		})
	}
}

func TestDamagedSetIsRepairedByWritingItAgain(t *testing.T) {
	b := newBook(0)
	ten := netip.MustParsePrefix("10.0.0.0/8")
	b.hold("a", "x", ten)
	d := b.holdings[ledger.HoldingID{Session: "a", Owner: owner("x").Key()}]
	fresh := index.New(0)
	meta := index.SetMeta{Set: d, Parts: 1, Prefixes: 1, Revision: 3}
	var damaged []index.Record
	for _, r := range b.records {
		if _, is := r.(index.Chunk); !is {
			damaged = append(damaged, r)
		}
	}
	fresh.Reset(b.revision, damaged)
	set := b.sets[d]
	id := ledger.HoldingID{Session: "a", Owner: owner("x").Key()}
	if r := fresh.ReadSet(id, set); r.State.SetStored || len(fresh.Broken()) == 0 {
		t.Fatalf("a set without its part: stored %v, reported %v", r.State.SetStored, fresh.Broken())
	}
	fresh.Apply(b.revision+1, []index.Record{index.Chunk{Set: d, Prefixes: set.Prefixes}, meta})
	if r := fresh.ReadSet(id, set); !r.State.SetStored || len(fresh.Broken()) != 0 {
		t.Errorf("written again: stored %v, reported %v", r.State.SetStored, fresh.Broken())
	}
	if one, _ := fresh.Identity(ten, 1); one.HolderCount != 1 {
		t.Errorf("the holder was lost: %+v", one)
	}
}

func TestGarbage(t *testing.T) {
	b := newBook(0)
	ten, eleven := netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("11.0.0.0/8")
	b.hold("a", "x", ten)
	b.hold("a", "x", ten, eleven)
	g := b.x.Garbage(1)
	if len(g.Sets) != 1 || len(g.Sets[0].Set.Prefixes) != 1 || g.Sets[0].Condemned || len(g.Dropped) != 0 || len(g.Parts) != 0 {
		t.Fatalf("%+v", g)
	}
	d := g.Sets[0].Set.Digest
	b.commit(index.SetMeta{Set: d, Parts: 1, Prefixes: 1, Condemned: true, Revision: 9})
	if r := b.x.ReadSet(ledger.HoldingID{Session: "a"}, g.Sets[0].Set); r.State.SetStored || r.SetRevision != 9 {
		t.Errorf("a condemned set counts as stored: %+v", r)
	}
	b.commit(index.SetMeta{Set: d, Deleted: true}, index.Chunk{Set: d, Deleted: true})
	b.drop("a", "x")
	g = b.x.Garbage(1)
	if len(g.Sets) != 1 || len(g.Sets[0].Set.Prefixes) != 2 || len(g.Dropped) != 1 {
		t.Errorf("%+v", g)
	}
	b.commit(index.Chunk{Set: ledger.Body("orphan"), Part: 3})
	if g = b.x.Garbage(0); len(g.Parts) != 1 || len(g.Dropped) != 0 {
		t.Errorf("%+v", g)
	}
	if id, ok := b.x.Identity(ten, 1); !ok || id.HolderCount != 0 || id.Number != 1 {
		t.Errorf("a number was lost with its set: %+v", id)
	}
}

func TestChooseLeavesOutWhoHasANumber(t *testing.T) {
	b := newBook(0)
	ten, eleven := netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("11.0.0.0/8")
	b.hold("a", "x", ten)
	grants, err := b.x.Choose([]ledger.Wanted{{Prefix: ten, Preferred: 5}, {Prefix: eleven, Preferred: 1}}, 0)
	if err != nil || len(grants) != 1 || grants[0].Prefix != eleven || grants[0].Number == 1 {
		t.Errorf("%+v, %v", grants, err)
	}
}

func TestWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := index.New(0)
		nudged := 0
		limited, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := x.Wait(limited, 0, func() { nudged++ }); !errors.Is(err, context.DeadlineExceeded) || nudged == 0 {
			t.Errorf("an index that is not ready: %v after %d nudges", err, nudged)
		}
		x.Reset(5, nil)
		if err := x.Wait(t.Context(), 5, func() {}); err != nil {
			t.Error(err)
		}
		reached := make(chan error, 1)
		go func() { reached <- x.Wait(t.Context(), 7, func() {}) }()
		x.Apply(6, nil)
		synctest.Wait()
		select {
		case err := <-reached:
			t.Fatalf("did not wait: %v", err)
		default:
		}
		x.Progress(7)
		if err := <-reached; err != nil {
			t.Error(err)
		}
		x.Progress(3)
		if x.Revision() != 7 {
			t.Errorf("went back to %d", x.Revision())
		}
	})
}
