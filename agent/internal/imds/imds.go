// Package imds is the edge to the instance metadata service, from which an agent
// learns on which instance it runs. What it does with that does not belong here.
package imds

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/feature/ec2/imds"
)

// Instance is who the instance is.
type Instance struct {
	// ID is the instance id.
	ID string
	// Type is the instance type, such as "m5.large".
	Type string
	// Zone is the availability zone.
	Zone string
	// VPCID and SubnetID are those of the primary interface.
	VPCID, SubnetID string
	// MAC is that of the primary interface; MACs are those of all interfaces.
	MAC  string
	MACs []string
	// PrivateIP is the primary address of the primary interface.
	PrivateIP netip.Addr
}

// Client reads from the metadata service.
type Client struct {
	api *imds.Client
}

// New returns a client. An empty endpoint means that of the environment variable
// AWS_EC2_METADATA_SERVICE_ENDPOINT, else the instance's own.
func New(endpoint string) *Client {
	return &Client{api: imds.New(imds.Options{
		Endpoint:       strings.TrimSuffix(endpoint, "/"),
		EnableFallback: aws.FalseTernary, // version 2 or nothing
	})}
}

// Read returns who the instance is.
func (c *Client) Read(ctx context.Context) (Instance, error) {
	// One answer of a metadata service takes milliseconds; what hangs is retried
	// by whoever needs it.
	const patience = 5 * time.Second
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	document, err := c.api.GetInstanceIdentityDocument(ctx, nil)
	if err != nil {
		return Instance{}, fmt.Errorf("read the instance identity document: %w", err)
	}
	i := Instance{ID: document.InstanceID, Type: document.InstanceType, Zone: document.AvailabilityZone}
	if i.PrivateIP, err = netip.ParseAddr(document.PrivateIP); err != nil {
		return Instance{}, fmt.Errorf("private address of the instance identity document: %w", err)
	}
	if i.MAC, err = c.get(ctx, "mac"); err != nil {
		return Instance{}, err
	}
	macs, err := c.get(ctx, "network/interfaces/macs/")
	if err != nil {
		return Instance{}, err
	}
	for mac := range strings.FieldsSeq(macs) {
		i.MACs = append(i.MACs, strings.TrimSuffix(mac, "/"))
	}
	if i.VPCID, err = c.get(ctx, "network/interfaces/macs/"+i.MAC+"/vpc-id"); err != nil {
		return Instance{}, err
	}
	if i.SubnetID, err = c.get(ctx, "network/interfaces/macs/"+i.MAC+"/subnet-id"); err != nil {
		return Instance{}, err
	}
	return i, nil
}

func (c *Client) get(ctx context.Context, path string) (string, error) {
	out, err := c.api.GetMetadata(ctx, &imds.GetMetadataInput{Path: path})
	if err != nil {
		return "", fmt.Errorf("read %s of the instance metadata: %w", path, err)
	}
	defer func() { _ = out.Content.Close() }()
	const longest = 64 << 10
	text, err := io.ReadAll(io.LimitReader(out.Content, longest))
	if err != nil {
		return "", fmt.Errorf("read %s of the instance metadata: %w", path, err)
	}
	return strings.TrimSpace(string(text)), nil
}
