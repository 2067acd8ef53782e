package account

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"
)

// TestCheckFindsContradictions breaks an account by hand, in one way at a time.
func TestCheckFindsContradictions(t *testing.T) {
	edit := func(s *state, id ENIID, f func(*NetworkInterface)) {
		row, _ := s.enis.get(id)
		f(&row)
		s.enis.put(id, row)
	}
	tests := []struct {
		name   string
		damage func(s *state, attached, free NetworkInterface)
		want   string
	}{
		{"address on two interfaces", func(s *state, attached, free NetworkInterface) {
			edit(s, free.ID, func(n *NetworkInterface) { n.Secondary = append(n.Secondary, attached.Primary) })
		}, "is on"},
		{"address outside", func(s *state, _, free NetworkInterface) {
			edit(s, free.ID, func(n *NetworkInterface) { n.Primary = netip.MustParseAddr("10.9.9.9") })
		}, "can not be used"},
		{"address not entered", func(s *state, _, free NetworkInterface) { delete(s.used[free.Subnet], free.Primary) }, "is entered for"},
		{"free count", func(s *state, _, free NetworkInterface) { s.addFree(free.Subnet, 1) }, "free, want"},
		{"no subnet", func(s *state, _, free NetworkInterface) {
			edit(s, free.ID, func(n *NetworkInterface) { n.Subnet = "subnet-12345678" })
		}, "no subnet"},
		{"status", func(s *state, _, free NetworkInterface) {
			edit(s, free.ID, func(n *NetworkInterface) { n.Status = StatusInUse })
		}, "does not fit"},
		{"too many slots", func(s *state, attached, _ NetworkInterface) {
			more, _ := s.takeAny(attached.Subnet, 6, attached.ID)
			edit(s, attached.ID, func(n *NetworkInterface) { n.Secondary = more })
		}, "Address count 7"},
		{"instance forgot it", func(s *state, attached, _ NetworkInterface) {
			row, _ := s.instances.get(attached.Attachment.Instance)
			row.Interfaces = nil
			s.instances.put(row.ID, row)
		}, "does not know it"},
		{"interface forgot it", func(s *state, attached, _ NetworkInterface) {
			edit(s, attached.ID, func(n *NetworkInterface) { n.Attachment, n.Status = nil, StatusAvailable })
		}, "is not attached to it"},
		{"attachment not entered", func(s *state, attached, _ NetworkInterface) { s.attachments.del(attached.Attachment.ID) }, "attachments entered"},
		{"index used twice", func(s *state, attached, free NetworkInterface) {
			edit(s, free.ID, func(n *NetworkInterface) { n.Attachment, n.Status = attached.Attachment, StatusInUse })
			row, _ := s.instances.get(attached.Attachment.Instance)
			row.Interfaces = append(row.Interfaces, free.ID)
			s.instances.put(row.ID, row)
		}, "is used twice"},
		{"other zone", func(s *state, attached, _ NetworkInterface) {
			edit(s, attached.ID, func(n *NetworkInterface) { n.Zone = "us-east-1z" })
		}, "in zone"},
		{"primary address", func(s *state, attached, _ NetworkInterface) {
			row, _ := s.instances.get(attached.Attachment.Instance)
			row.Address = netip.MustParseAddr("10.0.0.77")
			s.instances.put(row.ID, row)
		}, "primary interface has"},
		{"terminated with interfaces", func(s *state, attached, _ NetworkInterface) {
			row, _ := s.instances.get(attached.Attachment.Instance)
			row.State = StateTerminated
			s.instances.put(row.ID, row)
		}, "terminated with interfaces"},
		{"wrong key", func(s *state, _, free NetworkInterface) {
			edit(s, free.ID, func(n *NetworkInterface) { n.ID = "eni-12345678" })
		}, "is entered as"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			a, err := New(Topology{
				VPCs:      []VPCSpec{{Name: "v", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16")}}},
				Subnets:   []SubnetSpec{{ID: "subnet-00000001", VPC: "v", CIDR: netip.MustParsePrefix("10.0.0.0/24"), Zone: "us-east-1a"}},
				Instances: []InstanceSpec{{Type: "t3.medium", Subnet: "subnet-00000001"}},
			}, 1, time.Now)
			if err != nil {
				t.Fatal(err)
			}
			attached := a.Snapshot().NetworkInterfaces[0]
			made, refusal := a.CreateNetworkInterface(CreateNetworkInterfaceRequest{SubnetID: "subnet-00000001"})
			if refusal != nil {
				t.Fatal(refusal)
			}
			if err := a.Check(); err != nil {
				t.Fatal(err)
			}
			tt.damage(&a.state, attached, made.NetworkInterface)
			if err := a.Check(); err == nil || !strings.Contains(fmt.Sprint(err), tt.want) {
				t.Errorf("got %v, want a complaint with %q", err, tt.want)
			}
		})
	}
}
