package wire

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"

	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"

	"github.com/eniplane/eniplane/eni-allocator/internal/plan"
)

// Pool is what of a reading is published.
type Pool struct {
	// ENIs are sorted by id, Addresses by address.
	ENIs      []*nodev1.Eni
	Addresses []*nodev1.PoolAddress
	// Withheld are the ENIs of the instance that a reader could not do anything
	// with, because the CIDR of their subnet or VPC is not known yet.
	Withheld []plan.ENI
	// Malformed are those that cannot be understood.
	Malformed []plan.ENI
}

// PoolOf converts a reading to what is published of it (invariant I1): the ENIs
// on network card 0 whose CIDRs are known, those that give no addresses too, and
// as the pool the addresses that pods may use. An address that two ENIs seem to
// have, or that is outside its subnet, is not published at all.
func PoolOf(r plan.Reading, vpcs []plan.VPC, d plan.Demand, p plan.Policy) Pool {
	subnets := make(map[plan.SubnetID]plan.Subnet, len(r.Subnets))
	for _, s := range r.Subnets {
		subnets[s.ID] = s
	}
	ranges := make(map[plan.VPCID]plan.VPC, len(vpcs))
	for _, v := range vpcs {
		ranges[v.ID] = v
	}
	used := make(map[netip.Addr]bool, len(d.Used))
	for _, a := range d.Used {
		used[a] = true
	}
	holders := make(map[netip.Addr]int)
	for _, e := range r.ENIs {
		if e.Instance == r.Instance.ID && e.Instance != "" {
			for _, a := range e.Usable(true) {
				holders[a]++
			}
		}
	}

	var out Pool
	for _, e := range slices.SortedFunc(slices.Values(r.ENIs), func(a, b plan.ENI) int { return cmp.Compare(a.ID, b.ID) }) {
		if e.Instance != r.Instance.ID || e.Instance == "" || e.Card != 0 {
			continue // Two ENIs on different cards may have the same index.
		}
		subnet, vpc := subnets[e.Subnet], ranges[e.VPC]
		switch {
		case e.Malformed != "":
			out.Malformed = append(out.Malformed, e)
			continue
		case !subnet.CIDR.IsValid() || len(vpc.CIDRs) == 0 || !vpc.CIDRs[0].IsValid():
			out.Withheld = append(out.Withheld, e)
			continue
		}
		gives := plan.Gives(e, d, p)
		shown := ENI(e, subnet, vpc, d.UsePrimary)
		shown.Addresses = nil
		for _, a := range e.Usable(d.UsePrimary) {
			if holders[a] != 1 || !subnet.CIDR.Contains(a) {
				continue
			}
			shown.Addresses = append(shown.Addresses, a.String())
			// What a pod has already stays in the pool, whatever became of its ENI.
			if gives || used[a] {
				out.Addresses = append(out.Addresses, &nodev1.PoolAddress{Address: a.String(), EniId: string(e.ID)})
			}
		}
		shown.Prefixes = slices.DeleteFunc(shown.Prefixes, func(text string) bool { return !whole(text, shown.Addresses) })
		out.ENIs = append(out.ENIs, shown)
	}
	slices.SortFunc(out.Addresses, func(a, b *nodev1.PoolAddress) int {
		return netip.MustParseAddr(a.GetAddress()).Compare(netip.MustParseAddr(b.GetAddress()))
	})
	return out
}

// whole tells whether all addresses of a prefix are listed.
func whole(prefix string, addresses []string) bool {
	p := netip.MustParsePrefix(prefix)
	for a := p.Addr(); p.Contains(a); a = a.Next() {
		if !slices.Contains(addresses, a.String()) {
			return false
		}
	}
	return true
}

// ENI converts one ENI. Its addresses are those that pods may use of it.
func ENI(e plan.ENI, subnet plan.Subnet, vpc plan.VPC, usePrimary bool) *nodev1.Eni {
	out := &nodev1.Eni{
		Id: string(e.ID), Mac: strings.ToLower(e.MAC), AvailabilityZone: e.Zone, Description: e.Description,
		DeviceIndex:    uint32(max(e.Index, 0)), //nolint:gosec // A device index fits; see max.
		Subnet:         &nodev1.Subnet{Id: string(e.Subnet)},
		Vpc:            &nodev1.Vpc{Id: string(e.VPC)},
		SecurityGroups: texts(e.Groups), Tags: maps.Clone(e.Tags),
	}
	if e.Primary.IsValid() {
		out.Ip = e.Primary.String()
	}
	if subnet.CIDR.IsValid() {
		out.Subnet.Cidr = subnet.CIDR.String()
	}
	for i, c := range vpc.CIDRs {
		if i == 0 {
			out.Vpc.PrimaryCidr = c.String()
		} else {
			out.Vpc.Cidrs = append(out.Vpc.Cidrs, c.String())
		}
	}
	for _, a := range e.Usable(usePrimary) {
		out.Addresses = append(out.Addresses, a.String())
	}
	for _, p := range e.Prefixes {
		out.Prefixes = append(out.Prefixes, p.Masked().String())
	}
	slices.Sort(out.SecurityGroups)
	slices.Sort(out.Prefixes)
	return out
}
