// Package bpf is the edge to the ipcache map: Cilium's LPM trie in the kernel,
// or the same in memory where no kernel map can be had. It writes batches and
// knows exactly what of them was applied. What should be in the map, and in
// which order it is written, does not belong here.
package bpf

import (
	"errors"
	"net/netip"

	"github.com/eniplane/eniplane/internal/reason"
)

var (
	// ErrLayout says that what is pinned is no map of the configured layout. It is left as
	// it is.
	ErrLayout = errors.New("pinned map has another layout")
	// ErrUnavailable says that no kernel map can be had here, for want of a privilege, of
	// the kernel's support or of a BPF file system.
	ErrUnavailable = errors.New("no kernel map available")
	// ErrFull says that the map takes no further prefix.
	ErrFull = errors.New("map is full")
	// ErrPartial says that a dump ended before it had seen everything.
	ErrPartial = errors.New("dump is incomplete")
)

// Refusal is one prefix that a write did not change.
type Refusal struct {
	// Prefix is the prefix.
	Prefix netip.Prefix
	// Reason is MapFull or MapRefused.
	Reason reason.Reason
	// Err is the cause.
	Err error
}

// Raw is one entry as the map holds it.
type Raw struct {
	Key   Key
	Value Value
}

// Info is what is known about a map.
type Info struct {
	// PinPath is where it is pinned. Empty for a map in memory.
	PinPath string
	// Layout is its layout: "v2".
	Layout string
	// MaxEntries is the most entries that it takes.
	MaxEntries uint32
	// Existed says that the map was there before this process.
	Existed bool
}

// LayoutV2 is the name of the only layout so far.
const LayoutV2 = "v2"

// DefaultMaxEntries is Cilium's size of the map, a constant there.
const DefaultMaxEntries = 512000

func refusal(p netip.Prefix, err error) Refusal {
	r := Refusal{Prefix: p, Reason: reason.MapRefused, Err: err}
	if errors.Is(err, ErrFull) {
		r.Reason = reason.MapFull
	}
	return r
}
