// Command bench measures identity-service against the etcd that it runs on: each
// operation over gRPC beside the least that etcd could do for it, in turn, in
// the same run.
package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.opentelemetry.io/otel/trace/noop"
	"golang.org/x/sync/errgroup"

	identityv1 "github.com/eniplane/eniplane/gen/eniplane/identity/v1"
	"github.com/eniplane/eniplane/identity-service/internal/app"
	"github.com/eniplane/eniplane/identity-service/internal/ledger"
	"github.com/eniplane/eniplane/internal/bench"
	"github.com/eniplane/eniplane/internal/program"
	"github.com/eniplane/eniplane/internal/rpc"
)

const (
	service = "identity-service"
	rounds  = 3000
	bigSet  = 10000
	bigRuns = 7
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

func run(ctx context.Context) error {
	dir, err := os.MkdirTemp("", "identity-bench-*")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()

	// The service as it is run by default: its etcd inside. The references speak
	// to the very same etcd over its port.
	ctx, cancel := context.WithCancel(ctx)
	group, ctx := errgroup.WithContext(ctx)
	target, endpoint, err := start(ctx, group, dir)
	if err != nil {
		cancel()
		return err
	}
	group.Go(func() error {
		defer cancel()
		return measure(ctx, target, endpoint)
	})
	return group.Wait()
}

// start runs the service in this process and returns its address, and that of
// its etcd.
func start(ctx context.Context, group *errgroup.Group, dir string) (string, string, error) {
	logger := slog.New(slog.DiscardHandler)
	registry := prometheus.NewRegistry()
	srv, err := rpc.NewServer(rpc.ServerConfig{
		Listen: "127.0.0.1:0", HealthListen: "127.0.0.1:0", MetricsListen: "127.0.0.1:0", MaxRecvBytes: 20 << 20, GracePeriod: time.Second,
	}, rpc.Deps{Logger: logger, Registerer: registry, Gatherer: registry, TracerProvider: noop.NewTracerProvider()})
	if err != nil {
		return "", "", err
	}
	config := app.Config{
		DataDir: filepath.Join(dir, "data"), First: uint32(ledger.DefaultFirst), Last: uint32(ledger.DefaultLast), SessionTTL: time.Minute, StoreTimeout: time.Minute,
	}
	s, err := app.Build(ctx, config, &program.Env{
		Name: service, Logger: logger, Registry: registry, TracerProvider: noop.NewTracerProvider(), Server: srv,
	})
	if err != nil {
		srv.Close()
		return "", "", err
	}
	loops, stopLoops := context.WithCancel(context.WithoutCancel(ctx))
	group.Go(func() error {
		defer stopLoops()
		return srv.Run(ctx)
	})
	group.Go(func() error { return s.Run(loops) })
	return srv.Addr().String(), s.EtcdEndpoint(), nil
}

type bencher struct {
	ctx     context.Context //nolint:containedctx // It lives for one run of main.
	client  identityv1.IdentityServiceClient
	raw     *clientv3.Client
	session *identityv1.Session
}

func measure(ctx context.Context, target, endpoint string) error {
	conn, err := rpc.Dial(target, rpc.ClientConfig{Timeout: time.Minute}, rpc.ClientDeps{TracerProvider: noop.NewTracerProvider()})
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	raw, err := clientv3.New(clientv3.Config{Endpoints: []string{endpoint}})
	if err != nil {
		return err
	}
	defer func() { _ = raw.Close() }()
	b := &bencher{ctx: ctx, client: identityv1.NewIdentityServiceClient(conn), raw: raw}
	if err := b.open(); err != nil {
		return err
	}
	for _, one := range []func() error{b.firstAcquire, b.repeat, b.bigSet} {
		if err := one(); err != nil {
			return err
		}
	}
	return nil
}

// open opens a session once the service is ready.
func (b *bencher) open() error {
	deadline := time.Now().Add(20 * time.Second)
	for {
		resp, err := b.client.OpenSession(b.ctx, &identityv1.OpenSessionRequest{RequestId: "bench", NodeName: "bench", NodeUid: "bench", BootId: "bench"})
		if err == nil {
			b.session = resp.GetSession()
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("open a session: %w", err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func (b *bencher) hold(owner string, prefixes []*identityv1.WantedPrefix) error {
	_, err := b.client.SetHolding(b.ctx, &identityv1.SetHoldingRequest{
		RequestId: owner, Session: b.session, Generation: 1, Prefixes: prefixes,
		Owner: &identityv1.Owner{Kind: identityv1.OwnerKind_OWNER_KIND_LOCAL, Name: owner, Uid: owner},
	})
	return err
}

// prefixAt returns the i-th of a series of prefixes.
func prefixAt(series, i int) *identityv1.WantedPrefix {
	return &identityv1.WantedPrefix{Prefix: fmt.Sprintf("%d.%d.%d.%d/32", series, i>>16&255, i>>8&255, i&255)}
}

// create is one raw create transaction of two keys, guarded both ways: the least
// that a number costs.
func (b *bencher) create(i int) error {
	p, n := fmt.Sprintf("/raw/p/%08d", i), fmt.Sprintf("/raw/n/%08d", i)
	_, err := b.raw.Txn(b.ctx).
		If(clientv3.Compare(clientv3.CreateRevision(p), "=", 0), clientv3.Compare(clientv3.CreateRevision(n), "=", 0)).
		Then(clientv3.OpPut(p, "16777217 1764557000000"), clientv3.OpPut(n, "10.0.0.1/32")).Commit()
	return err
}

func (b *bencher) firstAcquire() error {
	ours, theirs, err := bench.Interleave(rounds,
		func(i int) error {
			return b.hold(fmt.Sprintf("first-%d", i), []*identityv1.WantedPrefix{prefixAt(10, i)})
		}, b.create)
	if err != nil {
		return fmt.Errorf("first acquire: %w", err)
	}
	return report("acquire", ours, theirs, 99, 1.5)
}

func (b *bencher) repeat() error {
	one := []*identityv1.WantedPrefix{prefixAt(11, 1)}
	ours, theirs, err := bench.Interleave(rounds,
		func(int) error { return b.hold("repeat", one) },
		func(int) error {
			_, err := b.raw.Get(b.ctx, "/raw/p/00000001")
			return err
		})
	if err != nil {
		return fmt.Errorf("repeat: %w", err)
	}
	return report("repeat", ours, theirs, 99, 1.2)
}

// bigSet compares a set of new prefixes with puts of the same keys and values,
// batched as much as the embedded etcd allows.
func (b *bencher) bigSet() error {
	const perTxn = 1024 / 2 // As many operations as the service uses.
	var ours, theirs []time.Duration
	for round := range bigRuns {
		want := make([]*identityv1.WantedPrefix, bigSet)
		for i := range want {
			want[i] = prefixAt(20+round, i)
		}
		begin := time.Now()
		if err := b.hold(fmt.Sprintf("big-%d", round), want); err != nil {
			return fmt.Errorf("big set: %w", err)
		}
		middle := time.Now()
		for from := 0; from < bigSet; from += perTxn {
			var ops []clientv3.Op
			for i := from; i < min(from+perTxn, bigSet); i++ {
				ops = append(ops,
					clientv3.OpPut(fmt.Sprintf("/eniplane/identity/raw/p/4/%08x/%03d", round<<24|i, 32), "16777217 1764557000000"),
					clientv3.OpPut(fmt.Sprintf("/eniplane/identity/raw/n/%010d", round<<24|i), "10.100.100.100/32"))
			}
			if _, err := b.raw.Txn(b.ctx).Then(ops...).Commit(); err != nil {
				return fmt.Errorf("raw puts: %w", err)
			}
		}
		ours, theirs = append(ours, middle.Sub(begin)), append(theirs, time.Since(middle))
	}
	return report("set-10000", ours, theirs, 50, 2)
}

func report(name string, ours, theirs []time.Duration, p, target float64) error {
	return bench.Result{
		Service: service, Name: fmt.Sprintf("%s-p%.0f", name, p), Unit: "us", Target: target,
		Ours: bench.Percentile(ours, p), Reference: bench.Percentile(theirs, p),
	}.Print(os.Stdout)
}
