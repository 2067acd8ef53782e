package keeper_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/goleak"

	"github.com/eniplane/eniplane/identity-service/internal/etcd"
	"github.com/eniplane/eniplane/identity-service/internal/index"
	"github.com/eniplane/eniplane/identity-service/internal/keeper"
	"github.com/eniplane/eniplane/identity-service/internal/ledger"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// replica is a keeper on an etcd, with a clock that the test moves.
type replica struct {
	*keeper.Keeper
	index *index.Index
	late  atomic.Int64 // nanoseconds that the clock is ahead
	stop  func()
}

func newEtcd(t *testing.T) *clientv3.Client {
	t.Helper()
	e, err := etcd.Start(t.Context(), etcd.ServerConfig{Dir: t.TempDir()}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	return e.Client
}

func start(t *testing.T, client *clientv3.Client) *replica {
	t.Helper()
	logger := slog.New(slog.DiscardHandler)
	r := &replica{index: index.New(0)}
	store := etcd.NewStore(client, client, r.index, etcd.Config{Range: ledger.Range{First: ledger.DefaultFirst, Last: ledger.DefaultLast}}, logger)
	r.Keeper = keeper.New(store, r.index, func() time.Time { return time.Now().Add(time.Duration(r.late.Load())) }, logger)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- store.Run(ctx) }()
	r.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(r.stop)
	if err := store.Barrier(t.Context()); err != nil {
		t.Fatal(err)
	}
	return r
}

func setOf(t *testing.T, texts ...string) (ledger.Set, []ledger.Wanted) {
	t.Helper()
	var prefixes []netip.Prefix
	for _, p := range texts {
		prefixes = append(prefixes, netip.MustParsePrefix(p))
	}
	set, err := ledger.NewSet(prefixes)
	if err != nil {
		t.Fatal(err)
	}
	var wanted []ledger.Wanted
	for _, p := range set.Prefixes {
		wanted = append(wanted, ledger.Wanted{Prefix: p})
	}
	return set, wanted
}

// agent calls with requests that follow on each other.
type agent struct {
	t       *testing.T
	session ledger.Session
	calls   int
}

func (a *agent) open(k *replica) {
	a.t.Helper()
	a.calls++
	s, err := k.Open(a.t.Context(), ledger.Open{Node: "n", NodeUID: "u", BootID: "b", Request: ledger.RequestID(fmt.Sprint(a.calls))})
	if err != nil {
		a.t.Fatal(err)
	}
	a.session = s
}

func (a *agent) op(owner string) ledger.Hold {
	a.calls++
	return ledger.Hold{
		Session: a.session.ID, Epoch: a.session.Epoch, Owner: ledger.Owner{Kind: 6, Name: owner, UID: owner},
		Generation: ledger.Generation(a.calls), Request: ledger.RequestID(fmt.Sprint(a.calls)), Body: ledger.Body(fmt.Sprint(a.calls)),
	}
}

func (a *agent) hold(k *replica, owner string, prefixes ...string) []ledger.Number {
	a.t.Helper()
	set, wanted := setOf(a.t, prefixes...)
	held, err := k.Hold(a.t.Context(), a.op(owner), set, wanted)
	if err != nil {
		a.t.Fatal(err)
	}
	return held.Numbers
}

func (a *agent) drop(k *replica, owner string) {
	a.t.Helper()
	op := a.op(owner)
	if _, err := k.Drop(a.t.Context(), ledger.Drop{Session: op.Session, Epoch: op.Epoch, Owner: op.Owner, Generation: op.Generation, Request: op.Request}); err != nil {
		a.t.Fatal(err)
	}
}

// current waits until the index shows everything.
func (r *replica) current(t *testing.T) {
	t.Helper()
	if err := r.Check(t.Context(), "nobody", 1); !errors.Is(err, ledger.ErrSessionUnknown) {
		t.Fatalf("the session of nobody: %v", err)
	}
}

// tidy makes a round that knows everything and is seen by the index.
func (r *replica) tidy(t *testing.T) {
	t.Helper()
	r.current(t)
	if err := r.Tidy(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.current(t)
}

func keys(t *testing.T, client *clientv3.Client, under string) int64 {
	t.Helper()
	resp, err := client.Get(t.Context(), etcd.Root+under, clientv3.WithPrefix(), clientv3.WithCountOnly())
	if err != nil {
		t.Fatal(err)
	}
	return resp.Count
}

func TestTidyDeletesSetsThatNobodyHolds(t *testing.T) {
	client := newEtcd(t)
	k := start(t, client)
	a := &agent{t: t}
	a.open(k)
	for i := range 10 {
		a.hold(k, "p", "10.0.0.0/8", fmt.Sprintf("11.%d.0.0/16", i))
	}
	if got := keys(t, client, "s/"); got != 20 {
		t.Fatalf("%d keys of sets, want 20", got)
	}
	k.tidy(t) // Condemns.
	k.tidy(t) // Deletes.
	if got := keys(t, client, "s/"); got != 2 {
		t.Errorf("%d keys of sets are left, want 2", got)
	}
	if got := k.index.Sizes(); got.Live != 2 || got.Prefixes != 11 || got.Sets != 1 {
		t.Errorf("%+v, want 2 live of 11 prefixes in one set", got)
	}
}

// A set that is taken up between the two rounds stays, whichever replica takes it
// up and whichever deletes.
func TestTidyAgainstSomebodyWhoTakesItUp(t *testing.T) {
	client := newEtcd(t)
	k, other := start(t, client), start(t, client)
	a := &agent{t: t}
	a.open(k)
	number := a.hold(k, "p", "10.0.0.0/8")[0]
	a.drop(k, "p")
	k.tidy(t)
	if again := a.hold(other, "q", "10.0.0.0/8")[0]; again != number {
		t.Errorf("number %d, was %d", again, number)
	}
	// k may or may not have seen it; its guard has.
	for range 3 {
		if err := k.Tidy(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	fresh := start(t, client)
	if got := fresh.index.Sizes(); got.Live != 1 || got.Sets != 1 || got.Broken != 0 {
		t.Errorf("%+v, want one live prefix in one set", got)
	}
}

// Two replicas tidy all the time while a third changes holdings: whatever is
// held stays whole.
func TestTidyAllTheTime(t *testing.T) {
	client := newEtcd(t)
	a := &agent{t: t}
	worker := start(t, client)
	a.open(worker)
	ctx, cancel := context.WithCancel(t.Context())
	var group sync.WaitGroup
	for range 2 {
		k := start(t, client)
		group.Go(func() {
			for ctx.Err() == nil {
				if err := k.Tidy(ctx); err != nil && ctx.Err() == nil {
					t.Errorf("tidy: %v", err)
					return
				}
			}
		})
	}
	numbers := make(map[string]ledger.Number)
	for i := range 300 {
		p := fmt.Sprintf("10.%d.0.0/16", i%3)
		n := a.hold(worker, "p", p)[0]
		if before, ok := numbers[p]; ok && before != n {
			t.Fatalf("%s had %d and has %d", p, before, n)
		}
		numbers[p] = n
		worker.current(t)
		if id, ok := worker.index.Identity(netip.MustParsePrefix(p), 10); !ok || id.HolderCount != 1 {
			t.Fatalf("round %d: %s has %d holders", i, p, id.HolderCount)
		}
	}
	cancel()
	group.Wait()
	if broken := start(t, client).index.Broken(); len(broken) > 0 {
		t.Errorf("broken: %v", broken)
	}
}

// The record of a dropped holding refuses late calls, and goes after a while.
func TestTidyForgetsDroppedHoldings(t *testing.T) {
	client := newEtcd(t)
	k := start(t, client)
	a := &agent{t: t}
	a.open(k)
	late := a.op("p")
	a.hold(k, "p", "10.0.0.0/8")
	a.drop(k, "p")
	k.tidy(t)
	set, wanted := setOf(t, "10.0.0.0/8")
	if _, err := k.Hold(t.Context(), late, set, wanted); err == nil {
		t.Error("a late call brought a dropped holding back")
	}
	if got := keys(t, client, "h/"); got != 1 {
		t.Fatalf("%d records, want 1", got)
	}
	k.late.Store(int64(2 * time.Hour))
	k.tidy(t)
	if got := keys(t, client, "h/"); got != 0 {
		t.Errorf("%d records are left, want none", got)
	}
}

// Parts of a set without meta, left by somebody who died, go after two rounds.
func TestTidyDeletesOrphans(t *testing.T) {
	client := newEtcd(t)
	k := start(t, client)
	set, _ := setOf(t, "10.0.0.0/8")
	key := etcd.Root + "s/" + set.Digest.String() + "/000000"
	if _, err := client.Put(t.Context(), key, string(ledger.AppendPrefix(nil, set.Prefixes[0]))); err != nil {
		t.Fatal(err)
	}
	k.tidy(t)
	if got := keys(t, client, "s/"); got != 1 {
		t.Fatalf("%d keys after one round, want 1", got)
	}
	k.tidy(t)
	if got := keys(t, client, "s/"); got != 0 {
		t.Errorf("%d keys after two rounds, want none", got)
	}
}
