// Command bench measures the agent's way from a changed policy to the kernel's
// map beside the least that it could be: one empty call of the identity service
// and one raw write, in turn, in the same run.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"time"

	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/eniplane/eniplane/agent/internal/bpf"
	"github.com/eniplane/eniplane/agent/internal/checkpoint"
	"github.com/eniplane/eniplane/agent/internal/condition"
	"github.com/eniplane/eniplane/agent/internal/fake"
	"github.com/eniplane/eniplane/agent/internal/holdings"
	"github.com/eniplane/eniplane/agent/internal/ipcache"
	"github.com/eniplane/eniplane/agent/internal/plan"
	"github.com/eniplane/eniplane/agent/internal/programmer"
	"github.com/eniplane/eniplane/agent/internal/wish"
	identityv1 "github.com/eniplane/eniplane/gen/eniplane/identity/v1"
	"github.com/eniplane/eniplane/internal/bench"
	"github.com/eniplane/eniplane/internal/rpc"
)

const (
	service = "agent"
	rounds  = 2000
	target  = 3
)

func main() {
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt)
	err := run(ctx)
	cancel()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// stage is an agent's way to the map, and what the references need.
type stage struct {
	wish     *wish.Wish
	prog     *programmer.Programmer
	client   identityv1.IdentityServiceClient
	session  *identityv1.Session
	raw, own programmer.Map
	folder   *checkpoint.Folder
}

func run(ctx context.Context) (err error) {
	dir, err := os.MkdirTemp("", "agent-bench-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	own, raw, done, err := maps(dir)
	if err != nil {
		return err
	}
	defer done()

	// The ledger is in memory, behind the same socket and client as a real one.
	endpoint := fake.NewEndpoint(filepath.Join(dir, "identity.sock"), fake.NewIdentity().Register)
	if err := endpoint.Start(); err != nil {
		return err
	}
	defer endpoint.Stop()
	conn, err := rpc.Dial(endpoint.Target(), rpc.ClientConfig{}, rpc.ClientDeps{TracerProvider: noop.NewTracerProvider()})
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	folder, err := checkpoint.Open(filepath.Join(dir, "state"), checkpoint.Identity{NodeName: "bench"})
	if err != nil {
		return err
	}
	s := &stage{client: identityv1.NewIdentityServiceClient(conn), own: own, raw: raw, folder: folder}

	ctx, cancel := context.WithCancel(ctx)
	group, ctx := errgroup.WithContext(ctx)
	held := s.build()
	group.Go(func() error { return s.prog.Run(ctx) })
	group.Go(func() error { return held.Run(ctx) })
	err = s.measure(ctx)
	cancel()
	return errors.Join(err, group.Wait())
}

func (s *stage) build() *holdings.Client {
	logger, tracer, board := slog.New(slog.DiscardHandler), noop.NewTracerProvider().Tracer(""), condition.NewBoard(time.Now)
	s.wish = wish.New(ipcache.NewCache(ipcache.Config{}), nil, nil)
	s.prog = programmer.New(programmer.Config{Map: s.own, Wish: s.wish, Board: board, Logger: logger, Tracer: tracer})
	return holdings.New(holdings.Config{
		Client: s.client, Wish: s.wish, Map: s.prog, Board: board, Logger: logger, Tracer: tracer, NodeName: "bench", BootID: "bench",
		NodeUID: func(context.Context) (string, error) { return "bench", nil },
		Declare: func(owners []ipcache.Owner) error { return s.folder.Save("owners.json", owners) },
	})
}

func (s *stage) measure(ctx context.Context) error {
	// A session of the references' own, for the empty call.
	r, err := s.client.OpenSession(ctx, &identityv1.OpenSessionRequest{RequestId: "bench", NodeName: "reference", NodeUid: "reference", BootId: "bench"})
	if err != nil {
		return err
	}
	s.session = r.GetSession()

	edited := owner(0)
	ours, reference, err := bench.Interleave(rounds,
		func(i int) error { return s.apply(ctx, edited, host(10, i)) },
		func(i int) error { return s.least(ctx, i) })
	if err != nil {
		return err
	}
	if err := report("cidr-to-map", ours, reference); err != nil {
		return err
	}
	// A new policy is written down first, so that a restarted agent can end it.
	ours, reference, err = bench.Interleave(rounds/10,
		func(i int) error { return s.apply(ctx, owner(i+1), host(11, i)) },
		func(i int) error {
			if err := s.folder.Save("reference.json", i); err != nil {
				return err
			}
			return s.least(ctx, i)
		})
	if err != nil {
		return err
	}
	return report("new-policy-to-map", ours, reference)
}

func report(name string, ours, reference []time.Duration) error {
	const median = 50
	return bench.Result{
		Service: service, Name: name, Unit: "us", Target: target,
		Ours: bench.Percentile(ours, median), Reference: bench.Percentile(reference, median),
	}.Print(os.Stdout)
}

// apply changes a policy to one prefix and returns when the map has it.
func (s *stage) apply(ctx context.Context, o ipcache.Owner, p netip.Prefix) error {
	version := s.wish.Replace(o, map[netip.Prefix]ipcache.Metadata{p: {Source: ipcache.SourceKubernetes}}, trace.SpanContext{})
	for {
		progress := s.wish.Progress()
		done, err := s.wish.Outcome(o, version)
		if err != nil {
			return err
		}
		if done {
			break
		}
		select {
		case <-progress:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if err := s.prog.Sync(ctx); err != nil {
		return err
	}
	if _, ok, err := s.own.Lookup(p.Addr()); err != nil || !ok {
		return fmt.Errorf("%s is not in the map: %w", p, err)
	}
	return nil
}

// least is one empty call and one write.
func (s *stage) least(ctx context.Context, i int) error {
	if _, err := s.client.KeepAlive(ctx, &identityv1.KeepAliveRequest{Session: s.session}); err != nil {
		return err
	}
	refused := s.raw.Upsert([]plan.Item{{Prefix: host(12, i), Entry: ipcache.Entry{Number: fake.FirstNumber}}})
	if len(refused) > 0 {
		return refused[0].Err
	}
	return nil
}

func owner(i int) ipcache.Owner {
	name := fmt.Sprint("policy-", i)
	return ipcache.Owner{Kind: ipcache.KindNetworkPolicy, Namespace: "bench", Name: name, UID: name}
}

func host(net byte, i int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{net, byte(i >> 16), byte(i >> 8), byte(i)}), 32)
}

// maps opens the map that the agent writes and one for the reference: in the
// kernel, on a BPF file system of the bench's own, or else in memory.
func maps(dir string) (programmer.Map, programmer.Map, func(), error) {
	pins := filepath.Join(dir, "bpf")
	if err := os.Mkdir(pins, 0o700); err != nil {
		return nil, nil, nil, err
	}
	if err := unix.Mount("bpf", pins, "bpf", 0, ""); err != nil {
		fmt.Println("note: no BPF file system can be mounted, so the maps are in memory:", err)
		return bpf.NewMemory(0), bpf.NewMemory(0), func() {}, nil
	}
	unmount := func() { _ = unix.Unmount(pins, unix.MNT_DETACH) }
	first, err := bpf.Open(bpf.Config{PinPath: filepath.Join(pins, "own")})
	if err != nil {
		unmount()
		return nil, nil, nil, err
	}
	second, err := bpf.Open(bpf.Config{PinPath: filepath.Join(pins, "raw")})
	if err != nil {
		_ = first.Close()
		unmount()
		return nil, nil, nil, err
	}
	return first, second, func() {
		_ = first.Close()
		_ = second.Close()
		unmount()
	}, nil
}
