// Package ipam decides which address of a node goes to whom. It is pure: the
// node's view and the time are handed in; asking for more addresses, waiting and
// saving do not belong here.
//
// An address under an owner stays with it whatever a later view says, and an
// address for which the node said yes to a release is not given out again while
// that release lasts.
package ipam

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"
)

// Config are the settings of a Pool.
type Config struct {
	// CoolDown is how long an address that was taken back rests before another
	// owner gets it. 0 means not at all.
	CoolDown time.Duration
}

// Pool is the addresses of one node. It is not safe for concurrent use.
type Pool struct {
	config   Config
	view     View
	seen     bool // whether there was a view
	byAddr   map[netip.Addr]Allocation
	byOwner  map[Owner]netip.Addr
	leaving  map[netip.Addr]RoundID
	released map[netip.Addr]time.Time
	releases map[netip.Addr]Release // of the view, by address
	answers  map[netip.Addr]Answer  // to the marks of the view
}

// New returns a pool without a view, with what survived a restart. A zero State
// means that nothing did.
func New(config Config, state State) *Pool {
	p := &Pool{
		config:   config,
		byAddr:   make(map[netip.Addr]Allocation, len(state.Used)),
		byOwner:  make(map[Owner]netip.Addr, len(state.Used)),
		leaving:  make(map[netip.Addr]RoundID),
		released: make(map[netip.Addr]time.Time),
	}
	for _, a := range state.Used {
		p.byAddr[a.Address] = a
		p.byOwner[a.Owner] = a.Address
	}
	maps.Copy(p.leaving, state.Leaving)
	maps.Copy(p.released, state.Released)
	return p
}

// SetView makes a newer view the present one, answers its marks, and gives the
// router its address if it has none.
func (p *Pool) SetView(view View, now time.Time) {
	p.view, p.seen = view, true
	p.releases = make(map[netip.Addr]Release, len(view.Releases))
	for _, r := range view.Releases {
		p.releases[r.Address] = r
	}
	for addr, a := range p.byAddr {
		if eni, ok := p.carrier(addr); ok {
			a.ENI = eni
			p.byAddr[addr] = a
		}
	}
	for addr := range p.released {
		if _, ok := view.Pool[addr]; !ok {
			delete(p.released, addr)
		}
	}
	for addr, round := range p.leaving {
		r, ok := p.releases[addr]
		under := ok && (r.State == ReleaseMarked && r.Round == round || r.State == ReleaseReady || r.State == ReleaseDone)
		if !under {
			delete(p.leaving, addr) // aborted, or over
		}
	}
	p.routerFirst(now)
	p.answerMarks()
}

// answerMarks says yes to a mark only for an address of the pool that nobody
// has. An answer stands for its round.
func (p *Pool) answerMarks() {
	answers := make(map[netip.Addr]Answer)
	for addr, r := range p.releases {
		if r.State != ReleaseMarked {
			continue
		}
		a, answered := p.answers[addr]
		if !answered || a.Round != r.Round {
			_, pooled := p.carrier(addr)
			_, used := p.byAddr[addr]
			a = Answer{Address: addr, Round: r.Round, Yes: p.leaving[addr] == r.Round || pooled && !used}
		}
		if a.Yes {
			p.leaving[addr] = r.Round
		}
		answers[addr] = a
	}
	p.answers = answers
}

// Allocate gives an owner an address: the one that it has, else the wanted one,
// else any if want is the zero Addr. The choice is the address that rested
// longest, on the first interface. Errors are ErrNoView, ErrEmpty, ErrUnknown and
// ErrInUse, wrapped. The router always comes first: as long as it can not be
// served nobody is.
func (p *Pool) Allocate(owner Owner, want netip.Addr, now time.Time) (Allocation, error) {
	if addr, ok := p.byOwner[owner]; ok {
		if want.IsValid() && want != addr {
			return Allocation{}, fmt.Errorf("%w: %s has %s", ErrInUse, owner, addr)
		}
		return p.byAddr[addr], nil
	}
	if !p.seen {
		return Allocation{}, ErrNoView
	}
	if want.IsValid() {
		return p.allocateWanted(owner, want, now)
	}
	p.routerFirst(now)
	if a, ok := p.byOwner[owner]; ok { // the router itself
		return p.byAddr[a], nil
	}
	if _, ok := p.byOwner[Router]; !ok {
		return Allocation{}, fmt.Errorf("%w: not even for the router", ErrEmpty)
	}
	addr, ok := p.choose(now)
	if !ok {
		return Allocation{}, fmt.Errorf("%w: %d in use of %d", ErrEmpty, len(p.byAddr), len(p.view.Pool))
	}
	return p.give(owner, addr, now), nil
}

func (p *Pool) allocateWanted(owner Owner, want netip.Addr, now time.Time) (Allocation, error) {
	if a, ok := p.byAddr[want]; ok {
		return Allocation{}, fmt.Errorf("%w: %s has %s", ErrInUse, a.Owner, want)
	}
	if _, ok := p.carrier(want); !ok {
		return Allocation{}, fmt.Errorf("%w: %s", ErrUnknown, want)
	}
	if p.isLeaving(want) {
		return Allocation{}, fmt.Errorf("%w: %s is being released", ErrUnknown, want)
	}
	if owner != Router {
		p.routerFirst(now)
		if _, ok := p.byAddr[want]; ok || !p.byOwner[Router].IsValid() {
			return Allocation{}, fmt.Errorf("%w: %s goes to the router", ErrInUse, want)
		}
	}
	return p.give(owner, want, now), nil
}

// Release takes an address back from its owner. The zero Addr means whatever the
// owner has. It returns the address that is free now, or the zero Addr if the
// owner had none. The error is ErrInUse, wrapped, for an address of another
// owner.
func (p *Pool) Release(owner Owner, addr netip.Addr, now time.Time) (netip.Addr, error) {
	has, ok := p.byOwner[owner]
	if a, used := p.byAddr[addr]; used && a.Owner != owner {
		return netip.Addr{}, fmt.Errorf("%w: %s has %s", ErrInUse, a.Owner, addr)
	}
	if !ok || addr.IsValid() && addr != has {
		return netip.Addr{}, nil
	}
	delete(p.byOwner, owner)
	delete(p.byAddr, has)
	if _, pooled := p.view.Pool[has]; pooled || !p.seen {
		p.released[has] = now
	}
	return has, nil
}

// Of returns the allocation of an owner.
func (p *Pool) Of(owner Owner) (Allocation, bool) {
	addr, ok := p.byOwner[owner]
	return p.byAddr[addr], ok
}

// Used returns all allocations, sorted by address.
func (p *Pool) Used() []Allocation {
	return slices.SortedFunc(maps.Values(p.byAddr), func(a, b Allocation) int { return a.Address.Compare(b.Address) })
}

// Free returns how many addresses could be given out now.
func (p *Pool) Free(now time.Time) int {
	n := 0
	for addr := range p.view.Pool {
		if p.available(addr, now) {
			n++
		}
	}
	return n
}

// List returns every address of the view and every one that is in use, sorted.
func (p *Pool) List() []Status {
	all := make(map[netip.Addr]Status, len(p.view.Pool))
	for addr, eni := range p.view.Pool {
		all[addr] = Status{Address: addr, ENI: eni, InPool: true}
	}
	for addr, a := range p.byAddr {
		_, pooled := p.view.Pool[addr]
		all[addr] = Status{Address: addr, ENI: a.ENI.ID, Owner: a.Owner, Since: a.Since, InPool: pooled}
	}
	return slices.SortedFunc(maps.Values(all), func(a, b Status) int { return a.Address.Compare(b.Address) })
}

// Retained returns the addresses in use that the view no longer has, sorted.
// None before there is a view.
func (p *Pool) Retained() []Allocation {
	if !p.seen {
		return nil
	}
	return slices.DeleteFunc(p.Used(), func(a Allocation) bool {
		_, pooled := p.view.Pool[a.Address]
		return pooled
	})
}

// Stray returns the addresses of the view whose interface the view lacks,
// sorted. A sound view has none.
func (p *Pool) Stray() []netip.Addr {
	var stray []netip.Addr
	for addr := range p.view.Pool {
		if _, ok := p.carrier(addr); !ok {
			stray = append(stray, addr)
		}
	}
	slices.SortFunc(stray, netip.Addr.Compare)
	return stray
}

// Answers returns the answers to the marks of the view, sorted by address. What
// got a yes is in State before anybody may be told.
func (p *Pool) Answers() []Answer {
	return slices.SortedFunc(maps.Values(p.answers), func(a, b Answer) int { return a.Address.Compare(b.Address) })
}

// State returns what must survive a restart. The caller owns it.
func (p *Pool) State() State {
	return State{Used: p.Used(), Leaving: maps.Clone(p.leaving), Released: maps.Clone(p.released)}
}

func (p *Pool) routerFirst(now time.Time) {
	if _, ok := p.byOwner[Router]; ok {
		return
	}
	if addr, ok := p.choose(now); ok {
		p.give(Router, addr, now)
	}
}

func (p *Pool) give(owner Owner, addr netip.Addr, now time.Time) Allocation {
	eni, _ := p.carrier(addr)
	a := Allocation{Address: addr, Owner: owner, ENI: eni, Since: now}
	p.byAddr[addr] = a
	p.byOwner[owner] = addr
	delete(p.released, addr)
	return a
}

// choose returns the best address that is available: one that nobody wants back
// first, then the one that rested longest, then by interface and address.
func (p *Pool) choose(now time.Time) (netip.Addr, bool) {
	var best netip.Addr
	for addr := range p.view.Pool {
		if p.available(addr, now) && (!best.IsValid() || p.compare(addr, best) < 0) {
			best = addr
		}
	}
	return best, best.IsValid()
}

func (p *Pool) compare(a, b netip.Addr) int {
	wantedBack := func(addr netip.Addr) int {
		if _, ok := p.releases[addr]; ok {
			return 1
		}
		return 0
	}
	eniA, _ := p.carrier(a)
	eniB, _ := p.carrier(b)
	return cmp.Or(
		cmp.Compare(wantedBack(a), wantedBack(b)),
		p.released[a].Compare(p.released[b]),
		cmp.Compare(eniA.DeviceIndex, eniB.DeviceIndex),
		a.Compare(b),
	)
}

func (p *Pool) available(addr netip.Addr, now time.Time) bool {
	if _, used := p.byAddr[addr]; used || p.isLeaving(addr) {
		return false
	}
	if _, ok := p.carrier(addr); !ok {
		return false
	}
	at, rested := p.released[addr]
	return !rested || p.config.CoolDown <= 0 || !now.Before(at.Add(p.config.CoolDown))
}

// isLeaving reports whether the node said yes to taking the address, in this
// process or, as the view shows, in another.
func (p *Pool) isLeaving(addr netip.Addr) bool {
	if _, ok := p.leaving[addr]; ok {
		return true
	}
	s := p.releases[addr].State
	return s == ReleaseReady || s == ReleaseDone
}

func (p *Pool) carrier(addr netip.Addr) (ENI, bool) {
	id, ok := p.view.Pool[addr]
	if !ok {
		return ENI{}, false
	}
	eni, ok := p.view.ENIs[id]
	return eni, ok
}
