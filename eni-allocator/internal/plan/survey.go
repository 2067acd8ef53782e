package plan

import (
	"cmp"
	"net/netip"
	"slices"
)

// survey is what a reading comes to for one node.
type survey struct {
	// usable ENIs give addresses to pods, by device index and id.
	usable []ENI
	// others are attached to card 0 as well and give none, by device index and id.
	others []ENI
	// spares are ours for this instance and attached to nothing, by id.
	spares []ENI
	// empty are slots for further usable ENIs.
	empty   int
	indexes map[int]bool
}

// Usable tells whether pods of the node may get the addresses of an attached
// ENI.
func Usable(e ENI, d Demand, p Policy) bool {
	a := e.Attachment
	return a != nil && a.Card == 0 && a.DeviceIndex >= firstIndex(d, p) && e.Flaw == "" && !e.RequesterManaged &&
		(e.Kind == "" || e.Kind == kindInterface) && (len(d.ExcludeTags) == 0 || !hasTags(e.Tags, d.ExcludeTags))
}

const kindInterface = "interface"

func firstIndex(d Demand, p Policy) int {
	if d.FirstInterfaceIndex != nil {
		return *d.FirstInterfaceIndex
	}
	return p.FirstInterfaceIndex
}

// hasTags tells whether all of want are among have.
func hasTags(have, want map[string]string) bool {
	for k, v := range want {
		if got, ok := have[k]; !ok || got != v {
			return false
		}
	}
	return true
}

func look(r Reading, d Demand, p Policy) survey {
	s := survey{indexes: make(map[int]bool)}
	for _, e := range r.ENIs {
		switch {
		case e.Attachment == nil:
			if Own(e, p.Cluster, r.Instance.ID) && e.Flaw == "" {
				s.spares = append(s.spares, e)
			}
		case e.Attachment.Instance != r.Instance.ID || e.Attachment.Card != 0:
			// Not a slot of card 0 of this instance.
		default:
			s.indexes[e.Attachment.DeviceIndex] = true
			if Usable(e, d, p) {
				s.usable = append(s.usable, e)
			} else {
				s.others = append(s.others, e)
			}
		}
	}
	for _, i := range r.TakenIndexes {
		s.indexes[i] = true
	}
	byIndex := func(a, b ENI) int {
		return cmp.Or(cmp.Compare(a.Attachment.DeviceIndex, b.Attachment.DeviceIndex), cmp.Compare(a.ID, b.ID))
	}
	slices.SortFunc(s.usable, byIndex)
	slices.SortFunc(s.others, byIndex)
	slices.SortFunc(s.spares, func(a, b ENI) int { return cmp.Compare(a.ID, b.ID) })

	// Every attached ENI takes a slot, whether or not it gives addresses (B4).
	if !r.SlotsRefused {
		s.empty = max(r.Limits.Interfaces-len(s.usable)-len(s.others), 0)
	}
	// Indexes below the first one are not ours to fill.
	s.empty = max(min(s.empty, r.Limits.Interfaces-firstIndex(d, p)-len(s.usable)), 0)
	return s
}

// capacity is the most addresses that pods of the node can ever have: what the
// usable ENIs and the slots for more can hold. A prefix fills one place and
// gives sixteen.
func (s survey) capacity(l Limits, usePrimary bool) int {
	n := (len(s.usable) + s.empty) * perENI(l, usePrimary)
	for _, e := range s.usable {
		n += len(e.Prefixes) * (prefixSize - 1)
	}
	return n
}

// perENI is what one ENI gives: the primary address takes a place too (B1, B15).
func perENI(l Limits, usePrimary bool) int {
	if usePrimary {
		return l.AddressesPerInterface
	}
	return max(l.AddressesPerInterface-1, 0)
}

// count fills in everything that does not depend on the ceiling's reason.
func (s survey) count(l Limits, d Demand) Numbers {
	used := make(map[netip.Addr]bool, len(d.Used))
	for _, a := range d.Used {
		used[a] = true
	}
	n := Numbers{Capacity: s.capacity(l, d.UsePrimary), EmptySlots: s.empty}
	for _, e := range s.usable {
		for _, a := range e.Addresses(d.UsePrimary) {
			n.Available++
			if used[a] {
				n.Used++
			}
		}
	}
	n.Free = n.Available - n.Used
	return n
}

// primary returns the ENI at device index 0.
func (s survey) primary() (ENI, bool) {
	for _, list := range [][]ENI{s.usable, s.others} {
		for _, e := range list {
			if e.Attachment.DeviceIndex == 0 {
				return e, true
			}
		}
	}
	return ENI{}, false
}

// nextIndex is the lowest free device index for a usable ENI. 0 is the primary
// interface's.
func (s survey) nextIndex(first int) int {
	i := max(first, 1)
	for s.indexes[i] {
		i++
	}
	return i
}
