package node

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/trace/noop"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/eniplane/eniplane/agent/internal/condition"
	"github.com/eniplane/eniplane/agent/internal/ipam"
	eniv1 "github.com/eniplane/eniplane/gen/eniplane/eni/v1"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"
)

// allocator answers EnsureAddresses with a function.
type allocator struct {
	eniv1.EniAllocatorServiceClient
	ensure func(ctx context.Context, r *eniv1.EnsureAddressesRequest) error
}

func (a allocator) EnsureAddresses(ctx context.Context, r *eniv1.EnsureAddressesRequest, _ ...grpc.CallOption) (*eniv1.EnsureAddressesResponse, error) {
	return &eniv1.EnsureAddressesResponse{}, a.ensure(ctx, r)
}

// disk remembers the last state saved, and fails when told to.
type disk struct {
	mu    sync.Mutex // guards what follows
	saved Saved
	times int
	err   error
}

func (d *disk) save(s Saved) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.err != nil {
		return d.err
	}
	d.saved, d.times = s, d.times+1
	return nil
}

func (d *disk) fail(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.err = err
}

func start(t *testing.T, d *disk, saved Saved, ensure func(context.Context, *eniv1.EnsureAddressesRequest) error) *Addresses {
	t.Helper()
	a := NewAddresses(AddressesConfig{
		NodeName: "node-1", Allocator: allocator{ensure: ensure}, Board: condition.NewBoard(time.Now),
		Logger: slog.New(slog.DiscardHandler), Tracer: noop.NewTracerProvider().Tracer(""), Save: d.save,
	}, saved)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("ended with %v", err)
		}
	})
	return a
}

func ip(last byte) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, 0, last}) }

func viewOf(generation uint64, addresses ...byte) View {
	v := View{
		View:  ipam.View{ENIs: map[ipam.ENIID]ipam.ENI{"eni-1": {ID: "eni-1"}}, Pool: map[netip.Addr]ipam.ENIID{}},
		Fence: Fence{Epoch: 1, Generation: generation},
	}
	for _, a := range addresses {
		v.Pool[ip(a)] = "eni-1"
	}
	return v
}

func nothing(context.Context, *eniv1.EnsureAddressesRequest) error { return nil }

func TestNothingIsGivenThatIsNotSaved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &disk{}
		a := start(t, d, Saved{}, nothing)
		a.SetView(t.Context(), viewOf(1, 1, 2, 3))
		got, err := a.Allocate(t.Context(), "ns/a", netip.Addr{})
		if err != nil || got.Address != ip(2) || len(d.saved.State.Used) != 2 || d.saved.View == nil {
			t.Fatalf("got %v, %v; saved %v", got, err, d.saved)
		}
		broken := errors.New("no space left on device")
		d.fail(broken)
		if _, err := a.Allocate(t.Context(), "ns/b", netip.Addr{}); !errors.Is(err, ErrNotSaved) || !errors.Is(err, broken) {
			t.Errorf("on a full disk: %v", err)
		}
		if c := a.Board.Conditions(); len(c) != 1 || c[0].Reason != reason.Internal {
			t.Errorf("conditions %v", c)
		}
		d.fail(nil)
		time.Sleep(time.Minute) // of the bubble: it is tried again by itself
		if got, err := a.Allocate(t.Context(), "ns/b", netip.Addr{}); err != nil || got.Address != ip(3) {
			t.Errorf("got %v, %v", got, err)
		}
		if len(a.Board.Conditions()) != 0 {
			t.Errorf("conditions %v", a.Board.Conditions())
		}
	})
}

func TestAYesIsSavedBeforeItIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &disk{}
		a := start(t, d, Saved{}, nothing)
		d.fail(errors.New("no space left on device"))
		v := viewOf(1, 1, 2)
		v.Releases = []ipam.Release{{Address: ip(2), State: ipam.ReleaseMarked, Round: "r"}}
		a.SetView(t.Context(), v)
		if u, err := a.usage(t.Context()); !errors.Is(err, ErrNotSaved) {
			t.Fatalf("told %v, %v", u, err)
		}
		d.fail(nil)
		time.Sleep(time.Minute)
		if u, err := a.usage(t.Context()); err != nil || len(u.Answers) != 1 || !u.Answers[0].Yes || d.saved.State.Leaving[ip(2)] != "r" {
			t.Errorf("told %v, %v; saved %v", u, err, d.saved.State)
		}
	})
}

func TestWhoWaitsIsServedInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := start(t, &disk{}, Saved{}, nothing)
		a.SetView(t.Context(), viewOf(1, 1))
		owners := []ipam.Owner{"ns/a", "ns/b", "ns/c"}
		got := make(chan ipam.Allocation, len(owners))
		var wg sync.WaitGroup
		for _, o := range owners {
			wg.Go(func() {
				g, err := a.Allocate(t.Context(), o, netip.Addr{})
				if err != nil {
					t.Error(err)
				}
				got <- g
			})
			synctest.Wait()
		}
		for i := range owners {
			addresses := []byte{1, 2, 3, 4}[:i+2]
			a.SetView(t.Context(), viewOf(uint64(i+2), addresses...))
			if g := <-got; g.Owner != owners[i] || g.Address != ip(byte(i+2)) {
				t.Errorf("%d: %s got %s", i, g.Owner, g.Address)
			}
		}
		wg.Wait()
	})
}

func TestEmptyHandedInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		calls := 0
		a := start(t, &disk{}, Saved{}, func(_ context.Context, r *eniv1.EnsureAddressesRequest) error {
			calls++
			if r.GetFree() != 1 || len(r.GetUsed()) != 1 || r.GetNodeName() != "node-1" {
				t.Errorf("asked for %v", r)
			}
			return rpc.Refuse(codes.ResourceExhausted, reason.SubnetFull, "subnet-1 has no free address")
		})
		a.SetView(t.Context(), viewOf(1, 1))
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		began := time.Now()
		_, err := a.Allocate(ctx, "ns/a", netip.Addr{})
		var empty *EmptyError
		if !errors.As(err, &empty) || !errors.Is(err, ipam.ErrEmpty) || empty.Blocked.Reason != reason.SubnetFull || empty.Used != 1 || empty.Pool != 1 {
			t.Errorf("got %v", err)
		}
		if ctx.Err() != nil || time.Since(began) < 9*time.Second {
			t.Errorf("answered after %s, deadline over: %v", time.Since(began), ctx.Err())
		}
		if calls < 3 || calls > 12 {
			t.Errorf("asked %d times in 10 s", calls)
		}
		if u, err := a.usage(t.Context()); err != nil || u.Waiting != 0 {
			t.Errorf("still waiting: %v, %v", u, err)
		}
		// The view knows why, where the allocator does not answer.
		a.Allocator = allocator{ensure: func(context.Context, *eniv1.EnsureAddressesRequest) error { return errors.New("away") }}
		v := viewOf(2, 1)
		v.Blocked = []Blocked{{Reason: reason.OutOfENIs, Message: "3 of 3"}}
		synctest.Wait()
		a.SetView(t.Context(), v)
		ctx, cancel = context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := a.Allocate(ctx, "ns/a", netip.Addr{}); !errors.As(err, &empty) || empty.Blocked.Reason != reason.OutOfENIs {
			t.Errorf("got %v", err)
		}
	})
}

func TestACallUnderWayOutlivesWhoAsked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		entered, ended := make(chan struct{}), make(chan error, 1)
		a := start(t, &disk{}, Saved{}, func(ctx context.Context, _ *eniv1.EnsureAddressesRequest) error {
			close(entered)
			select {
			case <-ctx.Done():
				ended <- ctx.Err()
			case <-time.After(5 * time.Second):
				ended <- nil
			}
			return nil
		})
		a.SetView(t.Context(), viewOf(1, 1))
		ctx, cancel := context.WithCancel(t.Context())
		go func() { <-entered; cancel() }()
		if _, err := a.Allocate(ctx, "ns/a", netip.Addr{}); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
		if err := <-ended; err != nil {
			t.Errorf("the call was broken off: %v", err)
		}
	})
}

func TestStoppingEndsWhoWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &disk{}
		a := NewAddresses(AddressesConfig{
			NodeName: "node-1", Board: condition.NewBoard(time.Now), Logger: slog.New(slog.DiscardHandler),
			Allocator: allocator{ensure: func(ctx context.Context, _ *eniv1.EnsureAddressesRequest) error { <-ctx.Done(); return ctx.Err() }},
			Tracer:    noop.NewTracerProvider().Tracer(""), Save: d.save,
		}, Saved{})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- a.Run(ctx) }()
		a.SetView(t.Context(), viewOf(1, 1))
		got := make(chan error, 1)
		go func() { _, err := a.Allocate(t.Context(), "ns/a", netip.Addr{}); got <- err }()
		synctest.Wait()
		cancel()
		if err := <-got; !errors.Is(err, ErrStopping) {
			t.Errorf("got %v", err)
		}
		if err := <-done; err != nil {
			t.Errorf("ended with %v", err)
		}
		if _, err := a.Allocate(t.Context(), "ns/b", netip.Addr{}); !errors.Is(err, ErrStopping) {
			t.Errorf("after the end: %v", err)
		}
		if len(d.saved.State.Used) != 1 {
			t.Errorf("saved %v", d.saved.State)
		}
	})
}

// A replica that lags shows an older view, in which an address is that has left.
func TestOlderViewIsIgnored(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := start(t, &disk{}, Saved{}, nothing)
		a.SetView(t.Context(), viewOf(5, 1))
		for _, v := range []View{viewOf(4, 1, 2), {View: viewOf(0, 1, 2, 3).View, Fence: Fence{Epoch: 0, Generation: 99}}} {
			a.SetView(t.Context(), v)
			if n := len(a.List()); n != 1 {
				t.Errorf("%v was taken: %d addresses", v.Fence, n)
			}
		}
		// Another epoch counts anew, and a view without a fence is the newest there is.
		a.SetView(t.Context(), View{View: viewOf(0, 1, 2).View, Fence: Fence{Epoch: 2, Generation: 1}})
		if n := len(a.List()); n != 2 {
			t.Errorf("%d addresses", n)
		}
		a.SetView(t.Context(), View{View: viewOf(0, 1, 2, 3).View})
		if n := len(a.List()); n != 3 {
			t.Errorf("%d addresses", n)
		}
	})
}

func TestSavedViewServesAfterARestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := viewOf(3, 1, 2)
		a := start(t, &disk{}, Saved{View: &v}, nothing)
		if a.Router() != ip(1) {
			t.Errorf("router %s", a.Router())
		}
		if got, err := a.Allocate(t.Context(), "ns/a", netip.Addr{}); err != nil || got.Address != ip(2) {
			t.Errorf("got %v, %v", got, err)
		}
	})
}

func TestValidOwner(t *testing.T) {
	for owner, want := range map[string]bool{
		"router": true, "health": true, "ns/pod": true,
		"": false, "pod": false, "/pod": false, "ns/": false, "a/b/c": false,
	} {
		if ValidOwner(owner) != want {
			t.Errorf("%q: %v", owner, !want)
		}
	}
}
