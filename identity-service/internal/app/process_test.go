package app_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.opentelemetry.io/otel/trace/noop"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	identityv1 "github.com/eniplane/eniplane/gen/eniplane/identity/v1"
	"github.com/eniplane/eniplane/identity-service/internal/app"
	"github.com/eniplane/eniplane/identity-service/internal/etcd"
	"github.com/eniplane/eniplane/internal/program"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"
)

// process runs the program as its main does, with flags.
func process(t *testing.T, dir string, more ...string) (*instance, <-chan error) {
	t.Helper()
	ports := filepath.Join(t.TempDir(), "ports.json")
	args := append([]string{
		"--listen=127.0.0.1:0", "--health-listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0", "--grace-period=1s",
		"--ports-file=" + ports, "--data-dir=" + dir, "--etcd-client-port=0", "--etcd-peer-port=0",
	}, more...)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- program.Run(ctx, app.Spec(), args, nil, io.Discard, io.Discard) }()
	var listening program.Ports
	eventually(t, "the ports are written", func() bool {
		raw, err := os.ReadFile(ports)
		return err == nil && json.Unmarshal(raw, &listening) == nil || len(ended) > 0
	})
	if listening.GRPC == "" {
		cancel()
		return nil, ended
	}
	conn, err := rpc.Dial(listening.GRPC, rpc.ClientConfig{}, rpc.ClientDeps{TracerProvider: noop.NewTracerProvider()})
	if err != nil {
		t.Fatal(err)
	}
	in := &instance{IdentityServiceClient: identityv1.NewIdentityServiceClient(conn)}
	stopped := false
	in.stop = func() {
		if stopped {
			return
		}
		stopped = true
		_ = conn.Close()
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("the program ended with %v", err)
		}
	}
	t.Cleanup(in.stop)
	in.ready(t)
	return in, ended
}

// Everything is there again after a restart on the same data directory: numbers,
// holders, the fence of the session, the memory of requests.
func TestRestartKeepsEverything(t *testing.T) {
	dir := t.TempDir()
	p, _ := process(t, dir)
	n := open(t, p, "n")
	last := n.setRequest(policy("p"), "10.1.0.0/16", "fd00::/64")
	before, err := p.SetHolding(t.Context(), last)
	if err != nil {
		t.Fatal(err)
	}
	n.acquire("gone", "10.2.0.0/16")
	n.release("gone")
	gone, number := n.holders("10.2.0.0/16")
	if len(gone) != 0 || number == 0 {
		t.Fatalf("10.2.0.0/16: %v %d", gone, number)
	}
	p.stop()

	p, _ = process(t, dir)
	n.on = p
	n.wantHolders("10.1.0.0/16", "p")
	n.wantHolders("fd00::/64", "p")
	after, err := p.SetHolding(t.Context(), last)
	if err != nil {
		t.Fatal(err)
	}
	if fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("the repeat answered %v, at first %v", after, before)
	}
	if again := n.acquire("back", "10.2.0.0/16")[0]; again != number {
		t.Errorf("10.2.0.0/16 came back with %d, want %d", again, number)
	}
	stale := &identityv1.Session{Id: n.session.GetId(), Epoch: n.session.GetEpoch()}
	n.reopen("n")
	if n.session.GetEpoch() != stale.GetEpoch()+1 {
		t.Errorf("epoch %d after %d", n.session.GetEpoch(), stale.GetEpoch())
	}
	if _, err := p.KeepAlive(t.Context(), &identityv1.KeepAliveRequest{Session: stale}); rpc.ReasonOf(err) != reason.StaleSession {
		t.Errorf("keepalive of the old epoch: %v, want STALE_SESSION", err)
	}
}

func TestTwoProcessesOnOneDirectory(t *testing.T) {
	dir := t.TempDir()
	p, _ := process(t, dir)
	second, ended := process(t, dir)
	if second != nil {
		t.Fatal("the second process started")
	}
	if err := <-ended; !errors.Is(err, etcd.ErrLocked) {
		t.Errorf("the second process ended with %v, want ErrLocked", err)
	}
	open(t, p, "n").acquire("p", "10.0.0.0/8") // The first one does not mind.
}

func TestDirectoryWithOtherSettings(t *testing.T) {
	dir := t.TempDir()
	p, _ := process(t, dir)
	p.stop()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	err := program.Run(ctx, app.Spec(), []string{
		"--listen=127.0.0.1:0", "--health-listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0",
		"--data-dir=" + dir, "--etcd-client-port=0", "--etcd-peer-port=0", "--last-number=20000000",
	}, nil, io.Discard, io.Discard)
	if !errors.Is(err, etcd.ErrForeign) {
		t.Errorf("the program ended with %v, want ErrForeign", err)
	}
	process(t, dir) // With the first settings, all is well.
}

// A store that is not ours is left alone, and the program says why it ends.
func TestForeignStore(t *testing.T) {
	for _, tc := range []struct{ name, key, value string }{
		{"keys, but no meta", etcd.Root + "p/4/0a000000/008", "16777217 1"},
		{"another format", etcd.Root + "meta", `{"ledger_id":"x","format":99,"first_number":16777217,"last_number":33554431}`},
		{"another range", etcd.Root + "meta", `{"ledger_id":"x","format":1,"first_number":1,"last_number":2}`},
		{"nonsense", etcd.Root + "meta", `{`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			endpoint := etcdFor(t)
			raw := rawClient(t, endpoint)
			if _, err := raw.Put(t.Context(), tc.key, tc.value); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			err := program.Run(ctx, app.Spec(), []string{
				"--listen=127.0.0.1:0", "--health-listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0", "--etcd-endpoints=" + endpoint,
			}, nil, io.Discard, io.Discard)
			if !errors.Is(err, etcd.ErrForeign) {
				t.Errorf("the program ended with %v, want ErrForeign", err)
			}
			resp, err := raw.Get(t.Context(), etcd.Root, clientv3.WithPrefix())
			if err != nil || len(resp.Kvs) != 1 || string(resp.Kvs[0].Value) != tc.value {
				t.Errorf("the store was changed: %v, %v", resp, err)
			}
		})
	}
}

func rawClient(t *testing.T, endpoint string) *clientv3.Client {
	t.Helper()
	raw, err := etcd.Dial(etcd.ClientConfig{Endpoints: []string{endpoint}}, quiet())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = raw.Close() })
	return raw
}

// Others may write to the same etcd: reads must not wait for news that never
// come.
func TestSharedEtcd(t *testing.T) {
	config := defaults(t)
	endpoint := etcdFor(t)
	config.Endpoints = []string{endpoint}
	n := open(t, start(t, config), "n")
	raw := rawClient(t, endpoint)
	for i := range 20 {
		if _, err := raw.Put(t.Context(), "/somebody/else", fmt.Sprint(i)); err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		n.wantHolders("10.0.0.0/8")
		if d := time.Since(begin); d > 2*time.Second {
			t.Fatalf("a read took %v", d)
		}
	}
}

// A dead store is said to be one; nothing is granted from memory.
func TestDeadStore(t *testing.T) {
	config := defaults(t)
	e, err := etcd.Start(t.Context(), etcd.ServerConfig{Dir: t.TempDir()}, quiet())
	if err != nil {
		t.Fatal(err)
	}
	closed := false
	t.Cleanup(func() {
		if !closed {
			_ = e.Close()
		}
	})
	config.Endpoints, config.StoreTimeout = []string{e.Endpoint()}, 300*time.Millisecond
	in := start(t, config)
	n := open(t, in, "n")
	req := n.setRequest(policy("p"), "10.0.0.0/8")
	if _, err := in.SetHolding(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	closed = true
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	calls := map[string]func(ctx context.Context) error{
		"a new holding": func(ctx context.Context) error {
			_, err := in.SetHolding(ctx, n.setRequest(policy("q"), "11.0.0.0/8"))
			return err
		},
		"a repeat": func(ctx context.Context) error {
			_, err := in.SetHolding(ctx, req)
			return err
		},
		"a read": func(ctx context.Context) error {
			_, err := in.LookupIdentity(ctx, &identityv1.LookupIdentityRequest{Address: "10.0.0.1"})
			return err
		},
		"a keepalive": func(ctx context.Context) error {
			_, err := in.KeepAlive(ctx, &identityv1.KeepAliveRequest{Session: n.session})
			return err
		},
	}
	for name, call := range calls {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			err := call(t.Context())
			if status.Code(err) != codes.Unavailable || rpc.ReasonOf(err) != reason.StoreUnavailable {
				t.Errorf("%v, want UNAVAILABLE, STORE_UNAVAILABLE", err)
			}
		})
	}
}

func TestValidateNamesTheFlag(t *testing.T) {
	for flag, change := range map[string]func(*app.Config){
		"--first-number":     func(c *app.Config) { c.First = 0 },
		"--last-number":      func(c *app.Config) { c.Last = 5 },
		"--data-dir":         func(c *app.Config) { c.DataDir = "" },
		"--etcd-client-port": func(c *app.Config) { c.ClientPort = 70000 },
		"--etcd-peer-port":   func(c *app.Config) { c.PeerPort = -1 },
		"--etcd-max-txn-ops": func(c *app.Config) { c.MaxTxnOps = 3 },
		"--etcd-cert":        func(c *app.Config) { c.Endpoints, c.Cert = []string{"x:1"}, "f" },
		"--etcd-ca":          func(c *app.Config) { c.CA = "f" },
		"--etcd-endpoints":   func(c *app.Config) { c.Endpoints = []string{" "} },
		"--etcd-timeout":     func(c *app.Config) { c.StoreTimeout = 0 },
		"--session-ttl":      func(c *app.Config) { c.SessionTTL = 0 },
	} {
		config := defaults(t)
		change(&config)
		if err := config.Validate(); err == nil || !strings.Contains(err.Error(), flag) {
			t.Errorf("%s: error %v does not name it", flag, err)
		}
	}
	config := defaults(t)
	if err := config.Validate(); err != nil {
		t.Errorf("the defaults: %v", err)
	}
}

// Many pages are all of the list, in order, each once.
func TestListPages(t *testing.T) {
	n := open(t, start(t, defaults(t)), "n")
	var want []string
	for i := range 23 {
		want = append(want, fmt.Sprintf("10.0.%d.0/24", i))
	}
	n.acquire("p", want...)
	n.acquire("old", "10.0.100.0/24", "fd00::/8")
	n.release("old")
	list := func(req *identityv1.ListIdentitiesRequest) []string {
		t.Helper()
		var got []string
		for {
			resp, err := n.on.ListIdentities(t.Context(), req)
			if err != nil {
				t.Fatal(err)
			}
			for _, id := range resp.GetIdentities() {
				got = append(got, id.GetPrefix())
			}
			if len(resp.GetIdentities()) > int(req.GetPageSize()) {
				t.Fatalf("%d on a page of %d", len(resp.GetIdentities()), req.GetPageSize())
			}
			if req.PageToken = resp.GetNextPageToken(); req.PageToken == "" {
				return got
			}
		}
	}
	live := identityv1.IdentityState_IDENTITY_STATE_LIVE
	draining := identityv1.IdentityState_IDENTITY_STATE_DRAINING
	for _, size := range []uint32{1, 5, 23, 24, 1000} {
		if got := list(&identityv1.ListIdentitiesRequest{PageSize: size, State: live}); !slices.Equal(got, want) {
			t.Errorf("live, %d a page: %v", size, got)
		}
	}
	if got := list(&identityv1.ListIdentitiesRequest{PageSize: 2, State: draining}); !slices.Equal(got, []string{"10.0.100.0/24", "fd00::/8"}) {
		t.Errorf("draining: %v", got)
	}
	if got := list(&identityv1.ListIdentitiesRequest{PageSize: 2, OverlappingPrefix: "10.0.4.0/22"}); !slices.Equal(got, want[4:8]) {
		t.Errorf("overlapping: %v", got)
	}
	resp, err := n.on.ListIdentities(t.Context(), &identityv1.ListIdentitiesRequest{PageSize: 1})
	if err != nil {
		t.Fatal(err)
	}
	for _, bad := range []*identityv1.ListIdentitiesRequest{
		{PageToken: "nonsense"},
		{PageToken: resp.GetNextPageToken(), State: live},
		{PageToken: resp.GetNextPageToken() + "AA"},
	} {
		if _, err := n.on.ListIdentities(t.Context(), bad); rpc.ReasonOf(err) != reason.PageTokenInvalid {
			t.Errorf("%v: %v, want PAGE_TOKEN_INVALID", bad, err)
		}
	}
}
