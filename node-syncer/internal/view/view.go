// Package view turns what is stored of a node into what its agent and the
// allocator are shown, and snapshots into what is to be stored. It is
// conversion only: no decision about order or time belongs here.
package view

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	reasonv1 "github.com/eniplane/eniplane/gen/eniplane/reason/v1"

	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/internal/pooldigest"
	"github.com/eniplane/eniplane/node-syncer/ciliumnode"
	"github.com/eniplane/eniplane/node-syncer/internal/plan"
)

// Annotations of a CiliumNode that are ours.
const (
	// FenceAnnotation holds "<epoch>.<generation>" of the snapshot last written.
	FenceAnnotation = "eniplane.dev/fence"
	// RegisteredAnnotation is "true" on objects that RegisterNode made or took
	// over: only of these is status.ipam.used ours.
	RegisteredAnnotation = "eniplane.dev/registered"
	// MalformedAnnotation is never stored: in a cache, it marks an object that could
	// not be decoded, and says why. Of such an object only the metadata is known.
	MalformedAnnotation = "eniplane.dev/malformed"
)

// Fence returns the fence that an object carries; zero if it carries none, or
// one that cannot be read or that no snapshot has.
func Fence(n *ciliumnode.CiliumNode) plan.Fence {
	epoch, generation, ok := strings.Cut(n.Annotations[FenceAnnotation], ".")
	if !ok {
		return plan.Fence{}
	}
	e, err1 := strconv.ParseUint(epoch, 10, 64)
	g, err2 := strconv.ParseUint(generation, 10, 64)
	if err1 != nil || err2 != nil || e == 0 || g == 0 {
		return plan.Fence{}
	}
	return plan.Fence{Epoch: e, Generation: g}
}

// Registered reports whether an agent of ours registered the node: what it uses
// is ours to write then.
func Registered(n *ciliumnode.CiliumNode) bool {
	return n.Annotations[RegisteredAnnotation] == "true"
}

// Stored returns what plan.Sync needs to know of an object.
func Stored(n *ciliumnode.CiliumNode) plan.Node {
	out := plan.Node{
		Main:   plan.Main{Pool: make(map[string]string, len(n.Spec.IPAM.Pool)), Fence: Fence(n)},
		Status: plan.Status{ENIs: maps.Clone(n.Status.ENI.ENIs), Error: n.Status.IPAM.OperatorStatus.Error},
	}
	for id, eni := range out.Status.ENIs {
		eni.PublicIP = "" // Not ours: Edit keeps it.
		out.Status.ENIs[id] = eni
	}
	for address, a := range n.Spec.IPAM.Pool {
		out.Main.Pool[address] = a.Resource
	}
	return out
}

// Edit returns a copy of n as it is after w. What w does not own is kept, such
// as the owner of a pooled address, or the public address of an ENI.
func Edit(n *ciliumnode.CiliumNode, w plan.Write) *ciliumnode.CiliumNode {
	out := n.DeepCopy()
	switch w := w.(type) {
	case plan.MainWrite:
		pool := make(map[string]ciliumnode.Allocation, len(w.Main.Pool))
		for address, id := range w.Main.Pool {
			a := out.Spec.IPAM.Pool[address]
			a.Resource = id
			pool[address] = a
		}
		out.Spec.IPAM.Pool = pool
		if out.Annotations == nil {
			out.Annotations = make(map[string]string, 1)
		}
		out.Annotations[FenceAnnotation] = fmt.Sprintf("%d.%d", w.Main.Fence.Epoch, w.Main.Fence.Generation)
	case plan.StatusWrite:
		enis := make(map[string]ciliumnode.ENI, len(w.Status.ENIs))
		for id, eni := range w.Status.ENIs {
			eni.PublicIP = out.Status.ENI.ENIs[id].PublicIP
			enis[id] = eni
		}
		out.Status.ENI.ENIs = enis
		out.Status.IPAM.OperatorStatus.Error = w.Status.Error
	}
	return out
}

// Wanted returns what a snapshot wants to be stored.
func Wanted(s *nodev1.PoolSnapshot) plan.Node {
	out := plan.Node{
		Main: plan.Main{
			Pool:  make(map[string]string, len(s.GetPool())),
			Fence: plan.Fence{Epoch: s.GetFence().GetEpoch(), Generation: s.GetFence().GetGeneration()},
		},
		Status: plan.Status{ENIs: make(map[string]ciliumnode.ENI, len(s.GetEnis())), Error: errorText(s.GetConditions())},
	}
	for _, p := range s.GetPool() {
		out.Main.Pool[p.GetAddress()] = p.GetEniId()
	}
	for _, e := range s.GetEnis() {
		out.Status.ENIs[e.GetId()] = ciliumnode.ENI{
			ID: e.GetId(), IP: e.GetIp(), MAC: e.GetMac(), AvailabilityZone: e.GetAvailabilityZone(),
			Description: e.GetDescription(), Number: int(e.GetDeviceIndex()),
			Subnet:    ciliumnode.Subnet{ID: e.GetSubnet().GetId(), CIDR: e.GetSubnet().GetCidr()},
			VPC:       ciliumnode.VPC{ID: e.GetVpc().GetId(), PrimaryCIDR: e.GetVpc().GetPrimaryCidr(), CIDRs: e.GetVpc().GetCidrs()},
			Addresses: e.GetAddresses(), Prefixes: e.GetPrefixes(), SecurityGroups: e.GetSecurityGroups(), Tags: e.GetTags(),
		}
	}
	return out
}

func wireENI(e ciliumnode.ENI) *nodev1.Eni {
	return &nodev1.Eni{
		Id: e.ID, Ip: e.IP, Mac: e.MAC, AvailabilityZone: e.AvailabilityZone, Description: e.Description,
		DeviceIndex:    uint32(min(max(e.Number, 0), math.MaxUint32)), //nolint:gosec // Bounded in this line.
		Subnet:         &nodev1.Subnet{Id: e.Subnet.ID, Cidr: e.Subnet.CIDR},
		Vpc:            &nodev1.Vpc{Id: e.VPC.ID, PrimaryCidr: e.VPC.PrimaryCIDR, Cidrs: e.VPC.CIDRs},
		Addresses:      e.Addresses,
		Prefixes:       e.Prefixes,
		SecurityGroups: e.SecurityGroups,
		Tags:           e.Tags,
	}
}

func wireFence(f plan.Fence) *nodev1.Fence {
	if f == (plan.Fence{}) {
		return nil
	}
	return &nodev1.Fence{Epoch: f.Epoch, Generation: f.Generation}
}

// Agent returns what the agent of a node is shown: only what is consistent.
// Of an object that somebody broke, the pool's addresses whose ENI does not
// list them, and ENIs without CIDRs, are left out, and a condition says so.
func Agent(n *ciliumnode.CiliumNode) *nodev1.NodeView {
	out := &nodev1.NodeView{
		NodeName: n.Name, Uid: string(n.UID), InstanceId: InstanceID(n), Revision: n.ResourceVersion,
		Fence: wireFence(Fence(n)), Conditions: conditions(n),
	}
	shown := make(map[string]map[string]bool, len(n.Status.ENI.ENIs)) // ENI → its addresses
	for _, id := range slices.Sorted(maps.Keys(n.Status.ENI.ENIs)) {
		eni := n.Status.ENI.ENIs[id]
		if eni.ID == id && isCIDR(eni.Subnet.CIDR) && isCIDR(eni.VPC.PrimaryCIDR) {
			listed := make(map[string]bool, len(eni.Addresses))
			for _, a := range eni.Addresses {
				listed[a] = true
			}
			shown[id] = listed
			out.Enis = append(out.Enis, wireENI(eni))
		}
	}
	for address, a := range n.Spec.IPAM.Pool {
		if ip, err := netip.ParseAddr(address); err == nil && ip.Is4() && shown[a.Resource][address] {
			out.Pool = append(out.Pool, &nodev1.PoolAddress{Address: address, EniId: a.Resource})
		}
	}
	slices.SortFunc(out.Pool, func(a, b *nodev1.PoolAddress) int {
		return netip.MustParseAddr(a.GetAddress()).Compare(netip.MustParseAddr(b.GetAddress()))
	})
	return out
}

func isCIDR(s string) bool {
	_, err := netip.ParsePrefix(s)
	return err == nil
}

func conditions(n *ciliumnode.CiliumNode) []*nodev1.Condition {
	out := conditionsOf(n.Status.IPAM.OperatorStatus.Error)
	if why := n.Annotations[MalformedAnnotation]; why != "" {
		out = append(out, &nodev1.Condition{Reason: reasonv1.Reason_REASON_OBJECT_MALFORMED, Message: why})
	}
	if found := ciliumnode.Violations(n); len(found) > 0 {
		out = append(out, &nodev1.Condition{
			Reason:  reasonv1.Reason_REASON_OBJECT_MALFORMED,
			Message: fmt.Sprintf("%d inconsistencies in the stored object, first: %s", len(found), found[0]),
		})
	}
	return out
}

// Surroundings is what is known of a node beside its CiliumNode.
type Surroundings struct {
	// NodeUID is the UID of the Kubernetes Node; empty if there is none.
	NodeUID string
	// MaxPods is how many pods it can run; 0 means unknown.
	MaxPods uint32
	// PendingPods are its pods that wait for an address.
	PendingPods uint32
	// Waiting are requests for an address that its agent reported.
	Waiting uint32
	// Used is what its agent reported and is not stored yet; nil means: as stored.
	Used map[string]ciliumnode.Allocation
}

// Demand returns what the allocator is shown of a node.
func Demand(n *ciliumnode.CiliumNode, around Surroundings) *nodev1.NodeDemand {
	stored := Stored(n)
	enis := make([]*nodev1.Eni, 0, len(stored.Status.ENIs))
	for _, e := range stored.Status.ENIs {
		enis = append(enis, wireENI(e))
	}
	pool := make([]*nodev1.PoolAddress, 0, len(stored.Main.Pool))
	for address, id := range stored.Main.Pool {
		pool = append(pool, &nodev1.PoolAddress{Address: address, EniId: id})
	}
	used := around.Used
	if used == nil {
		used = n.Status.IPAM.Used
	}
	eni, ipam := n.Spec.ENI, n.Spec.IPAM
	out := &nodev1.NodeDemand{
		NodeName: n.Name, NodeUid: around.NodeUID, Uid: string(n.UID),
		InstanceId:   InstanceID(n),
		InstanceType: eni.InstanceType, AvailabilityZone: eni.AvailabilityZone, VpcId: eni.VPCID, NodeSubnetId: eni.NodeSubnetID,
		Eni: &nodev1.EniSpec{
			FirstInterfaceIndex: optional(eni.FirstInterfaceIndex),
			SecurityGroups:      eni.SecurityGroups, SecurityGroupTags: eni.SecurityGroupTags,
			SubnetIds: eni.SubnetIDs, SubnetTags: eni.SubnetTags, ExcludeInterfaceTags: eni.ExcludeInterfaceTags,
			DeleteOnTermination: eni.DeleteOnTermination, UsePrimaryAddress: eni.UsePrimaryAddress,
			DisablePrefixDelegation: eni.DisablePrefixDelegation, StaticIpTags: ipam.StaticIPTags,
		},
		Watermarks: &nodev1.Watermarks{
			PreAllocate:       watermark(ipam.PreAllocate, eni.PreAllocate),
			MinAllocate:       watermark(ipam.MinAllocate, eni.MinAllocate),
			MaxAllocate:       watermark(ipam.MaxAllocate, 0),
			MaxAboveWatermark: watermark(ipam.MaxAboveWatermark, eni.MaxAboveWatermark),
		},
		PendingPods: around.PendingPods, Waiting: around.Waiting, MaxPods: around.MaxPods,
		Stored:     &nodev1.StoredState{Fence: wireFence(stored.Main.Fence), Digest: pooldigest.Of(enis, pool)},
		Revision:   n.ResourceVersion,
		Registered: Registered(n),
		Conditions: conditions(n),
	}
	for _, address := range slices.Sorted(maps.Keys(used)) {
		if ip, err := netip.ParseAddr(address); err == nil && ip.Is4() {
			out.Used = append(out.Used, &nodev1.UsedAddress{Address: address, Owner: used[address].Owner, EniId: used[address].Resource})
		}
	}
	return out
}

// InstanceID returns the instance that an object is of, by the field or its
// obsolete twin; empty if it names none.
func InstanceID(n *ciliumnode.CiliumNode) string {
	return cmp.Or(n.Spec.InstanceID, n.Spec.ENI.InstanceID)
}

// watermark gives the value that wins over its obsolete twin; nil if neither is
// said. The CRD has no room for "0 is said".
func watermark(value, twin int) *uint32 {
	if value <= 0 {
		value = twin
	}
	if value <= 0 {
		return nil
	}
	v := uint32(min(value, 1<<16)) //nolint:gosec // Bounded in this line.
	return &v
}

func optional(v *int) *uint32 {
	if v == nil || *v < 0 {
		return nil
	}
	u := uint32(min(*v, 255)) //nolint:gosec // Bounded in this line.
	return &u
}
