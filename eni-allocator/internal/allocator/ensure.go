package allocator

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"go.opentelemetry.io/otel/trace"

	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/internal/reason"

	"github.com/eniplane/eniplane/eni-allocator/internal/plan"
)

// Ensured is what a node has after urgent demand was met.
type Ensured struct {
	// Free are the addresses that are published and not in use.
	Free int
	// Fence is that of the snapshot that shows them.
	Fence *nodev1.Fence
}

// waiter is somebody who waits for free addresses.
type waiter struct {
	free   int
	used   []netip.Addr
	span   trace.SpanContext
	answer func(answer) // does not block; only the first counts
}

type answer struct {
	ensured Ensured
	err     error
}

// margin is how long before its deadline an urgent demand is answered, so that
// the answer still arrives.
const margin = 100 * time.Millisecond

// Ensure asks that a node has at least so many addresses free, now. used are
// those in use as the caller knows them; none means as last reported. It returns
// when they are published, or a *BlockedError when they cannot be had, or when
// ctx is about to end: then with the trouble that there was, if any.
func (a *Allocator) Ensure(ctx context.Context, name string, free int, used []netip.Addr) (Ensured, error) {
	t := a.term.Load()
	if t == nil {
		return Ensured{}, ErrNotLeader
	}
	n := t.node(name)
	switch {
	case n == nil && !t.isSynced():
		return Ensured{}, ErrNotReady
	case n == nil:
		return Ensured{}, ErrNodeUnknown
	}

	answers := make(chan answer, 1)
	w := &waiter{free: free, used: used, span: trace.SpanContextFromContext(ctx), answer: func(r answer) {
		select {
		case answers <- r:
		default:
		}
	}}
	if done, ok := n.wait(w); ok {
		return done, nil
	}
	defer n.forget(w)
	nudge(n.wake)

	var late <-chan time.Time
	if deadline, ok := ctx.Deadline(); ok {
		timer := time.NewTimer(time.Until(deadline) - margin)
		defer timer.Stop()
		late = timer.C
	}
	select {
	case r := <-answers:
		return r.ensured, r.err
	case <-n.gone:
		return Ensured{}, n.farewell()
	case <-t.over:
		return Ensured{}, ErrNotLeader
	case <-late:
		return Ensured{}, n.excuse()
	case <-ctx.Done():
		return Ensured{}, ctx.Err()
	}
}

// wait registers a waiter, unless what it wants is there already.
func (n *node) wait(w *waiter) (Ensured, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.sent != nil {
		if free := n.sent.free(n.demand, w); free >= w.free {
			return Ensured{Free: free, Fence: n.sent.fence()}, true
		}
	}
	n.waiters = append(n.waiters, w)
	return Ensured{}, false
}

func (n *node) forget(w *waiter) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.waiters = slices.DeleteFunc(n.waiters, func(x *waiter) bool { return x == w })
}

// excuse says why a demand was not met in time.
func (n *node) excuse() error {
	n.term.mu.Lock()
	failure := n.term.failure
	n.term.mu.Unlock()
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, t := range []*trouble{n.undone, n.unsent} {
		if t != nil {
			return &BlockedError{Blocked: t.Blocked, RetryAfter: max(time.Until(t.retryAt), margin)}
		}
	}
	switch {
	case failure != nil:
		return &BlockedError{Blocked: plan.Blocked{Reason: causeOf(failure), Message: failure.Error()}, RetryAfter: time.Second}
	case !n.term.isReady():
		return ErrNotReady
	}
	return &BlockedError{
		Blocked:    plan.Blocked{Reason: reason.ReadingStale, Message: "the addresses were not published in time"},
		RetryAfter: time.Second,
	}
}

// served answers the waiters that the snapshot now stored satisfies.
func (n *node) served() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.sent == nil {
		return
	}
	n.waiters = slices.DeleteFunc(n.waiters, func(w *waiter) bool {
		free := n.sent.free(n.demand, w)
		if free < w.free {
			return false
		}
		w.answer(answer{ensured: Ensured{Free: free, Fence: n.sent.fence()}})
		return true
	})
}

// refuse answers those waiters of a round whom the newest snapshot will not
// satisfy once it is stored.
func (n *node) refuse(waiters []*waiter, why plan.Blocked, retry time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, w := range waiters {
		free := 0
		if n.wanted != nil {
			free = n.wanted.free(n.demand, w)
		}
		if free < w.free {
			w.answer(answer{err: &BlockedError{Blocked: why, RetryAfter: retry, Free: free}})
		}
	}
}
