package server

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"

	eniv1 "github.com/eniplane/eniplane/gen/eniplane/eni/v1"
	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/internal/prefix"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"

	"github.com/eniplane/eniplane/eni-allocator/internal/plan"
	"github.com/eniplane/eniplane/eni-allocator/internal/wire"
)

// hypothetical are the names of what a described node does not name.
const hypothetical = "hypothetical"

// describe makes a reading and a demand of a node that need not exist. Where it
// names no zone or VPC, they are those of its primary interface, or of the first
// subnet.
func (s *Server) describe(ctx context.Context, h *eniv1.HypotheticalNode) (plan.Reading, plan.Demand, error) {
	limits, err := s.allocator.Limits(ctx, h.GetInstanceType())
	if err != nil {
		return plan.Reading{}, plan.Demand{}, s.refuse(ctx, err, "", 0)
	}
	network, err := s.allocator.Network()
	if err != nil {
		return plan.Reading{}, plan.Demand{}, s.refuse(ctx, err, "", 0)
	}
	d := h.GetDemand()
	if d == nil {
		d = &nodev1.NodeDemand{}
	}
	demand := wire.Demand(d)
	demand.Node, demand.NodeUID = hypothetical, hypothetical
	r := plan.Reading{
		Instance: plan.Instance{ID: hypothetical, Type: h.GetInstanceType(), State: plan.InstanceRunning},
		Limits:   limits, Subnets: network.Subnets, Groups: network.Groups, Tables: network.Tables,
	}
	if len(h.GetSubnets()) > 0 {
		r.Subnets = nil
		for i, sub := range h.GetSubnets() {
			converted, err := subnetOf(sub, fmt.Sprintf("hypothetical.subnets[%d]", i))
			if err != nil {
				return plan.Reading{}, plan.Demand{}, err
			}
			r.Subnets = append(r.Subnets, converted)
		}
	}
	for i, e := range h.GetEnis() {
		converted, err := eniOf(e, fmt.Sprintf("hypothetical.enis[%d]", i))
		if err != nil {
			return plan.Reading{}, plan.Demand{}, err
		}
		r.ENIs = append(r.ENIs, converted)
	}

	i := &r.Instance
	i.Zone, i.VPC, i.Subnet = d.GetAvailabilityZone(), plan.VPCID(d.GetVpcId()), plan.SubnetID(d.GetNodeSubnetId())
	for _, e := range r.ENIs {
		if e.Index == 0 {
			i.Zone, i.VPC, i.Subnet = cmp.Or(i.Zone, e.Zone), cmp.Or(i.VPC, e.VPC), cmp.Or(i.Subnet, e.Subnet)
		}
	}
	if len(r.Subnets) > 0 {
		i.Zone, i.VPC = cmp.Or(i.Zone, r.Subnets[0].Zone), cmp.Or(i.VPC, r.Subnets[0].VPC)
	}
	return r, demand, nil
}

func subnetOf(s *eniv1.SubnetCapacity, field string) (plan.Subnet, error) {
	out := plan.Subnet{
		ID: plan.SubnetID(s.GetId()), VPC: plan.VPCID(s.GetVpcId()), Zone: s.GetAvailabilityZone(),
		Free: int(s.GetFree()), Reserved: int(s.GetReserved()), Tags: s.GetTags(),
	}
	if s.GetCidr() != "" {
		cidr, err := prefix.Parse(s.GetCidr())
		if err != nil || !cidr.Addr().Is4() {
			return plan.Subnet{}, rpc.InvalidField(field+".cidr", reason.PrefixInvalid, "%q is not an IPv4 CIDR", s.GetCidr())
		}
		out.CIDR = cidr
	}
	return out, nil
}

func eniOf(e *nodev1.Eni, field string) (plan.ENI, error) {
	out := plan.ENI{
		ID: plan.ENIID(e.GetId()), Description: e.GetDescription(), MAC: e.GetMac(), Zone: e.GetAvailabilityZone(),
		Subnet: plan.SubnetID(e.GetSubnet().GetId()), VPC: plan.VPCID(e.GetVpc().GetId()), Tags: e.GetTags(),
		Instance: hypothetical, Index: int(e.GetDeviceIndex()), DeleteOnTermination: true,
	}
	for _, g := range e.GetSecurityGroups() {
		out.Groups = append(out.Groups, plan.GroupID(g))
	}
	var err error
	if out.Primary, err = netip.ParseAddr(e.GetIp()); err != nil {
		return plan.ENI{}, rpc.InvalidField(field+".ip", reason.FieldInvalid, "%q is not an address", e.GetIp())
	}
	for i, text := range e.GetPrefixes() {
		p, err := prefix.Parse(text)
		if err != nil || !p.Addr().Is4() || p.Bits() != 28 {
			return plan.ENI{}, rpc.InvalidField(fmt.Sprintf("%s.prefixes[%d]", field, i), reason.PrefixInvalid, "%q is not an IPv4 /28", text)
		}
		out.Prefixes = append(out.Prefixes, p)
	}
	for i, text := range e.GetAddresses() {
		a, err := netip.ParseAddr(text)
		if err != nil {
			return plan.ENI{}, rpc.InvalidField(fmt.Sprintf("%s.addresses[%d]", field, i), reason.FieldInvalid, "%q is not an address", text)
		}
		if a == out.Primary || inside(out.Prefixes, a) {
			continue // Listed for readers; it takes no slot of its own.
		}
		out.Addresses = append(out.Addresses, a)
	}
	return out, nil
}

func inside(prefixes []netip.Prefix, a netip.Addr) bool {
	for _, p := range prefixes {
		if p.Contains(a) {
			return true
		}
	}
	return false
}
