package index

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/eniplane/eniplane/identity-service/internal/ledger"
	"github.com/eniplane/eniplane/internal/prefix"
)

// entry is a prefix that has a number.
type entry struct {
	prefix   netip.Prefix
	number   ledger.Number
	created  ledger.Millis
	revision int64
	sets     []*set // complete sets that contain it
}

func (e *entry) grant() ledger.Grant { return ledger.Grant{Prefix: e.prefix, Number: e.number} }

// live reports whether anybody holds it.
func (e *entry) live() bool {
	return slices.ContainsFunc(e.sets, func(s *set) bool { return len(s.holders) > 0 })
}

// heldBy reports whether a session holds it.
func (e *entry) heldBy(id ledger.SessionID) bool {
	return slices.ContainsFunc(e.sets, func(s *set) bool { return len(s.holders[id]) > 0 })
}

// set is a complete set with everybody who holds it.
type set struct {
	digest    ledger.Digest
	entries   []*entry // sorted
	condemned bool
	broken    bool // its parts in the store do not add up to it
	revision  int64
	holders   map[ledger.SessionID]map[ledger.OwnerKey]struct{}
}

func (s *set) add(id ledger.HoldingID) {
	owners := s.holders[id.Session]
	if owners == nil {
		owners = make(map[ledger.OwnerKey]struct{})
		s.holders[id.Session] = owners
	}
	owners[id.Owner] = struct{}{}
}

func (s *set) remove(id ledger.HoldingID) {
	owners := s.holders[id.Session]
	delete(owners, id.Owner)
	if len(owners) == 0 {
		delete(s.holders, id.Session)
	}
}

// session is a session with its holdings. The record may be absent if its key
// was lost; then nobody can act for it, but what it held stays held.
type session struct {
	record   *Session
	holdings map[ledger.OwnerKey]*Holding
}

// world is everything that the store says, at one revision.
type world struct {
	meta     Meta
	entries  map[netip.Prefix]*entry
	numbers  map[ledger.Number]netip.Prefix
	inRange  uint64 // how many of numbers are in meta.Range
	chunks   map[ledger.Digest]map[int][]netip.Prefix
	sets     map[ledger.Digest]*set
	sessions map[ledger.SessionID]*session
	broken   map[string]string // what cannot be understood → why

	sorted []*entry // sorted by prefix
	recent []*entry // not yet in sorted
}

func newWorld() *world {
	return &world{
		entries:  make(map[netip.Prefix]*entry),
		numbers:  make(map[ledger.Number]netip.Prefix),
		chunks:   make(map[ledger.Digest]map[int][]netip.Prefix),
		sets:     make(map[ledger.Digest]*set),
		sessions: make(map[ledger.SessionID]*session),
		broken:   make(map[string]string),
	}
}

// apply takes one record in and returns what readers must be told, or nil.
func (w *world) apply(r Record) *Change {
	switch r := r.(type) {
	case Meta:
		w.meta = r
	case Prefix:
		w.applyPrefix(r)
	case Number:
		w.applyNumber(r)
	case Chunk:
		w.applyChunk(r)
	case SetMeta:
		w.applySetMeta(r)
	case Session:
		s := w.session(r.ID)
		s.record = &r
		if r.Deleted {
			s.record = nil
		}
		return &Change{Session: r.ID}
	case Holding:
		return w.applyHolding(r)
	case Malformed:
		if r.Err == nil {
			delete(w.broken, r.Key)
		} else {
			w.broken[r.Key] = r.Err.Error()
		}
	}
	return nil
}

func (w *world) applyPrefix(r Prefix) {
	e, known := w.entries[r.Prefix]
	if r.Deleted {
		if known {
			// A number is never freed, so somebody deleted the key by hand. The
			// number of a prefix that is held must not be forgotten for that.
			w.broken["prefix "+r.Prefix.String()] = fmt.Sprintf("its number %d was deleted from the store", e.number)
		}
		return
	}
	if known {
		e.number, e.created, e.revision = r.Number, r.Created, r.Revision
		delete(w.broken, "prefix "+r.Prefix.String())
		return
	}
	e = &entry{prefix: r.Prefix, number: r.Number, created: r.Created, revision: r.Revision}
	w.entries[r.Prefix] = e
	w.recent = append(w.recent, e)
}

func (w *world) applyNumber(r Number) {
	_, known := w.numbers[r.Number]
	if r.Deleted {
		if known {
			w.broken[fmt.Sprintf("number %d", r.Number)] = "it was deleted from the store"
		}
		return // Stays taken: it may still mean its prefix somewhere.
	}
	if !known && w.meta.Range.Contains(r.Number) {
		w.inRange++
	}
	w.numbers[r.Number] = r.Prefix
	if e := w.entries[r.Prefix]; e == nil || e.number != r.Number {
		w.broken[fmt.Sprintf("number %d", r.Number)] = fmt.Sprintf("%s does not have it", r.Prefix)
	}
}

func (w *world) applyChunk(r Chunk) {
	if r.Deleted {
		delete(w.chunks[r.Set], r.Part)
		return
	}
	if s := w.sets[r.Set]; s != nil && !s.broken {
		return // Written again by somebody who did not know; the content is the name.
	}
	parts := w.chunks[r.Set]
	if parts == nil {
		parts = make(map[int][]netip.Prefix)
		w.chunks[r.Set] = parts
	}
	parts[r.Part] = r.Prefixes
}

func (w *world) applySetMeta(r SetMeta) {
	s := w.sets[r.Set]
	switch {
	case r.Deleted && s != nil && len(s.holders) > 0:
		w.broken["set "+r.Set.String()] = "it was deleted from the store, but is held"
	case r.Deleted:
		if s != nil {
			s.unlink()
		}
		delete(w.sets, r.Set)
		delete(w.chunks, r.Set)
	case s != nil && !s.broken:
		s.condemned, s.revision = r.Condemned, r.Revision
	case s != nil: // Written again, to repair it.
		s.unlink()
		w.complete(r, s.holders)
	default:
		w.complete(r, make(map[ledger.SessionID]map[ledger.OwnerKey]struct{}))
	}
}

// unlink takes a set away from its prefixes.
func (s *set) unlink() {
	for _, e := range s.entries {
		e.sets = slices.DeleteFunc(e.sets, func(other *set) bool { return other == s })
	}
}

// complete makes a set of its chunks.
func (w *world) complete(r SetMeta, holders map[ledger.SessionID]map[ledger.OwnerKey]struct{}) {
	s := &set{digest: r.Set, condemned: r.Condemned, revision: r.Revision, holders: holders}
	name := "set " + r.Set.String()
	delete(w.broken, name)
	whole := make([]netip.Prefix, 0, r.Prefixes)
	for part := range r.Parts {
		whole = append(whole, w.chunks[r.Set][part]...)
	}
	delete(w.chunks, r.Set)
	if check, err := ledger.NewSet(whole); err != nil || check.Digest != r.Set {
		w.broken[name], s.broken = "its parts do not add up to it", true
	}
	for _, p := range whole {
		e := w.entries[p]
		if e == nil {
			w.broken[name], s.broken = fmt.Sprintf("%s has no number", p), true
			continue
		}
		e.sets = append(e.sets, s)
		s.entries = append(s.entries, e)
	}
	w.sets[r.Set] = s
}

func (w *world) session(id ledger.SessionID) *session {
	s := w.sessions[id]
	if s == nil {
		s = &session{holdings: make(map[ledger.OwnerKey]*Holding)}
		w.sessions[id] = s
	}
	return s
}

func (w *world) applyHolding(r Holding) *Change {
	s := w.session(r.ID.Session)
	var before, after *set
	if old := s.holdings[r.ID.Owner]; old != nil && !old.Dropped {
		before = w.sets[old.Set]
	}
	if r.Deleted {
		delete(s.holdings, r.ID.Owner)
	} else {
		s.holdings[r.ID.Owner] = &r
		if !r.Dropped {
			if after = w.sets[r.Set]; after == nil {
				w.broken["set "+r.Set.String()] = "it is held, but not stored"
			}
		}
	}
	change := &Change{Session: r.ID.Session, Holding: true}
	if before == after {
		return change
	}
	gone, come := difference(before, after)
	for _, e := range come {
		if !e.live() {
			change.Up = append(change.Up, e.grant())
		}
		if !e.heldBy(r.ID.Session) {
			change.SessionUp = append(change.SessionUp, e.grant())
		}
	}
	if before != nil {
		before.remove(r.ID)
	}
	if after != nil {
		after.add(r.ID)
	}
	for _, e := range gone {
		if !e.live() {
			change.Down = append(change.Down, e.grant())
		}
		if !e.heldBy(r.ID.Session) {
			change.SessionDown = append(change.SessionDown, e.grant())
		}
	}
	return change
}

// difference returns what only a has, and what only b has. Either may be nil.
func difference(a, b *set) ([]*entry, []*entry) {
	var as, bs, onlyA, onlyB []*entry
	if a != nil {
		as = a.entries
	}
	if b != nil {
		bs = b.entries
	}
	for len(as) > 0 && len(bs) > 0 {
		switch c := prefix.Compare(as[0].prefix, bs[0].prefix); {
		case c < 0:
			onlyA, as = append(onlyA, as[0]), as[1:]
		case c > 0:
			onlyB, bs = append(onlyB, bs[0]), bs[1:]
		default:
			as, bs = as[1:], bs[1:]
		}
	}
	return append(onlyA, as...), append(onlyB, bs...)
}

// ordered returns all entries in the order of their prefixes.
func (w *world) ordered() []*entry {
	if len(w.recent) == 0 {
		return w.sorted
	}
	byPrefix := func(a, b *entry) int { return prefix.Compare(a.prefix, b.prefix) }
	slices.SortFunc(w.recent, byPrefix)
	merged := make([]*entry, 0, len(w.sorted)+len(w.recent))
	old, fresh := w.sorted, w.recent
	for len(old) > 0 && len(fresh) > 0 {
		if byPrefix(old[0], fresh[0]) < 0 {
			merged, old = append(merged, old[0]), old[1:]
		} else {
			merged, fresh = append(merged, fresh[0]), fresh[1:]
		}
	}
	w.sorted = append(append(merged, old...), fresh...)
	w.recent = nil
	return w.sorted
}
