// Package server is NodeSyncerService over gRPC: it checks requests, converts
// them and maps errors. Decisions belong to plan, work to syncer.
package server

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
	"k8s.io/apimachinery/pkg/util/validation"

	reasonv1 "github.com/eniplane/eniplane/gen/eniplane/reason/v1"

	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"
	"github.com/eniplane/eniplane/node-syncer/ciliumnode"
	"github.com/eniplane/eniplane/node-syncer/internal/kube"
	"github.com/eniplane/eniplane/node-syncer/internal/plan"
	"github.com/eniplane/eniplane/node-syncer/internal/syncer"
	"github.com/eniplane/eniplane/node-syncer/internal/view"
)

// table says how each error leaves the service.
func table() rpc.Table {
	return rpc.Table{
		{Err: syncer.ErrNotReady, Code: codes.Unavailable, Reason: reason.NotReady, RetryAfter: time.Second},
		{Err: syncer.ErrNodeUnknown, Code: codes.FailedPrecondition, Reason: reason.NodeUnknown},
		{Err: syncer.ErrInstanceMismatch, Code: codes.FailedPrecondition, Reason: reason.InstanceMismatch},
		{Err: syncer.ErrStaleEpoch, Code: codes.FailedPrecondition, Reason: reason.StaleEpoch},
		{Err: syncer.ErrStaleGeneration, Code: codes.FailedPrecondition, Reason: reason.StaleGeneration},
		{Err: syncer.ErrStaleReport, Code: codes.FailedPrecondition, Reason: reason.StaleGeneration},
		{Err: syncer.ErrRevisionUnknown, Code: codes.OutOfRange, Reason: reason.RevisionUnknown},
		{Err: kube.ErrConflict, Code: codes.Aborted, Reason: reason.Conflict},
		{Err: kube.ErrNotFound, Code: codes.FailedPrecondition, Reason: reason.NodeUnknown},
		{Err: kube.ErrRefused, Code: codes.FailedPrecondition, Reason: reason.APIServerRefused},
		{Err: kube.ErrMalformed, Code: codes.FailedPrecondition, Reason: reason.ObjectMalformed},
		{Err: kube.ErrUnavailable, Code: codes.Unavailable, Reason: reason.APIServerUnavailable, RetryAfter: time.Second},
	}
}

// statusOf maps an error of the core; a conflict that lasted until the deadline
// is a conflict, not a deadline.
func statusOf(err error) error {
	if errors.Is(err, kube.ErrConflict) {
		return &rpc.Error{Code: codes.Aborted, Reason: reason.Conflict, Message: err.Error()}
	}
	return table().Status(err)
}

// Server serves NodeSyncerService.
type Server struct {
	nodev1.UnimplementedNodeSyncerServiceServer
	kube   *kube.Client
	store  *syncer.Store
	syncer *syncer.Syncer
	usage  *syncer.Usage
	// patience is how long a stream's reader may take for one message.
	patience time.Duration
}

// New returns a server over the given parts.
func New(client *kube.Client, store *syncer.Store, sync *syncer.Syncer, usage *syncer.Usage) *Server {
	return &Server{kube: client, store: store, syncer: sync, usage: usage, patience: 30 * time.Second}
}

// checkName refuses what cannot be the name of a Node, before it becomes part of
// a path.
func checkName(field, name string) error {
	if flaws := validation.IsDNS1123Subdomain(name); len(flaws) > 0 {
		return rpc.InvalidField(field, reason.FieldInvalid, "%q: %s", name, flaws[0])
	}
	return nil
}

// RegisterNode creates or updates the CiliumNode of a node.
func (s *Server) RegisterNode(ctx context.Context, req *nodev1.RegisterNodeRequest) (*nodev1.RegisterNodeResponse, error) {
	if err := checkName("node_name", req.GetNodeName()); err != nil {
		return nil, err
	}
	stored, err := s.syncer.Register(ctx, s.kube, req)
	if err != nil {
		return nil, statusOf(err)
	}
	return &nodev1.RegisterNodeResponse{View: view.Agent(stored)}, nil
}

// ReportUsage takes what a node uses.
func (s *Server) ReportUsage(ctx context.Context, req *nodev1.ReportUsageRequest) (*nodev1.ReportUsageResponse, error) {
	used := make(map[string]ciliumnode.Allocation, len(req.GetUsed()))
	for i, u := range req.GetUsed() {
		if _, twice := used[u.GetAddress()]; twice {
			return nil, rpc.InvalidField(fmt.Sprintf("used[%d].address", i), reason.Duplicate, "%s appears twice", u.GetAddress())
		}
		used[u.GetAddress()] = ciliumnode.Allocation{Owner: u.GetOwner(), Resource: u.GetEniId()}
	}
	if err := s.usage.Report(ctx, req.GetNodeName(), req.GetSequence(), used, req.GetWaiting()); err != nil {
		return nil, statusOf(err)
	}
	// Addresses are not released yet, so no answer has a mark to belong to.
	resp := &nodev1.ReportUsageResponse{}
	for _, a := range req.GetReleaseAnswers() {
		resp.Refused = append(resp.Refused, &nodev1.RefusedAnswer{Address: a.GetAddress(), Reason: reasonv1.Reason_REASON_STALE_ROUND})
	}
	return resp, nil
}

// PublishPool brings a CiliumNode to a snapshot.
func (s *Server) PublishPool(ctx context.Context, req *nodev1.PublishPoolRequest) (*nodev1.PublishPoolResponse, error) {
	if err := checkName("snapshot.node_name", req.GetSnapshot().GetNodeName()); err != nil {
		return nil, err
	}
	if flaw := view.Check(req.GetSnapshot()); flaw != nil {
		return nil, rpc.InvalidField(flaw.Field, flaw.Reason, "%s", flaw.Text)
	}
	result, err := s.syncer.Publish(ctx, req.GetSnapshot())
	if err != nil {
		return nil, statusOf(err)
	}
	return &nodev1.PublishPoolResponse{Revision: result.Revision, Writes: uint32(max(result.Writes, 0))}, nil //nolint:gosec // Counts up from 0.
}

// catchUp is how long a replica that is behind the view that an agent has does
// not show it an older one.
const catchUp = 5 * time.Second

// WatchNode streams the views of one node.
func (s *Server) WatchNode(req *nodev1.WatchNodeRequest, stream grpc.ServerStreamingServer[nodev1.WatchNodeResponse]) error {
	watch, err := s.store.WatchNode(req.GetNodeName())
	if err != nil {
		return statusOf(err)
	}
	defer watch.Stop()
	shown := req.GetRevision()
	behind := time.NewTimer(catchUp)
	defer behind.Stop()
	waited, registered := false, false
	for {
		select {
		case <-stream.Context().Done():
			return statusOf(stream.Context().Err())
		case <-watch.Changed():
		case <-behind.C:
			waited = true
		}
		object, gone := watch.Next()
		if gone {
			return send(stream, &nodev1.WatchNodeResponse{Removed: true}, s.patience)
		}
		if registered && !view.Registered(object) {
			// Somebody replaced the annotations. Reports are refused until the agent
			// registers again, and this makes it do so.
			return rpc.Refuse(codes.FailedPrecondition, reason.NodeUnknown, "%s is no longer registered", object.Name)
		}
		registered = view.Registered(object)
		if object.ResourceVersion == shown {
			continue
		}
		// Another replica may have shown what this one has yet to learn. It is not
		// waited for forever: a restored cluster counts from an older version on.
		if !waited && syncer.OlderRevision(object.ResourceVersion, shown) {
			continue
		}
		shown = object.ResourceVersion
		if err := send(stream, &nodev1.WatchNodeResponse{View: view.Agent(object)}, s.patience); err != nil {
			return err
		}
	}
}

// WatchDemand streams what every node needs.
func (s *Server) WatchDemand(req *nodev1.WatchDemandRequest, stream grpc.ServerStreamingServer[nodev1.WatchDemandResponse]) error {
	watch, err := s.store.WatchDemand(req.GetRevision())
	if err != nil {
		return statusOf(err)
	}
	defer watch.Stop()
	snapshot := req.GetRevision() == ""
	for {
		select {
		case <-stream.Context().Done():
			return statusOf(stream.Context().Err())
		case <-watch.Changed():
		}
		update, err := watch.Next()
		if err != nil {
			return statusOf(err)
		}
		var events []*nodev1.WatchDemandResponse
		if !snapshot { // Who starts from nothing has nothing to remove.
			for _, r := range update.Removed {
				events = append(events, &nodev1.WatchDemandResponse{Event: &nodev1.WatchDemandResponse_Removed{Removed: r}})
			}
		}
		for _, n := range update.Nodes {
			events = append(events, &nodev1.WatchDemandResponse{Event: &nodev1.WatchDemandResponse_Node{Node: n}})
		}
		if snapshot {
			events = append(events, &nodev1.WatchDemandResponse{Event: &nodev1.WatchDemandResponse_SnapshotEnd{SnapshotEnd: &nodev1.SnapshotEnd{}}})
			snapshot = false
		}
		if len(events) > 0 {
			events[len(events)-1].Revision = update.Revision // All before it are seen then.
		}
		for _, e := range events {
			if err := send(stream, e, s.patience); err != nil {
				return err
			}
		}
	}
}

// send gives up on a reader that does not take a message in time, so that a
// stream never holds its memory for long.
func send[T any](stream grpc.ServerStreamingServer[T], m *T, patience time.Duration) error {
	sent := make(chan error, 1)
	go func() { sent <- stream.Send(m) }() // Ends when the stream does: see below.
	t := time.NewTimer(patience)
	defer t.Stop()
	select {
	case err := <-sent:
		return err
	case <-stream.Context().Done():
		return statusOf(stream.Context().Err()) // A stop does not wait for a reader.
	case <-t.C:
		return rpc.Refuse(codes.ResourceExhausted, reason.SlowReader, "the reader took nothing for %v", patience)
	}
}

// GetNode returns one node.
func (s *Server) GetNode(_ context.Context, req *nodev1.GetNodeRequest) (*nodev1.GetNodeResponse, error) {
	node, err := s.node(req.GetNodeName())
	if errors.Is(err, syncer.ErrNodeUnknown) {
		return nil, rpc.Refuse(codes.NotFound, reason.NodeUnknown, "there is no node %s", req.GetNodeName())
	}
	if err != nil {
		return nil, statusOf(err)
	}
	return &nodev1.GetNodeResponse{Node: node}, nil
}

func (s *Server) node(name string) (*nodev1.NodeStatus, error) {
	agent, demand, err := s.store.Views(name)
	if err != nil {
		return nil, err
	}
	p := s.syncer.Progress(name)
	out := &nodev1.NodeStatus{View: agent, Demand: demand, PendingWrites: uint32(max(p.PendingWrites, 0))} //nolint:gosec // At most four.
	if p.Wanted != (plan.Fence{}) {
		out.Wanted = &nodev1.Fence{Epoch: p.Wanted.Epoch, Generation: p.Wanted.Generation}
	}
	if p.Failure != nil {
		out.LastError = &nodev1.Condition{Reason: reasonv1.Reason(syncer.ReasonOf(p.Failure)), Message: p.Failure.Error(), Since: timestamppb.New(p.FailedAt)}
	}
	if !p.WrittenAt.IsZero() {
		out.WrittenAt = timestamppb.New(p.WrittenAt)
	}
	return out, nil
}

const defaultPage = 100

// maxPageBytes ends a page before it has as many nodes as were asked for: gRPC
// would refuse to send it.
const maxPageBytes = 8 << 20

// ListNodes returns a page of nodes, fewer than asked for if they are large. The
// key of a page is the name of its last node.
func (s *Server) ListNodes(_ context.Context, req *nodev1.ListNodesRequest) (*nodev1.ListNodesResponse, error) {
	names, err := s.store.Nodes()
	if err != nil {
		return nil, statusOf(err)
	}
	list := "nodes " + req.GetReason().String()
	after, err := rpc.ParsePageToken(list, req.GetPageToken())
	if err != nil {
		return nil, err
	}
	size := int(req.GetPageSize())
	if size == 0 {
		size = defaultPage
	}
	resp, bytes := &nodev1.ListNodesResponse{}, 0
	for _, name := range names {
		if name <= after {
			continue
		}
		node, err := s.node(name)
		if errors.Is(err, syncer.ErrNodeUnknown) {
			continue // Gone since it was listed.
		}
		if err != nil {
			return nil, statusOf(err)
		}
		if !matches(node, req.GetReason()) {
			continue
		}
		bytes += proto.Size(node)
		if n := len(resp.Nodes); n == size || n > 0 && bytes > maxPageBytes {
			resp.NextPageToken = rpc.PageToken(list, resp.Nodes[n-1].GetView().GetNodeName())
			return resp, nil
		}
		resp.Nodes = append(resp.Nodes, node)
	}
	return resp, nil
}

func matches(n *nodev1.NodeStatus, r reasonv1.Reason) bool {
	if r == reasonv1.Reason_REASON_UNSPECIFIED || n.GetLastError().GetReason() == r {
		return true
	}
	for _, c := range n.GetView().GetConditions() {
		if c.GetReason() == r {
			return true
		}
	}
	return false
}
