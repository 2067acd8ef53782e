package account

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// machine drives an account with random operations, sensible and not.
type machine struct {
	acc *Account
	now time.Time
}

func newMachine(t *rapid.T) *machine {
	m := &machine{now: time.Unix(1_700_000_000, 0)}
	acc, err := New(Topology{
		VPCs: []VPCSpec{{ID: "vpc-00000001", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16"), netip.MustParsePrefix("10.1.0.0/16")}}},
		Subnets: []SubnetSpec{
			{ID: "subnet-0000000a", VPC: "vpc-00000001", CIDR: netip.MustParsePrefix("10.0.0.0/26"), Zone: "us-east-1a"},
			{ID: "subnet-0000000b", VPC: "vpc-00000001", CIDR: netip.MustParsePrefix("10.1.0.0/28"), Zone: "us-east-1a"},
			{ID: "subnet-0000000c", VPC: "vpc-00000001", CIDR: netip.MustParsePrefix("10.0.1.0/26"), Zone: "us-east-1b"},
		},
		Instances: []InstanceSpec{
			{Type: "t3.small", Subnet: "subnet-0000000a"},
			{Type: "t3.medium", Subnet: "subnet-0000000a"},
			{Type: "t3.micro", Subnet: "subnet-0000000c"},
		},
	}, 7, func() time.Time { return m.now })
	if err != nil {
		t.Fatal(err)
	}
	m.acc = acc
	return m
}

func (m *machine) eni(t *rapid.T) NetworkInterface {
	enis := m.acc.Snapshot().NetworkInterfaces
	if len(enis) == 0 || rapid.IntRange(0, 19).Draw(t, "unknown eni") == 0 {
		return NetworkInterface{ID: "eni-deadbeef"}
	}
	return rapid.SampledFrom(enis).Draw(t, "eni")
}

func (m *machine) instance(t *rapid.T) Instance {
	return rapid.SampledFrom(m.acc.Snapshot().Instances).Draw(t, "instance")
}

func drawSubnet(t *rapid.T) SubnetID {
	return rapid.SampledFrom([]SubnetID{"subnet-0000000a", "subnet-0000000a", "subnet-0000000b", "subnet-0000000c", "subnet-0000000f"}).Draw(t, "subnet")
}

func drawAddress(t *rapid.T) string {
	return fmt.Sprintf("10.%d.%d.%d", rapid.IntRange(0, 1).Draw(t, "2nd"), rapid.IntRange(0, 1).Draw(t, "3rd"), rapid.IntRange(0, 66).Draw(t, "4th"))
}

// step does one operation and returns what the account said.
func (m *machine) step(t *rapid.T) *Error {
	m.now = m.now.Add(rapid.SampledFrom([]time.Duration{0, time.Second, 30 * time.Minute}).Draw(t, "time passes"))
	dry := DryRun{rapid.IntRange(0, 9).Draw(t, "dry") == 0}
	switch rapid.IntRange(0, 11).Draw(t, "operation") {
	case 0, 1:
		_, err := m.acc.CreateNetworkInterface(CreateNetworkInterfaceRequest{
			DryRun: dry, SubnetID: drawSubnet(t), ClientToken: rapid.SampledFrom([]string{"", "", "a", "b"}).Draw(t, "token"),
			AddressSpec: AddressSpec{
				SecondaryCount: rapid.IntRange(-1, 6).Draw(t, "secondary"),
				PrefixCount:    rapid.SampledFrom([]int{0, 0, 0, 1, 2}).Draw(t, "prefixes"),
			},
		})
		return err
	case 2, 3:
		index := rapid.IntRange(-1, 4).Draw(t, "index")
		_, err := m.acc.AttachNetworkInterface(AttachNetworkInterfaceRequest{
			DryRun: dry, NetworkInterfaceID: m.eni(t).ID, InstanceID: m.instance(t).ID, DeviceIndex: &index,
			NetworkCardIndex: rapid.SampledFrom([]int{0, 0, 0, 1}).Draw(t, "card"),
		})
		return err
	case 4:
		req := DetachNetworkInterfaceRequest{DryRun: dry, AttachmentID: "eni-attach-deadbeef"}
		if a := m.eni(t).Attachment; a != nil {
			req.AttachmentID = a.ID
		}
		return m.acc.DetachNetworkInterface(req)
	case 5:
		return m.acc.DeleteNetworkInterface(DeleteNetworkInterfaceRequest{DryRun: dry, NetworkInterfaceID: m.eni(t).ID})
	case 6:
		return m.assign(t)
	case 7:
		return m.unassign(t)
	case 8:
		count := rapid.IntRange(0, 3).Draw(t, "count")
		one := 1
		_, err := m.acc.RunInstances(RunInstancesRequest{
			DryRun: dry, ImageID: "ami-1", InstanceType: rapid.SampledFrom([]string{"t3.micro", "p4d.24xlarge", "nope"}).Draw(t, "type"),
			MinCount: &one, MaxCount: &count, SubnetID: drawSubnet(t), ClientToken: rapid.SampledFrom([]string{"", "a"}).Draw(t, "token"),
		})
		return err
	case 9:
		if rapid.IntRange(0, 3).Draw(t, "really") > 0 {
			return nil
		}
		_, err := m.acc.TerminateInstances(TerminateInstancesRequest{DryRun: dry, InstanceIDs: []InstanceID{m.instance(t).ID, m.instance(t).ID}})
		return err
	case 10:
		eni, on := m.eni(t), rapid.Bool().Draw(t, "delete on termination")
		req := ModifyNetworkInterfaceAttributeRequest{DryRun: dry, NetworkInterfaceID: eni.ID}
		req.Attachment = &struct {
			AttachmentID        AttachmentID `query:"AttachmentId"`
			DeleteOnTermination *bool        `query:"DeleteOnTermination"`
		}{"eni-attach-deadbeef", &on}
		if eni.Attachment != nil {
			req.Attachment.AttachmentID = eni.Attachment.ID
		}
		return m.acc.ModifyNetworkInterfaceAttribute(req)
	default:
		return m.acc.CreateTags(CreateTagsRequest{
			DryRun: dry, Resources: []string{string(m.eni(t).ID), string(m.instance(t).ID)},
			Tags: []Tag{{Key: rapid.SampledFrom([]string{"", "a", "b", "aws:c"}).Draw(t, "key"), Value: "v"}},
		})
	}
}

func (m *machine) assign(t *rapid.T) *Error {
	req := AssignPrivateIPAddressesRequest{NetworkInterfaceID: m.eni(t).ID, AllowReassignment: rapid.Bool().Draw(t, "reassign")}
	n := rapid.IntRange(0, 5).Draw(t, "n")
	switch rapid.IntRange(0, 3).Draw(t, "way") {
	case 0:
		req.SecondaryCount = &n
	case 1:
		req.PrefixCount = &n
	case 2:
		req.Prefixes = []string{fmt.Sprintf("10.0.0.%d/28", 16*n)}
	default:
		for range n {
			req.Addresses = append(req.Addresses, drawAddress(t))
		}
	}
	_, err := m.acc.AssignPrivateIPAddresses(req)
	return err
}

func (m *machine) unassign(t *rapid.T) *Error {
	eni := m.eni(t)
	req := UnassignPrivateIPAddressesRequest{NetworkInterfaceID: eni.ID}
	if len(eni.Prefixes) > 0 && rapid.Bool().Draw(t, "a prefix") {
		req.Prefixes = []string{rapid.SampledFrom(eni.Prefixes).Draw(t, "prefix").String()}
	}
	if len(eni.Secondary) > 0 && rapid.Bool().Draw(t, "an address") {
		req.Addresses = append(req.Addresses, rapid.SampledFrom(eni.Secondary).Draw(t, "address").String())
	}
	if rapid.IntRange(0, 4).Draw(t, "nonsense") == 0 {
		req.Addresses = append(req.Addresses, drawAddress(t))
	}
	return m.acc.UnassignPrivateIPAddresses(req)
}

// TestRandomOperations checks after every operation that the account is
// consistent, and that a refused operation or a dry run left no trace.
func TestRandomOperations(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newMachine(t)
		for range rapid.IntRange(1, 60).Draw(t, "operations") {
			before := m.acc.Snapshot()
			err := m.step(t)
			if problem := m.acc.Check(); problem != nil {
				t.Fatalf("after %v: %v", err, problem)
			}
			after := m.acc.Snapshot()
			if err != nil {
				if err.Code == "" || err.Message == "" {
					t.Fatalf("refused without a reason: %#v", err)
				}
				if diff := cmp.Diff(before, after, snapshotOptions()...); diff != "" {
					t.Fatalf("refused with %v, but changed (-before +after):\n%s", err, diff)
				}
			}
		}
	})
}

// TestDeterministic checks that equal operations make equal accounts.
func TestDeterministic(t *testing.T) {
	run := func() Snapshot {
		a, err := New(Topology{
			VPCs:      []VPCSpec{{Name: "v", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16")}}},
			Subnets:   []SubnetSpec{{Name: "s", VPC: "v", CIDR: netip.MustParsePrefix("10.0.0.0/24"), Zone: "us-east-1a"}},
			Instances: []InstanceSpec{{Type: "m5.large", Subnet: "s"}},
		}, 42, func() time.Time { return time.Unix(0, 0) })
		if err != nil {
			t.Fatal(err)
		}
		if _, err := a.CreateNetworkInterface(CreateNetworkInterfaceRequest{SubnetID: "subnet-00000000"}); err == nil {
			t.Fatal("created in an unknown subnet")
		}
		if _, err := a.CreateNetworkInterface(CreateNetworkInterfaceRequest{SubnetID: a.Snapshot().Subnets[0].ID}); err != nil {
			t.Fatal(err)
		}
		return a.Snapshot()
	}
	if diff := cmp.Diff(run(), run(), snapshotOptions()...); diff != "" {
		t.Error(diff)
	}
}

func snapshotOptions() []cmp.Option {
	return []cmp.Option{
		cmp.AllowUnexported(Subnet{}),
		cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
		cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
	}
}
