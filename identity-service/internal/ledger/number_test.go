package ledger_test

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"testing"

	"pgregory.net/rapid"

	"github.com/eniplane/eniplane/identity-service/internal/ledger"
)

func TestRange(t *testing.T) {
	for _, tc := range []struct {
		r  ledger.Range
		ok bool
	}{
		{ledger.Range{First: ledger.DefaultFirst, Last: ledger.DefaultLast}, true},
		{ledger.Range{First: 1, Last: 1}, true},
		{ledger.Range{First: 0, Last: 5}, false},
		{ledger.Range{First: 6, Last: 5}, false},
		{ledger.Range{First: 1, Last: 1<<32 - 1}, true},
	} {
		if err := tc.r.Validate(); (err == nil) != tc.ok {
			t.Errorf("%+v: %v", tc.r, err)
		}
	}
	whole := ledger.Range{First: 1, Last: 1<<32 - 1}
	if whole.Size() != 1<<32-1 {
		t.Errorf("size %d", whole.Size())
	}
	if r := (ledger.Range{First: ledger.DefaultFirst, Last: ledger.DefaultLast}); r.Contains(16777216) || !r.Contains(16777217) || !r.Contains(33554431) || r.Contains(33554432) {
		t.Error("the default range is not 16777217..33554431")
	}
}

// The first choice depends on the prefix alone: these values must never change,
// or a store that was lost would renumber the world.
func TestFirstChoiceIsStable(t *testing.T) {
	r := ledger.Range{First: ledger.DefaultFirst, Last: ledger.DefaultLast}
	for text, want := range map[string]ledger.Number{
		"10.0.0.0/8": 30191571, "10.0.0.0/16": 17263018, "192.0.2.1/32": 17672726, "2001:db8::/32": 22254717,
	} {
		if got := r.Candidate(netip.MustParsePrefix(text), 0); got != want {
			t.Errorf("%s: %d, want %d", text, got, want)
		}
	}
}

func TestChoose(t *testing.T) {
	r := ledger.Range{First: 100, Last: 103}
	ten := netip.MustParsePrefix("10.0.0.0/8")
	first := r.Candidate(ten, 0)
	following := func(n ledger.Number) ledger.Number {
		if n == r.Last {
			return r.First
		}
		return n + 1
	}
	for _, tc := range []struct {
		name      string
		taken     []ledger.Number
		preferred ledger.Number
		want      ledger.Number
		err       error
	}{
		{name: "its candidate", want: first},
		{name: "the next one", taken: []ledger.Number{first}, want: following(first)},
		{name: "around the end", taken: []ledger.Number{first, following(first), following(following(first))}, want: following(following(following(first)))},
		{name: "the preferred one", preferred: following(first), want: following(first)},
		{name: "the preferred one is taken", preferred: following(first), taken: []ledger.Number{following(first)}, want: first},
		{name: "the preferred one is out of range", preferred: 99, want: first},
		{name: "full", taken: []ledger.Number{100, 101, 102, 103}, err: ledger.ErrNumbersExhausted},
	} {
		t.Run(tc.name, func(t *testing.T) {
			taken := make(map[ledger.Number]bool)
			for _, n := range tc.taken {
				taken[n] = true
			}
			view := ledger.Numbers{Taken: func(n ledger.Number) bool { return taken[n] }, Count: uint64(len(taken))}
			grants, err := ledger.Choose(r, []ledger.Wanted{{Prefix: ten, Preferred: tc.preferred}}, 0, view)
			if !errors.Is(err, tc.err) || (err == nil) != (tc.err == nil) {
				t.Fatalf("error %v, want %v", err, tc.err)
			}
			if err == nil && (len(grants) != 1 || grants[0] != ledger.Grant{Prefix: ten, Number: tc.want}) {
				t.Errorf("%+v, want %d", grants, tc.want)
			}
		})
	}
}

// Whatever is taken and preferred: a choice is free, in range and unlike every
// other, and it fails only if there are too few.
func TestChooseProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := ledger.Range{First: 50, Last: 50 + ledger.Number(rapid.IntRange(0, 20).Draw(t, "size"))}
		number := rapid.Uint32Range(45, 75)
		taken := make(map[ledger.Number]bool)
		for _, n := range rapid.SliceOf(number).Draw(t, "taken") {
			if r.Contains(ledger.Number(n)) {
				taken[ledger.Number(n)] = true
			}
		}
		var wanted []ledger.Wanted
		for i := range rapid.IntRange(0, 25).Draw(t, "wanted") {
			var b [4]byte
			binary.BigEndian.PutUint32(b[:], uint32(i)<<8)
			w := ledger.Wanted{Prefix: netip.PrefixFrom(netip.AddrFrom4(b), 24)}
			if rapid.Bool().Draw(t, "prefers") {
				w.Preferred = ledger.Number(number.Draw(t, "preferred"))
			}
			wanted = append(wanted, w)
		}
		salt := rapid.Uint32Range(0, 2).Draw(t, "salt")
		view := ledger.Numbers{Taken: func(n ledger.Number) bool { return taken[n] }, Count: uint64(len(taken))}
		grants, err := ledger.Choose(r, wanted, salt, view)
		if uint64(len(taken)+len(wanted)) > r.Size() {
			if !errors.Is(err, ledger.ErrNumbersExhausted) {
				t.Fatalf("%d taken, %d wanted of %d: %v", len(taken), len(wanted), r.Size(), err)
			}
			return
		}
		if err != nil || len(grants) != len(wanted) {
			t.Fatalf("%v, %v", grants, err)
		}
		for i, g := range grants {
			if g.Prefix != wanted[i].Prefix || !r.Contains(g.Number) || taken[g.Number] {
				t.Fatalf("%+v for %+v", g, wanted[i])
			}
			taken[g.Number] = true
		}
	})
}
