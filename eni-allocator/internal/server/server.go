// Package server answers the RPCs of EniAllocatorService: it converts, and maps
// errors to codes and reasons. What to answer is known in package allocator.
package server

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/timestamppb"

	eniv1 "github.com/eniplane/eniplane/gen/eniplane/eni/v1"
	reasonv1 "github.com/eniplane/eniplane/gen/eniplane/reason/v1"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"

	"github.com/eniplane/eniplane/eni-allocator/internal/allocator"
	"github.com/eniplane/eniplane/eni-allocator/internal/plan"
	"github.com/eniplane/eniplane/eni-allocator/internal/wire"
)

// Server implements EniAllocatorService. RPCs that it lacks are unimplemented.
type Server struct {
	eniv1.UnimplementedEniAllocatorServiceServer
	allocator *allocator.Allocator
	leader    func() string
}

// New returns a Server. leader names the replica that leads; "" if none is known
// to.
func New(a *allocator.Allocator, leader func() string) *Server {
	return &Server{allocator: a, leader: leader}
}

// EnsureAddresses waits until a node has as many free addresses, or cannot have
// them.
func (s *Server) EnsureAddresses(ctx context.Context, req *eniv1.EnsureAddressesRequest) (*eniv1.EnsureAddressesResponse, error) {
	var used []netip.Addr
	for i, text := range req.GetUsed() {
		a, err := netip.ParseAddr(text)
		if err != nil {
			return nil, rpc.InvalidField(fmt.Sprintf("used[%d]", i), reason.FieldInvalid, "%q is not an address", text)
		}
		used = append(used, a)
	}
	ensured, err := s.allocator.Ensure(ctx, req.GetNodeName(), int(req.GetFree()), used)
	if err != nil {
		return nil, s.refuse(ctx, err, req.GetNodeName(), codes.FailedPrecondition)
	}
	return &eniv1.EnsureAddressesResponse{Free: wire.Count(ensured.Free), Fence: ensured.Fence}, nil
}

// GetAllocation returns one node.
func (s *Server) GetAllocation(ctx context.Context, req *eniv1.GetAllocationRequest) (*eniv1.GetAllocationResponse, error) {
	status, err := s.allocator.Node(req.GetNodeName())
	if err != nil {
		return nil, s.refuse(ctx, err, req.GetNodeName(), codes.NotFound)
	}
	return &eniv1.GetAllocationResponse{Allocation: s.allocation(status)}, nil
}

// ListAllocations returns a page of nodes.
func (s *Server) ListAllocations(ctx context.Context, req *eniv1.ListAllocationsRequest) (*eniv1.ListAllocationsResponse, error) {
	statuses, err := s.allocator.Nodes()
	if err != nil {
		return nil, s.refuse(ctx, err, "", codes.NotFound)
	}
	var chosen []allocator.Status
	for _, status := range statuses {
		if req.GetReason() == reasonv1.Reason_REASON_UNSPECIFIED || has(status, req.GetReason()) {
			chosen = append(chosen, status)
		}
	}
	list := fmt.Sprintf("allocations:%d", req.GetReason())
	chosen, next, err := page(chosen, func(a allocator.Status) string { return a.Wire.GetNodeName() }, list, req.GetPageSize(), req.GetPageToken())
	if err != nil {
		return nil, err
	}
	out := &eniv1.ListAllocationsResponse{NextPageToken: next}
	for _, status := range chosen {
		out.Allocations = append(out.Allocations, s.allocation(status))
	}
	return out, nil
}

func has(s allocator.Status, r reasonv1.Reason) bool {
	for _, c := range s.Conditions {
		if c.GetReason() == r {
			return true
		}
	}
	return false
}

// PlanAllocation plans and does nothing.
func (s *Server) PlanAllocation(ctx context.Context, req *eniv1.PlanAllocationRequest) (*eniv1.PlanAllocationResponse, error) {
	var p plan.Plan
	switch subject := req.GetSubject().(type) {
	case *eniv1.PlanAllocationRequest_NodeName:
		var err error
		if p, err = s.allocator.Plan(subject.NodeName, time.Now()); err != nil {
			return nil, s.refuse(ctx, err, subject.NodeName, codes.NotFound)
		}
	case *eniv1.PlanAllocationRequest_Hypothetical:
		reading, demand, err := s.describe(ctx, subject.Hypothetical)
		if err != nil {
			return nil, err
		}
		p = plan.Pool(reading, demand, s.allocator.Policy(), time.Now())
	default:
		return nil, rpc.InvalidField("subject", reason.FieldInvalid, "a node_name or a hypothetical node is needed")
	}
	return &eniv1.PlanAllocationResponse{Actions: wire.Actions(p.Actions), Blocked: wire.Blocked(p.Blocked)}, nil
}

// ListSubnets returns a page of subnets.
func (s *Server) ListSubnets(ctx context.Context, req *eniv1.ListSubnetsRequest) (*eniv1.ListSubnetsResponse, error) {
	network, err := s.allocator.Network()
	if err != nil {
		return nil, s.refuse(ctx, err, "", codes.NotFound)
	}
	subnets, next, err := page(network.Subnets, func(n plan.Subnet) string { return string(n.ID) }, "subnets", req.GetPageSize(), req.GetPageToken())
	if err != nil {
		return nil, err
	}
	out := &eniv1.ListSubnetsResponse{NextPageToken: next}
	for _, n := range subnets {
		out.Subnets = append(out.Subnets, wire.Subnet(n))
	}
	return out, nil
}

// allocation converts what is known of a node.
func (s *Server) allocation(status allocator.Status) *eniv1.Allocation {
	out := &eniv1.Allocation{
		NodeName: status.Wire.GetNodeName(), InstanceId: status.Wire.GetInstanceId(), InstanceType: status.Wire.GetInstanceType(),
		Conditions: status.Conditions, Published: status.Published, Enis: status.ENIs,
	}
	if status.ReadAt.IsZero() {
		return out // Nothing was read yet; the conditions say so.
	}
	out.ReadAt, out.InstanceType = timestamppb.New(status.ReadAt), status.Reading.Instance.Type
	p := plan.Pool(status.Reading, status.Demand, s.allocator.Policy(), time.Now())
	out.Available, out.Used, out.Needed, out.Excess = wire.Count(p.Available), wire.Count(p.Used), wire.Count(p.Needed), wire.Count(p.Excess)
	out.Capacity, out.EmptySlots = wire.Count(p.Capacity), wire.Count(p.EmptySlots)
	return out
}
