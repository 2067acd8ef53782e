package app

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/eniplane/eniplane/deploy/local/ec2sim"
	eniv1 "github.com/eniplane/eniplane/gen/eniplane/eni/v1"
	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/internal/localkube"
	"github.com/eniplane/eniplane/internal/program"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"

	"github.com/eniplane/eniplane/eni-allocator/internal/syncertest"
)

const (
	instanceID = "i-00000001"
	subnetID   = "subnet-0000000a"
	vpcID      = "vpc-00000001"
	// patience is how long anything may take; nothing waits for it to pass.
	patience = 60 * time.Second
)

func simulator(t *testing.T) *ec2sim.Server {
	t.Helper()
	sim, err := ec2sim.Start(ec2sim.Config{Topology: ec2sim.Topology{
		Region:         "us-east-1",
		VPCs:           []ec2sim.VPCSpec{{ID: vpcID, CIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16")}}},
		Subnets:        []ec2sim.SubnetSpec{{ID: subnetID, VPC: vpcID, CIDR: netip.MustParsePrefix("10.0.0.0/24"), Zone: "us-east-1a"}},
		SecurityGroups: []ec2sim.SecurityGroupSpec{{ID: "sg-00000001", Name: "nodes", VPC: vpcID}},
		Instances:      []ec2sim.InstanceSpec{{ID: instanceID, Type: "t3.medium", Subnet: subnetID, SecurityGroups: []string{"nodes"}}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(sim.Close)
	return sim
}

// running is a process of the program, in this one.
type running struct {
	ports program.Ports
	log   *bytes.Buffer
	stop  func()
}

// run starts the program and waits until it is healthy.
func run(t *testing.T, name string, args ...string) *running {
	t.Helper()
	file := filepath.Join(t.TempDir(), "ports.json")
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	r := &running{log: &bytes.Buffer{}}
	go func() {
		done <- program.Run(ctx, Spec(), append(args, "--listen=127.0.0.1:0", "--health-listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0",
			"--ports-file="+file, "--grace-period=1s"), nil, &bytes.Buffer{}, r.log)
	}()
	stopped := false
	r.stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-done; err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	t.Cleanup(func() {
		r.stop()
		if t.Failed() {
			t.Logf("log of %s:\n%s", name, r.log)
		}
	})
	eventually(t, name+" has its ports", func() error {
		raw, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		return json.Unmarshal(raw, &r.ports)
	})
	health := healthpb.NewHealthClient(dial(t, r.ports.Health))
	eventually(t, name+" is healthy", func() error {
		got, err := health.Check(t.Context(), &healthpb.HealthCheckRequest{Service: eniv1.EniAllocatorService_ServiceDesc.ServiceName})
		if err == nil && got.GetStatus() != healthpb.HealthCheckResponse_SERVING {
			err = fmt.Errorf("it is %s", got.GetStatus())
		}
		return err
	})
	return r
}

func dial(t *testing.T, address string) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func eventually(t *testing.T, what string, check func() error) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %v", what, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func demand() *nodev1.NodeDemand {
	first, pre := uint32(0), uint32(2)
	return &nodev1.NodeDemand{
		NodeName: "node-1", NodeUid: "uid-1", Uid: "cn-1", InstanceId: instanceID, InstanceType: "t3.medium", AvailabilityZone: "us-east-1a",
		VpcId: vpcID, NodeSubnetId: subnetID,
		Eni: &nodev1.EniSpec{FirstInterfaceIndex: &first}, Watermarks: &nodev1.Watermarks{PreAllocate: &pre},
	}
}

// TestProgram runs two replicas against a real API server: one leads and fills
// the node, the other names it, and takes over when it stops.
func TestProgram(t *testing.T) {
	leaks := goleak.IgnoreCurrent()
	t.Cleanup(func() { goleak.VerifyNone(t, leaks) })
	for k, v := range map[string]string{
		"AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": "x", "AWS_EC2_METADATA_DISABLED": "true",
		"AWS_CONFIG_FILE": "/nonexistent", "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
	} {
		t.Setenv(k, v)
	}
	cluster := localkube.ForTest(t)
	sim := simulator(t)
	syncer := syncertest.Start(t)
	syncer.Set(demand())
	args := []string{
		"--kubeconfig=" + cluster.Kubeconfig, "--node-syncer=" + syncer.Addr, "--region=us-east-1", "--ec2-endpoint=" + sim.URL(),
		"--cluster-name=c", "--lease-namespace=default", "--lease-duration=3s", "--eni-tags=team=net",
	}
	first := run(t, "first", args...)
	eventually(t, "the node has its pool", func() error {
		if p := syncer.Published("node-1"); len(p.GetPool()) != 2 {
			return fmt.Errorf("published %v", p)
		}
		return nil
	})
	service := eniv1.NewEniAllocatorServiceClient(dial(t, first.ports.GRPC))
	ensured, err := service.EnsureAddresses(t.Context(), &eniv1.EnsureAddressesRequest{NodeName: "node-1", Free: 7})
	if err != nil || ensured.GetFree() < 7 {
		t.Fatalf("ensured %v, %v", ensured, err)
	}
	if p := syncer.Published("node-1"); len(p.GetEnis()) != 2 || len(p.GetPool()) < 7 {
		t.Errorf("published %v", p)
	}
	eventually(t, "the allocation shows it", func() error {
		got, err := service.GetAllocation(t.Context(), &eniv1.GetAllocationRequest{NodeName: "node-1"})
		if a := got.GetAllocation(); err == nil && (a.GetAvailable() < 7 || a.GetCapacity() != 15 || len(a.GetEnis()) != 2 || a.GetPublished().GetEpoch() == 0) {
			err = fmt.Errorf("allocation %v", a)
		}
		return err
	})
	epoch := ensured.GetFence().GetEpoch()

	second := run(t, "second", args...)
	standby := eniv1.NewEniAllocatorServiceClient(dial(t, second.ports.GRPC))
	_, err = standby.EnsureAddresses(t.Context(), &eniv1.EnsureAddressesRequest{NodeName: "node-1", Free: 1})
	if status.Code(err) != codes.Unavailable || rpc.ReasonOf(err) != reason.NotLeader || rpc.MetadataOf(err)["leader"] == "" {
		t.Errorf("standby: %v %v", err, rpc.MetadataOf(err))
	}

	first.stop()
	syncer.Edit("node-1", func(d *nodev1.NodeDemand) { pre := uint32(9); d.Watermarks.PreAllocate = &pre })
	eventually(t, "the second replica leads", func() error {
		p := syncer.Published("node-1")
		if p.GetFence().GetEpoch() <= epoch || len(p.GetPool()) < 9 {
			return fmt.Errorf("published %v", p)
		}
		return nil
	})
	second.stop()

	enis := sim.State().NetworkInterfaces
	if len(enis) != 2 {
		t.Fatalf("%d ENIs", len(enis))
	}
	for _, e := range enis {
		tags := make(map[string]string)
		for _, tag := range e.Tags {
			tags[tag.Key] = tag.Value
		}
		if e.Attachment == nil || !e.Attachment.DeleteOnTermination {
			t.Errorf("%s would be left behind: %+v", e.ID, e.Attachment)
		}
		if e.Attachment.DeviceIndex > 0 && (tags["team"] != "net" || tags["eniplane.dev/instance-id"] != instanceID || tags["eniplane.dev/cluster"] != "c") {
			t.Errorf("tags %v", tags)
		}
	}
	if err := sim.Check(); err != nil {
		t.Error(err)
	}
}

func TestBadSettings(t *testing.T) {
	good := []string{"--cluster-name=c", "--region=us-east-1"}
	for _, bad := range []string{
		"--cluster-name=", "--cluster-name=CHANGE-ME", "--node-syncer=", "--node-syncer=nowhere", "--lease-namespace=", "--lease-duration=2s", "--lease-duration=3500ms", "--resync-interval=1ms", "--workers=0",
		"--default-first-interface-index=256", "--eni-tags=eniplane.dev/x=y", "--eni-tags=aws:x=y", "--ec2-rate=-1", "--ec2-burst=0",
		"--ec2-timeout=-1s", "--kubeconfig=/nonexistent", "--eni-tags==y", "--cluster-name=" + strings.Repeat("x", 257),
	} {
		t.Run(bad, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			cancel() // Nothing would run for long.
			var log bytes.Buffer
			err := program.Run(ctx, Spec(), append(append([]string{"--listen=127.0.0.1:0", "--health-listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0"}, good...), bad), nil, &bytes.Buffer{}, &log)
			flag, _, _ := strings.Cut(bad, "=")
			if err == nil || !strings.Contains(err.Error(), flag) {
				t.Errorf("got %v, want an error that names %s", err, flag)
			}
		})
	}
}
