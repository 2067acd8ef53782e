package plan

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/eniplane/eniplane/internal/reason"
)

// place is where the node is.
type place struct {
	zone   string
	vpc    VPCID
	subnet SubnetID
}

func where(r Reading, d Demand, s survey) place {
	at := place{zone: r.Instance.Zone, vpc: r.Instance.VPC, subnet: r.Instance.Subnet}
	if e, ok := s.primary(); ok && at.subnet == "" {
		at.subnet = e.Subnet
	}
	if at.zone == "" {
		at.zone = d.Zone
	}
	if at.vpc == "" {
		at.vpc = d.VPC
	}
	if at.subnet == "" {
		at.subnet = d.Subnet
	}
	return at
}

// room is how many addresses can be taken from a subnet now.
func room(s Subnet, now time.Time) int {
	if now.Before(s.SkippedUntil) {
		return 0
	}
	return max(s.Free, 0)
}

// noRoom says why a subnet is passed over.
func noRoom(s Subnet, least int, now time.Time) Option {
	message := fmt.Sprintf("%d addresses free, %d needed at least", max(s.Free, 0), least)
	if now.Before(s.SkippedUntil) {
		message = "EC2 said that it is full; skipped until " + s.SkippedUntil.UTC().Format(time.RFC3339)
	}
	return Option{What: string(s.ID), Reason: reason.SubnetFull, Message: message}
}

// choice is the result of choosing a subnet.
type choice struct {
	subnet   Subnet
	grounds  string
	rejected []Option
}

// chooseSubnet picks the subnet of a new ENI that takes least addresses at
// least, in the order of F60: the node's selection by id, or by tags; the
// node's own subnet if a whole ENI fits; the one with most free addresses that
// shares its route table; any with most free addresses. All are in the VPC and
// zone of the node. A selection that matches nothing is an error, never an
// invitation to look elsewhere (L16).
func chooseSubnet(r Reading, d Demand, at place, least int, now time.Time) (choice, *Blocked) {
	near := slices.Clone(r.Network.Subnets)
	near = slices.DeleteFunc(near, func(s Subnet) bool { return s.VPC != at.vpc || s.Zone != at.zone })
	slices.SortFunc(near, func(a, b Subnet) int {
		return cmp.Or(-cmp.Compare(room(a, now), room(b, now)), cmp.Compare(a.ID, b.ID))
	})

	selected := func(Subnet) bool { return true }
	selection := ""
	switch {
	case len(d.SubnetIDs) > 0:
		selected = func(s Subnet) bool { return slices.Contains(d.SubnetIDs, s.ID) }
		selection = "selected by id"
	case len(d.SubnetTags) > 0:
		selected = func(s Subnet) bool { return hasTags(s.Tags, d.SubnetTags) }
		selection = "selected by tags"
	}
	var c choice
	candidates := make([]Subnet, 0, len(near))
	for _, s := range near {
		switch {
		case !selected(s):
			c.rejected = append(c.rejected, Option{What: string(s.ID), Reason: reason.SubnetNoMatch, Message: "not " + selection})
		default:
			candidates = append(candidates, s)
		}
	}
	if len(candidates) == 0 {
		message := fmt.Sprintf("no subnet in %s, zone %s", at.vpc, at.zone)
		if selection != "" {
			message = fmt.Sprintf("none of the %d subnets in %s, zone %s, is %s", len(near), at.vpc, at.zone, selection)
		}
		return choice{}, &Blocked{Reason: reason.SubnetNoMatch, Message: message, Rejected: c.rejected}
	}
	fits := func(s Subnet) bool { return room(s, now) >= least }

	if selection == "" {
		tables := tableOf(r.Network.RouteTables, at.vpc)
		home := tables(at.subnet)
		for _, s := range candidates {
			if s.ID == at.subnet && room(s, now) >= r.Limits.AddressesPerInterface {
				c.subnet, c.grounds = s, "the node's own subnet"
				return c, nil
			}
		}
		for _, s := range candidates {
			switch {
			case tables(s.ID) != home || home == "":
			case fits(s):
				c.subnet, c.grounds = s, "most free addresses behind the node's route table "+home
				return c, nil
			default:
				c.rejected = append(c.rejected, noRoom(s, least, now))
			}
		}
		candidates = slices.DeleteFunc(candidates, func(s Subnet) bool { return home != "" && tables(s.ID) == home })
		selection = "in the node's VPC and zone, behind another route table"
	}
	for _, s := range candidates {
		if fits(s) {
			c.subnet, c.grounds = s, "most free addresses of those "+selection
			return c, nil
		}
		c.rejected = append(c.rejected, noRoom(s, least, now))
	}
	full := slices.DeleteFunc(slices.Clone(c.rejected), func(o Option) bool { return o.Reason != reason.SubnetFull })
	return choice{}, &Blocked{
		Reason:   reason.SubnetFull,
		Message:  fmt.Sprintf("none of %d subnets has %d free addresses", len(full), least),
		Rejected: c.rejected,
	}
}

// tableOf returns a function that gives the route table of a subnet; "" if it
// is not known.
func tableOf(tables []RouteTable, vpc VPCID) func(SubnetID) string {
	main := ""
	explicit := make(map[SubnetID]string)
	for _, t := range tables {
		if t.VPC != vpc {
			continue
		}
		if t.Main {
			main = t.ID
		}
		for _, s := range t.Subnets {
			explicit[s] = t.ID
		}
	}
	return func(s SubnetID) string {
		if s == "" {
			return ""
		}
		if t, ok := explicit[s]; ok {
			return t
		}
		return main
	}
}

// chooseGroups picks the security groups of a new ENI in the order of F65: the
// node's selection by id, or by tags, or those of the primary interface. A
// selection that matches nothing is an error. The result is sorted.
func chooseGroups(r Reading, d Demand, at place, s survey) ([]GroupID, *Blocked) {
	none := func(format string, args ...any) *Blocked {
		return &Blocked{Reason: reason.SecurityGroupNoMatch, Message: fmt.Sprintf(format, args...)}
	}
	known := make(map[GroupID]bool)
	for _, g := range r.Network.Groups {
		if g.VPC == at.vpc {
			known[g.ID] = true
		}
	}
	var groups []GroupID
	switch {
	case len(d.SecurityGroups) > 0:
		for _, id := range d.SecurityGroups {
			if !known[id] {
				return nil, none("%s has no security group %s", at.vpc, id)
			}
			groups = append(groups, id)
		}
	case len(d.SecurityGroupTags) > 0:
		for _, g := range r.Network.Groups {
			if g.VPC == at.vpc && hasTags(g.Tags, d.SecurityGroupTags) {
				groups = append(groups, g.ID)
			}
		}
		if len(groups) == 0 {
			return nil, none("none of the %d security groups of %s carries all %d tags", len(known), at.vpc, len(d.SecurityGroupTags))
		}
	default:
		e, ok := s.primary()
		if !ok {
			return nil, &Blocked{Reason: reason.ReadingStale, Message: "the primary interface, whose security groups new ones get, is not known yet"}
		}
		if len(e.Groups) == 0 {
			return nil, none("the primary interface %s has no security group", e.ID)
		}
		groups = slices.Clone(e.Groups)
	}
	slices.Sort(groups)
	return slices.Compact(groups), nil
}
