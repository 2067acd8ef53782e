package allocator_test

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/internal/pooldigest"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"
)

// syncer behaves as node-syncer does towards the allocator: it streams demand,
// stores snapshots in the order of their fences, refuses inconsistent ones, and
// shows what it stored in the demand.
type syncer struct {
	nodev1.UnimplementedNodeSyncerServiceServer

	mu       sync.Mutex // guards what follows
	nodes    map[string]*nodev1.NodeDemand
	log      []*nodev1.WatchDemandResponse
	news     chan struct{} // closed and replaced when log grows
	stored   map[string]*nodev1.PoolSnapshot
	accepted int
	problems []string
	// refuse, unless nil, is asked before a snapshot is taken.
	refuse func(*nodev1.PoolSnapshot) error
}

func startSyncer(t *testing.T) (*syncer, string) {
	t.Helper()
	s := &syncer{nodes: make(map[string]*nodev1.NodeDemand), stored: make(map[string]*nodev1.PoolSnapshot), news: make(chan struct{})}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	nodev1.RegisterNodeSyncerServiceServer(server, s)
	done := make(chan error, 1)
	go func() { done <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
		for _, p := range s.problems {
			t.Error(p)
		}
	})
	return s, listener.Addr().String()
}

// set makes a node's demand what edit makes of it.
func (s *syncer) set(name string, edit func(*nodev1.NodeDemand)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := &nodev1.NodeDemand{NodeName: name}
	if old := s.nodes[name]; old != nil {
		d = proto.CloneOf(old)
	}
	edit(d)
	s.nodes[name] = d
	s.append(&nodev1.WatchDemandResponse{Event: &nodev1.WatchDemandResponse_Node{Node: d}})
}

func (s *syncer) remove(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.nodes, name)
	s.append(&nodev1.WatchDemandResponse{Event: &nodev1.WatchDemandResponse_Removed{Removed: &nodev1.NodeRemoval{NodeName: name}}})
}

func (s *syncer) append(e *nodev1.WatchDemandResponse) {
	s.log = append(s.log, e)
	e.Revision = strconv.Itoa(len(s.log))
	close(s.news)
	s.news = make(chan struct{})
}

// WatchDemand sends a snapshot, then what follows; or what follows a revision.
func (s *syncer) WatchDemand(req *nodev1.WatchDemandRequest, stream grpc.ServerStreamingServer[nodev1.WatchDemandResponse]) error {
	s.mu.Lock()
	next := len(s.log)
	var first []*nodev1.WatchDemandResponse
	if r := req.GetRevision(); r != "" {
		n, err := strconv.Atoi(r)
		if err != nil || n > len(s.log) {
			s.mu.Unlock()
			return rpc.Refuse(codes.OutOfRange, reason.RevisionUnknown, "no revision %q", r)
		}
		next = n
	} else {
		for _, d := range s.nodes {
			first = append(first, &nodev1.WatchDemandResponse{Event: &nodev1.WatchDemandResponse_Node{Node: d}})
		}
		first = append(first, &nodev1.WatchDemandResponse{
			Event: &nodev1.WatchDemandResponse_SnapshotEnd{SnapshotEnd: &nodev1.SnapshotEnd{}}, Revision: strconv.Itoa(next),
		})
	}
	s.mu.Unlock()
	for {
		for _, e := range first {
			if err := stream.Send(e); err != nil {
				return err
			}
		}
		s.mu.Lock()
		first, next = s.log[next:], len(s.log)
		news := s.news
		s.mu.Unlock()
		if len(first) > 0 {
			continue
		}
		select {
		case <-news:
		case <-stream.Context().Done():
			return nil
		}
	}
}

// PublishPool stores a snapshot.
func (s *syncer) PublishPool(_ context.Context, req *nodev1.PublishPoolRequest) (*nodev1.PublishPoolResponse, error) {
	snap := req.GetSnapshot()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.refuse != nil {
		if err := s.refuse(snap); err != nil {
			return nil, err
		}
	}
	if flaw := inconsistent(snap); flaw != "" {
		s.problems = append(s.problems, flaw)
		return nil, rpc.InvalidField("snapshot", reason.FieldInvalid, "%s", flaw)
	}
	d := s.nodes[snap.GetNodeName()]
	if d == nil {
		return nil, rpc.Refuse(codes.FailedPrecondition, reason.NodeUnknown, "no node %s", snap.GetNodeName())
	}
	if have := s.stored[snap.GetNodeName()]; have != nil {
		f, g := have.GetFence(), snap.GetFence()
		switch {
		case g.GetEpoch() < f.GetEpoch():
			return nil, rpc.Refuse(codes.FailedPrecondition, reason.StaleEpoch, "epoch %d after %d", g.GetEpoch(), f.GetEpoch())
		case g.GetEpoch() == f.GetEpoch() && g.GetGeneration() < f.GetGeneration():
			return nil, rpc.Refuse(codes.FailedPrecondition, reason.StaleGeneration, "generation %d after %d", g.GetGeneration(), f.GetGeneration())
		case proto.Equal(f, g):
			return &nodev1.PublishPoolResponse{}, nil
		}
	}
	s.accepted++
	s.stored[snap.GetNodeName()] = proto.CloneOf(snap)
	d = proto.CloneOf(d)
	d.Stored = &nodev1.StoredState{Fence: snap.GetFence(), Digest: pooldigest.Of(snap.GetEnis(), snap.GetPool())}
	s.nodes[snap.GetNodeName()] = d
	s.append(&nodev1.WatchDemandResponse{Event: &nodev1.WatchDemandResponse_Node{Node: d}})
	return &nodev1.PublishPoolResponse{Writes: 2}, nil
}

// published returns the snapshot stored for a node, or an empty one.
func (s *syncer) published(name string) *nodev1.PoolSnapshot {
	s.mu.Lock()
	defer s.mu.Unlock()
	if snap := s.stored[name]; snap != nil {
		return proto.CloneOf(snap)
	}
	return &nodev1.PoolSnapshot{}
}

// pool returns the addresses published for a node.
func (s *syncer) pool(name string) []string {
	var out []string
	for _, p := range s.published(name).GetPool() {
		out = append(out, p.GetAddress())
	}
	return out
}

// use says that the first n published addresses of a node are in use.
func (s *syncer) use(name string, n int) {
	pool := s.pool(name)
	s.set(name, func(d *nodev1.NodeDemand) {
		d.Used = nil
		for i, a := range pool[:n] {
			d.Used = append(d.Used, &nodev1.UsedAddress{Address: a, Owner: fmt.Sprintf("default/pod-%d", i)})
		}
	})
}

// inconsistent says how a snapshot breaks invariant I1; "" if it does not.
func inconsistent(s *nodev1.PoolSnapshot) string {
	if s.GetFence().GetEpoch() == 0 || s.GetFence().GetGeneration() == 0 || s.GetInstanceId() == "" {
		return "no fence or no instance"
	}
	listed := make(map[string][]string)
	for _, e := range s.GetEnis() {
		subnet, err := netip.ParsePrefix(e.GetSubnet().GetCidr())
		if err != nil {
			return fmt.Sprintf("%s: subnet CIDR %q", e.GetId(), e.GetSubnet().GetCidr())
		}
		if _, err := netip.ParsePrefix(e.GetVpc().GetPrimaryCidr()); err != nil {
			return fmt.Sprintf("%s: VPC CIDR %q", e.GetId(), e.GetVpc().GetPrimaryCidr())
		}
		for _, a := range append([]string{e.GetIp()}, e.GetAddresses()...) {
			if ip, err := netip.ParseAddr(a); err != nil || !subnet.Contains(ip) {
				return fmt.Sprintf("%s: %s is not in %s", e.GetId(), a, subnet)
			}
		}
		listed[e.GetId()] = e.GetAddresses()
	}
	for _, p := range s.GetPool() {
		if !slices.Contains(listed[p.GetEniId()], p.GetAddress()) {
			return fmt.Sprintf("%s is not on %s", p.GetAddress(), p.GetEniId())
		}
	}
	return ""
}
