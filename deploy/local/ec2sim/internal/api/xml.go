package api

import (
	"net/netip"

	"github.com/eniplane/eniplane/deploy/local/ec2sim/internal/account"
	"github.com/eniplane/eniplane/deploy/local/ec2sim/internal/limits"
)

// set is a list in EC2's XML: an element that is there even if it is empty,
// with an <item> for each member.
type set[T any] struct {
	Items []T `xml:"item"`
}

func each[V, T any](rows []V, convert func(V) T) set[T] {
	items := make([]T, 0, len(rows))
	for _, row := range rows {
		items = append(items, convert(row))
	}
	return set[T]{Items: items}
}

type (
	returnXML struct {
		Return bool `xml:"return"`
	}
	tagXML struct {
		Key   string `xml:"key"`
		Value string `xml:"value"`
	}
	groupXML struct {
		ID   string `xml:"groupId"`
		Name string `xml:"groupName"`
	}
	prefixXML struct {
		Prefix string `xml:"ipv4Prefix"`
	}
	addressXML struct {
		Address string `xml:"privateIpAddress"`
		DNSName string `xml:"privateDnsName"`
		Primary bool   `xml:"primary"`
	}
	assignedAddressXML struct {
		Address string `xml:"privateIpAddress"`
	}
	attachmentXML struct {
		ID                  string `xml:"attachmentId"`
		InstanceID          string `xml:"instanceId,omitempty"`
		InstanceOwnerID     string `xml:"instanceOwnerId,omitempty"`
		DeviceIndex         int    `xml:"deviceIndex"`
		NetworkCardIndex    int    `xml:"networkCardIndex"`
		Status              string `xml:"status"`
		AttachTime          string `xml:"attachTime"`
		DeleteOnTermination bool   `xml:"deleteOnTermination"`
	}
	networkInterfaceXML struct {
		ID               string          `xml:"networkInterfaceId"`
		SubnetID         string          `xml:"subnetId"`
		VPCID            string          `xml:"vpcId"`
		Zone             string          `xml:"availabilityZone,omitempty"`
		ZoneID           string          `xml:"availabilityZoneId,omitempty"`
		Description      string          `xml:"description"`
		OwnerID          string          `xml:"ownerId"`
		RequesterManaged *bool           `xml:"requesterManaged"`
		Status           string          `xml:"status"`
		MACAddress       string          `xml:"macAddress"`
		PrivateIP        string          `xml:"privateIpAddress"`
		PrivateDNSName   string          `xml:"privateDnsName"`
		SourceDestCheck  bool            `xml:"sourceDestCheck"`
		InterfaceType    string          `xml:"interfaceType"`
		Groups           set[groupXML]   `xml:"groupSet"`
		Attachment       *attachmentXML  `xml:"attachment"`
		Tags             *set[tagXML]    `xml:"tagSet"`
		Addresses        set[addressXML] `xml:"privateIpAddressesSet"`
		Prefixes         *set[prefixXML] `xml:"ipv4PrefixSet"`
	}
	stateXML struct {
		Code int    `xml:"code"`
		Name string `xml:"name"`
	}
	placementXML struct {
		Zone    string `xml:"availabilityZone"`
		ZoneID  string `xml:"availabilityZoneId"`
		Tenancy string `xml:"tenancy"`
	}
	instanceXML struct {
		ID             string                   `xml:"instanceId"`
		ImageID        string                   `xml:"imageId"`
		State          stateXML                 `xml:"instanceState"`
		PrivateDNSName string                   `xml:"privateDnsName"`
		LaunchIndex    int                      `xml:"amiLaunchIndex"`
		Type           string                   `xml:"instanceType"`
		LaunchTime     string                   `xml:"launchTime"`
		Placement      placementXML             `xml:"placement"`
		SubnetID       string                   `xml:"subnetId,omitempty"`
		VPCID          string                   `xml:"vpcId,omitempty"`
		PrivateIP      string                   `xml:"privateIpAddress,omitempty"`
		ClientToken    string                   `xml:"clientToken"`
		Groups         set[groupXML]            `xml:"groupSet"`
		Interfaces     set[networkInterfaceXML] `xml:"networkInterfaceSet"`
		Tags           *set[tagXML]             `xml:"tagSet"`
	}
	reservationXML struct {
		ID        string           `xml:"reservationId"`
		OwnerID   string           `xml:"ownerId"`
		Groups    set[groupXML]    `xml:"groupSet"`
		Instances set[instanceXML] `xml:"instancesSet"`
	}
	subnetXML struct {
		ID          string       `xml:"subnetId"`
		ARN         string       `xml:"subnetArn"`
		State       string       `xml:"state"`
		OwnerID     string       `xml:"ownerId"`
		VPCID       string       `xml:"vpcId"`
		CIDR        string       `xml:"cidrBlock"`
		Free        int          `xml:"availableIpAddressCount"`
		Zone        string       `xml:"availabilityZone"`
		ZoneID      string       `xml:"availabilityZoneId"`
		DefaultZone bool         `xml:"defaultForAz"`
		PublicIP    bool         `xml:"mapPublicIpOnLaunch"`
		Tags        *set[tagXML] `xml:"tagSet"`
	}
	vpcBlockXML struct {
		AssociationID string `xml:"associationId"`
		CIDR          string `xml:"cidrBlock"`
		State         string `xml:"cidrBlockState>state"`
	}
	vpcXML struct {
		ID      string           `xml:"vpcId"`
		OwnerID string           `xml:"ownerId"`
		State   string           `xml:"state"`
		CIDR    string           `xml:"cidrBlock"`
		Blocks  set[vpcBlockXML] `xml:"cidrBlockAssociationSet"`
		Tenancy string           `xml:"instanceTenancy"`
		Default bool             `xml:"isDefault"`
		Tags    *set[tagXML]     `xml:"tagSet"`
	}
	securityGroupXML struct {
		OwnerID     string       `xml:"ownerId"`
		ID          string       `xml:"groupId"`
		Name        string       `xml:"groupName"`
		Description string       `xml:"groupDescription"`
		VPCID       string       `xml:"vpcId"`
		Tags        *set[tagXML] `xml:"tagSet"`
	}
	associationXML struct {
		ID       string `xml:"routeTableAssociationId"`
		TableID  string `xml:"routeTableId"`
		SubnetID string `xml:"subnetId,omitempty"`
		Main     bool   `xml:"main"`
		State    string `xml:"associationState>state"`
	}
	routeXML struct {
		Destination string `xml:"destinationCidrBlock"`
		GatewayID   string `xml:"gatewayId"`
		State       string `xml:"state"`
		Origin      string `xml:"origin"`
	}
	routeTableXML struct {
		ID           string              `xml:"routeTableId"`
		VPCID        string              `xml:"vpcId"`
		OwnerID      string              `xml:"ownerId"`
		Routes       set[routeXML]       `xml:"routeSet"`
		Associations set[associationXML] `xml:"associationSet"`
		Tags         *set[tagXML]        `xml:"tagSet"`
	}
	taggedResourceXML struct {
		ID    string `xml:"resourceId"`
		Type  string `xml:"resourceType"`
		Key   string `xml:"key"`
		Value string `xml:"value"`
	}
	networkCardXML struct {
		Index      int `xml:"networkCardIndex"`
		Interfaces int `xml:"maximumNetworkInterfaces"`
	}
	networkInfoXML struct {
		Interfaces  int                 `xml:"maximumNetworkInterfaces"`
		CardCount   int                 `xml:"maximumNetworkCards"`
		DefaultCard int                 `xml:"defaultNetworkCardIndex"`
		Cards       set[networkCardXML] `xml:"networkCards"`
		Addresses   int                 `xml:"ipv4AddressesPerInterface"`
	}
	instanceTypeXML struct {
		Name       string         `xml:"instanceType"`
		BareMetal  bool           `xml:"bareMetal"`
		Hypervisor string         `xml:"hypervisor,omitempty"`
		Network    networkInfoXML `xml:"networkInfo"`
	}
	stateChangeXML struct {
		ID       string   `xml:"instanceId"`
		Current  stateXML `xml:"currentState"`
		Previous stateXML `xml:"previousState"`
	}
)

// The answers of the actions.
type (
	describeInstancesXML struct {
		Reservations set[reservationXML] `xml:"reservationSet"`
		NextToken    string              `xml:"nextToken,omitempty"`
	}
	describeInstanceTypesXML struct {
		Types     set[instanceTypeXML] `xml:"instanceTypeSet"`
		NextToken string               `xml:"nextToken,omitempty"`
	}
	describeNetworkInterfacesXML struct {
		Interfaces set[networkInterfaceXML] `xml:"networkInterfaceSet"`
		NextToken  string                   `xml:"nextToken,omitempty"`
	}
	describeSubnetsXML struct {
		Subnets   set[subnetXML] `xml:"subnetSet"`
		NextToken string         `xml:"nextToken,omitempty"`
	}
	describeVpcsXML struct {
		Vpcs      set[vpcXML] `xml:"vpcSet"`
		NextToken string      `xml:"nextToken,omitempty"`
	}
	describeSecurityGroupsXML struct {
		Groups    set[securityGroupXML] `xml:"securityGroupInfo"`
		NextToken string                `xml:"nextToken,omitempty"`
	}
	describeRouteTablesXML struct {
		Tables    set[routeTableXML] `xml:"routeTableSet"`
		NextToken string             `xml:"nextToken,omitempty"`
	}
	describeTagsXML struct {
		Tags      set[taggedResourceXML] `xml:"tagSet"`
		NextToken string                 `xml:"nextToken,omitempty"`
	}
	createNetworkInterfaceXML struct {
		Interface   networkInterfaceXML `xml:"networkInterface"`
		ClientToken string              `xml:"clientToken,omitempty"`
	}
	attachNetworkInterfaceXML struct {
		AttachmentID     string `xml:"attachmentId"`
		NetworkCardIndex int    `xml:"networkCardIndex"`
	}
	assignPrivateIPAddressesXML struct {
		ID        string                  `xml:"networkInterfaceId"`
		Addresses set[assignedAddressXML] `xml:"assignedPrivateIpAddressesSet"`
		Prefixes  set[prefixXML]          `xml:"assignedIpv4PrefixSet"`
		Return    bool                    `xml:"return"`
	}
	terminateInstancesXML struct {
		Instances set[stateChangeXML] `xml:"instancesSet"`
	}
)

// shape converts rows to XML; the account supplies what all rows share.
type shape struct{ acc *account.Account }

func tagSet(tags []account.Tag) *set[tagXML] {
	s := each(tags, func(t account.Tag) tagXML { return tagXML{Key: t.Key, Value: t.Value} })
	return &s
}

func groupRef(g account.GroupRef) groupXML { return groupXML{ID: string(g.ID), Name: g.Name} }

func prefix(p netip.Prefix) prefixXML { return prefixXML{Prefix: p.String()} }

func (s shape) networkInterface(eni account.NetworkInterface) networkInterfaceXML {
	x := networkInterfaceXML{
		ID: string(eni.ID), SubnetID: string(eni.Subnet), VPCID: string(eni.VPC), Zone: eni.Zone, ZoneID: eni.ZoneID,
		Description: eni.Description, OwnerID: s.acc.Owner(), RequesterManaged: new(bool), Status: string(eni.Status),
		MACAddress: eni.MAC, PrivateIP: eni.Primary.String(), PrivateDNSName: account.PrivateDNSName(s.acc.Region(), eni.Primary),
		SourceDestCheck: eni.SourceDestCheck, InterfaceType: "interface",
		Groups: each(eni.Groups, groupRef), Tags: tagSet(eni.Tags),
		Addresses: each(eni.Addresses(), func(addr netip.Addr) addressXML {
			return addressXML{Address: addr.String(), DNSName: account.PrivateDNSName(s.acc.Region(), addr), Primary: addr == eni.Primary}
		}),
	}
	if len(eni.Prefixes) > 0 {
		prefixes := each(eni.Prefixes, prefix)
		x.Prefixes = &prefixes
	}
	if a := eni.Attachment; a != nil {
		x.Attachment = &attachmentXML{
			ID: string(a.ID), InstanceID: string(a.Instance), InstanceOwnerID: s.acc.Owner(), DeviceIndex: a.DeviceIndex,
			NetworkCardIndex: a.NetworkCard, Status: string(a.Status), AttachTime: account.FormatTime(a.Time),
			DeleteOnTermination: a.DeleteOnTermination,
		}
	}
	return x
}

// instanceInterface is the shorter form that stands inside an instance.
func (s shape) instanceInterface(eni account.NetworkInterface) networkInterfaceXML {
	x := s.networkInterface(eni)
	x.Zone, x.ZoneID, x.Tags, x.RequesterManaged = "", "", nil, nil
	x.Attachment.InstanceID, x.Attachment.InstanceOwnerID = "", ""
	return x
}

func state(name account.InstanceState) stateXML {
	code, _ := name.Code()
	return stateXML{Code: code, Name: string(name)}
}

func (s shape) instance(d account.InstanceDetail) instanceXML {
	x := instanceXML{
		ID: string(d.ID), ImageID: d.Image, State: state(d.State), LaunchIndex: d.LaunchIndex, Type: d.Type,
		LaunchTime: account.FormatTime(d.LaunchTime), Placement: placementXML{Zone: d.Zone, ZoneID: d.ZoneID, Tenancy: "default"},
		SubnetID: string(d.Subnet), VPCID: string(d.VPC), ClientToken: d.ClientToken, Tags: tagSet(d.Tags),
		Interfaces: each(d.Attached, s.instanceInterface),
	}
	if d.Address.IsValid() {
		x.PrivateIP = d.Address.String()
		x.PrivateDNSName = account.PrivateDNSName(s.acc.Region(), d.Address)
	}
	if len(d.Attached) > 0 {
		x.Groups = each(d.Attached[0].Groups, groupRef)
	}
	return x
}

func (s shape) reservation(id string, instances []account.InstanceDetail) reservationXML {
	return reservationXML{ID: id, OwnerID: s.acc.Owner(), Instances: each(instances, s.instance)}
}

// reservations groups instances by the call that launched them.
func (s shape) reservations(rows []account.InstanceDetail) set[reservationXML] {
	var order []string
	byID := make(map[string][]account.InstanceDetail)
	for _, row := range rows {
		if byID[row.Reservation] == nil {
			order = append(order, row.Reservation)
		}
		byID[row.Reservation] = append(byID[row.Reservation], row)
	}
	return each(order, func(id string) reservationXML { return s.reservation(id, byID[id]) })
}

func (s shape) subnet(r account.Subnet) subnetXML {
	return subnetXML{
		ID: string(r.ID), ARN: "arn:aws:ec2:" + s.acc.Region() + ":" + s.acc.Owner() + ":subnet/" + string(r.ID),
		State: "available", OwnerID: s.acc.Owner(), VPCID: string(r.VPC), CIDR: r.CIDR.String(), Free: r.Free,
		Zone: r.Zone, ZoneID: r.ZoneID, Tags: tagSet(r.Tags),
	}
}

func (s shape) vpc(r account.VPC) vpcXML {
	n := 0
	return vpcXML{
		ID: string(r.ID), OwnerID: s.acc.Owner(), State: "available", CIDR: r.CIDRs[0].String(), Tenancy: "default",
		Tags: tagSet(r.Tags),
		Blocks: each(r.CIDRs, func(cidr netip.Prefix) vpcBlockXML {
			n++
			return vpcBlockXML{AssociationID: derived("vpc-cidr-assoc-", string(r.ID), n), CIDR: cidr.String(), State: "associated"}
		}),
	}
}

func (s shape) securityGroup(r account.SecurityGroup) securityGroupXML {
	return securityGroupXML{
		OwnerID: s.acc.Owner(), ID: string(r.ID), Name: r.Name, Description: r.Description, VPCID: string(r.VPC), Tags: tagSet(r.Tags),
	}
}

func (s shape) routeTable(r account.RouteTableDetail) routeTableXML {
	x := routeTableXML{
		ID: string(r.ID), VPCID: string(r.VPC), OwnerID: s.acc.Owner(), Tags: tagSet(r.Tags),
		Routes: each(r.Local.CIDRs, func(cidr netip.Prefix) routeXML {
			return routeXML{Destination: cidr.String(), GatewayID: "local", State: "active", Origin: "CreateRouteTable"}
		}),
	}
	if r.Main {
		x.Associations.Items = append(x.Associations.Items, associationXML{
			ID: derived("rtbassoc-", string(r.ID), 0), TableID: string(r.ID), Main: true, State: "associated",
		})
	}
	for i, subnet := range r.Subnets {
		x.Associations.Items = append(x.Associations.Items, associationXML{
			ID: derived("rtbassoc-", string(r.ID), i+1), TableID: string(r.ID), SubnetID: string(subnet), State: "associated",
		})
	}
	return x
}

func taggedResource(r account.TaggedResource) taggedResourceXML {
	return taggedResourceXML{ID: r.ID, Type: r.Type, Key: r.Tag.Key, Value: r.Tag.Value}
}

func instanceType(t limits.Type) instanceTypeXML {
	n := -1
	return instanceTypeXML{
		Name: t.Name, BareMetal: t.BareMetal, Hypervisor: t.Hypervisor,
		Network: networkInfoXML{
			Interfaces: t.Interfaces(), CardCount: len(t.Cards), DefaultCard: t.DefaultCard, Addresses: t.AddressesPerInterface,
			Cards: each(t.Cards, func(interfaces int) networkCardXML {
				n++
				return networkCardXML{Index: n, Interfaces: interfaces}
			}),
		},
	}
}

func stateChange(c account.InstanceStateChange) stateChangeXML {
	return stateChangeXML{ID: string(c.InstanceID), Current: state(c.Current), Previous: state(c.Previous)}
}

func assignedXML(r account.AssignPrivateIPAddressesResponse) assignPrivateIPAddressesXML {
	return assignPrivateIPAddressesXML{
		ID: string(r.NetworkInterfaceID), Return: true, Prefixes: each(r.Prefixes, prefix),
		Addresses: each(r.Addresses, func(a netip.Addr) assignedAddressXML { return assignedAddressXML{Address: a.String()} }),
	}
}
