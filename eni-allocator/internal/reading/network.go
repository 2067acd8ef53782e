package reading

import (
	"cmp"
	"slices"
	"time"

	"github.com/eniplane/eniplane/eni-allocator/internal/plan"
)

// fact is something of the network that has an id and may vanish.
type fact[T any] struct {
	value  T
	read   time.Time
	absent doubt
}

// use is addresses of a subnet that were taken.
type use struct {
	at    time.Time
	count int
}

// network is what is known of VPCs.
type network struct {
	vpcs     map[plan.VPCID]fact[plan.VPC]
	subnets  map[plan.SubnetID]fact[plan.Subnet]
	groups   map[plan.VPCID][]plan.SecurityGroup
	tables   map[plan.VPCID][]plan.RouteTable
	read     map[plan.VPCID]time.Time
	taken    map[plan.SubnetID][]use
	reserved map[plan.SubnetID]int
	skipped  map[plan.SubnetID]time.Time
}

func newNetwork() network {
	return network{
		vpcs:     make(map[plan.VPCID]fact[plan.VPC]),
		subnets:  make(map[plan.SubnetID]fact[plan.Subnet]),
		groups:   make(map[plan.VPCID][]plan.SecurityGroup),
		tables:   make(map[plan.VPCID][]plan.RouteTable),
		read:     make(map[plan.VPCID]time.Time),
		taken:    make(map[plan.SubnetID][]use),
		reserved: make(map[plan.SubnetID]int),
		skipped:  make(map[plan.SubnetID]time.Time),
	}
}

// take remembers that addresses of a subnet are no longer free.
func (n network) take(at time.Time, id plan.SubnetID, count int) {
	n.taken[id] = append(n.taken[id], use{at, count})
}

// current is a subnet as it is now, as far as this process knows.
func (n network) current(s plan.Subnet) plan.Subnet {
	for _, u := range n.taken[s.ID] {
		s.Free -= u.count
	}
	s.Free = max(s.Free, 0)
	s.Reserved = n.reserved[s.ID]
	s.SkippedUntil = n.skipped[s.ID]
	return s
}

// of is what is known of one VPC, or of all for the empty id, sorted by id.
func (n network) of(id plan.VPCID) plan.Network {
	all := id == ""
	var out plan.Network
	for v, f := range n.vpcs {
		if all || v == id {
			out.VPCs = append(out.VPCs, f.value)
		}
	}
	for _, f := range n.subnets {
		if all || f.value.VPC == id {
			out.Subnets = append(out.Subnets, n.current(f.value))
		}
	}
	for v, groups := range n.groups {
		if all || v == id {
			out.Groups = append(out.Groups, groups...)
		}
	}
	for v, tables := range n.tables {
		if all || v == id {
			out.Tables = append(out.Tables, tables...)
		}
	}
	slices.SortFunc(out.VPCs, func(a, b plan.VPC) int { return cmp.Compare(a.ID, b.ID) })
	slices.SortFunc(out.Subnets, func(a, b plan.Subnet) int { return cmp.Compare(a.ID, b.ID) })
	slices.SortFunc(out.Groups, func(a, b plan.SecurityGroup) int { return cmp.Compare(a.ID, b.ID) })
	slices.SortFunc(out.Tables, func(a, b plan.RouteTable) int { return cmp.Compare(a.ID, b.ID) })
	return out
}

// FoldNetwork takes in a reading of all that is in some VPCs, which began at a
// time. A VPC or subnet that it lacks is forgotten when a second reading lacks it
// too; of groups and route tables an empty answer changes nothing.
func (c *Cache) FoldNetwork(began time.Time, vpcs []plan.VPCID, read plan.Network) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.network
	fresh := make(map[plan.VPCID]bool, len(vpcs))
	for _, v := range vpcs {
		if !began.Before(n.read[v]) {
			fresh[v], n.read[v] = true, began
		}
	}

	seenVPCs := make(map[plan.VPCID]bool)
	for _, v := range read.VPCs {
		if fresh[v.ID] {
			seenVPCs[v.ID] = true
			if len(v.CIDRs) == 0 && len(n.vpcs[v.ID].value.CIDRs) > 0 {
				continue // It cannot have lost them.
			}
			n.vpcs[v.ID] = fact[plan.VPC]{value: v, read: began}
		}
	}
	miss(n.vpcs, began, func(v plan.VPC) bool { return fresh[v.ID] && !seenVPCs[v.ID] })

	seenSubnets := make(map[plan.SubnetID]bool)
	for _, s := range read.Subnets {
		if fresh[s.VPC] {
			seenSubnets[s.ID] = true
			n.subnets[s.ID] = fact[plan.Subnet]{value: s, read: began}
			n.taken[s.ID] = slices.DeleteFunc(n.taken[s.ID], func(u use) bool { return u.at.Before(began) })
			if len(n.taken[s.ID]) == 0 {
				delete(n.taken, s.ID)
			}
			if n.skipped[s.ID].Before(began) {
				delete(n.skipped, s.ID)
			}
		}
	}
	miss(n.subnets, began, func(s plan.Subnet) bool { return fresh[s.VPC] && !seenSubnets[s.ID] })

	groups := make(map[plan.VPCID][]plan.SecurityGroup)
	for _, g := range read.Groups {
		groups[g.VPC] = append(groups[g.VPC], g)
	}
	tables := make(map[plan.VPCID][]plan.RouteTable)
	for _, t := range read.Tables {
		tables[t.VPC] = append(tables[t.VPC], t)
	}
	for v := range fresh {
		if len(groups[v]) > 0 {
			n.groups[v] = groups[v]
		}
		if len(tables[v]) > 0 {
			n.tables[v] = tables[v]
		}
	}
}

// miss takes in that a reading lacks some facts.
func miss[K comparable, T any](facts map[K]fact[T], began time.Time, lacks func(T) bool) {
	for id, f := range facts {
		if !lacks(f.value) {
			continue
		}
		var gone bool
		if f.absent, gone = f.absent.grow(began, f.read); gone {
			delete(facts, id)
		} else {
			facts[id] = f
		}
	}
}
