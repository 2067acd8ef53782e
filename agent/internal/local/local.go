// Package local keeps what callers on the agent's socket want in the map. They
// are not asked again after a restart, so it is written down. What the map makes
// of it does not belong here.
package local

import (
	"context"
	"fmt"
	"maps"
	"net/netip"

	"go.opentelemetry.io/otel/trace"

	"github.com/eniplane/eniplane/agent/internal/ipcache"
	"github.com/eniplane/eniplane/agent/internal/wish"
)

// Source is the name of the source of prefixes that local callers are.
const Source = "local"

// Sets are the prefixes by the name of their owner.
type Sets map[string][]netip.Prefix

// Owners are the local owners.
type Owners struct {
	wish *wish.Wish
	save func(Sets) error
	turn chan Sets // holds the sets; who has taken them may change them
}

// New returns the owners that were saved, already wished. save writes them down
// and returns when they are safe.
func New(w *wish.Wish, saved Sets, save func(Sets) error) *Owners {
	o := &Owners{wish: w, save: save, turn: make(chan Sets, 1)}
	sets := maps.Clone(saved)
	if sets == nil {
		sets = make(Sets)
	}
	for name, prefixes := range sets {
		w.Replace(Owner(name), metadata(prefixes), trace.SpanContext{})
	}
	w.Listed(Source)
	o.turn <- sets
	return o
}

// Owner returns the owner of a name.
func Owner(name string) ipcache.Owner {
	return ipcache.Owner{Kind: ipcache.KindLocal, Name: name, UID: "local"}
}

// Replace makes prefixes, which must be canonical, the whole set of an owner,
// once that is written down, and returns the version of the wish.
func (o *Owners) Replace(ctx context.Context, name string, prefixes []netip.Prefix) (uint64, error) {
	var version uint64
	err := o.change(ctx, func(sets Sets) { sets[name] = prefixes }, func() {
		version = o.wish.Replace(Owner(name), metadata(prefixes), trace.SpanContextFromContext(ctx))
	})
	return version, err
}

// Remove ends an owner. An unknown one changes nothing.
func (o *Owners) Remove(ctx context.Context, name string) error {
	return o.change(ctx, func(sets Sets) { delete(sets, name) }, func() {
		o.wish.Remove(Owner(name), trace.SpanContextFromContext(ctx))
	})
}

// change writes a change down and then wishes it, one at a time.
func (o *Owners) change(ctx context.Context, change func(Sets), then func()) error {
	var sets Sets
	select {
	case sets = <-o.turn:
	case <-ctx.Done():
		return ctx.Err()
	}
	changed := maps.Clone(sets)
	change(changed)
	err := o.save(changed)
	if err == nil {
		then()
		sets = changed
	}
	o.turn <- sets
	if err != nil {
		return fmt.Errorf("write down local owners: %w", err)
	}
	return nil
}

func metadata(prefixes []netip.Prefix) map[netip.Prefix]ipcache.Metadata {
	set := make(map[netip.Prefix]ipcache.Metadata, len(prefixes))
	for _, p := range prefixes {
		set[p] = ipcache.Metadata{Source: ipcache.SourceLocalAPI}
	}
	return set
}
