package index

import (
	"sort"

	"github.com/eniplane/eniplane/identity-service/internal/ledger"
)

// Change is what one commit did, for those who watch. The slices are shared and
// must not be changed.
type Change struct {
	Revision int64
	// Session is whose session or holding changed.
	Session ledger.SessionID
	// Holding says that a holding changed, if only its generation.
	Holding bool
	// Up and Down are prefixes that became, and are no longer, held by anybody.
	Up, Down []ledger.Grant
	// SessionUp and SessionDown are the same for this session.
	SessionUp, SessionDown []ledger.Grant
}

func (c *Change) size() int {
	return 1 + len(c.Up) + len(c.Down) + len(c.SessionUp) + len(c.SessionDown)
}

// history is the last changes, so that a reader can go on where it was. Changes
// are counted from the start of the process.
type history struct {
	changes []Change
	first   uint64 // count of changes[0]
	size    int    // sum of the sizes
	base    int64  // every change after this revision is here
}

const keptAtLeast = 16

// add appends a change and forgets the oldest ones beyond the limit.
func (h *history) add(c Change, limit int) {
	h.changes = append(h.changes, c)
	h.size += c.size()
	for h.size > limit && len(h.changes) > keptAtLeast {
		h.size -= h.changes[0].size()
		h.base = h.changes[0].Revision
		h.changes[0] = Change{} // The slice may live on for a while.
		h.changes = h.changes[1:]
		h.first++
	}
}

func (h *history) end() uint64 { return h.first + uint64(len(h.changes)) }

// after returns the position of the first change after a revision, and whether
// none in between is forgotten.
func (h *history) after(revision int64) (uint64, bool) {
	i := sort.Search(len(h.changes), func(i int) bool { return h.changes[i].Revision > revision })
	return h.first + uint64(i), revision >= h.base
}
