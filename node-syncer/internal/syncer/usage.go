package syncer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/eniplane/eniplane/internal/telemetry"
	"github.com/eniplane/eniplane/node-syncer/ciliumnode"
	"github.com/eniplane/eniplane/node-syncer/internal/kube"
	"github.com/eniplane/eniplane/node-syncer/internal/view"
)

const (
	// usageInterval is the least time between two writes of what a node uses,
	// unless one is urgent.
	usageInterval = 5 * time.Second
	// usageWriters bounds how many nodes are written at once.
	usageWriters = 16
	// lastMoment is how long the reports that are left may take after a stop.
	lastMoment = 2 * time.Second
)

// Usage writes what agents report to status.ipam.used: at once when a watermark
// is crossed, otherwise at most every five seconds a node. Only nodes that were
// registered are written.
type Usage struct {
	kube  objects
	store *Store
	log   *slog.Logger
	wake  chan struct{}

	mu  sync.Mutex           // guards due
	due map[string]time.Time // when what a node reported is to be written
}

// NewUsage returns a writer of reports. Run makes it write what is not urgent.
func NewUsage(client objects, store *Store, log *slog.Logger) *Usage {
	return &Usage{kube: client, store: store, log: log, wake: make(chan struct{}, 1), due: make(map[string]time.Time)}
}

// Report takes the whole set of addresses in use on a node. Those who watch
// demand see it at once; the object has it when Report returns if a watermark
// was crossed or none was written for a while, else a little later. Errors are
// ErrNotReady, ErrNodeUnknown, ErrStaleReport, and, where it is written at once,
// those of kube and ctx.
func (u *Usage) Report(ctx context.Context, name string, sequence uint64, addresses map[string]ciliumnode.Allocation, waiting uint32) error {
	now := time.Now()
	due, err := u.store.report(name, sequence, addresses, waiting, now)
	if err != nil {
		return err
	}
	if due.After(now) {
		u.schedule(name, due)
		return nil
	}
	if err := u.flush(ctx, name); err != nil {
		u.schedule(name, now.Add(usageInterval))
		return err
	}
	return nil
}

func (u *Usage) schedule(name string, due time.Time) {
	u.mu.Lock()
	u.due[name] = due
	u.mu.Unlock()
	select {
	case u.wake <- struct{}{}:
	default: // Run is awake already and will find it.
	}
}

// flush stores what a node's agent reported last. One flush of a node works at
// a time, and each attempt takes the newest report, so that an older one never
// lands on a newer.
func (u *Usage) flush(ctx context.Context, name string) error {
	turn := u.store.turn(name)
	select {
	case turn <- struct{}{}:
		defer func() { <-turn }()
	case <-ctx.Done():
		return fmt.Errorf("wait for the report before: %w", ctx.Err())
	}
	have, now, err := u.store.reported(name)
	for backoff := newBackoff(); ; {
		if err != nil || now == nil {
			return err
		}
		if maps.Equal(have.Status.IPAM.Used, now) {
			u.store.settled(name, now)
			return nil
		}
		want := have.DeepCopy()
		want.Status.IPAM.Used = now
		stored, failed := u.kube.Patch(ctx, have, want, kube.StatusPart)
		if failed == nil {
			u.store.wrote(stored)
			u.store.settled(name, now)
			return nil
		}
		if !errors.Is(failed, kube.ErrConflict) {
			return failed
		}
		if err := backoff.wait(ctx); err != nil {
			return fmt.Errorf("%w: %w", err, failed)
		}
		var known *ciliumnode.CiliumNode
		if known, now, err = u.store.reported(name); err != nil {
			return err
		}
		have, err = u.kube.CiliumNode(ctx, name)
		if err == nil && (have.UID != known.UID || !view.Registered(have)) {
			return fmt.Errorf("%w: %s is no longer what was reported on", ErrNodeUnknown, name)
		}
	}
}

// Run writes reports that were not urgent when they are due, until ctx ends. Then
// it writes what is left, as far as that is done in a moment, and returns nil.
// Nodes do not wait for each other.
func (u *Usage) Run(ctx context.Context) error {
	var writers errgroup.Group
	writers.SetLimit(usageWriters)
	for {
		names, next := u.take(time.Now())
		for _, name := range names {
			writers.Go(func() error {
				u.background(ctx, name)
				return nil
			})
		}
		var timer <-chan time.Time
		if !next.IsZero() {
			timer = time.After(time.Until(next))
		}
		select {
		case <-ctx.Done():
			return errors.Join(writers.Wait(), u.finish(ctx))
		case <-u.wake:
		case <-timer:
		}
	}
}

// finish writes all that is not written yet: it was taken from agents, and
// nobody else knows it.
func (u *Usage) finish(ctx context.Context) error {
	bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastMoment)
	defer cancel()
	var writers errgroup.Group
	writers.SetLimit(usageWriters)
	u.mu.Lock()
	names := slices.Sorted(maps.Keys(u.due))
	clear(u.due)
	u.mu.Unlock()
	for _, name := range names {
		writers.Go(func() error {
			u.background(bounded, name)
			return nil
		})
	}
	return writers.Wait()
}

func (u *Usage) background(ctx context.Context, name string) {
	u.store.flushes(name, time.Now())
	bounded, cancel := context.WithTimeout(ctx, usageInterval)
	defer cancel()
	err := u.flush(bounded, name)
	switch {
	case err == nil, errors.Is(err, ErrNodeUnknown), errors.Is(err, kube.ErrNotFound):
		return
	case errors.Is(ctx.Err(), context.Canceled):
		u.schedule(name, time.Now()) // The program stops: see finish.
		return
	}
	u.log.WarnContext(ctx, "usage could not be written", telemetry.KeyNode, name, telemetry.KeyReason, ReasonOf(err).String(), telemetry.KeyError, err)
	u.schedule(name, time.Now().Add(usageInterval))
}

// take returns the nodes to write now, and when the next one is due; zero if
// none is.
func (u *Usage) take(now time.Time) ([]string, time.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	var names []string
	var next time.Time
	for name, due := range u.due {
		if !due.After(now) {
			names = append(names, name)
			delete(u.due, name)
		} else if next.IsZero() || due.Before(next) {
			next = due
		}
	}
	return names, next
}
