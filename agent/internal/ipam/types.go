package ipam

import (
	"errors"
	"net/netip"
	"time"
)

var (
	// ErrNoView says that nothing is known of the node's addresses yet.
	ErrNoView = errors.New("no view of the node yet")
	// ErrEmpty says that no address is free.
	ErrEmpty = errors.New("no free address")
	// ErrUnknown says that the node has no such address to give.
	ErrUnknown = errors.New("address is not in the pool")
	// ErrInUse says that the address belongs to another owner, or the owner has another
	// address.
	ErrInUse = errors.New("address belongs to another owner")
)

// ENIID is EC2's id of a network interface.
type ENIID string

// RoundID names one asking whether an address may be taken from the node.
type RoundID string

// Owner is who has an address: "namespace/pod", or one of the node's own.
type Owner string

const (
	// Router owns the node's router address, the first one given.
	Router Owner = "router"
	// Health owns the address of the node's health endpoint.
	Health Owner = "health"
)

// ENI is a network interface as far as its addresses need it.
type ENI struct {
	// ID is EC2's id.
	ID ENIID `json:"id"`
	// MAC is the MAC address, by which the device is found.
	MAC string `json:"mac"`
	// DeviceIndex is the index of the attachment.
	DeviceIndex uint32 `json:"device_index"`
	// SubnetCIDR is the subnet. The zero Prefix means unknown.
	SubnetCIDR netip.Prefix `json:"subnet_cidr"`
	// VPCCIDRs are the CIDRs of the VPC, the primary one first.
	VPCCIDRs []netip.Prefix `json:"vpc_cidrs"`
}

// ReleaseState is the state of the handshake by which an address leaves a node.
// The numbers are those of eniplane.node.v1.ReleaseState.
type ReleaseState uint8

// The states.
const (
	// ReleaseExcess: timed; nobody asks yet.
	ReleaseExcess ReleaseState = 1
	// ReleaseMarked: the allocator asks.
	ReleaseMarked ReleaseState = 2
	// ReleaseReady: this node said yes.
	ReleaseReady ReleaseState = 3
	// ReleaseRefused: this node said no.
	ReleaseRefused ReleaseState = 4
	// ReleaseDone: EC2 took the address.
	ReleaseDone ReleaseState = 5
)

// Release is the handshake of one address.
type Release struct {
	Address netip.Addr
	State   ReleaseState
	Round   RoundID
}

// View is one consistent reading of the node.
type View struct {
	// ENIs are the node's interfaces.
	ENIs map[ENIID]ENI
	// Pool is which interface carries which address that pods may use. An address
	// of an interface that the view lacks is never given out.
	Pool map[netip.Addr]ENIID
	// Releases are the handshakes under way.
	Releases []Release
}

// Allocation is an address with its owner.
type Allocation struct {
	// Address is the address.
	Address netip.Addr `json:"address"`
	// Owner has it.
	Owner Owner `json:"owner"`
	// ENI carries it, as last seen.
	ENI ENI `json:"eni"`
	// Since is when it was given.
	Since time.Time `json:"since"`
}

// Status is what is known of one address.
type Status struct {
	// Address is the address.
	Address netip.Addr
	// ENI carries it.
	ENI ENIID
	// Owner has it. Empty means that nobody does.
	Owner Owner
	// Since is since when. Zero means unknown, or free.
	Since time.Time
	// InPool says whether the view still has it.
	InPool bool
}

// Answer is what the node says to one round of release.
type Answer struct {
	Address netip.Addr
	Round   RoundID
	// Yes says that the address is free and will not be given out again.
	Yes bool
}

// State is what must survive a restart.
type State struct {
	// Used are the addresses given out, sorted by address.
	Used []Allocation `json:"used"`
	// Leaving are the rounds that got a yes, by address.
	Leaving map[netip.Addr]RoundID `json:"leaving,omitempty"`
	// Released is when free addresses were last taken back.
	Released map[netip.Addr]time.Time `json:"released,omitempty"`
}
