// Package plan decides in which order a CiliumNode is written, so that a reader
// who finds any stored version of it finds a consistent one. It is pure: reading
// and writing do not belong here.
package plan

import (
	"cmp"
	"maps"
	"reflect"
	"slices"

	"github.com/eniplane/eniplane/node-syncer/ciliumnode"
)

// Fence orders snapshots, by epoch before generation. The zero value means that
// an object carries none; a snapshot always has one.
type Fence struct {
	Epoch, Generation uint64
}

// Compare returns -1, 0 or 1.
func (f Fence) Compare(g Fence) int {
	return cmp.Or(cmp.Compare(f.Epoch, g.Epoch), cmp.Compare(f.Generation, g.Generation))
}

// Status is the part of an object that is written through its status
// subresource.
type Status struct {
	// ENIs has the ENIs by id.
	ENIs map[string]ciliumnode.ENI
	// Error is what hinders the node; empty if nothing does.
	Error string
}

// Main is the part of an object that is written through its main resource.
type Main struct {
	// Pool has the id of the ENI by address.
	Pool map[string]string
	// Fence is that of the snapshot last written.
	Fence Fence
}

// Node is one reading of what we own in an object, or what should be there.
type Node struct {
	Main   Main
	Status Status
}

// Write is one write to the API server. It is MainWrite or StatusWrite; nothing
// else implements it.
type Write interface{ isWrite() }

// MainWrite replaces the pool and the fence.
type MainWrite struct{ Main Main }

// StatusWrite replaces ENIs and error.
type StatusWrite struct{ Status Status }

func (MainWrite) isWrite()   {}
func (StatusWrite) isWrite() {}

// Apply returns n after w.
func Apply(n Node, w Write) Node {
	switch w := w.(type) {
	case MainWrite:
		n.Main = w.Main
	case StatusWrite:
		n.Status = w.Status
	}
	return n
}

// Canonical returns a copy of n in which lists are sorted and what is empty is
// nil, so that equal nodes are deeply equal. What stands twice in a list stays
// twice: it is part of the digest by which the allocator compares.
func Canonical(n Node) Node {
	out := Node{
		Main:   Main{Fence: n.Main.Fence, Pool: make(map[string]string, len(n.Main.Pool))},
		Status: Status{Error: n.Status.Error, ENIs: make(map[string]ciliumnode.ENI, len(n.Status.ENIs))},
	}
	maps.Copy(out.Main.Pool, n.Main.Pool)
	for id, eni := range n.Status.ENIs {
		eni.Addresses = sorted(eni.Addresses)
		eni.Prefixes = sorted(eni.Prefixes)
		eni.SecurityGroups = sorted(eni.SecurityGroups)
		eni.VPC.CIDRs = sorted(eni.VPC.CIDRs)
		eni.Tags = maps.Clone(eni.Tags)
		if len(eni.Tags) == 0 {
			eni.Tags = nil
		}
		out.Status.ENIs[id] = eni
	}
	return out
}

func sorted(values []string) []string {
	if len(values) == 0 {
		return nil
	}
	return slices.Sorted(slices.Values(values))
}

// Sync returns the fewest writes that turn have into want, in an order that is
// safe for readers (invariant I1):
//
//   - If have is consistent, it is after each prefix of the writes.
//   - After all of them it equals want, which must be consistent; planning again
//     returns none.
//   - A higher epoch is stored by a write to the main resource before anything
//     else (invariant I6): a write to the status cannot carry it.
//
// A snapshot that only grows is widened in the status first, one that only
// shrinks leaves the pool first, and one that does both widens the status to
// old and new, moves the pool, and narrows the status. A have that is broken is
// healed by the same writes. Neither argument is changed; the result may share
// their maps.
func Sync(have, want Node) []Write {
	have, want = Canonical(have), Canonical(want)
	main := !reflect.DeepEqual(have.Main, want.Main)
	status := !reflect.DeepEqual(have.Status, want.Status)

	var writes []Write
	switch {
	case !main && !status:
		return nil
	case !status:
		return []Write{MainWrite{want.Main}}
	case !main:
		return []Write{StatusWrite{want.Status}}
	case covers(have.Status, want.Main.Pool) && (want.Main.Fence.Epoch != have.Main.Fence.Epoch || !covers(want.Status, have.Main.Pool)):
		// What stays in the pool is in the status already. Where either order
		// would do, a new epoch decides for this one, which needs no claim.
		return []Write{MainWrite{want.Main}, StatusWrite{want.Status}}
	}

	if want.Main.Fence.Epoch != have.Main.Fence.Epoch {
		claim := Main{Pool: have.Main.Pool, Fence: want.Main.Fence}
		writes = append(writes, MainWrite{claim})
		have.Main = claim
	}
	if !covers(want.Status, have.Main.Pool) {
		wide := widen(have, want.Status)
		writes = append(writes, StatusWrite{wide})
		return append(writes, MainWrite{want.Main}, StatusWrite{want.Status})
	}
	writes = append(writes, StatusWrite{want.Status})
	if !reflect.DeepEqual(have.Main, want.Main) {
		writes = append(writes, MainWrite{want.Main})
	}
	return writes
}

// covers reports whether every address of the pool is listed by its ENI. s is
// canonical.
func covers(s Status, pool map[string]string) bool {
	for address, id := range pool {
		if !lists(s.ENIs[id], address) {
			return false
		}
	}
	return true
}

// lists reports whether an ENI has an address. Its addresses are sorted.
func lists(eni ciliumnode.ENI, address string) bool {
	_, found := slices.BinarySearch(eni.Addresses, address)
	return found
}

// widen returns to with what the pool of have still needs from the status of
// have. Where both know an ENI, to describes it.
func widen(have Node, to Status) Status {
	wide := Status{Error: to.Error, ENIs: maps.Clone(to.ENIs)}
	for _, address := range slices.Sorted(maps.Keys(have.Main.Pool)) {
		id := have.Main.Pool[address]
		old, known := have.Status.ENIs[id]
		if !known || !lists(old, address) {
			continue // Broken before; the move of the pool heals it.
		}
		eni, kept := wide.ENIs[id]
		if !kept {
			eni = old
			eni.Addresses = nil
		}
		if at, found := slices.BinarySearch(eni.Addresses, address); !found {
			eni.Addresses = slices.Insert(slices.Clone(eni.Addresses), at, address)
		}
		wide.ENIs[id] = eni
	}
	return wide
}
