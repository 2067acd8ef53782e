package wire_test

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	eniv1 "github.com/eniplane/eniplane/gen/eniplane/eni/v1"
	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	reasonv1 "github.com/eniplane/eniplane/gen/eniplane/reason/v1"
	"github.com/eniplane/eniplane/internal/reason"

	"github.com/eniplane/eniplane/eni-allocator/internal/plan"
	"github.com/eniplane/eniplane/eni-allocator/internal/wire"
)

func TestDemand(t *testing.T) {
	in := &nodev1.NodeDemand{
		NodeName: "n", NodeUid: "node", Uid: "object", NodeSubnetId: "subnet-1",
		Watermarks:  &nodev1.Watermarks{PreAllocate: proto.Uint32(1), MinAllocate: proto.Uint32(2), MaxAllocate: proto.Uint32(3), MaxAboveWatermark: proto.Uint32(4)},
		PendingPods: 5, Waiting: 6, MaxPods: 7,
		Eni: &nodev1.EniSpec{
			FirstInterfaceIndex: proto.Uint32(0), SecurityGroups: []string{"sg-1"}, SubnetIds: []string{"subnet-2"},
			DeleteOnTermination: proto.Bool(false), UsePrimaryAddress: proto.Bool(true),
			ExcludeInterfaceTags: map[string]string{"a": "b"},
		},
		Used: []*nodev1.UsedAddress{{Address: "10.0.0.1", Owner: "router"}, {Address: "nonsense", Owner: "router"}, {Address: "10.0.0.2", Owner: "default/p"}},
	}
	d := wire.Demand(in)
	if d.NodeUID != "node" || d.NodeSubnet != "subnet-1" || d.PreAllocate != 1 || d.MinAllocate != 2 || d.MaxAllocate != 3 || d.MaxAboveWatermark != 4 {
		t.Errorf("%+v", d)
	}
	if d.PendingPods != 5 || d.Urgent != 6 || d.MaxPods != 7 || d.System != 1 || len(d.Used) != 2 {
		t.Errorf("%+v", d)
	}
	if d.FirstInterfaceIndex == nil || *d.FirstInterfaceIndex != 0 || !d.KeepOnTermination || !d.UsePrimary || d.Groups[0] != "sg-1" || d.SubnetIDs[0] != "subnet-2" {
		t.Errorf("%+v", d)
	}
}

// What is absent is not what is zero (B13, F84).
func TestDemandOfNothing(t *testing.T) {
	for _, in := range []*nodev1.NodeDemand{{Uid: "object"}, {Uid: "object", Eni: &nodev1.EniSpec{}}} {
		d := wire.Demand(in)
		if d.FirstInterfaceIndex != nil || d.KeepOnTermination || d.UsePrimary || d.NodeUID != "object" {
			t.Errorf("%+v", d)
		}
	}
}

var (
	subnets = []plan.Subnet{{ID: "subnet-1", VPC: "vpc-1", CIDR: netip.MustParsePrefix("10.0.0.0/24")}, {ID: "subnet-2", VPC: "vpc-1"}}
	vpcs    = []plan.VPC{{ID: "vpc-1", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16"), netip.MustParsePrefix("10.9.0.0/16")}}}
)

func eni(id plan.ENIID, index int, addresses ...string) plan.ENI {
	e := plan.ENI{
		ID: id, MAC: "02:00:00:00:00:0A", Subnet: "subnet-1", VPC: "vpc-1", Zone: "a", Instance: "i-1", Index: index,
		Primary: netip.AddrFrom4([4]byte{10, 0, 0, byte(100 + index)}), Groups: []plan.GroupID{"sg-2", "sg-1"},
	}
	for _, a := range addresses {
		e.Addresses = append(e.Addresses, netip.MustParseAddr(a))
	}
	return e
}

func poolOf(d plan.Demand, enis ...plan.ENI) wire.Pool {
	return wire.PoolOf(plan.Reading{Instance: plan.Instance{ID: "i-1", VPC: "vpc-1"}, ENIs: enis, Subnets: subnets}, vpcs, d, plan.Policy{FirstInterfaceIndex: 0})
}

func texts(p wire.Pool) []string {
	var out []string
	for _, a := range p.Addresses {
		out = append(out, a.GetAddress())
	}
	return out
}

func TestPool(t *testing.T) {
	b := eni("eni-b", 1, "10.0.0.20", "10.0.0.3")
	a := eni("eni-a", 0, "10.0.0.4")
	p := poolOf(plan.Demand{}, b, a)
	if got := texts(p); !slices.Equal(got, []string{"10.0.0.3", "10.0.0.4", "10.0.0.20"}) {
		t.Errorf("pool %v", got)
	}
	if len(p.ENIs) != 2 || p.ENIs[0].GetId() != "eni-a" || p.ENIs[1].GetDeviceIndex() != 1 {
		t.Fatalf("ENIs %v", p.ENIs)
	}
	want := &nodev1.Eni{
		Id: "eni-a", Ip: "10.0.0.100", Mac: "02:00:00:00:00:0a", AvailabilityZone: "a", Addresses: []string{"10.0.0.4"},
		Subnet: &nodev1.Subnet{Id: "subnet-1", Cidr: "10.0.0.0/24"}, Vpc: &nodev1.Vpc{Id: "vpc-1", PrimaryCidr: "10.0.0.0/16", Cidrs: []string{"10.9.0.0/16"}},
		SecurityGroups: []string{"sg-1", "sg-2"},
	}
	if !proto.Equal(p.ENIs[0], want) {
		t.Errorf("got %v, want %v", p.ENIs[0], want)
	}
}

func TestPoolLeavesOut(t *testing.T) {
	one := 1
	for _, tt := range []struct {
		name      string
		demand    plan.Demand
		edit      func(*plan.ENI)
		enis      int
		pool      []string
		withheld  int
		malformed int
	}{
		{"nothing", plan.Demand{}, func(*plan.ENI) {}, 1, []string{"10.0.0.4"}, 0, 0},
		{"the primary address, unless it is asked for", plan.Demand{UsePrimary: true}, func(*plan.ENI) {}, 1, []string{"10.0.0.4", "10.0.0.100"}, 0, 0},
		{"addresses of an excluded ENI, not the ENI", plan.Demand{FirstInterfaceIndex: &one}, func(*plan.ENI) {}, 1, nil, 0, 0},
		{"but not those in use", plan.Demand{FirstInterfaceIndex: &one, Used: []netip.Addr{netip.MustParseAddr("10.0.0.4")}}, func(*plan.ENI) {}, 1, []string{"10.0.0.4"}, 0, 0},
		{"B62 subnet CIDR unknown", plan.Demand{}, func(e *plan.ENI) { e.Subnet = "subnet-2" }, 0, nil, 1, 0},
		{"subnet unknown", plan.Demand{}, func(e *plan.ENI) { e.Subnet = "subnet-3" }, 0, nil, 1, 0},
		{"VPC unknown", plan.Demand{}, func(e *plan.ENI) { e.VPC = "vpc-2" }, 0, nil, 1, 0},
		{"malformed", plan.Demand{}, func(e *plan.ENI) { e.Malformed = "no MAC" }, 0, nil, 0, 1},
		{"B29 attached to nothing", plan.Demand{}, func(e *plan.ENI) { e.Instance = "" }, 0, nil, 0, 0},
		{"of another instance", plan.Demand{}, func(e *plan.ENI) { e.Instance = "i-2" }, 0, nil, 0, 0},
		{"B95 another network card", plan.Demand{}, func(e *plan.ENI) { e.Card = 1 }, 0, nil, 0, 0},
		{"outside the subnet", plan.Demand{}, func(e *plan.ENI) { e.Addresses = append(e.Addresses, netip.MustParseAddr("10.0.1.4")) }, 1, []string{"10.0.0.4"}, 0, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := eni("eni-a", 0, "10.0.0.4")
			tt.edit(&e)
			p := poolOf(tt.demand, e)
			if len(p.ENIs) != tt.enis || !slices.Equal(texts(p), tt.pool) || len(p.Withheld) != tt.withheld || len(p.Malformed) != tt.malformed {
				t.Errorf("%d ENIs, pool %v, %d withheld, %d malformed", len(p.ENIs), texts(p), len(p.Withheld), len(p.Malformed))
			}
		})
	}
}

func TestAddressOfTwoENIsIsNotPublished(t *testing.T) {
	p := poolOf(plan.Demand{}, eni("eni-a", 0, "10.0.0.4", "10.0.0.5"), eni("eni-b", 1, "10.0.0.4"))
	if got := texts(p); !slices.Equal(got, []string{"10.0.0.5"}) {
		t.Errorf("pool %v", got)
	}
	for _, e := range p.ENIs {
		if slices.Contains(e.GetAddresses(), "10.0.0.4") {
			t.Errorf("%s lists it", e.GetId())
		}
	}
}

func TestPrefixesAreExpanded(t *testing.T) {
	e := eni("eni-a", 0)
	e.Prefixes = []netip.Prefix{netip.MustParsePrefix("10.0.0.16/28"), netip.MustParsePrefix("10.0.1.0/28")}
	p := poolOf(plan.Demand{}, e)
	if len(p.Addresses) != 16 || !slices.Equal(p.ENIs[0].GetPrefixes(), []string{"10.0.0.16/28"}) {
		t.Errorf("pool %v, prefixes %v", texts(p), p.ENIs[0].GetPrefixes())
	}
}

func TestActions(t *testing.T) {
	why := plan.Why{Grounds: "because", Rejected: []plan.Rejected{{Option: "eni-9", Reason: reason.OutOfENIs, Message: "full"}}}
	got := wire.Actions([]plan.Action{
		plan.AssignAddresses{Why: why, ENI: "eni-1", Subnet: "subnet-1", Count: 3},
		plan.CreateENI{Why: why, Subnet: "subnet-1", Count: 4},
		plan.AttachENI{Why: why, ENI: "eni-2", Index: 5},
		plan.SetDeleteOnTermination{Why: why, ENI: "eni-3"},
		plan.DeleteENI{Why: why, ENI: "eni-4"},
	})
	rejected := []*eniv1.RejectedOption{{Option: "eni-9", Reason: reasonv1.Reason_REASON_OUT_OF_ENIS, Message: "full"}}
	want := []*eniv1.PlannedAction{
		{Kind: eniv1.ActionKind_ACTION_KIND_ASSIGN_ADDRESSES, EniId: "eni-1", SubnetId: "subnet-1", Count: 3},
		{Kind: eniv1.ActionKind_ACTION_KIND_CREATE, SubnetId: "subnet-1", Count: 4},
		{Kind: eniv1.ActionKind_ACTION_KIND_ATTACH, EniId: "eni-2", DeviceIndex: 5},
		{Kind: eniv1.ActionKind_ACTION_KIND_SET_DELETE_ON_TERMINATION, EniId: "eni-3"},
		{Kind: eniv1.ActionKind_ACTION_KIND_DELETE, EniId: "eni-4"},
	}
	for i := range want {
		want[i].Grounds, want[i].Rejected = "because", rejected
		if !proto.Equal(got[i], want[i]) {
			t.Errorf("%d: got %v, want %v", i, got[i], want[i])
		}
	}
}

func TestSubnet(t *testing.T) {
	until := time.Unix(1000, 0)
	s := wire.Subnet(plan.Subnet{ID: "subnet-1", VPC: "vpc-1", Zone: "a", CIDR: netip.MustParsePrefix("10.0.0.0/24"), Free: -1, Reserved: 2, SkippedUntil: until})
	if s.GetFree() != 0 || s.GetReserved() != 2 || s.GetCidr() != "10.0.0.0/24" || !s.GetSkippedUntil().AsTime().Equal(until) || s.FreePrefixes != nil || s.GetExhaustedAt() != nil {
		t.Errorf("%v", s)
	}
	if s := wire.Subnet(plan.Subnet{ID: "subnet-2"}); s.GetSkippedUntil() != nil || s.GetCidr() != "" {
		t.Errorf("%v", s)
	}
}
