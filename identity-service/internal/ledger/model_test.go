package ledger_test

import (
	"errors"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"testing"

	"pgregory.net/rapid"

	"github.com/eniplane/eniplane/identity-service/internal/ledger"
)

// disk is everything that events have made true, as a store would keep it.
type disk struct {
	numberRange ledger.Range
	sessions    map[ledger.SessionID]ledger.Session
	holdings    map[ledger.HoldingID]ledger.Holding
	sets        map[ledger.Digest]ledger.Set
	numbers     map[netip.Prefix]ledger.Number
	owners      map[ledger.Number]netip.Prefix
}

func newDisk(r ledger.Range) *disk {
	return &disk{
		numberRange: r,
		sessions:    make(map[ledger.SessionID]ledger.Session),
		holdings:    make(map[ledger.HoldingID]ledger.Holding),
		sets:        make(map[ledger.Digest]ledger.Set),
		numbers:     make(map[netip.Prefix]ledger.Number),
		owners:      make(map[ledger.Number]netip.Prefix),
	}
}

// read is what an operation on a holding and a set reads.
func (d *disk) read(id ledger.HoldingID, set ledger.Set) ledger.State {
	s := ledger.State{Range: d.numberRange, Numbers: make(map[netip.Prefix]ledger.Number), Owners: d.owners}
	if session, ok := d.sessions[id.Session]; ok {
		s.Session = &session
	}
	if holding, ok := d.holdings[id]; ok {
		s.Holding = &holding
	}
	_, s.SetStored = d.sets[set.Digest]
	for _, p := range set.Prefixes {
		if n, ok := d.numbers[p]; ok {
			s.Numbers[p] = n
		}
	}
	return s
}

func (d *disk) write(t *rapid.T, events []ledger.Event) {
	for _, e := range events {
		switch e := e.(type) {
		case ledger.SessionOpened:
			d.sessions[e.Session.ID] = e.Session
		case ledger.NumberGiven:
			if n, has := d.numbers[e.Prefix]; has {
				t.Fatalf("%s has %d and was given %d", e.Prefix, n, e.Number)
			}
			if p, has := d.owners[e.Number]; has {
				t.Fatalf("%d is of %s and was given to %s", e.Number, p, e.Prefix)
			}
			d.numbers[e.Prefix], d.owners[e.Number] = e.Number, e.Prefix
		case ledger.SetStored:
			d.sets[e.Set.Digest] = e.Set
		case ledger.HoldingChanged:
			d.holdings[e.ID] = e.Holding
		default:
			t.Fatalf("event %T", e)
		}
	}
}

// live is the prefixes that some holding contains.
func (d *disk) live() map[netip.Prefix]map[ledger.HoldingID]bool {
	out := make(map[netip.Prefix]map[ledger.HoldingID]bool)
	for id, h := range d.holdings {
		for _, p := range d.sets[h.Set].Prefixes {
			if out[p] == nil {
				out[p] = make(map[ledger.HoldingID]bool)
			}
			out[p][id] = true
		}
	}
	return out
}

// model is the same in the dumbest way: who holds what.
type model struct {
	epochs  map[ledger.SessionID]ledger.Epoch
	holders map[netip.Prefix]map[ledger.HoldingID]bool
	numbers map[netip.Prefix]ledger.Number // ever given
	newest  map[ledger.HoldingID]order
}

type order struct {
	epoch      ledger.Epoch
	generation ledger.Generation
}

func (m *model) replace(id ledger.HoldingID, prefixes []netip.Prefix) {
	for p, holders := range m.holders {
		if delete(holders, id); len(holders) == 0 {
			delete(m.holders, p)
		}
	}
	for _, p := range prefixes {
		if m.holders[p] == nil {
			m.holders[p] = make(map[ledger.HoldingID]bool)
		}
		m.holders[p][id] = true
	}
}

// TestModel drives the ledger with calls in any order (old epochs, old
// generations, repeated calls, releases of what is not held, crashes between any
// two commits of a call) against holders kept as plain sets. B05, B07, B08, B09,
// B17 and B35 are kinds of this.
func TestModel(t *testing.T) {
	pool := prefixes("10.0.0.0/8", "10.0.0.0/16", "10.0.0.1/32", "192.0.2.0/24", "2001:db8::/32", "2001:db8::1/128")
	nodes := []string{"a", "b", "c"}
	owners := []ledger.Owner{
		{Kind: 1, Namespace: "ns", Name: "p", UID: "1"},
		{Kind: 1, Namespace: "ns", Name: "p", UID: "2"}, // Created again.
		{Kind: 7, Name: "restore", UID: "a"},
	}
	rapid.Check(t, func(t *rapid.T) {
		d := newDisk(ledger.Range{First: 10, Last: 19})
		m := &model{
			epochs: make(map[ledger.SessionID]ledger.Epoch), holders: make(map[netip.Prefix]map[ledger.HoldingID]bool),
			numbers: make(map[netip.Prefix]ledger.Number), newest: make(map[ledger.HoldingID]order),
		}
		requests := 0
		request := func() ledger.RequestID { requests++; return ledger.RequestID(strconv.Itoa(requests)) }
		apply := func(s ledger.State, op ledger.Op) error {
			_, events, err := ledger.Apply(s, op)
			d.write(t, events)
			return err
		}
		call := func() (ledger.HoldingID, ledger.Owner, order) {
			node, owner := rapid.SampledFrom(nodes).Draw(t, "node"), rapid.SampledFrom(owners).Draw(t, "owner")
			return ledger.HoldingID{Session: ledger.SessionIDOf(node, "uid"), Owner: owner.Key()}, owner, order{
				ledger.Epoch(rapid.Uint64Range(1, 4).Draw(t, "epoch")),
				ledger.Generation(rapid.Uint64Range(1, 8).Draw(t, "generation")),
			}
		}
		// verdict is what must become of a call, decided from the model alone.
		fence := func(id ledger.HoldingID, o order) error {
			switch stored := m.epochs[id.Session]; {
			case stored == 0 || o.epoch > stored:
				return ledger.ErrSessionUnknown
			case o.epoch < stored:
				return ledger.ErrStaleEpoch
			default:
				return nil
			}
		}
		newer := func(id ledger.HoldingID, o order) bool {
			last := m.newest[id]
			return o.epoch > last.epoch || o.epoch == last.epoch && o.generation > last.generation
		}

		t.Repeat(map[string]func(*rapid.T){
			"open": func(t *rapid.T) {
				node := rapid.SampledFrom(nodes).Draw(t, "node")
				id := ledger.HoldingID{Session: ledger.SessionIDOf(node, "uid")}
				op := ledger.Open{Node: node, NodeUID: "uid", BootID: "boot", Request: request()}
				for range rapid.IntRange(1, 2).Draw(t, "times") { // The second is a retry.
					if err := apply(d.read(id, ledger.Set{}), op); err != nil {
						t.Fatal(err)
					}
				}
				m.epochs[id.Session]++
			},
			"hold": func(t *rapid.T) {
				id, owner, at := call()
				set, err := ledger.NewSet(rapid.SliceOf(rapid.SampledFrom(pool)).Draw(t, "set"))
				if err != nil {
					t.Fatal(err)
				}
				op := ledger.Hold{
					Session: id.Session, Epoch: at.epoch, Owner: owner, Generation: at.generation,
					Request: request(), Body: set.Digest, Set: set.Digest,
				}
				change, err := ledger.Admit(d.read(id, set), op)
				if want := fence(id, at); want != nil {
					if !errors.Is(err, want) {
						t.Fatalf("%v, want %v", err, want)
					}
					return
				}
				if !newer(id, at) {
					if err == nil && !change {
						return // The very same again; the laws below hold.
					}
					if !errors.Is(err, ledger.ErrStaleGeneration) && !errors.Is(err, ledger.ErrGenerationReused) {
						t.Fatalf("%+v after %+v: %v", at, m.newest[id], err)
					}
					return
				}
				if err != nil || !change {
					t.Fatalf("%+v after %+v: %v, %v", at, m.newest[id], change, err)
				}
				// Three commits, any of which may be the last: then nobody sees
				// anything.
				crash := rapid.IntRange(0, 5).Draw(t, "crash")
				var wanted []ledger.Wanted
				for _, p := range set.Prefixes {
					if _, has := d.numbers[p]; !has {
						wanted = append(wanted, ledger.Wanted{Prefix: p})
					}
				}
				taken := ledger.Numbers{Taken: func(n ledger.Number) bool { _, is := d.owners[n]; return is }, Count: uint64(len(d.owners))}
				grants, err := ledger.Choose(d.numberRange, wanted, 0, taken)
				if err != nil {
					t.Fatal(err)
				}
				for i, op := range []ledger.Op{ledger.Allocate{Grants: grants}, ledger.StoreSet{Set: set}, op} {
					if crash == i {
						return
					}
					if err := apply(d.read(id, set), op); err != nil {
						t.Fatalf("%T: %v", op, err)
					}
				}
				m.newest[id] = at
				m.replace(id, set.Prefixes)
				if err := apply(d.read(id, set), op); err != nil {
					t.Fatalf("the same again: %v", err)
				}
			},
			"drop": func(t *rapid.T) {
				id, owner, at := call()
				op := ledger.Drop{Session: id.Session, Epoch: at.epoch, Owner: owner, Generation: at.generation, Request: request()}
				err := apply(d.read(id, ledger.Set{}), op)
				if want := fence(id, at); want != nil {
					if !errors.Is(err, want) {
						t.Fatalf("%v, want %v", err, want)
					}
					return
				}
				if !newer(id, at) {
					if err != nil && !errors.Is(err, ledger.ErrStaleGeneration) && !errors.Is(err, ledger.ErrGenerationReused) {
						t.Fatal(err)
					}
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				m.newest[id] = at
				m.replace(id, nil)
			},
			"": func(t *rapid.T) {
				if live := d.live(); !maps.EqualFunc(live, m.holders, maps.Equal[map[ledger.HoldingID]bool, map[ledger.HoldingID]bool]) {
					t.Fatalf("holders %v, want %v", live, m.holders)
				}
				for p := range m.holders {
					if d.numbers[p] == 0 {
						t.Fatalf("%s is held and has no number", p)
					}
				}
				for p, n := range m.numbers {
					if d.numbers[p] != n {
						t.Fatalf("the number of %s was %d and is %d", p, n, d.numbers[p])
					}
				}
				maps.Copy(m.numbers, d.numbers)
				all := slices.Sorted(maps.Values(d.numbers))
				if len(slices.Compact(all)) != len(d.numbers) || len(d.owners) != len(d.numbers) {
					t.Fatalf("two prefixes share a number: %v", d.numbers)
				}
			},
		})
	})
}
