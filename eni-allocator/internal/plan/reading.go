// Package plan decides what to do for the addresses of one node. It is pure: a
// reading, a demand and a policy go in, a plan comes out, and the same input in
// any order gives the same plan. Calling EC2, remembering what it said, and
// waiting do not belong here.
package plan

import (
	"maps"
	"net/netip"
	"slices"
	"time"
)

// Identifiers of EC2's things, each of its own type. The empty one means none.
type (
	// InstanceID identifies an instance.
	InstanceID string
	// ENIID identifies a network interface.
	ENIID string
	// AttachmentID identifies the attachment of a network interface.
	AttachmentID string
	// SubnetID identifies a subnet.
	SubnetID string
	// VPCID identifies a VPC.
	VPCID string
	// GroupID identifies a security group.
	GroupID string
)

// Limits are what one instance type allows on network card 0.
type Limits struct {
	// Interfaces is how many network interfaces can be attached, the primary
	// one included.
	Interfaces int
	// IPv4 is how many IPv4 slots each of them has, its primary address
	// included. A /28 prefix takes one slot.
	IPv4 int
}

// Known tells whether the limits can be reckoned with. Unknown ones never mean
// "unlimited".
func (l Limits) Known() bool { return l.Interfaces > 0 && l.IPv4 > 0 }

// InstanceState is where an instance is in its life, in EC2's words.
type InstanceState string

// The states that matter here; EC2 has more.
const (
	// InstanceRunning is the only state in which anything is done.
	InstanceRunning InstanceState = "running"
	// InstanceTerminated is final: the pods of the node are gone.
	InstanceTerminated InstanceState = "terminated"
)

// Instance is an instance as EC2 showed it. The zero value means that EC2 never
// showed it.
type Instance struct {
	ID     InstanceID
	Type   string
	State  InstanceState
	Zone   string
	VPC    VPCID
	Subnet SubnetID
}

// ENI is a network interface as EC2 showed it.
type ENI struct {
	ID          ENIID
	Description string
	MAC         string
	// Type is EC2's interface type; "interface" is the plain one. Only those
	// give addresses to pods.
	Type    string
	Zone    string
	VPC     VPCID
	Subnet  SubnetID
	Primary netip.Addr
	// Addresses are the secondary ones, prefixes not expanded.
	Addresses []netip.Addr
	Prefixes  []netip.Prefix
	Groups    []GroupID
	Tags      map[string]string

	// Managed is whether an AWS service keeps it for itself.
	Managed bool

	// Instance is where it is attached. Empty means nowhere, and then the five
	// fields below mean nothing.
	Instance            InstanceID
	Attachment          AttachmentID
	Index               int
	Card                int
	DeleteOnTermination bool
	// Leaving is whether EC2 is detaching it: it still takes its slot, and gets
	// no more addresses.
	Leaving bool

	// Malformed says what of EC2's description could not be understood. Such an
	// ENI takes its slot and gives no addresses. Empty means that nothing is
	// wrong.
	Malformed string
}

// Clone returns a copy that shares nothing with e.
func (e ENI) Clone() ENI {
	e.Addresses = slices.Clone(e.Addresses)
	e.Prefixes = slices.Clone(e.Prefixes)
	e.Groups = slices.Clone(e.Groups)
	e.Tags = maps.Clone(e.Tags)
	return e
}

// Usable returns the addresses that pods may have of it, prefixes expanded, in
// ascending order and each once.
func (e ENI) Usable(primary bool) []netip.Addr {
	usable := slices.Clone(e.Addresses)
	for _, p := range e.Prefixes {
		for a := p.Masked().Addr(); p.Contains(a); a = a.Next() {
			usable = append(usable, a)
		}
	}
	if primary && e.Primary.IsValid() {
		usable = append(usable, e.Primary)
	}
	slices.SortFunc(usable, netip.Addr.Compare)
	return slices.Compact(usable)
}

// Subnet is a subnet as EC2 showed it.
type Subnet struct {
	ID   SubnetID
	VPC  VPCID
	Zone string
	CIDR netip.Prefix
	// Free is how many addresses EC2 said are free, less what was taken since.
	Free int
	// Reserved is how many of them calls in flight may take.
	Reserved int
	Tags     map[string]string
	// SkippedUntil is until when it is not asked because EC2 said that it is
	// full. Zero means not at all.
	SkippedUntil time.Time
}

// room is how many addresses can be asked of the subnet.
func (s Subnet) room(now time.Time) int {
	if now.Before(s.SkippedUntil) {
		return 0
	}
	return max(0, s.Free-s.Reserved)
}

// VPC is a VPC as EC2 showed it. The first of CIDRs is the primary one.
type VPC struct {
	ID    VPCID
	CIDRs []netip.Prefix
}

// SecurityGroup is a security group as EC2 showed it.
type SecurityGroup struct {
	ID   GroupID
	VPC  VPCID
	Tags map[string]string
}

// RouteTable is a route table as EC2 showed it. Main is the one of every subnet
// that none names.
type RouteTable struct {
	ID      string
	VPC     VPCID
	Main    bool
	Subnets []SubnetID
}

// Network is what is around the instances of some VPCs.
type Network struct {
	VPCs    []VPC
	Subnets []Subnet
	Groups  []SecurityGroup
	Tables  []RouteTable
}

// Reading is what is known of one instance and of the network around it, at one
// moment. Slices may be in any order.
type Reading struct {
	Instance Instance
	// Limits are those of the instance's type; the zero value means unknown.
	Limits Limits
	// ENIs are those attached to the instance, and those that are attached
	// nowhere and carry the tags of a creation for it.
	ENIs    []ENI
	Subnets []Subnet
	Groups  []SecurityGroup
	Tables  []RouteTable
}
