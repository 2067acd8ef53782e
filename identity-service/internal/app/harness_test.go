package app_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace/noop"
	"go.uber.org/goleak"

	identityv1 "github.com/eniplane/eniplane/gen/eniplane/identity/v1"
	"github.com/eniplane/eniplane/identity-service/internal/app"
	"github.com/eniplane/eniplane/identity-service/internal/etcd"
	"github.com/eniplane/eniplane/identity-service/internal/ledger"
	"github.com/eniplane/eniplane/internal/child"
	"github.com/eniplane/eniplane/internal/program"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		// etcd's own, from its packages' init and its backend; they end with the process.
		goleak.IgnoreTopFunction("go.opencensus.io/stats/view.(*worker).start"),
		goleak.IgnoreAnyFunction("gopkg.in/natefinch/lumberjack%2ev2.(*Logger).millRun"),
	)
}

// instance is one replica behind real gRPC.
type instance struct {
	identityv1.IdentityServiceClient
	stop func()
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func defaults(t *testing.T) app.Config {
	return app.Config{
		DataDir: t.TempDir(), First: uint32(ledger.DefaultFirst), Last: uint32(ledger.DefaultLast), SessionTTL: time.Minute, StoreTimeout: 5 * time.Second,
	}
}

// start runs a replica until the test ends, or until it is stopped.
func start(t *testing.T, config app.Config) *instance {
	t.Helper()
	if err := config.Validate(); err != nil {
		t.Fatal(err)
	}
	registry := prometheus.NewRegistry()
	srv, err := rpc.NewServer(rpc.ServerConfig{
		Listen: "127.0.0.1:0", HealthListen: "127.0.0.1:0", MetricsListen: "127.0.0.1:0",
		MaxRecvBytes: 20 << 20, GracePeriod: time.Second, DefaultTimeout: time.Minute,
	}, rpc.Deps{Logger: quiet(), Registerer: registry, Gatherer: registry, TracerProvider: noop.NewTracerProvider()})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	service, err := app.Build(ctx, config, &program.Env{
		Name: "identity-service", Logger: quiet(), Registry: registry, TracerProvider: noop.NewTracerProvider(), Server: srv,
	})
	if err != nil {
		cancel()
		srv.Close()
		t.Fatal(err)
	}
	serveCtx, stopServing := context.WithCancel(ctx)
	served, looped := make(chan error, 1), make(chan error, 1)
	go func() { served <- srv.Run(serveCtx) }()
	go func() { looped <- service.Run(ctx) }()
	conn, err := rpc.Dial(srv.Addr().String(), rpc.ClientConfig{Timeout: time.Minute}, rpc.ClientDeps{TracerProvider: noop.NewTracerProvider()})
	if err != nil {
		t.Fatal(err)
	}
	stopped := false
	in := &instance{IdentityServiceClient: identityv1.NewIdentityServiceClient(conn)}
	in.stop = func() {
		if stopped {
			return
		}
		stopped = true
		if err := conn.Close(); err != nil {
			t.Errorf("close the client: %v", err)
		}
		stopServing()
		if err := <-served; err != nil {
			t.Errorf("server: %v", err)
		}
		cancel()
		if err := <-looped; err != nil {
			t.Errorf("loops: %v", err)
		}
	}
	t.Cleanup(in.stop)
	in.ready(t)
	return in
}

// ready waits until reads are answered.
func (in *instance) ready(t *testing.T) {
	t.Helper()
	eventually(t, "ready", func() bool {
		_, err := in.ListIdentities(t.Context(), &identityv1.ListIdentitiesRequest{})
		return err == nil
	})
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("not in time: %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// cluster starts an etcd and n replicas on it. The etcd is a process of its own
// if ENIPLANE_ETCD names one, else it is in this process, reached over its port.
func cluster(t *testing.T, n int, change func(*app.Config)) []*instance {
	t.Helper()
	config := defaults(t)
	if change != nil {
		change(&config)
	}
	config.Endpoints = []string{etcdFor(t)}
	var out []*instance
	for range n {
		out = append(out, start(t, config))
	}
	return out
}

func etcdFor(t *testing.T) string {
	t.Helper()
	binary := os.Getenv("ENIPLANE_ETCD")
	if binary == "" {
		e, err := etcd.Start(t.Context(), etcd.ServerConfig{Dir: t.TempDir(), MaxTxnOps: 128}, quiet())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := e.Close(); err != nil {
				t.Errorf("close etcd: %v", err)
			}
		})
		return e.Endpoint()
	}
	client, peer := "http://127.0.0.1:"+freePort(t), "http://127.0.0.1:"+freePort(t)
	p, err := child.Start(child.Config{
		Path: binary, Dir: t.TempDir(), Log: t.TempDir() + "/etcd.log",
		Args: []string{
			"--name=e", "--data-dir=data", "--listen-client-urls=" + client, "--advertise-client-urls=" + client,
			"--listen-peer-urls=" + peer, "--initial-advertise-peer-urls=" + peer, "--initial-cluster=e=" + peer,
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Stop(5 * time.Second) })
	return client
}

// node is a session of a node, with the calls of its agent.
type node struct {
	t       *testing.T
	on      identityv1.IdentityServiceClient
	session *identityv1.Session
	next    int
	gen     map[string]uint64
}

func open(t *testing.T, on identityv1.IdentityServiceClient, name string) *node {
	t.Helper()
	n := &node{t: t, on: on, gen: make(map[string]uint64)}
	n.reopen(name)
	return n
}

func (n *node) request() string {
	n.next++
	return fmt.Sprintf("%s-%d", n.t.Name()[:min(20, len(n.t.Name()))], n.next)
}

func (n *node) reopen(name string) {
	n.t.Helper()
	resp, err := n.on.OpenSession(n.t.Context(), &identityv1.OpenSessionRequest{
		RequestId: n.request() + fmt.Sprint(time.Now().UnixNano()), NodeName: name, NodeUid: "uid-" + name, BootId: "boot",
	})
	if err != nil {
		n.t.Fatal(err)
	}
	n.session = resp.GetSession()
}

func policy(name string) *identityv1.Owner {
	return &identityv1.Owner{Kind: identityv1.OwnerKind_OWNER_KIND_NETWORK_POLICY, Namespace: "default", Name: name, Uid: "uid-" + name}
}

func (n *node) setRequest(o *identityv1.Owner, prefixes ...string) *identityv1.SetHoldingRequest {
	n.gen[o.GetName()]++
	req := &identityv1.SetHoldingRequest{RequestId: n.request(), Session: n.session, Owner: o, Generation: n.gen[o.GetName()]}
	for _, p := range prefixes {
		req.Prefixes = append(req.Prefixes, &identityv1.WantedPrefix{Prefix: p})
	}
	return req
}

// acquire makes an owner hold exactly the prefixes and returns their numbers.
func (n *node) acquire(owner string, prefixes ...string) []uint32 {
	n.t.Helper()
	resp, err := n.on.SetHolding(n.t.Context(), n.setRequest(policy(owner), prefixes...))
	if err != nil {
		n.t.Fatalf("%s acquires %v: %v", owner, prefixes, err)
	}
	var out []uint32
	for _, a := range resp.GetAssignments() {
		out = append(out, a.GetNumber())
	}
	return out
}

func (n *node) release(owner string) {
	n.t.Helper()
	o := policy(owner)
	n.gen[o.GetName()]++
	if _, err := n.on.DropHolding(n.t.Context(), &identityv1.DropHoldingRequest{
		RequestId: n.request(), Session: n.session, Owner: o, Generation: n.gen[o.GetName()],
	}); err != nil {
		n.t.Fatalf("%s releases: %v", owner, err)
	}
}

// holders returns the names of the owners of a prefix, and its number.
func (n *node) holders(prefix string) ([]string, uint32) {
	n.t.Helper()
	resp, err := n.on.GetIdentity(n.t.Context(), &identityv1.GetIdentityRequest{Key: &identityv1.GetIdentityRequest_Prefix{Prefix: prefix}})
	if rpc.ReasonOf(err) == reason.PrefixUnknown {
		return nil, 0
	}
	if err != nil {
		n.t.Fatal(err)
	}
	id := resp.GetIdentity()
	var out []string
	for _, h := range id.GetHolders() {
		out = append(out, h.GetOwner().GetName())
	}
	if live := id.GetState() == identityv1.IdentityState_IDENTITY_STATE_LIVE; live != (len(out) > 0) || int(id.GetHolderCount()) != len(out) {
		n.t.Fatalf("%s: state %v, holders %v, count %d", prefix, id.GetState(), out, id.GetHolderCount())
	}
	return out, id.GetNumber()
}

func (n *node) wantHolders(prefix string, want ...string) {
	n.t.Helper()
	if got, _ := n.holders(prefix); fmt.Sprint(got) != fmt.Sprint(want) {
		n.t.Fatalf("%s is held by %v, want %v", prefix, got, want)
	}
}

// freePort returns a port of loopback on which nobody listens right now.
func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	_, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return port
}
