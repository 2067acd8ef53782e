package fake

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"

	identityv1 "github.com/eniplane/eniplane/gen/eniplane/identity/v1"
	reasonv1 "github.com/eniplane/eniplane/gen/eniplane/reason/v1"
	"github.com/eniplane/eniplane/internal/prefix"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"
)

// FirstNumber is the lowest number that the ledger gives.
const FirstNumber = 16777217

// Owner names an owner in the fake's own terms.
type Owner struct {
	Kind                 identityv1.OwnerKind
	Namespace, Name, UID string
}

// Identity is a ledger in memory.
type Identity struct {
	identityv1.UnimplementedIdentityServiceServer

	mu       sync.Mutex // guards what follows
	ledger   string
	revision int64
	epochs   map[string]uint64
	holdings map[string]map[Owner]holding
	numbers  map[netip.Prefix]uint32
	taken    map[uint32]struct{}
	next     uint32
	changed  chan struct{}
	acks     []*identityv1.WatchAck
	sets     int
	lastSet  map[Owner]*identityv1.SetHoldingRequest
	fail     func(method string, owner Owner) error
}

type holding struct {
	generation uint64
	prefixes   map[netip.Prefix]struct{}
}

// NewIdentity returns an empty ledger.
func NewIdentity() *Identity {
	return &Identity{
		ledger: "ledger-1", revision: 1, next: FirstNumber,
		epochs: make(map[string]uint64), holdings: make(map[string]map[Owner]holding),
		numbers: make(map[netip.Prefix]uint32), taken: make(map[uint32]struct{}), changed: make(chan struct{}),
		lastSet: make(map[Owner]*identityv1.SetHoldingRequest),
	}
}

// Register registers the service.
func (f *Identity) Register(r grpc.ServiceRegistrar) { identityv1.RegisterIdentityServiceServer(r, f) }

// Fail makes every call ask fail for an error first; nil ends that.
func (f *Identity) Fail(fail func(method string, owner Owner) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fail = fail
}

// LoseSessions forgets every session with its holdings. Numbers stay.
func (f *Identity) LoseSessions() {
	f.mu.Lock()
	defer f.mu.Unlock()
	clear(f.holdings)
	clear(f.epochs)
	f.advance()
}

// NewLedger is LoseSessions with another, empty ledger, whose numbers begin at
// first.
func (f *Identity) NewLedger(id string, first uint32) {
	f.LoseSessions()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ledger, f.next, f.revision = id, first, 1
	clear(f.numbers)
	clear(f.taken)
	f.advance()
}

// Reserve gives a number to a prefix that nobody holds.
func (f *Identity) Reserve(p string, number uint32) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.numbers[netip.MustParsePrefix(p)] = number
	f.taken[number] = struct{}{}
}

// Held returns the owners of every prefix that is held, by any session.
func (f *Identity) Held() map[string][]Owner {
	f.mu.Lock()
	defer f.mu.Unlock()
	held := make(map[string][]Owner)
	for _, owners := range f.holdings {
		for o, h := range owners {
			for p := range h.prefixes {
				held[p.String()] = append(held[p.String()], o)
			}
		}
	}
	return held
}

// Owners returns the owners that have a holding, in any order.
func (f *Identity) Owners() []Owner {
	f.mu.Lock()
	defer f.mu.Unlock()
	var owners []Owner
	for _, of := range f.holdings {
		owners = slices.AppendSeq(owners, maps.Keys(of))
	}
	return owners
}

// Number returns the number of a prefix; 0 if it never had one.
func (f *Identity) Number(p string) uint32 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.numbers[netip.MustParsePrefix(p)]
}

// LastSet returns the last SetHolding of an owner; nil if there was none.
func (f *Identity) LastSet(o Owner) *identityv1.SetHoldingRequest {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.lastSet[o]
}

// Sets returns how many SetHolding calls were made.
func (f *Identity) Sets() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.sets
}

// LastAck returns the newest acknowledgement, and whether it is for the newest
// revision.
func (f *Identity) LastAck() (*identityv1.WatchAck, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.acks) == 0 {
		return nil, false
	}
	last := f.acks[len(f.acks)-1]
	return last, last.GetRevision() == f.revision
}

func (f *Identity) advance() {
	f.revision++
	close(f.changed)
	f.changed = make(chan struct{})
}

func (f *Identity) check(method string, s *identityv1.Session, owner Owner) error {
	if f.fail != nil {
		if err := f.fail(method, owner); err != nil {
			return err
		}
	}
	epoch, ok := f.epochs[s.GetId()]
	switch {
	case !ok:
		return rpc.Refuse(codes.NotFound, reason.SessionUnknown, "no session %s", s.GetId())
	case s.GetEpoch() < epoch:
		return rpc.Refuse(codes.FailedPrecondition, reason.StaleSession, "epoch %d, stored %d", s.GetEpoch(), epoch)
	}
	return nil
}

func ownerOf(o *identityv1.Owner) Owner {
	return Owner{o.GetKind(), o.GetNamespace(), o.GetName(), o.GetUid()}
}

// OpenSession implements IdentityService.
func (f *Identity) OpenSession(_ context.Context, r *identityv1.OpenSessionRequest) (*identityv1.OpenSessionResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.fail != nil {
		if err := f.fail("OpenSession", Owner{}); err != nil {
			return nil, err
		}
	}
	id := r.GetNodeName() + "/" + r.GetNodeUid()
	f.epochs[id]++
	if f.holdings[id] == nil {
		f.holdings[id] = make(map[Owner]holding)
	}
	for o, h := range f.holdings[id] { // generations count within an epoch
		h.generation = 0
		f.holdings[id][o] = h
	}
	return &identityv1.OpenSessionResponse{
		Session: &identityv1.Session{Id: id, Epoch: f.epochs[id]}, Ttl: durationpb.New(time.Second),
		LedgerId: f.ledger, FirstNumber: FirstNumber, LastNumber: 33554431,
	}, nil
}

// KeepAlive implements IdentityService.
func (f *Identity) KeepAlive(_ context.Context, r *identityv1.KeepAliveRequest) (*identityv1.KeepAliveResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return &identityv1.KeepAliveResponse{}, f.check("KeepAlive", r.GetSession(), Owner{})
}

// SetHolding implements IdentityService.
func (f *Identity) SetHolding(_ context.Context, r *identityv1.SetHoldingRequest) (*identityv1.SetHoldingResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	owner := ownerOf(r.GetOwner())
	f.sets++
	if err := f.check("SetHolding", r.GetSession(), owner); err != nil {
		return nil, err
	}
	if f.holdings[r.GetSession().GetId()][owner].generation >= r.GetGeneration() {
		return nil, rpc.Refuse(codes.FailedPrecondition, reason.StaleSession, "generation %d is not new", r.GetGeneration())
	}
	f.lastSet[owner] = r
	h := holding{generation: r.GetGeneration(), prefixes: make(map[netip.Prefix]struct{})}
	response := &identityv1.SetHoldingResponse{}
	for _, w := range r.GetPrefixes() {
		p, err := prefix.Parse(w.GetPrefix())
		if err != nil || prefix.IsWorld(p) {
			return nil, rpc.InvalidField("prefixes", reason.PrefixInvalid, "%v", err)
		}
		h.prefixes[p] = struct{}{}
		number, refused := f.number(p, w.GetPreferredNumber())
		response.Assignments = append(response.Assignments, &identityv1.Assignment{Prefix: p.String(), Number: number, PreferredRefused: refused})
	}
	f.holdings[r.GetSession().GetId()][owner] = h
	f.advance()
	response.Revision = f.revision
	return response, nil
}

func (f *Identity) number(p netip.Prefix, preferred uint32) (uint32, reasonv1.Reason) {
	if n, ok := f.numbers[p]; ok {
		if preferred != 0 && preferred != n {
			return n, reasonv1.Reason_REASON_NUMBER_TAKEN
		}
		return n, 0
	}
	refused := reasonv1.Reason_REASON_UNSPECIFIED
	n := preferred
	if _, taken := f.taken[n]; taken && n != 0 {
		refused, n = reasonv1.Reason_REASON_NUMBER_TAKEN, 0
	}
	for n == 0 {
		if _, taken := f.taken[f.next]; !taken {
			n = f.next
		}
		f.next++
	}
	f.numbers[p] = n
	f.taken[n] = struct{}{}
	return n, refused
}

// DropHolding implements IdentityService.
func (f *Identity) DropHolding(_ context.Context, r *identityv1.DropHoldingRequest) (*identityv1.DropHoldingResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	owner := ownerOf(r.GetOwner())
	if err := f.check("DropHolding", r.GetSession(), owner); err != nil {
		return nil, err
	}
	delete(f.holdings[r.GetSession().GetId()], owner)
	f.advance()
	return &identityv1.DropHoldingResponse{Revision: f.revision}, nil
}

// Watch implements IdentityService, for scope SESSION.
func (f *Identity) Watch(stream grpc.BidiStreamingServer[identityv1.WatchRequest, identityv1.WatchResponse]) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	open := first.GetOpen()
	gone := make(chan struct{})
	go func() { // ends with the stream
		defer close(gone)
		for {
			r, err := stream.Recv()
			if err != nil {
				return
			}
			f.mu.Lock()
			f.acks = append(f.acks, r.GetAck())
			f.mu.Unlock()
		}
	}()
	var sent map[netip.Prefix]uint32
	for {
		f.mu.Lock()
		err := f.check("Watch", open.GetSession(), Owner{})
		held, revision, ledger, changed := f.heldBy(open.GetSession().GetId()), f.revision, f.ledger, f.changed
		f.mu.Unlock()
		if err != nil {
			return err
		}
		if sent == nil && open.GetResumeRevision() == revision && open.GetLedgerId() == ledger {
			sent = held
		}
		for _, m := range messages(sent, held, revision) {
			m.LedgerId = ledger
			if err := stream.Send(m); err != nil {
				return err
			}
		}
		sent = held
		select {
		case <-changed:
		case <-gone:
			return nil
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

func (f *Identity) heldBy(session string) map[netip.Prefix]uint32 {
	held := make(map[netip.Prefix]uint32)
	for _, h := range f.holdings[session] {
		for p := range h.prefixes {
			held[p] = f.numbers[p]
		}
	}
	return held
}

// messages are a snapshot if nothing was sent yet, else what changed.
func messages(sent, held map[netip.Prefix]uint32, revision int64) []*identityv1.WatchResponse {
	if sent == nil {
		piece := &identityv1.SnapshotPiece{}
		for p, n := range held {
			piece.Prefixes = append(piece.Prefixes, &identityv1.PrefixNumber{Prefix: p.String(), Number: n})
		}
		return []*identityv1.WatchResponse{
			{Message: &identityv1.WatchResponse_SnapshotPiece{SnapshotPiece: piece}},
			{Message: &identityv1.WatchResponse_SnapshotDone{SnapshotDone: &identityv1.SnapshotDone{Revision: revision}}},
		}
	}
	delta := &identityv1.Delta{Revision: revision}
	for p, n := range held {
		if sent[p] != n {
			delta.Upserts = append(delta.Upserts, &identityv1.PrefixNumber{Prefix: p.String(), Number: n})
		}
	}
	for p, n := range sent {
		if held[p] == 0 {
			delta.Removals = append(delta.Removals, &identityv1.PrefixNumber{Prefix: p.String(), Number: n})
		}
	}
	if len(delta.Upserts) == 0 && len(delta.Removals) == 0 {
		return nil
	}
	return []*identityv1.WatchResponse{{Message: &identityv1.WatchResponse_Delta{Delta: delta}}}
}
