package server

import (
	"context"
	"errors"
	"strconv"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"

	"github.com/eniplane/eniplane/eni-allocator/internal/allocator"
	"github.com/eniplane/eniplane/eni-allocator/internal/ec2"
)

// soon is when to come back if nothing better is known.
const soon = time.Second

func table() rpc.Table {
	return rpc.Table{
		{Err: allocator.ErrNotReady, Code: codes.Unavailable, Reason: reason.NotReady, RetryAfter: soon},
		{Err: ec2.ErrThrottled, Code: codes.Unavailable, Reason: reason.EC2Throttled, RetryAfter: 5 * soon},
		{Err: ec2.ErrDenied, Code: codes.FailedPrecondition, Reason: reason.EC2Denied},
		{Err: ec2.ErrUnavailable, Code: codes.Unavailable, Reason: reason.EC2Unavailable, RetryAfter: 5 * soon},
		{Err: ec2.ErrUnintelligible, Code: codes.Unavailable, Reason: reason.EC2Unavailable, RetryAfter: 5 * soon},
		{Err: ec2.ErrRefused, Code: codes.FailedPrecondition, Reason: reason.EC2Refused},
	}
}

// Keys of the metadata of errors.
const (
	// metaLeader is the identity of the replica that leads.
	metaLeader = "leader"
	// metaNode is the node that the error is about.
	metaNode = "node"
	// metaFree is how many addresses are free all the same.
	metaFree = "free"
)

// refuse translates an error about a node; unknown is the code for a node that
// does not exist.
func (s *Server) refuse(ctx context.Context, err error, node string, unknown codes.Code) error {
	var blocked *allocator.BlockedError
	switch {
	case err == nil:
		return nil
	case errors.Is(err, allocator.ErrNotLeader):
		return s.notLeader()
	case errors.Is(err, allocator.ErrNodeUnknown):
		return rpc.Refuse(unknown, reason.NodeUnknown, "node %q is not known", node).With(metaNode, node)
	case errors.As(err, &blocked):
		refusal := rpc.Refuse(codeOf(blocked.Reason), blocked.Reason, "%s", blocked.Message).
			With(metaNode, node).With(metaFree, strconv.Itoa(blocked.Free))
		refusal.RetryAfter = blocked.RetryAfter
		if refusal.Code == codes.Unavailable {
			if refusal.RetryAfter <= 0 {
				refusal.RetryAfter = soon
			}
			// gRPC would repeat the call at once, with what is left of its deadline,
			// and the caller would never see why it failed. Outside of a call there
			// is nobody to tell.
			_ = grpc.SetTrailer(ctx, metadata.Pairs("grpc-retry-pushback-ms", "-1"))
		}
		return refusal
	}
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	return table().Status(err)
}

func (s *Server) notLeader() error {
	leader := s.leader()
	if leader == "" {
		refusal := rpc.Refuse(codes.Unavailable, reason.NotLeader, "no replica leads yet")
		refusal.RetryAfter = soon
		return refusal
	}
	refusal := rpc.Refuse(codes.Unavailable, reason.NotLeader, "replica %s leads", leader).With(metaLeader, leader)
	refusal.RetryAfter = soon
	return refusal
}

// codeOf is the code of a refusal because a node is blocked.
func codeOf(r reason.Reason) codes.Code {
	switch r {
	case reason.OutOfENIs, reason.MaxAllocate, reason.MaxPods, reason.SubnetFull, reason.SubnetFragmented:
		return codes.ResourceExhausted
	case reason.EC2Throttled, reason.EC2Unavailable, reason.NotReady, reason.NotLeader, reason.ReadingStale, reason.APIServerUnavailable, reason.ServiceAway:
		return codes.Unavailable
	default:
		return codes.FailedPrecondition
	}
}
