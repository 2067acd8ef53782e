package allocator

import (
	"context"
	"net/netip"
	"slices"
	"sync"
	"time"

	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/internal/reason"

	"github.com/eniplane/eniplane/eni-allocator/internal/plan"
	"github.com/eniplane/eniplane/eni-allocator/internal/wire"
)

// node is one node: a worker that plans and acts, one thing after the other, and
// a publisher that sends the newest snapshot.
type node struct {
	term *term
	name string
	stop context.CancelFunc // ends worker and publisher
	gone chan struct{}      // closed when the worker has ended
	wake chan struct{}      // holds a token if the worker has something to look at
	send chan struct{}      // holds a token if the publisher has
	// decided is private to the worker.
	decided decisions

	mu       sync.Mutex // guards all that follows
	demand   *nodev1.NodeDemand
	waiters  []*waiter
	reread   bool      // the worker shall read the instance before it plans
	again    bool      // the publisher shall send even what was sent already
	latest   Status    // as of the last plan
	wanted   *snapshot // the newest; nil if there is none yet
	sent     *snapshot // the newest that node-syncer has stored
	sentAt   time.Time
	undone   *trouble // why the worker could not do its last plan
	unsent   *trouble // why the publisher could not send its last snapshot
	healing  int      // how often in a row what is stored had to be corrected
	healedAt time.Time
}

// trouble is something that is tried again.
type trouble struct {
	plan.Blocked
	retryAt time.Time
}

// Status is what is known of a node.
type Status struct {
	// Wire is the demand as node-syncer sent it, and Demand as planned with.
	Wire   *nodev1.NodeDemand
	Demand plan.Demand
	// Reading is what the plan rests on, and ReadAt when it began. A zero ReadAt
	// means that the instance was not read yet.
	Reading plan.Reading
	ReadAt  time.Time
	// ENIs are all that EC2 showed of the instance, sorted by id, those that are
	// not published too.
	ENIs []*nodev1.Eni
	// Plan is the last one made.
	Plan plan.Plan
	// Conditions are what hinders the node.
	Conditions []*nodev1.Condition
	// Published is the fence of the last snapshot that is stored; nil if none is.
	Published *nodev1.Fence
}

func newNode(t *term, name string) *node {
	return &node{
		term: t, name: name, gone: make(chan struct{}), wake: make(chan struct{}, 1), send: make(chan struct{}, 1),
		decided: newDecisions(),
	}
}

// nudge puts a token into a channel that can hold one.
func nudge(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

func (n *node) setDemand(d *nodev1.NodeDemand) {
	n.mu.Lock()
	n.demand = d
	n.mu.Unlock()
	nudge(n.wake)
}

func (n *node) currentDemand() *nodev1.NodeDemand {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.demand
}

// resynced tells the node that everything was read, or that it failed.
func (n *node) resynced(ok bool) {
	if ok {
		// What one reading contradicts, or does not show, is read by name.
		id := plan.InstanceID(n.currentDemand().GetInstanceId())
		_, known := n.term.cache.Reading(id)
		doubtful := !known || n.term.cache.Doubtful(id) || time.Since(n.term.cache.ReadAt(id)) > n.term.config.ResyncInterval/2
		n.mu.Lock()
		n.again = true
		n.reread = n.reread || doubtful
		n.mu.Unlock()
		nudge(n.send)
	}
	nudge(n.wake)
}

// status returns the node as it is now.
func (n *node) status() Status {
	n.term.mu.Lock()
	failure := n.term.failure
	n.term.mu.Unlock()
	n.mu.Lock()
	defer n.mu.Unlock()
	s := n.latest
	s.Wire = n.demand
	if s.ReadAt.IsZero() {
		s.Demand = wire.Demand(n.demand)
		switch {
		case len(s.Conditions) > 0:
		case n.undone != nil:
			s.Conditions = []*nodev1.Condition{condition(n.undone.Blocked, time.Time{})}
		case failure != nil:
			s.Conditions = []*nodev1.Condition{condition(plan.Blocked{Reason: causeOf(failure), Message: failure.Error()}, time.Time{})}
		default:
			s.Conditions = []*nodev1.Condition{condition(plan.Blocked{Reason: reason.NotReady, Message: "the instance was not read from EC2 yet"}, time.Time{})}
		}
	}
	if n.sent != nil {
		s.Published = n.sent.fence()
	}
	return s
}

// release lets go of everybody who waits for the node, once its worker ended.
func (n *node) release() {
	n.mu.Lock()
	waiters := n.waiters
	n.waiters = nil
	id := plan.InstanceID(n.demand.GetInstanceId())
	n.mu.Unlock()
	if !n.term.shared(id) {
		n.term.cache.Forget(id)
	}
	for _, w := range waiters {
		w.answer(answer{err: n.farewell()})
	}
	close(n.gone)
}

// farewell says why the node is no longer worked on.
func (n *node) farewell() error {
	if n.term.node(n.name) == n {
		return ErrNotLeader
	}
	return ErrNodeUnknown
}

// task is what a worker has to do in one round.
type task struct {
	reported *nodev1.NodeDemand
	need     plan.Demand
	asking   []*waiter
	stale    bool // the instance is to be read first
}

// take returns what there is to do. Urgent demand is part of it.
func (n *node) take() task {
	n.mu.Lock()
	defer n.mu.Unlock()
	out := task{reported: n.demand, need: wire.Demand(n.demand), asking: slices.Clone(n.waiters), stale: n.reread}
	n.reread = false
	used := make(map[netip.Addr]bool, len(out.need.Used))
	for _, a := range out.need.Used {
		used[a] = true
	}
	for _, w := range n.waiters {
		out.need.Urgent = max(out.need.Urgent, w.free)
		for _, a := range w.used {
			if !used[a] {
				used[a] = true
				out.need.Used = append(out.need.Used, a)
			}
		}
	}
	return out
}

// conditionsOf joins everything that hinders a node, each reason once, and keeps
// since when.
func (n *node) conditionsOf(blocks []plan.Blocked, now time.Time) []*nodev1.Condition {
	const most = 16 // that a snapshot may have
	since := make(map[reason.Reason]time.Time, len(blocks))
	var out []*nodev1.Condition
	for _, b := range blocks {
		if _, twice := since[b.Reason]; twice || len(out) == most {
			continue
		}
		at, known := n.decided.since[b.Reason]
		if !known {
			at = now
		}
		since[b.Reason] = at
		out = append(out, condition(b, at))
	}
	n.decided.since = since
	return out
}
