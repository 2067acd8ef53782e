package syncer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strconv"
	"sync"
	"time"

	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/telemetry"
	"github.com/eniplane/eniplane/node-syncer/ciliumnode"
	"github.com/eniplane/eniplane/node-syncer/internal/kube"
	"github.com/eniplane/eniplane/node-syncer/internal/plan"
	"github.com/eniplane/eniplane/node-syncer/internal/view"
)

var (
	// ErrStaleEpoch means: the snapshot is of a write term that is over.
	ErrStaleEpoch = errors.New("the snapshot's epoch is over")
	// ErrStaleGeneration means: a newer snapshot is stored.
	ErrStaleGeneration = errors.New("a newer snapshot is stored")
	// ErrInstanceMismatch means: the node is another instance.
	ErrInstanceMismatch = errors.New("the node is another instance")
)

// Lease is where the allocator keeps its epoch.
type Lease struct {
	Namespace, Name, Annotation string
}

// objects is what Syncer needs of the API server.
type objects interface {
	CiliumNode(ctx context.Context, name string) (*ciliumnode.CiliumNode, error)
	Patch(ctx context.Context, have, want *ciliumnode.CiliumNode, part kube.Part) (*ciliumnode.CiliumNode, error)
	LeaseAnnotation(ctx context.Context, namespace, name, key string) (string, bool, error)
}

// Syncer brings CiliumNodes to what is published. Any number of them may work on
// the same objects: each write is conditional on the version it was planned for.
type Syncer struct {
	kube  objects
	store *Store
	lease Lease
	log   *slog.Logger

	mu      sync.Mutex // guards the fields below
	nodes   map[string]*progress
	sweepAt int // with how many of them those of unknown nodes are forgotten
}

// progress is what this replica did for one node.
type progress struct {
	turn  chan struct{} // holds one token: whoever has it writes
	users int           // who have or want the turn; guarded by Syncer.mu

	mu      sync.Mutex // guards the fields below
	wanted  plan.Fence
	pending int
	failure error
	failed  time.Time
	written time.Time
}

// NewSyncer returns a syncer that reads from store first and from the API server
// when that is behind.
func NewSyncer(client objects, store *Store, lease Lease, log *slog.Logger) *Syncer {
	return &Syncer{kube: client, store: store, lease: lease, log: log, nodes: make(map[string]*progress)}
}

// acquire returns the progress of a node and keeps it until release.
func (s *Syncer) acquire(name string) *progress {
	if s.crowded() {
		s.sweep(s.store.known())
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.nodes[name]
	if p == nil {
		p = &progress{turn: make(chan struct{}, 1)}
		s.nodes[name] = p
	}
	p.users++
	return p
}

func (s *Syncer) crowded() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.nodes) >= s.sweepAt
}

func (s *Syncer) release(p *progress) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p.users--
}

// sweep forgets nodes that are gone, or never were.
func (s *Syncer) sweep(known map[string]struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, p := range s.nodes {
		if _, ok := known[name]; !ok && p.users == 0 {
			delete(s.nodes, name)
		}
	}
	s.sweepAt = max(2*len(s.nodes), 64)
}

// accept takes the fence of a snapshot that may be written.
func (p *progress) accept(fence plan.Fence) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if fence.Compare(p.wanted) > 0 {
		p.wanted = fence
	}
}

// Progress is what this replica did for one node.
type Progress struct {
	// Wanted is the fence of the newest snapshot taken; zero means none.
	Wanted plan.Fence
	// PendingWrites are still to be made for it.
	PendingWrites int
	// Failure is why the last attempt failed, at FailedAt; nil means it did not.
	Failure  error
	FailedAt time.Time
	// WrittenAt is when the object was last written; zero means never.
	WrittenAt time.Time
}

// Progress returns what this replica did for a node.
func (s *Syncer) Progress(name string) Progress {
	s.mu.Lock()
	p := s.nodes[name]
	s.mu.Unlock()
	if p == nil {
		return Progress{}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return Progress{p.wanted, p.pending, p.failure, p.failed, p.written}
}

// Result is what Publish did.
type Result struct {
	// Revision is the resourceVersion after the last write.
	Revision string
	// Writes is how many were made.
	Writes int
}

// Publish brings the CiliumNode of a snapshot without flaws to it. A conflict
// means that somebody else wrote: the object is read and planned again, with
// backoff, until ctx ends. Errors are ErrNodeUnknown, ErrInstanceMismatch,
// ErrStaleEpoch, ErrStaleGeneration, those of kube, and that of ctx; nothing
// more is written after one.
func (s *Syncer) Publish(ctx context.Context, snapshot *nodev1.PoolSnapshot) (Result, error) {
	name := snapshot.GetNodeName()
	want := plan.Canonical(view.Wanted(snapshot))
	p := s.acquire(name)
	defer s.release(p)
	select {
	case p.turn <- struct{}{}:
		defer func() { <-p.turn }()
	case <-ctx.Done():
		return Result{}, fmt.Errorf("wait for the snapshot before: %w", ctx.Err())
	}
	result, err := s.publish(ctx, name, snapshot.GetInstanceId(), want, p)
	p.mu.Lock()
	p.failure = err
	if err != nil {
		p.failed = time.Now()
	} else {
		p.pending = 0
	}
	p.mu.Unlock()
	return result, err
}

func (s *Syncer) publish(ctx context.Context, name, instance string, want plan.Node, p *progress) (Result, error) {
	var result Result
	have, err := s.store.object(name)
	if err != nil && !errors.Is(err, ErrNodeUnknown) {
		return result, err
	}
	// An object that was just created may not be in the store yet, and one that
	// cannot be decoded is there by name only.
	fresh := err == nil && have.Annotations[view.MalformedAnnotation] == ""
	backoff := newBackoff()
	for {
		if !fresh {
			if have, err = s.kube.CiliumNode(ctx, name); err != nil {
				if errors.Is(err, kube.ErrNotFound) {
					err = fmt.Errorf("%w: %s", ErrNodeUnknown, name)
				}
				return result, err
			}
		}
		if err := s.admit(ctx, have, instance, want.Main.Fence); err != nil {
			if fresh && !errors.Is(err, kube.ErrUnavailable) {
				fresh = false // The store may be behind; only the object itself may refuse.
				continue
			}
			return result, err
		}
		p.accept(want.Main.Fence)
		stored, writes, err := s.execute(ctx, have, want, p)
		result.Writes += writes
		switch {
		case err == nil:
			result.Revision = stored.ResourceVersion
			return result, nil
		case !errors.Is(err, kube.ErrConflict):
			return result, err
		}
		// The first conflict usually means that the store was behind.
		if !fresh {
			if err := backoff.wait(ctx); err != nil {
				return result, fmt.Errorf("%w: %w", err, kube.ErrConflict)
			}
		}
		fresh = false
	}
}

// admit refuses what must not be written over have.
func (s *Syncer) admit(ctx context.Context, have *ciliumnode.CiliumNode, instance string, fence plan.Fence) error {
	if id := view.InstanceID(have); id != "" && id != instance {
		return fmt.Errorf("%w: %s is %s, the snapshot is of %s", ErrInstanceMismatch, have.Name, id, instance)
	}
	stored := view.Fence(have)
	if stored == (plan.Fence{}) {
		// A cilium-agent may have replaced the annotations: that is not epoch 0.
		return s.admitByLease(ctx, fence)
	}
	switch {
	case fence.Epoch < stored.Epoch:
		return fmt.Errorf("%w: stored %d, given %d", ErrStaleEpoch, stored.Epoch, fence.Epoch)
	case fence.Epoch == stored.Epoch && fence.Generation < stored.Generation:
		return fmt.Errorf("%w: stored %d, given %d", ErrStaleGeneration, stored.Generation, fence.Generation)
	}
	return nil
}

// admitByLease asks the allocator's Lease which epoch is in force. Without a
// Lease there never was another epoch.
func (s *Syncer) admitByLease(ctx context.Context, fence plan.Fence) error {
	text, ok, err := s.kube.LeaseAnnotation(ctx, s.lease.Namespace, s.lease.Name, s.lease.Annotation)
	if err != nil || !ok {
		return err
	}
	epoch, err := strconv.ParseUint(text, 10, 64)
	if err != nil || epoch != fence.Epoch {
		return fmt.Errorf("%w: the Lease says %q, given %d", ErrStaleEpoch, text, fence.Epoch)
	}
	return nil
}

// execute makes the planned writes in order and stops at the first error. Each
// is conditional on the version that the one before returned.
func (s *Syncer) execute(ctx context.Context, have *ciliumnode.CiliumNode, want plan.Node, p *progress) (*ciliumnode.CiliumNode, int, error) {
	planned := plan.Sync(view.Stored(have), want)
	p.mu.Lock()
	p.pending = len(planned)
	p.mu.Unlock()
	for i, w := range planned {
		part := kube.MainPart
		if _, ok := w.(plan.StatusWrite); ok {
			part = kube.StatusPart
		}
		stored, err := s.kube.Patch(ctx, have, view.Edit(have, w), part)
		if err != nil {
			return nil, i, err
		}
		have = stored
		s.store.wrote(stored)
		p.mu.Lock()
		p.pending, p.written = len(planned)-i-1, time.Now()
		p.mu.Unlock()
	}
	if len(planned) > 0 {
		s.log.InfoContext(ctx, "pool published", telemetry.KeyNode, have.Name, telemetry.KeyEpoch, want.Main.Fence.Epoch,
			telemetry.KeyGeneration, want.Main.Fence.Generation, "writes", len(planned), "enis", len(want.Status.ENIs), "pool", len(want.Main.Pool))
	}
	return have, len(planned), nil
}

// backoff grows from 5 ms to 100 ms, with jitter. It stays short: against somebody
// who writes all the time, only trying often wins.
type backoff struct{ next time.Duration }

func newBackoff() *backoff { return &backoff{5 * time.Millisecond} }

func (b *backoff) wait(ctx context.Context) error {
	d := b.next/2 + rand.N(b.next) //nolint:gosec // Jitter needs no secrecy.
	b.next = min(2*b.next, 100*time.Millisecond)
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

// ReasonOf returns the reason for which a node is not as published.
func ReasonOf(err error) reason.Reason {
	for _, r := range []struct {
		err    error
		reason reason.Reason
	}{
		{ErrStaleEpoch, reason.StaleEpoch},
		{ErrStaleGeneration, reason.StaleGeneration},
		{ErrInstanceMismatch, reason.InstanceMismatch},
		{ErrNodeUnknown, reason.NodeUnknown},
		{ErrNotReady, reason.NotReady},
		{kube.ErrConflict, reason.Conflict},
		{kube.ErrRefused, reason.APIServerRefused},
		{kube.ErrMalformed, reason.ObjectMalformed},
		{kube.ErrUnavailable, reason.APIServerUnavailable},
		{context.DeadlineExceeded, reason.APIServerUnavailable},
	} {
		if errors.Is(err, r.err) {
			return r.reason
		}
	}
	return reason.Internal
}
