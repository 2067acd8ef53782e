package imds

import (
	"context"
	"net/http/httptest"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/eniplane/eniplane/deploy/local/ec2sim"
)

func TestReadFromTheSimulatedService(t *testing.T) {
	sim, err := ec2sim.New(ec2sim.Config{Topology: ec2sim.Topology{
		VPCs: []ec2sim.VPCSpec{{ID: "vpc-00000001", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16")}}},
		Subnets: []ec2sim.SubnetSpec{
			{ID: "subnet-00000001", VPC: "vpc-00000001", CIDR: netip.MustParsePrefix("10.0.1.0/24"), Zone: "us-east-1a"},
		},
		Instances: []ec2sim.InstanceSpec{{ID: "i-00000001", Type: "t3.medium", Subnet: "subnet-00000001"}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(sim.IMDS("i-00000001"))
	defer server.Close()
	for name, use := range map[string]func(t *testing.T) *Client{
		"by parameter":   func(*testing.T) *Client { return New(server.URL + "/") },
		"by environment": func(t *testing.T) *Client { t.Setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", server.URL); return New("") },
	} {
		t.Run(name, func(t *testing.T) {
			got, err := use(t).Read(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			want := Instance{ID: "i-00000001", Type: "t3.medium", Zone: "us-east-1a", VPCID: "vpc-00000001", SubnetID: "subnet-00000001", PrivateIP: got.PrivateIP, MAC: got.MAC, MACs: []string{got.MAC}}
			if diff := cmp.Diff(want, got, cmpopts.EquateComparable(netip.Addr{})); diff != "" {
				t.Error(diff)
			}
			if !netip.MustParsePrefix("10.0.1.0/24").Contains(got.PrivateIP) || len(got.MAC) != 17 {
				t.Errorf("got %+v", got)
			}
		})
	}
}

func TestReadWithoutAService(t *testing.T) {
	server := httptest.NewServer(nil)
	server.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if i, err := New(server.URL).Read(ctx); err == nil {
		t.Errorf("read %+v", i)
	}
}
