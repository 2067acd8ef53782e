// Package plan decides how the entries of a map become those that are wanted:
// which writes, in which order. It is pure; what a map is does not belong here.
package plan

import (
	"iter"
	"maps"
	"net/netip"
	"slices"

	"github.com/eniplane/eniplane/agent/internal/ipcache"
	"github.com/eniplane/eniplane/internal/prefix"
	"github.com/eniplane/eniplane/internal/reason"
)

// Range is a closed range of numbers.
type Range struct {
	First, Last uint32
}

// Contains reports whether the range has the number.
func (r Range) Contains(number uint32) bool {
	return r.First <= number && number <= r.Last
}

// Input is one reading of the map and of the wish. Both must cover the same
// prefixes: a prefix that is in Have and not in Want is unwanted.
type Input struct {
	// Have is what the map holds.
	Have ipcache.Entries
	// Want is what it should hold.
	Want ipcache.Entries
	// Complete says that the wish is a full view: only then is anything deleted.
	Complete bool
	// Exclusive are the numbers that mean one prefix each. Outside of it several
	// prefixes may share a number (such as the addresses of equal pods).
	Exclusive Range
	// BatchSize is the most entries of one Op. 0 or less means 4096.
	BatchSize int
}

// Op is one write of a batch of entries. It is an Upsert or a Delete.
type Op interface{ op() }

// Upsert writes entries, each in place if its prefix is there already.
type Upsert struct {
	// Entries are sorted by prefix.
	Entries []Item
}

// Delete removes prefixes.
type Delete struct {
	// Prefixes are sorted.
	Prefixes []netip.Prefix
}

func (Upsert) op() {}
func (Delete) op() {}

// Item is one entry with its prefix.
type Item struct {
	Prefix netip.Prefix
	Entry  ipcache.Entry
}

// Plan is what to do, and what can not be done yet.
type Plan struct {
	// Ops are to be carried out in order.
	Ops []Op
	// Blocked are the prefixes that stay as they are although they should not,
	// sorted, for the reason Why.
	Blocked []netip.Prefix
	// Why is why. Unspecified if nothing is blocked.
	Why reason.Reason
}

const defaultBatch = 4096

// Diff returns the writes that turn in.Have into in.Want, in an order in which
// at every moment
//
//   - an exclusive number stands at one prefix at most: where it moves, the old
//     prefix loses it first, and a prefix that is wanted before and after is
//     never absent, except where numbers move in a circle, which is broken at
//     its first prefix;
//   - every other removal comes after all additions, so that an address that is
//     covered before and after by different prefixes never falls through.
//
// Diff of the result and in.Want is empty.
func Diff(in Input) Plan {
	d := differ{Input: in}
	if d.BatchSize <= 0 {
		d.BatchSize = defaultBatch
	}
	return d.plan()
}

type differ struct {
	Input
	upserts map[netip.Prefix]struct{}
	deletes map[netip.Prefix]struct{}
	level   map[netip.Prefix]int // of an upsert: it comes after all lower ones
	blocked map[netip.Prefix]struct{}
	leaves  map[netip.Prefix]struct{} // deleted before anything else
}

func (d *differ) plan() Plan {
	d.upserts = make(map[netip.Prefix]struct{})
	d.deletes = make(map[netip.Prefix]struct{})
	for p, want := range d.Want {
		if have, ok := d.Have[p]; !ok || have != want {
			d.upserts[p] = struct{}{}
		}
	}
	for p := range d.Have {
		if _, ok := d.Want[p]; !ok {
			d.deletes[p] = struct{}{}
		}
	}
	if len(d.upserts) == 0 && len(d.deletes) == 0 {
		return Plan{}
	}
	d.order()

	var plan Plan
	plan.deletes(d.BatchSize, d.leaves)
	byLevel := make(map[int][]Item)
	for p := range d.upserts {
		if _, blocked := d.blocked[p]; !blocked {
			byLevel[d.level[p]] = append(byLevel[d.level[p]], Item{p, d.Want[p]})
		}
	}
	for _, level := range slices.Sorted(maps.Keys(byLevel)) {
		items := byLevel[level]
		slices.SortFunc(items, func(a, b Item) int { return prefix.Compare(a.Prefix, b.Prefix) })
		for batch := range slices.Chunk(items, d.BatchSize) {
			plan.Ops = append(plan.Ops, Upsert{Entries: batch})
		}
	}
	for p := range d.leaves {
		delete(d.deletes, p)
	}
	if d.Complete {
		plan.deletes(d.BatchSize, d.deletes)
	} else {
		for p := range d.deletes {
			d.blocked[p] = struct{}{}
		}
	}
	if len(d.blocked) > 0 {
		plan.Blocked = sorted(maps.Keys(d.blocked))
		plan.Why = reason.SourceNotListed
	}
	return plan
}

// order gives every upsert that takes over a number its place after the write by
// which the number's present prefix loses it.
func (d *differ) order() {
	d.level = make(map[netip.Prefix]int)
	d.blocked = make(map[netip.Prefix]struct{})
	d.leaves = make(map[netip.Prefix]struct{})

	taken := make(map[uint32]bool, len(d.upserts)) // numbers that upserts bring
	for p := range d.upserts {
		if n := d.Want[p].Number; d.Exclusive.Contains(n) {
			taken[n] = true
		}
	}
	losers := make(map[uint32][]netip.Prefix) // who has such a number and will not
	for p, have := range d.Have {
		if !taken[have.Number] {
			continue
		}
		if want, ok := d.Want[p]; !ok || want.Number != have.Number {
			losers[have.Number] = append(losers[have.Number], p)
		}
	}
	if len(losers) == 0 {
		return
	}
	// Walk the takers in order, so that a circle is always broken at its first
	// prefix. Each has done its own losers before itself.
	const walking = -1
	var place func(p netip.Prefix) bool // false: p waits for the caller's own prefix
	place = func(p netip.Prefix) bool {
		if level, ok := d.level[p]; ok {
			return level != walking
		}
		d.level[p] = walking
		level := 0
		slices.SortFunc(losers[d.Want[p].Number], prefix.Compare)
		for _, loser := range losers[d.Want[p].Number] {
			if loser == p {
				continue
			}
			_, unwanted := d.deletes[loser]
			circle := false
			if !unwanted {
				circle = !place(loser)
			}
			_, stuck := d.blocked[loser]
			switch {
			case (unwanted || circle) && d.Complete:
				d.leaves[loser] = struct{}{}
			case unwanted || circle || stuck:
				d.blocked[p] = struct{}{}
			default:
				level = max(level, d.level[loser]+1)
			}
		}
		d.level[p] = level
		return true
	}
	for _, p := range sorted(maps.Keys(d.upserts)) {
		place(p)
	}
}

// deletes appends Delete ops for a set of prefixes.
func (p *Plan) deletes(size int, set map[netip.Prefix]struct{}) {
	for batch := range slices.Chunk(sorted(maps.Keys(set)), size) {
		p.Ops = append(p.Ops, Delete{Prefixes: batch})
	}
}

func sorted(prefixes iter.Seq[netip.Prefix]) []netip.Prefix {
	return slices.SortedFunc(prefixes, prefix.Compare)
}
