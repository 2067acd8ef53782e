package ledger_test

import (
	"errors"
	"net/netip"
	"reflect"
	"testing"

	"github.com/eniplane/eniplane/identity-service/internal/ledger"
)

func prefixes(texts ...string) []netip.Prefix {
	out := make([]netip.Prefix, len(texts))
	for i, s := range texts {
		out[i] = netip.MustParsePrefix(s)
	}
	return out
}

func newSet(t testing.TB, texts ...string) ledger.Set {
	t.Helper()
	s, err := ledger.NewSet(prefixes(texts...))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestOpen(t *testing.T) {
	open := ledger.Open{Node: "a", NodeUID: "u", BootID: "b", Request: "r1"}
	s, events, err := ledger.Apply(ledger.State{}, open)
	if err != nil || len(events) != 1 || s.Session.Epoch != 1 || s.Session.ID != ledger.SessionIDOf("a", "u") {
		t.Fatalf("first open: %+v, %v, %v", s.Session, events, err)
	}

	again, events, err := ledger.Apply(s, open)
	if err != nil || len(events) != 0 || again.Session.Epoch != 1 {
		t.Errorf("the same call again: %+v, %v, %v", again.Session, events, err)
	}

	other := open
	other.BootID = "c"
	if _, events, err := ledger.Apply(s, other); !errors.Is(err, ledger.ErrRequestReused) || events != nil {
		t.Errorf("the request id with another body: %v, %v", events, err)
	}

	other.Request = "r2"
	next, events, err := ledger.Apply(s, other)
	if err != nil || len(events) != 1 || next.Session.Epoch != 2 || next.Session.BootID != "c" {
		t.Errorf("a restarted agent: %+v, %v, %v", next.Session, events, err)
	}
	if s.Session.Epoch != 1 {
		t.Error("Apply changed its argument")
	}
	if ledger.SessionIDOf("a", "u") == ledger.SessionIDOf("a", "u2") {
		t.Error("a node that was created again has the session of the old one")
	}
}

// stored is a state in which an owner holds a set: epoch 3, generation 7.
func stored(t testing.TB) (ledger.State, ledger.Hold) {
	t.Helper()
	owner := ledger.Owner{Kind: 1, Namespace: "ns", Name: "p", UID: "u"}
	set := newSet(t, "10.0.0.0/8")
	op := ledger.Hold{
		Session: ledger.SessionIDOf("a", "u"), Epoch: 3, Owner: owner, Generation: 7,
		Request: "r7", Body: ledger.Body("7"), Set: set.Digest, At: 1,
	}
	s, _, err := ledger.Apply(ledger.State{Session: &ledger.Session{ID: op.Session, Epoch: 3}, SetStored: true}, op)
	if err != nil {
		t.Fatal(err)
	}
	return s, op
}

func TestHold(t *testing.T) {
	otherSet := newSet(t, "10.0.0.0/9").Digest
	for _, tc := range []struct {
		name    string
		state   func(*ledger.State)
		op      func(*ledger.Hold)
		changes bool
		err     error
	}{
		{name: "the same call again", op: func(*ledger.Hold) {}},
		{name: "the same content under another request id", op: func(op *ledger.Hold) { op.Request = "other" }},
		{name: "the next generation", op: func(op *ledger.Hold) { op.Generation, op.Request, op.Set = 8, "r8", otherSet }, changes: true},
		{name: "generations skip", op: func(op *ledger.Hold) { op.Generation, op.Request = 70, "r70" }, changes: true},
		{name: "an older generation", op: func(op *ledger.Hold) { op.Generation, op.Request = 6, "r6" }, err: ledger.ErrStaleGeneration},
		{name: "the generation with another set", op: func(op *ledger.Hold) { op.Set, op.Request = otherSet, "r7b" }, err: ledger.ErrGenerationReused},
		{name: "the request id with another body", op: func(op *ledger.Hold) { op.Body, op.Generation = ledger.Body("8"), 8 }, err: ledger.ErrRequestReused},
		{
			name: "an older epoch", op: func(op *ledger.Hold) { op.Generation, op.Request = 8, "r8" },
			state: func(s *ledger.State) { s.Session = &ledger.Session{Epoch: 4} }, err: ledger.ErrStaleEpoch,
		},
		{
			name: "an epoch that was never given out", op: func(op *ledger.Hold) { op.Epoch = 4 }, err: ledger.ErrSessionUnknown,
		},
		{
			name: "no session", op: func(*ledger.Hold) {}, state: func(s *ledger.State) { s.Session = nil }, err: ledger.ErrSessionUnknown,
		},
		{
			name: "generations start over in a new epoch", op: func(op *ledger.Hold) { op.Epoch, op.Generation, op.Request = 4, 1, "r1" },
			state: func(s *ledger.State) { s.Session = &ledger.Session{Epoch: 4} }, changes: true,
		},
		{
			name: "a set that is not stored", op: func(op *ledger.Hold) { op.Generation, op.Request = 8, "r8" },
			state: func(s *ledger.State) { s.SetStored = false }, err: ledger.ErrNotReady,
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			before, op := stored(t)
			if tc.state != nil {
				tc.state(&before)
			}
			tc.op(&op)
			after, events, err := ledger.Apply(before, op)
			if !errors.Is(err, tc.err) || (err == nil) != (tc.err == nil) {
				t.Fatalf("error %v, want %v", err, tc.err)
			}
			if (len(events) == 1) != tc.changes {
				t.Errorf("events %+v", events)
			}
			if !tc.changes && !reflect.DeepEqual(before, after) {
				t.Errorf("changed %+v into %+v", before, after)
			}
			if tc.changes && (after.Holding.Set != op.Set || after.Holding.Generation != op.Generation || after.Holding.Epoch != op.Epoch) {
				t.Errorf("holding %+v after %+v", after.Holding, op)
			}
		})
	}
}

func TestDrop(t *testing.T) {
	for _, tc := range []struct {
		name    string
		state   func(*ledger.State)
		op      func(*ledger.Drop)
		changes bool
		err     error
	}{
		{name: "a later generation", op: func(*ledger.Drop) {}, changes: true},
		{name: "the generation that is held", op: func(op *ledger.Drop) { op.Generation = 7 }, err: ledger.ErrGenerationReused},
		{name: "an older generation", op: func(op *ledger.Drop) { op.Generation = 6 }, err: ledger.ErrStaleGeneration},
		{name: "the request id of what is held", op: func(op *ledger.Drop) { op.Request = "r7" }, err: ledger.ErrRequestReused},
		{name: "an older epoch", op: func(op *ledger.Drop) { op.Epoch = 2 }, err: ledger.ErrStaleEpoch},
		{name: "no session", op: func(*ledger.Drop) {}, state: func(s *ledger.State) { s.Session = nil }, err: ledger.ErrSessionUnknown},
		{name: "nothing held: fences late calls off", op: func(*ledger.Drop) {}, state: func(s *ledger.State) { s.Holding = nil }, changes: true},
		{
			name: "dropped before", op: func(*ledger.Drop) {},
			state: func(s *ledger.State) { s.Holding = &ledger.Holding{Dropped: true, Epoch: 3, Generation: 8} },
		},
		{
			name: "held in an epoch before", op: func(op *ledger.Drop) { op.Epoch, op.Generation = 4, 1 },
			state: func(s *ledger.State) { s.Session = &ledger.Session{Epoch: 4} }, changes: true,
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			before, held := stored(t)
			if tc.state != nil {
				tc.state(&before)
			}
			op := ledger.Drop{Session: held.Session, Epoch: 3, Owner: held.Owner, Generation: 8, Request: "r8", At: 2}
			tc.op(&op)
			after, events, err := ledger.Apply(before, op)
			if !errors.Is(err, tc.err) || (err == nil) != (tc.err == nil) {
				t.Fatalf("error %v, want %v", err, tc.err)
			}
			if (len(events) == 1) != tc.changes {
				t.Errorf("events %+v", events)
			}
			if !tc.changes && !reflect.DeepEqual(before, after) {
				t.Errorf("changed %+v into %+v", before, after)
			}
			if tc.changes && (!after.Holding.Dropped || after.Holding.Set != ledger.Digest{}) {
				t.Errorf("holding %+v", after.Holding)
			}
		})
	}
}

func TestAllocate(t *testing.T) {
	ten, eleven := netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("11.0.0.0/8")
	state := ledger.State{
		Range:   ledger.Range{First: 100, Last: 109},
		Numbers: map[netip.Prefix]ledger.Number{ten: 100},
		Owners:  map[ledger.Number]netip.Prefix{100: ten},
	}
	for _, tc := range []struct {
		name   string
		grants []ledger.Grant
		err    error
	}{
		{"free", []ledger.Grant{{Prefix: eleven, Number: 101}}, nil},
		{"the prefix has a number", []ledger.Grant{{Prefix: ten, Number: 101}}, ledger.ErrLost},
		{"the number has a prefix", []ledger.Grant{{Prefix: eleven, Number: 100}}, ledger.ErrLost},
		{"one number twice", []ledger.Grant{{Prefix: eleven, Number: 101}, {Prefix: netip.MustParsePrefix("12.0.0.0/8"), Number: 101}}, ledger.ErrLost},
		{"one prefix twice", []ledger.Grant{{Prefix: eleven, Number: 101}, {Prefix: eleven, Number: 102}}, ledger.ErrLost},
		{"below the range", []ledger.Grant{{Prefix: eleven, Number: 99}}, ledger.ErrNumberOutOfRange},
		{"above the range", []ledger.Grant{{Prefix: eleven, Number: 110}}, ledger.ErrNumberOutOfRange},
		{"world", []ledger.Grant{{Prefix: netip.MustParsePrefix("0.0.0.0/0"), Number: 101}}, ledger.ErrPrefixReserved},
		{"the world of IPv6", []ledger.Grant{{Prefix: netip.MustParsePrefix("::/0"), Number: 101}}, ledger.ErrPrefixReserved},
	} {
		t.Run(tc.name, func(t *testing.T) {
			after, events, err := ledger.Apply(state, ledger.Allocate{Grants: tc.grants, At: 5})
			if !errors.Is(err, tc.err) || (err == nil) != (tc.err == nil) {
				t.Fatalf("error %v, want %v", err, tc.err)
			}
			if err != nil && (events != nil || !reflect.DeepEqual(after, state)) {
				t.Errorf("a refusal changed %+v: %+v", after, events)
			}
			if err == nil && (len(events) != len(tc.grants) || after.Numbers[eleven] != 101 || after.Owners[101] != eleven) {
				t.Errorf("after %+v: %+v", after, events)
			}
			if len(state.Numbers) != 1 || len(state.Owners) != 1 {
				t.Fatal("Apply changed its argument")
			}
		})
	}
}

func TestStoreSetNeedsNumbers(t *testing.T) {
	set := newSet(t, "10.0.0.0/8", "11.0.0.0/8")
	s := ledger.State{Numbers: map[netip.Prefix]ledger.Number{set.Prefixes[0]: 1}}
	if _, events, err := ledger.Apply(s, ledger.StoreSet{Set: set}); !errors.Is(err, ledger.ErrNotReady) || events != nil {
		t.Errorf("a set with a prefix without a number: %v, %v", events, err)
	}
	s.Numbers[set.Prefixes[1]] = 2
	s, events, err := ledger.Apply(s, ledger.StoreSet{Set: set})
	if err != nil || len(events) != 1 || !s.SetStored {
		t.Fatalf("%+v, %v, %v", s, events, err)
	}
	if _, events, err := ledger.Apply(s, ledger.StoreSet{Set: set}); err != nil || len(events) != 0 {
		t.Errorf("a set that is stored: %v, %v", events, err)
	}
}
