package allocator

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/internal/pooldigest"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"
	"github.com/eniplane/eniplane/internal/telemetry"

	"github.com/eniplane/eniplane/eni-allocator/internal/plan"
	"github.com/eniplane/eniplane/eni-allocator/internal/wire"
)

const (
	// publishTimeout bounds one PublishPool.
	publishTimeout = 30 * time.Second
	// propagation is how long what was stored may take to show in the demand.
	propagation = 2 * time.Second
)

// snapshot is what is to be published of a node. It is never changed.
type snapshot struct {
	message *nodev1.PoolSnapshot
	digest  string
	reasons string // of its conditions, as one text
	pool    map[netip.Addr]bool
	span    trace.SpanContext // the work that led to it
}

func newSnapshot(name string, instance plan.InstanceID, pool wire.Pool, conditions []*nodev1.Condition, span trace.SpanContext) *snapshot {
	s := &snapshot{
		message: &nodev1.PoolSnapshot{NodeName: name, InstanceId: string(instance), Enis: pool.ENIs, Pool: pool.Addresses, Conditions: conditions},
		digest:  pooldigest.Of(pool.ENIs, pool.Addresses),
		pool:    make(map[netip.Addr]bool, len(pool.Addresses)),
		span:    span,
	}
	for _, a := range pool.Addresses {
		s.pool[netip.MustParseAddr(a.GetAddress())] = true
	}
	var reasons []string
	for _, c := range conditions {
		reasons = append(reasons, c.GetReason().String())
	}
	slices.Sort(reasons)
	s.reasons = fmt.Sprint(reasons)
	return s
}

// condition converts a block. A zero since means that it is not known.
func condition(b plan.Blocked, since time.Time) *nodev1.Condition {
	out := wire.Blocked(&b)
	if !since.IsZero() {
		out.Since = timestamppb.New(since)
	}
	return out
}

// fence is nil until the snapshot was given one.
func (s *snapshot) fence() *nodev1.Fence { return s.message.GetFence() }

// free counts the addresses of the snapshot that neither the demand nor a waiter
// says are in use.
func (s *snapshot) free(demand *nodev1.NodeDemand, w *waiter) int {
	used := make(map[netip.Addr]bool)
	for _, u := range demand.GetUsed() {
		if a, err := netip.ParseAddr(u.GetAddress()); err == nil && s.pool[a] {
			used[a] = true
		}
	}
	for _, a := range w.used {
		if s.pool[a] {
			used[a] = true
		}
	}
	return len(s.pool) - len(used)
}

// same tells whether two snapshots differ in nothing that is worth a write. The
// words of a condition are not: they hold numbers that change with every pod.
func (s *snapshot) same(other *snapshot) bool {
	return other != nil && s.digest == other.digest && s.reasons == other.reasons && s.message.GetInstanceId() == other.message.GetInstanceId()
}

// offer makes a snapshot the newest, which replaces one that was not sent yet,
// unless it says nothing new and what is stored is what should be. now is when
// that is decided; the answer is when to look again, zero if there is no need.
func (n *node) offer(s *snapshot, now time.Time) time.Time {
	n.mu.Lock()
	defer n.mu.Unlock()
	if s.same(n.wanted) {
		if n.sent != n.wanted {
			return time.Time{} // It is on its way.
		}
		if n.intact() {
			n.healing = 0
			return time.Time{}
		}
		if seen := n.sentAt.Add(propagation); now.Before(seen) {
			return seen // The demand may be from before the write.
		}
		// Somebody changed what is stored. It is corrected, less and less often if
		// that does not help.
		if next := n.healedAt.Add(min(time.Second<<min(n.healing, 10), 5*time.Minute)); n.healing > 0 && now.Before(next) {
			return next
		}
		n.healing++
		n.healedAt = now
	}
	generation := uint64(1)
	if n.wanted != nil {
		generation = n.wanted.fence().GetGeneration() + 1
	}
	// A snapshot of this epoch that this term does not remember is an earlier
	// one of it all the same.
	if f := n.demand.GetStored().GetFence(); f.GetEpoch() == n.term.Epoch {
		generation = max(generation, f.GetGeneration()+1)
	}
	s.message.Fence = &nodev1.Fence{Epoch: n.term.Epoch, Generation: generation}
	n.wanted = s
	nudge(n.send)
	return time.Time{}
}

// intact tells whether the object holds what was sent last, as far as the demand
// can tell: one that still shows an older fence was sent before the write.
func (n *node) intact() bool {
	stored := n.demand.GetStored()
	if stored.GetFence() == nil {
		return false
	}
	switch compareFences(stored.GetFence(), n.sent.fence()) {
	case 0:
		return stored.GetDigest() == n.sent.digest
	default:
		return true // Older: not seen yet. Newer: somebody else leads.
	}
}

func compareFences(a, b *nodev1.Fence) int {
	return cmp.Or(cmp.Compare(a.GetEpoch(), b.GetEpoch()), cmp.Compare(a.GetGeneration(), b.GetGeneration()))
}

// publish sends the newest snapshot whenever there is one, until ctx ends.
//
// An object whose epoch is higher than ours is this node's trouble only: if
// somebody else leads, the Lease says so, and else somebody edited it.
func (n *node) publish(ctx context.Context) error {
	failures := 0
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-n.send:
		}
		n.mu.Lock()
		s, again := n.wanted, n.again
		n.again = false
		idle := s == nil || (s == n.sent && !again)
		n.mu.Unlock()
		if idle {
			continue
		}
		err := n.push(ctx, s)
		if err == nil {
			failures = 0
			n.served()
			nudge(n.wake)
			continue
		}
		if ctx.Err() != nil {
			continue // It ends above.
		}
		why := rpc.ReasonOf(err)
		failures++
		wait := n.term.config.Backoff.after(failures)
		n.term.deps.Logger.WarnContext(ctx, "snapshot was not published", telemetry.KeyNode, n.name, telemetry.KeyReason, why.String(),
			telemetry.KeyError, err, "retry_in", wait.String())
		n.unpublished(s, again, why, err, wait)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		}
	}
}

// push sends one snapshot.
func (n *node) push(ctx context.Context, s *snapshot) error {
	if err := n.term.sending.Acquire(ctx, 1); err != nil {
		return err
	}
	defer n.term.sending.Release(1)
	ctx, cancel := context.WithTimeout(trace.ContextWithSpanContext(ctx, s.span), publishTimeout)
	defer cancel()
	_, err := n.term.deps.Syncer.PublishPool(ctx, &nodev1.PublishPoolRequest{Snapshot: s.message})
	n.term.metrics.published(err)
	if err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.sent == nil || compareFences(n.sent.fence(), s.fence()) < 0 {
		n.sent = s
	}
	n.sentAt, n.unsent = time.Now(), nil
	if n.wanted != s {
		nudge(n.send) // A newer one came while this one was on its way.
	}
	n.term.deps.Logger.DebugContext(ctx, "snapshot published", telemetry.KeyNode, n.name, telemetry.KeyEpoch, s.fence().GetEpoch(),
		telemetry.KeyGeneration, s.fence().GetGeneration(), "enis", len(s.message.GetEnis()), "pool", len(s.message.GetPool()))
	return nil
}

// unpublished decides what becomes of a snapshot that node-syncer did not take.
// again is whether it was to be sent even if it was sent already.
func (n *node) unpublished(s *snapshot, again bool, why reason.Reason, err error, wait time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch why {
	case reason.NodeUnknown, reason.InstanceMismatch:
		// The demand will say so, or that the node is gone.
		n.again, again = false, false
	case reason.StaleGeneration:
		// The object holds a later snapshot of this term than this process knows.
		if n.wanted == s {
			n.wanted = s.renumbered(2*s.fence().GetGeneration() + 1)
		}
	}
	n.again = n.again || again
	n.unsent = &trouble{
		Blocked: plan.Blocked{Reason: troubleOf(why, err), Message: fmt.Sprintf("the pool is not published: %v", err)},
		retryAt: time.Now().Add(wait),
	}
	nudge(n.send)
}

// renumbered is a copy with another generation.
func (s *snapshot) renumbered(generation uint64) *snapshot {
	out := *s
	out.message = &nodev1.PoolSnapshot{
		NodeName: s.message.GetNodeName(), InstanceId: s.message.GetInstanceId(), Enis: s.message.GetEnis(), Pool: s.message.GetPool(),
		Conditions: s.message.GetConditions(), Fence: &nodev1.Fence{Epoch: s.fence().GetEpoch(), Generation: generation},
	}
	return &out
}

// troubleOf gives every failure to publish a reason.
func troubleOf(why reason.Reason, err error) reason.Reason {
	switch {
	case why != reason.Unspecified:
		return why
	case status.Code(err) == codes.Unavailable || status.Code(err) == codes.DeadlineExceeded:
		return reason.ServiceAway
	}
	return reason.Internal
}

func isUnknownRevision(err error) bool {
	return status.Code(err) == codes.OutOfRange || rpc.ReasonOf(err) == reason.RevisionUnknown
}
