package index_test

import (
	"maps"
	"net/netip"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/eniplane/eniplane/identity-service/internal/index"
	"github.com/eniplane/eniplane/identity-service/internal/ledger"
	"github.com/eniplane/eniplane/internal/prefix"
)

// book is the records of a store, and who holds what, in the dumbest way.
type book struct {
	x        *index.Index
	revision int64
	numbers  map[netip.Prefix]ledger.Number
	sets     map[ledger.Digest]ledger.Set
	holdings map[ledger.HoldingID]ledger.Digest
	records  []index.Record // all, for a Reset
}

func newBook(history int) *book {
	b := &book{
		x: index.New(history), numbers: make(map[netip.Prefix]ledger.Number),
		sets: make(map[ledger.Digest]ledger.Set), holdings: make(map[ledger.HoldingID]ledger.Digest),
	}
	b.records = []index.Record{index.Meta{LedgerID: "l", Range: ledger.Range{First: 1, Last: 1000}, Revision: 1}}
	b.revision = 1
	b.x.Reset(b.revision, slices.Clone(b.records))
	return b
}

func (b *book) commit(records ...index.Record) {
	b.revision++
	for i, r := range records {
		if h, is := r.(index.Holding); is {
			h.Revision = b.revision
			records[i] = h
		}
	}
	b.records = append(b.records, records...)
	// In the order of keys, as a watch would bring them: holdings come first.
	shuffled := slices.Clone(records)
	slices.Reverse(shuffled)
	b.x.Apply(b.revision, shuffled)
}

func owner(name string) ledger.Owner { return ledger.Owner{Kind: 1, Name: name, UID: "u"} }

func (b *book) hold(session ledger.SessionID, name string, prefixes ...netip.Prefix) {
	set, err := ledger.NewSet(prefixes)
	if err != nil {
		panic(err)
	}
	var records []index.Record
	for _, p := range set.Prefixes {
		if b.numbers[p] == 0 {
			b.numbers[p] = ledger.Number(len(b.numbers) + 1)
			g := ledger.Grant{Prefix: p, Number: b.numbers[p]}
			records = append(records, index.Prefix{Grant: g, Created: 7, Revision: b.revision + 1}, index.Number{Grant: g})
		}
	}
	if _, stored := b.sets[set.Digest]; !stored {
		b.sets[set.Digest] = set
		records = append(records,
			index.Chunk{Set: set.Digest, Prefixes: set.Prefixes},
			index.SetMeta{Set: set.Digest, Parts: 1, Prefixes: len(set.Prefixes), Revision: b.revision + 1})
	}
	id := ledger.HoldingID{Session: session, Owner: owner(name).Key()}
	b.holdings[id] = set.Digest
	b.commit(append(records, index.Holding{ID: id, Holding: ledger.Holding{Owner: owner(name), Set: set.Digest}})...)
}

func (b *book) drop(session ledger.SessionID, name string) {
	id := ledger.HoldingID{Session: session, Owner: owner(name).Key()}
	delete(b.holdings, id)
	b.commit(index.Holding{ID: id, Holding: ledger.Holding{Owner: owner(name), Dropped: true}})
}

// held is what a scope must show.
func (b *book) held(scope ledger.SessionID) map[netip.Prefix]ledger.Number {
	out := make(map[netip.Prefix]ledger.Number)
	for id, set := range b.holdings {
		if scope == index.Cluster || id.Session == scope {
			for _, p := range b.sets[set].Prefixes {
				out[p] = b.numbers[p]
			}
		}
	}
	return out
}

// follower keeps a copy from a snapshot and deltas.
type follower struct {
	scope    ledger.SessionID
	cursor   index.Cursor
	revision int64
	copy     map[netip.Prefix]ledger.Number
}

func follow(x *index.Index, scope ledger.SessionID) *follower {
	f := &follower{scope: scope, copy: make(map[netip.Prefix]ledger.Number)}
	var grants []ledger.Grant
	grants, f.revision, f.cursor = x.Snapshot(scope)
	for _, g := range grants {
		f.copy[g.Prefix] = g.Number
	}
	return f
}

func (f *follower) catchUp(x *index.Index) index.Standing {
	changes, cursor, _, standing := x.Next(f.cursor)
	if standing != index.Good {
		return standing
	}
	f.cursor = cursor
	merged, relevant := index.Merge(changes, f.scope)
	if !relevant {
		return standing
	}
	f.revision = merged.Revision
	for _, g := range merged.Down {
		delete(f.copy, g.Prefix)
	}
	for _, g := range merged.Up {
		f.copy[g.Prefix] = g.Number
	}
	return standing
}

var pool = func() []netip.Prefix {
	var out []netip.Prefix
	for _, s := range []string{"10.0.0.0/8", "10.0.0.0/16", "10.0.0.1/32", "192.0.2.0/24", "2001:db8::/32", "2001:db8::1/128"} {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}()

// Whenever a follower looks, how many changes it missed meanwhile and whether it
// resumes by a revision: snapshot and deltas add up to what is held.
func TestFollowersSeeWhatIsHeld(t *testing.T) {
	scopes := []ledger.SessionID{index.Cluster, "a", "b"}
	rapid.Check(t, func(t *rapid.T) {
		b := newBook(0)
		var followers []*follower
		for _, s := range scopes {
			followers = append(followers, follow(b.x, s))
		}
		session, name := rapid.SampledFrom(scopes[1:]), rapid.SampledFrom([]string{"x", "y", "z"})
		t.Repeat(map[string]func(*rapid.T){
			"hold": func(t *rapid.T) {
				b.hold(session.Draw(t, "session"), name.Draw(t, "owner"), rapid.SliceOf(rapid.SampledFrom(pool)).Draw(t, "set")...)
			},
			"drop":    func(t *rapid.T) { b.drop(session.Draw(t, "session"), name.Draw(t, "owner")) },
			"nothing": func(*rapid.T) { b.revision++; b.x.Progress(b.revision) },
			"new follower": func(t *rapid.T) {
				followers = append(followers, follow(b.x, rapid.SampledFrom(scopes).Draw(t, "scope")))
			},
			"reconnect": func(t *rapid.T) {
				f := rapid.SampledFrom(followers).Draw(t, "follower")
				cursor, ok := b.x.Resume(f.revision)
				if !ok {
					t.Fatalf("cannot resume from %d", f.revision)
				}
				f.cursor = cursor
			},
			"look": func(t *rapid.T) {
				f := rapid.SampledFrom(followers).Draw(t, "follower")
				if s := f.catchUp(b.x); s != index.Good {
					t.Fatalf("standing %v", s)
				}
				if want := b.held(f.scope); !maps.Equal(f.copy, want) {
					t.Fatalf("scope %q shows %v, want %v", f.scope, f.copy, want)
				}
			},
			"": func(t *rapid.T) {
				for _, p := range pool {
					checkIdentity(t, b, p)
				}
			},
		})
		// Reading it all anew gives the same as following.
		again := index.New(0)
		again.Reset(b.revision, slices.Clone(b.records))
		for _, scope := range scopes {
			if f := follow(again, scope); !maps.Equal(f.copy, b.held(scope)) {
				t.Fatalf("after Reset scope %q shows %v, want %v", scope, f.copy, b.held(scope))
			}
		}
	})
}

func checkIdentity(t *rapid.T, b *book, p netip.Prefix) {
	id, known := b.x.Identity(p, 10)
	if known != (b.numbers[p] != 0) {
		t.Fatalf("%s known %v", p, known)
	}
	if !known {
		return
	}
	var want []index.Holder
	for holding, set := range b.holdings {
		if slices.Contains(b.sets[set].Prefixes, p) {
			for _, name := range []string{"x", "y", "z"} {
				if owner(name).Key() == holding.Owner {
					want = append(want, index.Holder{Owner: owner(name), Session: holding.Session})
				}
			}
		}
	}
	slices.SortFunc(want, func(a, b index.Holder) int {
		if c := a.Owner.Compare(b.Owner); c != 0 {
			return c
		}
		return slices.Compare([]byte(a.Session), []byte(b.Session))
	})
	if id.Number != b.numbers[p] || id.HolderCount != len(want) || !slices.Equal(id.Holders, want) {
		t.Fatalf("%s is %+v, want holders %+v", p, id, want)
	}
	if byNumber, ok := b.x.IdentityOf(id.Number, 10); !ok || byNumber.Prefix != p {
		t.Fatalf("number %d is of %v", id.Number, byNumber.Prefix)
	}
}

func TestResumeOutsideTheHistory(t *testing.T) {
	b := newBook(20)
	slow := follow(b.x, index.Cluster)
	first := b.revision
	for i := range 100 {
		b.hold("a", "x", pool[i%len(pool)])
	}
	if s := slow.catchUp(b.x); s != index.TooOld {
		t.Errorf("a follower that missed 100 changes of 20: %v", s)
	}
	if _, ok := b.x.Resume(first); ok {
		t.Error("resumed from a revision that is forgotten")
	}
	if _, ok := b.x.Resume(b.revision + 1); ok {
		t.Error("resumed from the future")
	}
	if _, ok := b.x.Resume(b.revision - 1); !ok {
		t.Error("cannot resume from one change ago")
	}
	fresh := follow(b.x, index.Cluster)
	b.x.Reset(b.revision+5, slices.Clone(b.records))
	if s := fresh.catchUp(b.x); s != index.Replaced {
		t.Errorf("after Reset: %v", s)
	}
	if _, ok := b.x.Resume(b.revision - 1); ok {
		t.Error("resumed from before a Reset")
	}
	if _, ok := b.x.Resume(b.revision + 5); !ok {
		t.Error("cannot resume from the revision of the Reset")
	}
}

// A list read page by page is all of it, in order, once, whatever the page size.
func TestListPages(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := newBook(0)
		var all []netip.Prefix
		for _, text := range rapid.SliceOfNDistinct(rapid.IntRange(0, 200), 0, 60, rapid.ID).Draw(t, "prefixes") {
			p := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(text), 0, 0}), 16+text%8).Masked()
			all = append(all, p)
			b.hold("a", "x", p)
		}
		slices.SortFunc(all, prefix.Compare)
		all = slices.Compact(all)
		filter := index.Filter{State: rapid.SampledFrom([]index.State{index.AnyState, index.Live, index.Draining}).Draw(t, "state")}
		if rapid.Bool().Draw(t, "overlapping") {
			filter.Overlapping = netip.MustParsePrefix(rapid.SampledFrom([]string{"10.0.0.0/10", "10.1.0.1/32", "::/0"}).Draw(t, "with"))
		}
		held := b.held(index.Cluster)
		var want []netip.Prefix
		for _, p := range all {
			_, live := held[p]
			if filter.State == index.Live && !live || filter.State == index.Draining && live {
				continue
			}
			if filter.Overlapping.IsValid() && !p.Overlaps(filter.Overlapping) {
				continue
			}
			want = append(want, p)
		}
		size := rapid.IntRange(1, 7).Draw(t, "size")
		var got []netip.Prefix
		for after := (netip.Prefix{}); ; {
			page, more := b.x.List(after, size, filter, 1)
			for _, id := range page {
				got = append(got, id.Prefix)
			}
			if !more {
				break
			}
			if len(page) != size {
				t.Fatalf("a page of %d before the last", len(page))
			}
			after = page[len(page)-1].Prefix
		}
		if !slices.Equal(got, want) {
			t.Fatalf("%v, want %v", got, want)
		}
	})
}
