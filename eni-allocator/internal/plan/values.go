// Package plan decides what to do with the ENIs of one node. It is pure: a plan
// is a function of one reading of EC2, one demand, the policy and the time.
// Reading, acting, waiting and telling belong elsewhere.
package plan

import (
	"net/netip"
	"time"
)

// Identifiers as EC2 gives them.
type (
	// ENIID identifies a network interface ("eni-...").
	ENIID string
	// AttachmentID identifies one attachment of one ("eni-attach-...").
	AttachmentID string
	// InstanceID identifies an instance ("i-...").
	InstanceID string
	// SubnetID identifies a subnet ("subnet-...").
	SubnetID string
	// VPCID identifies a VPC ("vpc-...").
	VPCID string
	// GroupID identifies a security group ("sg-...").
	GroupID string
)

// InstanceState is the state of an instance in EC2's words. Empty means that
// EC2 showed no such instance.
type InstanceState string

// The states that matter: in StateRunning and StateStopped interfaces can be
// attached; after StateTerminated nothing of the instance lives.
const (
	StateRunning    InstanceState = "running"
	StateStopped    InstanceState = "stopped"
	StateTerminated InstanceState = "terminated"
)

// Instance is an instance as EC2 shows it.
type Instance struct {
	ID    InstanceID
	Type  string
	State InstanceState
	Zone  string
	VPC   VPCID
	// Subnet is that of the primary interface; empty once it is terminated.
	Subnet SubnetID
}

// Limits are what an instance type can have on its network card 0. The zero
// value means that they are not known, never that there are none.
type Limits struct {
	// Interfaces is the most ENIs on card 0, the primary one included.
	Interfaces int
	// AddressesPerInterface is the most IPv4 addresses of one ENI, its primary
	// one included. A prefix counts as one.
	AddressesPerInterface int
}

// Known tells whether the limits can be planned with.
func (l Limits) Known() bool { return l.Interfaces > 0 && l.AddressesPerInterface > 0 }

// Attachment joins an ENI to an instance.
type Attachment struct {
	ID                  AttachmentID
	Instance            InstanceID
	DeviceIndex         int
	Card                int
	DeleteOnTermination bool
	// Leaving is true while EC2 detaches the ENI: it takes its slot still, but
	// gets no more addresses.
	Leaving bool
}

// ENI is a network interface as EC2 shows it.
type ENI struct {
	ID          ENIID
	Subnet      SubnetID
	VPC         VPCID
	Zone        string
	MAC         string
	Description string
	// Kind is EC2's interface type. Only "interface" can serve pods.
	Kind      string
	Primary   netip.Addr
	Secondary []netip.Addr
	Prefixes  []netip.Prefix
	Groups    []GroupID
	Tags      map[string]string
	// Attachment is nil while the ENI is attached to nothing.
	Attachment *Attachment
	// RequesterManaged is true for ENIs that an AWS service keeps for itself.
	RequesterManaged bool
	// Flaw says why the ENI cannot be understood. Such an ENI takes a slot and
	// gives no addresses. Empty means that it is sound.
	Flaw string
}

// Slots is how many of its IPv4 slots are taken: one for each address, the
// primary included, and one for each prefix.
func (e ENI) Slots() int { return 1 + len(e.Secondary) + len(e.Prefixes) }

// Addresses returns the addresses for pods: the secondary ones, those of the
// prefixes, and the primary if pods may use it. They are in no particular order.
func (e ENI) Addresses(usePrimary bool) []netip.Addr {
	out := make([]netip.Addr, 0, len(e.Secondary)+prefixSize*len(e.Prefixes)+1)
	if usePrimary && e.Primary.IsValid() {
		out = append(out, e.Primary)
	}
	out = append(out, e.Secondary...)
	for _, p := range e.Prefixes {
		for a := p.Masked().Addr(); p.Contains(a); a = a.Next() {
			out = append(out, a)
		}
	}
	return out
}

// prefixSize is how many addresses a delegated prefix, a /28, has; pods may use
// all of them.
const prefixSize = 16

// Subnet is a subnet as EC2 shows it.
type Subnet struct {
	ID   SubnetID
	VPC  VPCID
	Zone string
	// CIDR is its IPv4 range; invalid if EC2 did not say.
	CIDR netip.Prefix
	// Free is how many addresses can still be assigned.
	Free int
	Tags map[string]string
	// SkippedUntil is until when the subnet is not used because EC2 said that it
	// is full, whatever Free says. Zero means that it is not skipped.
	SkippedUntil time.Time
}

// VPC is a VPC as EC2 shows it.
type VPC struct {
	ID VPCID
	// CIDR is its primary IPv4 range; invalid if EC2 did not say.
	CIDR netip.Prefix
	// More are its further IPv4 ranges.
	More []netip.Prefix
}

// SecurityGroup is a security group as EC2 shows it.
type SecurityGroup struct {
	ID   GroupID
	VPC  VPCID
	Tags map[string]string
}

// RouteTable is a route table as EC2 shows it. Subnets of the VPC that no table
// names belong to the main one.
type RouteTable struct {
	ID      string
	VPC     VPCID
	Main    bool
	Subnets []SubnetID
}

// Network is everything in VPCs that is not an instance or an ENI.
type Network struct {
	VPCs        []VPC
	Subnets     []Subnet
	Groups      []SecurityGroup
	RouteTables []RouteTable
}

// Reading is what EC2 has shown of one node, at one moment. The order of its
// slices means nothing.
type Reading struct {
	Instance Instance
	Limits   Limits
	// ENIs are those attached to the instance, and those attached to nothing
	// that carry our tags for it.
	ENIs    []ENI
	Network Network
	// TakenIndexes are device indexes that EC2 called taken although no ENI of
	// the reading has them.
	TakenIndexes []int
	// SlotsRefused is true while EC2 refuses another ENI although the limits
	// have room for it.
	SlotsRefused bool
}

// Demand is what one node needs.
type Demand struct {
	Node string
	// UID tells nodes of the same name apart. It is part of tags and tokens.
	UID      string
	Instance InstanceID
	// Zone, VPC and Subnet are where the node says that it is. They count only
	// where EC2 did not say.
	Zone   string
	VPC    VPCID
	Subnet SubnetID

	// FirstInterfaceIndex is the lowest device index that gives addresses. Nil is
	// not 0: it means the policy's default.
	FirstInterfaceIndex *int
	// SecurityGroups, or else SecurityGroupTags, select the groups of new ENIs.
	// Both empty means: those of the primary interface.
	SecurityGroups    []GroupID
	SecurityGroupTags map[string]string
	// SubnetIDs, or else SubnetTags, select the subnets of new ENIs. Both empty
	// means: near the node's own subnet.
	SubnetIDs  []SubnetID
	SubnetTags map[string]string
	// ExcludeTags exclude ENIs that carry all of them. Empty excludes none.
	ExcludeTags map[string]string
	// KeepOnTermination is true if new ENIs shall outlive the instance.
	KeepOnTermination bool
	// UsePrimary is true if pods may use primary addresses.
	UsePrimary bool

	Watermarks Watermarks
	// Used are the addresses in use, on whatever ENI.
	Used []netip.Addr
	// PendingPods are pods of the node that need an address and have none.
	PendingPods int
	// Waiting are requests for an address that wait on the node.
	Waiting int
	// Urgent is how many addresses should be free at least, right now.
	Urgent int
	// MaxPods is how many pods the node can run. 0 means unknown.
	MaxPods int

	// Attempt counts the tries to create an ENI for the same set of attached
	// ENIs whose result was lost. Each has a token of its own.
	Attempt int
	// IntentSince is when this try was first made. Zero means now.
	IntentSince time.Time
}

// Policy is what an allocator does the same way for all nodes.
type Policy struct {
	// Cluster is the value of the ownership tag.
	Cluster string
	// FirstInterfaceIndex is used for nodes that do not say theirs.
	FirstInterfaceIndex int
	// Tags are put on new ENIs in addition to ours. They must not begin with
	// TagPrefix.
	Tags map[string]string
	// SpareGrace is how old an own, unattached ENI must be before it is deleted
	// as superfluous.
	SpareGrace time.Duration
}
