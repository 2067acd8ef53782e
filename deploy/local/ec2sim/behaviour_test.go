package ec2sim

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestLifeOfAnInterface(t *testing.T) {
	b := newBench(t)
	before := b.free(subnetA)
	id := b.create("SubnetId=" + subnetA + "&SecondaryPrivateIpAddressCount=3&Description=d&SecurityGroupId.1=" + groupMain +
		"&TagSpecification.1.ResourceType=network-interface&TagSpecification.1.Tag.1.Key=k&TagSpecification.1.Tag.1.Value=v")
	eni := b.eni(id)
	if eni.Status != "available" || eni.Attachment != nil || len(eni.Secondary) != 3 || eni.Tags[0] != (Tag{Key: "k", Value: "v"}) ||
		eni.Groups[0].Name != "nodes" || eni.VPC != vpcMain || eni.Zone != "us-east-1a" {
		t.Errorf("created %+v", eni)
	}
	if got := b.free(subnetA); got != before-4 {
		t.Errorf("%d free, want %d", got, before-4)
	}

	attachment := b.attach(id, medium, "1")
	eni = b.eni(id)
	if eni.Status != "in-use" || eni.Attachment.Instance != medium || eni.Attachment.DeviceIndex != 1 || eni.Attachment.DeleteOnTermination {
		t.Errorf("attached %+v, %+v", eni, eni.Attachment)
	}
	b.must("ModifyNetworkInterfaceAttribute", "NetworkInterfaceId="+id+"&Attachment.AttachmentId="+attachment+"&Attachment.DeleteOnTermination=true")
	b.must("ModifyNetworkInterfaceAttribute", "NetworkInterfaceId="+id+"&SourceDestCheck.Value=false")
	b.must("ModifyNetworkInterfaceAttribute", "NetworkInterfaceId="+id+"&Description.Value=e")
	if eni = b.eni(id); !eni.Attachment.DeleteOnTermination || eni.SourceDestCheck || eni.Description != "e" {
		t.Errorf("modified to %+v, %+v", eni, eni.Attachment)
	}

	got := b.must("AssignPrivateIpAddresses", "NetworkInterfaceId="+id+"&SecondaryPrivateIpAddressCount=2").all("privateIpAddress")
	eni = b.eni(id)
	if want := []string{eni.Secondary[3].String(), eni.Secondary[4].String()}; !slices.Equal(got, want) {
		t.Errorf("assigned %v, interface has %v", got, want)
	}
	b.must("UnassignPrivateIpAddresses", "NetworkInterfaceId="+id+"&PrivateIpAddress.1="+got[0])
	if eni = b.eni(id); len(eni.Secondary) != 4 || slices.Contains(eni.Secondary, netip.MustParseAddr(got[0])) {
		t.Errorf("after unassigning %s: %v", got[0], eni.Secondary)
	}
	// An address that was given back is not handed out at once.
	again := b.must("AssignPrivateIpAddresses", "NetworkInterfaceId="+id+"&SecondaryPrivateIpAddressCount=1").first("privateIpAddress")
	if again == got[0] {
		t.Errorf("%s was handed out again at once", again)
	}

	b.must("DetachNetworkInterface", "AttachmentId="+attachment)
	if eni = b.eni(id); eni.Status != "available" || eni.Attachment != nil {
		t.Errorf("detached %+v", eni)
	}
	b.must("DeleteNetworkInterface", "NetworkInterfaceId="+id)
	if _, ok := b.State().NetworkInterface(ENIID(id)); ok || b.free(subnetA) != before {
		t.Errorf("deleted: exists %t, %d free, want %d", ok, b.free(subnetA), before)
	}
}

func TestSubnetCapacity(t *testing.T) {
	b := newBench(t)
	if got := b.must("DescribeSubnets", "SubnetId.1="+subnetB).first("availableIpAddressCount"); got != "11" {
		t.Errorf("a /28 has %s free addresses, want 11", got)
	}
	id := b.create("SubnetId=" + subnetB + "&SecondaryPrivateIpAddressCount=10")
	if b.free(subnetB) != 0 {
		t.Errorf("%d free, want 0", b.free(subnetB))
	}
	for _, addr := range b.eni(id).Addresses() {
		if last := addr.As4()[3]; last < 4 || last > 14 {
			t.Errorf("%s is reserved", addr)
		}
	}
	if a := b.call("CreateNetworkInterface", "SubnetId="+subnetB); a.code != "InsufficientFreeAddressesInSubnet" {
		t.Errorf("got %s", a.code)
	}
}

func TestPrefixes(t *testing.T) {
	b := newBench(t)
	id := b.create("SubnetId=" + subnetA + "&Ipv4PrefixCount=2")
	eni := b.eni(id)
	// The first block holds reserved addresses and those of the instances.
	if want := prefixes("10.0.0.16/28", "10.0.0.32/28"); !slices.Equal(eni.Prefixes, want) {
		t.Errorf("got %v, want %v", eni.Prefixes, want)
	}
	if eni.Slots() != 3 {
		t.Errorf("%d slots, want 3", eni.Slots())
	}
	b.attach(id, medium, "1")
	got := b.must("AssignPrivateIpAddresses", "NetworkInterfaceId="+id+"&Ipv4PrefixCount=3").all("ipv4Prefix")
	if len(got) != 3 {
		t.Errorf("assigned %v", got)
	}
	if a := b.call("AssignPrivateIpAddresses", "NetworkInterfaceId="+id+"&SecondaryPrivateIpAddressCount=1"); a.code != "PrivateIpAddressLimitExceeded" {
		t.Errorf("seventh slot: got %s", a.code)
	}
	before := b.free(subnetA)
	b.must("UnassignPrivateIpAddresses", "NetworkInterfaceId="+id+"&Ipv4Prefix.1=10.0.0.16/28")
	if got := b.free(subnetA); got != before+16 {
		t.Errorf("%d free, want %d", got, before+16)
	}
	b.must("AssignPrivateIpAddresses", "NetworkInterfaceId="+id+"&Ipv4Prefix.1=10.0.0.16/28")
	if a := b.call("CreateNetworkInterface", "SubnetId="+subnetA+"&PrivateIpAddress=10.0.0.20"); a.code != "InvalidIPAddress.InUse" {
		t.Errorf("address inside a prefix: got %s", a.code)
	}
}

func TestReassignment(t *testing.T) {
	b := newBench(t)
	from := b.create("SubnetId=" + subnetA + "&PrivateIpAddresses.1.PrivateIpAddress=10.0.0.50")
	to := b.create("SubnetId=" + subnetA)
	b.must("AssignPrivateIpAddresses", "NetworkInterfaceId="+to+"&PrivateIpAddress.1=10.0.0.50&AllowReassignment=true")
	if n := len(b.eni(from).Secondary); n != 0 {
		t.Errorf("%d addresses left", n)
	}
	if want := []netip.Addr{netip.MustParseAddr("10.0.0.50")}; !slices.Equal(b.eni(to).Secondary, want) {
		t.Errorf("got %v", b.eni(to).Secondary)
	}
}

func TestNetworkCards(t *testing.T) {
	b := newBench(t)
	for _, card := range []string{"1", "2", "3"} {
		id := b.create("SubnetId=" + subnetA)
		b.must("AttachNetworkInterface", "NetworkInterfaceId="+id+"&InstanceId="+cards+"&DeviceIndex=1&NetworkCardIndex="+card)
	}
	for i := 1; i < 15; i++ {
		b.attach(b.create("SubnetId="+subnetA), cards, fmt.Sprint(i))
	}
	if a := b.call("AttachNetworkInterface", "NetworkInterfaceId="+b.create("SubnetId="+subnetA)+"&InstanceId="+cards+"&DeviceIndex=15"); a.code != "AttachmentLimitExceeded" {
		t.Errorf("sixteenth interface of card 0: got %s", a.code)
	}
}

func TestTermination(t *testing.T) {
	b := newBench(t)
	goes, stays := b.create("SubnetId="+subnetA), b.create("SubnetId="+subnetA)
	attachment := b.attach(goes, medium, "1")
	b.attach(stays, medium, "2")
	b.must("ModifyNetworkInterfaceAttribute", "NetworkInterfaceId="+goes+"&Attachment.AttachmentId="+attachment+"&Attachment.DeleteOnTermination=true")
	primary := b.primary(medium)

	a := b.must("TerminateInstances", "InstanceId.1="+medium)
	if got := a.all("name"); !slices.Equal(got, []string{"terminated", "running"}) {
		t.Errorf("states %v", got)
	}
	for _, id := range []string{goes, primary} {
		if _, ok := b.State().NetworkInterface(ENIID(id)); ok {
			t.Errorf("%s is still there", id)
		}
	}
	if eni := b.eni(stays); eni.Status != "available" || eni.Attachment != nil {
		t.Errorf("not deleted on termination: %+v", eni)
	}
	a = b.must("DescribeInstances", "InstanceId.1="+medium)
	if a.first("name") != "terminated" || a.first("subnetId") != "" || a.first("networkInterfaceId") != "" {
		t.Errorf("terminated instance: %s", a.body)
	}
	b.must("TerminateInstances", "InstanceId.1="+medium)
	b.clock.advance(time.Hour)
	if a := b.call("DescribeInstances", "InstanceId.1="+medium); a.code != "InvalidInstanceID.NotFound" {
		t.Errorf("an hour later: got %s", a.code)
	}
}

func TestRunInstances(t *testing.T) {
	b := newBench(t)
	launch := "ImageId=ami-1&InstanceType=t3.micro&SubnetId=" + subnetB +
		"&TagSpecification.1.ResourceType=instance&TagSpecification.1.Tag.1.Key=k&TagSpecification.1.Tag.1.Value=v" +
		"&UserData=eA%3D%3D&KeyName=key&Monitoring.Enabled=true"
	a := b.must("RunInstances", launch+"&MinCount=1&MaxCount=20&ClientToken=t")
	ids := a.all("instanceId")
	if len(ids) != 11 {
		t.Fatalf("%d instances, want as many as there are addresses: 11", len(ids))
	}
	again := b.must("RunInstances", launch+"&MinCount=1&MaxCount=20&ClientToken=t").all("instanceId")
	if !slices.Equal(ids, again) {
		t.Errorf("same token: got %v, want %v", again, ids)
	}
	if a := b.call("RunInstances", launch+"&MinCount=1&MaxCount=2&ClientToken=t"); a.code != "IdempotentParameterMismatch" {
		t.Errorf("same token, other parameters: got %s", a.code)
	}
	first, _ := b.State().Instance(InstanceID(ids[0]))
	eni := b.eni(string(first.Interfaces[0]))
	if first.State != StateRunning || first.Address != eni.Primary || !eni.Attachment.DeleteOnTermination {
		t.Errorf("instance %+v with interface %+v", first, eni)
	}
	if got := b.must("DescribeInstances", "Filter.1.Name=tag:k&Filter.1.Value.1=v").all("reservationId"); len(got) != 1 {
		t.Errorf("%d reservations, want 1", len(got))
	}

	existing := b.create("SubnetId=" + subnetA)
	a = b.must("RunInstances", "ImageId=ami-1&InstanceType=t3.medium&MinCount=1&MaxCount=1&NetworkInterface.1.DeviceIndex=1&NetworkInterface.1.NetworkInterfaceId="+existing+
		"&NetworkInterface.2.DeviceIndex=0&NetworkInterface.2.SubnetId="+subnetA+"&NetworkInterface.2.SecondaryPrivateIpAddressCount=2&NetworkInterface.2.SecurityGroupId.1="+groupMain)
	instance, _ := b.State().Instance(InstanceID(a.first("instanceId")))
	if len(instance.Interfaces) != 2 || string(instance.Interfaces[1]) != existing {
		t.Fatalf("interfaces %v", instance.Interfaces)
	}
	if eni := b.eni(existing); eni.Attachment.DeleteOnTermination {
		t.Error("an interface that was there before goes with the instance")
	}
	if eni := b.eni(string(instance.Interfaces[0])); len(eni.Secondary) != 2 || !eni.Attachment.DeleteOnTermination {
		t.Errorf("primary interface %+v", eni)
	}
}

func TestClientToken(t *testing.T) {
	b := newBench(t)
	request := "SubnetId=" + subnetA + "&SecondaryPrivateIpAddressCount=2&ClientToken=one"
	id := b.create(request)
	b.attach(id, medium, "1")
	a := b.must("CreateNetworkInterface", request)
	if a.first("networkInterfaceId") != id || a.first("status") != "in-use" || a.first("clientToken") != "one" {
		t.Errorf("repeated: %s", a.body)
	}
	for _, other := range []string{"&Description=x", "&SecurityGroupId.1=" + groupMain} {
		if a := b.call("CreateNetworkInterface", request+other); a.code != "IdempotentParameterMismatch" {
			t.Errorf("%s: got %s", other, a.code)
		}
	}
	if other := b.create(strings.Replace(request, "one", "two", 1)); other == id {
		t.Error("another token, same interface")
	}
	if first, second := b.create("SubnetId="+subnetA), b.create("SubnetId="+subnetA); first == second {
		t.Error("no token, same interface")
	}
	// A token that was refused is not used up.
	if a := b.call("CreateNetworkInterface", "SubnetId=subnet-12345678&ClientToken=three"); a.code != "InvalidSubnetID.NotFound" {
		t.Errorf("got %s", a.code)
	}
	third := b.create("SubnetId=" + subnetA + "&ClientToken=three")
	// A retry of a creation that succeeded does nothing, even after deletion.
	b.must("DeleteNetworkInterface", "NetworkInterfaceId="+third)
	if got := b.create("SubnetId=" + subnetA + "&ClientToken=three"); got != third {
		t.Errorf("after deletion: got %s, want %s", got, third)
	}
	if _, ok := b.State().NetworkInterface(ENIID(third)); ok {
		t.Error("the retry brought it back")
	}
	b.clock.advance(24*time.Hour + time.Second)
	if got := b.create("SubnetId=" + subnetA + "&ClientToken=three"); got == third {
		t.Error("the token is still known after a day")
	}
}

func TestDryRun(t *testing.T) {
	b := newBench(t)
	eni := b.create("SubnetId=" + subnetA)
	attached := b.create("SubnetId=" + subnetA)
	attachment := b.attach(attached, medium, "1")
	before := b.State()
	for action, form := range map[string]string{
		"CreateNetworkInterface":          "SubnetId=" + subnetA,
		"AttachNetworkInterface":          "NetworkInterfaceId=" + eni + "&DeviceIndex=2&InstanceId=" + medium,
		"DetachNetworkInterface":          "AttachmentId=" + attachment,
		"DeleteNetworkInterface":          "NetworkInterfaceId=" + eni,
		"ModifyNetworkInterfaceAttribute": "NetworkInterfaceId=" + eni + "&SourceDestCheck.Value=false",
		"CreateTags":                      "ResourceId.1=" + eni + "&Tag.1.Key=a",
		"DeleteTags":                      "ResourceId.1=" + medium,
		"RunInstances":                    "ImageId=ami-1&InstanceType=t3.micro&MinCount=1&MaxCount=1&SubnetId=" + subnetA,
		"TerminateInstances":              "InstanceId.1=" + medium,
		"DescribeInstances":               "",
		"DescribeInstanceTypes":           "",
		"DescribeNetworkInterfaces":       "",
		"DescribeSubnets":                 "",
		"DescribeVpcs":                    "",
		"DescribeSecurityGroups":          "",
		"DescribeRouteTables":             "",
		"DescribeTags":                    "",
	} {
		a := b.call(action, form+"&DryRun=true")
		if a.status != http.StatusPreconditionFailed || a.code != "DryRunOperation" {
			t.Errorf("%s: got %d %s: %s", action, a.status, a.code, a.message)
		}
	}
	if diff := cmp.Diff(before, b.State(), stateOptions()); diff != "" {
		t.Errorf("dry runs changed the account (-before +after):\n%s", diff)
	}
	if a := b.call("DeleteNetworkInterface", "NetworkInterfaceId="+attached+"&DryRun=true"); a.code != "InvalidParameterValue" {
		t.Errorf("dry run of what would be refused: got %s", a.code)
	}
}

func TestPaging(t *testing.T) {
	b := newBench(t)
	for range 12 {
		b.create("SubnetId=" + subnetC)
	}
	for _, tt := range []struct {
		name, action, form, element string
		size                        int
	}{
		{"interfaces", "DescribeNetworkInterfaces", "", "networkInterfaceId", 5},
		{"filtered interfaces", "DescribeNetworkInterfaces", "Filter.1.Name=subnet-id&Filter.1.Value.1=" + subnetC, "networkInterfaceId", 6},
		{"types", "DescribeInstanceTypes", "Filter.1.Name=instance-type&Filter.1.Value.1=m5*", "instanceType", 7},
	} {
		t.Run(tt.name, func(t *testing.T) {
			want := b.must(tt.action, tt.form).all(tt.element)
			var got []string
			pages, token := 0, ""
			for {
				page := b.must(tt.action, fmt.Sprintf("%s&MaxResults=%d&NextToken=%s", tt.form, tt.size, token))
				got = append(got, page.all(tt.element)...)
				pages++
				if token = page.first("nextToken"); token == "" {
					break
				}
				if n := len(page.all(tt.element)); n != tt.size {
					t.Errorf("page of %d, want %d", n, tt.size)
				}
			}
			if !slices.Equal(got, want) || pages != (len(want)+tt.size-1)/tt.size {
				t.Errorf("%d pages of %v, want %v", pages, got, want)
			}
		})
	}
	token := b.must("DescribeNetworkInterfaces", "MaxResults=5").first("nextToken")
	for _, other := range []string{"DescribeSubnets?", "DescribeNetworkInterfaces?Filter.1.Name=status&Filter.1.Value.1=available"} {
		action, form, _ := strings.Cut(other, "?")
		if a := b.call(action, form+"&NextToken="+token); a.code != "InvalidNextToken" {
			t.Errorf("token used for %s: got %s", other, a.code)
		}
	}
	// What is deleted between two pages does not shift the pages after it.
	first := b.must("DescribeNetworkInterfaces", "Filter.1.Name=status&Filter.1.Value.1=available&MaxResults=5")
	second := b.must("DescribeNetworkInterfaces", "Filter.1.Name=status&Filter.1.Value.1=available&MaxResults=5&NextToken="+first.first("nextToken"))
	b.must("DeleteNetworkInterface", "NetworkInterfaceId="+first.all("networkInterfaceId")[4])
	again := b.must("DescribeNetworkInterfaces", "Filter.1.Name=status&Filter.1.Value.1=available&MaxResults=5&NextToken="+first.first("nextToken"))
	if !slices.Equal(second.all("networkInterfaceId"), again.all("networkInterfaceId")) {
		t.Error("the second page changed with a deletion on the first")
	}
	if n := len(b.must("DescribeInstanceTypes", "").all("instanceType")); n != 100 {
		t.Errorf("%d types without a page size, want 100", n)
	}
}

func TestFilters(t *testing.T) {
	b := newBench(t)
	eni := b.create("SubnetId=" + subnetA + "&Description=Cilium-CNI%20(i-00000001)&PrivateIpAddress=10.0.0.200&PrivateIpAddresses.1.PrivateIpAddress=10.0.0.201&SecurityGroupId.1=" + groupMain +
		"&TagSpecification.1.ResourceType=network-interface&TagSpecification.1.Tag.1.Key=owner&TagSpecification.1.Tag.1.Value=me")
	attachment := b.attach(eni, medium, "1")
	enis := []string{}
	for _, e := range b.State().NetworkInterfaces {
		enis = append(enis, string(e.ID))
	}
	just := func(ids ...string) []string { return ids }
	tests := []struct {
		action, element, filter string
		values                  []string
		want                    []string
	}{
		{"DescribeNetworkInterfaces", "networkInterfaceId", "network-interface-id", just(eni), just(eni)},
		{"DescribeNetworkInterfaces", "networkInterfaceId", "attachment.instance-id", just(faraway), just(b.primary(faraway))},
		{"DescribeNetworkInterfaces", "networkInterfaceId", "attachment.attachment-id", just(attachment), just(eni)},
		{"DescribeNetworkInterfaces", "networkInterfaceId", "attachment.device-index", just("1"), just(eni)},
		{"DescribeNetworkInterfaces", "networkInterfaceId", "attachment.status", just("attached"), enis},
		{"DescribeNetworkInterfaces", "networkInterfaceId", "attachment.delete-on-termination", just("false"), just(eni)},
		{"DescribeNetworkInterfaces", "networkInterfaceId", "status", just("available"), nil},
		{"DescribeNetworkInterfaces", "networkInterfaceId", "vpc-id", just(vpcMain), enis},
		{"DescribeNetworkInterfaces", "networkInterfaceId", "vpc-id", just(vpcOther), nil},
		{"DescribeNetworkInterfaces", "networkInterfaceId", "subnet-id", just(subnetC), just(b.primary(faraway))},
		{"DescribeNetworkInterfaces", "networkInterfaceId", "availability-zone", just("us-east-1b"), just(b.primary(faraway))},
		{"DescribeNetworkInterfaces", "networkInterfaceId", "availability-zone", just("us-east-1?"), enis},
		{"DescribeNetworkInterfaces", "networkInterfaceId", "group-id", just(groupMain), just(eni, b.primary(medium))},
		{"DescribeNetworkInterfaces", "networkInterfaceId", "group-name", just("nod*"), just(eni, b.primary(medium))},
		{"DescribeNetworkInterfaces", "networkInterfaceId", "private-ip-address", just("*"), enis},
		{"DescribeNetworkInterfaces", "networkInterfaceId", "addresses.private-ip-address", just("10.0.0.201"), just(eni)},
		{"DescribeNetworkInterfaces", "networkInterfaceId", "description", just("Cilium-CNI (*)"), just(eni)},
		{"DescribeNetworkInterfaces", "networkInterfaceId", "mac-address", just(b.eni(eni).MAC), just(eni)},
		{"DescribeNetworkInterfaces", "networkInterfaceId", "tag:owner", just("you", "me"), just(eni)},
		{"DescribeNetworkInterfaces", "networkInterfaceId", "tag:owner", just("you"), nil},
		{"DescribeNetworkInterfaces", "networkInterfaceId", "tag-key", just("own*"), just(eni)},
		{"DescribeInstances", "reservationId", "instance-id", just("i-none"), nil},
		{"DescribeInstances", "imageId", "instance-id", just(medium), just("ami-00000000000000001")},
		{"DescribeInstances", "instanceType", "instance-type", just("t3.mic*"), just("t3.micro")},
		{"DescribeInstances", "instanceType", "instance-state-name", just("running"), just("t3.medium", "t3.micro", "t3.medium", "p4d.24xlarge")},
		{"DescribeInstances", "instanceType", "network-interface.group-id", just(groupMain), just("t3.medium")},
		{"DescribeInstances", "instanceType", "tag:Name", just("medium"), just("t3.medium")},
		{"DescribeSubnets", "subnetId", "tag:role", just("nodes"), just(subnetA)},
		{"DescribeSubnets", "subnetId", "availability-zone", just("us-east-1a"), just(subnetA, subnetB)},
		{"DescribeSubnets", "subnetId", "vpc-id", just(vpcOther), nil},
		{"DescribeVpcs", "vpcId", "cidr-block-association.cidr-block", just("100.64.0.0/20"), just(vpcMain)},
		{"DescribeVpcs", "vpcId", "vpc-id", just(vpcMain, vpcOther), just(vpcMain, vpcOther)},
		{"DescribeSecurityGroups", "groupName", "vpc-id", just(vpcOther), just("far", "default")},
		{"DescribeSecurityGroups", "groupName", "tag:role", just("nodes"), just("nodes")},
		{"DescribeRouteTables", "subnetId", "vpc-id", just(vpcMain), just(subnetA, subnetB)},
		{"DescribeRouteTables", "subnetId", "association.subnet-id", just(subnetA), just(subnetA, subnetB)},
		{"DescribeRouteTables", "main", "association.main", just("true"), just("true", "true")},
		{"DescribeTags", "value", "resource-id", just(eni), just("me")},
		{"DescribeTags", "resourceType", "resource-type", just("instance"), just("instance")},
		{"DescribeTags", "resourceId", "key", just("role"), just(subnetA, groupMain)},
		{"DescribeInstanceTypes", "instanceType", "instance-type", just("t3.medium"), just("t3.medium")},
	}
	for _, tt := range tests {
		t.Run(tt.action+"/"+tt.filter, func(t *testing.T) {
			form := "Filter.1.Name=" + tt.filter
			for i, v := range tt.values {
				form += fmt.Sprintf("&Filter.1.Value.%d=%s", i+1, strings.ReplaceAll(v, " ", "%20"))
			}
			got, want := b.must(tt.action, form).all(tt.element), slices.Clone(tt.want)
			slices.Sort(got)
			slices.Sort(want)
			if !slices.Equal(got, want) {
				t.Errorf("%v: got %v, want %v", tt.values, got, want)
			}
		})
	}
	// Filters narrow each other.
	a := b.must("DescribeNetworkInterfaces", "Filter.1.Name=group-id&Filter.1.Value.1="+groupMain+"&Filter.2.Name=tag-key&Filter.2.Value.1=owner")
	if got := a.all("networkInterfaceId"); !slices.Equal(got, just(eni)) {
		t.Errorf("two filters: got %v", got)
	}
}

func TestTags(t *testing.T) {
	b := newBench(t)
	eni := b.primary(medium)
	b.must("CreateTags", "ResourceId.1="+eni+"&ResourceId.2="+subnetA+"&ResourceId.3="+vpcMain+"&ResourceId.4="+groupMain+"&ResourceId.5=rtb-00000001&ResourceId.6="+medium+
		"&Tag.1.Key=b&Tag.1.Value=1&Tag.2.Key=a&Tag.2.Value=2")
	if got := b.must("DescribeTags", "Filter.1.Name=key&Filter.1.Value.1=a").all("resourceType"); len(got) != 6 {
		t.Errorf("tagged %v", got)
	}
	b.must("CreateTags", "ResourceId.1="+eni+"&Tag.1.Key=a&Tag.1.Value=3")
	if want := []Tag{{Key: "a", Value: "3"}, {Key: "b", Value: "1"}}; !slices.Equal(b.eni(eni).Tags, want) {
		t.Errorf("got %v, want %v", b.eni(eni).Tags, want)
	}
	b.must("DeleteTags", "ResourceId.1="+eni+"&Tag.1.Key=a&Tag.1.Value=other&Tag.2.Key=b&Tag.3.Key=absent")
	if want := []Tag{{Key: "a", Value: "3"}}; !slices.Equal(b.eni(eni).Tags, want) {
		t.Errorf("got %v, want %v", b.eni(eni).Tags, want)
	}
	var form strings.Builder
	for i := range 50 {
		fmt.Fprintf(&form, "&Tag.%d.Key=k%d", i+1, i)
	}
	if a := b.call("CreateTags", "ResourceId.1="+eni+form.String()); a.code != "TagLimitExceeded" {
		t.Errorf("51 tags: got %s", a.code)
	}
	b.must("DeleteTags", "ResourceId.1="+eni)
	b.must("CreateTags", "ResourceId.1="+eni+form.String())
}

func TestInstanceTypes(t *testing.T) {
	b := newBench(t)
	a := b.must("DescribeInstanceTypes", "InstanceType.1=p4d.24xlarge")
	if got := a.all("maximumNetworkInterfaces"); !slices.Equal(got, []string{"60", "15", "15", "15", "15"}) {
		t.Errorf("interfaces of all cards and of each: %v", got)
	}
	a = b.must("DescribeInstanceTypes", "InstanceType.1=m5.metal")
	if a.first("bareMetal") != "true" || a.first("hypervisor") != "" || a.first("ipv4AddressesPerInterface") != "50" {
		t.Errorf("m5.metal: %s", a.body)
	}
}

func TestGET(t *testing.T) {
	b := newBench(t)
	a := b.do(httptest.NewRequest(http.MethodGet, "/?Action=DescribeVpcs&Version=2016-11-15&X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Signature=00", nil))
	if got := a.all("vpcId"); !slices.Equal(got, []string{vpcMain, vpcOther}) {
		t.Errorf("got %v", got)
	}
	if got := a.all("cidrBlock"); !slices.Contains(got, "100.64.0.0/20") {
		t.Errorf("second block is missing: %v", got)
	}
}

func TestInterceptAndMiddleware(t *testing.T) {
	var seen []string
	b := newBench(t, func(cfg *Config) {
		cfg.Intercept = func(_ context.Context, call Call) *APIError {
			if call.Action == "DescribeVpcs" && call.N == 2 {
				return &APIError{Code: "RequestLimitExceeded", Message: "Request limit exceeded.", Status: http.StatusServiceUnavailable}
			}
			return nil
		}
		cfg.Middleware = []Middleware{
			func(next Handler) Handler { // the outer one
				return func(ctx context.Context, call Call) (Response, *APIError) {
					seen = append(seen, "outer "+call.Action)
					return next(ctx, call)
				}
			},
			func(next Handler) Handler { // loses the answer of what happened
				return func(ctx context.Context, call Call) (Response, *APIError) {
					seen = append(seen, "inner "+call.Param("SubnetId"))
					resp, err := next(ctx, call)
					if call.Action == "CreateNetworkInterface" {
						return nil, &APIError{Code: "InternalError", Message: "An internal error has occurred", Status: http.StatusInternalServerError}
					}
					return resp, err
				}
			},
		}
	})
	codes := []string{b.call("DescribeVpcs", "").code, b.call("DescribeVpcs", "").code, b.call("DescribeVpcs", "").code}
	if !slices.Equal(codes, []string{"", "RequestLimitExceeded", ""}) {
		t.Errorf("got %v", codes)
	}
	seen = nil
	enis := len(b.State().NetworkInterfaces)
	if a := b.call("CreateNetworkInterface", "SubnetId="+subnetA); a.status != http.StatusInternalServerError || len(b.State().NetworkInterfaces) != enis+1 {
		t.Errorf("got %d, %d interfaces, want %d", a.status, len(b.State().NetworkInterfaces), enis+1)
	}
	if !slices.Equal(seen, []string{"outer CreateNetworkInterface", "inner " + subnetA}) {
		t.Errorf("got %v", seen)
	}
	calls := b.Calls()
	if calls.Total("DescribeVpcs") != 3 || calls.Total() != 4 || calls.Failed["DescribeVpcs"]["RequestLimitExceeded"] != 1 || calls.Failed["CreateNetworkInterface"]["InternalError"] != 1 {
		t.Errorf("counted %+v", calls)
	}
	b.ResetCalls()
	if b.Calls().Total() != 0 {
		t.Error("counters were not reset")
	}
}

func TestAccessKey(t *testing.T) {
	var got []string
	b := newBench(t, func(cfg *Config) {
		cfg.Intercept = func(_ context.Context, call Call) *APIError {
			got = append(got, call.AccessKey)
			return nil
		}
	})
	for _, header := range []string{"", "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20260101/us-east-1/ec2/aws4_request, SignedHeaders=host, Signature=00", "Bearer x"} {
		r := httptest.NewRequest(http.MethodGet, "/?Action=DescribeVpcs", nil)
		r.Header.Set("Authorization", header)
		b.do(r)
	}
	if !slices.Equal(got, []string{"", "AKIDEXAMPLE", ""}) {
		t.Errorf("got %q", got)
	}
}
