package reading

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/eniplane/eniplane/eni-allocator/internal/plan"
)

// trace is what is known of one address of an ENI.
type trace struct {
	known  time.Time // when it was written, or the reading that showed it last began
	absent doubt
}

// card is what is known of an ENI. It is never changed, only replaced.
type card struct {
	eni   plan.ENI
	known time.Time // when it was written, or the reading that showed it last began
	// absent doubts that it exists, odd that it became malformed, moved that it
	// still is where this process put it.
	absent, odd, moved doubt
	// written is when this process changed its attachment last, until a reading
	// has confirmed that. Zero means that nothing waits for it.
	written time.Time
	// addresses are the secondary ones.
	addresses map[netip.Addr]trace
}

func (k card) doubtful() bool {
	if k.absent.count > 0 || k.odd.count > 0 || k.moved.count > 0 {
		return true
	}
	for _, t := range k.addresses {
		if t.absent.count > 0 {
			return true
		}
	}
	return false
}

// holder is the instance that an ENI belongs to: where it is attached, else for
// which it was made. Empty means none that matters.
func holder(e plan.ENI) plan.InstanceID {
	if e.Instance != "" {
		return e.Instance
	}
	return plan.InstanceID(e.Tags[plan.TagInstance])
}

// Scope is what a reading of ENIs should have shown: everything of one instance,
// that is attached to it or made for it and attached to nothing; or everything in
// some VPCs. One of the two is given.
type Scope struct {
	Instance plan.InstanceID
	VPCs     []plan.VPCID
}

// FoldENIs takes in a reading of ENIs that began at a time.
func (c *Cache) FoldENIs(began time.Time, enis []plan.ENI, scope Scope) {
	c.mu.Lock()
	defer c.mu.Unlock()
	shown := make(map[plan.ENIID]bool, len(enis))
	for _, e := range enis {
		if e.ID == "" {
			continue // Nothing can be remembered of it.
		}
		shown[e.ID] = true
		c.foldENI(began, e)
	}
	for _, id := range c.inScope(scope) {
		if !shown[id] {
			c.miss(began, id)
		}
	}
	if scope.Instance != "" {
		c.list(scope.Instance, began)
	}
	for id, m := range c.machines {
		if m.instance.VPC != "" && slices.Contains(scope.VPCs, m.instance.VPC) {
			c.list(id, began)
		}
	}
	for id, at := range c.deleted {
		if began.After(at.Add(tombstone)) {
			delete(c.deleted, id)
		}
	}
}

// tombstone is how long a deleted ENI is not believed to be back.
const tombstone = time.Minute

func (c *Cache) list(id plan.InstanceID, began time.Time) {
	if c.listed[id].Before(began) {
		c.listed[id] = began
	}
}

func (c *Cache) inScope(scope Scope) []plan.ENIID {
	if scope.Instance != "" {
		return slices.Collect(maps.Keys(c.of[scope.Instance]))
	}
	var ids []plan.ENIID
	for id, k := range c.cards {
		if slices.Contains(scope.VPCs, k.eni.VPC) {
			ids = append(ids, id)
		}
	}
	return ids
}

func (c *Cache) foldENI(began time.Time, e plan.ENI) {
	e = e.Clone()
	old, known := c.cards[e.ID]
	if !known {
		if at, gone := c.deleted[e.ID]; gone && !began.After(at.Add(tombstone)) {
			return
		}
		c.put(card{eni: e, known: began, addresses: traces(began, e.Addresses)})
		return
	}
	if began.Before(old.known) && old.written.IsZero() {
		// Something newer was seen or written. Addresses that it shows are still
		// worth knowing, unless they were taken away since: nobody here does that.
		c.put(old.withAddresses(began, e.Addresses))
		return
	}

	if e.Malformed != "" && old.eni.Malformed == "" {
		next := old
		var surely bool
		if next.odd, surely = old.odd.grow(began, old.known); !surely {
			c.put(next)
			return
		}
	}

	next := card{eni: e, known: latest(began, old.known)}
	next.keepAttachment(old, began)
	if began.Before(old.written) {
		next.written = old.written
	}
	next.keepAddresses(old, began)
	c.put(next)
}

// keepAttachment lets what this process wrote stand against readings from before
// it, and against the first one after it that says otherwise.
func (k *card) keepAttachment(old card, began time.Time) {
	if old.written.IsZero() || samePlace(old.eni, k.eni) && began.After(old.written) {
		return
	}
	moved, surely := old.moved.grow(began, old.written)
	if surely {
		return
	}
	k.moved, k.written = moved, old.written
	k.eni.Instance, k.eni.Attachment, k.eni.Index, k.eni.Card = old.eni.Instance, old.eni.Attachment, old.eni.Index, old.eni.Card
	k.eni.DeleteOnTermination, k.eni.Leaving = old.eni.DeleteOnTermination, old.eni.Leaving
}

func samePlace(a, b plan.ENI) bool {
	return a.Instance == b.Instance && a.Index == b.Index && a.Card == b.Card && a.DeleteOnTermination == b.DeleteOnTermination
}

// keepAddresses keeps those that only one reading lacks.
func (k *card) keepAddresses(old card, began time.Time) {
	k.addresses = traces(began, k.eni.Addresses)
	for a, t := range k.addresses {
		t.known = latest(t.known, old.addresses[a].known)
		k.addresses[a] = t
	}
	for _, a := range old.eni.Addresses { // In their order, so that equal readings stay equal.
		if _, shown := k.addresses[a]; shown {
			continue
		}
		t := old.addresses[a]
		absent, surely := t.absent.grow(began, t.known)
		if surely {
			continue
		}
		t.absent = absent
		k.addresses[a] = t
		k.eni.Addresses = append(k.eni.Addresses, a)
	}
}

// withAddresses is k with more addresses, known since a time.
func (k card) withAddresses(at time.Time, more []netip.Addr) card {
	k.eni = k.eni.Clone()
	k.addresses = maps.Clone(k.addresses)
	if k.addresses == nil {
		k.addresses = make(map[netip.Addr]trace, len(more))
	}
	for _, a := range more {
		t, had := k.addresses[a]
		if !had {
			k.eni.Addresses = append(k.eni.Addresses, a)
		}
		if t.known.Before(at) {
			t = trace{known: at}
		}
		k.addresses[a] = t
	}
	return k
}

func traces(at time.Time, addresses []netip.Addr) map[netip.Addr]trace {
	known := make(map[netip.Addr]trace, len(addresses))
	for _, a := range addresses {
		known[a] = trace{known: at}
	}
	return known
}

// miss takes in that a reading lacks an ENI. The ENIs of a terminated instance
// go at once.
func (c *Cache) miss(began time.Time, id plan.ENIID) {
	k := c.cards[id]
	absent, surely := k.absent.grow(began, latest(k.known, k.written))
	ended := c.machines[k.eni.Instance].instance.State == plan.InstanceTerminated && began.After(k.known)
	if surely || ended {
		c.drop(id)
		return
	}
	k.absent = absent
	c.put(k)
}

func (c *Cache) put(k card) {
	if old, known := c.cards[k.eni.ID]; known && holder(old.eni) != holder(k.eni) {
		c.drop(k.eni.ID)
	}
	to := holder(k.eni)
	if to == "" {
		c.drop(k.eni.ID)
		return
	}
	c.cards[k.eni.ID] = k
	if c.of[to] == nil {
		c.of[to] = make(map[plan.ENIID]bool)
	}
	c.of[to][k.eni.ID] = true
}

func (c *Cache) drop(id plan.ENIID) {
	k, known := c.cards[id]
	if !known {
		return
	}
	delete(c.cards, id)
	from := holder(k.eni)
	delete(c.of[from], id)
	if len(c.of[from]) == 0 {
		delete(c.of, from)
	}
}

func latest(a, b time.Time) time.Time {
	if a.Before(b) {
		return b
	}
	return a
}
