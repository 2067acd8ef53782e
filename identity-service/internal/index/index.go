// Package index holds everything that the store says in memory, fed by one watch
// of the store. It answers reads, and it remembers the last changes for all who
// follow. It decides nothing and never talks to the store.
package index

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/eniplane/eniplane/identity-service/internal/ledger"
)

// DefaultHistory is how many changed prefixes are remembered for those who
// follow.
const DefaultHistory = 1 << 20

// Index is the memory. Methods may be called at the same time; one goroutine
// calls Reset, Apply and Progress.
type Index struct {
	limit int

	mu          sync.RWMutex // guards everything below
	world       *world
	revision    int64
	ready       bool
	history     history
	incarnation uint64
	changed     chan struct{} // closed when anything changes
}

// New returns an empty index that is not ready. history is how many changed
// prefixes are remembered; zero means DefaultHistory.
func New(history int) *Index {
	if history == 0 {
		history = DefaultHistory
	}
	return &Index{limit: history, world: newWorld(), changed: make(chan struct{})}
}

// Reset replaces everything by what the store said at a revision. Who follows
// has to start over.
func (x *Index) Reset(revision int64, records []Record) {
	w := newWorld()
	byRank(records)
	for _, r := range records {
		w.apply(r)
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.world = w
	x.incarnation++
	x.history = history{first: x.history.end(), base: revision}
	x.ready = true
	x.moved(revision)
}

// Apply takes in all that changed at one revision. Revisions only grow.
func (x *Index) Apply(revision int64, records []Record) {
	byRank(records)
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, r := range records {
		if c := x.world.apply(r); c != nil {
			c.Revision = revision
			x.history.add(*c, x.limit)
		}
	}
	x.moved(revision)
}

func byRank(records []Record) {
	slices.SortStableFunc(records, func(a, b Record) int { return a.rank() - b.rank() })
}

// Progress says that nothing else happened up to a revision.
func (x *Index) Progress(revision int64) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if revision > x.revision {
		x.moved(revision)
	}
}

// moved is called with mu held.
func (x *Index) moved(revision int64) {
	x.revision = revision
	close(x.changed)
	x.changed = make(chan struct{})
}

// Revision is how far the index is. Zero means that it is not ready.
func (x *Index) Revision() int64 {
	x.mu.RLock()
	defer x.mu.RUnlock()
	if !x.ready {
		return 0
	}
	return x.revision
}

// Wait returns nil when the index has reached a revision, else the context's
// error. It calls nudge each time that it waited a while in vain: a store that
// others write to as well may have nothing to tell us.
func (x *Index) Wait(ctx context.Context, revision int64, nudge func()) error {
	const patience = 5 * time.Millisecond
	timer := time.NewTimer(patience)
	defer timer.Stop()
	for {
		x.mu.RLock()
		reached, changed := x.ready && x.revision >= revision, x.changed
		x.mu.RUnlock()
		if reached {
			return nil
		}
		select {
		case <-changed:
		case <-timer.C:
			nudge()
			timer.Reset(4 * patience)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Meta returns the record of the ledger. It is zero until the index is ready.
func (x *Index) Meta() Meta {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return x.world.meta
}

// Broken returns what in the store cannot be understood, and why.
func (x *Index) Broken() map[string]string {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return maps.Clone(x.world.broken)
}

// BrokenCount is how many there are of what Broken returns.
func (x *Index) BrokenCount() int {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return len(x.world.broken)
}

// IsBroken reports whether a key of the store could not be understood.
func (x *Index) IsBroken(key string) bool {
	x.mu.RLock()
	defer x.mu.RUnlock()
	_, is := x.world.broken[key]
	return is
}

// Sizes are how many there are of each kind.
type Sizes struct {
	Prefixes, Live, Sets, Sessions, Holdings, Broken int
	// InRange is how many numbers of the range are in use.
	InRange uint64
}

// Sizes counts. It walks over all prefixes.
func (x *Index) Sizes() Sizes {
	x.mu.RLock()
	defer x.mu.RUnlock()
	w := x.world
	s := Sizes{Prefixes: len(w.entries), Sets: len(w.sets), Broken: len(w.broken), InRange: w.inRange}
	for _, e := range w.entries {
		if e.live() {
			s.Live++
		}
	}
	for _, one := range w.sessions {
		if one.record != nil {
			s.Sessions++
		}
		for _, h := range one.holdings {
			if !h.Dropped {
				s.Holdings++
			}
		}
	}
	return s
}

// Reading is what one operation needs to know, and the revisions of the keys
// that say so: zero for a key that is absent.
type Reading struct {
	State           ledger.State
	MetaRevision    int64
	SessionRevision int64
	HoldingRevision int64
	// SetRevision is not zero for a set that is damaged or about to be deleted,
	// either; that counts as not stored and must be written again.
	SetRevision int64
	// Numbers are those of the set's prefixes, in its order; zero for none.
	Numbers []ledger.Number
	// Missing is how many prefixes of the set have no number.
	Missing int
}

// Read returns what there is to know about a session.
func (x *Index) Read(id ledger.SessionID) Reading {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return x.read(id)
}

func (x *Index) read(id ledger.SessionID) Reading {
	r := Reading{MetaRevision: x.world.meta.Revision}
	r.State.Range = x.world.meta.Range
	if s := x.world.sessions[id]; s != nil && s.record != nil {
		record := s.record.Session
		r.State.Session, r.SessionRevision = &record, s.record.Revision
	}
	return r
}

// ReadHolding returns what there is to know about a holding.
func (x *Index) ReadHolding(id ledger.HoldingID) Reading {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return x.readHolding(id)
}

func (x *Index) readHolding(id ledger.HoldingID) Reading {
	r := x.read(id.Session)
	if s := x.world.sessions[id.Session]; s != nil {
		if h := s.holdings[id.Owner]; h != nil {
			holding := h.Holding
			r.State.Holding, r.HoldingRevision = &holding, h.Revision
		}
	}
	return r
}

// ReadSet returns what there is to know about a holding and the set that it
// shall hold.
func (x *Index) ReadSet(id ledger.HoldingID, want ledger.Set) Reading {
	x.mu.RLock()
	defer x.mu.RUnlock()
	r := x.readHolding(id)
	if s := x.world.sets[want.Digest]; s != nil {
		r.State.SetStored, r.SetRevision = !s.broken && !s.condemned, s.revision
	}
	r.Numbers = make([]ledger.Number, len(want.Prefixes))
	for i, p := range want.Prefixes {
		if e := x.world.entries[p]; e != nil {
			r.Numbers[i] = e.number
		} else {
			r.Missing++
		}
	}
	return r
}

// Choose picks numbers for those of the wanted prefixes that have none; see
// ledger.Choose.
func (x *Index) Choose(wanted []ledger.Wanted, salt uint32) ([]ledger.Grant, error) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	w := x.world
	missing := make([]ledger.Wanted, 0, len(wanted))
	for _, one := range wanted {
		if w.entries[one.Prefix] == nil {
			missing = append(missing, one)
		}
	}
	taken := func(n ledger.Number) bool { _, is := w.numbers[n]; return is }
	grants, err := ledger.Choose(w.meta.Range, missing, salt, ledger.Numbers{Taken: taken, Count: w.inRange})
	if err != nil {
		return nil, fmt.Errorf("choose numbers: %w", err)
	}
	return grants, nil
}
