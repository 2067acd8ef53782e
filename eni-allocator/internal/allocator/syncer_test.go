package allocator_test

import (
	"fmt"

	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"

	"github.com/eniplane/eniplane/eni-allocator/internal/syncertest"
)

// syncer is a node-syncer with what these tests ask of it.
type syncer struct{ *syncertest.Syncer }

// published returns the snapshot stored of a node, or an empty one.
func (s syncer) published(name string) *nodev1.PoolSnapshot {
	if snap := s.Published(name); snap != nil {
		return snap
	}
	return &nodev1.PoolSnapshot{}
}

// pool returns the addresses published of a node.
func (s syncer) pool(name string) []string {
	var out []string
	for _, p := range s.published(name).GetPool() {
		out = append(out, p.GetAddress())
	}
	return out
}

// use says that the first n published addresses of a node are in use.
func (s syncer) use(name string, n int) {
	pool := s.pool(name)
	s.Edit(name, func(d *nodev1.NodeDemand) {
		d.Used = nil
		for i, a := range pool[:n] {
			d.Used = append(d.Used, &nodev1.UsedAddress{Address: a, Owner: fmt.Sprintf("default/pod-%d", i)})
		}
	})
}
