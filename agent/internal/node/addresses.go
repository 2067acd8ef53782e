// Package node is the agent's part in the life of its node: it registers, follows
// the node's view, gives out addresses from it, and reports what is in use. Which
// address goes to whom is decided in ipam.
package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"go.opentelemetry.io/otel/trace"

	"github.com/eniplane/eniplane/agent/internal/condition"
	"github.com/eniplane/eniplane/agent/internal/ipam"
	eniv1 "github.com/eniplane/eniplane/gen/eniplane/eni/v1"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"
	"github.com/eniplane/eniplane/internal/telemetry"
)

// Allocator is the name of eni-allocator as a dependency.
const Allocator = "eni-allocator"

var (
	// ErrNotSaved says that the address could not be written down, so it was not given.
	ErrNotSaved = errors.New("state can not be saved")
	// ErrStopping says that the agent is going down.
	ErrStopping = errors.New("agent is stopping")
)

// Fence orders views: by epoch, then by generation. The zero Fence is that of no
// snapshot.
type Fence struct {
	Epoch      uint64 `json:"epoch"`
	Generation uint64 `json:"generation"`
}

// Compare orders fences.
func (f Fence) Compare(other Fence) int {
	return cmp.Or(cmp.Compare(f.Epoch, other.Epoch), cmp.Compare(f.Generation, other.Generation))
}

// Blocked is why a node lacks addresses.
type Blocked struct {
	Reason  reason.Reason `json:"reason"`
	Message string        `json:"message"`
}

// View is a node's view with what comes with it.
type View struct {
	ipam.View
	// Fence is that of the snapshot shown; zero if it is not known.
	Fence Fence
	// Blocked is what hinders the node. Empty means nothing.
	Blocked []Blocked
}

// Saved is what Addresses keep over a restart.
type Saved struct {
	State ipam.State `json:"state"`
	// View is the last one seen; nil if none ever was.
	View *View `json:"view,omitempty"`
}

// EmptyError says that no address came in time, and why.
type EmptyError struct {
	// Used and Pool count addresses.
	Used, Pool int
	// Blocked is the last known cause. Its reason is Unspecified if none is.
	Blocked Blocked
}

// Error implements error.
func (e *EmptyError) Error() string {
	s := fmt.Sprintf("no free address: %d in use of %d", e.Used, e.Pool)
	if e.Blocked.Reason != reason.Unspecified {
		s += "; " + e.Blocked.Reason.String() + ": " + e.Blocked.Message
	}
	return s
}

// Unwrap makes an EmptyError an ipam.ErrEmpty.
func (e *EmptyError) Unwrap() error { return ipam.ErrEmpty }

// AddressesConfig is what Addresses work with.
type AddressesConfig struct {
	NodeName  string
	CoolDown  time.Duration
	Allocator eniv1.EniAllocatorServiceClient
	Board     *condition.Board
	Logger    *slog.Logger
	Tracer    trace.Tracer
	// Save writes the state down and returns when it is safe.
	Save func(Saved) error
}

// Addresses are those of the node. They are safe for concurrent use. Run must
// run for anything to be given.
type Addresses struct {
	AddressesConfig
	dirty    chan struct{}   // holds a token if there is something to save
	toReport chan struct{}   // holds a token if there is something to report
	life     context.Context // ends with Run
	stop     context.CancelFunc

	mu      sync.Mutex // guards what follows
	pool    *ipam.Pool
	view    *View // nil before there is one in this process or from a checkpoint
	waiters []*waiter
	version uint64         // counts changes
	saved   uint64         // the version on disk
	saveErr error          // of the last attempt, nil if it worked
	onDisk  chan struct{}  // closed and replaced after each attempt
	changed chan struct{}  // closed and replaced when the view changes
	calls   sync.WaitGroup // of demand; begun only while life lasts
}

// waiter is one request that waits for an address.
type waiter struct {
	owner   ipam.Owner
	want    netip.Addr
	granted chan ipam.Allocation // gets one, once
	done    chan struct{}        // closed when nobody waits any more
	refused Blocked              // of the last call for more; guarded by Addresses.mu
}

// NewAddresses returns the addresses of a node with what was saved of them.
func NewAddresses(config AddressesConfig, saved Saved) *Addresses {
	life, stop := context.WithCancel(context.Background())
	a := &Addresses{
		AddressesConfig: config,
		life:            life,
		stop:            stop,
		dirty:           make(chan struct{}, 1),
		toReport:        make(chan struct{}, 1),
		pool:            ipam.New(ipam.Config{CoolDown: config.CoolDown}, saved.State),
		onDisk:          make(chan struct{}),
		changed:         make(chan struct{}),
	}
	if saved.View != nil {
		// The node goes on with what it last saw until it sees something newer.
		a.view = saved.View
		a.pool.SetView(saved.View.View, time.Now())
		a.touch()
	}
	return a
}

// Run saves what changes until ctx ends, and the rest then.
func (a *Addresses) Run(ctx context.Context) error {
	const again = time.Second // after an attempt that failed
	retry := time.NewTimer(again)
	defer retry.Stop()
	for ctx.Err() == nil {
		select {
		case <-a.dirty:
		case <-retry.C:
		case <-ctx.Done():
			continue
		}
		if !a.save(ctx) {
			retry.Reset(again)
		}
	}
	a.mu.Lock()
	a.stop()
	a.mu.Unlock()
	a.calls.Wait()
	a.save(context.WithoutCancel(ctx))
	return nil
}

// save writes the newest state down and reports whether it is on disk.
func (a *Addresses) save(ctx context.Context) bool {
	a.mu.Lock()
	version := a.version
	if a.saved == version {
		a.mu.Unlock()
		return true
	}
	state := Saved{State: a.pool.State(), View: a.view}
	a.mu.Unlock()

	err := a.Save(state)
	a.mu.Lock()
	defer a.mu.Unlock()
	if err == nil {
		a.saved = version
		a.Board.Clear(reason.Internal, "addresses")
	} else {
		a.Board.Set(reason.Internal, "addresses", "addresses can not be saved, so none is given: "+err.Error())
		if a.saveErr == nil {
			a.Logger.ErrorContext(ctx, "addresses not saved", telemetry.KeyError, err.Error())
		}
	}
	a.saveErr = err
	close(a.onDisk)
	a.onDisk = make(chan struct{})
	return err == nil
}

// touch notes a change: to be saved, then reported. Needs the lock, or a sole user.
func (a *Addresses) touch() {
	a.version++
	signal(a.dirty)
	signal(a.toReport)
}

// persisted waits until a version is on disk.
func (a *Addresses) persisted(ctx context.Context, version uint64) error {
	for {
		a.mu.Lock()
		saved, tried := a.saved, a.onDisk
		a.mu.Unlock()
		if saved >= version {
			return nil
		}
		select {
		case <-tried:
			a.mu.Lock()
			err := a.saveErr
			a.mu.Unlock()
			if err != nil {
				return fmt.Errorf("%w: %w", ErrNotSaved, err)
			}
		case <-a.life.Done():
			return ErrStopping
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// SetView makes a newer view the present one and serves who waits. A view with a
// lower fence than the present one comes from a replica that lags, and is ignored:
// an address that left meanwhile must not come back by it.
func (a *Addresses) SetView(ctx context.Context, v View) {
	a.mu.Lock()
	if a.view != nil && v.Fence != (Fence{}) && v.Fence.Compare(a.view.Fence) < 0 {
		now := a.view.Fence
		a.mu.Unlock()
		a.Logger.InfoContext(ctx, "older view of the node ignored", telemetry.KeyEpoch, v.Fence.Epoch, telemetry.KeyGeneration, v.Fence.Generation,
			"present_epoch", now.Epoch, "present_generation", now.Generation)
		return
	}
	router, had := a.pool.Of(ipam.Router)
	a.view = &v
	a.pool.SetView(v.View, time.Now())
	a.touch()
	a.grant()
	now, has := a.pool.Of(ipam.Router)
	retained, stray := a.pool.Retained(), a.pool.Stray()
	close(a.changed)
	a.changed = make(chan struct{})
	a.mu.Unlock()

	if has && (!had || router.Address != now.Address) {
		a.Logger.InfoContext(ctx, "router address taken", telemetry.KeyAddress, now.Address.String(), telemetry.KeyENI, string(now.ENI.ID))
	}
	a.tell(retained, stray)
}

func (a *Addresses) tell(retained []ipam.Allocation, stray []netip.Addr) {
	a.Board.Clear(reason.AddressRetained, "pool")
	if len(retained) > 0 {
		a.Board.Set(reason.AddressRetained, "pool", fmt.Sprintf(
			"%d addresses are in use and no longer in the pool, such as %s of %s; they stay", len(retained), retained[0].Address, retained[0].Owner))
	}
	a.Board.Clear(reason.AddressNotOnENI, "pool")
	if len(stray) > 0 {
		a.Board.Set(reason.AddressNotOnENI, "pool", fmt.Sprintf(
			"%d addresses of the pool name an interface that the view lacks, such as %s; they are not given out", len(stray), stray[0]))
	}
}

// grant serves who waits, in order. Needs the lock.
func (a *Addresses) grant() {
	a.waiters = slices.DeleteFunc(a.waiters, func(w *waiter) bool {
		got, err := a.pool.Allocate(w.owner, w.want, time.Now())
		if err != nil {
			return false
		}
		a.touch()
		w.granted <- got
		return true
	})
}

// Allocate gives an owner an address of the pool: the one that it has, the wanted
// one, or any if want is the zero Addr. With nothing free it asks for more and
// waits for as long as ctx allows, less a moment to say why it failed. What is
// returned survives a restart. Errors are those of ipam, an *EmptyError,
// ErrNotSaved, ErrStopping and those of ctx.
func (a *Addresses) Allocate(ctx context.Context, owner ipam.Owner, want netip.Addr) (ipam.Allocation, error) {
	a.mu.Lock()
	_, had := a.pool.Of(owner)
	got, err := a.pool.Allocate(owner, want, time.Now())
	switch {
	case err == nil && had:
		version := a.version
		a.mu.Unlock()
		return got, a.persisted(ctx, version)
	case err == nil:
		a.touch()
		version := a.version
		a.mu.Unlock()
		return got, a.persisted(ctx, version)
	case want.IsValid() || !errors.Is(err, ipam.ErrEmpty) && !errors.Is(err, ipam.ErrNoView):
		a.mu.Unlock()
		return ipam.Allocation{}, err
	case a.life.Err() != nil:
		a.mu.Unlock()
		return ipam.Allocation{}, ErrStopping
	}
	w := &waiter{owner: owner, want: want, granted: make(chan ipam.Allocation, 1), done: make(chan struct{})}
	a.waiters = append(a.waiters, w)
	signal(a.toReport)
	ctx, span := a.Tracer.Start(ctx, "wait for an address")
	defer span.End()
	a.calls.Go(func() { a.demand(ctx, w) })
	a.mu.Unlock()
	return a.wait(ctx, w)
}

// wait waits for a grant.
func (a *Addresses) wait(ctx context.Context, w *waiter) (ipam.Allocation, error) {
	defer close(w.done)
	early, cancel := beforeDeadline(ctx)
	defer cancel()
	var got ipam.Allocation
	select {
	case got = <-w.granted:
	case <-early.Done():
	case <-a.life.Done():
	}
	a.mu.Lock()
	if !got.Address.IsValid() {
		if i := slices.Index(a.waiters, w); i >= 0 {
			a.waiters = slices.Delete(a.waiters, i, i+1)
			signal(a.toReport)
			defer a.mu.Unlock()
			return ipam.Allocation{}, a.emptyHanded(ctx, w)
		}
		got = <-w.granted // it came at the last moment
	}
	version := a.version
	a.mu.Unlock()
	return got, a.persisted(ctx, version)
}

// emptyHanded says why a request got nothing. Needs the lock.
func (a *Addresses) emptyHanded(ctx context.Context, w *waiter) error {
	if a.life.Err() != nil {
		return ErrStopping
	}
	if err := ctx.Err(); errors.Is(err, context.Canceled) {
		return err
	}
	if a.view == nil {
		return ipam.ErrNoView
	}
	e := &EmptyError{Used: len(a.pool.Used()), Pool: len(a.view.Pool), Blocked: w.refused}
	if len(a.view.Blocked) > 0 && (e.Blocked.Reason == reason.Unspecified || e.Blocked.Reason == reason.ServiceAway) {
		e.Blocked = a.view.Blocked[0]
	}
	return e
}

// beforeDeadline returns a context that ends a moment before its parent's
// deadline, so that there is time to say why.
func beforeDeadline(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return context.WithCancel(ctx)
	}
	const most = 500 * time.Millisecond
	return context.WithDeadline(ctx, deadline.Add(-min(most, time.Until(deadline)/5)))
}

// demand asks for more addresses until nobody waits for them any more. The call
// under way is not broken off by that: what it began serves the next one.
func (a *Addresses) demand(ctx context.Context, w *waiter) {
	const longest = 30 * time.Second // of one call
	pause := 50 * time.Millisecond
	for {
		a.mu.Lock()
		changed := a.changed
		request := &eniv1.EnsureAddressesRequest{
			RequestId: uuid.NewString(), NodeName: a.NodeName, Free: uint32(max(1, min(len(a.waiters), 4096))),
		}
		for _, u := range a.pool.Used() {
			request.Used = append(request.Used, u.Address.String())
		}
		a.mu.Unlock()

		call, cancel := context.WithTimeout(context.WithoutCancel(ctx), longest)
		forget := context.AfterFunc(a.life, cancel)
		_, err := a.Allocator.EnsureAddresses(call, request)
		forget()
		cancel()
		a.called(ctx, w, err)

		pause = min(2*pause, 2*time.Second)
		if after, ok := rpc.RetryAfter(err); ok {
			pause = max(pause, after)
		}
		timer := time.NewTimer(pause)
		select {
		case <-w.done:
			timer.Stop()
			return
		case <-a.life.Done():
			timer.Stop()
			return
		case <-changed:
			timer.Stop()
			// A newer view did not serve this one: ask again soon, but not at once.
			if !pauseFor(w.done, a.life.Done(), 20*time.Millisecond) {
				return
			}
		case <-timer.C:
		}
		a.mu.Lock()
		a.grant() // one that rested long enough meanwhile
		a.mu.Unlock()
	}
}

func pauseFor(done, stopped <-chan struct{}, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-done:
		return false
	case <-stopped:
		return false
	case <-timer.C:
		return true
	}
}

// called notes how a call for more went.
func (a *Addresses) called(ctx context.Context, w *waiter, err error) {
	r := rpc.ReasonOf(err)
	answered := err == nil || r != reason.Unspecified
	if answered {
		a.Board.Depend(Allocator, nil)
	} else {
		a.Board.Depend(Allocator, err)
		r = reason.ServiceAway
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	w.refused = Blocked{}
	if err != nil {
		w.refused = Blocked{Reason: r, Message: err.Error()}
		a.Logger.WarnContext(ctx, "no further addresses", telemetry.KeyReason, r.String(), telemetry.KeyError, err.Error())
	}
}

// Release takes an address back; see ipam.Pool.Release. What is returned
// survives a restart.
func (a *Addresses) Release(ctx context.Context, owner ipam.Owner, addr netip.Addr) (netip.Addr, error) {
	a.mu.Lock()
	freed, err := a.pool.Release(owner, addr, time.Now())
	if err != nil || !freed.IsValid() {
		a.mu.Unlock()
		return freed, err
	}
	a.touch()
	a.grant()
	version := a.version
	a.mu.Unlock()
	return freed, a.persisted(ctx, version)
}

// List returns every address known, sorted.
func (a *Addresses) List() []ipam.Status {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.pool.List()
}

// Router returns the router's address; the zero Addr if there is none yet.
func (a *Addresses) Router() netip.Addr {
	a.mu.Lock()
	defer a.mu.Unlock()
	r, _ := a.pool.Of(ipam.Router)
	return r.Address
}

// Usage is what is in use at one moment, as far as it is on disk.
type Usage struct {
	Used    []ipam.Allocation
	Answers []ipam.Answer
	Waiting int
}

// usage returns the newest usage, once it is on disk: an answer must survive
// before it is told.
func (a *Addresses) usage(ctx context.Context) (Usage, error) {
	a.mu.Lock()
	u := Usage{Used: a.pool.Used(), Answers: a.pool.Answers(), Waiting: len(a.waiters)}
	version := a.version
	a.mu.Unlock()
	return u, a.persisted(ctx, version)
}

// ValidOwner reports whether owner may name somebody: "namespace/name", or one
// of the node's own.
func ValidOwner(owner string) bool {
	if o := ipam.Owner(owner); o == ipam.Router || o == ipam.Health {
		return true
	}
	namespace, name, ok := strings.Cut(owner, "/")
	return ok && namespace != "" && name != "" && !strings.Contains(name, "/")
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
