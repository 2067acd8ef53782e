package plan

import (
	"net/netip"
	"time"
)

// Demand is what one node needs.
type Demand struct {
	Node    string
	NodeUID string
	// NodeSubnet is the subnet of the primary interface. Empty means that of the
	// instance.
	NodeSubnet SubnetID

	// The watermarks, with the meaning of Cilium's spec.ipam. 0 means: not said.
	PreAllocate, MinAllocate, MaxAllocate, MaxAboveWatermark int

	// Used are the addresses in use, in any order. Those that the node does not
	// have count for nothing.
	Used []netip.Addr
	// System is how many of them are not pods', such as the router's: they come
	// on top of MaxPods.
	System int
	// PendingPods is how many pods of the node wait to start.
	PendingPods int
	// Urgent is how many addresses must be free now, whatever the watermarks say.
	Urgent int
	// MaxPods is how many pods the node can run. 0 means unknown.
	MaxPods int

	// FirstInterfaceIndex: ENIs with a lower device index give no addresses. Nil
	// is not 0: it means the policy's default.
	FirstInterfaceIndex *int
	// Groups and GroupTags, SubnetIDs and SubnetTags are explicit choices for new
	// ENIs: what they name binds, and where they match nothing, nothing is made.
	Groups     []GroupID
	GroupTags  map[string]string
	SubnetIDs  []SubnetID
	SubnetTags map[string]string
	// ExcludeTags: ENIs that carry all of them give no addresses. Empty excludes
	// none.
	ExcludeTags map[string]string
	// UsePrimary: pods may have the primary addresses.
	UsePrimary bool
	// KeepOnTermination: new ENIs outlive the instance.
	KeepOnTermination bool

	// Attempt is how many ENIs made for the present set of attachments are known
	// to be gone: it keeps EC2 from answering with one of those again.
	Attempt int
	// IntentSince is when the present creation was first asked for, so that a
	// repetition is the same to the letter. Zero means now.
	IntentSince time.Time
	// TakenIndexes are device indexes that EC2 refused though no ENI is seen there.
	TakenIndexes []int
	// SuspendedUntil is until when nothing is done because EC2 said that the
	// instance is not running. Zero means not at all.
	SuspendedUntil time.Time
}

// Policy is how all nodes of a cluster are treated.
type Policy struct {
	// Cluster is the cluster's name, on every ENI that is made.
	Cluster string
	// FirstInterfaceIndex is for nodes that do not say.
	FirstInterfaceIndex int
	// Tags are put on every ENI that is made, beside our own.
	Tags map[string]string
}

// first is the lowest device index that gives addresses.
func (d Demand) first(p Policy) int {
	if d.FirstInterfaceIndex != nil {
		return *d.FirstInterfaceIndex
	}
	return p.FirstInterfaceIndex
}
