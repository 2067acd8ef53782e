// Package wish is what an agent wants its map to hold, shared by those who say
// what is wanted (sources of prefixes), who ask the ledger for numbers
// (holdings) and who write the map (programmer). It decides nothing itself: the
// rules are in ipcache. No I/O belongs here.
package wish

import (
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/eniplane/eniplane/agent/internal/ipcache"
	"github.com/eniplane/eniplane/internal/prefix"
)

// Wish is the shared state. It is safe for concurrent use.
type Wish struct {
	mapChanged     chan struct{} // holds one token if the map must be looked at
	holdingChanged chan struct{} // holds one token if there may be a new Task

	mu       sync.Mutex // guards what follows
	cache    *ipcache.Cache
	version  uint64                    // counts changes of owners
	versions map[ipcache.Owner]uint64  // the last change of each owner that exists
	told     map[ipcache.Owner]uint64  // the last change that the ledger committed in this session
	failed   map[ipcache.Owner]failure // why an owner's last attempt failed
	tasks    map[ipcache.Owner]*task   // owners of which the ledger must be told
	ready    []ipcache.Owner           // those of them that need not wait, oldest first; some are done already
	delayed  map[ipcache.Owner]struct{}
	inFlight int
	span     trace.SpanContext          // of the task in flight
	declared map[ipcache.Owner]struct{} // owners that the ledger may know
	records  uint64                     // counts changes of declared
	sources  map[string]bool            // whether each configured source was listed
	away     error                      // why the ledger does not answer; nil if it does
	answered bool                       // whether the ledger answered in this process
	restore  ipcache.Owner              // zero if there is none
	progress chan struct{}              // closed and replaced at each change of what Settled tells
}

type task struct {
	version   uint64
	notBefore time.Time
	span      trace.SpanContext
}

type failure struct {
	version uint64
	err     error
}

// Task is one owner of which the ledger must be told.
type Task struct {
	// Owner is who.
	Owner ipcache.Owner
	// Version is which change of the owner this is.
	Version uint64
	// Drop says that the owner is no more. Wanted is empty then.
	Drop bool
	// Wanted is its whole set, sorted, without the world prefixes, which have no
	// number of the ledger.
	Wanted []Wanted
	// Span is the change's place in a trace. It may be invalid.
	Span trace.SpanContext
}

// Wanted is one prefix with the number that the node has for it; 0 means none.
type Wanted struct {
	Prefix netip.Prefix
	Number uint32
}

// New returns the wish that a cache holds, with the sources of prefixes that are
// configured and the owners that the ledger may know from before this process.
// The cache belongs to the Wish from now on.
func New(cache *ipcache.Cache, sources []string, declared []ipcache.Owner) *Wish {
	w := &Wish{
		mapChanged:     make(chan struct{}, 1),
		holdingChanged: make(chan struct{}, 1),
		cache:          cache,
		versions:       make(map[ipcache.Owner]uint64),
		told:           make(map[ipcache.Owner]uint64),
		failed:         make(map[ipcache.Owner]failure),
		tasks:          make(map[ipcache.Owner]*task),
		delayed:        make(map[ipcache.Owner]struct{}),
		declared:       make(map[ipcache.Owner]struct{}),
		sources:        make(map[string]bool),
		progress:       make(chan struct{}),
	}
	for _, s := range sources {
		w.sources[s] = false
	}
	for _, o := range declared {
		w.declared[o] = struct{}{}
	}
	return w
}

// MapChanges gives a token whenever entries may be wanted differently for
// another cause than a number: those who bring numbers wait for the map anyway.
func (w *Wish) MapChanges() <-chan struct{} { return w.mapChanged }

// HoldingChanges gives a token whenever there may be a new Task.
func (w *Wish) HoldingChanges() <-chan struct{} { return w.holdingChanged }

// Progress returns a channel that is closed when what Settled, Complete or
// Outcome tell may have changed.
func (w *Wish) Progress() <-chan struct{} {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.progress
}

// Restore adds the owner of what the map held before this process, with the
// numbers that it had. To be called before any source speaks.
func (w *Wish) Restore(owner ipcache.Owner, entries ipcache.Entries) {
	set := make(map[netip.Prefix]ipcache.Metadata, len(entries))
	for p, e := range entries {
		set[p] = ipcache.Metadata{
			Source: ipcache.SourceRestored, TunnelEndpoint: e.TunnelEndpoint, EncryptKey: e.EncryptKey, Flags: e.Flags,
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.restore = owner
	w.cache.Replace(owner, set)
	for p, e := range entries {
		w.cache.Learn(p, e.Number, 0)
	}
	w.enqueue(owner, trace.SpanContext{})
}

// Replace makes set the whole set of an owner and returns the version of this
// change, or of the last one if nothing changed. span is the change's place in a
// trace and may be invalid.
func (w *Wish) Replace(owner ipcache.Owner, set map[netip.Prefix]ipcache.Metadata, span trace.SpanContext) uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cache.Replace(owner, set) {
		w.enqueue(owner, span)
		signal(w.mapChanged)
	}
	return w.versions[owner]
}

// Remove ends an owner. An unknown one changes nothing. It returns the version
// of the change; 0 means that there was none.
func (w *Wish) Remove(owner ipcache.Owner, span trace.SpanContext) uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.cache.RemoveOwner(owner) {
		return 0
	}
	if owner == w.restore {
		w.restore = ipcache.Owner{}
	}
	w.enqueue(owner, span)
	version := w.versions[owner]
	delete(w.versions, owner)
	delete(w.told, owner)
	signal(w.mapChanged)
	return version
}

// enqueue notes that the ledger must be told of an owner.
func (w *Wish) enqueue(owner ipcache.Owner, span trace.SpanContext) {
	w.version++
	w.versions[owner] = w.version
	delete(w.failed, owner)
	w.schedule(owner, &task{version: w.version, span: span})
	if _, ok := w.declared[owner]; !ok && w.cache.HasOwner(owner) {
		w.declared[owner] = struct{}{}
		w.records++
	}
	w.advance()
}

// schedule makes t the task of an owner.
func (w *Wish) schedule(owner ipcache.Owner, t *task) {
	_, queued := w.tasks[owner]
	_, late := w.delayed[owner]
	w.tasks[owner] = t
	if !t.notBefore.IsZero() {
		w.delayed[owner] = struct{}{}
	} else if delete(w.delayed, owner); !queued || late {
		w.ready = append(w.ready, owner)
	}
	signal(w.holdingChanged)
}

func (w *Wish) advance() {
	close(w.progress)
	w.progress = make(chan struct{})
}

// Listed says that a source handed over everything it had at some moment since
// this process started. A source that is not configured is ignored.
func (w *Wish) Listed(source string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if listed, ok := w.sources[source]; ok && !listed {
		w.sources[source] = true
		signal(w.mapChanged) // the view may be complete now
		w.advance()
	}
}

// Next takes the next task whose time has come: the restored entries first, then
// in the order of the changes. If none has, it returns how long until one does;
// 0 means that there is none at all. The caller gives every task back with
// Committed, Refused or Retry.
func (w *Wish) Next(now time.Time) (*Task, time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var wait time.Duration
	for owner := range w.delayed {
		if left := w.tasks[owner].notBefore.Sub(now); left <= 0 {
			delete(w.delayed, owner)
			w.ready = append(w.ready, owner)
		} else if wait == 0 || left < wait {
			wait = left
		}
	}
	next, t := w.pop()
	if t == nil {
		return nil, wait
	}
	delete(w.tasks, next)
	w.inFlight++
	result := &Task{Owner: next, Version: t.version, Span: t.span, Drop: !w.cache.HasOwner(next)}
	for _, p := range w.cache.Prefixes(next) {
		if !prefix.IsWorld(p) {
			result.Wanted = append(result.Wanted, Wanted{Prefix: p, Number: w.cache.Number(p)})
		}
	}
	return result, 0
}

// pop returns the next owner whose task is ready, and the task, which stays;
// nil if there is none.
func (w *Wish) pop() (ipcache.Owner, *task) {
	if t, ok := w.tasks[w.restore]; ok {
		if _, late := w.delayed[w.restore]; !late {
			return w.restore, t // its place in ready is skipped later
		}
	}
	for len(w.ready) > 0 {
		owner := w.ready[0]
		w.ready = w.ready[1:]
		if _, late := w.delayed[owner]; late {
			continue
		}
		if t, ok := w.tasks[owner]; ok {
			return owner, t
		}
	}
	return ipcache.Owner{}, nil
}

// Committed says that the ledger took a task at a revision and gave these
// numbers.
func (w *Wish) Committed(t *Task, numbers []Wanted, revision int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.inFlight--
	w.answered = true
	if t.Drop {
		if !w.cache.HasOwner(t.Owner) {
			delete(w.declared, t.Owner)
			w.records++
		}
	} else if w.cache.HasOwner(t.Owner) {
		w.told[t.Owner] = t.Version
		delete(w.failed, t.Owner)
	}
	for _, n := range numbers {
		w.cache.Learn(n.Prefix, n.Number, revision)
	}
	w.advance()
}

// Retry gives back a task that failed, to be taken again not before a time,
// unless the owner changes first. The zero Time means at once.
func (w *Wish) Retry(t *Task, notBefore time.Time, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.inFlight--
	w.span = trace.SpanContext{}
	if _, newer := w.tasks[t.Owner]; !newer {
		w.schedule(t.Owner, &task{version: t.Version, notBefore: notBefore, span: t.Span})
	}
	w.failed[t.Owner] = failure{version: t.Version, err: err}
	w.advance()
}

// Away says that the ledger does not answer, or with nil that it does.
func (w *Wish) Away(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if (w.away == nil) != (err == nil) {
		w.advance()
	}
	w.away = err
}

// Outcome tells how far the ledger is with a change of an owner: done, or the
// error of the last attempt at it, or that the ledger does not answer, or neither
// yet.
func (w *Wish) Outcome(owner ipcache.Owner, version uint64) (bool, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.told[owner] >= version {
		return true, nil
	}
	if f, ok := w.failed[owner]; ok && f.version >= version {
		return false, f.err
	}
	return false, w.away
}

// Replay makes a task of every owner: a new session knows nothing.
func (w *Wish) Replay() {
	w.mu.Lock()
	defer w.mu.Unlock()
	clear(w.told)
	for _, owner := range slices.SortedFunc(maps.Keys(w.versions), ipcache.CompareOwners) {
		w.replay(owner)
	}
	w.advance()
}

// NewLedger says that numbers learnt so far are those of another ledger. They
// stay in force, and are preferred, until this one says otherwise.
func (w *Wish) NewLedger() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cache.Forget()
}

// Lost says that the ledger no longer has these prefixes for this node. Whoever
// wants one of them tells the ledger again.
func (w *Wish) Lost(prefixes []netip.Prefix) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range prefixes {
		for _, owner := range w.cache.OwnersOf(p) {
			if w.told[owner] != 0 {
				delete(w.told, owner)
				w.replay(owner)
			}
		}
	}
}

func (w *Wish) replay(owner ipcache.Owner) {
	t := task{version: w.versions[owner]}
	if old, ok := w.tasks[owner]; ok {
		t.span = old.span
	}
	w.schedule(owner, &t)
}

// Learn says which numbers prefixes have as of a revision.
func (w *Wish) Learn(numbers []Wanted, revision int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, n := range numbers {
		w.cache.Learn(n.Prefix, n.Number, revision)
	}
}

// Unheld returns which of the prefixes that somebody wants, and of which the
// ledger was told, are not in held, sorted.
func (w *Wish) Unheld(held func(netip.Prefix) bool) []netip.Prefix {
	w.mu.Lock()
	defer w.mu.Unlock()
	missing := make(map[netip.Prefix]struct{})
	for owner := range w.told {
		for _, p := range w.cache.Prefixes(owner) {
			if !prefix.IsWorld(p) && !held(p) {
				missing[p] = struct{}{}
			}
		}
	}
	return slices.SortedFunc(maps.Keys(missing), prefix.Compare)
}

// Declared returns the owners that the ledger knows, or will as soon as the
// present tasks are done, sorted, and a count that changes with them. Nil and the
// same count mean that nothing changed since.
func (w *Wish) Declared(since uint64) ([]ipcache.Owner, uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if since == w.records {
		return nil, since
	}
	return slices.SortedFunc(maps.Keys(w.declared), ipcache.CompareOwners), w.records
}

// Follow says under which span the task in flight is carried out, so that what
// the map does meanwhile, for whatever cause, is seen as its consequence. It ends
// with the task.
func (w *Wish) Follow(span trace.SpanContext) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.span = span
}

// Span returns the span of the task in flight; it is invalid if there is none.
func (w *Wish) Span() trace.SpanContext {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.span
}

// Poke makes the map be looked at.
func (w *Wish) Poke() { signal(w.mapChanged) }

// DropStale makes a task of every owner that the ledger may know and that no
// source has any more. It does nothing before all sources were listed.
func (w *Wish) DropStale() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.listed() {
		return
	}
	for owner := range w.declared {
		if _, pending := w.tasks[owner]; !pending && !w.cache.HasOwner(owner) {
			w.version++
			w.schedule(owner, &task{version: w.version})
		}
	}
}

// Complete reports whether the wish is a full view, so that what it lacks may be
// deleted: every source was listed, and the ledger answered, since this process
// started.
func (w *Wish) Complete() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.complete()
}

func (w *Wish) complete() bool { return w.answered && w.listed() }

func (w *Wish) listed() bool {
	for _, listed := range w.sources {
		if !listed {
			return false
		}
	}
	return true
}

// Settled reports whether every source was listed and every owner is committed
// in the ledger.
func (w *Wish) Settled() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.complete() || w.inFlight > 0 {
		return false
	}
	for owner, version := range w.versions {
		if w.told[owner] < version {
			return false
		}
	}
	return true
}

// Changes returns the prefixes that may be wanted differently since the last
// call.
func (w *Wish) Changes() map[netip.Prefix]struct{} {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.cache.Changes()
}

// Wanted returns the entries wanted for some prefixes; those that are not wanted
// are absent. The second result is Complete at the same moment.
func (w *Wish) Wanted(prefixes map[netip.Prefix]struct{}) (ipcache.Entries, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	wanted := make(ipcache.Entries, len(prefixes))
	for p := range prefixes {
		if e, ok := w.cache.Wanted(p); ok {
			wanted[p] = e
		}
	}
	return wanted, w.complete()
}

// AllWanted returns every entry wanted, and Complete at the same moment.
func (w *Wish) AllWanted() (ipcache.Entries, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.cache.AllWanted(), w.complete()
}

// OwnersOf returns the owners of a prefix, sorted.
func (w *Wish) OwnersOf(p netip.Prefix) []ipcache.Owner {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.cache.OwnersOf(p)
}

// Numbers returns the numbers of prefixes in the same order; 0 means none yet.
func (w *Wish) Numbers(prefixes []netip.Prefix) []uint32 {
	w.mu.Lock()
	defer w.mu.Unlock()
	numbers := make([]uint32, len(prefixes))
	for i, p := range prefixes {
		numbers[i] = w.cache.Number(p)
	}
	return numbers
}

// Source is the state of one source of prefixes.
type Source struct {
	Name   string
	Listed bool
}

// Status is the state of the wish in numbers.
type Status struct {
	// Prefixes are those that somebody wants; Unnumbered those of them that have
	// no number yet.
	Prefixes, Unnumbered int
	// Owners counts the owners of each kind.
	Owners map[ipcache.Kind]int
	// Sources are sorted by name.
	Sources []Source
	// Restoring says that the restored entries are still held.
	Restoring bool
}

// Status returns the state.
func (w *Wish) Status() Status {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := Status{
		Prefixes: w.cache.Len(), Unnumbered: w.cache.Unnumbered(),
		Owners: make(map[ipcache.Kind]int), Restoring: w.restore != ipcache.Owner{},
	}
	for owner := range w.versions {
		s.Owners[owner.Kind]++
	}
	for _, name := range slices.Sorted(maps.Keys(w.sources)) {
		s.Sources = append(s.Sources, Source{Name: name, Listed: w.sources[name]})
	}
	return s
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
