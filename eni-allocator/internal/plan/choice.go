package plan

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/eniplane/eniplane/internal/reason"
)

// chooseSubnet picks the subnet of a new ENI. Subnets that were chosen explicitly
// bind; otherwise the node's own comes first if a whole ENI fits, then those that
// route like it, then any in the zone, each time the one with the most room.
func chooseSubnet(r Reading, d Demand, now time.Time) (Subnet, []Rejected, *Blocked) {
	subnets := slices.SortedFunc(slices.Values(r.Subnets), func(a, b Subnet) int { return cmp.Compare(a.ID, b.ID) })
	here := func(s Subnet) bool { return s.VPC == r.Instance.VPC && s.Zone == r.Instance.Zone }

	var tiers [][]Subnet
	switch {
	case len(d.SubnetIDs) > 0:
		tiers = [][]Subnet{only(subnets, func(s Subnet) bool { return here(s) && slices.Contains(d.SubnetIDs, s.ID) })}
		if len(tiers[0]) == 0 {
			return Subnet{}, nil, &Blocked{reason.SubnetNoMatch, fmt.Sprintf("none of the %d chosen subnets is in %s of %s", len(d.SubnetIDs), r.Instance.Zone, r.Instance.VPC)}
		}
	case len(d.SubnetTags) > 0:
		tiers = [][]Subnet{only(subnets, func(s Subnet) bool { return here(s) && carries(s.Tags, d.SubnetTags) })}
		if len(tiers[0]) == 0 {
			return Subnet{}, nil, &Blocked{reason.SubnetNoMatch, fmt.Sprintf("no subnet in %s of %s has the tags %s", r.Instance.Zone, r.Instance.VPC, tagText(d.SubnetTags))}
		}
	default:
		own := cmp.Or(d.NodeSubnet, r.Instance.Subnet)
		table := tableOf(r, own)
		tiers = [][]Subnet{
			only(subnets, func(s Subnet) bool { return here(s) && s.ID == own && s.room(now) >= r.Limits.IPv4 }),
			only(subnets, func(s Subnet) bool { return here(s) && table != "" && tableOf(r, s.ID) == table }),
			only(subnets, here),
		}
		if len(tiers[2]) == 0 {
			return Subnet{}, nil, &Blocked{reason.SubnetNoMatch, fmt.Sprintf("no subnet is known in %s of %s", r.Instance.Zone, r.Instance.VPC)}
		}
	}

	// A new ENI takes one address for itself and has to bring one more.
	least := 2
	if d.UsePrimary {
		least = 1
	}
	chosen, found := Subnet{}, false
	for _, tier := range tiers {
		for _, s := range tier {
			if s.room(now) >= least && (!found || s.room(now) > chosen.room(now)) {
				chosen, found = s, true
			}
		}
		if found {
			break
		}
	}
	considered := tiers[len(tiers)-1]
	if !found {
		return Subnet{}, nil, &Blocked{reason.SubnetFull, fmt.Sprintf("none of %d subnets in %s has %d free addresses", len(considered), r.Instance.Zone, least)}
	}
	return chosen, passedOver(considered, chosen, least, now), nil
}

// passedOver lists the subnets that were not chosen. One that merely comes later
// has no reason but its message.
func passedOver(considered []Subnet, chosen Subnet, least int, now time.Time) []Rejected {
	var rejected []Rejected
	for _, s := range considered {
		if s.ID == chosen.ID {
			continue
		}
		why := Rejected{string(s.ID), reason.Unspecified, fmt.Sprintf("%d free; %s with %d comes first", s.room(now), chosen.ID, chosen.room(now))}
		switch {
		case now.Before(s.SkippedUntil):
			why.Reason = reason.SubnetFull
			why.Message = "EC2 said that it is full; skipped until " + s.SkippedUntil.UTC().Format(time.RFC3339)
		case s.room(now) < least:
			why.Reason = reason.SubnetFull
			why.Message = fmt.Sprintf("%d free, %d are needed", s.room(now), least)
		}
		rejected = append(rejected, why)
	}
	return rejected
}

// tableOf is the route table of a subnet: the one that names it, else the VPC's
// main one. Empty means unknown.
func tableOf(r Reading, id SubnetID) string {
	at := slices.IndexFunc(r.Subnets, func(s Subnet) bool { return s.ID == id })
	if at < 0 {
		return ""
	}
	main := ""
	for _, t := range r.Tables {
		if slices.Contains(t.Subnets, id) {
			return t.ID
		}
		if t.Main && t.VPC == r.Subnets[at].VPC {
			main = t.ID
		}
	}
	return main
}

// chooseGroups picks the security groups of a new ENI: the chosen ones, which
// bind, else those of the primary interface.
func chooseGroups(r Reading, d Demand) ([]GroupID, *Blocked) {
	var found []GroupID
	known := func(id GroupID) bool {
		return slices.ContainsFunc(r.Groups, func(g SecurityGroup) bool { return g.ID == id && g.VPC == r.Instance.VPC })
	}
	switch {
	case len(d.Groups) > 0:
		for _, id := range d.Groups {
			if !known(id) {
				return nil, &Blocked{reason.SecurityGroupNoMatch, fmt.Sprintf("security group %s is not in %s", id, r.Instance.VPC)}
			}
		}
		found = slices.Clone(d.Groups)
	case len(d.GroupTags) > 0:
		for _, g := range r.Groups {
			if g.VPC == r.Instance.VPC && carries(g.Tags, d.GroupTags) {
				found = append(found, g.ID)
			}
		}
		if len(found) == 0 {
			return nil, &Blocked{reason.SecurityGroupNoMatch, fmt.Sprintf("no security group in %s has the tags %s", r.Instance.VPC, tagText(d.GroupTags))}
		}
	default:
		at := slices.IndexFunc(r.ENIs, func(e ENI) bool { return e.Instance == r.Instance.ID && e.Index == 0 && e.Card == 0 })
		if at < 0 {
			return nil, &Blocked{reason.ReadingStale, "the primary interface, whose security groups a new one gets, is not seen yet"}
		}
		found = slices.Clone(r.ENIs[at].Groups)
		if len(found) == 0 {
			return nil, &Blocked{reason.SecurityGroupNoMatch, fmt.Sprintf("the primary interface %s has no security group", r.ENIs[at].ID)}
		}
	}
	slices.Sort(found)
	return slices.Compact(found), nil
}

func only[T any](all []T, keep func(T) bool) []T {
	var kept []T
	for _, v := range all {
		if keep(v) {
			kept = append(kept, v)
		}
	}
	return kept
}
