// Package programmer writes the ipcache map: one goroutine owns it, compares
// what it holds with what is wished, and carries out the difference. What is
// wished, and in which order it is written, is decided elsewhere.
package programmer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/eniplane/eniplane/agent/internal/bpf"
	"github.com/eniplane/eniplane/agent/internal/condition"
	"github.com/eniplane/eniplane/agent/internal/ipcache"
	"github.com/eniplane/eniplane/agent/internal/plan"
	"github.com/eniplane/eniplane/agent/internal/wish"
	"github.com/eniplane/eniplane/internal/prefix"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/telemetry"
)

// Map is an ipcache map, in the kernel or in memory, with the contract of
// package bpf.
type Map interface {
	Info() bpf.Info
	Upsert(items []plan.Item) []bpf.Refusal
	Delete(prefixes []netip.Prefix) []bpf.Refusal
	Lookup(addr netip.Addr) (bpf.Value, bool, error)
	Dump(ctx context.Context) ([]bpf.Raw, error)
}

// Numbers are those that a ledger may give to CIDRs: Cilium's local scope. An
// entry with another number is not ours and is left alone.
var numbers = plan.Range{First: 1<<24 + 1, Last: 1<<25 - 1}

const (
	firstRetry = time.Second
	lastRetry  = 30 * time.Second
)

// Config is what a Programmer works with.
type Config struct {
	Map        Map
	Wish       *wish.Wish
	Board      *condition.Board
	Logger     *slog.Logger
	Tracer     trace.Tracer
	Registerer prometheus.Registerer // may be nil
	// BatchSize is the most entries of one write; 0 means the plan's default.
	BatchSize int
}

// Programmer keeps a map as it is wished.
type Programmer struct {
	Config
	requests chan request
	written  *prometheus.CounterVec

	// Of the goroutine that runs.
	pending map[netip.Prefix]struct{} // refused, to be tried again
	due     bool                      // whether pending ones are tried in the next round
	blocked map[netip.Prefix]struct{} // to be looked at again once the view is complete
	backoff time.Duration

	mu       sync.RWMutex // guards what follows; Run writes, all read
	table    ipcache.Table
	refused  map[netip.Prefix]bpf.Refusal
	waiting  map[netip.Prefix]reason.Reason
	complete bool
}

// request asks the goroutine that runs for a round, or for a check of the map.
type request struct {
	span   trace.SpanContext
	verify bool
	repair bool
	done   chan<- answer
}

type answer struct {
	report Report
	err    error
}

// New returns a Programmer. Restored and Run follow, in this order.
func New(config Config) *Programmer {
	p := &Programmer{
		Config:   config,
		requests: make(chan request),
		pending:  make(map[netip.Prefix]struct{}),
		blocked:  make(map[netip.Prefix]struct{}),
		refused:  make(map[netip.Prefix]bpf.Refusal),
		waiting:  make(map[netip.Prefix]reason.Reason),
		written: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "eniplane_agent_map_writes_total", Help: "Entries of the ipcache map written, by operation and result.",
		}, []string{"operation", "result"}),
	}
	if config.Registerer != nil {
		config.Registerer.MustRegister(p.written,
			prometheus.NewGaugeFunc(prometheus.GaugeOpts{
				Name: "eniplane_agent_map_entries", Help: "Entries that the agent has in the ipcache map.",
			}, func() float64 { return float64(p.Len()) }),
			prometheus.NewGaugeFunc(prometheus.GaugeOpts{
				Name: "eniplane_agent_map_refused", Help: "Entries wanted that the map refused.",
			}, func() float64 { return float64(len(p.Refusals())) }))
	}
	return p
}

// Restored reads the map and returns the entries that an agent of ours left in
// it. Entries that it does not understand, or that carry numbers of no ledger,
// are left alone. A dump that is incomplete is used as far as it goes. To be
// called before Run.
func (p *Programmer) Restored(ctx context.Context) ipcache.Entries {
	raw, err := p.Map.Dump(ctx)
	if err != nil {
		p.Board.Set(reason.MapDrift, "dump", fmt.Sprintf("the map could be read only in part: %v", err))
		p.Logger.WarnContext(ctx, "map read only in part", telemetry.KeyError, err.Error(), "entries", len(raw))
	}
	ours := make(ipcache.Entries)
	foreign := 0
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, r := range raw {
		prefix, entry, ok := understood(r)
		if !ok {
			foreign++
			continue
		}
		ours[prefix] = entry
		p.table.Set(prefix, entry)
	}
	if foreign > 0 {
		p.Board.Set(reason.MapDrift, "foreign", fmt.Sprintf("%d entries of the map are not ours and are left alone", foreign))
	}
	return ours
}

func understood(r bpf.Raw) (netip.Prefix, ipcache.Entry, bool) {
	p, err := bpf.DecodeKey(r.Key)
	if err != nil {
		return netip.Prefix{}, ipcache.Entry{}, false
	}
	e := bpf.DecodeValue(r.Value)
	return p, e, numbers.Contains(e.Number) || prefix.IsWorld(p)
}

// Run keeps the map as it is wished until ctx ends. It leaves the map as it is.
func (p *Programmer) Run(ctx context.Context) error {
	retry := time.NewTimer(0)
	defer retry.Stop()
	for {
		var served []request
		select {
		case <-ctx.Done():
			return nil
		case <-p.Wish.MapChanges():
		case <-retry.C:
			p.due = true
		case r := <-p.requests:
			served = append(served, r)
			served = p.more(served)
		}
		p.round(ctx, served)
		for _, r := range served {
			var a answer
			if r.verify {
				a.report, a.err = p.verify(ctx, r.repair)
			}
			r.done <- a
		}
		if again := p.retryIn(); again > 0 {
			retry.Reset(again)
		}
	}
}

// more takes the requests that came meanwhile, so that one round serves all.
func (p *Programmer) more(served []request) []request {
	for {
		select {
		case r := <-p.requests:
			served = append(served, r)
		default:
			return served
		}
	}
}

// Sync returns when everything that was wished before the call was tried.
func (p *Programmer) Sync(ctx context.Context) error {
	_, err := p.ask(ctx, request{span: trace.SpanContextFromContext(ctx)})
	return err
}

func (p *Programmer) ask(ctx context.Context, r request) (Report, error) {
	done := make(chan answer, 1)
	r.done = done
	select {
	case p.requests <- r:
	case <-ctx.Done():
		return Report{}, fmt.Errorf("wait for the map: %w", ctx.Err())
	}
	select {
	case a := <-done:
		return a.report, a.err
	case <-ctx.Done():
		return Report{}, fmt.Errorf("wait for the map: %w", ctx.Err())
	}
}

// round carries out the difference for everything that may have changed.
func (p *Programmer) round(ctx context.Context, served []request) {
	look := p.Wish.Changes()
	if p.due {
		maps.Copy(look, p.pending)
		p.pending, p.due = make(map[netip.Prefix]struct{}), false
	}
	in := p.read(look)
	if in.Complete && len(p.blocked) > 0 {
		maps.Copy(look, p.blocked)
		p.blocked = make(map[netip.Prefix]struct{})
		in = p.read(look)
	}
	todo := plan.Diff(in)
	for _, b := range todo.Blocked {
		p.blocked[b] = struct{}{}
	}
	refused := make(map[netip.Prefix]bpf.Refusal)
	if len(todo.Ops) > 0 {
		p.execute(ctx, served, todo.Ops, refused)
	}
	p.settle(ctx, look, in.Complete, todo, refused)
}

// read is the input of one plan: what changed, and whoever has a number that
// something of it takes over, and so on.
func (p *Programmer) read(look map[netip.Prefix]struct{}) plan.Input {
	in := plan.Input{
		Have: make(ipcache.Entries), Want: make(ipcache.Entries), Complete: p.Wish.Complete(),
		Exclusive: numbers, BatchSize: p.BatchSize,
	}
	p.mu.RLock()
	defer p.mu.RUnlock()
	for fresh := look; len(fresh) > 0; {
		var wanted ipcache.Entries
		wanted, in.Complete = p.Wish.Wanted(fresh) // the view never becomes incomplete again
		next := make(map[netip.Prefix]struct{})
		for q := range fresh {
			if have, ok := p.table.Get(q); ok {
				in.Have[q] = have
			}
		}
		maps.Copy(in.Want, wanted)
		for q, want := range wanted {
			if !numbers.Contains(want.Number) {
				continue
			}
			for _, holder := range p.table.WithNumber(want.Number) {
				if _, known := look[holder]; !known && holder != q {
					next[holder] = struct{}{}
				}
			}
		}
		maps.Copy(look, next)
		fresh = next
	}
	return in
}

// execute writes. What the map refuses in an op does not stop the next ones,
// except that a number whose old prefix could not be cleared is not given out.
func (p *Programmer) execute(ctx context.Context, served []request, ops []plan.Op, refused map[netip.Prefix]bpf.Refusal) {
	parent, options := ctx, []trace.SpanStartOption{trace.WithSpanKind(trace.SpanKindInternal)}
	for i, r := range served {
		if !r.span.IsValid() {
			continue
		}
		if !trace.SpanContextFromContext(parent).IsValid() {
			parent = trace.ContextWithSpanContext(ctx, r.span)
			continue
		}
		options = append(options, trace.WithLinks(trace.Link{SpanContext: served[i].span}))
	}
	if cause := p.Wish.Span(); cause.IsValid() && !trace.SpanContextFromContext(parent).IsValid() {
		parent = trace.ContextWithSpanContext(ctx, cause)
	}
	_, span := p.Tracer.Start(parent, "map update", options...)
	defer span.End()

	upserts, deletes := 0, 0
	var full []plan.Item
	for _, op := range ops {
		switch op := op.(type) {
		case plan.Upsert:
			upserts += len(op.Entries)
			full = append(full, p.upsert(op.Entries, refused)...)
		case plan.Delete:
			deletes += len(op.Prefixes)
			p.remove(op.Prefixes, refused)
		}
	}
	// Room that the removals made goes to what did not fit before them, in this
	// round and, at once, in earlier ones.
	p.due = p.due || deletes > 0
	if deletes > 0 && len(full) > 0 {
		for _, item := range full {
			delete(refused, item.Prefix)
		}
		p.upsert(full, refused)
	}
	span.SetAttributes(attribute.Int("upserts", upserts), attribute.Int("deletes", deletes), attribute.Int("refused", len(refused)))
}

// upsert writes entries and returns those that did not fit.
func (p *Programmer) upsert(items []plan.Item, refused map[netip.Prefix]bpf.Refusal) []plan.Item {
	items = slices.DeleteFunc(slices.Clone(items), func(i plan.Item) bool { return p.numberTaken(i, refused) })
	failed := byPrefix(p.Map.Upsert(items))
	p.count("upsert", len(items), len(failed))
	var full []plan.Item
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, i := range items {
		f, ok := failed[i.Prefix]
		if !ok {
			p.table.Set(i.Prefix, i.Entry)
			continue
		}
		refused[i.Prefix] = f
		if f.Reason == reason.MapFull {
			full = append(full, i)
		}
	}
	return full
}

// numberTaken refuses an entry whose number still stands at a prefix that the
// map would not let go.
func (p *Programmer) numberTaken(i plan.Item, refused map[netip.Prefix]bpf.Refusal) bool {
	if len(refused) == 0 || !numbers.Contains(i.Entry.Number) {
		return false
	}
	p.mu.RLock()
	defer p.mu.RUnlock()
	for _, holder := range p.table.WithNumber(i.Entry.Number) {
		if f, ok := refused[holder]; ok && holder != i.Prefix {
			refused[i.Prefix] = bpf.Refusal{Prefix: i.Prefix, Reason: f.Reason, Err: fmt.Errorf("number %d is still at %s: %w", i.Entry.Number, holder, f.Err)}
			return true
		}
	}
	return false
}

func (p *Programmer) remove(prefixes []netip.Prefix, refused map[netip.Prefix]bpf.Refusal) {
	failed := byPrefix(p.Map.Delete(prefixes))
	p.count("delete", len(prefixes), len(failed))
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, q := range prefixes {
		if f, ok := failed[q]; ok {
			refused[q] = f
			continue
		}
		p.table.Delete(q)
	}
}

func (p *Programmer) count(operation string, all, failed int) {
	p.written.WithLabelValues(operation, "ok").Add(float64(all - failed))
	p.written.WithLabelValues(operation, "refused").Add(float64(failed))
}

// settle notes how the round ended: what was refused is tried again, later if
// nothing changes, or as soon as the next round.
func (p *Programmer) settle(ctx context.Context, look map[netip.Prefix]struct{}, complete bool, todo plan.Plan, refused map[netip.Prefix]bpf.Refusal) {
	p.mu.Lock()
	before := len(p.refused)
	for q := range look {
		delete(p.refused, q)
		delete(p.waiting, q)
	}
	maps.Copy(p.refused, refused)
	for _, b := range todo.Blocked {
		p.waiting[b] = todo.Why
	}
	p.complete = complete
	all := maps.Clone(p.refused)
	p.mu.Unlock()

	p.pending = make(map[netip.Prefix]struct{}, len(all))
	for q := range all {
		p.pending[q] = struct{}{}
	}
	switch {
	case len(all) == 0:
		p.backoff = 0
	case p.backoff == 0 || len(all) < before:
		p.backoff = firstRetry
	default:
		p.backoff = min(2*p.backoff, lastRetry)
	}
	p.tell(ctx, all, before)
}

func (p *Programmer) tell(ctx context.Context, refused map[netip.Prefix]bpf.Refusal, before int) {
	counts := make(map[reason.Reason]int)
	var example bpf.Refusal
	for _, f := range refused {
		counts[f.Reason]++
		if !example.Prefix.IsValid() || prefix.Compare(f.Prefix, example.Prefix) < 0 {
			example = f
		}
	}
	for _, r := range []reason.Reason{reason.MapFull, reason.MapRefused} {
		if counts[r] == 0 {
			p.Board.Clear(r, "map")
			continue
		}
		p.Board.Set(r, "map", fmt.Sprintf("%d entries are not in the map (of %d at most), such as %s: %v", counts[r], p.Map.Info().MaxEntries, example.Prefix, example.Err))
	}
	if len(refused) > 0 && before == 0 {
		p.Logger.ErrorContext(ctx, "the map refuses entries",
			"entries", len(refused), telemetry.KeyPrefix, example.Prefix.String(), telemetry.KeyReason, example.Reason.String(), telemetry.KeyError, example.Err.Error())
	}
	if len(refused) == 0 && before > 0 {
		p.Logger.InfoContext(ctx, "the map takes all entries again")
	}
}

func (p *Programmer) retryIn() time.Duration {
	switch {
	case len(p.pending) == 0:
		p.due = false
		return 0
	case p.due:
		return time.Nanosecond
	}
	return p.backoff
}

// Failures returns what keeps the map from being as the ledger has it for this
// node: every entry that was refused or must wait, and of the prefixes given,
// with their numbers in the ledger (0 for those that it no longer has), each that
// stands in the map with another number, or still. With all, the prefixes given
// are everything that the ledger has, and whatever else stands in the map counts.
func (p *Programmer) Failures(held map[netip.Prefix]uint32, all bool) map[netip.Prefix]reason.Reason {
	p.mu.RLock()
	defer p.mu.RUnlock()
	failures := make(map[netip.Prefix]reason.Reason)
	for q, number := range held {
		if have, ok := p.table.Get(q); ok && have.Number != number && !prefix.IsWorld(q) {
			failures[q] = reason.MapDrift
		}
	}
	if all {
		for q := range p.table.Entries() {
			if held[q] == 0 && !prefix.IsWorld(q) {
				failures[q] = reason.MapDrift
			}
		}
	}
	maps.Copy(failures, p.waiting)
	for q, f := range p.refused {
		failures[q] = f.Reason
	}
	return failures
}

// Refusals returns what the map refused, sorted by prefix.
func (p *Programmer) Refusals() []bpf.Refusal {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return slices.SortedFunc(maps.Values(p.refused), func(a, b bpf.Refusal) int { return prefix.Compare(a.Prefix, b.Prefix) })
}

// Len returns how many entries of ours the map has.
func (p *Programmer) Len() int {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return p.table.Len()
}

// Get returns our entry of exactly a prefix.
func (p *Programmer) Get(q netip.Prefix) (ipcache.Entry, bool) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return p.table.Get(q)
}

// ErrNoEntry says that no prefix of the map covers the address.
var ErrNoEntry = errors.New("no prefix covers the address")

// Lookup returns what the datapath finds for an address: the value is read from
// the map, the prefix from what was written to it. Where the two differ the map
// itself is searched.
func (p *Programmer) Lookup(ctx context.Context, addr netip.Addr) (bpf.Raw, error) {
	value, ok, err := p.Map.Lookup(addr)
	if err != nil {
		return bpf.Raw{}, err
	}
	if !ok {
		return bpf.Raw{}, fmt.Errorf("%w: %s", ErrNoEntry, addr)
	}
	p.mu.RLock()
	q, e, found := p.table.Lookup(addr)
	p.mu.RUnlock()
	if found && bpf.EncodeValue(e) == value {
		return bpf.Raw{Key: bpf.EncodeKey(q), Value: value}, nil
	}
	raw, err := p.Map.Dump(ctx)
	if err != nil {
		return bpf.Raw{}, err
	}
	var dumped ipcache.Table
	byKey := make(map[netip.Prefix]bpf.Raw)
	for _, r := range raw {
		if q, err := bpf.DecodeKey(r.Key); err == nil {
			dumped.Set(q, bpf.DecodeValue(r.Value))
			byKey[q] = r
		}
	}
	if q, _, ok := dumped.Lookup(addr); ok {
		return byKey[q], nil
	}
	return bpf.Raw{}, fmt.Errorf("%w: %s", ErrNoEntry, addr)
}

// Dump returns every entry of the map, also foreign ones, in any order.
func (p *Programmer) Dump(ctx context.Context) ([]bpf.Raw, error) { return p.Map.Dump(ctx) }

func byPrefix(refusals []bpf.Refusal) map[netip.Prefix]bpf.Refusal {
	m := make(map[netip.Prefix]bpf.Refusal, len(refusals))
	for _, r := range refusals {
		m[r.Prefix] = r
	}
	return m
}
