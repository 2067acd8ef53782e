package syncer

import (
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/eniplane/eniplane/node-syncer/ciliumnode"
	"github.com/eniplane/eniplane/node-syncer/internal/view"
)

// ErrStaleReport means: a newer report of the same node was taken before.
var ErrStaleReport = errors.New("a newer report was taken before")

// defaultPreAllocate is what an absent or zero pre-allocate means.
const defaultPreAllocate = 8

// used is what an agent says its node uses, by address.
type used map[string]ciliumnode.Allocation

// report takes, at a given time, what an agent uses and who waits, and returns
// when that should be written: the same time if a watermark was crossed or
// nothing was written for an interval. Errors are ErrNotReady, ErrNodeUnknown and
// ErrStaleReport.
func (s *Store) report(name string, sequence uint64, reported used, waiting uint32, now time.Time) (time.Time, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.synced {
		return time.Time{}, ErrNotReady
	}
	e := s.nodes[name]
	if e == nil || e.object == nil || !view.Registered(e.object) {
		return time.Time{}, fmt.Errorf("%w: %s was not registered", ErrNodeUnknown, name)
	}
	if sequence < e.sequence {
		return time.Time{}, fmt.Errorf("%w: %s", ErrStaleReport, name)
	}
	e.sequence = sequence
	before := used(e.around.Used)
	if before == nil {
		before = e.object.Status.IPAM.Used
	}
	pre := e.object.Spec.IPAM.PreAllocate
	if pre == 0 {
		pre = defaultPreAllocate
	}
	short := func(u used) bool { return len(e.object.Spec.IPAM.Pool)-len(u) < pre }
	changed := !maps.Equal(before, reported) || e.around.Waiting != waiting
	e.around.Used, e.around.Waiting = reported, waiting
	if changed {
		s.touch(name, e)
	}
	if due := e.flushed.Add(usageInterval); now.Before(due) && short(before) == short(reported) {
		return due, nil
	}
	e.flushed = now
	return now, nil
}

// reported returns a node's object, and what its agent reported and is not known
// to be stored; nil if nothing is left to store. Errors are ErrNotReady, and
// ErrNodeUnknown, also of a node that no agent of ours registered.
func (s *Store) reported(name string) (*ciliumnode.CiliumNode, used, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.synced {
		return nil, nil, ErrNotReady
	}
	e := s.nodes[name]
	if e == nil || e.object == nil || !view.Registered(e.object) {
		return nil, nil, fmt.Errorf("%w: %s was not registered", ErrNodeUnknown, name)
	}
	return e.object, e.around.Used, nil
}

// settled takes that u is stored: from now on the object says what is used, as
// another replica may take the next report.
func (s *Store) settled(name string, u used) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.nodes[name]; e != nil && e.around.Used != nil && maps.Equal(e.around.Used, u) {
		e.around.Used = nil
	}
}

// flushes takes that a report is about to be written.
func (s *Store) flushes(name string, at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.nodes[name]; e != nil {
		e.flushed = at
	}
}

// turn returns the token of those who write reports of a node.
func (s *Store) turn(name string) chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.nodes[name]; e != nil {
		return e.flushing
	}
	return make(chan struct{}, 1)
}
