package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc/codes"

	identityv1 "github.com/eniplane/eniplane/gen/eniplane/identity/v1"
	"github.com/eniplane/eniplane/identity-service/internal/index"
	"github.com/eniplane/eniplane/identity-service/internal/ledger"
	"github.com/eniplane/eniplane/internal/prefix"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"
	"github.com/eniplane/eniplane/internal/telemetry"
)

const (
	// pieceSize is how many prefixes are in one piece of a snapshot.
	pieceSize = 5000
	// maxDelta is how many prefixes one delta names; a bigger change is sent as a
	// snapshot, so that no message outgrows what clients take.
	maxDelta = 100000
)

type watchStream = identityv1.IdentityService_WatchServer

// watch is one stream. Nothing is buffered for it: it reads the index's history
// at its own pace, and is cut when what it needs next is forgotten.
type watch struct {
	server *Server
	stream watchStream
	ledger string
	scope  ledger.SessionID
	id     ledger.SessionID // empty for an operator
	epoch  ledger.Epoch

	mu     sync.Mutex // guards cursor
	cursor index.Cursor

	sent atomic.Int64 // the last revision that was sent
}

// Watch implements IdentityService.
func (s *Server) Watch(stream watchStream) error {
	first, err := stream.Recv()
	if err != nil {
		return s.status(err)
	}
	open := first.GetOpen()
	if open == nil {
		return rpc.InvalidField("open", reason.FieldInvalid, "the first message must open the watch")
	}
	w := &watch{server: s, stream: stream}
	ctx := stream.Context()
	if session := open.GetSession(); session != nil {
		w.id, w.epoch = ledger.SessionID(session.GetId()), ledger.Epoch(session.GetEpoch())
		if err := s.keeper.Check(ctx, w.id, w.epoch); err != nil {
			return s.status(err)
		}
	} else if err := s.current(ctx); err != nil {
		return err
	}
	if open.GetScope() == identityv1.WatchScope_WATCH_SCOPE_SESSION {
		if w.id == "" {
			return rpc.InvalidField("open.session", reason.FieldInvalid, "the scope of a session needs a session")
		}
		w.scope = w.id
	}
	return w.serve(ctx, open)
}

// serve runs the two directions and returns as soon as one of them knows why the
// stream must end. A sender that is stuck in a full connection ends with it.
func (w *watch) serve(ctx context.Context, open *identityv1.WatchOpen) error {
	begin := w.begin(open)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 2)
	w.server.streams.Add(2)
	go func() {
		defer w.server.streams.Done()
		ended <- w.send(ctx, begin)
	}()
	go func() {
		defer w.server.streams.Done()
		if err := w.receive(ctx); err != nil {
			ended <- err
		}
	}()
	for {
		standing, changed := w.server.index.Standing(w.position())
		if err := standingError(standing); err != nil {
			return err
		}
		select {
		case err := <-ended:
			return w.server.status(err)
		case <-changed:
		case <-ctx.Done():
			return w.server.status(ctx.Err())
		}
	}
}

// snapshot is what a stream begins with.
type snapshot struct {
	grants   []ledger.Grant
	revision int64
}

// begin sets the cursor: where the client was, which gives no snapshot, or now.
func (w *watch) begin(open *identityv1.WatchOpen) *snapshot {
	x := w.server.index
	w.ledger = x.Meta().LedgerID
	if open.GetResumeRevision() > 0 && open.GetLedgerId() == w.ledger {
		if c, ok := x.Resume(open.GetResumeRevision()); ok {
			w.cursor = c
			w.sent.Store(open.GetResumeRevision())
			return nil
		}
	}
	grants, revision, c := x.Snapshot(w.scope)
	w.cursor = c
	return &snapshot{grants: grants, revision: revision}
}

func (w *watch) position() index.Cursor {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.cursor
}

func (w *watch) moveTo(c index.Cursor) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cursor = c
}

func standingError(s index.Standing) error {
	switch s {
	case index.TooOld:
		return &rpc.Error{
			Code: codes.ResourceExhausted, Reason: reason.SlowReader,
			Message: "the changes to send next are forgotten; watch again from a snapshot",
		}
	case index.Replaced:
		return rpc.Refuse(codes.Unavailable, reason.StoreUnavailable, "the store was read anew; watch again")
	default:
		return nil
	}
}

// send sends the snapshot, or says that the stream goes on where the client was,
// and then every change.
func (w *watch) send(ctx context.Context, begin *snapshot) error {
	if begin == nil {
		if err := w.sendDelta(index.Change{Revision: w.sent.Load()}); err != nil {
			return err
		}
	} else if err := w.sendSnapshot(begin.grants, begin.revision); err != nil {
		return err
	}
	for {
		changes, next, changed, standing := w.server.index.Next(w.position())
		if err := standingError(standing); err != nil {
			return err
		}
		if err := w.fence(changes); err != nil {
			return err
		}
		if err := w.sendChanges(changes, next); err != nil {
			return err
		}
		if len(changes) > 0 {
			continue
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// fence ends a stream whose session was opened again.
func (w *watch) fence(changes []index.Change) error {
	for _, c := range changes {
		if c.Session == w.id && !c.Holding {
			return ledger.Fence(w.server.index.Read(w.id).State.Session, w.epoch)
		}
	}
	return nil
}

func (w *watch) sendSnapshot(grants []ledger.Grant, revision int64) error {
	for len(grants) > 0 {
		n := min(pieceSize, len(grants))
		piece := &identityv1.SnapshotPiece{Prefixes: wireGrants(grants[:n])}
		if err := w.sendOne(&identityv1.WatchResponse{Message: &identityv1.WatchResponse_SnapshotPiece{SnapshotPiece: piece}}); err != nil {
			return err
		}
		grants = grants[n:]
	}
	w.sent.Store(revision)
	done := &identityv1.SnapshotDone{Revision: revision}
	return w.sendOne(&identityv1.WatchResponse{Message: &identityv1.WatchResponse_SnapshotDone{SnapshotDone: done}})
}

// sendChanges sends what of the changes concerns the scope as one delta: each
// commit is in it as a whole.
func (w *watch) sendChanges(changes []index.Change, next index.Cursor) error {
	merged, relevant := index.Merge(changes, w.scope)
	if !relevant {
		w.moveTo(next)
		return nil
	}
	if len(merged.Up)+len(merged.Down) > maxDelta {
		grants, revision, next := w.server.index.Snapshot(w.scope)
		w.moveTo(next)
		return w.sendSnapshot(grants, revision)
	}
	if err := w.sendDelta(merged); err != nil {
		return err
	}
	w.moveTo(next)
	return nil
}

func (w *watch) sendDelta(c index.Change) error {
	w.sent.Store(c.Revision)
	delta := &identityv1.Delta{Revision: c.Revision, Upserts: wireGrants(c.Up), Removals: wireGrants(c.Down)}
	return w.sendOne(&identityv1.WatchResponse{Message: &identityv1.WatchResponse_Delta{Delta: delta}})
}

func (w *watch) sendOne(m *identityv1.WatchResponse) error {
	m.LedgerId = w.ledger
	return w.stream.Send(m)
}

// receive takes acknowledgements until the client has no more. A stream of
// someone without a session has nothing to acknowledge for.
func (w *watch) receive(ctx context.Context) error {
	for {
		m, err := w.stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		a := m.GetAck()
		if a == nil {
			return rpc.InvalidField("open", reason.FieldInvalid, "the watch is open already")
		}
		if sent := w.sent.Load(); a.GetRevision() > sent {
			return rpc.InvalidField("ack.revision", reason.FieldInvalid, "%d was not sent yet, the last was %d", a.GetRevision(), sent)
		}
		if w.id == "" {
			return rpc.InvalidField("ack", reason.FieldInvalid, "there is no session to acknowledge for")
		}
		for i, f := range a.GetFailures() {
			if _, err := prefix.Parse(f.GetPrefix()); err != nil {
				return rpc.InvalidField(fmt.Sprintf("ack.failures[%d].prefix", i), reason.PrefixInvalid, "%v", err)
			}
		}
		if w.server.acks.record(w.id, ack{epoch: w.epoch, revision: a.GetRevision(), failures: len(a.GetFailures())}) {
			w.server.logger.WarnContext(ctx, "a node could not program prefixes", slog.String(telemetry.KeySession, string(w.id)),
				slog.Int("failures", len(a.GetFailures())), slog.String(telemetry.KeyPrefix, a.GetFailures()[0].GetPrefix()),
				slog.String(telemetry.KeyReason, reason.Reason(a.GetFailures()[0].GetReason()).String()))
		}
	}
}

func wireGrants(grants []ledger.Grant) []*identityv1.PrefixNumber {
	out := make([]*identityv1.PrefixNumber, len(grants))
	for i, g := range grants {
		out[i] = &identityv1.PrefixNumber{Prefix: g.Prefix.String(), Number: uint32(g.Number)}
	}
	return out
}
