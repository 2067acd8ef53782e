package allocator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"
	"golang.org/x/sync/singleflight"

	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/internal/telemetry"

	"github.com/eniplane/eniplane/eni-allocator/internal/lease"
	"github.com/eniplane/eniplane/eni-allocator/internal/plan"
	"github.com/eniplane/eniplane/eni-allocator/internal/reading"
)

// term is everything that belongs to one time of leading.
type term struct {
	*Allocator
	lease.Term
	cache   *reading.Cache
	acting  *semaphore.Weighted
	sending *semaphore.Weighted
	flights singleflight.Group
	lastTry attempts
	over    chan struct{} // closed when the term ends
	synced  event         // the demand of all nodes was seen once
	ready   event         // and EC2 was read once after it
	group   *errgroup.Group
	mu      sync.Mutex // guards nodes and failure
	nodes   map[string]*node
	failure error // why EC2 was not read; nil once it was
}

// event happens once.
type event struct {
	once sync.Once
	done chan struct{}
}

func (e *event) happen() { e.once.Do(func() { close(e.done) }) }

func (e *event) happened() bool {
	select {
	case <-e.done:
		return true
	default:
		return false
	}
}

func newTerm(a *Allocator, leadership lease.Term) *term {
	return &term{
		Allocator: a, Term: leadership, cache: reading.New(),
		acting:  semaphore.NewWeighted(int64(a.config.Workers)),
		sending: semaphore.NewWeighted(int64(a.config.Workers)),
		over:    make(chan struct{}),
		synced:  event{done: make(chan struct{})},
		ready:   event{done: make(chan struct{})},
		nodes:   make(map[string]*node),
	}
}

func (t *term) isSynced() bool { return t.synced.happened() }
func (t *term) isReady() bool  { return t.ready.happened() }

func (t *term) run(ctx context.Context) error {
	defer close(t.over)
	group, ctx := errgroup.WithContext(ctx)
	t.group = group
	group.Go(func() error { return t.follow(ctx) })
	group.Go(func() error { return t.resync(ctx) })
	err := group.Wait()
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// upsert takes in what a node needs now.
func (t *term) upsert(ctx context.Context, demand *nodev1.NodeDemand) {
	t.mu.Lock()
	n, known := t.nodes[demand.GetNodeName()]
	if !known {
		n = newNode(t, demand.GetNodeName())
		t.nodes[n.name] = n
	}
	t.mu.Unlock()
	n.setDemand(demand)
	if known {
		return
	}
	work, stop := context.WithCancel(ctx)
	n.stop = stop
	t.group.Go(func() error {
		defer n.release()
		return n.work(work)
	})
	t.group.Go(func() error { return n.publish(work) })
}

// remove forgets a node whose object is gone, unless it has another one by now:
// a stream that is resumed may tell of a removal again. Without a UID any object
// is meant. Nothing of its instance is touched: that its object is gone does not
// say that its pods are.
func (t *term) remove(ctx context.Context, gone *nodev1.NodeRemoval) {
	n := t.node(gone.GetNodeName())
	if n == nil {
		return
	}
	if uid := n.currentDemand().GetUid(); gone.GetUid() != "" && uid != "" && gone.GetUid() != uid {
		return
	}
	t.mu.Lock()
	delete(t.nodes, n.name)
	t.mu.Unlock()
	t.deps.Logger.InfoContext(ctx, "node is gone", telemetry.KeyNode, n.name)
	n.stop()
}

// shared tells whether a node names an instance.
func (t *term) shared(id plan.InstanceID) bool {
	return slices.ContainsFunc(t.all(), func(n *node) bool { return plan.InstanceID(n.currentDemand().GetInstanceId()) == id })
}

// node returns a node by name, or nil.
func (t *term) node(name string) *node {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.nodes[name]
}

// all returns the nodes, sorted by name.
func (t *term) all() []*node {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := make([]*node, 0, len(t.nodes))
	for _, n := range t.nodes {
		out = append(out, n)
	}
	slices.SortFunc(out, func(a, b *node) int { return cmp.Compare(a.name, b.name) })
	return out
}

// follow keeps the demand of all nodes up to date until ctx ends.
func (t *term) follow(ctx context.Context) error {
	revision := ""
	for failures := 1; ; failures++ {
		began := time.Now()
		next, err := t.followOnce(ctx, revision)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if next != revision || time.Since(began) > time.Minute {
			failures = 1 // It worked for a while.
		}
		revision = next
		wait := t.config.Backoff.after(min(failures, 5))
		t.deps.Logger.WarnContext(ctx, "stream of demand ended", telemetry.KeyError, err, "retry_in", wait.String())
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
		}
	}
}

// followOnce follows one stream, and returns the revision to resume from.
func (t *term) followOnce(ctx context.Context, revision string) (string, error) {
	stream, err := t.deps.Syncer.WatchDemand(ctx, &nodev1.WatchDemandRequest{Revision: revision})
	if err != nil {
		return revision, err
	}
	// A stream without a revision begins with a snapshot.
	var seen map[string]bool
	if revision == "" {
		seen = make(map[string]bool)
	}
	for {
		event, err := stream.Recv()
		if isUnknownRevision(err) {
			return "", err
		}
		if err != nil {
			return revision, err
		}
		switch e := event.GetEvent().(type) {
		case *nodev1.WatchDemandResponse_Node:
			if seen != nil {
				seen[e.Node.GetNodeName()] = true
			}
			t.upsert(ctx, e.Node)
		case *nodev1.WatchDemandResponse_Removed:
			t.remove(ctx, e.Removed)
		case *nodev1.WatchDemandResponse_SnapshotEnd:
			for _, n := range t.all() {
				if seen != nil && !seen[n.name] {
					t.remove(ctx, &nodev1.NodeRemoval{NodeName: n.name})
				}
			}
			seen = nil
			t.synced.happen()
		default:
			// A newer node-syncer may tell more than is understood here.
			t.deps.Logger.DebugContext(ctx, "event of node-syncer is not known", "type", fmt.Sprintf("%T", e))
		}
		if r := event.GetRevision(); r != "" {
			revision = r
		}
	}
}
