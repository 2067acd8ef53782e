package index

import (
	"slices"

	"github.com/eniplane/eniplane/identity-service/internal/ledger"
	"github.com/eniplane/eniplane/internal/prefix"
)

// Cursor is how far a follower is.
type Cursor struct {
	incarnation uint64
	position    uint64
}

// Cluster is the scope of all that anybody holds.
const Cluster ledger.SessionID = ""

// Snapshot returns what is held in a scope (by one session, or with Cluster by
// anybody) in order, the revision that it shows, and where to go on from.
func (x *Index) Snapshot(scope ledger.SessionID) ([]ledger.Grant, int64, Cursor) {
	x.mu.Lock()
	entries := x.world.ordered()
	x.mu.Unlock()

	x.mu.RLock()
	defer x.mu.RUnlock()
	var grants []ledger.Grant
	if scope == Cluster {
		if len(x.world.recent) > 0 {
			entries = slices.Concat(entries, x.world.recent)
		}
		for _, e := range entries {
			if e.live() {
				grants = append(grants, e.grant())
			}
		}
	} else if s := x.world.sessions[scope]; s != nil {
		for _, h := range s.holdings {
			if held := x.world.sets[h.Set]; !h.Dropped && held != nil {
				for _, e := range held.entries {
					grants = append(grants, e.grant())
				}
			}
		}
	}
	slices.SortFunc(grants, func(a, b ledger.Grant) int { return prefix.Compare(a.Prefix, b.Prefix) })
	grants = slices.Compact(grants)
	return grants, x.revision, Cursor{incarnation: x.incarnation, position: x.history.end()}
}

// Resume returns the cursor of a follower that has seen everything up to a
// revision. It is false if that cannot be told: the revision is older than the
// history, or of the future.
func (x *Index) Resume(revision int64) (Cursor, bool) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	position, known := x.history.after(revision)
	if !x.ready || !known || revision > x.revision {
		return Cursor{}, false
	}
	return Cursor{incarnation: x.incarnation, position: position}, true
}

// Standing says whether a cursor still finds its next change.
type Standing int

// The standings of a cursor.
const (
	// Good: the next changes are there.
	Good Standing = iota
	// TooOld: they are forgotten; the follower was too slow.
	TooOld
	// Replaced: the whole index was read anew.
	Replaced
)

// Next returns the changes after the cursor, the cursor after them, and a
// channel that closes when there may be more.
func (x *Index) Next(c Cursor) ([]Change, Cursor, <-chan struct{}, Standing) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	if s := x.standing(c); s != Good {
		return nil, c, x.changed, s
	}
	changes := slices.Clone(x.history.changes[c.position-x.history.first:])
	return changes, Cursor{incarnation: c.incarnation, position: x.history.end()}, x.changed, Good
}

// Standing returns whether the changes after the cursor are still there, and a
// channel that closes when that may have changed.
func (x *Index) Standing(c Cursor) (Standing, <-chan struct{}) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return x.standing(c), x.changed
}

func (x *Index) standing(c Cursor) Standing {
	switch {
	case c.incarnation != x.incarnation:
		return Replaced
	case c.position < x.history.first:
		return TooOld
	default:
		return Good
	}
}

// Merge adds changes of a scope up to one. It returns false if none of them
// concerns it. The revision is that of the last one that does.
func Merge(changes []Change, scope ledger.SessionID) (Change, bool) {
	var merged Change
	relevant := false
	ups, downs := make(map[ledger.Grant]struct{}), make(map[ledger.Grant]struct{})
	for _, c := range changes {
		up, down := c.Up, c.Down
		if scope != Cluster {
			if c.Session != scope {
				continue
			}
			up, down = c.SessionUp, c.SessionDown
		}
		if !c.Holding {
			continue
		}
		relevant, merged.Revision = true, c.Revision
		for _, g := range up {
			delete(downs, g)
			ups[g] = struct{}{}
		}
		for _, g := range down {
			delete(ups, g)
			downs[g] = struct{}{}
		}
	}
	merged.Up, merged.Down = sortedKeys(ups), sortedKeys(downs)
	return merged, relevant
}

func sortedKeys(m map[ledger.Grant]struct{}) []ledger.Grant {
	out := make([]ledger.Grant, 0, len(m))
	for g := range m {
		out = append(out, g)
	}
	slices.SortFunc(out, func(a, b ledger.Grant) int { return prefix.Compare(a.Prefix, b.Prefix) })
	return out
}
