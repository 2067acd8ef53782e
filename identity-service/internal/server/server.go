// Package server speaks gRPC for the keeper: it checks and converts requests,
// and maps errors to codes and reasons. Deciding and storing do not belong here.
package server

import (
	"context"
	"errors"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"

	identityv1 "github.com/eniplane/eniplane/gen/eniplane/identity/v1"
	"github.com/eniplane/eniplane/identity-service/internal/etcd"
	"github.com/eniplane/eniplane/identity-service/internal/index"
	"github.com/eniplane/eniplane/identity-service/internal/keeper"
	"github.com/eniplane/eniplane/identity-service/internal/ledger"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"
	"github.com/eniplane/eniplane/internal/telemetry"
)

// Config is how the server answers.
type Config struct {
	// SessionTTL is what clients are told: keepalives must come more often.
	SessionTTL time.Duration
}

// Server is the IdentityService of one replica. ListOwners, ListSessions,
// EvictSession and Audit are not built yet.
type Server struct {
	identityv1.UnimplementedIdentityServiceServer
	config  Config
	keeper  *keeper.Keeper
	store   *etcd.Store
	index   *index.Index
	logger  *slog.Logger
	streams sync.WaitGroup
	acks    acks
}

// New returns a server.
func New(config Config, k *keeper.Keeper, store *etcd.Store, x *index.Index, logger *slog.Logger) *Server {
	return &Server{config: config, keeper: k, store: store, index: x, logger: logger, acks: acks{of: make(map[ledger.SessionID]ack)}}
}

// Wait returns when the last stream has ended; the gRPC server stopped before.
func (s *Server) Wait() { s.streams.Wait() }

// status maps errors to what callers get.
func (s *Server) status(err error) error {
	if errors.Is(err, ledger.ErrNumbersExhausted) {
		return s.exhausted(err)
	}
	const soon = time.Second
	return rpc.Table{
		{Err: ledger.ErrSessionUnknown, Code: codes.NotFound, Reason: reason.SessionUnknown},
		{Err: ledger.ErrStaleEpoch, Code: codes.FailedPrecondition, Reason: reason.StaleSession},
		{Err: ledger.ErrStaleGeneration, Code: codes.FailedPrecondition, Reason: reason.StaleSession},
		{Err: keeper.ErrContended, Code: codes.Aborted, Reason: reason.StoreContended, RetryAfter: soon},
		{Err: etcd.ErrFull, Code: codes.ResourceExhausted, Reason: reason.StoreFull, RetryAfter: time.Minute},
		{Err: etcd.ErrNotReady, Code: codes.Unavailable, Reason: reason.NotReady, RetryAfter: soon},
		{Err: etcd.ErrUnavailable, Code: codes.Unavailable, Reason: reason.StoreUnavailable, RetryAfter: soon},
	}.Status(err)
}

func (s *Server) exhausted(err error) error {
	sizes := s.index.Sizes()
	r := s.index.Meta().Range
	return &rpc.Error{
		Code: codes.ResourceExhausted, Reason: reason.NumbersExhausted, Message: err.Error(), RetryAfter: time.Minute,
		Metadata: map[string]string{
			"first_number": strconv.FormatUint(uint64(r.First), 10),
			"last_number":  strconv.FormatUint(uint64(r.Last), 10),
			"live":         strconv.Itoa(sizes.Live),
			"draining":     strconv.Itoa(sizes.Prefixes - sizes.Live),
		},
	}
}

// fields maps those refusals that are about a field of the request.
func (s *Server) fields(err error) error {
	switch {
	case errors.Is(err, ledger.ErrRequestReused):
		return rpc.InvalidField("request_id", reason.RequestIDReused, "%v", err)
	case errors.Is(err, ledger.ErrGenerationReused):
		return rpc.InvalidField("generation", reason.FieldInvalid, "%v", err)
	default:
		return s.status(err)
	}
}

// OpenSession implements IdentityService.
func (s *Server) OpenSession(ctx context.Context, req *identityv1.OpenSessionRequest) (*identityv1.OpenSessionResponse, error) {
	if why := badNodeName(req.GetNodeName()); why != "" {
		return nil, rpc.InvalidField("node_name", reason.FieldInvalid, "%s", why)
	}
	session, err := s.keeper.Open(ctx, ledger.Open{
		Node: req.GetNodeName(), NodeUID: req.GetNodeUid(), BootID: req.GetBootId(), Request: ledger.RequestID(req.GetRequestId()),
	})
	if err != nil {
		return nil, s.fields(err)
	}
	s.logger.InfoContext(ctx, "session opened", slog.String(telemetry.KeySession, string(session.ID)), slog.Uint64(telemetry.KeyEpoch, uint64(session.Epoch)))
	meta := s.index.Meta()
	return &identityv1.OpenSessionResponse{
		Session:     &identityv1.Session{Id: string(session.ID), Epoch: uint64(session.Epoch)},
		Ttl:         durationpb.New(s.config.SessionTTL),
		LedgerId:    meta.LedgerID,
		FirstNumber: uint32(meta.Range.First),
		LastNumber:  uint32(meta.Range.Last),
	}, nil
}

// KeepAlive implements IdentityService. In this version it only answers whether
// the session still stands: sessions do not expire.
func (s *Server) KeepAlive(ctx context.Context, req *identityv1.KeepAliveRequest) (*identityv1.KeepAliveResponse, error) {
	session := req.GetSession()
	if err := s.keeper.Check(ctx, ledger.SessionID(session.GetId()), ledger.Epoch(session.GetEpoch())); err != nil {
		return nil, s.status(err)
	}
	return &identityv1.KeepAliveResponse{Ttl: durationpb.New(s.config.SessionTTL)}, nil
}

// SetHolding implements IdentityService.
func (s *Server) SetHolding(ctx context.Context, req *identityv1.SetHoldingRequest) (*identityv1.SetHoldingResponse, error) {
	w, err := parseWanted(req, s.store.Range())
	if err != nil {
		return nil, err
	}
	op := ledger.Hold{
		Session:    ledger.SessionID(req.GetSession().GetId()),
		Epoch:      ledger.Epoch(req.GetSession().GetEpoch()),
		Owner:      owner(req.GetOwner()),
		Generation: ledger.Generation(req.GetGeneration()),
		Request:    ledger.RequestID(req.GetRequestId()),
		Body: ledger.Body("hold", string(owner(req.GetOwner()).Key()), strconv.FormatUint(req.GetGeneration(), 10),
			w.set.Digest.String(), ledger.PreferenceBody(w.wanted).String()),
	}
	held, err := s.keeper.Hold(ctx, op, w.set, w.wanted)
	if err != nil {
		return nil, s.fields(err)
	}
	return w.response(held), nil
}

// DropHolding implements IdentityService.
func (s *Server) DropHolding(ctx context.Context, req *identityv1.DropHoldingRequest) (*identityv1.DropHoldingResponse, error) {
	revision, err := s.keeper.Drop(ctx, ledger.Drop{
		Session:    ledger.SessionID(req.GetSession().GetId()),
		Epoch:      ledger.Epoch(req.GetSession().GetEpoch()),
		Owner:      owner(req.GetOwner()),
		Generation: ledger.Generation(req.GetGeneration()),
		Request:    ledger.RequestID(req.GetRequestId()),
	})
	if err != nil {
		return nil, s.fields(err)
	}
	return &identityv1.DropHoldingResponse{Revision: revision}, nil
}
