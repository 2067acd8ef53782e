package programmer

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	"github.com/eniplane/eniplane/agent/internal/bpf"
	"github.com/eniplane/eniplane/agent/internal/condition"
	"github.com/eniplane/eniplane/agent/internal/ipcache"
	"github.com/eniplane/eniplane/agent/internal/plan"
	"github.com/eniplane/eniplane/agent/internal/wish"
	"github.com/eniplane/eniplane/internal/reason"
)

// faulty is a map that refuses what fail says.
type faulty struct {
	*bpf.Memory

	mu   sync.Mutex // guards what follows
	fail func(operation string, p netip.Prefix) error
	log  []string
}

func (f *faulty) setFail(fail func(string, netip.Prefix) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fail = fail
}

func (f *faulty) ask(operation string, p netip.Prefix) *bpf.Refusal {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.log = append(f.log, operation+" "+p.String())
	if f.fail == nil {
		return nil
	}
	if err := f.fail(operation, p); err != nil {
		return &bpf.Refusal{Prefix: p, Reason: reason.MapRefused, Err: err}
	}
	return nil
}

func (f *faulty) Upsert(items []plan.Item) []bpf.Refusal {
	var refused []bpf.Refusal
	for _, i := range items {
		if r := f.ask("upsert", i.Prefix); r != nil {
			refused = append(refused, *r)
			continue
		}
		refused = append(refused, f.Memory.Upsert([]plan.Item{i})...)
	}
	return refused
}

func (f *faulty) Delete(prefixes []netip.Prefix) []bpf.Refusal {
	var refused []bpf.Refusal
	for _, p := range prefixes {
		if r := f.ask("delete", p); r != nil {
			refused = append(refused, *r)
			continue
		}
		refused = append(refused, f.Memory.Delete([]netip.Prefix{p})...)
	}
	return refused
}

func (f *faulty) holds(t testing.TB) map[string]uint32 {
	t.Helper()
	raw, err := f.Dump(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	got := make(map[string]uint32)
	for _, r := range raw {
		p, err := bpf.DecodeKey(r.Key)
		if err != nil {
			t.Fatal(err)
		}
		got[p.String()] = bpf.DecodeValue(r.Value).Number
	}
	return got
}

const base = 16777217

func owner(name string) ipcache.Owner {
	return ipcache.Owner{Kind: ipcache.KindNetworkPolicy, Namespace: "ns", Name: name, UID: name}
}

// bench is a programmer with its surroundings.
type bench struct {
	w     *wish.Wish
	m     *faulty
	p     *Programmer
	board *condition.Board

	revision int64
}

func newBench(size uint32, tracer trace.Tracer, sources ...string) *bench {
	b := &bench{
		w: wish.New(ipcache.NewCache(ipcache.Config{}), sources, nil), m: &faulty{Memory: bpf.NewMemory(size)},
		board: condition.NewBoard(time.Now),
	}
	if tracer == nil {
		tracer = noop.NewTracerProvider().Tracer("")
	}
	b.p = New(Config{Map: b.m, Wish: b.w, Board: b.board, Logger: slog.New(slog.DiscardHandler), Tracer: tracer})
	return b
}

// run runs the programmer for the time of a test in a bubble.
func (b *bench) run(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- b.p.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("ended with %v", err)
		}
	})
}

// want makes the ledger commit an owner's whole set with these numbers.
func (b *bench) want(name string, numbers map[string]uint32) {
	set := make(map[netip.Prefix]ipcache.Metadata)
	var given []wish.Wanted
	for p, n := range numbers {
		set[netip.MustParsePrefix(p)] = ipcache.Metadata{}
		given = append(given, wish.Wanted{Prefix: netip.MustParsePrefix(p), Number: n})
	}
	b.w.Replace(owner(name), set, trace.SpanContext{})
	b.revision++
	for task, _ := b.w.Next(time.Now()); task != nil; task, _ = b.w.Next(time.Now()) {
		b.w.Committed(task, nil, b.revision)
	}
	b.w.Learn(given, b.revision)
}

func (b *bench) sync(t *testing.T) {
	t.Helper()
	if err := b.p.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func (b *bench) check(t *testing.T, want map[string]uint32) {
	t.Helper()
	if got := b.m.holds(t); !maps.Equal(got, want) {
		t.Errorf("the map holds %v, want %v", got, want)
	}
}

// cilium#31701: ENOMEM on a write.
func TestB38RefusedWriteIsTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(100, nil)
		b.run(t)
		refusals := 3
		b.m.setFail(func(operation string, p netip.Prefix) error {
			if p.String() == "10.2.0.0/16" && refusals > 0 {
				refusals--
				return unix.ENOMEM
			}
			return nil
		})
		all := map[string]uint32{"10.1.0.0/16": base, "10.2.0.0/16": base + 1, "10.3.0.0/16": base + 2}
		b.want("a", all)
		b.sync(t)
		b.check(t, map[string]uint32{"10.1.0.0/16": base, "10.3.0.0/16": base + 2})
		refused := b.p.Refusals()
		if len(refused) != 1 || refused[0].Prefix.String() != "10.2.0.0/16" || refused[0].Reason != reason.MapRefused {
			t.Errorf("refused %v", refused)
		}
		held := map[netip.Prefix]uint32{netip.MustParsePrefix("10.1.0.0/16"): base}
		if f := b.p.Failures(held, false); len(f) != 1 || f[netip.MustParsePrefix("10.2.0.0/16")] != reason.MapRefused {
			t.Errorf("failures %v", f)
		}
		if c := b.board.Conditions(); len(c) != 1 || c[0].Reason != reason.MapRefused {
			t.Errorf("conditions %v", c)
		}
		time.Sleep(time.Minute) // of the bubble: the retries come by themselves
		synctest.Wait()
		b.check(t, all)
		if len(b.p.Refusals()) != 0 || len(b.board.Conditions()) != 0 {
			t.Errorf("refused %v, conditions %v", b.p.Refusals(), b.board.Conditions())
		}
	})
}

// I9: a number is not given to another prefix while the map does not let the old
// one go.
func TestNumberIsNotGivenOutWhileTheOldPrefixStays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(100, nil)
		b.run(t)
		b.want("a", map[string]uint32{"10.1.0.0/16": base})
		b.sync(t)
		b.m.setFail(func(operation string, p netip.Prefix) error {
			if operation == "delete" {
				return unix.EPERM
			}
			return nil
		})
		b.want("a", map[string]uint32{"10.2.0.0/16": base, "10.3.0.0/16": base + 5})
		b.sync(t)
		b.check(t, map[string]uint32{"10.1.0.0/16": base, "10.3.0.0/16": base + 5})
		if n := len(b.p.Refusals()); n != 2 {
			t.Errorf("%d refused, want the old prefix and the new one", n)
		}
		b.m.setFail(nil)
		time.Sleep(time.Minute)
		synctest.Wait()
		b.check(t, map[string]uint32{"10.2.0.0/16": base, "10.3.0.0/16": base + 5})
	})
}

func TestNothingIsDeletedBeforeAFullView(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(100, nil, "networkpolicies")
		b.run(t)
		b.want("a", map[string]uint32{"10.1.0.0/16": base, "10.2.0.0/16": base + 1})
		b.sync(t)
		b.want("a", map[string]uint32{"10.2.0.0/16": base + 1})
		b.sync(t)
		b.check(t, map[string]uint32{"10.1.0.0/16": base, "10.2.0.0/16": base + 1})
		gone := map[netip.Prefix]uint32{netip.MustParsePrefix("10.1.0.0/16"): 0}
		if f := b.p.Failures(gone, false); f[netip.MustParsePrefix("10.1.0.0/16")] != reason.SourceNotListed {
			t.Errorf("failures %v", f)
		}
		// Nothing else changes; that the view is complete is enough.
		b.w.Listed("networkpolicies")
		synctest.Wait()
		b.check(t, map[string]uint32{"10.2.0.0/16": base + 1})
		if f := b.p.Failures(gone, false); len(f) != 0 {
			t.Errorf("failures %v", f)
		}
	})
}

func TestRestoredLeavesForeignEntriesAlone(t *testing.T) {
	b := newBench(100, nil)
	entry := func(p string, e ipcache.Entry) plan.Item {
		return plan.Item{Prefix: netip.MustParsePrefix(p), Entry: e}
	}
	b.m.Memory.Upsert([]plan.Item{
		entry("10.1.0.0/16", ipcache.Entry{Number: base}), entry("0.0.0.0/0", ipcache.Entry{Number: 2}),
		entry("10.2.0.7/32", ipcache.Entry{Number: 4711, TunnelEndpoint: netip.MustParseAddr("172.18.0.3")}),
	})
	got := b.p.Restored(t.Context())
	want := ipcache.Entries{netip.MustParsePrefix("10.1.0.0/16"): {Number: base}, netip.MustParsePrefix("0.0.0.0/0"): {Number: 2}}
	if !maps.Equal(got, want) {
		t.Errorf("restored %v", got)
	}
	if c := b.board.Conditions(); len(c) != 1 || c[0].Reason != reason.MapDrift {
		t.Errorf("conditions %v", c)
	}
}

// Whatever the map refuses, and in whatever order sets and numbers change: when
// it stops refusing, it is as wished, and at no moment was a prefix that was
// wanted before and after missing or a number at two prefixes.
func TestConvergesWhateverIsRefused(t *testing.T) {
	prefixes := []string{"10.1.0.0/16", "10.2.0.0/16", "10.3.0.0/16", "10.4.0.0/16"}
	rapid.Check(t, func(rt *rapid.T) {
		size := rapid.Uint32Range(3, 6).Draw(rt, "size")
		changes := make([]change, rapid.IntRange(1, 8).Draw(rt, "changes"))
		for i := range changes {
			c := &changes[i]
			c.set = make(map[string]uint32)
			c.refused = rapid.SampledFrom(append([]string{""}, prefixes...)).Draw(rt, "refused")
			c.operation = rapid.SampledFrom([]string{"upsert", "delete"}).Draw(rt, "operation")
			numbers := rapid.Permutation([]uint32{base, base + 1, base + 2, base + 3}).Draw(rt, "numbers")
			for i, p := range prefixes {
				if rapid.IntRange(0, 3).Draw(rt, p) > 0 {
					c.set[p] = numbers[i]
				}
			}
		}
		var failure string // a bubble is a test of its own, which rapid can not end
		synctest.Test(t, func(t *testing.T) { failure = converge(t, size, changes) })
		if failure != "" {
			rt.Fatal(failure)
		}
	})
}

// change is a set with its numbers, and what the map refuses meanwhile.
type change struct {
	set                map[string]uint32
	refused, operation string
}

func converge(t *testing.T, size uint32, changes []change) string {
	b := newBench(size, nil)
	b.run(t)
	var ledger map[string]uint32
	for _, c := range changes {
		b.m.setFail(func(operation string, p netip.Prefix) error {
			if operation == c.operation && p.String() == c.refused {
				return unix.ENOMEM
			}
			return nil
		})
		b.want("a", c.set)
		b.sync(t)
		ledger = c.set
		at := make(map[uint32]string)
		for p, n := range b.m.holds(t) {
			if other, ok := at[n]; ok {
				return fmt.Sprintf("number %d at %s and %s", n, p, other)
			}
			at[n] = p
		}
	}
	b.m.setFail(nil)
	time.Sleep(10 * time.Minute)
	synctest.Wait()
	got := b.m.holds(t)
	for p, n := range got {
		if ledger[p] != n {
			return fmt.Sprintf("%s has %d, want %d; wrote %v", p, n, ledger[p], b.m.log)
		}
	}
	if want := min(len(ledger), int(size)); len(got) != want {
		return fmt.Sprintf("the map holds %v of %v; wrote %v", got, ledger, b.m.log)
	}
	return ""
}

func TestMapUpdateIsPartOfItsCausesTrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		recorder := tracetest.NewSpanRecorder()
		provider := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(recorder))
		tracer := provider.Tracer("")
		b := newBench(100, tracer)
		b.run(t)
		synctest.Wait()
		// What the ledger's stream brings belongs to the task in flight.
		_, declare := tracer.Start(t.Context(), "declare holding")
		b.w.Follow(declare.SpanContext())
		b.want("a", map[string]uint32{"10.1.0.0/16": base})
		b.sync(t)
		b.w.Follow(trace.SpanContext{})
		declare.End()
		// Who asks for the map to follow is the cause.
		ctx, cause := tracer.Start(t.Context(), "another declare holding")
		b.want("a", map[string]uint32{"10.1.0.0/16": base + 1})
		if err := b.p.Sync(ctx); err != nil {
			t.Fatal(err)
		}
		cause.End()
		var parents []trace.SpanID
		for _, s := range recorder.Ended() {
			if s.Name() == "map update" {
				parents = append(parents, s.Parent().SpanID())
			}
		}
		if len(parents) != 2 || parents[0] != declare.SpanContext().SpanID() || parents[1] != cause.SpanContext().SpanID() {
			t.Errorf("parents %v", parents)
		}
	})
}
