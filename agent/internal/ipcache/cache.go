// Package ipcache decides which entries a node wants in its ipcache map: who
// wants which prefix, which number each has, and what follows. It is pure:
// neither where owners come from, nor who gives numbers, nor how a map is
// written belongs here.
//
// A prefix is wanted as long as its set of owners is not empty. There are no
// counters: an owner that declares a prefix twice has it once, and an owner can
// give up only what is its own.
package ipcache

import (
	"cmp"
	"iter"
	"maps"
	"math"
	"net/netip"
	"slices"

	"github.com/eniplane/eniplane/internal/prefix"
)

// Config are the settings of a Cache.
type Config struct {
	// WorldIPv4 and WorldIPv6 are the numbers of 0.0.0.0/0 and ::/0, which are
	// Cilium's reserved world identities and come from no ledger: 2 and 2, or 9
	// and 10 where a datapath tells the families apart. 0 means 2.
	WorldIPv4, WorldIPv6 uint32
}

// world is Cilium's reserved identity "world".
const world = 2

// worldRevision makes the number of a world prefix newer than any a ledger tells.
const worldRevision = math.MaxInt64

// ownerID stands for an Owner inside a Cache, where prefixes outnumber owners.
type ownerID uint32

// holding is the set of one owner.
type holding struct {
	owner    Owner
	prefixes map[netip.Prefix]struct{}
}

// record is a prefix that somebody wants. It exists as long as somebody does.
type record struct {
	number   uint32
	revision int64
	owners   ownerSet
	meta     map[ownerID]Metadata // owners that say something; mostly nil
}

// Cache is the state of what is wanted. The zero value is not usable; NewCache
// makes one. It is not safe for concurrent use.
type Cache struct {
	config   Config
	records  map[netip.Prefix]*record
	ids      map[Owner]ownerID
	holdings map[ownerID]*holding
	nextID   ownerID
	changed  map[netip.Prefix]struct{}
}

// NewCache returns an empty Cache.
func NewCache(config Config) *Cache {
	config.WorldIPv4 = cmp.Or(config.WorldIPv4, world)
	config.WorldIPv6 = cmp.Or(config.WorldIPv6, world)
	return &Cache{
		config:   config,
		records:  make(map[netip.Prefix]*record),
		ids:      make(map[Owner]ownerID),
		holdings: make(map[ownerID]*holding),
		changed:  make(map[netip.Prefix]struct{}),
	}
}

// Replace makes set the whole set of the owner, which exists from now on even if
// the set is empty. Prefixes must be canonical. What the owner had and set lacks
// is given up; what stays is not touched. It reports whether anything changed.
func (c *Cache) Replace(owner Owner, set map[netip.Prefix]Metadata) bool {
	id, h, created := c.holdingOf(owner)
	changed := created
	for p := range h.prefixes {
		if _, ok := set[p]; !ok {
			c.drop(id, h, p)
			changed = true
		}
	}
	for p, meta := range set {
		if c.take(id, h, p, meta) {
			changed = true
		}
	}
	return changed
}

// Upsert adds one prefix, which must be canonical, to the owner's set, or
// replaces what the owner says about it. It reports whether anything changed.
func (c *Cache) Upsert(owner Owner, p netip.Prefix, meta Metadata) bool {
	id, h, created := c.holdingOf(owner)
	return c.take(id, h, p, meta) || created
}

// Remove takes one prefix out of the owner's set. What the owner does not have
// changes nothing. It reports whether anything changed.
func (c *Cache) Remove(owner Owner, p netip.Prefix) bool {
	id, ok := c.ids[owner]
	if !ok {
		return false
	}
	h := c.holdings[id]
	if _, ok := h.prefixes[p]; !ok {
		return false
	}
	c.drop(id, h, p)
	return true
}

// RemoveOwner ends an owner with all that it has. An unknown owner changes
// nothing. It reports whether the owner was known.
func (c *Cache) RemoveOwner(owner Owner) bool {
	id, ok := c.ids[owner]
	if !ok {
		return false
	}
	h := c.holdings[id]
	for p := range h.prefixes {
		c.drop(id, h, p)
	}
	delete(c.holdings, id)
	delete(c.ids, owner)
	return true
}

// Learn says which number a prefix has as of a revision of the ledger; a number
// known from before any ledger has revision 0. An older revision than known, the
// number 0, a world prefix and a prefix that nobody wants change nothing. It
// reports whether the number changed.
func (c *Cache) Learn(p netip.Prefix, number uint32, revision int64) bool {
	r, ok := c.records[p]
	if !ok || number == 0 || revision < r.revision || r.revision == worldRevision {
		return false
	}
	r.revision = revision
	if r.number == number {
		return false
	}
	r.number = number
	c.changed[p] = struct{}{}
	return true
}

// Forget makes every number that is known count as known from before any ledger,
// so that the next one learnt wins whatever its revision. The numbers stay in
// force until then.
func (c *Cache) Forget() {
	for _, r := range c.records {
		if r.revision != worldRevision {
			r.revision = 0
		}
	}
}

// Changes returns the prefixes whose wanted entry may have changed since the
// last call, in any order, and starts anew.
func (c *Cache) Changes() map[netip.Prefix]struct{} {
	changed := c.changed
	c.changed = make(map[netip.Prefix]struct{})
	return changed
}

// Wanted returns the entry that the map should have for a prefix, and whether it
// should have one: it has an owner and a number.
func (c *Cache) Wanted(p netip.Prefix) (Entry, bool) {
	r, ok := c.records[p]
	if !ok || r.number == 0 {
		return Entry{}, false
	}
	return c.merge(r), true
}

// AllWanted returns every entry that the map should have. The caller owns it.
func (c *Cache) AllWanted() Entries {
	all := make(Entries, len(c.records))
	for p, r := range c.records {
		if r.number != 0 {
			all[p] = c.merge(r)
		}
	}
	return all
}

// Number returns the number of a prefix. 0 means that none is known.
func (c *Cache) Number(p netip.Prefix) uint32 {
	if r, ok := c.records[p]; ok {
		return r.number
	}
	return 0
}

// Len returns how many prefixes have an owner.
func (c *Cache) Len() int { return len(c.records) }

// Unnumbered returns how many prefixes have an owner and no number.
func (c *Cache) Unnumbered() int {
	n := 0
	for _, r := range c.records {
		if r.number == 0 {
			n++
		}
	}
	return n
}

// HasOwner reports whether the owner exists, with however small a set.
func (c *Cache) HasOwner(owner Owner) bool {
	_, ok := c.ids[owner]
	return ok
}

// Owners returns every owner, sorted.
func (c *Cache) Owners() []Owner {
	return slices.SortedFunc(maps.Keys(c.ids), CompareOwners)
}

// OwnersOf returns the owners of a prefix, sorted. None gives nil.
func (c *Cache) OwnersOf(p netip.Prefix) []Owner {
	r, ok := c.records[p]
	if !ok {
		return nil
	}
	owners := make([]Owner, 0, r.owners.len())
	for id := range r.owners.all() {
		owners = append(owners, c.holdings[id].owner)
	}
	slices.SortFunc(owners, CompareOwners)
	return owners
}

// Prefixes returns the set of an owner, sorted. None gives nil.
func (c *Cache) Prefixes(owner Owner) []netip.Prefix {
	id, ok := c.ids[owner]
	if !ok {
		return nil
	}
	return slices.SortedFunc(maps.Keys(c.holdings[id].prefixes), prefix.Compare)
}

func (c *Cache) holdingOf(owner Owner) (ownerID, *holding, bool) {
	if id, ok := c.ids[owner]; ok {
		return id, c.holdings[id], false
	}
	c.nextID++
	h := &holding{owner: owner, prefixes: make(map[netip.Prefix]struct{})}
	c.ids[owner] = c.nextID
	c.holdings[c.nextID] = h
	return c.nextID, h, true
}

func (c *Cache) take(id ownerID, h *holding, p netip.Prefix, meta Metadata) bool {
	_, held := h.prefixes[p]
	r, ok := c.records[p]
	if !ok {
		r = &record{}
		if prefix.IsWorld(p) {
			r.number, r.revision = c.config.WorldIPv6, worldRevision
			if p.Addr().Is4() {
				r.number = c.config.WorldIPv4
			}
		}
		c.records[p] = r
		c.changed[p] = struct{}{}
	}
	changed := !held
	if !held {
		h.prefixes[p] = struct{}{}
		r.owners.add(id)
	}
	if r.meta[id] != meta && (meta.says() || r.meta[id].says()) {
		changed = true
		c.changed[p] = struct{}{}
		if !meta.says() {
			delete(r.meta, id)
			return changed
		}
		if r.meta == nil {
			r.meta = make(map[ownerID]Metadata, 1)
		}
		r.meta[id] = meta
	}
	return changed
}

func (c *Cache) drop(id ownerID, h *holding, p netip.Prefix) {
	delete(h.prefixes, p)
	r := c.records[p]
	r.owners.remove(id)
	if _, said := r.meta[id]; said {
		delete(r.meta, id)
		c.changed[p] = struct{}{}
	}
	if r.owners.len() == 0 {
		delete(c.records, p)
		c.changed[p] = struct{}{}
	}
}

// merge takes each field from the first owner that says it, in the order of
// source (strong first) and then of owners, as Cilium's ipcache metadata does.
func (c *Cache) merge(r *record) Entry {
	e := Entry{Number: r.number}
	if len(r.meta) == 0 {
		return e
	}
	ids := slices.SortedFunc(maps.Keys(r.meta), func(a, b ownerID) int {
		return cmp.Or(
			cmp.Compare(r.meta[b].Source, r.meta[a].Source),
			CompareOwners(c.holdings[a].owner, c.holdings[b].owner),
		)
	})
	for _, id := range ids {
		m := r.meta[id]
		if !e.TunnelEndpoint.IsValid() {
			e.TunnelEndpoint = m.TunnelEndpoint
		}
		e.EncryptKey = cmp.Or(e.EncryptKey, m.EncryptKey)
		e.Flags = cmp.Or(e.Flags, m.Flags&^derivedFlags)
	}
	e.TunnelEndpoint = e.TunnelEndpoint.Unmap()
	return e
}

// ownerSet is a set of owners that costs no allocation for one, by far the
// commonest size, and O(1) for each of many.
type ownerSet struct {
	one  ownerID // 0 if empty or if there are more
	many map[ownerID]struct{}
}

func (s *ownerSet) add(id ownerID) {
	switch {
	case s.many != nil:
		s.many[id] = struct{}{}
	case s.one == 0 || s.one == id:
		s.one = id
	default:
		s.many = map[ownerID]struct{}{s.one: {}, id: {}}
		s.one = 0
	}
}

func (s *ownerSet) remove(id ownerID) {
	if s.many == nil {
		if s.one == id {
			s.one = 0
		}
		return
	}
	delete(s.many, id)
	if len(s.many) == 0 {
		s.many = nil
	}
}

func (s *ownerSet) len() int {
	if s.many != nil {
		return len(s.many)
	}
	if s.one != 0 {
		return 1
	}
	return 0
}

func (s *ownerSet) all() iter.Seq[ownerID] {
	if s.many != nil {
		return maps.Keys(s.many)
	}
	return func(yield func(ownerID) bool) {
		if s.one != 0 {
			yield(s.one)
		}
	}
}
