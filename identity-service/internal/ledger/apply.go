package ledger

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
)

// Refusals. Apply wraps them; match with errors.Is.
var (
	// ErrSessionUnknown: there is no such session, or it was never opened in the
	// epoch that the caller claims (the store is another one than before).
	ErrSessionUnknown = errors.New("no such session")
	// ErrStaleEpoch: the session was opened again since.
	ErrStaleEpoch = errors.New("the session was opened again")
	// ErrStaleGeneration: a newer set of this owner is stored.
	ErrStaleGeneration = errors.New("a newer generation is stored")
	// ErrGenerationReused: this generation was used for something else.
	ErrGenerationReused = errors.New("the generation was used for another set")
	// ErrRequestReused: the request id was used with another body.
	ErrRequestReused = errors.New("the request id was used with another body")
	// ErrPrefixReserved: /0 is a reserved world identity.
	ErrPrefixReserved = errors.New("the prefix is reserved")
	// ErrNumberOutOfRange: the number is not one that is given out.
	ErrNumberOutOfRange = errors.New("the number is out of range")
	// ErrNumbersExhausted: no number is free.
	ErrNumbersExhausted = errors.New("no number is free")
	// ErrLost: somebody else got there first; read and choose again.
	ErrLost = errors.New("taken meanwhile")
	// ErrNotReady: a step that must come before was not made.
	ErrNotReady = errors.New("a step before this one is missing")
	// ErrMalformed: what was stored cannot be understood.
	ErrMalformed = errors.New("malformed")
)

// State is what one operation read, and nothing else.
type State struct {
	Range Range
	// Session is nil if there is none.
	Session *Session
	// Holding is nil if there is none.
	Holding *Holding
	// SetStored says that the set of the operation is stored as a whole.
	SetStored bool
	// Numbers has the prefixes of the operation that have a number.
	Numbers map[netip.Prefix]Number
	// Owners has the numbers of the operation that are some prefix's.
	Owners map[Number]netip.Prefix
}

// Op is an operation on the ledger.
type Op interface{ op() }

// Open opens the session of a node in its next epoch.
type Open struct {
	Node    string
	NodeUID string
	BootID  string
	Request RequestID
}

// Allocate gives numbers to prefixes that have none. Nobody sees it: a prefix
// without a holder is not live.
type Allocate struct {
	Grants []Grant
	At     Millis
}

// StoreSet stores a set, all of whose prefixes have numbers. Nobody sees it
// until somebody holds it.
type StoreSet struct{ Set Set }

// Hold makes the owner hold a set in place of what it held before.
type Hold struct {
	Session    SessionID
	Epoch      Epoch
	Owner      Owner
	Generation Generation
	Request    RequestID
	// Body is the digest of everything in the call but the session.
	Body Digest
	// Set names a stored set.
	Set Digest
	At  Millis
}

// Drop ends what the owner holds.
type Drop struct {
	Session    SessionID
	Epoch      Epoch
	Owner      Owner
	Generation Generation
	Request    RequestID
	At         Millis
}

func (Open) op()     {}
func (Allocate) op() {}
func (StoreSet) op() {}
func (Hold) op()     {}
func (Drop) op()     {}

// Event is one thing that an operation changes.
type Event interface{ event() }

// SessionOpened replaces the record of a session.
type SessionOpened struct{ Session Session }

// NumberGiven binds a prefix and a number to each other, for good.
type NumberGiven struct {
	Grant
	At Millis
}

// SetStored stores a set under its digest.
type SetStored struct{ Set Set }

// HoldingChanged replaces the record of a holding.
type HoldingChanged struct {
	ID      HoldingID
	Holding Holding
}

func (SessionOpened) event()  {}
func (NumberGiven) event()    {}
func (SetStored) event()      {}
func (HoldingChanged) event() {}

// Apply decides an operation on what it read. It returns the state afterwards
// and what changed; no events and no error mean that the operation was made
// before. The argument is not changed. An error changes nothing.
func Apply(s State, op Op) (State, []Event, error) {
	switch op := op.(type) {
	case Open:
		return open(s, op)
	case Allocate:
		return allocate(s, op)
	case StoreSet:
		return storeSet(s, op)
	case Hold:
		return hold(s, op)
	case Drop:
		return drop(s, op)
	default:
		return s, nil, fmt.Errorf("unknown operation %T", op)
	}
}

func open(s State, op Open) (State, []Event, error) {
	body := Body(op.Node, op.NodeUID, op.BootID)
	next := Session{
		ID: SessionIDOf(op.Node, op.NodeUID), Node: op.Node, NodeUID: op.NodeUID, BootID: op.BootID,
		Epoch: 1, Request: op.Request, Body: body,
	}
	if old := s.Session; old != nil {
		if old.Request == op.Request {
			if old.Body != body {
				return s, nil, ErrRequestReused
			}
			return s, nil, nil
		}
		next.Epoch = old.Epoch + 1
	}
	s.Session = &next
	return s, []Event{SessionOpened{Session: next}}, nil
}

func allocate(s State, op Allocate) (State, []Event, error) {
	numbers, owners := maps.Clone(s.Numbers), maps.Clone(s.Owners)
	if numbers == nil {
		numbers = make(map[netip.Prefix]Number, len(op.Grants))
	}
	if owners == nil {
		owners = make(map[Number]netip.Prefix, len(op.Grants))
	}
	events := make([]Event, 0, len(op.Grants))
	for _, g := range op.Grants {
		if g.Prefix.Bits() == 0 {
			return s, nil, fmt.Errorf("%w: %s", ErrPrefixReserved, g.Prefix)
		}
		if !s.Range.Contains(g.Number) {
			return s, nil, fmt.Errorf("%w: %d", ErrNumberOutOfRange, g.Number)
		}
		if n, has := numbers[g.Prefix]; has {
			return s, nil, fmt.Errorf("%w: %s has %d", ErrLost, g.Prefix, n)
		}
		if p, has := owners[g.Number]; has {
			return s, nil, fmt.Errorf("%w: %d is of %s", ErrLost, g.Number, p)
		}
		numbers[g.Prefix], owners[g.Number] = g.Number, g.Prefix
		events = append(events, NumberGiven{Grant: g, At: op.At})
	}
	s.Numbers, s.Owners = numbers, owners
	return s, events, nil
}

func storeSet(s State, op StoreSet) (State, []Event, error) {
	if s.SetStored {
		return s, nil, nil
	}
	for _, p := range op.Set.Prefixes {
		if _, has := s.Numbers[p]; !has {
			return s, nil, fmt.Errorf("%w: %s has no number", ErrNotReady, p)
		}
	}
	s.SetStored = true
	return s, []Event{SetStored(op)}, nil
}

// fence refuses a caller whose session is not, or no longer, this one.
func fence(session *Session, epoch Epoch) error {
	switch {
	case session == nil:
		return ErrSessionUnknown
	case epoch > session.Epoch:
		return fmt.Errorf("%w in epoch %d", ErrSessionUnknown, epoch)
	case epoch < session.Epoch:
		return fmt.Errorf("%w: epoch %d is stored", ErrStaleEpoch, session.Epoch)
	default:
		return nil
	}
}

// Fence returns nil if a caller that claims the epoch may act for the session:
// otherwise ErrSessionUnknown or ErrStaleEpoch.
func Fence(session *Session, epoch Epoch) error { return fence(session, epoch) }

// Admit decides whether a holding would change: false without an error means
// that the very same was stored before. It does not need the set to be stored,
// so that a refused call allocates nothing.
func Admit(s State, op Hold) (bool, error) {
	if err := fence(s.Session, op.Epoch); err != nil {
		return false, err
	}
	old := s.Holding
	if old == nil {
		return true, nil
	}
	if old.Request == op.Request && old.Body != op.Body {
		return false, ErrRequestReused
	}
	if old.Epoch < op.Epoch {
		return true, nil
	}
	switch {
	case op.Generation < old.Generation:
		return false, fmt.Errorf("%w: %d, asked for %d", ErrStaleGeneration, old.Generation, op.Generation)
	case op.Generation > old.Generation:
		return true, nil
	case old.Dropped || old.Set != op.Set:
		return false, fmt.Errorf("%w: %d", ErrGenerationReused, op.Generation)
	default:
		return false, nil
	}
}

func hold(s State, op Hold) (State, []Event, error) {
	change, err := Admit(s, op)
	if err != nil || !change {
		return s, nil, err
	}
	if !s.SetStored {
		return s, nil, fmt.Errorf("%w: the set is not stored", ErrNotReady)
	}
	next := Holding{
		Owner: op.Owner, Set: op.Set, Epoch: op.Epoch, Generation: op.Generation,
		Request: op.Request, Body: op.Body, Changed: op.At,
	}
	return changed(s, op.Session, next)
}

func drop(s State, op Drop) (State, []Event, error) {
	if err := fence(s.Session, op.Epoch); err != nil {
		return s, nil, err
	}
	next := Holding{
		Owner: op.Owner, Dropped: true, Epoch: op.Epoch, Generation: op.Generation,
		Request: op.Request, Body: Body("drop"), Changed: op.At,
	}
	// The record is written even if nothing is held: a call that set the holding
	// may still be on its way.
	old := s.Holding
	if old == nil || old.Epoch < op.Epoch {
		return changed(s, op.Session, next)
	}
	if old.Request == op.Request && !old.Dropped {
		return s, nil, ErrRequestReused
	}
	switch {
	case old.Dropped && op.Generation <= old.Generation:
		return s, nil, nil
	case op.Generation < old.Generation:
		return s, nil, fmt.Errorf("%w: %d, asked for %d", ErrStaleGeneration, old.Generation, op.Generation)
	case op.Generation == old.Generation:
		return s, nil, fmt.Errorf("%w: %d", ErrGenerationReused, op.Generation)
	default:
		return changed(s, op.Session, next)
	}
}

func changed(s State, session SessionID, next Holding) (State, []Event, error) {
	s.Holding = &next
	id := HoldingID{Session: session, Owner: next.Owner.Key()}
	return s, []Event{HoldingChanged{ID: id, Holding: next}}, nil
}
