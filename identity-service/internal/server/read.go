package server

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/timestamppb"

	identityv1 "github.com/eniplane/eniplane/gen/eniplane/identity/v1"
	"github.com/eniplane/eniplane/identity-service/internal/etcd"
	"github.com/eniplane/eniplane/identity-service/internal/index"
	"github.com/eniplane/eniplane/identity-service/internal/ledger"
	"github.com/eniplane/eniplane/internal/prefix"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"
)

const (
	defaultPage = 100
	// maxHolders is how many holders of one identity are shown; in a list, all
	// identities of a page share maxHoldersOfPage.
	maxHolders       = 1000
	maxHoldersOfPage = 20000
)

// current returns when the index shows everything that was committed before.
func (s *Server) current(ctx context.Context) error {
	if s.index.Revision() == 0 {
		return s.status(etcd.ErrNotReady)
	}
	return s.status(s.store.Barrier(ctx))
}

// LookupIdentity implements IdentityService.
func (s *Server) LookupIdentity(ctx context.Context, req *identityv1.LookupIdentityRequest) (*identityv1.LookupIdentityResponse, error) {
	addr, err := netip.ParseAddr(req.GetAddress())
	if err != nil || addr.Zone() != "" {
		return nil, rpc.InvalidField("address", reason.FieldInvalid, "%.64q is not an IP address without a zone", req.GetAddress())
	}
	if err := s.current(ctx); err != nil {
		return nil, err
	}
	id, ok := s.index.Lookup(addr, maxHolders)
	if !ok {
		return nil, rpc.Refuse(codes.NotFound, reason.PrefixUnknown, "nobody holds a prefix that contains %s", addr)
	}
	return &identityv1.LookupIdentityResponse{Identity: wireIdentity(id)}, nil
}

// GetIdentity implements IdentityService.
func (s *Server) GetIdentity(ctx context.Context, req *identityv1.GetIdentityRequest) (*identityv1.GetIdentityResponse, error) {
	var find func() (index.Identity, error)
	switch key := req.GetKey().(type) {
	case *identityv1.GetIdentityRequest_Prefix:
		p, err := parsePrefix("prefix", key.Prefix)
		if err != nil {
			return nil, err
		}
		find = func() (index.Identity, error) {
			id, ok := s.index.Identity(p, maxHolders)
			if !ok {
				return id, rpc.Refuse(codes.NotFound, reason.PrefixUnknown, "%s has no number", p)
			}
			return id, nil
		}
	default:
		n := ledger.Number(req.GetNumber())
		find = func() (index.Identity, error) {
			id, ok := s.index.IdentityOf(n, maxHolders)
			if !ok {
				return id, rpc.Refuse(codes.NotFound, reason.IdentityUnknown, "no prefix has the number %d", n)
			}
			return id, nil
		}
	}
	if err := s.current(ctx); err != nil {
		return nil, err
	}
	id, err := find()
	if err != nil {
		return nil, err
	}
	return &identityv1.GetIdentityResponse{Identity: wireIdentity(id)}, nil
}

// ListIdentities implements IdentityService.
func (s *Server) ListIdentities(ctx context.Context, req *identityv1.ListIdentitiesRequest) (*identityv1.ListIdentitiesResponse, error) {
	var filter index.Filter
	switch req.GetState() {
	case identityv1.IdentityState_IDENTITY_STATE_LIVE:
		filter.State = index.Live
	case identityv1.IdentityState_IDENTITY_STATE_DRAINING:
		filter.State = index.Draining
	default:
	}
	if text := req.GetOverlappingPrefix(); text != "" {
		p, err := parsePrefix("overlapping_prefix", text)
		if err != nil {
			return nil, err
		}
		filter.Overlapping = p
	}
	list := listOf(filter)
	after, err := parseToken(list, req.GetPageToken())
	if err != nil {
		return nil, err
	}
	if err := s.current(ctx); err != nil {
		return nil, err
	}
	size := int(req.GetPageSize())
	if size == 0 {
		size = defaultPage
	}
	page, more := s.index.List(after, size, filter, min(maxHolders, maxHoldersOfPage/size))
	resp := &identityv1.ListIdentitiesResponse{Identities: make([]*identityv1.Identity, len(page))}
	for i, id := range page {
		resp.Identities[i] = wireIdentity(id)
	}
	if more {
		resp.NextPageToken = rpc.PageToken(list, page[len(page)-1].Prefix.String())
	}
	return resp, nil
}

// listOf names the list that a filter leaves; the key of a page is its last
// prefix.
func listOf(f index.Filter) string {
	return fmt.Sprintf("identities %d %s", f.State, f.Overlapping)
}

func parseToken(list, token string) (netip.Prefix, error) {
	key, err := rpc.ParsePageToken(list, token)
	if err != nil || key == "" {
		return netip.Prefix{}, err
	}
	p, err := prefix.Parse(key)
	if err != nil {
		return netip.Prefix{}, rpc.ForeignPageToken()
	}
	return p, nil
}

func wireIdentity(id index.Identity) *identityv1.Identity {
	out := &identityv1.Identity{
		Prefix: id.Prefix.String(), Number: uint32(id.Number),
		State:           identityv1.IdentityState_IDENTITY_STATE_DRAINING,
		HolderCount:     uint32(id.HolderCount),
		CreatedRevision: id.CreatedRevision,
		CreatedAt:       timestamppb.New(time.UnixMilli(int64(id.Created))),
	}
	if id.HolderCount > 0 {
		out.State = identityv1.IdentityState_IDENTITY_STATE_LIVE
	}
	for _, h := range id.Holders {
		out.Holders = append(out.Holders, &identityv1.Holder{Owner: wireOwner(h.Owner), NodeName: h.Node, SessionId: string(h.Session)})
	}
	return out
}
