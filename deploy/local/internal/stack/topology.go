package stack

import (
	"encoding/json"
	"net/netip"
	"os"

	"github.com/eniplane/eniplane/deploy/local/ec2sim"
)

// Region is the simulated region.
const Region = "us-east-1"

// zones are the zones of the simulated account, each with one subnet.
var zones = []string{Region + "a", Region + "b"}

// subnetOf returns the name of a zone's subnet, or "" for an unknown zone.
func subnetOf(zone string) string {
	for _, z := range zones {
		if z == zone {
			return "nodes-" + zone[len(zone)-1:]
		}
	}
	return ""
}

// topology is the simulated account: one VPC with a subnet per zone, and the
// instances of the nodes.
func topology(nodes []Node) ec2sim.Topology {
	t := ec2sim.Topology{
		Region:         Region,
		VPCs:           []ec2sim.VPCSpec{{Name: "main", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16")}}},
		SecurityGroups: []ec2sim.SecurityGroupSpec{{Name: "nodes", VPC: "main", Description: "eniplane nodes"}},
	}
	for i, zone := range zones {
		t.Subnets = append(t.Subnets, ec2sim.SubnetSpec{
			Name: subnetOf(zone), VPC: "main", Zone: zone,
			CIDR: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, byte(16 * i), 0}), 20),
		})
	}
	for _, n := range nodes {
		t.Instances = append(t.Instances, ec2sim.InstanceSpec{
			ID: n.Instance, Name: n.Name, Type: n.Type, Subnet: subnetOf(n.Zone), SecurityGroups: []string{"nodes"},
		})
	}
	return t
}

func writeTopology(path string, nodes []Node) error {
	text, err := json.MarshalIndent(topology(nodes), "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(text, '\n'), 0o644)
}
