package index

import (
	"net/netip"
	"slices"
	"sort"
	"strings"

	"github.com/eniplane/eniplane/identity-service/internal/ledger"
	"github.com/eniplane/eniplane/internal/prefix"
)

// Holder is one holding that contains a prefix.
type Holder struct {
	Owner   ledger.Owner
	Node    string
	Session ledger.SessionID
}

// Identity is a prefix with its number and everybody who holds it.
type Identity struct {
	ledger.Grant
	// Holders are sorted by owner, then node; at most as many as asked for.
	Holders []Holder
	// HolderCount is how many there are. Zero means that the number is kept for
	// its prefix, but nobody holds it.
	HolderCount     int
	Created         ledger.Millis
	CreatedRevision int64
}

// Identity returns the identity of a canonical prefix.
func (x *Index) Identity(p netip.Prefix, maxHolders int) (Identity, bool) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	e := x.world.entries[p]
	if e == nil {
		return Identity{}, false
	}
	return x.world.identity(e, maxHolders), true
}

// IdentityOf returns the identity that has a number.
func (x *Index) IdentityOf(n ledger.Number, maxHolders int) (Identity, bool) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	p, ok := x.world.numbers[n]
	if !ok {
		return Identity{}, false
	}
	e := x.world.entries[p]
	if e == nil || e.number != n {
		return Identity{}, false
	}
	return x.world.identity(e, maxHolders), true
}

// Lookup returns the identity of the longest prefix that somebody holds and that
// contains addr. An IPv4-mapped address is the IPv4 one.
func (x *Index) Lookup(addr netip.Addr, maxHolders int) (Identity, bool) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	addr = addr.Unmap().WithZone("")
	for bits := addr.BitLen(); bits > 0; bits-- {
		p, err := addr.Prefix(bits)
		if err != nil {
			return Identity{}, false
		}
		if e := x.world.entries[p]; e != nil && e.live() {
			return x.world.identity(e, maxHolders), true
		}
	}
	return Identity{}, false
}

func (w *world) identity(e *entry, maxHolders int) Identity {
	id := Identity{Grant: e.grant(), Created: e.created, CreatedRevision: e.revision}
	for _, s := range e.sets {
		for sessionID, owners := range s.holders {
			one := w.sessions[sessionID]
			node := ""
			if one.record != nil {
				node = one.record.Node
			}
			for key := range owners {
				id.Holders = append(id.Holders, Holder{Owner: one.holdings[key].Owner, Node: node, Session: sessionID})
			}
		}
	}
	id.HolderCount = len(id.Holders)
	slices.SortFunc(id.Holders, func(a, b Holder) int {
		if c := a.Owner.Compare(b.Owner); c != 0 {
			return c
		}
		return strings.Compare(string(a.Session), string(b.Session))
	})
	if len(id.Holders) > maxHolders {
		id.Holders = slices.Clone(id.Holders[:maxHolders])
	}
	return id
}

// State selects identities by where they are in their life.
type State int

// The states. AnyState selects all.
const (
	AnyState State = iota
	Live
	Draining
)

// Filter selects identities.
type Filter struct {
	State State
	// Overlapping selects those that contain it or are contained in it. The zero
	// Prefix selects all.
	Overlapping netip.Prefix
}

// List returns up to limit identities that come after a prefix, in order, and
// whether there are more. The zero Prefix is before all.
func (x *Index) List(after netip.Prefix, limit int, f Filter, maxHolders int) ([]Identity, bool) {
	var page []Identity
	x.mu.Lock() // ordered merges.
	entries := x.world.ordered()
	x.mu.Unlock()

	// The slice is never changed, only replaced; what it points to is.
	x.mu.RLock()
	defer x.mu.RUnlock()
	start := 0
	if after.IsValid() {
		start = sort.Search(len(entries), func(i int) bool { return prefix.Compare(entries[i].prefix, after) > 0 })
	}
	for _, e := range entries[start:] {
		if f.Overlapping.IsValid() && !e.prefix.Overlaps(f.Overlapping) {
			continue
		}
		if f.State != AnyState && (f.State == Live) != e.live() {
			continue
		}
		if len(page) == limit {
			return page, true
		}
		page = append(page, x.world.identity(e, maxHolders))
	}
	return page, false
}
