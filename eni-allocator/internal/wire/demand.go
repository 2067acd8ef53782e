// Package wire converts between the values of package plan and protobuf. It is
// conversion only: what to do with them does not belong here.
package wire

import (
	"net/netip"

	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"

	"github.com/eniplane/eniplane/eni-allocator/internal/plan"
)

// Demand converts what a node needs. Addresses that cannot be parsed are left
// out: they are on no ENI. Where there is no Node object, the CiliumNode's UID
// stands in for its UID.
func Demand(d *nodev1.NodeDemand) plan.Demand {
	w, e := d.GetWatermarks(), d.GetEni()
	out := plan.Demand{
		Node: d.GetNodeName(), NodeUID: d.GetNodeUid(), NodeSubnet: plan.SubnetID(d.GetNodeSubnetId()),
		PreAllocate: int(w.GetPreAllocate()), MinAllocate: int(w.GetMinAllocate()),
		MaxAllocate: int(w.GetMaxAllocate()), MaxAboveWatermark: int(w.GetMaxAboveWatermark()),
		PendingPods: int(d.GetPendingPods()), Urgent: int(d.GetWaiting()), MaxPods: int(d.GetMaxPods()),
		Groups: ids[plan.GroupID](e.GetSecurityGroups()), GroupTags: e.GetSecurityGroupTags(),
		SubnetIDs: ids[plan.SubnetID](e.GetSubnetIds()), SubnetTags: e.GetSubnetTags(),
		ExcludeTags: e.GetExcludeInterfaceTags(),
		UsePrimary:  e.GetUsePrimaryAddress(),
		// Absent means true.
		KeepOnTermination: e != nil && e.DeleteOnTermination != nil && !e.GetDeleteOnTermination(),
	}
	if out.NodeUID == "" {
		out.NodeUID = d.GetUid()
	}
	if e != nil && e.FirstInterfaceIndex != nil {
		first := int(e.GetFirstInterfaceIndex())
		out.FirstInterfaceIndex = &first
	}
	for _, u := range d.GetUsed() {
		a, err := netip.ParseAddr(u.GetAddress())
		if err != nil {
			continue
		}
		out.Used = append(out.Used, a)
		if o := u.GetOwner(); o == "router" || o == "health" {
			out.System++
		}
	}
	return out
}

func ids[T ~string](in []string) []T {
	var out []T
	for _, s := range in {
		out = append(out, T(s))
	}
	return out
}

func texts[T ~string](in []T) []string {
	var out []string
	for _, s := range in {
		out = append(out, string(s))
	}
	return out
}
