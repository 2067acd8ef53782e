// Package contract_test checks what IdentityService promises, over gRPC and
// through the real interceptors, with replicas that share one real etcd: one
// inside the test, or the program that ENIPLANE_ETCD names.
package contract_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/namespace"
	"go.opentelemetry.io/otel/trace/noop"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	identityv1 "github.com/eniplane/eniplane/gen/eniplane/identity/v1"
	"github.com/eniplane/eniplane/identity-service/internal/etcd"
	"github.com/eniplane/eniplane/identity-service/internal/index"
	"github.com/eniplane/eniplane/identity-service/internal/keeper"
	"github.com/eniplane/eniplane/identity-service/internal/ledger"
	"github.com/eniplane/eniplane/identity-service/internal/server"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"
)

// etcdPath names a program to run instead of the etcd inside the test.
const etcdPath = "ENIPLANE_ETCD"

// shared is the etcd of all tests; each has its own namespace in it.
var shared struct {
	client *clientv3.Client
	spaces atomic.Int64
}

func TestMain(m *testing.M) { os.Exit(testMain(m)) }

func testMain(m *testing.M) int {
	dir, err := os.MkdirTemp("", "identity-contract-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	client, stop, err := startEtcd(dir)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	shared.client = client
	code := m.Run()
	stop()
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }

func startEtcd(dir string) (*clientv3.Client, func(), error) {
	if path := os.Getenv(etcdPath); path != "" {
		return execEtcd(dir, path)
	}
	s, err := etcd.Start(context.Background(), etcd.ServerConfig{Dir: dir}, discard())
	if err != nil {
		return nil, nil, err
	}
	// Over the network: without one between, watchers would share what they get,
	// and namespaces write to it.
	client, err := etcd.Dial(etcd.ClientConfig{Endpoints: []string{s.Endpoint()}}, discard())
	if err != nil {
		return nil, nil, errors.Join(err, s.Close())
	}
	return client, func() { _, _ = client.Close(), s.Close() }, nil
}

func execEtcd(dir, path string) (*clientv3.Client, func(), error) {
	urls := make([]string, 2)
	for i := range urls {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, nil, err
		}
		urls[i] = "http://" + l.Addr().String()
		if err := l.Close(); err != nil {
			return nil, nil, err
		}
	}
	cmd := exec.Command(path, "--data-dir", filepath.Join(dir, "data"), "--log-level", "error", "--max-txn-ops", "1024",
		"--listen-client-urls", urls[0], "--advertise-client-urls", urls[0],
		"--listen-peer-urls", urls[1], "--initial-advertise-peer-urls", urls[1], "--initial-cluster", "default="+urls[1])
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return nil, nil, err
	}
	client, err := etcd.Dial(etcd.ClientConfig{Endpoints: urls[:1]}, discard())
	if err != nil {
		return nil, nil, err
	}
	stop := func() {
		_ = client.Close()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	for {
		if _, err := client.Get(ctx, "ready"); err == nil {
			return client, stop, nil
		}
		if ctx.Err() != nil {
			stop()
			return nil, nil, fmt.Errorf("%s does not serve", path)
		}
	}
}

// space is an empty store.
type space struct {
	kv      clientv3.KV
	watcher clientv3.Watcher
}

func newSpace() *space {
	name := "/" + strconv.FormatInt(shared.spaces.Add(1), 10)
	return &space{kv: namespace.NewKV(shared.client.KV, name), watcher: namespace.NewWatcher(shared.client.Watcher, name)}
}

// settings differ from test to test; the zero value is as in production, with
// the smallest transactions.
type settings struct {
	numbers ledger.Range
	history int
	txnOps  int
	kv      func(etcd.KV) etcd.KV
}

// replica is one running service.
type replica struct {
	identityv1.IdentityServiceClient
	keeper *keeper.Keeper
	stop   func()
}

// start runs a replica on the store until stop, or the end of the test.
func (s *space) start(t testing.TB, with settings) *replica {
	t.Helper()
	if with.numbers == (ledger.Range{}) {
		with.numbers = ledger.Range{First: ledger.DefaultFirst, Last: ledger.DefaultLast}
	}
	var kv etcd.KV = s.kv
	if with.kv != nil {
		kv = with.kv(kv)
	}
	x := index.New(with.history)
	store := etcd.NewStore(kv, s.watcher, x, etcd.Config{Range: with.numbers, MaxTxnOps: with.txnOps}, discard())
	k := keeper.New(store, x, time.Now, discard())
	service := server.New(server.Config{SessionTTL: time.Minute}, k, store, x, discard())

	registry := prometheus.NewRegistry()
	front, err := rpc.NewServer(
		rpc.ServerConfig{
			Listen: "127.0.0.1:0", HealthListen: "127.0.0.1:0", MetricsListen: "127.0.0.1:0",
			MaxRecvBytes: 20 << 20, GracePeriod: time.Second, DefaultTimeout: time.Minute,
		},
		rpc.Deps{Logger: discard(), Registerer: registry, Gatherer: registry, TracerProvider: noop.NewTracerProvider()})
	if err != nil {
		t.Fatal(err)
	}
	identityv1.RegisterIdentityServiceServer(front.GRPC(), service)
	// No retries: a test wants to see each answer.
	conn, err := grpc.NewClient(front.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(20<<20), grpc.WaitForReady(true)))
	if err != nil {
		t.Fatal(err)
	}

	ctx, cancel := context.WithCancel(context.Background())
	var loops sync.WaitGroup
	for _, run := range []func(context.Context) error{front.Run, store.Run} {
		loops.Go(func() {
			if err := run(ctx); err != nil {
				t.Errorf("a loop ended: %v", err)
			}
		})
	}
	r := &replica{IdentityServiceClient: identityv1.NewIdentityServiceClient(conn), keeper: k}
	r.stop = sync.OnceFunc(func() {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
		cancel()
		loops.Wait()
		service.Wait()
	})
	t.Cleanup(r.stop)
	eventually(t, "the replica has read the store", func() bool { return x.Revision() > 0 })
	return r
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

var requests atomic.Int64

func requestID() string { return "r" + strconv.FormatInt(requests.Add(1), 10) }

// node is an agent with its session.
type node struct {
	t          testing.TB
	on         identityv1.IdentityServiceClient
	name       string
	session    *identityv1.Session
	ledger     string
	generation uint64
}

func (r *replica) node(t testing.TB, name string) *node {
	t.Helper()
	n := &node{t: t, on: r, name: name}
	n.open()
	return n
}

// open opens the session, again after a restart of the agent.
func (n *node) open() {
	n.t.Helper()
	resp, err := n.on.OpenSession(n.t.Context(), &identityv1.OpenSessionRequest{
		RequestId: requestID(), NodeName: n.name, NodeUid: "uid-" + n.name, BootId: "boot",
	})
	if err != nil {
		n.t.Fatalf("open the session of %s: %v", n.name, err)
	}
	n.session, n.ledger, n.generation = resp.GetSession(), resp.GetLedgerId(), 0
}

// policy is a CiliumNetworkPolicy; restored is what a node had before.
func policy(name string) *identityv1.Owner {
	return &identityv1.Owner{Kind: identityv1.OwnerKind_OWNER_KIND_CILIUM_NETWORK_POLICY, Namespace: "ns", Name: name, Uid: "uid-" + name}
}

func restored(node string) *identityv1.Owner {
	return &identityv1.Owner{Kind: identityv1.OwnerKind_OWNER_KIND_RESTORE, Name: node, Uid: node}
}

func wanted(prefixes ...string) []*identityv1.WantedPrefix {
	out := make([]*identityv1.WantedPrefix, len(prefixes))
	for i, p := range prefixes {
		out[i] = &identityv1.WantedPrefix{Prefix: p}
	}
	return out
}

func (n *node) request(o *identityv1.Owner, set []*identityv1.WantedPrefix) *identityv1.SetHoldingRequest {
	n.generation++
	return &identityv1.SetHoldingRequest{RequestId: requestID(), Session: n.session, Owner: o, Generation: n.generation, Prefixes: set}
}

// hold declares the set of an owner and returns the numbers in its order.
func (n *node) hold(o *identityv1.Owner, prefixes ...string) []uint32 {
	n.t.Helper()
	resp, err := n.on.SetHolding(n.t.Context(), n.request(o, wanted(prefixes...)))
	if err != nil {
		n.t.Fatalf("%s: %v", n.name, err)
	}
	return numbersOf(resp)
}

func numbersOf(resp *identityv1.SetHoldingResponse) []uint32 {
	out := make([]uint32, len(resp.GetAssignments()))
	for i, a := range resp.GetAssignments() {
		out[i] = a.GetNumber()
	}
	return out
}

func (n *node) drop(o *identityv1.Owner) {
	n.t.Helper()
	n.generation++
	req := &identityv1.DropHoldingRequest{RequestId: requestID(), Session: n.session, Owner: o, Generation: n.generation}
	if _, err := n.on.DropHolding(n.t.Context(), req); err != nil {
		n.t.Fatalf("%s: %v", n.name, err)
	}
}

// identity is what is known of a prefix; nil if nothing is.
func (r *replica) identity(t testing.TB, prefix string) *identityv1.Identity {
	t.Helper()
	resp, err := r.GetIdentity(t.Context(), &identityv1.GetIdentityRequest{Key: &identityv1.GetIdentityRequest_Prefix{Prefix: prefix}})
	if status.Code(err) == codes.NotFound {
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}
	return resp.GetIdentity()
}

// wantHolders checks how many hold a prefix, and that its state says the same.
func (r *replica) wantHolders(t testing.TB, prefix string, want uint32) {
	t.Helper()
	id := r.identity(t, prefix)
	live := id.GetState() == identityv1.IdentityState_IDENTITY_STATE_LIVE
	if id.GetHolderCount() != want || live != (want > 0) {
		t.Errorf("%s has %d holders (%v), want %d", prefix, id.GetHolderCount(), id.GetState(), want)
	}
}

func wantRefusal(t testing.TB, err error, code codes.Code, why reason.Reason) {
	t.Helper()
	if status.Code(err) != code || rpc.ReasonOf(err) != why {
		t.Errorf("error %v with %v, want %v with %v", err, rpc.ReasonOf(err), code, why)
	}
}
