// Package syncer keeps what is known of every node, hands it to those who watch,
// and brings CiliumNodes to what the allocator publishes. The order of writes is
// plan's, the API calls are kube's.
package syncer

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/node-syncer/ciliumnode"
	"github.com/eniplane/eniplane/node-syncer/internal/kube"
	"github.com/eniplane/eniplane/node-syncer/internal/view"
)

var (
	// ErrNotReady means: what exists has not been listed yet.
	ErrNotReady = errors.New("the cluster has not been listed yet")
	// ErrNodeUnknown means: there is no such node, or it was never registered.
	ErrNodeUnknown = errors.New("no such node")
	// ErrRevisionUnknown means: the revision to resume from is not one of this process,
	// or too old.
	ErrRevisionUnknown = errors.New("the revision to resume from is not known here")
)

// maxTombstones bounds how many removals a watcher may have missed and still
// resume.
const maxTombstones = 10_000

// Store has the newest reading of every node. It is fed by kube.Watch and read by
// any number of goroutines. Values that it returns are shared: do not change them.
type Store struct {
	instance string // names this process in revisions

	mu         sync.Mutex // guards everything below
	synced     bool
	ready      chan struct{}
	revision   uint64
	nodes      map[string]*entry
	tombstones []tombstone
	forgotten  uint64 // the highest revision among tombstones that were dropped
	demand     map[*DemandWatch]struct{}
}

type entry struct {
	object   *ciliumnode.CiliumNode // nil if there is no CiliumNode
	ours     bool                   // object is what we wrote; the informer has not told it yet
	around   view.Surroundings
	hasNode  bool
	changed  uint64 // the revision of the last change
	agents   map[*NodeWatch]struct{}
	sequence uint64        // of the agent's last report
	flushed  time.Time     // when a write of a report last began
	flushing chan struct{} // holds one token: whoever has it writes reports
}

type tombstone struct {
	revision uint64
	removal  *nodev1.NodeRemoval
}

// NewStore returns an empty store. instance names this process: revisions of
// another one are not understood.
func NewStore(instance string) *Store {
	return &Store{
		instance: instance, ready: make(chan struct{}),
		nodes: make(map[string]*entry), demand: make(map[*DemandWatch]struct{}),
	}
}

// Ready is closed once everything that exists has been listed.
func (s *Store) Ready() <-chan struct{} { return s.ready }

func (s *Store) at(name string) *entry {
	e := s.nodes[name]
	if e == nil {
		e = &entry{agents: make(map[*NodeWatch]struct{}), flushing: make(chan struct{}, 1)}
		s.nodes[name] = e
	}
	return e
}

// touch marks a node as changed and wakes those who watch it.
func (s *Store) touch(name string, e *entry) {
	s.revision++
	e.changed = s.revision
	for w := range e.agents {
		w.wake()
	}
	for w := range s.demand {
		w.push(name)
	}
}

// drop forgets an entry that nothing refers to.
func (s *Store) drop(name string, e *entry) {
	if e.object == nil && !e.hasNode && len(e.agents) == 0 && e.around.PendingPods == 0 {
		delete(s.nodes, name)
	}
}

// CiliumNodeChanged takes a newer version of an object.
func (s *Store) CiliumNodeChanged(n *ciliumnode.CiliumNode) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.at(n.Name)
	if e.ours && older(n, e.object) {
		return // It was told late; what we wrote since is known already.
	}
	if e.object != nil && e.object.UID != n.UID {
		s.remove(e, e.object)
	}
	told := e.ours && e.object.UID == n.UID && e.object.ResourceVersion == n.ResourceVersion
	e.object, e.ours = n, false
	if !view.Registered(n) {
		e.around.Used, e.around.Waiting = nil, 0 // Whoever took it over writes what is used.
	}
	if !told {
		s.touch(n.Name, e)
	}
}

// wrote takes the answer to a write of ours, so that whoever reads next finds it
// before the informer tells it. An object that the informer does not have, or no
// longer has, is left to it: only it learns of removals.
func (s *Store) wrote(n *ciliumnode.CiliumNode) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.nodes[n.Name]
	if e == nil || e.object == nil || !older(e.object, n) {
		return
	}
	e.object, e.ours = n, true
	s.touch(n.Name, e)
}

// older reports whether a is an earlier version of the same object as b.
// Kubernetes orders the versions of one resource since v1.35; what cannot be
// compared is not older.
func older(a, b *ciliumnode.CiliumNode) bool {
	if a.UID != b.UID {
		return false
	}
	return OlderRevision(a.ResourceVersion, b.ResourceVersion)
}

// OlderRevision reports whether a is an earlier version of an object than b.
// What cannot be compared, such as an empty one, is not older.
func OlderRevision(a, b string) bool {
	order, err := resourceversion.CompareResourceVersion(a, b)
	return err == nil && order < 0
}

// await returns once the informer has told of n, or ctx ends: those who ask here
// for the node find it then.
func (s *Store) await(ctx context.Context, n *ciliumnode.CiliumNode) {
	w := &NodeWatch{store: s, name: n.Name, signal: make(chan struct{}, 1)}
	s.mu.Lock()
	s.at(n.Name).agents[w] = struct{}{}
	s.mu.Unlock()
	defer w.Stop()
	for {
		s.mu.Lock()
		object := s.at(n.Name).object
		s.mu.Unlock()
		if object != nil && object.UID == n.UID {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-w.signal:
		}
	}
}

// CiliumNodeGone takes the end of an object.
func (s *Store) CiliumNodeGone(n *ciliumnode.CiliumNode) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.nodes[n.Name]
	if e == nil || e.object == nil || e.object.UID != n.UID {
		return // It was replaced already.
	}
	s.remove(e, n)
	e.object, e.ours = nil, false
	s.touch(n.Name, e)
	s.drop(n.Name, e)
}

// remove records that an object is gone, forgets what its agent said, and tells
// the streams.
func (s *Store) remove(e *entry, n *ciliumnode.CiliumNode) {
	e.around.Used, e.around.Waiting, e.sequence, e.flushed = nil, 0, 0, time.Time{}
	s.revision++
	s.tombstones = append(s.tombstones, tombstone{s.revision, &nodev1.NodeRemoval{NodeName: n.Name, Uid: string(n.UID), InstanceId: view.InstanceID(n)}})
	if excess := len(s.tombstones) - maxTombstones; excess > 0 {
		s.forgotten = s.tombstones[excess-1].revision
		s.tombstones = slices.Delete(s.tombstones, 0, excess)
	}
	for w := range e.agents {
		w.removed = true
		w.wake()
	}
	for w := range s.demand {
		w.wake()
	}
}

// NodeChanged takes a newer version of a Kubernetes Node.
func (s *Store) NodeChanged(n *corev1.Node) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.at(n.Name)
	pods := n.Status.Allocatable.Pods().Value()
	if pods == 0 {
		pods = n.Status.Capacity.Pods().Value()
	}
	uid, maxPods := string(n.UID), uint32(min(max(pods, 0), 1<<20)) //nolint:gosec // Bounded in this line.
	if e.hasNode && e.around.NodeUID == uid && e.around.MaxPods == maxPods {
		return // A heartbeat.
	}
	if e.hasNode && e.around.NodeUID != uid {
		e.orphan(e.around.NodeUID) // Its removal was not told.
	}
	e.hasNode, e.around.NodeUID, e.around.MaxPods = true, uid, maxPods
	s.touch(n.Name, e)
}

// NodeGone takes the end of a Kubernetes Node: to its agent the node is gone,
// too, even while the CiliumNode is still there.
func (s *Store) NodeGone(n *corev1.Node) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.at(n.Name)
	e.hasNode, e.around.NodeUID, e.around.MaxPods = false, "", 0
	e.orphan(string(n.UID))
	s.touch(n.Name, e)
	s.drop(n.Name, e)
}

// orphan tells the agents of a Node that it is gone. The object may belong to its
// successor already, as the two kinds of news come on different ways: its agent
// is not meant.
func (e *entry) orphan(node string) {
	if e.object != nil {
		for _, o := range e.object.OwnerReferences {
			if o.Kind == "Node" && string(o.UID) != node {
				return
			}
		}
	}
	for w := range e.agents {
		w.removed = true
	}
}

// PendingPods takes how many pods of a node wait for an address.
func (s *Store) PendingPods(node string, count int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.at(node)
	pending := uint32(min(max(count, 0), 1<<20)) //nolint:gosec // Bounded in this line.
	if e.around.PendingPods == pending {
		s.drop(node, e)
		return
	}
	e.around.PendingPods = pending
	s.touch(node, e)
	s.drop(node, e)
}

// Synced takes that everything that existed has been told.
func (s *Store) Synced() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.synced {
		s.synced = true
		close(s.ready)
	}
}

// object returns the newest reading of a node's CiliumNode.
func (s *Store) object(name string) (*ciliumnode.CiliumNode, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e, err := s.lookup(name)
	if err != nil {
		return nil, err
	}
	return e.object, nil
}

// lookup returns the entry of a node that has a CiliumNode. The caller holds mu.
func (s *Store) lookup(name string) (*entry, error) {
	if !s.synced {
		return nil, ErrNotReady
	}
	e := s.nodes[name]
	if e == nil || e.object == nil {
		return nil, fmt.Errorf("%w: %s", ErrNodeUnknown, name)
	}
	return e, nil
}

// Nodes returns the names of all nodes that have a CiliumNode, sorted.
func (s *Store) Nodes() ([]string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.synced {
		return nil, ErrNotReady
	}
	names := make([]string, 0, len(s.nodes))
	for name, e := range s.nodes {
		if e.object != nil {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names, nil
}

// known returns the names of all nodes that have a CiliumNode.
func (s *Store) known() map[string]struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	names := make(map[string]struct{}, len(s.nodes))
	for name, e := range s.nodes {
		if e.object != nil {
			names[name] = struct{}{}
		}
	}
	return names
}

// Views returns what the agent and the allocator are shown of a node.
func (s *Store) Views(name string) (*nodev1.NodeView, *nodev1.NodeDemand, error) {
	s.mu.Lock()
	var object *ciliumnode.CiliumNode
	var around view.Surroundings
	synced := s.synced
	if e := s.nodes[name]; e != nil {
		object, around = e.object, e.around
	}
	s.mu.Unlock()
	switch {
	case !synced:
		return nil, nil, ErrNotReady
	case object == nil:
		return nil, nil, fmt.Errorf("%w: %s", ErrNodeUnknown, name)
	}
	return view.Agent(object), view.Demand(object, around), nil
}

// NodeWatch is told of changes of one node. It belongs to one goroutine.
type NodeWatch struct {
	store   *Store
	name    string
	uid     string
	signal  chan struct{}
	removed bool // guarded by the store's mutex
}

func (w *NodeWatch) wake() {
	select {
	case w.signal <- struct{}{}:
	default: // It is awake already and will find the newest.
	}
}

// WatchNode watches a node that is known. The caller calls Stop.
func (s *Store) WatchNode(name string) (*NodeWatch, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e, err := s.lookup(name)
	if err != nil {
		return nil, err
	}
	w := &NodeWatch{store: s, name: name, uid: string(e.object.UID), signal: make(chan struct{}, 1)}
	w.wake()
	e.agents[w] = struct{}{}
	return w, nil
}

// Changed receives when Next may have something new.
func (w *NodeWatch) Changed() <-chan struct{} { return w.signal }

// Next returns the newest object, and whether the node that the watch was opened
// for is gone; then there is no object.
func (w *NodeWatch) Next() (*ciliumnode.CiliumNode, bool) {
	w.store.mu.Lock()
	defer w.store.mu.Unlock()
	e := w.store.nodes[w.name]
	if w.removed || e == nil || e.object == nil || string(e.object.UID) != w.uid {
		return nil, true
	}
	return e.object, false
}

// Stop ends the watch.
func (w *NodeWatch) Stop() {
	w.store.mu.Lock()
	defer w.store.mu.Unlock()
	if e := w.store.nodes[w.name]; e != nil {
		delete(e.agents, w)
		w.store.drop(w.name, e)
	}
}

// DemandWatch is told of changes of every node. It holds names only, so it is
// bounded by the number of nodes however slow its reader is. It belongs to one
// goroutine.
type DemandWatch struct {
	store    *Store
	signal   chan struct{}
	pending  map[string]struct{} // guarded by the store's mutex
	position uint64              // guarded by the store's mutex: removals up to here were returned
}

func (w *DemandWatch) wake() {
	select {
	case w.signal <- struct{}{}:
	default:
	}
}

func (w *DemandWatch) push(name string) {
	w.pending[name] = struct{}{}
	w.wake()
}

// Update is what changed since the last one.
type Update struct {
	Removed []*nodev1.NodeRemoval
	Nodes   []*nodev1.NodeDemand
	// Revision is where a later watch may resume.
	Revision string
}

// WatchDemand watches all nodes, from a revision that an Update of this process
// had, or from the beginning if it is empty: then the first Update has every
// node. The caller calls Stop.
func (s *Store) WatchDemand(revision string) (*DemandWatch, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.synced {
		return nil, ErrNotReady
	}
	w := &DemandWatch{store: s, signal: make(chan struct{}, 1), pending: make(map[string]struct{}), position: s.revision}
	from := uint64(0)
	if revision != "" {
		instance, number, _ := strings.Cut(revision, ".")
		parsed, err := strconv.ParseUint(number, 10, 64)
		if err != nil || instance != s.instance || parsed > s.revision || parsed < s.forgotten {
			return nil, fmt.Errorf("%w: %q", ErrRevisionUnknown, revision)
		}
		from, w.position = parsed, parsed
	}
	for name, e := range s.nodes {
		if e.object != nil && e.changed > from {
			w.pending[name] = struct{}{}
		}
	}
	w.wake()
	s.demand[w] = struct{}{}
	return w, nil
}

// Changed receives when Next may have something new.
func (w *DemandWatch) Changed() <-chan struct{} { return w.signal }

// Next returns everything that changed since the last call, nodes sorted by
// name. It may be empty.
func (w *DemandWatch) Next() (Update, error) {
	s := w.store
	type item struct {
		object *ciliumnode.CiliumNode
		around view.Surroundings
	}
	var items []item
	var u Update

	s.mu.Lock()
	if w.position < s.forgotten {
		s.mu.Unlock()
		return Update{}, fmt.Errorf("%w: more than %d removals behind", ErrRevisionUnknown, maxTombstones)
	}
	missed := len(s.tombstones)
	for missed > 0 && s.tombstones[missed-1].revision > w.position {
		missed--
	}
	for _, t := range s.tombstones[missed:] {
		u.Removed = append(u.Removed, t.removal)
	}
	for _, name := range slices.Sorted(maps.Keys(w.pending)) {
		if e := s.nodes[name]; e != nil && e.object != nil {
			items = append(items, item{e.object, e.around})
		}
	}
	clear(w.pending)
	w.position = s.revision
	u.Revision = s.instance + "." + strconv.FormatUint(s.revision, 10)
	s.mu.Unlock()

	for _, i := range items {
		u.Nodes = append(u.Nodes, view.Demand(i.object, i.around))
	}
	return u, nil
}

// Stop ends the watch.
func (w *DemandWatch) Stop() {
	w.store.mu.Lock()
	defer w.store.mu.Unlock()
	delete(w.store.demand, w)
}

var _ kube.Handler = (*Store)(nil)
