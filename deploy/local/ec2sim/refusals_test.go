package ec2sim

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestRefusals checks the code of each refusal, where EC2's text is known its
// text, and that a refusal changes nothing.
func TestRefusals(t *testing.T) {
	type step func(b bench) (action, form string)
	plain := func(action, form string) step {
		return func(bench) (string, string) { return action, form }
	}
	// onNew refers to a new interface in subnetA as ENI.
	onNew := func(create, action, form string) step {
		return func(b bench) (string, string) {
			return action, strings.ReplaceAll(form, "ENI", b.create("SubnetId="+subnetA+"&"+create))
		}
	}
	tests := []struct {
		name    string
		step    step
		code    string
		message string // contained in the message
	}{
		{"unknown action", plain("CreateVolume", ""), "InvalidAction", "CreateVolume"},
		{"unknown parameter", plain("DescribeSubnets", "Frobnicate=1"), "UnknownParameter", "Frobnicate"},
		{"dry run where there is none", onNew("", "AssignPrivateIpAddresses", "NetworkInterfaceId=ENI&DryRun=true"), "UnknownParameter", "DryRun"},
		{"bad boolean", plain("DescribeSubnets", "DryRun=maybe"), "InvalidParameterValue", "boolean"},
		{"bad integer", plain("DescribeSubnets", "MaxResults=x"), "InvalidParameterValue", "integer"},
		{"twice", plain("DescribeSubnets", "MaxResults=5&MaxResults=6"), "InvalidParameterCombination", "once"},

		{"create without subnet", plain("CreateNetworkInterface", ""), "MissingParameter", "subnetId"},
		{"create in malformed subnet", plain("CreateNetworkInterface", "SubnetId=subnet-a"), "InvalidSubnetID.Malformed", "subnet-a"},
		{"create in unknown subnet", plain("CreateNetworkInterface", "SubnetId=subnet-12345678"), "InvalidSubnetID.NotFound", "The subnet ID 'subnet-12345678' does not exist"},
		{"create with unknown group", plain("CreateNetworkInterface", "SubnetId="+subnetA+"&SecurityGroupId.1=sg-12345678"), "InvalidGroup.NotFound", "The security group 'sg-12345678' does not exist"},
		{"create with malformed group", plain("CreateNetworkInterface", "SubnetId="+subnetA+"&SecurityGroupId.1=nodes"), "InvalidGroupId.Malformed", "nodes"},
		{"create with a group of another VPC", plain("CreateNetworkInterface", "SubnetId="+subnetA+"&SecurityGroupId.1="+groupFar), "InvalidParameter", "different networks"},
		{"create with negative count", plain("CreateNetworkInterface", "SubnetId="+subnetA+"&SecondaryPrivateIpAddressCount=-1"), "InvalidParameterValue", "negative"},
		{"create with too many addresses", plain("CreateNetworkInterface", "SubnetId="+subnetA+"&SecondaryPrivateIpAddressCount=64"), "PrivateIpAddressLimitExceeded", "Number of private addresses will exceed limit."},
		{"create in a full subnet", plain("CreateNetworkInterface", "SubnetId="+subnetB+"&SecondaryPrivateIpAddressCount=11"), "InsufficientFreeAddressesInSubnet", "free addresses"},
		{"create with an address outside", plain("CreateNetworkInterface", "SubnetId="+subnetA+"&PrivateIpAddress=10.0.1.9"), "InvalidParameterValue", "Address 10.0.1.9 does not fall within the subnet's address range"},
		{"create with a reserved address", plain("CreateNetworkInterface", "SubnetId="+subnetA+"&PrivateIpAddress=10.0.0.3"), "InvalidParameterValue", "Address 10.0.0.3 is in subnet's reserved address range"},
		{"create with the broadcast address", plain("CreateNetworkInterface", "SubnetId="+subnetA+"&PrivateIpAddress=10.0.0.255"), "InvalidParameterValue", "reserved"},
		{"create with a used address", plain("CreateNetworkInterface", "SubnetId="+subnetA+"&PrivateIpAddress=10.0.0.4"), "InvalidIPAddress.InUse", "Address 10.0.0.4 is in use."},
		{"create with an IPv6 address", plain("CreateNetworkInterface", "SubnetId="+subnetA+"&PrivateIpAddress=::ffff:10.0.0.9"), "InvalidParameterValue", "address"},
		{"create with no address", plain("CreateNetworkInterface", "SubnetId="+subnetA+"&PrivateIpAddress=ten"), "InvalidParameterValue", "ten"},
		{"create with an address twice", plain("CreateNetworkInterface", "SubnetId="+subnetA+"&PrivateIpAddresses.1.PrivateIpAddress=10.0.0.9&PrivateIpAddresses.2.PrivateIpAddress=10.0.0.9"), "InvalidParameterValue", "more than once"},
		{"create with two primaries", plain("CreateNetworkInterface", "SubnetId="+subnetA+"&PrivateIpAddresses.1.PrivateIpAddress=10.0.0.9&PrivateIpAddresses.1.Primary=true&PrivateIpAddress=10.0.0.10"), "InvalidParameterCombination", "primary"},
		{"create with count and addresses", plain("CreateNetworkInterface", "SubnetId="+subnetA+"&PrivateIpAddresses.1.PrivateIpAddress=10.0.0.9&SecondaryPrivateIpAddressCount=1"), "InvalidParameterCombination", "secondaryPrivateIpAddressCount"},
		{"create with addresses and prefixes", plain("CreateNetworkInterface", "SubnetId="+subnetA+"&SecondaryPrivateIpAddressCount=1&Ipv4PrefixCount=1"), "InvalidParameterCombination", "prefixes"},
		{"create with a prefix where none fits", plain("CreateNetworkInterface", "SubnetId="+subnetB+"&Ipv4PrefixCount=1"), "InsufficientCidrBlocks", "cidr blocks"},
		{"create with a long description", plain("CreateNetworkInterface", "SubnetId="+subnetA+"&Description="+strings.Repeat("x", 256)), "InvalidParameterValue", "255"},
		{"create with six groups", plain("CreateNetworkInterface", "SubnetId="+subnetA+"&SecurityGroupId.1=sg-00000001&SecurityGroupId.2=sg-00000011&SecurityGroupId.3=sg-00000012&SecurityGroupId.4=sg-00000013&SecurityGroupId.5=sg-00000014&SecurityGroupId.6=sg-00000015"), "SecurityGroupsPerInterfaceLimitExceeded", ""},
		{"create with an EFA", plain("CreateNetworkInterface", "SubnetId="+subnetA+"&InterfaceType=efa"), "UnsupportedOperation", "efa"},
		{"create with a long token", plain("CreateNetworkInterface", "SubnetId="+subnetA+"&ClientToken="+strings.Repeat("x", 65)), "InvalidParameterValue", "64"},
		{"create with a reserved tag", plain("CreateNetworkInterface", "SubnetId="+subnetA+"&TagSpecification.1.ResourceType=network-interface&TagSpecification.1.Tag.1.Key=aws:x&TagSpecification.1.Tag.1.Value=1"), "InvalidParameterValue", "reserved"},
		{"create with tags for a volume", plain("CreateNetworkInterface", "SubnetId="+subnetA+"&TagSpecification.1.ResourceType=volume&TagSpecification.1.Tag.1.Key=x"), "InvalidParameterValue", "volume"},
		{"create with a tag twice", plain("CreateNetworkInterface", "SubnetId="+subnetA+"&TagSpecification.1.ResourceType=network-interface&TagSpecification.1.Tag.1.Key=x&TagSpecification.1.Tag.2.Key=x"), "InvalidParameterValue", "Duplicate"},

		{"attach without anything", plain("AttachNetworkInterface", ""), "MissingParameter", "deviceIndex"},
		{"attach without interface", plain("AttachNetworkInterface", "DeviceIndex=1&InstanceId="+medium), "MissingParameter", "networkInterfaceId"},
		{"attach unknown interface", plain("AttachNetworkInterface", "DeviceIndex=1&NetworkInterfaceId=eni-12345678&InstanceId="+medium), "InvalidNetworkInterfaceID.NotFound", "The networkInterface ID 'eni-12345678' does not exist"},
		{"attach malformed interface", plain("AttachNetworkInterface", "DeviceIndex=1&NetworkInterfaceId=eni-1&InstanceId="+medium), "InvalidNetworkInterfaceId.Malformed", "eni-1"},
		{"attach without instance", onNew("", "AttachNetworkInterface", "DeviceIndex=1&NetworkInterfaceId=ENI"), "MissingParameter", "instanceId"},
		{"attach to unknown instance", onNew("", "AttachNetworkInterface", "DeviceIndex=1&NetworkInterfaceId=ENI&InstanceId=i-12345678"), "InvalidInstanceID.NotFound", "The instance ID 'i-12345678' does not exist"},
		{"attach to malformed instance", onNew("", "AttachNetworkInterface", "DeviceIndex=1&NetworkInterfaceId=ENI&InstanceId=node"), "InvalidInstanceID.Malformed", "node"},
		{"attach at a taken index", onNew("", "AttachNetworkInterface", "DeviceIndex=0&NetworkInterfaceId=ENI&InstanceId="+medium), "InvalidParameterValue", "Instance '" + medium + "' already has an interface attached at device index '0'."},
		{"attach at a negative index", onNew("", "AttachNetworkInterface", "DeviceIndex=-1&NetworkInterfaceId=ENI&InstanceId="+medium), "InvalidParameterValue", "-1"},
		{"attach to a card that is not there", onNew("", "AttachNetworkInterface", "DeviceIndex=1&NetworkCardIndex=1&NetworkInterfaceId=ENI&InstanceId="+medium), "InvalidParameterValue", "card"},
		{"attach in another zone", onNew("", "AttachNetworkInterface", "DeviceIndex=1&NetworkInterfaceId=ENI&InstanceId="+faraway), "InvalidParameterCombination", "availability zone"},
		{"attach with too many addresses", onNew("SecondaryPrivateIpAddressCount=6", "AttachNetworkInterface", "DeviceIndex=1&NetworkInterfaceId=ENI&InstanceId="+medium), "InvalidInterface.IpAddressLimitExceeded", "Address count 7 exceeds the limit for t3.medium"},
		{"attach what is attached", func(b bench) (string, string) {
			return "AttachNetworkInterface", "DeviceIndex=1&NetworkInterfaceId=" + b.primary(tiny) + "&InstanceId=" + medium
		}, "InvalidNetworkInterface.InUse", "in use"},
		{"attach to a full instance", func(b bench) (string, string) {
			b.attach(b.create("SubnetId="+subnetA), medium, "1")
			b.attach(b.create("SubnetId="+subnetA), medium, "2")
			return "AttachNetworkInterface", "DeviceIndex=3&NetworkInterfaceId=" + b.create("SubnetId="+subnetA) + "&InstanceId=" + medium
		}, "AttachmentLimitExceeded", "Interface count 4 exceeds the limit for t3.medium"},
		{"attach to a stopping instance", func(b bench) (string, string) {
			if err := b.SetInstanceState(medium, StateStopping); err != nil {
				b.t.Fatal(err)
			}
			return "AttachNetworkInterface", "DeviceIndex=1&NetworkInterfaceId=" + b.create("SubnetId="+subnetA) + "&InstanceId=" + medium
		}, "IncorrectState", "Instance '" + medium + "' is not 'running'."},
		{"attach to a terminated instance", func(b bench) (string, string) {
			b.must("TerminateInstances", "InstanceId.1="+medium)
			return "AttachNetworkInterface", "DeviceIndex=1&NetworkInterfaceId=" + b.create("SubnetId="+subnetA) + "&InstanceId=" + medium
		}, "IncorrectState", "is not 'running'"},

		{"detach nothing", plain("DetachNetworkInterface", ""), "MissingParameter", "attachmentId"},
		{"detach malformed", plain("DetachNetworkInterface", "AttachmentId=eni-12345678"), "InvalidAttachmentId.Malformed", "eni-attach-"},
		{"detach unknown", plain("DetachNetworkInterface", "AttachmentId=eni-attach-12345678"), "InvalidAttachmentID.NotFound", "eni-attach-12345678"},
		{"detach the primary", func(b bench) (string, string) {
			return "DetachNetworkInterface", "AttachmentId=" + string(b.eni(b.primary(medium)).Attachment.ID)
		}, "OperationNotPermitted", "The network interface at device index 0 cannot be detached."},

		{"delete without id", plain("DeleteNetworkInterface", ""), "MissingParameter", "networkInterfaceId"},
		{"delete unknown", plain("DeleteNetworkInterface", "NetworkInterfaceId=eni-12345678"), "InvalidNetworkInterfaceID.NotFound", "eni-12345678"},
		{"delete what is attached", func(b bench) (string, string) {
			return "DeleteNetworkInterface", "NetworkInterfaceId=" + b.primary(medium)
		}, "InvalidParameterValue", "is currently in use"},

		{"modify nothing", onNew("", "ModifyNetworkInterfaceAttribute", "NetworkInterfaceId=ENI"), "InvalidParameterCombination", "No attributes"},
		{"modify two things", onNew("", "ModifyNetworkInterfaceAttribute", "NetworkInterfaceId=ENI&SourceDestCheck.Value=true&Description.Value=x"), "InvalidParameterCombination", "multiple"},
		{"modify an attachment that is none", onNew("", "ModifyNetworkInterfaceAttribute", "NetworkInterfaceId=ENI&Attachment.AttachmentId=eni-attach-12345678&Attachment.DeleteOnTermination=true"), "InvalidAttachmentID.NotFound", "eni-attach-12345678"},
		{"modify an attachment without id", onNew("", "ModifyNetworkInterfaceAttribute", "NetworkInterfaceId=ENI&Attachment.DeleteOnTermination=true"), "MissingParameter", "attachmentId"},
		{"modify an attachment of another", func(b bench) (string, string) {
			return "ModifyNetworkInterfaceAttribute", "NetworkInterfaceId=" + b.primary(medium) + "&Attachment.DeleteOnTermination=true&Attachment.AttachmentId=" + string(b.eni(b.primary(tiny)).Attachment.ID)
		}, "InvalidAttachmentID.NotFound", "eni-attach-"},
		{"modify to a foreign group", onNew("", "ModifyNetworkInterfaceAttribute", "NetworkInterfaceId=ENI&SecurityGroupId.1="+groupFar), "InvalidParameter", "different networks"},

		{"assign nothing", onNew("", "AssignPrivateIpAddresses", "NetworkInterfaceId=ENI"), "MissingParameter", "secondaryPrivateIpAddressCount"},
		{"assign zero", onNew("", "AssignPrivateIpAddresses", "NetworkInterfaceId=ENI&SecondaryPrivateIpAddressCount=0"), "InvalidParameterValue", "positive"},
		{"assign in two ways", onNew("", "AssignPrivateIpAddresses", "NetworkInterfaceId=ENI&SecondaryPrivateIpAddressCount=1&Ipv4PrefixCount=1"), "InvalidParameterCombination", "Only one"},
		{"assign to nothing", plain("AssignPrivateIpAddresses", "SecondaryPrivateIpAddressCount=1"), "MissingParameter", "networkInterfaceId"},
		{"assign to unknown", plain("AssignPrivateIpAddresses", "NetworkInterfaceId=eni-12345678&SecondaryPrivateIpAddressCount=1"), "InvalidNetworkInterfaceID.NotFound", "eni-12345678"},
		{"assign beyond the type's limit", func(b bench) (string, string) {
			return "AssignPrivateIpAddresses", "NetworkInterfaceId=" + b.primary(medium) + "&SecondaryPrivateIpAddressCount=6"
		}, "PrivateIpAddressLimitExceeded", "Number of private addresses will exceed limit."},
		{"assign prefixes beyond the type's limit", func(b bench) (string, string) {
			return "AssignPrivateIpAddresses", "NetworkInterfaceId=" + b.primary(tiny) + "&Ipv4PrefixCount=2"
		}, "PrivateIpAddressLimitExceeded", "Number of private addresses will exceed limit."},
		{"assign more than the subnet has", func(b bench) (string, string) {
			return "AssignPrivateIpAddresses", "NetworkInterfaceId=" + b.create("SubnetId="+subnetB) + "&SecondaryPrivateIpAddressCount=11"
		}, "InsufficientFreeAddressesInSubnet", "enough free addresses"},
		{"assign a used address", onNew("", "AssignPrivateIpAddresses", "NetworkInterfaceId=ENI&PrivateIpAddress.1=10.0.0.4"), "InvalidIPAddress.InUse", "10.0.0.4"},
		{"assign a primary of another by force", onNew("", "AssignPrivateIpAddresses", "NetworkInterfaceId=ENI&AllowReassignment=true&PrivateIpAddress.1=10.0.0.4"), "InvalidIPAddress.InUse", "10.0.0.4"},
		{"assign a crooked prefix", onNew("", "AssignPrivateIpAddresses", "NetworkInterfaceId=ENI&Ipv4Prefix.1=10.0.0.17/28"), "InvalidParameterValue", "10.0.0.17/28"},
		{"assign a large prefix", onNew("", "AssignPrivateIpAddresses", "NetworkInterfaceId=ENI&Ipv4Prefix.1=10.0.0.0/27"), "InvalidParameterValue", "/28"},
		{"assign a used prefix", onNew("", "AssignPrivateIpAddresses", "NetworkInterfaceId=ENI&Ipv4Prefix.1=10.0.0.0/28"), "InvalidIPAddress.InUse", "10.0.0.0/28"},

		{"unassign nothing", onNew("", "UnassignPrivateIpAddresses", "NetworkInterfaceId=ENI"), "MissingParameter", "privateIpAddress"},
		{"unassign the primary", onNew("PrivateIpAddress=10.0.0.99", "UnassignPrivateIpAddresses", "NetworkInterfaceId=ENI&PrivateIpAddress.1=10.0.0.99"), "InvalidParameterValue", "primary"},
		{"unassign what is not there", onNew("", "UnassignPrivateIpAddresses", "NetworkInterfaceId=ENI&PrivateIpAddress.1=10.0.0.98"), "InvalidParameterValue", "Some of [10.0.0.98] are not assigned to interface"},
		{"unassign a part of a prefix", onNew("Ipv4Prefix.1.Ipv4Prefix=10.0.0.32/28", "UnassignPrivateIpAddresses", "NetworkInterfaceId=ENI&PrivateIpAddress.1=10.0.0.33"), "InvalidParameterValue", "10.0.0.33"},
		{"unassign one that is there and one that is not", onNew("PrivateIpAddresses.1.PrivateIpAddress=10.0.0.98", "UnassignPrivateIpAddresses", "NetworkInterfaceId=ENI&PrivateIpAddress.1=10.0.0.98&PrivateIpAddress.2=10.0.0.97"), "InvalidParameterValue", "Some of [10.0.0.97]"},

		{"tag nothing", plain("CreateTags", "Tag.1.Key=a"), "MissingParameter", "resourceIdSet"},
		{"tag with nothing", plain("CreateTags", "ResourceId.1="+medium), "MissingParameter", "tagSet"},
		{"tag unknown instance", plain("CreateTags", "ResourceId.1=i-12345678&Tag.1.Key=a"), "InvalidInstanceID.NotFound", "i-12345678"},
		{"tag known and unknown", plain("CreateTags", "ResourceId.1="+medium+"&ResourceId.2=eni-12345678&Tag.1.Key=a"), "InvalidNetworkInterfaceID.NotFound", "eni-12345678"},
		{"tag what is no id", plain("CreateTags", "ResourceId.1=thing&Tag.1.Key=a"), "InvalidID", "thing"},
		{"tag with an empty key", plain("CreateTags", "ResourceId.1="+medium+"&Tag.1.Key=&Tag.1.Value=x"), "InvalidParameterValue", "empty"},
		{"tag with a long key", plain("CreateTags", "ResourceId.1="+medium+"&Tag.1.Key="+strings.Repeat("x", 128)), "InvalidParameterValue", "127"},
		{"tag with a long value", plain("CreateTags", "ResourceId.1="+medium+"&Tag.1.Key=x&Tag.1.Value="+strings.Repeat("x", 256)), "InvalidParameterValue", "255"},
		{"tag with a reserved key", plain("CreateTags", "ResourceId.1="+medium+"&Tag.1.Key=aws:cloud"), "InvalidParameterValue", "aws:"},

		{"run without image", plain("RunInstances", "InstanceType=t3.micro&MinCount=1&MaxCount=1&SubnetId="+subnetA), "MissingParameter", "ImageId"},
		{"run without type", plain("RunInstances", "ImageId=ami-1&MinCount=1&MaxCount=1&SubnetId="+subnetA), "MissingParameter", "InstanceType"},
		{"run without count", plain("RunInstances", "ImageId=ami-1&InstanceType=t3.micro&MaxCount=1&SubnetId="+subnetA), "MissingParameter", "MinCount"},
		{"run none", plain("RunInstances", "ImageId=ami-1&InstanceType=t3.micro&MinCount=0&MaxCount=0&SubnetId="+subnetA), "InvalidParameterValue", "minCount"},
		{"run fewer than the least", plain("RunInstances", "ImageId=ami-1&InstanceType=t3.micro&MinCount=2&MaxCount=1&SubnetId="+subnetA), "InvalidParameterValue", "minCount"},
		{"run too many", plain("RunInstances", "ImageId=ami-1&InstanceType=t3.micro&MinCount=1&MaxCount=1001&SubnetId="+subnetA), "InstanceLimitExceeded", "1000"},
		{"run unknown type", plain("RunInstances", "ImageId=ami-1&InstanceType=t3.giant&MinCount=1&MaxCount=1&SubnetId="+subnetA), "InvalidParameterValue", "t3.giant"},
		{"run without subnet", plain("RunInstances", "ImageId=ami-1&InstanceType=t3.micro&MinCount=1&MaxCount=1"), "MissingParameter", "subnetId"},
		{"run more than the subnet has", plain("RunInstances", "ImageId=ami-1&InstanceType=t3.micro&MinCount=12&MaxCount=12&SubnetId="+subnetB), "InsufficientFreeAddressesInSubnet", "free addresses"},
		{"run in another zone", plain("RunInstances", "ImageId=ami-1&InstanceType=t3.micro&MinCount=1&MaxCount=1&Placement.AvailabilityZone=us-east-1b&SubnetId="+subnetA), "InvalidParameterValue", "us-east-1b"},
		{"run two with one address", plain("RunInstances", "ImageId=ami-1&InstanceType=t3.micro&MinCount=2&MaxCount=2&PrivateIpAddress=10.0.0.9&SubnetId="+subnetA), "InvalidParameterCombination", "privateIpAddress"},
		{"run with subnet twice", plain("RunInstances", "ImageId=ami-1&InstanceType=t3.micro&MinCount=1&MaxCount=1&SubnetId="+subnetA+"&NetworkInterface.1.DeviceIndex=0&NetworkInterface.1.SubnetId="+subnetA), "InvalidParameterCombination", "instance-level"},
		{"run without primary", plain("RunInstances", "ImageId=ami-1&InstanceType=t3.micro&MinCount=1&MaxCount=1&NetworkInterface.1.DeviceIndex=1&NetworkInterface.1.SubnetId="+subnetA), "InvalidParameterValue", "index 0"},
		{"run with too many interfaces", plain("RunInstances", "ImageId=ami-1&InstanceType=t3.micro&MinCount=1&MaxCount=1&NetworkInterface.1.DeviceIndex=0&NetworkInterface.1.SubnetId="+subnetA+"&NetworkInterface.2.DeviceIndex=1&NetworkInterface.2.SubnetId="+subnetA+"&NetworkInterface.3.DeviceIndex=2&NetworkInterface.3.SubnetId="+subnetA), "AttachmentLimitExceeded", "Interface count 3 exceeds the limit for t3.micro"},
		{"run with interfaces in two zones", plain("RunInstances", "ImageId=ami-1&InstanceType=t3.micro&MinCount=1&MaxCount=1&NetworkInterface.1.DeviceIndex=0&NetworkInterface.1.SubnetId="+subnetA+"&NetworkInterface.2.DeviceIndex=1&NetworkInterface.2.SubnetId="+subnetC), "InvalidParameterCombination", "zone"},
		{"terminate nothing", plain("TerminateInstances", ""), "MissingParameter", "InstanceId"},
		{"terminate known and unknown", plain("TerminateInstances", "InstanceId.1="+medium+"&InstanceId.2=i-12345678"), "InvalidInstanceID.NotFound", "i-12345678"},

		{"describe unknown instance", plain("DescribeInstances", "InstanceId.1=i-12345678"), "InvalidInstanceID.NotFound", "The instance ID 'i-12345678' does not exist"},
		{"describe an empty id", plain("DescribeInstances", "InstanceId.1="), "InvalidInstanceID.Malformed", ""},
		{"describe unknown interface", plain("DescribeNetworkInterfaces", "NetworkInterfaceId.1=eni-12345678"), "InvalidNetworkInterfaceID.NotFound", "eni-12345678"},
		{"describe unknown subnet", plain("DescribeSubnets", "SubnetId.1=subnet-12345678"), "InvalidSubnetID.NotFound", "subnet-12345678"},
		{"describe unknown VPC", plain("DescribeVpcs", "VpcId.1=vpc-12345678"), "InvalidVpcID.NotFound", "vpc-12345678"},
		{"describe unknown group", plain("DescribeSecurityGroups", "GroupId.1=sg-12345678"), "InvalidGroup.NotFound", "sg-12345678"},
		{"describe unknown table", plain("DescribeRouteTables", "RouteTableId.1=rtb-12345678"), "InvalidRouteTableID.NotFound", "rtb-12345678"},
		{"describe unknown type", plain("DescribeInstanceTypes", "InstanceType.1=t3.micro&InstanceType.2=t3.giant"), "InvalidInstanceType", "[t3.giant]"},
		{"instance ids and page size", plain("DescribeInstances", "MaxResults=5&InstanceId.1="+medium), "InvalidParameterCombination", "instancesSet"},
		{"interface ids and page size", plain("DescribeNetworkInterfaces", "MaxResults=5&NetworkInterfaceId.1=eni-12345678"), "InvalidParameterCombination", "networkInterfaceIdSet"},
		{"small page", plain("DescribeNetworkInterfaces", "MaxResults=4"), "InvalidParameterValue", "maxResults"},
		{"large page", plain("DescribeNetworkInterfaces", "MaxResults=1001"), "InvalidParameterValue", "maxResults"},
		{"large page of types", plain("DescribeInstanceTypes", "MaxResults=101"), "InvalidParameterValue", "maxResults"},
		{"bad page token", plain("DescribeNetworkInterfaces", "NextToken=abc"), "InvalidNextToken", ""},
		{"forged page token", plain("DescribeNetworkInterfaces", "NextToken=eyJhIjoiZW5pLTAiLCJzIjoiMDAifQ"), "InvalidNextToken", ""},
		{"unknown filter", plain("DescribeNetworkInterfaces", "Filter.1.Name=colour&Filter.1.Value.1=red"), "InvalidParameterValue", "The filter 'colour' is invalid"},
		{"filter without name", plain("DescribeNetworkInterfaces", "Filter.1.Value.1=red"), "InvalidParameterValue", "The filter 'null' is invalid"},
		{"filter without value", plain("DescribeNetworkInterfaces", "Filter.1.Name=vpc-id"), "MissingParameter", "vpc-id"},
		{"interface filter on instances", plain("DescribeInstances", "Filter.1.Name=attachment.instance-id&Filter.1.Value.1=x"), "InvalidParameterValue", "attachment.instance-id"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, func(cfg *Config) {
				for _, id := range []string{"sg-00000011", "sg-00000012", "sg-00000013", "sg-00000014", "sg-00000015"} {
					cfg.Topology.SecurityGroups = append(cfg.Topology.SecurityGroups, SecurityGroupSpec{ID: id, Name: id, VPC: "main"})
				}
			})
			action, form := tt.step(b)
			before := b.State()
			got := b.call(action, form)
			if got.status != http.StatusBadRequest || got.code != tt.code || !strings.Contains(got.message, tt.message) {
				t.Errorf("got %d %s: %q, want 400 %s: %q", got.status, got.code, got.message, tt.code, tt.message)
			}
			if diff := cmp.Diff(before, b.State(), stateOptions()); diff != "" {
				t.Errorf("the account changed (-before +after):\n%s", diff)
			}
		})
	}
}

// TestProtocolRefusals checks what is wrong before an action is reached.
func TestProtocolRefusals(t *testing.T) {
	b := newBench(t)
	tests := []struct {
		name, method, target, body, contentType string
		status                                  int
		code                                    string
	}{
		{"no action", http.MethodPost, "/", "", form, http.StatusBadRequest, "MissingAction"},
		{"other version", http.MethodPost, "/", "Action=DescribeVpcs&Version=2010-01-01", form, http.StatusBadRequest, "NoSuchVersion"},
		{"broken escape", http.MethodPost, "/", "Action=DescribeVpcs&Filter.1.Name=%zz", form, http.StatusBadRequest, "MalformedQueryString"},
		{"method", http.MethodDelete, "/?Action=DescribeVpcs", "", "", http.StatusMethodNotAllowed, "MethodNotAllowed"},
		{"too large", http.MethodPost, "/", "Action=DescribeVpcs&x=" + strings.Repeat("x", 1<<20), form, http.StatusRequestEntityTooLarge, "RequestEntityTooLarge"},
		{"JSON", http.MethodPost, "/", `{"Action":"DescribeVpcs"}`, "application/json", http.StatusBadRequest, "MissingAction"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := httptest.NewRequest(tt.method, tt.target, strings.NewReader(tt.body))
			r.Header.Set("Content-Type", tt.contentType)
			if got := b.do(r); got.status != tt.status || got.code != tt.code {
				t.Errorf("got %d %s, want %d %s", got.status, got.code, tt.status, tt.code)
			}
		})
	}
	if total := b.Calls().Total(); total != 0 {
		t.Errorf("%d calls were counted", total)
	}
}

const form = "application/x-www-form-urlencoded"
