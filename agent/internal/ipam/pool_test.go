package ipam

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"
)

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func ip(last int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, 0, byte(last)}) }

// view has eni-a (device 1) with the addresses below 100 and eni-b (device 0)
// with the others.
func view(addresses ...int) View {
	v := View{Pool: make(map[netip.Addr]ENIID), ENIs: map[ENIID]ENI{
		"eni-a": {ID: "eni-a", MAC: "02:00:00:00:00:0a", DeviceIndex: 1},
		"eni-b": {ID: "eni-b", MAC: "02:00:00:00:00:0b", DeviceIndex: 0},
	}}
	for _, a := range addresses {
		v.Pool[ip(a)] = "eni-a"
		if a >= 100 {
			v.Pool[ip(a)] = "eni-b"
		}
	}
	return v
}

func (v View) with(releases ...Release) View {
	v.Releases = releases
	return v
}

func give(t *testing.T, p *Pool, owner Owner) Allocation {
	t.Helper()
	a, err := p.Allocate(owner, netip.Addr{}, start)
	if err != nil {
		t.Fatalf("%s: %v", owner, err)
	}
	return a
}

func TestRouterComesFirst(t *testing.T) {
	p := New(Config{}, State{})
	if _, err := p.Allocate("ns/a", netip.Addr{}, start); !errors.Is(err, ErrNoView) {
		t.Fatalf("before a view: %v", err)
	}
	p.SetView(view(), start)
	if _, err := p.Allocate("ns/a", netip.Addr{}, start); !errors.Is(err, ErrEmpty) {
		t.Fatalf("from an empty view: %v", err)
	}
	p.SetView(view(5), start)
	if a, ok := p.Of(Router); !ok || a.Address != ip(5) {
		t.Fatalf("router %v", a)
	}
	if _, err := p.Allocate("ns/a", netip.Addr{}, start); !errors.Is(err, ErrEmpty) {
		t.Fatalf("the only address is the router's: %v", err)
	}
	p.SetView(view(5, 6), start)
	if a := give(t, p, "ns/a"); a.Address != ip(6) || a.ENI.MAC != "02:00:00:00:00:0a" {
		t.Fatalf("got %v", a)
	}
}

// cilium#16494: the agent took an address whose interface it did not know for
// its router, and died.
func TestAddressOfAnUnknownInterfaceIsNotGiven(t *testing.T) {
	p := New(Config{}, State{})
	v := view(5, 6)
	v.Pool[ip(1)] = "eni-unknown"
	p.SetView(v, start)
	if a, _ := p.Of(Router); a.Address != ip(5) {
		t.Errorf("router %v", a)
	}
	if got := p.Stray(); !slices.Equal(got, []netip.Addr{ip(1)}) {
		t.Errorf("stray %v", got)
	}
	if _, err := p.Allocate("ns/a", ip(1), start); !errors.Is(err, ErrUnknown) {
		t.Errorf("wanted: %v", err)
	}
}

func TestAllocate(t *testing.T) {
	p := New(Config{}, State{})
	p.SetView(view(1, 2, 3, 101), start)
	if a, _ := p.Of(Router); a.Address != ip(101) {
		t.Errorf("router %v, want the first interface's", a)
	}
	a := give(t, p, "ns/a")
	if again := give(t, p, "ns/a"); again.Address != a.Address {
		t.Errorf("the same owner got %v and %v", a, again)
	}
	for _, tt := range []struct {
		owner Owner
		want  int
		err   error
	}{
		{"ns/a", 1, nil}, {"ns/a", 2, ErrInUse}, {"ns/b", 1, ErrInUse}, {"ns/b", 101, ErrInUse}, {"ns/b", 9, ErrUnknown}, {"ns/b", 3, nil},
	} {
		if _, err := p.Allocate(tt.owner, ip(tt.want), start); !errors.Is(err, tt.err) {
			t.Errorf("%s wants %d: %v, want %v", tt.owner, tt.want, err, tt.err)
		}
	}
	if n := p.Free(start); n != 1 {
		t.Errorf("%d free", n)
	}
}

func TestReleaseIsTheOwnersOnly(t *testing.T) {
	p := New(Config{}, State{})
	p.SetView(view(1, 2, 3), start)
	give(t, p, "ns/a")
	for _, tt := range []struct {
		owner Owner
		addr  netip.Addr
		freed netip.Addr
		err   error
	}{
		{"ns/b", netip.Addr{}, netip.Addr{}, nil},
		{"ns/b", ip(2), netip.Addr{}, ErrInUse},
		{"ns/b", ip(3), netip.Addr{}, nil},
		{"ns/a", ip(3), netip.Addr{}, nil},
		{"ns/a", ip(2), ip(2), nil},
		{"ns/a", ip(2), netip.Addr{}, nil},
	} {
		got, err := p.Release(tt.owner, tt.addr, start)
		if got != tt.freed || !errors.Is(err, tt.err) {
			t.Errorf("%s releases %s: %s, %v", tt.owner, tt.addr, got, err)
		}
	}
}

func TestLongestRestedFirst(t *testing.T) {
	p := New(Config{CoolDown: time.Minute}, State{})
	p.SetView(view(1, 2, 3), start)
	give(t, p, "ns/a") // 2
	give(t, p, "ns/b") // 3
	at := func(s int) time.Time { return start.Add(time.Duration(s) * time.Second) }
	for owner, s := range map[Owner]int{"ns/a": 10, "ns/b": 5} {
		if _, err := p.Release(owner, netip.Addr{}, at(s)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := p.Allocate("ns/c", netip.Addr{}, at(64)); !errors.Is(err, ErrEmpty) {
		t.Errorf("while both rest: %v", err)
	}
	if p.Free(at(64)) != 0 || p.Free(at(65)) != 1 || p.Free(at(70)) != 2 {
		t.Errorf("free: %d %d %d", p.Free(at(64)), p.Free(at(65)), p.Free(at(70)))
	}
	if a, err := p.Allocate("ns/c", netip.Addr{}, at(100)); err != nil || a.Address != ip(3) {
		t.Errorf("got %v, %v, want the one that rested longest", a, err)
	}
}

func TestShrinkingUnderUseKeepsTheAddress(t *testing.T) {
	p := New(Config{}, State{})
	p.SetView(view(1, 2, 3), start)
	a := give(t, p, "ns/a")
	p.SetView(view(1, 3), start)
	if got := p.Retained(); len(got) != 1 || got[0].Address != a.Address {
		t.Fatalf("retained %v", got)
	}
	if got := give(t, p, "ns/a"); got.Address != a.Address || got.ENI.ID != "eni-a" {
		t.Errorf("got %v", got)
	}
	for _, s := range p.List() {
		if s.InPool == (s.Address == a.Address) {
			t.Errorf("listed %+v", s)
		}
	}
	if _, err := p.Release("ns/a", netip.Addr{}, start); err != nil {
		t.Fatal(err)
	}
	for {
		b, err := p.Allocate(Owner(fmt.Sprint("ns/", p.Free(start))), netip.Addr{}, start)
		if err != nil {
			break
		}
		if b.Address == a.Address {
			t.Fatal("an address that left the pool was given out")
		}
	}
}

func TestMarks(t *testing.T) {
	p := New(Config{}, State{})
	p.SetView(view(1, 2, 3), start)
	give(t, p, "ns/a") // 2
	marked := func(round RoundID, state ReleaseState) View {
		return view(1, 2, 3).with(
			Release{Address: ip(1), State: state, Round: round},
			Release{Address: ip(2), State: state, Round: round},
			Release{Address: ip(3), State: state, Round: round},
			Release{Address: ip(9), State: state, Round: round},
		)
	}
	p.SetView(marked("", ReleaseExcess), start)
	if got := p.Answers(); len(got) != 0 {
		t.Errorf("answers before anybody asks: %v", got)
	}
	p.SetView(marked("r1", ReleaseMarked), start)
	want := []Answer{{ip(1), "r1", false}, {ip(2), "r1", false}, {ip(3), "r1", true}, {ip(9), "r1", false}}
	same := cmpopts.EquateComparable(netip.Addr{})
	if diff := cmp.Diff(want, p.Answers(), same); diff != "" {
		t.Fatal(diff)
	}
	if _, err := p.Allocate("ns/b", netip.Addr{}, start); !errors.Is(err, ErrEmpty) {
		t.Errorf("after the yes: %v", err)
	}
	if _, err := p.Allocate("ns/b", ip(3), start); !errors.Is(err, ErrUnknown) {
		t.Errorf("after the yes, wanted: %v", err)
	}
	// An answer stands for its round, and what the yes withholds survives a restart.
	if _, err := p.Release("ns/a", netip.Addr{}, start); err != nil {
		t.Fatal(err)
	}
	p.SetView(marked("r1", ReleaseMarked), start)
	if diff := cmp.Diff(want, p.Answers(), same); diff != "" {
		t.Error(diff)
	}
	p = New(Config{}, p.State())
	p.SetView(view(1, 3).with(Release{Address: ip(3), State: ReleaseMarked, Round: "r1"}), start)
	if diff := cmp.Diff([]Answer{{ip(3), "r1", true}}, p.Answers(), same); diff != "" {
		t.Error(diff)
	}
	// Aborted: the address is usable again, and the next round is another question.
	p.SetView(view(1, 3), start)
	if a := give(t, p, "ns/c"); a.Address != ip(3) {
		t.Fatalf("got %v", a)
	}
	p.SetView(view(1, 3).with(Release{Address: ip(3), State: ReleaseMarked, Round: "r2"}), start)
	if diff := cmp.Diff([]Answer{{ip(3), "r2", false}}, p.Answers(), same); diff != "" {
		t.Error(diff)
	}
}

// A yes of a process whose state was lost still stands on the object.
func TestReadyWithoutStateIsWithheld(t *testing.T) {
	for _, s := range []ReleaseState{ReleaseReady, ReleaseDone} {
		p := New(Config{}, State{})
		p.SetView(view(1, 2).with(Release{Address: ip(1), State: s, Round: "r"}), start)
		if a, _ := p.Of(Router); a.Address != ip(2) {
			t.Errorf("state %d: router %v", s, a)
		}
	}
}

func TestStateSurvivesJSON(t *testing.T) {
	p := New(Config{}, State{})
	p.SetView(view(1, 2, 3, 4).with(Release{Address: ip(4), State: ReleaseMarked, Round: "r"}), start)
	give(t, p, "ns/a")
	give(t, p, "ns/b")
	if _, err := p.Release("ns/a", netip.Addr{}, start); err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(p.State())
	if err != nil {
		t.Fatal(err)
	}
	var state State
	if err := json.Unmarshal(text, &state); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(p.State(), state, cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})); diff != "" {
		t.Error(diff)
	}
	// Without any view the owners keep what they have.
	if a := give(t, New(Config{}, state), "ns/b"); a.Address != ip(3) || a.ENI.ID != "eni-a" {
		t.Errorf("got %v", a)
	}
}

// Whatever happens in whatever order: one owner an address, one address an
// owner, nothing under an owner is taken, and nothing is given between a yes and
// the end of its round.
func TestPoolLaws(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := New(Config{}, State{})
		owners := []Owner{Router, "ns/a", "ns/b", "ns/c", "ns/d"}
		model := make(map[Owner]netip.Addr)
		var current View
		yes := make(map[netip.Addr]RoundID)
		rounds := 0
		setView := func(v View) {
			current = v
			p.SetView(v, start)
			states := make(map[netip.Addr]Release)
			for _, r := range v.Releases {
				states[r.Address] = r
			}
			for addr, round := range yes {
				if r := states[addr]; r.State != ReleaseReady && (r.State != ReleaseMarked || r.Round != round) {
					delete(yes, addr)
				}
			}
			for _, a := range p.Answers() {
				if a.Yes {
					for o, addr := range model {
						if addr == a.Address {
							t.Fatalf("yes for %s, which %s has", addr, o)
						}
					}
					yes[a.Address] = a.Round
				}
			}
			if r, ok := p.Of(Router); ok {
				model[Router] = r.Address
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"view": func(t *rapid.T) {
				v := view()
				for _, a := range []int{1, 2, 3, 4, 101, 102} {
					if rapid.IntRange(0, 3).Draw(t, "in pool") == 0 {
						continue
					}
					v.Pool[ip(a)] = view(a).Pool[ip(a)]
					switch rapid.IntRange(0, 5).Draw(t, "release") {
					case 0:
						rounds++
						v.Releases = append(v.Releases, Release{ip(a), ReleaseMarked, RoundID(fmt.Sprint(rounds))})
					case 1: // the same as before, or recorded
						for _, r := range current.Releases {
							if r.Address == ip(a) {
								if round, ok := yes[ip(a)]; ok && round == r.Round && rapid.Bool().Draw(t, "recorded") {
									r.State = ReleaseReady
								}
								v.Releases = append(v.Releases, r)
							}
						}
					}
				}
				setView(v)
			},
			"allocate": func(t *rapid.T) {
				o := rapid.SampledFrom(owners).Draw(t, "owner")
				var want netip.Addr
				if rapid.Bool().Draw(t, "wants") {
					want = ip(rapid.SampledFrom([]int{1, 2, 101}).Draw(t, "address"))
				}
				a, err := p.Allocate(o, want, start)
				if r, ok := p.Of(Router); ok {
					model[Router] = r.Address
				}
				if err != nil {
					return
				}
				if had, ok := model[o]; ok && had != a.Address {
					t.Fatalf("%s had %s and got %s", o, had, a.Address)
				}
				if _, had := model[o]; !had {
					if _, ok := yes[a.Address]; ok {
						t.Fatalf("%s given after a yes", a.Address)
					}
					if _, ok := current.Pool[a.Address]; !ok {
						t.Fatalf("%s is not in the pool", a.Address)
					}
				}
				model[o] = a.Address
			},
			"release": func(t *rapid.T) {
				o := rapid.SampledFrom(owners).Draw(t, "owner")
				addr, err := p.Release(o, netip.Addr{}, start)
				if err != nil || addr != model[o] {
					t.Fatalf("%s released %s, %v, had %s", o, addr, err, model[o])
				}
				delete(model, o)
			},
			"restart": func(t *rapid.T) {
				p = New(Config{}, p.State())
				setView(current)
			},
			"": func(t *rapid.T) {
				holder := make(map[netip.Addr]Owner)
				for o, addr := range model {
					if other, ok := holder[addr]; ok {
						t.Fatalf("%s has two owners, %s and %s", addr, o, other)
					}
					holder[addr] = o
				}
				if len(p.Used()) != len(model) {
					t.Fatalf("used %v, model %v", p.Used(), model)
				}
				for _, a := range p.Used() {
					if model[a.Owner] != a.Address {
						t.Fatalf("%s has %s, model %s", a.Owner, a.Address, model[a.Owner])
					}
				}
			},
		})
	})
}
