// Package account is the simulated AWS account: the networking resources of
// one region and the rules that EC2 enforces on them. It is the pure core of
// the simulator. One method of Account stands for one EC2 action; the wire
// protocol, HTTP, faults and the metadata service live elsewhere.
//
// Rows are immutable: an operation replaces a row, it never edits the slices
// inside one. What a caller gets may be kept, and must not be changed.
package account

import (
	"net/netip"
	"slices"
	"time"
)

// Identifiers of the resources, shaped as EC2 shapes them: a prefix and 8 or 17
// lower-case hex digits.
type (
	// ENIID identifies a network interface ("eni-").
	ENIID string
	// AttachmentID identifies an attachment of one ("eni-attach-").
	AttachmentID string
	// InstanceID identifies an instance ("i-").
	InstanceID string
	// SubnetID identifies a subnet ("subnet-").
	SubnetID string
	// VPCID identifies a VPC ("vpc-").
	VPCID string
	// GroupID identifies a security group ("sg-").
	GroupID string
	// RouteTableID identifies a route table ("rtb-").
	RouteTableID string
)

// Tag is one key and value on a resource.
type Tag struct {
	Key   string `query:"Key" json:"key"`
	Value string `query:"Value" json:"value"`
}

// Status of a network interface or of its attachment, in EC2's words.
type Status string

// The statuses that the simulator uses.
const (
	StatusAvailable Status = "available"
	StatusInUse     Status = "in-use"
	StatusAttached  Status = "attached"
)

// InstanceState is the life-cycle state of an instance, in EC2's words.
type InstanceState string

// The states that an instance can be in.
const (
	StatePending      InstanceState = "pending"
	StateRunning      InstanceState = "running"
	StateShuttingDown InstanceState = "shutting-down"
	StateTerminated   InstanceState = "terminated"
	StateStopping     InstanceState = "stopping"
	StateStopped      InstanceState = "stopped"
)

// Code is the number that EC2 gives the state, and false for a state that does
// not exist.
func (s InstanceState) Code() (int, bool) {
	switch s {
	case StatePending:
		return 0, true
	case StateRunning:
		return 16, true
	case StateShuttingDown:
		return 32, true
	case StateTerminated:
		return 48, true
	case StateStopping:
		return 64, true
	case StateStopped:
		return 80, true
	}
	return 0, false
}

// GroupRef names a security group.
type GroupRef struct {
	ID   GroupID `json:"id"`
	Name string  `json:"name"`
}

// Attachment joins an interface to an instance.
type Attachment struct {
	ID                  AttachmentID `json:"id"`
	Instance            InstanceID   `json:"instance"`
	DeviceIndex         int          `json:"deviceIndex"`
	NetworkCard         int          `json:"networkCard"`
	DeleteOnTermination bool         `json:"deleteOnTermination"`
	Status              Status       `json:"status"`
	Time                time.Time    `json:"time"`
}

// NetworkInterface is an ENI.
type NetworkInterface struct {
	ID              ENIID          `json:"id"`
	Subnet          SubnetID       `json:"subnet"`
	VPC             VPCID          `json:"vpc"`
	Zone            string         `json:"zone"`
	ZoneID          string         `json:"zoneId"`
	Description     string         `json:"description"`
	MAC             string         `json:"mac"`
	Status          Status         `json:"status"`
	SourceDestCheck bool           `json:"sourceDestCheck"`
	Primary         netip.Addr     `json:"primary"`
	Secondary       []netip.Addr   `json:"secondary"` // in the order of assignment
	Prefixes        []netip.Prefix `json:"prefixes"`  // each a /28
	Groups          []GroupRef     `json:"groups"`
	Tags            []Tag          `json:"tags"` // sorted by key
	// Attachment is nil while the interface is attached to nothing.
	Attachment *Attachment `json:"attachment,omitempty"`
	Created    time.Time   `json:"created"`
}

// Slots is how many of an interface's IPv4 slots are taken: one for each
// address, the primary included, and one for each prefix.
func (n NetworkInterface) Slots() int { return 1 + len(n.Secondary) + len(n.Prefixes) }

// Addresses returns the primary address, then the secondary ones.
func (n NetworkInterface) Addresses() []netip.Addr {
	return append([]netip.Addr{n.Primary}, n.Secondary...)
}

// Instance is a virtual machine.
type Instance struct {
	ID          InstanceID    `json:"id"`
	Type        string        `json:"type"`
	Image       string        `json:"image"`
	State       InstanceState `json:"state"`
	Zone        string        `json:"zone"`
	ZoneID      string        `json:"zoneId"`
	Reservation string        `json:"reservation"`
	LaunchIndex int           `json:"launchIndex"`
	LaunchTime  time.Time     `json:"launchTime"`
	ClientToken string        `json:"clientToken,omitempty"`
	Tags        []Tag         `json:"tags"` // sorted by key
	// Subnet, VPC, Address and Interfaces are empty once the instance is
	// terminated. Interfaces is ordered by network card and device index.
	Subnet     SubnetID   `json:"subnet,omitempty"`
	VPC        VPCID      `json:"vpc,omitempty"`
	Address    netip.Addr `json:"address,omitzero"`
	Interfaces []ENIID    `json:"interfaces"`
	// Terminated is when the instance was terminated, and zero before that.
	Terminated time.Time `json:"terminated,omitzero"`
}

// Subnet is a range of addresses in one zone.
type Subnet struct {
	ID     SubnetID     `json:"id"`
	VPC    VPCID        `json:"vpc"`
	Zone   string       `json:"zone"`
	ZoneID string       `json:"zoneId"`
	CIDR   netip.Prefix `json:"cidr"`
	// Free counts the addresses that can still be assigned; the five that AWS
	// reserves in each subnet are not among them.
	Free int   `json:"free"`
	Tags []Tag `json:"tags"`

	cursor uint32 // offset at which the search for a free address starts
}

// VPC is a virtual network with one or more ranges. None is the default VPC.
type VPC struct {
	ID    VPCID          `json:"id"`
	CIDRs []netip.Prefix `json:"cidrs"` // the first is the primary one
	Tags  []Tag          `json:"tags"`
}

// SecurityGroup has a name and no rules: the simulator moves no packets.
type SecurityGroup struct {
	ID          GroupID `json:"id"`
	Name        string  `json:"name"`
	Description string  `json:"description"`
	VPC         VPCID   `json:"vpc"`
	Tags        []Tag   `json:"tags"`
}

// RouteTable is associated with subnets. Subnets that no table names belong to
// the main table of their VPC.
type RouteTable struct {
	ID      RouteTableID `json:"id"`
	VPC     VPCID        `json:"vpc"`
	Main    bool         `json:"main"`
	Subnets []SubnetID   `json:"subnets"`
	Tags    []Tag        `json:"tags"`
}

// Snapshot is everything in the account at one moment, sorted by id.
type Snapshot struct {
	Region   string `json:"region"`
	Account  string `json:"account"`
	Revision uint64 `json:"revision"` // counts the operations that changed something

	VPCs              []VPC              `json:"vpcs"`
	Subnets           []Subnet           `json:"subnets"`
	SecurityGroups    []SecurityGroup    `json:"securityGroups"`
	RouteTables       []RouteTable       `json:"routeTables"`
	Instances         []Instance         `json:"instances"`
	NetworkInterfaces []NetworkInterface `json:"networkInterfaces"`
}

// NetworkInterface returns the interface with that id, and whether it exists.
func (s Snapshot) NetworkInterface(id ENIID) (NetworkInterface, bool) {
	i := slices.IndexFunc(s.NetworkInterfaces, func(n NetworkInterface) bool { return n.ID == id })
	if i < 0 {
		return NetworkInterface{}, false
	}
	return s.NetworkInterfaces[i], true
}

// Instance returns the instance with that id, and whether it exists.
func (s Snapshot) Instance(id InstanceID) (Instance, bool) {
	i := slices.IndexFunc(s.Instances, func(n Instance) bool { return n.ID == id })
	if i < 0 {
		return Instance{}, false
	}
	return s.Instances[i], true
}

// Subnet returns the subnet with that id, and whether it exists.
func (s Snapshot) Subnet(id SubnetID) (Subnet, bool) {
	i := slices.IndexFunc(s.Subnets, func(n Subnet) bool { return n.ID == id })
	if i < 0 {
		return Subnet{}, false
	}
	return s.Subnets[i], true
}
