package reading

import (
	"net/netip"
	"time"

	"github.com/eniplane/eniplane/eni-allocator/internal/plan"
)

// What follows are the writes of this process. at is always when the answer of
// EC2 came.

// Assigned remembers that an ENI got addresses.
func (c *Cache) Assigned(at time.Time, id plan.ENIID, addresses []netip.Addr) {
	c.mu.Lock()
	defer c.mu.Unlock()
	k, known := c.cards[id]
	if !known {
		return
	}
	c.network.take(at, k.eni.Subnet, len(addresses))
	c.put(k.withAddresses(at, addresses))
}

// Created remembers a new ENI, which is attached to nothing.
func (c *Cache) Created(at time.Time, e plan.ENI) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e = e.Clone()
	if _, known := c.cards[e.ID]; known {
		return // EC2 answered a repetition with the same ENI.
	}
	delete(c.deleted, e.ID)
	c.network.take(at, e.Subnet, 1+len(e.Addresses)+16*len(e.Prefixes))
	c.put(card{eni: e, known: at, written: at, addresses: traces(at, e.Addresses)})
}

// Attached remembers where an ENI was attached, on card 0.
func (c *Cache) Attached(at time.Time, id plan.ENIID, attachment plan.AttachmentID, instance plan.InstanceID, index int) {
	c.change(at, id, func(e *plan.ENI) {
		e.Instance, e.Attachment, e.Index, e.Card = instance, attachment, index, 0
		e.DeleteOnTermination, e.Leaving = false, false
	})
}

// SetDeleteOnTermination remembers that an ENI will go with its instance.
func (c *Cache) SetDeleteOnTermination(at time.Time, id plan.ENIID) {
	c.change(at, id, func(e *plan.ENI) { e.DeleteOnTermination = true })
}

func (c *Cache) change(at time.Time, id plan.ENIID, f func(*plan.ENI)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	k, known := c.cards[id]
	if !known {
		return
	}
	k.eni = k.eni.Clone()
	f(&k.eni)
	k.known, k.written, k.moved = latest(k.known, at), at, doubt{}
	c.put(k)
}

// Deleted remembers that an ENI was deleted. For a while no reading brings it
// back.
func (c *Cache) Deleted(at time.Time, id plan.ENIID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.drop(id)
	c.deleted[id] = at
}

// Gone remembers that EC2 said that there is no such ENI. A reading that begins
// later may bring it back.
func (c *Cache) Gone(at time.Time, id plan.ENIID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.drop(id)
	c.deleted[id] = at.Add(-tombstone)
}

// Skip remembers that EC2 said that a subnet is full: it is not used until then.
func (c *Cache) Skip(id plan.SubnetID, until time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.network.skipped[id] = until
}

// Reserve counts addresses of a subnet as taken while a call that may take them
// is in flight. The caller calls what it got once, after it has remembered what the
// call did.
func (c *Cache) Reserve(id plan.SubnetID, count int) func() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.network.reserved[id] += count
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.network.reserved[id] -= count; c.network.reserved[id] <= 0 {
			delete(c.network.reserved, id)
		}
	}
}
