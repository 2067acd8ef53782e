package holdings

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/eniplane/eniplane/agent/internal/retry"
	"github.com/eniplane/eniplane/agent/internal/wish"
	identityv1 "github.com/eniplane/eniplane/gen/eniplane/identity/v1"
	"github.com/eniplane/eniplane/internal/prefix"
	"github.com/eniplane/eniplane/internal/telemetry"
)

// maxFailures is how many failures one acknowledgement may name.
const maxFailures = 10000

// eventBuffer is how many events may wait while the map is written.
const eventBuffer = 64

// watched is what the ledger has for this node, as the watch shows it.
type watched struct {
	revision int64
	held     map[netip.Prefix]uint32
	pending  map[netip.Prefix]uint32 // of a snapshot that is not complete yet
}

// watch follows what the ledger has for this node and acknowledges what the map
// has of it, until the session is lost or ctx ends.
func (c *Client) watch(ctx context.Context, s session) error {
	pause := time.Duration(0)
	for retry.Sleep(ctx, pause) {
		progress, err := c.stream(ctx, s)
		if ctx.Err() != nil {
			break
		}
		if lost(err) {
			return fmt.Errorf("%w: %w", errSessionLost, err)
		}
		c.away(ctx, err)
		if progress {
			pause = 0
		}
		pause = retry.Next(pause, err)
	}
	return ctx.Err()
}

// stream runs one stream and reports whether anything came.
func (c *Client) stream(ctx context.Context, s session) (bool, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	g, ctx := errgroup.WithContext(ctx)
	stream, err := c.Client.Watch(ctx)
	if err != nil {
		return false, fmt.Errorf("watch: %w", err)
	}
	if c.watched.revision != c.acknowledged.Load() {
		c.watched = watched{} // the last events were not acknowledged: see all again
	}
	err = stream.Send(&identityv1.WatchRequest{Message: &identityv1.WatchRequest_Open{Open: &identityv1.WatchOpen{
		Session: s.proto, Scope: identityv1.WatchScope_WATCH_SCOPE_SESSION,
		ResumeRevision: c.watched.revision, LedgerId: c.ledger,
	}}})
	if err != nil && !errors.Is(err, io.EOF) { // then Recv tells the cause
		return false, fmt.Errorf("open the watch: %w", err)
	}
	events := make(chan *identityv1.WatchResponse, eventBuffer)
	g.Go(func() error {
		defer close(events)
		for {
			event, err := stream.Recv()
			if err != nil {
				return fmt.Errorf("watch: %w", err)
			}
			select {
			case events <- event:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	})
	progress := false
	g.Go(func() error {
		for event := range events {
			progress = true
			c.there(ctx)
			batch := []*identityv1.WatchResponse{event}
			for len(events) > 0 {
				if more, ok := <-events; ok {
					batch = append(batch, more)
				}
			}
			ack, err := c.follow(ctx, batch)
			if err != nil {
				return err
			}
			if ack.GetRevision() == 0 {
				continue
			}
			if err := stream.Send(&identityv1.WatchRequest{Message: &identityv1.WatchRequest_Ack{Ack: ack}}); err != nil && !errors.Is(err, io.EOF) {
				return fmt.Errorf("acknowledge: %w", err)
			}
		}
		return nil
	})
	err = g.Wait()
	c.watched.pending = nil
	return progress, err
}

// follow applies events and returns the acknowledgement when the map has, or has
// not, followed. Its revision is 0 if there is nothing to acknowledge.
func (c *Client) follow(ctx context.Context, events []*identityv1.WatchResponse) (*identityv1.WatchAck, error) {
	w := &c.watched
	touched := make(map[netip.Prefix]uint32)
	whole := false // whether a snapshot was completed
	var gone []netip.Prefix
	before := w.revision
	for _, event := range events {
		switch m := event.GetMessage().(type) {
		case *identityv1.WatchResponse_SnapshotPiece:
			if w.pending == nil {
				w.pending = make(map[netip.Prefix]uint32)
			}
			for _, n := range c.parse(ctx, m.SnapshotPiece.GetPrefixes()) {
				w.pending[n.Prefix] = n.Number
			}
		case *identityv1.WatchResponse_SnapshotDone:
			w.held, w.pending, w.revision, whole = w.pending, nil, m.SnapshotDone.GetRevision(), true
			if w.held == nil {
				w.held = make(map[netip.Prefix]uint32)
			}
			numbers := make([]wish.Wanted, 0, len(w.held))
			for p, n := range w.held {
				numbers = append(numbers, wish.Wanted{Prefix: p, Number: n})
			}
			c.Wish.Learn(numbers, w.revision)
		case *identityv1.WatchResponse_Delta:
			w.revision = m.Delta.GetRevision()
			if w.held == nil { // resumed
				w.held = make(map[netip.Prefix]uint32)
			}
			upserts := c.parse(ctx, m.Delta.GetUpserts())
			for _, n := range upserts {
				w.held[n.Prefix] = n.Number
				touched[n.Prefix] = n.Number
			}
			c.Wish.Learn(upserts, w.revision)
			for _, n := range c.parse(ctx, m.Delta.GetRemovals()) {
				delete(w.held, n.Prefix)
				touched[n.Prefix] = 0
				gone = append(gone, n.Prefix)
			}
		}
	}
	if w.revision == before && !whole {
		return &identityv1.WatchAck{}, nil
	}
	if whole {
		gone = c.Wish.Unheld(func(p netip.Prefix) bool { _, ok := w.held[p]; return ok })
	}
	c.Wish.Lost(gone)
	if err := c.Map.Sync(ctx); err != nil {
		return nil, err
	}
	if whole {
		touched = w.held
	}
	ack := &identityv1.WatchAck{Revision: w.revision}
	failures := c.Map.Failures(touched, whole)
	for _, p := range slices.SortedFunc(maps.Keys(failures), prefix.Compare) {
		if len(ack.Failures) == maxFailures {
			break // the rest comes when these are mended
		}
		ack.Failures = append(ack.Failures, &identityv1.ProgramFailure{Prefix: p.String(), Reason: wireReason(failures[p])})
	}
	if len(ack.GetFailures()) > 0 {
		c.Logger.WarnContext(ctx, "revision not programmed in full", telemetry.KeyRevision, ack.GetRevision(), "failures", len(ack.GetFailures()))
	}
	c.acknowledged.Store(w.revision)
	return ack, nil
}

// parse returns prefixes with their numbers. What can not be parsed is left out:
// no ledger of ours sends it.
func (c *Client) parse(ctx context.Context, in []*identityv1.PrefixNumber) []wish.Wanted {
	out := make([]wish.Wanted, 0, len(in))
	for _, n := range in {
		p, err := prefix.Parse(n.GetPrefix())
		if err != nil {
			c.Logger.ErrorContext(ctx, "the ledger sent no prefix", telemetry.KeyError, err.Error())
			continue
		}
		out = append(out, wish.Wanted{Prefix: p, Number: n.GetNumber()})
	}
	return out
}
