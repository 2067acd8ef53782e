package sdktest

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"testing"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/ec2"
	"github.com/aws/aws-sdk-go-v2/service/ec2/types"
	"github.com/aws/smithy-go"
	"go.uber.org/goleak"

	"github.com/eniplane/eniplane/deploy/local/ec2sim"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	subnetID   = "subnet-0000000a"
	instanceID = "i-00000001"
	groupID    = "sg-00000001"
)

func start(t *testing.T) (*ec2.Client, *ec2sim.Server) {
	t.Helper()
	sim, err := ec2sim.Start(ec2sim.Config{Topology: ec2sim.Topology{
		VPCs:           []ec2sim.VPCSpec{{ID: "vpc-00000001", Name: "v", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16"), netip.MustParsePrefix("100.64.0.0/16")}}},
		Subnets:        []ec2sim.SubnetSpec{{ID: subnetID, Name: "s", VPC: "v", CIDR: netip.MustParsePrefix("10.0.0.0/24"), Zone: "us-east-1a"}},
		SecurityGroups: []ec2sim.SecurityGroupSpec{{ID: groupID, Name: "nodes", VPC: "v"}},
		RouteTables:    []ec2sim.RouteTableSpec{{ID: "rtb-00000001", VPC: "v", Subnets: []string{"s"}}},
		Instances:      []ec2sim.InstanceSpec{{ID: instanceID, Name: "n", Type: "t3.medium", Subnet: "s", SecurityGroups: []string{"nodes"}}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := sim.Check(); err != nil {
			t.Error(err)
		}
		sim.Close()
	})
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	client := ec2.New(ec2.Options{
		Region: "us-east-1", BaseEndpoint: aws.String(sim.URL()), Credentials: credentials.NewStaticCredentialsProvider("AKIDEXAMPLE", "x", ""),
		HTTPClient: &http.Client{Transport: transport}, RetryMaxAttempts: 1,
	})
	return client, sim
}

// TestNodeLife goes the way of the allocator: look around, make an interface,
// attach it, add addresses, take them away, remove it, and the node ends.
func TestNodeLife(t *testing.T) {
	client, sim := start(t)
	ctx := t.Context()
	lookAround(ctx, t, client)

	created := must(client.CreateNetworkInterface(ctx, &ec2.CreateNetworkInterfaceInput{
		SubnetId: aws.String(subnetID), Groups: []string{groupID}, Description: aws.String("eniplane"), SecondaryPrivateIpAddressCount: aws.Int32(3),
		ClientToken: aws.String("token"),
		TagSpecifications: []types.TagSpecification{{
			ResourceType: types.ResourceTypeNetworkInterface, Tags: []types.Tag{{Key: aws.String("cluster"), Value: aws.String("c & <d>")}},
		}},
	}))(t).NetworkInterface
	id := created.NetworkInterfaceId
	if len(created.PrivateIpAddresses) != 4 || !aws.ToBool(created.PrivateIpAddresses[0].Primary) || created.Status != types.NetworkInterfaceStatusAvailable ||
		aws.ToString(created.Groups[0].GroupId) != groupID || aws.ToString(created.TagSet[0].Value) != "c & <d>" || aws.ToString(created.SubnetId) != subnetID {
		t.Errorf("created %+v", created)
	}
	attached := must(client.AttachNetworkInterface(ctx, &ec2.AttachNetworkInterfaceInput{
		NetworkInterfaceId: id, InstanceId: aws.String(instanceID), DeviceIndex: aws.Int32(1), NetworkCardIndex: aws.Int32(0),
	}))(t)
	must(client.ModifyNetworkInterfaceAttribute(ctx, &ec2.ModifyNetworkInterfaceAttributeInput{
		NetworkInterfaceId: id, Attachment: &types.NetworkInterfaceAttachmentChanges{AttachmentId: attached.AttachmentId, DeleteOnTermination: aws.Bool(true)},
	}))(t)
	assigned := must(client.AssignPrivateIpAddresses(ctx, &ec2.AssignPrivateIpAddressesInput{NetworkInterfaceId: id, SecondaryPrivateIpAddressCount: aws.Int32(1)}))(t)
	must(client.AssignPrivateIpAddresses(ctx, &ec2.AssignPrivateIpAddressesInput{NetworkInterfaceId: id, Ipv4PrefixCount: aws.Int32(1)}))(t)
	must(client.CreateTags(ctx, &ec2.CreateTagsInput{Resources: []string{*id}, Tags: []types.Tag{{Key: aws.String("k"), Value: aws.String("v")}}}))(t)

	found := must(client.DescribeNetworkInterfaces(ctx, &ec2.DescribeNetworkInterfacesInput{
		Filters: []types.Filter{{Name: aws.String("attachment.instance-id"), Values: []string{instanceID}}, {Name: aws.String("tag:k"), Values: []string{"v"}}},
	}))(t).NetworkInterfaces
	if len(found) != 1 {
		t.Fatalf("%d interfaces, want 1", len(found))
	}
	eni := found[0]
	if len(eni.PrivateIpAddresses) != 5 || len(eni.Ipv4Prefixes) != 1 || eni.Attachment == nil || aws.ToInt32(eni.Attachment.DeviceIndex) != 1 ||
		aws.ToString(eni.Attachment.InstanceId) != instanceID || !aws.ToBool(eni.Attachment.DeleteOnTermination) || eni.Attachment.AttachTime == nil ||
		eni.Attachment.Status != types.AttachmentStatusAttached || len(eni.TagSet) != 2 {
		t.Errorf("described %+v with %+v", eni, eni.Attachment)
	}
	tags := must(client.DescribeTags(ctx, &ec2.DescribeTagsInput{Filters: []types.Filter{{Name: aws.String("resource-id"), Values: []string{*id}}}}))(t).Tags
	if len(tags) != 2 || tags[0].ResourceType != types.ResourceTypeNetworkInterface {
		t.Errorf("tags %+v", tags)
	}

	must(client.UnassignPrivateIpAddresses(ctx, &ec2.UnassignPrivateIpAddressesInput{
		NetworkInterfaceId: id, PrivateIpAddresses: []string{*assigned.AssignedPrivateIpAddresses[0].PrivateIpAddress},
	}))(t)
	must(client.DetachNetworkInterface(ctx, &ec2.DetachNetworkInterfaceInput{AttachmentId: attached.AttachmentId}))(t)
	must(client.DeleteNetworkInterface(ctx, &ec2.DeleteNetworkInterfaceInput{NetworkInterfaceId: id}))(t)
	ended := must(client.TerminateInstances(ctx, &ec2.TerminateInstancesInput{InstanceIds: []string{instanceID}}))(t).TerminatingInstances
	if len(ended) != 1 || ended[0].CurrentState.Name != types.InstanceStateNameTerminated || ended[0].PreviousState.Name != types.InstanceStateNameRunning {
		t.Errorf("terminated %+v", ended)
	}
	if left := sim.State().NetworkInterfaces; len(left) != 0 {
		t.Errorf("left: %+v", left)
	}
}

func lookAround(ctx context.Context, t *testing.T, client *ec2.Client) {
	t.Helper()
	vpc := must(client.DescribeVpcs(ctx, &ec2.DescribeVpcsInput{}))(t).Vpcs[0]
	if len(vpc.CidrBlockAssociationSet) != 2 || aws.ToString(vpc.CidrBlockAssociationSet[1].CidrBlock) != "100.64.0.0/16" ||
		vpc.CidrBlockAssociationSet[1].CidrBlockState.State != types.VpcCidrBlockStateCodeAssociated {
		t.Errorf("vpc %+v", vpc)
	}
	subnet := must(client.DescribeSubnets(ctx, &ec2.DescribeSubnetsInput{}))(t).Subnets[0]
	if aws.ToInt32(subnet.AvailableIpAddressCount) != 250 || aws.ToString(subnet.CidrBlock) != "10.0.0.0/24" || aws.ToString(subnet.AvailabilityZone) != "us-east-1a" {
		t.Errorf("subnet %+v", subnet)
	}
	groups := must(client.DescribeSecurityGroups(ctx, &ec2.DescribeSecurityGroupsInput{GroupIds: []string{groupID}}))(t).SecurityGroups
	if len(groups) != 1 || aws.ToString(groups[0].GroupName) != "nodes" {
		t.Errorf("groups %+v", groups)
	}
	tables := must(client.DescribeRouteTables(ctx, &ec2.DescribeRouteTablesInput{RouteTableIds: []string{"rtb-00000001"}}))(t).RouteTables
	if len(tables) != 1 || len(tables[0].Associations) != 1 || aws.ToString(tables[0].Associations[0].SubnetId) != subnetID || len(tables[0].Routes) != 2 {
		t.Errorf("route tables %+v", tables)
	}
	reservations := must(client.DescribeInstances(ctx, &ec2.DescribeInstancesInput{InstanceIds: []string{instanceID}}))(t).Reservations
	if len(reservations) != 1 || len(reservations[0].Instances) != 1 {
		t.Fatalf("reservations %+v", reservations)
	}
	instance := reservations[0].Instances[0]
	if instance.State.Name != types.InstanceStateNameRunning || instance.InstanceType != types.InstanceTypeT3Medium || len(instance.NetworkInterfaces) != 1 ||
		aws.ToInt32(instance.NetworkInterfaces[0].Attachment.DeviceIndex) != 0 || aws.ToString(instance.Placement.AvailabilityZone) != "us-east-1a" || instance.LaunchTime == nil {
		t.Errorf("instance %+v", instance)
	}
}

func TestInstanceTypePages(t *testing.T) {
	client, _ := start(t)
	count := 0
	pages := ec2.NewDescribeInstanceTypesPaginator(client, &ec2.DescribeInstanceTypesInput{})
	for pages.HasMorePages() {
		page := must(pages.NextPage(t.Context()))(t)
		for _, typ := range page.InstanceTypes {
			count++
			if typ.NetworkInfo == nil || len(typ.NetworkInfo.NetworkCards) == 0 || aws.ToInt32(typ.NetworkInfo.Ipv4AddressesPerInterface) < 2 {
				t.Errorf("%s: %+v", typ.InstanceType, typ.NetworkInfo)
			}
			if typ.InstanceType == types.InstanceTypeT3Medium && (aws.ToInt32(typ.NetworkInfo.MaximumNetworkInterfaces) != 3 || typ.Hypervisor != types.InstanceTypeHypervisorNitro) {
				t.Errorf("t3.medium: %+v", typ)
			}
		}
	}
	if count < 1000 {
		t.Errorf("%d types", count)
	}
}

func TestRunInstances(t *testing.T) {
	client, sim := start(t)
	run := must(client.RunInstances(t.Context(), &ec2.RunInstancesInput{
		ImageId: aws.String("ami-12345678"), InstanceType: types.InstanceTypeM5Large, MinCount: aws.Int32(2), MaxCount: aws.Int32(2),
		NetworkInterfaces: []types.InstanceNetworkInterfaceSpecification{{DeviceIndex: aws.Int32(0), SubnetId: aws.String(subnetID), Groups: []string{groupID}}},
	}))(t)
	if len(run.Instances) != 2 {
		t.Fatalf("%d instances", len(run.Instances))
	}
	for _, i := range run.Instances {
		if sim.IMDSURL(ec2sim.InstanceID(*i.InstanceId)) == "" {
			t.Errorf("%s has no metadata service", *i.InstanceId)
		}
	}
	if got := must(client.DescribeInstances(t.Context(), &ec2.DescribeInstancesInput{MaxResults: aws.Int32(5)}))(t); len(got.Reservations) != 2 {
		t.Errorf("%d reservations", len(got.Reservations))
	}
}

// TestErrorCodes checks that the client gives out code, message, status and
// request id of a refusal.
func TestErrorCodes(t *testing.T) {
	client, sim := start(t)
	ctx := t.Context()
	primary := aws.String(string(sim.State().NetworkInterfaces[0].ID))
	eni := must(client.CreateNetworkInterface(ctx, &ec2.CreateNetworkInterfaceInput{SubnetId: aws.String(subnetID), ClientToken: aws.String("t")}))(t).NetworkInterface
	attach := func(index int32) error {
		_, err := client.AttachNetworkInterface(ctx, &ec2.AttachNetworkInterfaceInput{NetworkInterfaceId: eni.NetworkInterfaceId, InstanceId: aws.String(instanceID), DeviceIndex: aws.Int32(index)})
		return err
	}
	tests := []struct {
		code, message string
		call          func() error
	}{
		{"InvalidParameterValue", "Instance 'i-00000001' already has an interface attached at device index '0'.", func() error { return attach(0) }},
		{"IdempotentParameterMismatch", "", func() error {
			_, err := client.CreateNetworkInterface(ctx, &ec2.CreateNetworkInterfaceInput{SubnetId: aws.String(subnetID), ClientToken: aws.String("t"), Description: aws.String("x")})
			return err
		}},
		{"PrivateIpAddressLimitExceeded", "Number of private addresses will exceed limit.", func() error {
			_, err := client.AssignPrivateIpAddresses(ctx, &ec2.AssignPrivateIpAddressesInput{NetworkInterfaceId: primary, SecondaryPrivateIpAddressCount: aws.Int32(6)})
			return err
		}},
		{"InvalidNetworkInterfaceID.NotFound", "The networkInterface ID 'eni-12345678' does not exist", func() error {
			_, err := client.DescribeNetworkInterfaces(ctx, &ec2.DescribeNetworkInterfacesInput{NetworkInterfaceIds: []string{"eni-12345678"}})
			return err
		}},
		{"InvalidParameterValue", fmt.Sprintf("Network interface '%s' is currently in use.", *primary), func() error {
			_, err := client.DeleteNetworkInterface(ctx, &ec2.DeleteNetworkInterfaceInput{NetworkInterfaceId: primary})
			return err
		}},
		{"InsufficientFreeAddressesInSubnet", "", func() error {
			for {
				if _, err := client.CreateNetworkInterface(ctx, &ec2.CreateNetworkInterfaceInput{SubnetId: aws.String(subnetID), SecondaryPrivateIpAddressCount: aws.Int32(49)}); err != nil {
					return err
				}
			}
		}},
		{"AttachmentLimitExceeded", "Interface count 4 exceeds the limit for t3.medium", func() error {
			for index := int32(1); ; index++ {
				made, err := client.CreateNetworkInterface(ctx, &ec2.CreateNetworkInterfaceInput{SubnetId: aws.String(subnetID)})
				if err != nil {
					return err
				}
				eni = made.NetworkInterface
				if err := attach(index); err != nil {
					return err
				}
			}
		}},
		{"InvalidParameterCombination", "", func() error {
			_, err := client.DescribeInstances(ctx, &ec2.DescribeInstancesInput{InstanceIds: []string{instanceID}, MaxResults: aws.Int32(5)})
			return err
		}},
		{"DryRunOperation", "Request would have succeeded, but DryRun flag is set.", func() error {
			_, err := client.DescribeInstances(ctx, &ec2.DescribeInstancesInput{DryRun: aws.Bool(true)})
			return err
		}},
		{"InvalidAction", "The action CreateVolume is not valid for this web service.", func() error {
			_, err := client.CreateVolume(ctx, &ec2.CreateVolumeInput{AvailabilityZone: aws.String("us-east-1a"), Size: aws.Int32(1)})
			return err
		}},
	}
	for _, tt := range tests {
		t.Run(tt.code, func(t *testing.T) {
			err := tt.call()
			var refusal smithy.APIError
			if !errors.As(err, &refusal) {
				t.Fatalf("got %v, want an API error", err)
			}
			if refusal.ErrorCode() != tt.code || (tt.message != "" && refusal.ErrorMessage() != tt.message) {
				t.Errorf("got %s: %q, want %s: %q", refusal.ErrorCode(), refusal.ErrorMessage(), tt.code, tt.message)
			}
		})
	}
}

// must passes on what a call brought, and ends the test if it failed.
func must[T any](out T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
}
