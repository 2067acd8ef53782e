package syncer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/eniplane/eniplane/internal/telemetry"
	"github.com/eniplane/eniplane/node-syncer/ciliumnode"
	"github.com/eniplane/eniplane/node-syncer/internal/kube"
)

// usageInterval is the least time between two writes of what a node uses, unless
// one is urgent.
const usageInterval = 5 * time.Second

// ErrStaleReport means: a newer report of the same node was taken before.
var ErrStaleReport = errors.New("a newer report was taken before")

// Usage writes what agents report to status.ipam.used: at once when a watermark
// is crossed, otherwise at most every five seconds a node. Only nodes that were
// registered are written.
type Usage struct {
	kube  objects
	store *Store
	log   *slog.Logger
	wake  chan struct{}

	mu    sync.Mutex // guards the fields below
	last  map[string]time.Time
	queue map[string]map[string]ciliumnode.Allocation
}

// NewUsage returns a writer of reports. Run makes it write what is not urgent.
func NewUsage(client objects, store *Store, log *slog.Logger) *Usage {
	return &Usage{
		kube: client, store: store, log: log, wake: make(chan struct{}, 1),
		last: make(map[string]time.Time), queue: make(map[string]map[string]ciliumnode.Allocation),
	}
}

// Report takes the whole set of addresses in use on a node. Those who watch
// demand see it at once; the object has it when Report returns if it is urgent,
// else a little later. Errors are ErrNotReady, ErrNodeUnknown, ErrStaleReport,
// and those of kube and ctx for an urgent one.
func (u *Usage) Report(ctx context.Context, name string, sequence uint64, used map[string]ciliumnode.Allocation, waiting uint32) error {
	got, err := u.store.report(name, sequence, used, waiting)
	if err != nil {
		return err
	}
	if usedEqual(got.object.Status.IPAM.Used, used) {
		return nil
	}
	u.mu.Lock()
	if !got.urgent && time.Since(u.last[name]) < usageInterval {
		u.queue[name] = used
		u.mu.Unlock()
		select {
		case u.wake <- struct{}{}:
		default:
		}
		return nil
	}
	delete(u.queue, name)
	u.last[name] = time.Now()
	u.mu.Unlock()
	return u.write(ctx, name, used)
}

func (u *Usage) write(ctx context.Context, name string, used map[string]ciliumnode.Allocation) error {
	have, err := u.store.object(name)
	fresh := false
	backoff := newBackoff()
	for {
		if err != nil {
			return err
		}
		want := have.DeepCopy()
		want.Status.IPAM.Used = used
		if _, err = u.kube.Patch(ctx, have, want, kube.StatusPart); !errors.Is(err, kube.ErrConflict) {
			return err
		}
		if fresh {
			if err := backoff.wait(ctx); err != nil {
				return fmt.Errorf("%w: %w", err, kube.ErrConflict)
			}
		}
		have, err = u.kube.CiliumNode(ctx, name)
		fresh = true
	}
}

// Run writes reports that were not urgent when they are due, until ctx ends.
func (u *Usage) Run(ctx context.Context) error {
	for {
		due, next := u.due(time.Now())
		for name, used := range due {
			bounded, cancel := context.WithTimeout(ctx, usageInterval)
			err := u.write(bounded, name, used)
			cancel()
			if err != nil && !errors.Is(err, ErrNodeUnknown) && !errors.Is(err, kube.ErrNotFound) && ctx.Err() == nil {
				u.log.WarnContext(ctx, "usage could not be written", telemetry.KeyNode, name, telemetry.KeyReason, ReasonOf(err).String(), telemetry.KeyError, err)
				u.mu.Lock()
				if _, newer := u.queue[name]; !newer {
					u.queue[name] = used
				}
				u.mu.Unlock()
			}
		}
		var timer <-chan time.Time
		if next > 0 {
			timer = time.After(next)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-u.wake:
		case <-timer:
		}
	}
}

// due takes what may be written now, and says when the next may.
func (u *Usage) due(now time.Time) (map[string]map[string]ciliumnode.Allocation, time.Duration) {
	u.mu.Lock()
	defer u.mu.Unlock()
	due, next := make(map[string]map[string]ciliumnode.Allocation), time.Duration(0)
	for name, used := range u.queue {
		wait := usageInterval - now.Sub(u.last[name])
		if wait <= 0 {
			due[name] = used
			u.last[name] = now
			delete(u.queue, name)
			continue
		}
		if next == 0 || wait < next {
			next = wait
		}
	}
	if len(u.queue) > 0 && next == 0 {
		next = usageInterval
	}
	return due, next
}
