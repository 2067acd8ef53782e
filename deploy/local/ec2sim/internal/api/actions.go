package api

import (
	"github.com/eniplane/eniplane/deploy/local/ec2sim/internal/account"
	"github.com/eniplane/eniplane/deploy/local/ec2sim/internal/query"
)

// action runs one action: it decodes the parameters, asks the account and
// shapes the answer.
type action func(acc *account.Account, params *query.Params) (Response, *account.Error)

// actions is the table of all actions there are.
func actions() map[string]action {
	return map[string]action{
		"DescribeInstances":               act(describeInstances),
		"DescribeInstanceTypes":           act(describeInstanceTypes),
		"DescribeNetworkInterfaces":       act(describeNetworkInterfaces),
		"DescribeSubnets":                 act(describeSubnets),
		"DescribeVpcs":                    act(describeVpcs),
		"DescribeSecurityGroups":          act(describeSecurityGroups),
		"DescribeRouteTables":             act(describeRouteTables),
		"DescribeTags":                    act(describeTags),
		"CreateNetworkInterface":          act(createNetworkInterface),
		"AttachNetworkInterface":          act(attachNetworkInterface),
		"AssignPrivateIpAddresses":        act(assignPrivateIPAddresses),
		"RunInstances":                    act(runInstances),
		"TerminateInstances":              act(terminateInstances),
		"DetachNetworkInterface":          act(done((*account.Account).DetachNetworkInterface)),
		"DeleteNetworkInterface":          act(done((*account.Account).DeleteNetworkInterface)),
		"ModifyNetworkInterfaceAttribute": act(done((*account.Account).ModifyNetworkInterfaceAttribute)),
		"UnassignPrivateIpAddresses":      act(done((*account.Account).UnassignPrivateIPAddresses)),
		"CreateTags":                      act(done((*account.Account).CreateTags)),
		"DeleteTags":                      act(done((*account.Account).DeleteTags)),
	}
}

// ignored lists the parameters that EC2 has, that launch tools send, and that
// say nothing about networking.
func ignored() []string {
	return []string{
		"Action", "Version", "IncludeManagedResources", "SkipOsShutdown",
		// of RunInstances
		"BlockDeviceMapping", "CpuOptions", "CreditSpecification", "DisableApiStop", "DisableApiTermination", "EbsOptimized",
		"EnclaveOptions", "HibernationOptions", "IamInstanceProfile", "InstanceInitiatedShutdownBehavior", "KernelId", "KeyName",
		"MaintenanceOptions", "MetadataOptions", "Monitoring", "PrivateDnsNameOptions", "RamdiskId", "UserData",
		// of signature version 2 and presigned requests
		"AWSAccessKeyId", "Signature", "SignatureMethod", "SignatureVersion", "Timestamp", "Expires", "X-Amz-Algorithm",
		"X-Amz-Credential", "X-Amz-Date", "X-Amz-Expires", "X-Amz-Security-Token", "X-Amz-Signature", "X-Amz-SignedHeaders",
	}
}

// act adapts a function of a decoded request. A parameter that the request does
// not have is refused, so that nobody relies on one that does nothing.
func act[Req any](run func(*account.Account, Req) (Response, *account.Error)) action {
	return func(acc *account.Account, params *query.Params) (Response, *account.Error) {
		var req Req
		if err := params.Decode(&req); err != nil {
			return nil, refuse(err)
		}
		params.Ignore(ignored()...)
		if err := params.Unread(); err != nil {
			return nil, refuse(err)
		}
		return run(acc, req)
	}
}

// done adapts an operation whose whole answer is that it happened.
func done[Req any](run func(*account.Account, Req) *account.Error) func(*account.Account, Req) (Response, *account.Error) {
	return func(acc *account.Account, req Req) (Response, *account.Error) {
		if err := run(acc, req); err != nil {
			return nil, err
		}
		return returnXML{Return: true}, nil
	}
}

// refuse words a protocol error as EC2 does.
func refuse(err *query.Error) *account.Error {
	switch err.Problem {
	case query.Duplicate:
		return account.Errorf("InvalidParameterCombination", "The parameter '%s' may only be specified once.", err.Name)
	case query.Malformed, query.Unknown:
		return account.Errorf("UnknownParameter", "The parameter %s is not recognized", err.Name)
	case query.NotBool:
		return account.Errorf("InvalidParameterValue", "Invalid value '%s' for boolean parameter %s", err.Value, err.Name)
	case query.NotInt:
		return account.Errorf("InvalidParameterValue", "Invalid value '%s' for integer parameter %s", err.Value, err.Name)
	}
	return account.Errorf("InvalidParameterValue", "The parameter %s is invalid", err.Name)
}

func describeInstances(acc *account.Account, req account.DescribeInstancesRequest) (Response, *account.Error) {
	rows, next, err := acc.DescribeInstances(req)
	if err != nil {
		return nil, err
	}
	return describeInstancesXML{Reservations: shape{acc}.reservations(rows), NextToken: next}, nil
}

func describeInstanceTypes(acc *account.Account, req account.DescribeInstanceTypesRequest) (Response, *account.Error) {
	rows, next, err := acc.DescribeInstanceTypes(req)
	if err != nil {
		return nil, err
	}
	return describeInstanceTypesXML{Types: each(rows, instanceType), NextToken: next}, nil
}

func describeNetworkInterfaces(acc *account.Account, req account.DescribeNetworkInterfacesRequest) (Response, *account.Error) {
	rows, next, err := acc.DescribeNetworkInterfaces(req)
	if err != nil {
		return nil, err
	}
	return describeNetworkInterfacesXML{Interfaces: each(rows, shape{acc}.networkInterface), NextToken: next}, nil
}

func describeSubnets(acc *account.Account, req account.DescribeSubnetsRequest) (Response, *account.Error) {
	rows, next, err := acc.DescribeSubnets(req)
	if err != nil {
		return nil, err
	}
	return describeSubnetsXML{Subnets: each(rows, shape{acc}.subnet), NextToken: next}, nil
}

func describeVpcs(acc *account.Account, req account.DescribeVpcsRequest) (Response, *account.Error) {
	rows, next, err := acc.DescribeVpcs(req)
	if err != nil {
		return nil, err
	}
	return describeVpcsXML{Vpcs: each(rows, shape{acc}.vpc), NextToken: next}, nil
}

func describeSecurityGroups(acc *account.Account, req account.DescribeSecurityGroupsRequest) (Response, *account.Error) {
	rows, next, err := acc.DescribeSecurityGroups(req)
	if err != nil {
		return nil, err
	}
	return describeSecurityGroupsXML{Groups: each(rows, shape{acc}.securityGroup), NextToken: next}, nil
}

func describeRouteTables(acc *account.Account, req account.DescribeRouteTablesRequest) (Response, *account.Error) {
	rows, next, err := acc.DescribeRouteTables(req)
	if err != nil {
		return nil, err
	}
	return describeRouteTablesXML{Tables: each(rows, shape{acc}.routeTable), NextToken: next}, nil
}

func describeTags(acc *account.Account, req account.DescribeTagsRequest) (Response, *account.Error) {
	rows, next, err := acc.DescribeTags(req)
	if err != nil {
		return nil, err
	}
	return describeTagsXML{Tags: each(rows, taggedResource), NextToken: next}, nil
}

func createNetworkInterface(acc *account.Account, req account.CreateNetworkInterfaceRequest) (Response, *account.Error) {
	resp, err := acc.CreateNetworkInterface(req)
	if err != nil {
		return nil, err
	}
	return createNetworkInterfaceXML{Interface: shape{acc}.networkInterface(resp.NetworkInterface), ClientToken: resp.ClientToken}, nil
}

func attachNetworkInterface(acc *account.Account, req account.AttachNetworkInterfaceRequest) (Response, *account.Error) {
	resp, err := acc.AttachNetworkInterface(req)
	if err != nil {
		return nil, err
	}
	return attachNetworkInterfaceXML{AttachmentID: string(resp.AttachmentID), NetworkCardIndex: resp.NetworkCardIndex}, nil
}

func assignPrivateIPAddresses(acc *account.Account, req account.AssignPrivateIPAddressesRequest) (Response, *account.Error) {
	resp, err := acc.AssignPrivateIPAddresses(req)
	if err != nil {
		return nil, err
	}
	return assignedXML(resp), nil
}

func runInstances(acc *account.Account, req account.RunInstancesRequest) (Response, *account.Error) {
	resp, err := acc.RunInstances(req)
	if err != nil {
		return nil, err
	}
	return shape{acc}.reservation(resp.Reservation, resp.Instances), nil
}

func terminateInstances(acc *account.Account, req account.TerminateInstancesRequest) (Response, *account.Error) {
	rows, err := acc.TerminateInstances(req)
	if err != nil {
		return nil, err
	}
	return terminateInstancesXML{Instances: each(rows, stateChange)}, nil
}
