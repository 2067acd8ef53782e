package allocator

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/trace/noop"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"

	"github.com/eniplane/eniplane/eni-allocator/internal/lease"
	"github.com/eniplane/eniplane/eni-allocator/internal/plan"
	"github.com/eniplane/eniplane/eni-allocator/internal/reading"
	"github.com/eniplane/eniplane/eni-allocator/internal/wire"
)

// scripted is a node-syncer that sends given events and counts publications.
type scripted struct {
	nodev1.NodeSyncerServiceClient
	events    []*nodev1.WatchDemandResponse
	published int
	refuse    int // how many publications fail
}

type stream struct {
	grpc.ServerStreamingClient[nodev1.WatchDemandResponse]
	events []*nodev1.WatchDemandResponse
}

func (s *stream) Recv() (*nodev1.WatchDemandResponse, error) {
	if len(s.events) == 0 {
		return nil, io.EOF
	}
	e := s.events[0]
	s.events = s.events[1:]
	return e, nil
}

func (s *scripted) WatchDemand(context.Context, *nodev1.WatchDemandRequest, ...grpc.CallOption) (grpc.ServerStreamingClient[nodev1.WatchDemandResponse], error) {
	return &stream{events: s.events}, nil
}

func (s *scripted) PublishPool(context.Context, *nodev1.PublishPoolRequest, ...grpc.CallOption) (*nodev1.PublishPoolResponse, error) {
	s.published++
	if s.refuse > 0 {
		s.refuse--
		return nil, status.Error(codes.Unavailable, "away")
	}
	return &nodev1.PublishPoolResponse{}, nil
}

func bareTerm(t *testing.T, s *scripted) *term {
	t.Helper()
	a, err := New(Config{}, Deps{Syncer: s, Logger: slog.New(slog.DiscardHandler), Tracer: noop.NewTracerProvider().Tracer("")})
	if err != nil {
		t.Fatal(err)
	}
	tm := newTerm(a, lease.NewTerm(1000, nil))
	tm.group = &errgroup.Group{}
	return tm
}

func nodeEvent(name, uid, revision string) *nodev1.WatchDemandResponse {
	return &nodev1.WatchDemandResponse{Revision: revision, Event: &nodev1.WatchDemandResponse_Node{Node: &nodev1.NodeDemand{NodeName: name, Uid: uid, InstanceId: "i-" + name}}}
}

func goneEvent(name, uid, revision string) *nodev1.WatchDemandResponse {
	return &nodev1.WatchDemandResponse{Revision: revision, Event: &nodev1.WatchDemandResponse_Removed{Removed: &nodev1.NodeRemoval{NodeName: name, Uid: uid}}}
}

func TestRemovalOfAnEarlierObjectIsIgnored(t *testing.T) {
	for _, tt := range []struct {
		name  string
		uid   string
		stays bool
	}{{"an earlier one", "old", true}, {"this one", "new", false}, {"it is not said which", "", false}} {
		t.Run(tt.name, func(t *testing.T) {
			tm := bareTerm(t, &scripted{events: []*nodev1.WatchDemandResponse{nodeEvent("n", "new", "1"), goneEvent("n", tt.uid, "2")}})
			ctx, cancel := context.WithCancel(t.Context())
			_, _ = tm.followOnce(ctx, "0")
			if got := tm.node("n") != nil; got != tt.stays {
				t.Errorf("the node is there: %t, want %t", got, tt.stays)
			}
			cancel()
			_ = tm.group.Wait()
		})
	}
}

func TestEventOfANewerSyncerIsPassedOver(t *testing.T) {
	tm := bareTerm(t, &scripted{events: []*nodev1.WatchDemandResponse{{Revision: "1"}, nodeEvent("n", "u", "2")}})
	ctx, cancel := context.WithCancel(t.Context())
	if next, _ := tm.followOnce(ctx, "0"); next != "2" || tm.node("n") == nil {
		t.Errorf("followed up to %q only", next)
	}
	cancel()
	_ = tm.group.Wait()
}

func TestNodeWithoutInstanceDoesNotSpin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tm := bareTerm(t, &scripted{})
		n := newNode(tm, "n")
		n.setDemand(&nodev1.NodeDemand{NodeName: "n", Uid: "u"})
		for i := range 5 {
			next := n.round(t.Context())
			if !next.After(time.Now()) {
				t.Fatalf("round %d: look again at %v, and it is %v", i, next, time.Now())
			}
			time.Sleep(time.Until(next))
		}
	})
}

func TestAttemptsAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var a attempts
		for i := range 10_000 {
			_ = a.try(fmt.Sprint(i), time.Minute, Backoff{}.withDefaults(), func() error { return nil })
			time.Sleep(time.Second)
		}
		if len(a.last) > 200 {
			t.Errorf("%d are remembered of one minute at one a second", len(a.last))
		}
	})
}

func TestRepeatedPublicationThatFailsIsRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &scripted{}
		tm := bareTerm(t, s)
		n := newNode(tm, "n")
		n.setDemand(&nodev1.NodeDemand{NodeName: "n", Uid: "u", InstanceId: "i-n"})
		n.offer(newSnapshot("n", "i-n", wire.Pool{}, nil, noop.Span{}.SpanContext()), time.Now())
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- n.publish(ctx) }()
		synctest.Wait()
		s.refuse = 1
		n.mu.Lock()
		n.again = true
		n.mu.Unlock()
		nudge(n.send)
		time.Sleep(time.Minute)
		synctest.Wait()
		if s.published != 3 || n.unsent != nil {
			t.Errorf("%d publications, want 3; trouble %v", s.published, n.unsent)
		}
		cancel()
		<-done
	})
}

func TestOneNodeGoneLeavesTheOtherOfItsInstance(t *testing.T) {
	tm := bareTerm(t, &scripted{})
	for _, name := range []string{"a", "b"} {
		n := newNode(tm, name)
		n.setDemand(&nodev1.NodeDemand{NodeName: name, Uid: name, InstanceId: "i-1"})
		n.stop = func() {}
		tm.nodes[name] = n
	}
	now := time.Now()
	tm.cache.FoldInstances(now, []plan.Instance{{ID: "i-1", VPC: "v", State: plan.InstanceRunning}}, nil)
	tm.cache.FoldENIs(now, nil, reading.Scope{Instance: "i-1"})
	a := tm.node("a")
	tm.remove(t.Context(), goneEvent("a", "a", "").GetRemoved())
	a.release()
	if _, known := tm.cache.Reading("i-1"); !known {
		t.Error("the instance of b was forgotten with a")
	}
}
