package index

import (
	"net/netip"
	"slices"

	"github.com/eniplane/eniplane/identity-service/internal/ledger"
)

// Garbage is what the store need not keep.
type Garbage struct {
	// Dropped are old records of dropped holdings.
	Dropped []Holding
	// Sets have no holder.
	Sets []UnheldSet
	// Parts are sets of which there are parts, but no meta: somebody is about to
	// write it, or died.
	Parts []ledger.Digest
}

// UnheldSet is a set without a holder.
type UnheldSet struct {
	Set       ledger.Set
	Condemned bool
	Revision  int64
}

// Garbage returns what need not be kept: holdings dropped before a time, sets
// that nobody holds. A damaged set is kept, to be looked at. The order is that
// of the names.
func (x *Index) Garbage(droppedBefore ledger.Millis) Garbage {
	x.mu.RLock()
	defer x.mu.RUnlock()
	var g Garbage
	for _, s := range x.world.sessions {
		for _, h := range s.holdings {
			if h.Dropped && h.Changed < droppedBefore {
				g.Dropped = append(g.Dropped, *h)
			}
		}
	}
	for _, s := range x.world.sets {
		if len(s.holders) > 0 || s.broken {
			continue
		}
		prefixes := make([]netip.Prefix, len(s.entries))
		for i, e := range s.entries {
			prefixes[i] = e.prefix
		}
		g.Sets = append(g.Sets, UnheldSet{
			Set: ledger.Set{Digest: s.digest, Prefixes: prefixes}, Condemned: s.condemned, Revision: s.revision,
		})
	}
	for d := range x.world.chunks {
		g.Parts = append(g.Parts, d)
	}
	slices.SortFunc(g.Sets, func(a, b UnheldSet) int { return slices.Compare(a.Set.Digest[:], b.Set.Digest[:]) })
	slices.SortFunc(g.Dropped, func(a, b Holding) int { return int(a.Revision - b.Revision) })
	slices.SortFunc(g.Parts, func(a, b ledger.Digest) int { return slices.Compare(a[:], b[:]) })
	return g
}
