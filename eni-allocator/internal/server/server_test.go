package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace/noop"
	"go.uber.org/goleak"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/eniplane/eniplane/deploy/local/ec2sim"
	eniv1 "github.com/eniplane/eniplane/gen/eniplane/eni/v1"
	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	reasonv1 "github.com/eniplane/eniplane/gen/eniplane/reason/v1"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"

	"github.com/eniplane/eniplane/eni-allocator/internal/allocator"
	"github.com/eniplane/eniplane/eni-allocator/internal/ec2"
	"github.com/eniplane/eniplane/eni-allocator/internal/lease"
	"github.com/eniplane/eniplane/eni-allocator/internal/plan"
	"github.com/eniplane/eniplane/eni-allocator/internal/syncertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	instanceID = "i-00000001"
	subnetID   = "subnet-0000000a"
	vpcID      = "vpc-00000001"
	groupID    = "sg-00000001"
)

// world is a server over the real interceptors, with everything behind it.
type world struct {
	client eniv1.EniAllocatorServiceClient
	syncer *syncertest.Syncer
	sim    *ec2sim.Server
	alloc  *allocator.Allocator
}

// start serves; the allocator leads only if it is told to.
func start(t *testing.T, leading bool, edit func(*ec2sim.Config)) *world {
	t.Helper()
	for k, v := range map[string]string{
		"AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": "x", "AWS_EC2_METADATA_DISABLED": "true",
		"AWS_CONFIG_FILE": "/nonexistent", "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
	} {
		t.Setenv(k, v)
	}
	w := &world{syncer: syncertest.Start(t)}
	cfg := ec2sim.Config{Latency: -1, Topology: ec2sim.Topology{
		Region: "us-east-1",
		VPCs:   []ec2sim.VPCSpec{{ID: vpcID, CIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16")}}},
		Subnets: []ec2sim.SubnetSpec{
			{ID: subnetID, VPC: vpcID, CIDR: netip.MustParsePrefix("10.0.0.0/24"), Zone: "us-east-1a", Tags: map[string]string{"k": "v"}},
			{ID: "subnet-0000000b", VPC: vpcID, CIDR: netip.MustParsePrefix("10.0.1.0/24"), Zone: "us-east-1b"},
			{ID: "subnet-0000000c", VPC: vpcID, CIDR: netip.MustParsePrefix("10.0.2.0/24"), Zone: "us-east-1b"},
		},
		SecurityGroups: []ec2sim.SecurityGroupSpec{{ID: groupID, Name: "nodes", VPC: vpcID}},
	}}
	for i := 1; i <= 6; i++ {
		cfg.Topology.Instances = append(cfg.Topology.Instances, ec2sim.InstanceSpec{
			ID: fmt.Sprintf("i-%08d", i), Type: "t3.medium", Subnet: subnetID, SecurityGroups: []string{"nodes"},
		})
	}
	if edit != nil {
		edit(&cfg)
	}
	var err error
	if w.sim, err = ec2sim.Start(cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.sim.Close)
	api, err := ec2.New(t.Context(), ec2.Config{Region: "us-east-1", Endpoint: w.sim.URL()}, ec2.Deps{TracerProvider: noop.NewTracerProvider()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(api.Close)
	logger := slog.New(slog.DiscardHandler)
	w.alloc, err = allocator.New(allocator.Config{Policy: plan.Policy{Cluster: "c"}}, allocator.Deps{
		EC2: api, Syncer: w.syncer.Client(), Logger: logger, Tracer: noop.NewTracerProvider().Tracer(""),
	})
	if err != nil {
		t.Fatal(err)
	}

	registry := prometheus.NewRegistry()
	folder, err := os.MkdirTemp("", "eni") // A socket's path is short.
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(folder) })
	socket := "unix://" + filepath.Join(folder, "s")
	server, err := rpc.NewServer(rpc.ServerConfig{
		Listen: socket, HealthListen: "127.0.0.1:0", MetricsListen: "127.0.0.1:0", MaxRecvBytes: 4 << 20, GracePeriod: time.Second,
	}, rpc.Deps{Logger: logger, Registerer: registry, Gatherer: registry, TracerProvider: noop.NewTracerProvider()})
	if err != nil {
		t.Fatal(err)
	}
	eniv1.RegisterEniAllocatorServiceServer(server.GRPC(), New(w.alloc, func() string { return "somebody" }))
	conn, err := rpc.Dial(socket, rpc.ClientConfig{Timeout: 20 * time.Second}, rpc.ClientDeps{TracerProvider: noop.NewTracerProvider()})
	if err != nil {
		t.Fatal(err)
	}
	w.client = eniv1.NewEniAllocatorServiceClient(conn)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 2)
	loops := 1
	go func() { done <- server.Run(ctx) }()
	if leading {
		loops++
		go func() { done <- w.alloc.Lead(ctx, lease.NewTerm(7, nil)) }()
	}
	t.Cleanup(func() {
		_ = conn.Close()
		cancel()
		for range loops {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
	})
	return w
}

func demand(name string) *nodev1.NodeDemand {
	first, pre := uint32(0), uint32(2)
	return &nodev1.NodeDemand{
		NodeName: name, NodeUid: "uid-" + name, Uid: "cn-" + name, InstanceId: instanceID, InstanceType: "t3.medium", AvailabilityZone: "us-east-1a",
		VpcId: vpcID, NodeSubnetId: subnetID,
		Eni: &nodev1.EniSpec{FirstInterfaceIndex: &first}, Watermarks: &nodev1.Watermarks{PreAllocate: &pre},
	}
}

func eventually(t *testing.T, what string, check func() error) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %v", what, err)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// settled waits until a node has its pool.
func (w *world) settled(t *testing.T, name string, addresses int) {
	t.Helper()
	eventually(t, name+" has its pool", func() error {
		if p := w.syncer.Published(name); len(p.GetPool()) != addresses {
			return fmt.Errorf("published %v", p)
		}
		return nil
	})
}

func wantError(t *testing.T, err error, code codes.Code, why reason.Reason) {
	t.Helper()
	if status.Code(err) != code || rpc.ReasonOf(err) != why {
		t.Errorf("got %v (%s), want %s %s", err, rpc.ReasonOf(err), code, why)
	}
	if after, ok := rpc.RetryAfter(err); code == codes.Unavailable && (!ok || after <= 0) {
		t.Errorf("%v does not say when to come back", err)
	}
}

func TestStandbyNamesTheLeader(t *testing.T) {
	w := start(t, false, nil)
	ctx := t.Context()
	for name, call := range map[string]func() error{
		"ensure": func() error {
			_, err := w.client.EnsureAddresses(ctx, &eniv1.EnsureAddressesRequest{NodeName: "n", Free: 1})
			return err
		},
		"get": func() error {
			_, err := w.client.GetAllocation(ctx, &eniv1.GetAllocationRequest{NodeName: "n"})
			return err
		},
		"list":    func() error { _, err := w.client.ListAllocations(ctx, &eniv1.ListAllocationsRequest{}); return err },
		"subnets": func() error { _, err := w.client.ListSubnets(ctx, &eniv1.ListSubnetsRequest{}); return err },
		"plan": func() error {
			_, err := w.client.PlanAllocation(ctx, &eniv1.PlanAllocationRequest{Subject: &eniv1.PlanAllocationRequest_NodeName{NodeName: "n"}})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			err := call()
			wantError(t, err, codes.Unavailable, reason.NotLeader)
			if rpc.MetadataOf(err)["leader"] != "somebody" {
				t.Errorf("metadata %v", rpc.MetadataOf(err))
			}
		})
	}
}

func TestEnsureAddresses(t *testing.T) {
	w := start(t, true, nil)
	ctx := t.Context()
	w.syncer.Set(demand("n"))
	w.settled(t, "n", 2)
	got, err := w.client.EnsureAddresses(ctx, &eniv1.EnsureAddressesRequest{NodeName: "n", Free: 6})
	if err != nil || got.GetFree() < 6 || got.GetFence().GetEpoch() != 7 {
		t.Errorf("got %v, %v", got, err)
	}
	_, err = w.client.EnsureAddresses(ctx, &eniv1.EnsureAddressesRequest{NodeName: "n", Free: 100})
	wantError(t, err, codes.ResourceExhausted, reason.OutOfENIs)
	if m := rpc.MetadataOf(err); m["node"] != "n" || m["free"] != "15" {
		t.Errorf("metadata %v", m)
	}
	_, err = w.client.EnsureAddresses(ctx, &eniv1.EnsureAddressesRequest{NodeName: "x", Free: 1})
	wantError(t, err, codes.FailedPrecondition, reason.NodeUnknown)
}

func TestEnsureAddressesOfABlockedNode(t *testing.T) {
	for _, tt := range []struct {
		name string
		edit func(*nodev1.NodeDemand)
		code codes.Code
		why  reason.Reason
		// lasts is whether the node is blocked without urgent demand, too.
		lasts bool
	}{
		{"max-allocate", func(d *nodev1.NodeDemand) { most := uint32(3); d.Watermarks.MaxAllocate = &most }, codes.ResourceExhausted, reason.MaxAllocate, false},
		{"max pods", func(d *nodev1.NodeDemand) { d.MaxPods = 3 }, codes.ResourceExhausted, reason.MaxPods, false},
		{"no such subnet", func(d *nodev1.NodeDemand) { d.Eni.SubnetIds = []string{"subnet-00000099"} }, codes.FailedPrecondition, reason.SubnetNoMatch, false},
		{"no such group", func(d *nodev1.NodeDemand) { d.Eni.SecurityGroups = []string{"sg-00000099"} }, codes.FailedPrecondition, reason.SecurityGroupNoMatch, false},
		{"no instance", func(d *nodev1.NodeDemand) { d.InstanceId = "" }, codes.FailedPrecondition, reason.InstanceUnknown, true},
		{"unknown instance", func(d *nodev1.NodeDemand) { d.InstanceId = "i-00000099" }, codes.FailedPrecondition, reason.InstanceUnknown, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := start(t, true, nil)
			d := demand("n")
			tt.edit(d)
			w.syncer.Set(d)
			eventually(t, "the node is known", func() error {
				_, err := w.client.EnsureAddresses(t.Context(), &eniv1.EnsureAddressesRequest{NodeName: "n", Free: 9})
				if r := rpc.ReasonOf(err); r == reason.NodeUnknown || r == reason.NotReady || r == reason.NotLeader {
					return err
				}
				wantError(t, err, tt.code, tt.why)
				return nil
			})
			if !tt.lasts {
				return
			}
			eventually(t, "the node says why", func() error {
				got, err := w.client.ListAllocations(t.Context(), &eniv1.ListAllocationsRequest{Reason: reasonv1.Reason(tt.why)})
				if err == nil && len(got.GetAllocations()) == 0 {
					err = errors.New("no such condition")
				}
				return err
			})
		})
	}
}

func TestEnsureAddressesWhileEC2Throttles(t *testing.T) {
	w := start(t, true, func(cfg *ec2sim.Config) {
		cfg.Intercept = func(_ context.Context, call ec2sim.Call) *ec2sim.APIError {
			if call.Action == "AssignPrivateIpAddresses" {
				return &ec2sim.APIError{Code: "RequestLimitExceeded", Message: "Request limit exceeded.", Status: 503}
			}
			return nil
		}
	})
	w.syncer.Set(demand("n"))
	eventually(t, "it was tried", func() error {
		if w.sim.Calls().Total("AssignPrivateIpAddresses") == 0 {
			return errors.New("not yet")
		}
		return nil
	})
	// One attempt: the client would repeat what is unavailable.
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	_, err := w.client.EnsureAddresses(ctx, &eniv1.EnsureAddressesRequest{NodeName: "n", Free: 1})
	wantError(t, err, codes.Unavailable, reason.EC2Throttled)
	if n := w.sim.Calls().Total("CreateNetworkInterface"); n != 0 {
		t.Errorf("%d ENIs were asked for instead", n)
	}
}

func TestBadRequests(t *testing.T) {
	w := start(t, true, nil)
	ctx := t.Context()
	ensure := func(r *eniv1.EnsureAddressesRequest) func() error {
		return func() error { _, err := w.client.EnsureAddresses(ctx, r); return err }
	}
	planned := func(h *eniv1.HypotheticalNode) func() error {
		return func() error {
			_, err := w.client.PlanAllocation(ctx, &eniv1.PlanAllocationRequest{Subject: &eniv1.PlanAllocationRequest_Hypothetical{Hypothetical: h}})
			return err
		}
	}
	w.syncer.Set(demand("n"))
	w.settled(t, "n", 2)
	for name, call := range map[string]func() error{
		"no node":       ensure(&eniv1.EnsureAddressesRequest{Free: 1}),
		"nothing":       ensure(&eniv1.EnsureAddressesRequest{NodeName: "n"}),
		"too much":      ensure(&eniv1.EnsureAddressesRequest{NodeName: "n", Free: 5000}),
		"nonsense used": ensure(&eniv1.EnsureAddressesRequest{NodeName: "n", Free: 1, Used: []string{"10.0.0"}}),
		"IPv6 used":     ensure(&eniv1.EnsureAddressesRequest{NodeName: "n", Free: 1, Used: []string{"::1"}}),
		"no subject":    func() error { _, err := w.client.PlanAllocation(ctx, &eniv1.PlanAllocationRequest{}); return err },
		"no type":       planned(&eniv1.HypotheticalNode{}),
		"page too large": func() error {
			_, err := w.client.ListAllocations(ctx, &eniv1.ListAllocationsRequest{PageSize: 1001})
			return err
		},
		"subnets too": func() error {
			_, err := w.client.ListSubnets(ctx, &eniv1.ListSubnetsRequest{PageSize: 1001})
			return err
		},
		"unknown reason": func() error {
			_, err := w.client.ListAllocations(ctx, &eniv1.ListAllocationsRequest{Reason: 9999})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) { wantError(t, call(), codes.InvalidArgument, reason.FieldInvalid) })
	}
	wantError(t, planned(&eniv1.HypotheticalNode{InstanceType: "t3.medium", Subnets: []*eniv1.SubnetCapacity{{Id: "s", Cidr: "10.0.0.0/99"}}})(), codes.InvalidArgument, reason.PrefixInvalid)
	for _, token := range []string{"x", "!!", "c3VibmV0cy9h"} { // The last is one of ListSubnets.
		_, err := w.client.ListAllocations(ctx, &eniv1.ListAllocationsRequest{PageToken: token})
		wantError(t, err, codes.InvalidArgument, reason.PageTokenInvalid)
	}
	_, err := w.client.GetAllocation(ctx, &eniv1.GetAllocationRequest{NodeName: "x"})
	wantError(t, err, codes.NotFound, reason.NodeUnknown)
	_, err = w.client.PlanAllocation(ctx, &eniv1.PlanAllocationRequest{Subject: &eniv1.PlanAllocationRequest_NodeName{NodeName: "x"}})
	wantError(t, err, codes.NotFound, reason.NodeUnknown)
}

func TestPages(t *testing.T) {
	w := start(t, true, nil)
	ctx := t.Context()
	for i := range 5 {
		d := demand(fmt.Sprintf("n-%d", i))
		d.InstanceId = fmt.Sprintf("i-%08d", i+2)
		w.syncer.Set(d)
	}
	w.settled(t, "n-4", 2)
	var names []string
	token := ""
	for {
		got, err := w.client.ListAllocations(ctx, &eniv1.ListAllocationsRequest{PageSize: 2, PageToken: token})
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range got.GetAllocations() {
			names = append(names, a.GetNodeName())
		}
		if token = got.GetNextPageToken(); token == "" {
			break
		}
		w.syncer.Remove("n-0") // What goes in between disturbs nobody.
	}
	if fmt.Sprint(names) != "[n-0 n-1 n-2 n-3 n-4]" {
		t.Errorf("names %v", names)
	}
	subnets, err := w.client.ListSubnets(ctx, &eniv1.ListSubnetsRequest{PageSize: 2})
	if err != nil || len(subnets.GetSubnets()) != 2 || subnets.GetNextPageToken() == "" {
		t.Fatalf("%v, %v", subnets, err)
	}
	if s := subnets.GetSubnets()[0]; s.GetId() != subnetID || s.GetVpcId() != vpcID || s.GetCidr() != "10.0.0.0/24" || s.GetFree() == 0 || s.GetTags()["k"] != "v" {
		t.Errorf("subnet %v", s)
	}
	rest, err := w.client.ListSubnets(ctx, &eniv1.ListSubnetsRequest{PageSize: 2, PageToken: subnets.GetNextPageToken()})
	if err != nil || len(rest.GetSubnets()) != 1 || rest.GetNextPageToken() != "" {
		t.Errorf("%v, %v", rest, err)
	}
}

func TestPlanAllocation(t *testing.T) {
	w := start(t, true, nil)
	ctx := t.Context()
	w.syncer.Set(demand("n"))
	w.settled(t, "n", 2)
	eventually(t, "there is nothing to do", func() error {
		got, err := w.client.PlanAllocation(ctx, &eniv1.PlanAllocationRequest{Subject: &eniv1.PlanAllocationRequest_NodeName{NodeName: "n"}})
		if err == nil && (len(got.GetActions()) > 0 || got.GetBlocked() != nil) {
			err = fmt.Errorf("planned %v", got)
		}
		return err
	})

	calls := w.sim.Calls().Total("CreateNetworkInterface", "AssignPrivateIpAddresses")
	pre := uint32(8)
	got, err := w.client.PlanAllocation(ctx, &eniv1.PlanAllocationRequest{Subject: &eniv1.PlanAllocationRequest_Hypothetical{Hypothetical: &eniv1.HypotheticalNode{
		InstanceType: "m5.large",
		Enis: []*nodev1.Eni{{
			Id: "eni-1", Ip: "10.0.0.9", Mac: "02:00:00:00:00:01", AvailabilityZone: "us-east-1a", SecurityGroups: []string{groupID},
			Subnet: &nodev1.Subnet{Id: subnetID, Cidr: "10.0.0.0/24"}, Vpc: &nodev1.Vpc{Id: vpcID, PrimaryCidr: "10.0.0.0/16"},
			Addresses: []string{"10.0.0.10", "10.0.0.11", "10.0.0.12", "10.0.0.13", "10.0.0.14", "10.0.0.15"},
		}},
		Demand: &nodev1.NodeDemand{
			NodeName: "ignored", Watermarks: &nodev1.Watermarks{PreAllocate: &pre}, Used: []*nodev1.UsedAddress{{Address: "10.0.0.10", Owner: "ns/p"}, {Address: "10.0.0.11", Owner: "ns/q"}},
		},
	}}})
	if err != nil {
		t.Fatal(err)
	}
	var kinds []string
	for _, a := range got.GetActions() {
		kinds = append(kinds, fmt.Sprintf("%s %d", a.GetKind(), a.GetCount()))
		if a.GetGrounds() == "" {
			t.Errorf("%v has no grounds", a)
		}
	}
	want := "[ACTION_KIND_ASSIGN_ADDRESSES 3 ACTION_KIND_CREATE 1 ACTION_KIND_ATTACH 0 ACTION_KIND_SET_DELETE_ON_TERMINATION 0]"
	if fmt.Sprint(kinds) != want {
		t.Errorf("planned %v, want %s", kinds, want)
	}
	if n := w.sim.Calls().Total("CreateNetworkInterface", "AssignPrivateIpAddresses"); n != calls {
		t.Error("a dry run changed something")
	}

	got, err = w.client.PlanAllocation(ctx, &eniv1.PlanAllocationRequest{Subject: &eniv1.PlanAllocationRequest_Hypothetical{Hypothetical: &eniv1.HypotheticalNode{InstanceType: "z9.none"}}})
	if err != nil || got.GetBlocked().GetReason() != reasonv1.Reason_REASON_INSTANCE_TYPE_UNKNOWN {
		t.Errorf("unknown type: %v, %v", got, err)
	}
}

func TestNotBuiltYet(t *testing.T) {
	w := start(t, true, nil)
	_, err := w.client.GetBudget(t.Context(), &eniv1.GetBudgetRequest{})
	if status.Code(err) != codes.Unimplemented {
		t.Errorf("got %v", err)
	}
}
