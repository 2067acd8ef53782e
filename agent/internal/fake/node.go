package fake

import (
	"context"
	"fmt"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	eniv1 "github.com/eniplane/eniplane/gen/eniplane/eni/v1"
	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"
)

// Syncer is a node-syncer of one node.
type Syncer struct {
	nodev1.UnimplementedNodeSyncerServiceServer

	mu           sync.Mutex // guards what follows
	view         *nodev1.NodeView
	revision     int
	registration *nodev1.RegisterNodeRequest
	reports      []*nodev1.ReportUsageRequest
	changed      chan struct{}
	removed      bool
}

// NewSyncer returns a syncer that knows no node yet.
func NewSyncer() *Syncer {
	return &Syncer{view: &nodev1.NodeView{}, changed: make(chan struct{})}
}

// Register registers the service.
func (f *Syncer) Register(r grpc.ServiceRegistrar) { nodev1.RegisterNodeSyncerServiceServer(r, f) }

// SetView makes a view the present one, with a revision of its own.
func (f *Syncer) SetView(v *nodev1.NodeView) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.revision++
	f.view = proto.CloneOf(v)
	f.view.Revision = fmt.Sprint(f.revision)
	close(f.changed)
	f.changed = make(chan struct{})
}

// Remove ends every watch with the news that the node is gone, and forgets the
// registration.
func (f *Syncer) Remove() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.registration, f.removed = nil, true
	close(f.changed)
	f.changed = make(chan struct{})
}

// Registration returns the last registration; nil if there is none.
func (f *Syncer) Registration() *nodev1.RegisterNodeRequest {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.registration
}

// LastReport returns the last report; nil if there was none.
func (f *Syncer) LastReport() *nodev1.ReportUsageRequest {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.reports) == 0 {
		return nil
	}
	return f.reports[len(f.reports)-1]
}

// RegisterNode implements NodeSyncerService.
func (f *Syncer) RegisterNode(_ context.Context, r *nodev1.RegisterNodeRequest) (*nodev1.RegisterNodeResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.registration, f.removed = r, false
	return &nodev1.RegisterNodeResponse{View: proto.CloneOf(f.view)}, nil
}

// ReportUsage implements NodeSyncerService.
func (f *Syncer) ReportUsage(_ context.Context, r *nodev1.ReportUsageRequest) (*nodev1.ReportUsageResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.registration == nil {
		return nil, rpc.Refuse(codes.FailedPrecondition, reason.NodeUnknown, "no node %s", r.GetNodeName())
	}
	if n := len(f.reports); n > 0 && f.reports[n-1].GetSequence() >= r.GetSequence() {
		return nil, rpc.Refuse(codes.FailedPrecondition, reason.StaleGeneration, "sequence %d is not new", r.GetSequence())
	}
	f.reports = append(f.reports, r)
	return &nodev1.ReportUsageResponse{}, nil
}

// WatchNode implements NodeSyncerService.
func (f *Syncer) WatchNode(r *nodev1.WatchNodeRequest, stream grpc.ServerStreamingServer[nodev1.WatchNodeResponse]) error {
	last := r.GetRevision()
	for {
		f.mu.Lock()
		view, known, removed, changed := proto.CloneOf(f.view), f.registration != nil, f.removed, f.changed
		f.mu.Unlock()
		switch {
		case removed:
			return stream.Send(&nodev1.WatchNodeResponse{Removed: true})
		case !known:
			return rpc.Refuse(codes.FailedPrecondition, reason.NodeUnknown, "no node %s", r.GetNodeName())
		case view.GetRevision() != last:
			last = view.GetRevision()
			if err := stream.Send(&nodev1.WatchNodeResponse{View: view}); err != nil {
				return err
			}
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

// Allocator is an eni-allocator that does what its function says.
type Allocator struct {
	eniv1.UnimplementedEniAllocatorServiceServer

	mu     sync.Mutex // guards ensure
	ensure func(*eniv1.EnsureAddressesRequest) error
}

// NewAllocator returns an allocator that has no address to give.
func NewAllocator() *Allocator {
	f := &Allocator{}
	f.OnEnsure(func(*eniv1.EnsureAddressesRequest) error {
		return rpc.Refuse(codes.ResourceExhausted, reason.OutOfENIs, "3 of 3 interfaces are full")
	})
	return f
}

// Register registers the service.
func (f *Allocator) Register(r grpc.ServiceRegistrar) { eniv1.RegisterEniAllocatorServiceServer(r, f) }

// OnEnsure says what EnsureAddresses does.
func (f *Allocator) OnEnsure(ensure func(*eniv1.EnsureAddressesRequest) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ensure = ensure
}

// EnsureAddresses implements EniAllocatorService.
func (f *Allocator) EnsureAddresses(_ context.Context, r *eniv1.EnsureAddressesRequest) (*eniv1.EnsureAddressesResponse, error) {
	f.mu.Lock()
	ensure := f.ensure
	f.mu.Unlock()
	if err := ensure(r); err != nil {
		return nil, err
	}
	return &eniv1.EnsureAddressesResponse{}, nil
}
