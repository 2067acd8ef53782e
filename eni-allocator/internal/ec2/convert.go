package ec2

import (
	"net"
	"net/netip"
	"slices"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/ec2/types"

	"github.com/eniplane/eniplane/eni-allocator/internal/plan"
)

func instance(i types.Instance) plan.Instance {
	out := plan.Instance{
		ID: plan.InstanceID(aws.ToString(i.InstanceId)), Type: string(i.InstanceType),
		VPC: plan.VPCID(aws.ToString(i.VpcId)), Subnet: plan.SubnetID(aws.ToString(i.SubnetId)),
	}
	if i.State != nil {
		out.State = plan.InstanceState(i.State.Name)
	}
	if i.Placement != nil {
		out.Zone = aws.ToString(i.Placement.AvailabilityZone)
	}
	return out
}

// eni converts an ENI. What cannot be understood is named in its Malformed; the rest
// of it stands.
func eni(e types.NetworkInterface) plan.ENI {
	out := plan.ENI{
		ID: plan.ENIID(aws.ToString(e.NetworkInterfaceId)), Subnet: plan.SubnetID(aws.ToString(e.SubnetId)), VPC: plan.VPCID(aws.ToString(e.VpcId)),
		Zone: aws.ToString(e.AvailabilityZone), Description: aws.ToString(e.Description), Type: string(e.InterfaceType), Tags: tags(e.TagSet),
		Managed: aws.ToBool(e.RequesterManaged),
	}
	for _, g := range e.Groups {
		out.Groups = append(out.Groups, plan.GroupID(aws.ToString(g.GroupId)))
	}
	understood := attach(&out, e.Attachment)

	flaw := func(text string) {
		if out.Malformed == "" {
			out.Malformed = text
		}
	}
	mac, err := net.ParseMAC(aws.ToString(e.MacAddress))
	if err != nil || len(mac) != 6 {
		flaw("its MAC address is not one")
	}
	out.MAC = mac.String()
	if out.ID == "" || out.Subnet == "" || out.VPC == "" {
		flaw("it lacks its id, subnet or VPC")
	}
	if !understood {
		flaw("its attachment lacks its instance or device index")
	}
	if out.Primary, err = netip.ParseAddr(aws.ToString(e.PrivateIpAddress)); err != nil || !out.Primary.Is4() {
		flaw("its primary address is not one")
	}
	for _, a := range e.PrivateIpAddresses {
		address, err := netip.ParseAddr(aws.ToString(a.PrivateIpAddress))
		switch {
		case err != nil || !address.Is4():
			flaw("one of its addresses is not one")
		case !aws.ToBool(a.Primary) && address != out.Primary:
			out.Addresses = append(out.Addresses, address)
		}
	}
	for _, p := range e.Ipv4Prefixes {
		block, err := netip.ParsePrefix(aws.ToString(p.Ipv4Prefix))
		if err != nil || !block.Addr().Is4() || block.Bits() != 28 {
			flaw("one of its prefixes is not a /28")
			continue
		}
		out.Prefixes = append(out.Prefixes, block.Masked())
	}
	return out
}

// attach fills in where an ENI is attached, and tells whether that could be
// understood. An attachment that is over is none.
func attach(e *plan.ENI, a *types.NetworkInterfaceAttachment) bool {
	if a == nil || a.Status == types.AttachmentStatusDetached {
		return true
	}
	e.Instance, e.Attachment = plan.InstanceID(aws.ToString(a.InstanceId)), plan.AttachmentID(aws.ToString(a.AttachmentId))
	e.Index, e.Card = int(aws.ToInt32(a.DeviceIndex)), int(aws.ToInt32(a.NetworkCardIndex))
	e.DeleteOnTermination, e.Leaving = aws.ToBool(a.DeleteOnTermination), a.Status == types.AttachmentStatusDetaching
	return e.Instance != "" && a.DeviceIndex != nil
}

func subnet(s types.Subnet) plan.Subnet {
	out := plan.Subnet{
		ID: plan.SubnetID(aws.ToString(s.SubnetId)), VPC: plan.VPCID(aws.ToString(s.VpcId)), Zone: aws.ToString(s.AvailabilityZone),
		Free: int(aws.ToInt32(s.AvailableIpAddressCount)), Tags: tags(s.Tags),
	}
	if p, err := netip.ParsePrefix(aws.ToString(s.CidrBlock)); err == nil {
		out.CIDR = p
	}
	return out
}

func vpc(v types.Vpc) plan.VPC {
	out := plan.VPC{ID: plan.VPCID(aws.ToString(v.VpcId))}
	if p, err := netip.ParsePrefix(aws.ToString(v.CidrBlock)); err == nil {
		out.CIDRs = append(out.CIDRs, p)
	}
	for _, a := range v.CidrBlockAssociationSet {
		if a.CidrBlockState != nil && a.CidrBlockState.State != types.VpcCidrBlockStateCodeAssociated {
			continue
		}
		if p, err := netip.ParsePrefix(aws.ToString(a.CidrBlock)); err == nil && !slices.Contains(out.CIDRs, p) {
			out.CIDRs = append(out.CIDRs, p)
		}
	}
	return out
}

func routeTable(t types.RouteTable) plan.RouteTable {
	out := plan.RouteTable{ID: aws.ToString(t.RouteTableId), VPC: plan.VPCID(aws.ToString(t.VpcId))}
	for _, a := range t.Associations {
		if aws.ToBool(a.Main) {
			out.Main = true
		}
		if id := aws.ToString(a.SubnetId); id != "" {
			out.Subnets = append(out.Subnets, plan.SubnetID(id))
		}
	}
	return out
}

// limits takes the interfaces of network card 0: those of other cards give pods
// nothing.
func limits(t types.InstanceTypeInfo) plan.Limits {
	if t.NetworkInfo == nil {
		return plan.Limits{}
	}
	out := plan.Limits{IPv4: int(aws.ToInt32(t.NetworkInfo.Ipv4AddressesPerInterface))}
	if len(t.NetworkInfo.NetworkCards) == 0 {
		out.Interfaces = int(aws.ToInt32(t.NetworkInfo.MaximumNetworkInterfaces))
	}
	for _, card := range t.NetworkInfo.NetworkCards {
		if aws.ToInt32(card.NetworkCardIndex) == 0 {
			out.Interfaces = int(aws.ToInt32(card.MaximumNetworkInterfaces))
		}
	}
	return out
}

func tags(set []types.Tag) map[string]string {
	out := make(map[string]string, len(set))
	for _, t := range set {
		out[aws.ToString(t.Key)] = aws.ToString(t.Value)
	}
	return out
}
