package ec2sim

import (
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
)

func TestExampleTopology(t *testing.T) {
	f, err := os.Open("topology.example.json")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	topology, err := ReadTopology(f)
	if err != nil {
		t.Fatal(err)
	}
	sim, err := New(Config{Topology: topology})
	if err != nil {
		t.Fatal(err)
	}
	if n := len(sim.State().Instances); n != 3 {
		t.Errorf("%d instances", n)
	}
	if err := sim.Check(); err != nil {
		t.Error(err)
	}
}

func TestReadTopologyRefuses(t *testing.T) {
	for _, text := range []string{"", "{", "[]", `{"vpc":[]}`, `{"vpcs":[{"cidrs":["ten"]}]}`, "{} {}"} {
		if _, err := ReadTopology(strings.NewReader(text)); err == nil {
			t.Errorf("%q was read", text)
		}
	}
}

func TestTopologyRefused(t *testing.T) {
	tests := []struct {
		name   string
		change func(*Topology)
		want   string // contained in the error
	}{
		{"region", func(t *Topology) { t.Region = "mars" }, "region"},
		{"account", func(t *Topology) { t.Account = "12" }, "twelve"},
		{"VPC without block", func(t *Topology) { t.VPCs[0].CIDRs = nil }, "cidrs"},
		{"VPC too large", func(t *Topology) { t.VPCs[0].CIDRs = prefixes("10.0.0.0/8") }, "10.0.0.0/8"},
		{"VPC block with host bits", func(t *Topology) { t.VPCs[0].CIDRs = prefixes("10.0.0.1/16") }, "10.0.0.1/16"},
		{"VPC with IPv6", func(t *Topology) { t.VPCs[0].CIDRs = prefixes("fd00::/24") }, "IPv4"},
		{"VPC blocks overlap", func(t *Topology) { t.VPCs[0].CIDRs = prefixes("10.0.0.0/16", "10.0.8.0/24") }, "overlaps"},
		{"VPC id twice", func(t *Topology) { t.VPCs[1].ID = vpcMain }, "twice"},
		{"VPC id malformed", func(t *Topology) { t.VPCs[1].ID = "vpc-x" }, "vpc-x"},
		{"subnet of no VPC", func(t *Topology) { t.Subnets[0].VPC = "none" }, "none"},
		{"subnet outside", func(t *Topology) { t.Subnets[0].CIDR = netip.MustParsePrefix("10.1.0.0/24") }, "inside"},
		{"subnet missing", func(t *Topology) { t.Subnets[0].CIDR = netip.Prefix{} }, "block"},
		{"subnets overlap", func(t *Topology) { t.Subnets[1].CIDR = netip.MustParsePrefix("10.0.0.0/28") }, "overlaps"},
		{"subnet in another region", func(t *Topology) { t.Subnets[0].Zone = "us-west-2a" }, "zone"},
		{"reserved tag", func(t *Topology) { t.Subnets[0].Tags = map[string]string{"aws:x": "y"} }, "reserved"},
		{"group name twice", func(t *Topology) {
			t.SecurityGroups = append(t.SecurityGroups, SecurityGroupSpec{Name: "nodes", VPC: vpcMain})
		}, "twice"},
		{"group without name", func(t *Topology) { t.SecurityGroups[0].Name = "" }, "name"},
		{"group id twice", func(t *Topology) { t.SecurityGroups[1].ID = groupMain }, "twice"},
		{"subnet in two tables", func(t *Topology) {
			t.RouteTables = append(t.RouteTables, RouteTableSpec{VPC: vpcMain, Subnets: []string{"a"}})
		}, "two tables"},
		{"two main tables", func(t *Topology) {
			t.RouteTables = []RouteTableSpec{{VPC: vpcMain, Main: true}, {VPC: vpcMain, Main: true}}
		}, "second main"},
		{"table with a foreign subnet", func(t *Topology) { t.RouteTables[0].VPC = vpcOther }, "another VPC"},
		{"instance type", func(t *Topology) { t.Instances[0].Type = "t3.giant" }, "t3.giant"},
		{"instance subnet", func(t *Topology) { t.Instances[0].Subnet = "z" }, "z"},
		{"instance group", func(t *Topology) { t.Instances[0].SecurityGroups = []string{"far"} }, "far"},
		{"instance id twice", func(t *Topology) { t.Instances[1].ID = medium }, "twice"},
		{"instance address taken", func(t *Topology) { t.Instances[1].PrivateIP = "10.0.0.4" }, "in use"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			topology := testTopology()
			tt.change(&topology)
			if _, err := New(Config{Topology: topology}); err == nil || !strings.Contains(fmt.Sprint(err), tt.want) {
				t.Errorf("got %v, want an error with %q", err, tt.want)
			}
		})
	}
}

func TestDefaults(t *testing.T) {
	sim, err := New(Config{Topology: Topology{VPCs: []VPCSpec{{Name: "v", CIDRs: prefixes("10.0.0.0/16")}}}})
	if err != nil {
		t.Fatal(err)
	}
	state := sim.State()
	if state.Region != "us-east-1" || state.Account != "123456789012" {
		t.Errorf("region %s, account %s", state.Region, state.Account)
	}
	if len(state.SecurityGroups) != 1 || state.SecurityGroups[0].Name != "default" || len(state.RouteTables) != 1 || !state.RouteTables[0].Main {
		t.Errorf("groups %v, tables %v", state.SecurityGroups, state.RouteTables)
	}
}
