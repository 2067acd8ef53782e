// Package syncertest is a node-syncer for tests of the allocator: it keeps the
// order of fences, refuses inconsistent snapshots, and shows in its demand what
// it stored, as the real one does.
package syncertest

import (
	"context"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/internal/pooldigest"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"
)

// Syncer is the fake.
type Syncer struct {
	nodev1.UnimplementedNodeSyncerServiceServer
	// Addr is where it serves.
	Addr string

	client nodev1.NodeSyncerServiceClient
	t      testing.TB

	mu        sync.Mutex // guards all that follows
	nodes     map[string]*nodev1.NodeDemand
	versions  map[string]int // of each node, also of those that are gone
	removed   map[string]*nodev1.NodeRemoval
	history   map[string][]*nodev1.PoolSnapshot
	version   int
	changed   chan struct{} // closed at the next change
	onPublish func(*nodev1.PoolSnapshot) error
}

// Start serves until the test ends.
func Start(t testing.TB) *Syncer {
	t.Helper()
	s := &Syncer{
		t: t, nodes: make(map[string]*nodev1.NodeDemand), versions: make(map[string]int), removed: make(map[string]*nodev1.NodeRemoval),
		history: make(map[string][]*nodev1.PoolSnapshot), changed: make(chan struct{}),
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s.Addr = listener.Addr().String()
	server := grpc.NewServer()
	nodev1.RegisterNodeSyncerServiceServer(server, s)
	done := make(chan error, 1)
	go func() { done <- server.Serve(listener) }()
	conn, err := grpc.NewClient("passthrough:///"+s.Addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	s.client = nodev1.NewNodeSyncerServiceClient(conn)
	t.Cleanup(func() {
		_ = conn.Close() // What was in flight is over.
		server.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return s
}

// Client returns a client of the fake.
func (s *Syncer) Client() nodev1.NodeSyncerServiceClient { return s.client }

// OnPublish has every snapshot that would be stored be shown to f first; its
// error is the answer, and nothing is stored. Nil ends that.
func (s *Syncer) OnPublish(f func(*nodev1.PoolSnapshot) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.onPublish = f
}

// Set makes a node need something. What was stored of it stays, unless the
// demand says otherwise.
func (s *Syncer) Set(demand *nodev1.NodeDemand) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := proto.CloneOf(demand)
	if old := s.nodes[d.GetNodeName()]; old != nil && d.Stored == nil {
		d.Stored = old.GetStored()
	}
	s.put(d)
}

// Edit changes a node that was set before.
func (s *Syncer) Edit(name string, f func(*nodev1.NodeDemand)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := proto.CloneOf(s.nodes[name])
	f(d)
	s.put(d)
}

// put stores a demand and tells it; the caller holds mu.
func (s *Syncer) put(d *nodev1.NodeDemand) {
	s.version++
	d.Revision = strconv.Itoa(s.version)
	s.nodes[d.GetNodeName()] = d
	s.versions[d.GetNodeName()] = s.version
	delete(s.removed, d.GetNodeName())
	s.tell()
}

func (s *Syncer) tell() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// Remove makes a node be gone.
func (s *Syncer) Remove(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := s.nodes[name]
	delete(s.nodes, name)
	s.version++
	s.versions[name] = s.version
	s.removed[name] = &nodev1.NodeRemoval{NodeName: name, Uid: d.GetUid(), InstanceId: d.GetInstanceId()}
	s.tell()
}

// Published returns the snapshot that is stored of a node; nil if none is.
func (s *Syncer) Published(name string) *nodev1.PoolSnapshot {
	history := s.History(name)
	if len(history) == 0 {
		return nil
	}
	return history[len(history)-1]
}

// History returns every snapshot that was stored of a node, in order.
func (s *Syncer) History(name string) []*nodev1.PoolSnapshot {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.history[name])
}

// WatchDemand sends a snapshot, then every change. It knows no revisions to
// resume from but its own last one.
func (s *Syncer) WatchDemand(req *nodev1.WatchDemandRequest, stream grpc.ServerStreamingServer[nodev1.WatchDemandResponse]) error {
	s.mu.Lock()
	seen, fresh := s.version, req.GetRevision() == ""
	if !fresh {
		at, err := strconv.Atoi(req.GetRevision())
		if err != nil || at > s.version {
			s.mu.Unlock()
			return rpc.Refuse(codes.OutOfRange, reason.RevisionUnknown, "revision %q is not known", req.GetRevision()).GRPCStatus().Err()
		}
		seen = at
	}
	events := make([]*nodev1.WatchDemandResponse, 0, len(s.nodes)+1)
	if fresh {
		for _, name := range slices.Sorted(maps.Keys(s.nodes)) {
			events = append(events, &nodev1.WatchDemandResponse{Event: &nodev1.WatchDemandResponse_Node{Node: s.nodes[name]}})
		}
		events = append(events, &nodev1.WatchDemandResponse{
			Event: &nodev1.WatchDemandResponse_SnapshotEnd{SnapshotEnd: &nodev1.SnapshotEnd{}}, Revision: strconv.Itoa(s.version),
		})
	}
	changed := s.changed
	s.mu.Unlock()
	for {
		for _, e := range events {
			if err := stream.Send(e); err != nil {
				return err
			}
		}
		if fresh || len(events) > 0 || seen == s.now() {
			select {
			case <-stream.Context().Done():
				return stream.Context().Err()
			case <-changed:
			}
		}
		fresh = false
		events, seen, changed = s.since(seen)
	}
}

func (s *Syncer) now() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.version
}

// since returns the changes after a version, in order.
func (s *Syncer) since(version int) ([]*nodev1.WatchDemandResponse, int, chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var names []string
	for name, v := range s.versions {
		if v > version {
			names = append(names, name)
		}
	}
	slices.SortFunc(names, func(a, b string) int { return s.versions[a] - s.versions[b] })
	var events []*nodev1.WatchDemandResponse
	for _, name := range names {
		e := &nodev1.WatchDemandResponse{Revision: strconv.Itoa(s.versions[name])}
		if gone := s.removed[name]; gone != nil {
			e.Event = &nodev1.WatchDemandResponse_Removed{Removed: gone}
		} else {
			e.Event = &nodev1.WatchDemandResponse_Node{Node: s.nodes[name]}
		}
		events = append(events, e)
	}
	return events, s.version, s.changed
}

// PublishPool stores a snapshot that is consistent and newer than the stored one.
func (s *Syncer) PublishPool(_ context.Context, req *nodev1.PublishPoolRequest) (*nodev1.PublishPoolResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	snapshot := req.GetSnapshot()
	d := s.nodes[snapshot.GetNodeName()]
	digest := pooldigest.Of(snapshot.GetEnis(), snapshot.GetPool())
	stored := d.GetStored()
	switch {
	case d == nil:
		return nil, refuse(codes.FailedPrecondition, reason.NodeUnknown, "node %q is not known", snapshot.GetNodeName())
	case d.GetInstanceId() != snapshot.GetInstanceId():
		return nil, refuse(codes.FailedPrecondition, reason.InstanceMismatch, "the node is %s, not %s", d.GetInstanceId(), snapshot.GetInstanceId())
	case snapshot.GetFence().GetEpoch() < stored.GetFence().GetEpoch():
		return nil, refuse(codes.FailedPrecondition, reason.StaleEpoch, "epoch %d is over", snapshot.GetFence().GetEpoch())
	case snapshot.GetFence().GetEpoch() == stored.GetFence().GetEpoch() && snapshot.GetFence().GetGeneration() < stored.GetFence().GetGeneration():
		return nil, refuse(codes.FailedPrecondition, reason.StaleGeneration, "generation %d is over", snapshot.GetFence().GetGeneration())
	}
	if err := consistent(snapshot); err != nil {
		s.t.Errorf("snapshot of %s: %v", snapshot.GetNodeName(), err) // No allocator may ever send such a one.
		return nil, err
	}
	if s.onPublish != nil {
		if err := s.onPublish(snapshot); err != nil {
			return nil, err
		}
	}
	if proto.Equal(stored.GetFence(), snapshot.GetFence()) && stored.GetDigest() == digest {
		return &nodev1.PublishPoolResponse{Revision: d.GetRevision()}, nil
	}
	s.history[d.GetNodeName()] = append(s.history[d.GetNodeName()], proto.CloneOf(snapshot))
	next := proto.CloneOf(d)
	next.Stored = &nodev1.StoredState{Fence: snapshot.GetFence(), Digest: digest}
	s.put(next)
	return &nodev1.PublishPoolResponse{Revision: next.GetRevision(), Writes: 1}, nil
}

// consistent checks what a snapshot must hold by itself (invariant I1).
func consistent(s *nodev1.PoolSnapshot) error {
	listed := make(map[string]bool)
	for _, e := range s.GetEnis() {
		subnet, err := netip.ParsePrefix(e.GetSubnet().GetCidr())
		if err != nil || e.GetVpc().GetPrimaryCidr() == "" || len(e.GetMac()) != 17 {
			return refuse(codes.InvalidArgument, reason.CIDRUnknown, "%s lacks something", e.GetId())
		}
		for _, a := range append([]string{e.GetIp()}, e.GetAddresses()...) {
			if ip, err := netip.ParseAddr(a); err != nil || !subnet.Contains(ip) {
				return refuse(codes.InvalidArgument, reason.AddressOutsideSubnet, "%s of %s is not in %s", a, e.GetId(), subnet)
			}
		}
		for _, a := range e.GetAddresses() {
			listed[e.GetId()+"/"+a] = true
		}
	}
	seen := make(map[string]bool)
	for _, p := range s.GetPool() {
		if !listed[p.GetEniId()+"/"+p.GetAddress()] || seen[p.GetAddress()] {
			return refuse(codes.InvalidArgument, reason.AddressNotOnENI, "%s is not on %s", p.GetAddress(), p.GetEniId())
		}
		seen[p.GetAddress()] = true
	}
	return nil
}

func refuse(code codes.Code, r reason.Reason, format string, args ...any) error {
	return rpc.Refuse(code, r, "%s", fmt.Sprintf(format, args...)).GRPCStatus().Err()
}
