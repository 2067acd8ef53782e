package ec2

import (
	"context"
	"errors"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/ec2"
	"github.com/aws/aws-sdk-go-v2/service/ec2/types"

	"github.com/eniplane/eniplane/eni-allocator/internal/plan"
)

// Instance returns one instance. ErrNotFound proves nothing: EC2 may not show it
// yet.
func (c *Client) Instance(ctx context.Context, id plan.InstanceID) (plan.Instance, error) {
	out, err := read(ctx, c, "DescribeInstances", c.api.DescribeInstances, &ec2.DescribeInstancesInput{InstanceIds: []string{string(id)}})
	if err != nil {
		return plan.Instance{}, err
	}
	for _, r := range out.Reservations {
		for _, i := range r.Instances {
			if aws.ToString(i.InstanceId) == string(id) {
				return instance(i), nil
			}
		}
	}
	return plan.Instance{}, &failure{action: "DescribeInstances", kind: ErrNotFound}
}

// Instances returns the instances of VPCs. Terminated ones, of which EC2 forgets
// the VPC, are not among them. No VPC means no instance, and no call.
func (c *Client) Instances(ctx context.Context, vpcs []plan.VPCID) ([]plan.Instance, error) {
	if len(vpcs) == 0 {
		return nil, nil
	}
	var all []plan.Instance
	in := &ec2.DescribeInstancesInput{MaxResults: aws.Int32(c.cfg.PageSize), Filters: []types.Filter{filter("vpc-id", vpcs...)}}
	for {
		out, err := read(ctx, c, "DescribeInstances", c.api.DescribeInstances, in)
		if err != nil {
			return nil, err
		}
		for _, r := range out.Reservations {
			for _, i := range r.Instances {
				all = append(all, instance(i))
			}
		}
		if aws.ToString(out.NextToken) == "" {
			return all, nil
		}
		in.NextToken = out.NextToken
	}
}

// ENIsOf returns the ENIs attached to an instance, and those attached to nothing
// that a cluster made for it.
func (c *Client) ENIsOf(ctx context.Context, cluster string, id plan.InstanceID) ([]plan.ENI, error) {
	attached, err := c.enis(ctx, filter("attachment.instance-id", id))
	if err != nil {
		return nil, err
	}
	spare, err := c.enis(ctx, filter("tag:"+plan.TagInstance, id), filter("tag:"+plan.TagCluster, cluster), filter("status", "available"))
	if err != nil {
		return nil, err
	}
	// One that was attached in between is in the second answer unattached, or in
	// neither; one detached in between is in both: the later answer counts.
	known := make(map[plan.ENIID]bool, len(spare))
	for _, e := range spare {
		known[e.ID] = true
	}
	all := spare
	for _, e := range attached {
		if !known[e.ID] {
			all = append(all, e)
		}
	}
	return all, nil
}

// ENIs returns all ENIs of VPCs, attached or not. No VPC means no ENI, and no
// call.
func (c *Client) ENIs(ctx context.Context, vpcs []plan.VPCID) ([]plan.ENI, error) {
	if len(vpcs) == 0 {
		return nil, nil
	}
	return c.enis(ctx, filter("vpc-id", vpcs...))
}

func (c *Client) enis(ctx context.Context, filters ...types.Filter) ([]plan.ENI, error) {
	var all []plan.ENI
	in := &ec2.DescribeNetworkInterfacesInput{MaxResults: aws.Int32(c.cfg.PageSize), Filters: filters}
	for {
		out, err := read(ctx, c, "DescribeNetworkInterfaces", c.api.DescribeNetworkInterfaces, in)
		if err != nil {
			return nil, err
		}
		for _, e := range out.NetworkInterfaces {
			all = append(all, eni(e))
		}
		if aws.ToString(out.NextToken) == "" {
			return all, nil
		}
		in.NextToken = out.NextToken
	}
}

// Network returns what is in VPCs beside instances and ENIs. No VPC means
// nothing, and no call.
func (c *Client) Network(ctx context.Context, vpcs []plan.VPCID) (plan.Network, error) {
	var n plan.Network
	if len(vpcs) == 0 {
		return n, nil
	}
	size := aws.Int32(c.cfg.PageSize)
	inVPC := []types.Filter{filter("vpc-id", vpcs...)}
	err := errors.Join(
		pages(func(token *string) (*string, error) {
			out, err := read(ctx, c, "DescribeVpcs", c.api.DescribeVpcs, &ec2.DescribeVpcsInput{Filters: inVPC, MaxResults: size, NextToken: token})
			if err != nil {
				return nil, err
			}
			for _, v := range out.Vpcs {
				n.VPCs = append(n.VPCs, vpc(v))
			}
			return out.NextToken, nil
		}),
		pages(func(token *string) (*string, error) {
			out, err := read(ctx, c, "DescribeSubnets", c.api.DescribeSubnets, &ec2.DescribeSubnetsInput{Filters: inVPC, MaxResults: size, NextToken: token})
			if err != nil {
				return nil, err
			}
			for _, s := range out.Subnets {
				n.Subnets = append(n.Subnets, subnet(s))
			}
			return out.NextToken, nil
		}),
		pages(func(token *string) (*string, error) {
			out, err := read(ctx, c, "DescribeSecurityGroups", c.api.DescribeSecurityGroups, &ec2.DescribeSecurityGroupsInput{Filters: inVPC, MaxResults: size, NextToken: token})
			if err != nil {
				return nil, err
			}
			for _, g := range out.SecurityGroups {
				n.Groups = append(n.Groups, plan.SecurityGroup{ID: plan.GroupID(aws.ToString(g.GroupId)), VPC: plan.VPCID(aws.ToString(g.VpcId)), Tags: tags(g.Tags)})
			}
			return out.NextToken, nil
		}),
		pages(func(token *string) (*string, error) {
			// EC2 gives at most 100 route tables at once.
			out, err := read(ctx, c, "DescribeRouteTables", c.api.DescribeRouteTables, &ec2.DescribeRouteTablesInput{Filters: inVPC, MaxResults: aws.Int32(min(c.cfg.PageSize, 100)), NextToken: token})
			if err != nil {
				return nil, err
			}
			for _, t := range out.RouteTables {
				n.Tables = append(n.Tables, routeTable(t))
			}
			return out.NextToken, nil
		}),
	)
	if err != nil {
		return plan.Network{}, err
	}
	return n, nil
}

// pages calls f with the token of each page until there is none.
func pages(f func(token *string) (*string, error)) error {
	var token *string
	for {
		next, err := f(token)
		if err != nil {
			return err
		}
		if aws.ToString(next) == "" {
			return nil
		}
		token = next
	}
}

// Limits returns what an instance type can have on network card 0. ErrNotFound
// says that EC2 knows no such type, or does not say what it can have.
func (c *Client) Limits(ctx context.Context, typ string) (plan.Limits, error) {
	out, err := read(ctx, c, "DescribeInstanceTypes", c.api.DescribeInstanceTypes, &ec2.DescribeInstanceTypesInput{InstanceTypes: []types.InstanceType{types.InstanceType(typ)}})
	if err != nil {
		return plan.Limits{}, err
	}
	for _, t := range out.InstanceTypes {
		if l := limits(t); string(t.InstanceType) == typ && l.Known() {
			return l, nil
		}
	}
	return plan.Limits{}, &failure{action: "DescribeInstanceTypes", kind: ErrNotFound}
}

func filter[T ~string](name string, values ...T) types.Filter {
	f := types.Filter{Name: aws.String(name)}
	for _, v := range values {
		f.Values = append(f.Values, string(v))
	}
	return f
}
