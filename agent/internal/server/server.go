// Package server is AgentService on the wire: it checks and converts, and hands
// on to the parts that know.
package server

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/eniplane/eniplane/agent/internal/bpf"
	"github.com/eniplane/eniplane/agent/internal/condition"
	"github.com/eniplane/eniplane/agent/internal/holdings"
	"github.com/eniplane/eniplane/agent/internal/ipam"
	"github.com/eniplane/eniplane/agent/internal/local"
	"github.com/eniplane/eniplane/agent/internal/node"
	"github.com/eniplane/eniplane/agent/internal/programmer"
	"github.com/eniplane/eniplane/agent/internal/restore"
	"github.com/eniplane/eniplane/agent/internal/wish"
	agentv1 "github.com/eniplane/eniplane/gen/eniplane/agent/v1"
	identityv1 "github.com/eniplane/eniplane/gen/eniplane/identity/v1"
	"github.com/eniplane/eniplane/internal/prefix"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"
)

// Parts are what the server hands on to.
type Parts struct {
	InstanceID string
	Addresses  *node.Addresses
	Wish       *wish.Wish
	Programmer *programmer.Programmer
	Holdings   *holdings.Client
	Local      *local.Owners
	Restore    *restore.Restore
}

// Server implements AgentService. Before Bind its calls wait a while, then they
// are refused with NOT_READY.
type Server struct {
	agentv1.UnimplementedAgentServiceServer
	nodeName string
	board    *condition.Board
	info     bpf.Info
	parts    atomic.Pointer[Parts]
	ready    chan struct{} // closed by Bind
}

// New returns a server that can only tell how the agent is.
func New(nodeName string, board *condition.Board, info bpf.Info) *Server {
	return &Server{nodeName: nodeName, board: board, info: info, ready: make(chan struct{})}
}

// Bind gives the server its parts. It is called once.
func (s *Server) Bind(parts Parts) {
	s.parts.Store(&parts)
	close(s.ready)
}

// bound returns the parts. An agent that starts has them within milliseconds, so
// a call waits a moment for them.
func (s *Server) bound(ctx context.Context) (*Parts, error) {
	const most = 3 * time.Second
	wait := most
	if deadline, ok := ctx.Deadline(); ok {
		wait = min(wait, time.Until(deadline)/2)
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-s.ready:
		return s.parts.Load(), nil
	case <-timer.C:
	case <-ctx.Done():
	}
	e := rpc.Refuse(codes.Unavailable, reason.NotReady, "the agent does not know yet on which instance it runs")
	e.RetryAfter = retrySoon
	return nil, e
}

const retrySoon = time.Second

var table = rpc.Table{
	{Err: ipam.ErrNoView, Code: codes.Unavailable, Reason: reason.NotReady, RetryAfter: retrySoon},
	{Err: ipam.ErrEmpty, Code: codes.ResourceExhausted, Reason: reason.PoolEmpty, RetryAfter: retrySoon},
	{Err: ipam.ErrUnknown, Code: codes.FailedPrecondition, Reason: reason.AddressUnknown},
	{Err: ipam.ErrInUse, Code: codes.FailedPrecondition, Reason: reason.AddressInUse},
	{Err: node.ErrNotSaved, Code: codes.Unavailable, Reason: reason.NotReady, RetryAfter: retrySoon},
	{Err: node.ErrStopping, Code: codes.Unavailable, Reason: reason.NotReady, RetryAfter: retrySoon},
	{Err: programmer.ErrNoEntry, Code: codes.NotFound, Reason: reason.PrefixUnknown},
}

// AllocateIP implements AgentService.
func (s *Server) AllocateIP(ctx context.Context, r *agentv1.AllocateIPRequest) (*agentv1.AllocateIPResponse, error) {
	p, err := s.bound(ctx)
	if err != nil {
		return nil, err
	}
	owner, err := ownerOf(r.GetOwner())
	if err != nil {
		return nil, err
	}
	want, err := addressOf(r.GetAddress())
	if err != nil {
		return nil, err
	}
	got, err := p.Addresses.Allocate(ctx, owner, want)
	if err != nil {
		return nil, refusal(err)
	}
	response := &agentv1.AllocateIPResponse{
		Address: got.Address.String(), EniId: string(got.ENI.ID), EniMac: got.ENI.MAC, DeviceIndex: got.ENI.DeviceIndex,
	}
	if got.ENI.SubnetCIDR.IsValid() {
		response.SubnetCidr = got.ENI.SubnetCIDR.String()
		// AWS's router is at the first address of a subnet.
		response.Gateway = got.ENI.SubnetCIDR.Addr().Next().String()
	}
	for _, c := range got.ENI.VPCCIDRs {
		response.VpcCidrs = append(response.VpcCidrs, c.String())
	}
	return response, nil
}

// refusal adds to an empty pool why it is empty.
func refusal(err error) error {
	var empty *node.EmptyError
	if !errors.As(err, &empty) {
		return table.Status(err)
	}
	e := rpc.Refuse(codes.ResourceExhausted, reason.PoolEmpty, "%s", empty.Error())
	e.RetryAfter = retrySoon
	e.Metadata = map[string]string{"in_use": strconv.Itoa(empty.Used), "pool": strconv.Itoa(empty.Pool)}
	if empty.Blocked.Reason != reason.Unspecified {
		e.Metadata["blocked_reason"] = empty.Blocked.Reason.String()
		e.Metadata["blocked_message"] = empty.Blocked.Message
	}
	return e
}

// ReleaseIP implements AgentService.
func (s *Server) ReleaseIP(ctx context.Context, r *agentv1.ReleaseIPRequest) (*agentv1.ReleaseIPResponse, error) {
	p, err := s.bound(ctx)
	if err != nil {
		return nil, err
	}
	owner, err := ownerOf(r.GetOwner())
	if err != nil {
		return nil, err
	}
	if owner == ipam.Router {
		return nil, rpc.Refuse(codes.FailedPrecondition, reason.AddressInUse, "the router address is the agent's own")
	}
	addr, err := addressOf(r.GetAddress())
	if err != nil {
		return nil, err
	}
	freed, err := p.Addresses.Release(ctx, owner, addr)
	if err != nil {
		return nil, table.Status(err)
	}
	response := &agentv1.ReleaseIPResponse{}
	if freed.IsValid() {
		response.Address = freed.String()
	}
	return response, nil
}

func ownerOf(text string) (ipam.Owner, error) {
	if !node.ValidOwner(text) {
		return "", rpc.InvalidField("owner", reason.FieldInvalid, "want \"namespace/pod\", %q or %q", ipam.Router, ipam.Health)
	}
	return ipam.Owner(text), nil
}

// addressOf parses an optional address. The zero Addr means that there is none.
func addressOf(text string) (netip.Addr, error) {
	if text == "" {
		return netip.Addr{}, nil
	}
	addr, err := netip.ParseAddr(text)
	if err != nil {
		return netip.Addr{}, rpc.InvalidField("address", reason.FieldInvalid, "no address: %q", text)
	}
	return addr.Unmap(), nil
}

// ReplacePrefixes implements AgentService.
func (s *Server) ReplacePrefixes(ctx context.Context, r *agentv1.ReplacePrefixesRequest) (*agentv1.ReplacePrefixesResponse, error) {
	p, err := s.bound(ctx)
	if err != nil {
		return nil, err
	}
	prefixes := make([]netip.Prefix, len(r.GetPrefixes()))
	for i, text := range r.GetPrefixes() {
		field := fmt.Sprintf("prefixes[%d]", i)
		if prefixes[i], err = prefix.Parse(text); err != nil {
			return nil, rpc.InvalidField(field, reason.PrefixInvalid, "%v", err)
		}
		if prefix.IsWorld(prefixes[i]) {
			return nil, rpc.InvalidField(field, reason.PrefixReserved, "%s is the world, which needs no number", prefixes[i])
		}
	}
	version, err := p.Local.Replace(ctx, r.GetOwnerName(), prefixes)
	if err != nil {
		return nil, table.Status(err)
	}
	if err := settle(ctx, p, r.GetOwnerName(), version); err != nil {
		return nil, err
	}
	response := &agentv1.ReplacePrefixesResponse{}
	for i, n := range p.Wish.Numbers(prefixes) {
		response.Assignments = append(response.Assignments, &identityv1.Assignment{Prefix: prefixes[i].String(), Number: n})
	}
	return response, nil
}

// settle waits until the ledger has a local owner's set and the map follows, or
// until the attempt failed.
func settle(ctx context.Context, p *Parts, name string, version uint64) error {
	for {
		progress := p.Wish.Progress()
		done, err := p.Wish.Outcome(local.Owner(name), version)
		switch {
		case done:
			return table.Status(p.Programmer.Sync(ctx))
		case err != nil:
			return upstream(err)
		}
		select {
		case <-progress:
		case <-ctx.Done():
			return rpc.Refuse(codes.Unavailable, reason.ServiceAway, "the identity service did not answer in time; the set is remembered")
		}
	}
}

// upstream hands on why the ledger did not take a set. The set is remembered and
// tried again.
func upstream(err error) error {
	r, code := rpc.ReasonOf(err), status.Code(err)
	switch code {
	case codes.InvalidArgument, codes.FailedPrecondition, codes.ResourceExhausted:
		if r != reason.Unspecified {
			return rpc.Refuse(code, r, "%v", err)
		}
	}
	e := rpc.Refuse(codes.Unavailable, reason.ServiceAway, "the set is remembered: %v", err)
	e.RetryAfter = retrySoon
	return e
}

// RemovePrefixes implements AgentService.
func (s *Server) RemovePrefixes(ctx context.Context, r *agentv1.RemovePrefixesRequest) (*agentv1.RemovePrefixesResponse, error) {
	p, err := s.bound(ctx)
	if err != nil {
		return nil, err
	}
	if err := p.Local.Remove(ctx, r.GetOwnerName()); err != nil {
		return nil, table.Status(err)
	}
	if err := p.Programmer.Sync(ctx); err != nil {
		return nil, table.Status(err)
	}
	return &agentv1.RemovePrefixesResponse{}, nil
}
