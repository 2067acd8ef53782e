// Package restore ends the holding of what the map had before the agent
// restarted, when its time has come and whoever still wants something of it has
// said so. Reading and holding it is ordinary work of others.
package restore

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/eniplane/eniplane/agent/internal/ipcache"
	"github.com/eniplane/eniplane/agent/internal/retry"
	"github.com/eniplane/eniplane/agent/internal/wish"
)

// Owner returns the owner of what the map of a node held before a restart. It is
// the same for every restart in one boot of the machine: the map does not outlive
// the boot.
func Owner(nodeName, bootID string) ipcache.Owner {
	return ipcache.Owner{Kind: ipcache.KindRestore, Name: nodeName, UID: bootID}
}

// Restore is the end of one restore.
type Restore struct {
	wish     *wish.Wish
	owner    ipcache.Owner
	deadline time.Time
	logger   *slog.Logger
	over     atomic.Bool
}

// New returns the end of a restore that may come at the deadline. restored says
// whether there is anything to end.
func New(w *wish.Wish, owner ipcache.Owner, restored bool, deadline time.Time, logger *slog.Logger) *Restore {
	r := &Restore{wish: w, owner: owner, deadline: deadline, logger: logger}
	r.over.Store(!restored)
	return r
}

// Deadline returns when the restored entries are given up, at the earliest. It
// reports false if they were, or if there were none.
func (r *Restore) Deadline() (time.Time, bool) { return r.deadline, !r.over.Load() }

// Run waits until everything is listed and committed, ends owners of before the
// restart that nobody has any more, and, not before the deadline, the restore.
func (r *Restore) Run(ctx context.Context) error {
	if !r.settled(ctx) {
		return nil
	}
	r.wish.DropStale()
	if r.over.Load() || !retry.Sleep(ctx, time.Until(r.deadline)) {
		return nil
	}
	// It may be unsettled again by now: a set that waits for its numbers must find
	// the old ones held.
	if !r.settled(ctx) {
		return nil
	}
	r.wish.Remove(r.owner, trace.SpanContext{})
	r.over.Store(true)
	r.logger.InfoContext(ctx, "restored entries given up")
	return nil
}

func (r *Restore) settled(ctx context.Context) bool {
	for {
		progress := r.wish.Progress()
		if r.wish.Settled() {
			return true
		}
		select {
		case <-progress:
		case <-ctx.Done():
			return false
		}
	}
}
