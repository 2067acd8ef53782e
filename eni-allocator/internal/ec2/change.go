package ec2

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/ec2"
	"github.com/aws/aws-sdk-go-v2/service/ec2/types"

	"github.com/eniplane/eniplane/eni-allocator/internal/plan"
)

// Assign gives an ENI as many more secondary addresses and returns them. It must
// not be repeated before the ENI was read again: after ErrUnavailable it may
// have happened.
func (c *Client) Assign(ctx context.Context, a plan.AssignAddresses) ([]netip.Addr, error) {
	const action = "AssignPrivateIpAddresses"
	out, err := write(ctx, c, action, c.api.AssignPrivateIpAddresses, &ec2.AssignPrivateIpAddressesInput{
		NetworkInterfaceId: aws.String(string(a.ENI)), SecondaryPrivateIpAddressCount: aws.Int32(int32(a.Count)),
	}, once)
	if err != nil {
		return nil, err
	}
	assigned := make([]netip.Addr, 0, a.Count)
	for _, p := range out.AssignedPrivateIpAddresses {
		address, err := netip.ParseAddr(aws.ToString(p.PrivateIpAddress))
		if err != nil {
			return nil, &failure{action: action, kind: ErrUnintelligible, cause: err}
		}
		assigned = append(assigned, address)
	}
	if len(assigned) == 0 {
		return nil, &failure{action: action, kind: ErrUnintelligible, cause: fmt.Errorf("it names none of %d addresses", a.Count)}
	}
	return assigned, nil
}

// Create makes an ENI that is attached to nothing. It may be repeated with the
// same token: EC2 then answers with the same ENI, or with ErrTokenMismatch if
// anything else differs.
func (c *Client) Create(ctx context.Context, a plan.CreateENI) (plan.ENI, error) {
	const action = "CreateNetworkInterface"
	in := &ec2.CreateNetworkInterfaceInput{
		SubnetId: aws.String(string(a.Subnet)), Description: aws.String(a.Description), ClientToken: aws.String(a.Token),
		TagSpecifications: []types.TagSpecification{{ResourceType: types.ResourceTypeNetworkInterface}},
	}
	for _, g := range a.Groups {
		in.Groups = append(in.Groups, string(g))
	}
	if a.Count > 0 {
		in.SecondaryPrivateIpAddressCount = aws.Int32(int32(a.Count))
	}
	for _, k := range slices.Sorted(maps.Keys(a.Tags)) {
		in.TagSpecifications[0].Tags = append(in.TagSpecifications[0].Tags, types.Tag{Key: aws.String(k), Value: aws.String(a.Tags[k])})
	}
	out, err := write(ctx, c, action, c.api.CreateNetworkInterface, in)
	if err != nil {
		return plan.ENI{}, err
	}
	if out.NetworkInterface == nil || aws.ToString(out.NetworkInterface.NetworkInterfaceId) == "" {
		return plan.ENI{}, &failure{action: action, kind: ErrUnintelligible, cause: fmt.Errorf("it names no ENI")}
	}
	return eni(*out.NetworkInterface), nil
}

// Attach attaches an ENI on network card 0.
func (c *Client) Attach(ctx context.Context, id plan.ENIID, instance plan.InstanceID, index int) (plan.AttachmentID, error) {
	const action = "AttachNetworkInterface"
	out, err := write(ctx, c, action, c.api.AttachNetworkInterface, &ec2.AttachNetworkInterfaceInput{
		NetworkInterfaceId: aws.String(string(id)), InstanceId: aws.String(string(instance)), DeviceIndex: aws.Int32(int32(index)),
	}, once)
	if err != nil {
		return "", err
	}
	return plan.AttachmentID(aws.ToString(out.AttachmentId)), nil
}

// SetDeleteOnTermination lets an attached ENI go with its instance. It may be
// repeated.
func (c *Client) SetDeleteOnTermination(ctx context.Context, id plan.ENIID, attachment plan.AttachmentID) error {
	_, err := write(ctx, c, "ModifyNetworkInterfaceAttribute", c.api.ModifyNetworkInterfaceAttribute, &ec2.ModifyNetworkInterfaceAttributeInput{
		NetworkInterfaceId: aws.String(string(id)),
		Attachment:         &types.NetworkInterfaceAttachmentChanges{AttachmentId: aws.String(string(attachment)), DeleteOnTermination: aws.Bool(true)},
	})
	return err
}

// Delete deletes an ENI that is attached to nothing. It may be repeated: then it
// ends with ErrNotFound.
func (c *Client) Delete(ctx context.Context, id plan.ENIID) error {
	_, err := write(ctx, c, "DeleteNetworkInterface", c.api.DeleteNetworkInterface, &ec2.DeleteNetworkInterfaceInput{NetworkInterfaceId: aws.String(string(id))})
	return err
}
