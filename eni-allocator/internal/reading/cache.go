// Package reading remembers what EC2 has shown. Every reading is stamped with
// when it began; what this process wrote holds against readings that began
// before the answer to the write; and what a reading lacks counts as gone only
// when a second one lacks it too. Asking EC2 does not belong here, nor does
// deciding anything.
package reading

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/eniplane/eniplane/eni-allocator/internal/plan"
)

// settle is how far apart two readings must have begun to count as two: EC2 may
// answer from the same stale copy for a moment.
const settle = 2 * time.Second

// doubt counts the readings that contradict something known.
type doubt struct {
	count int
	last  time.Time // when the last reading that counted began
}

// grow returns the doubt after a reading that contradicts what was known at a
// time, and whether that makes two.
func (d doubt) grow(began, known time.Time) (doubt, bool) {
	if !began.After(known) || (d.count > 0 && began.Before(d.last.Add(settle))) {
		return d, false
	}
	return doubt{d.count + 1, began}, d.count+1 >= 2
}

// machine is what is known of an instance. It is never changed, only replaced.
type machine struct {
	instance plan.Instance
	read     time.Time // begin of the last reading that showed it
	absent   doubt
}

// Cache is what is known of EC2. It is safe for concurrent use. What it returns
// is not changed afterwards, and must not be changed by those who got it.
type Cache struct {
	mu       sync.RWMutex // guards all that follows
	machines map[plan.InstanceID]machine
	cards    map[plan.ENIID]card
	// of are the ENIs of an instance: attached to it, or made for it and attached
	// to nothing.
	of map[plan.InstanceID]map[plan.ENIID]bool
	// listed is when the last reading of all ENIs of an instance began.
	listed  map[plan.InstanceID]time.Time
	deleted map[plan.ENIID]time.Time
	limits  map[string]plan.Limits
	network network
}

// New returns a Cache that knows nothing.
func New() *Cache {
	return &Cache{
		machines: make(map[plan.InstanceID]machine),
		cards:    make(map[plan.ENIID]card),
		of:       make(map[plan.InstanceID]map[plan.ENIID]bool),
		listed:   make(map[plan.InstanceID]time.Time),
		deleted:  make(map[plan.ENIID]time.Time),
		limits:   make(map[string]plan.Limits),
		network:  newNetwork(),
	}
}

// Reading returns what is known of an instance, its ENIs sorted by id. It is
// false as long as the instance and its ENIs have not both been read.
func (c *Cache) Reading(id plan.InstanceID) (plan.Reading, bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	m, known := c.machines[id]
	if _, listed := c.listed[id]; !known || !listed {
		return plan.Reading{}, false
	}
	r := plan.Reading{Instance: m.instance, Limits: c.limits[m.instance.Type]}
	for _, e := range slices.Sorted(maps.Keys(c.of[id])) {
		r.ENIs = append(r.ENIs, c.cards[e].eni)
	}
	n := c.network.of(m.instance.VPC)
	r.Subnets, r.Groups, r.Tables = n.Subnets, n.Groups, n.Tables
	return r, true
}

// ReadAt is when the last complete reading of an instance began: both of itself
// and of its ENIs. Zero means never.
func (c *Cache) ReadAt(id plan.InstanceID) time.Time {
	c.mu.RLock()
	defer c.mu.RUnlock()
	m, listed := c.machines[id], c.listed[id]
	if m.read.Before(listed) {
		return m.read
	}
	return listed
}

// Doubtful tells whether something of an instance was contradicted by one
// reading and waits for a second one, which should come soon but not within two
// seconds of the first.
func (c *Cache) Doubtful(id plan.InstanceID) bool {
	c.mu.RLock()
	defer c.mu.RUnlock()
	if c.machines[id].absent.count > 0 {
		return true
	}
	for e := range c.of[id] {
		if c.cards[e].doubtful() {
			return true
		}
	}
	return false
}

// Network returns what is known of all VPCs, sorted by id. Addresses that were
// taken since a subnet was read are not free in it.
func (c *Cache) Network() plan.Network {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.network.of("")
}

// VPC returns a VPC; false if it was never read.
func (c *Cache) VPC(id plan.VPCID) (plan.VPC, bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	v, ok := c.network.vpcs[id]
	return v.value, ok
}

// Subnet returns a subnet; false if it was never read.
func (c *Cache) Subnet(id plan.SubnetID) (plan.Subnet, bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	s, ok := c.network.subnets[id]
	if !ok {
		return plan.Subnet{}, false
	}
	return c.network.current(s.value), true
}

// Limits returns those of an instance type; false if they are not known.
func (c *Cache) Limits(typ string) (plan.Limits, bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	l, ok := c.limits[typ]
	return l, ok
}

// SetLimits remembers the limits of an instance type, which do not change.
func (c *Cache) SetLimits(typ string, l plan.Limits) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if l.Known() {
		c.limits[typ] = l
	}
}

// FoldInstances takes in a reading of instances that began at a time. asked are
// those that it should have shown: one of them that it lacks is forgotten when
// a second reading lacks it too.
func (c *Cache) FoldInstances(began time.Time, instances []plan.Instance, asked []plan.InstanceID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	shown := make(map[plan.InstanceID]bool, len(instances))
	for _, i := range instances {
		shown[i.ID] = true
		old, known := c.machines[i.ID]
		if known && began.Before(old.read) {
			continue
		}
		if known && i.State == plan.InstanceTerminated {
			// EC2 forgets where a terminated instance was.
			if i.VPC == "" {
				i.VPC, i.Subnet = old.instance.VPC, old.instance.Subnet
			}
		}
		c.machines[i.ID] = machine{instance: i, read: began}
	}
	for _, id := range asked {
		old, known := c.machines[id]
		if shown[id] || !known {
			continue
		}
		var gone bool
		if old.absent, gone = old.absent.grow(began, old.read); gone {
			delete(c.machines, id)
		} else {
			c.machines[id] = old
		}
	}
}

// Forget drops an instance and its ENIs, so that a node that comes back is read
// anew.
func (c *Cache) Forget(id plan.InstanceID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for e := range c.of[id] {
		delete(c.cards, e)
	}
	delete(c.of, id)
	delete(c.listed, id)
	delete(c.machines, id)
}

// Retain forgets the instances that no reading since a time showed and that are
// not wanted, so that those that come and go do not add up.
func (c *Cache) Retain(since time.Time, wanted func(plan.InstanceID) bool) {
	for _, id := range c.unseen(since) {
		if !wanted(id) {
			c.Forget(id)
		}
	}
}

func (c *Cache) unseen(since time.Time) []plan.InstanceID {
	c.mu.RLock()
	defer c.mu.RUnlock()
	var ids []plan.InstanceID
	for id, m := range c.machines {
		if m.read.Before(since) {
			ids = append(ids, id)
		}
	}
	return ids
}
