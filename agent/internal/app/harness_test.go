package app

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/eniplane/eniplane/agent/internal/bpf/bpftest"
	"github.com/eniplane/eniplane/agent/internal/fake"
	"github.com/eniplane/eniplane/deploy/local/ec2sim"
	agentv1 "github.com/eniplane/eniplane/gen/eniplane/agent/v1"
	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/internal/localkube"
	"github.com/eniplane/eniplane/internal/program"
)

// runAgent makes this test binary an agent, so that a test can kill one.
const runAgent = "ENIPLANE_TEST_RUN_AGENT"

// cluster is one API server for the tests of this package.
var cluster *localkube.Cluster

func TestMain(m *testing.M) {
	if os.Getenv(runAgent) != "" {
		os.Exit(Main())
	}
	os.Exit(localkube.Shared(m, func(c *localkube.Cluster) { cluster = c }))
}

const (
	nodeName   = "node-1"
	instanceID = "i-00000001"
	mac        = "02:00:00:00:00:01"
)

// world is everything around one agent.
type world struct {
	t         *testing.T
	dir       string
	identity  *fake.Identity
	syncer    *fake.Syncer
	allocator *fake.Allocator
	services  map[string]*fake.Endpoint // by flag
	imds      *httptest.Server
	flags     map[string]string
}

func newWorld(t *testing.T) *world {
	t.Helper()
	dir, err := os.MkdirTemp("", "eniplane-agent-") // short enough for sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	w := &world{
		t: t, dir: dir, identity: fake.NewIdentity(), syncer: fake.NewSyncer(), allocator: fake.NewAllocator(),
		services: make(map[string]*fake.Endpoint),
	}
	for flag, register := range map[string]func(grpc.ServiceRegistrar){
		"node-syncer": w.syncer.Register, "eni-allocator": w.allocator.Register, "identity-service": w.identity.Register,
	} {
		e := fake.NewEndpoint(filepath.Join(dir, flag+".sock"), register)
		if err := e.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Stop)
		w.services[flag] = e
	}
	sim, err := ec2sim.New(ec2sim.Config{Topology: ec2sim.Topology{
		VPCs:      []ec2sim.VPCSpec{{ID: "vpc-00000001", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16")}}},
		Subnets:   []ec2sim.SubnetSpec{{ID: "subnet-00000001", VPC: "vpc-00000001", CIDR: netip.MustParsePrefix("10.0.1.0/24"), Zone: "us-east-1a"}},
		Instances: []ec2sim.InstanceSpec{{ID: instanceID, Type: "t3.medium", Subnet: "subnet-00000001"}, {ID: "i-00000002", Type: "t3.medium", Subnet: "subnet-00000001"}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	w.imds = httptest.NewServer(sim.IMDS(instanceID))
	t.Cleanup(w.imds.Close)
	boot := filepath.Join(dir, "boot_id")
	if err := os.WriteFile(boot, []byte("11111111-2222-3333-4444-555555555555\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	w.flags = map[string]string{
		"node-name": nodeName, "node-uid": "uid-of-node-1", "imds-endpoint": w.imds.URL, "boot-id-file": boot,
		"state-dir": filepath.Join(dir, "state"), "map-pin-path": filepath.Join(bpftest.FS(t), nodeName, "cilium_ipcache_v2"),
		"map-max-entries": "1000", "listen": "unix://" + filepath.Join(dir, "agent.sock"),
		"health-listen": "127.0.0.1:0", "metrics-listen": "127.0.0.1:0", "ports-file": filepath.Join(dir, "ports.json"),
		"restore-deadline": "1h", "grace-period": "1s",
	}
	for flag, e := range w.services {
		w.flags[flag] = e.Target()
	}
	w.syncer.SetView(view(1, 1, 2, 3))
	return w
}

// view is a node's view with one interface and addresses 10.0.1.x.
func view(generation uint64, addresses ...int) *nodev1.NodeView {
	v := &nodev1.NodeView{
		NodeName: nodeName, InstanceId: instanceID, Fence: &nodev1.Fence{Epoch: 1, Generation: generation},
		Enis: []*nodev1.Eni{{
			Id: "eni-1", Ip: "10.0.1.250", Mac: mac, DeviceIndex: 1,
			Subnet: &nodev1.Subnet{Id: "subnet-00000001", Cidr: "10.0.1.0/24"},
			Vpc:    &nodev1.Vpc{Id: "vpc-00000001", PrimaryCidr: "10.0.0.0/16", Cidrs: []string{"100.64.0.0/16"}},
		}},
	}
	for _, a := range addresses {
		ip := fmt.Sprint("10.0.1.", a)
		v.Enis[0].Addresses = append(v.Enis[0].Addresses, ip)
		v.Pool = append(v.Pool, &nodev1.PoolAddress{Address: ip, EniId: "eni-1"})
	}
	return v
}

// running is one agent that runs.
type running struct {
	agentv1.AgentServiceClient
	t    *testing.T
	conn *grpc.ClientConn
	stop func() // gracefully; may be called again
	kill func() // with SIGKILL; nil in this process
	logs *syncBuffer
}

func (w *world) args() []string {
	var args []string
	for name, value := range w.flags {
		args = append(args, "--"+name+"="+value)
	}
	return args
}

// start runs the agent in this process.
func (w *world) start() *running {
	w.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	logs := &syncBuffer{}
	done := make(chan error, 1)
	go func() { done <- program.Run(ctx, Spec(), w.args(), nil, io.Discard, logs) }()
	var once sync.Once
	r := &running{t: w.t, logs: logs, stop: func() {
		once.Do(func() {
			cancel()
			if err := <-done; err != nil {
				w.t.Errorf("the agent ended with %v", err)
			}
		})
	}}
	w.connect(r)
	return r
}

// startProcess runs the agent in a process of its own.
func (w *world) startProcess() *running {
	w.t.Helper()
	command := exec.Command(os.Args[0], w.args()...)
	command.Env = append(os.Environ(), runAgent+"=1")
	logs := &syncBuffer{}
	command.Stderr = logs
	if err := command.Start(); err != nil {
		w.t.Fatal(err)
	}
	var once sync.Once
	end := func(signal os.Signal) func() {
		return func() {
			once.Do(func() {
				_ = command.Process.Signal(signal)
				_ = command.Wait() // a kill is an error
			})
		}
	}
	r := &running{t: w.t, logs: logs, stop: end(os.Interrupt), kill: end(os.Kill)}
	w.connect(r)
	return r
}

func (w *world) connect(r *running) {
	w.t.Helper()
	w.t.Cleanup(func() {
		r.close()
		if w.t.Failed() {
			w.t.Logf("log of the agent:\n%s", r.logs.String())
		}
	})
	soon := backoff.Config{BaseDelay: 5 * time.Millisecond, Multiplier: 1, MaxDelay: 5 * time.Millisecond}
	conn, err := grpc.NewClient(w.flags["listen"], grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: soon, MinConnectTimeout: time.Second}))
	if err != nil {
		w.t.Fatal(err)
	}
	r.conn, r.AgentServiceClient = conn, agentv1.NewAgentServiceClient(conn)
	eventually(w.t, "the agent answers", func() error {
		_, err := r.GetStatus(w.t.Context(), &agentv1.GetStatusRequest{}, grpc.WaitForReady(true))
		return err
	})
}

// close stops the agent and the connection to it.
func (r *running) close() {
	if r.conn != nil {
		_ = r.conn.Close()
	}
	r.stop()
}

// crash kills the agent's process.
func (r *running) crash() {
	_ = r.conn.Close()
	r.kill()
}

// eventually polls until there is no error.
func eventually(t *testing.T, what string, holds func() error) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		err := holds()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("not in time: %s: %v", what, err)
		}
	}
}

// entries returns what the map holds: number by prefix.
func (r *running) entries() (map[string]uint32, error) {
	entries := make(map[string]uint32)
	request := &agentv1.ListEntriesRequest{PageSize: 7}
	for {
		page, err := r.ListEntries(r.t.Context(), request)
		if err != nil {
			return nil, err
		}
		for _, e := range page.GetEntries() {
			entries[e.GetPrefix()] = e.GetNumber()
		}
		if request.PageToken = page.GetNextPageToken(); request.PageToken == "" {
			return entries, nil
		}
	}
}

// wantEntries waits until the map holds exactly these prefixes with the ledger's
// numbers.
func (w *world) wantEntries(r *running, prefixes ...string) {
	w.t.Helper()
	eventually(w.t, "the map holds "+strings.Join(prefixes, " "), func() error {
		got, err := r.entries()
		if err != nil {
			return err
		}
		for _, p := range prefixes {
			if got[p] == 0 || got[p] != w.identity.Number(p) {
				return fmt.Errorf("%s has %d, ledger %d", p, got[p], w.identity.Number(p))
			}
		}
		if len(got) != len(prefixes) {
			return fmt.Errorf("%v", got)
		}
		return nil
	})
}

func (r *running) replace(owner string, prefixes ...string) (*agentv1.ReplacePrefixesResponse, error) {
	return r.ReplacePrefixes(r.t.Context(), &agentv1.ReplacePrefixesRequest{OwnerName: owner, Prefixes: prefixes})
}

func (r *running) mustReplace(owner string, prefixes ...string) {
	r.t.Helper()
	if _, err := r.replace(owner, prefixes...); err != nil {
		r.t.Fatal(err)
	}
}

// conditions returns the reasons of the agent's conditions.
func (r *running) conditions() map[string]string {
	all := make(map[string]string)
	s, err := r.GetStatus(r.t.Context(), &agentv1.GetStatusRequest{})
	if err != nil {
		r.t.Fatal(err)
	}
	for _, c := range s.GetConditions() {
		all[strings.TrimPrefix(c.GetReason().String(), "REASON_")] = c.GetMessage()
	}
	return all
}

func (r *running) wantCondition(name string, present bool) {
	r.t.Helper()
	eventually(r.t, fmt.Sprintf("condition %s: %v", name, present), func() error {
		if _, ok := r.conditions()[name]; ok != present {
			return fmt.Errorf("%v", r.conditions())
		}
		return nil
	})
}

// syncBuffer is a buffer for several goroutines.
type syncBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// proxy stands before the API server and can cut it off.
type proxy struct {
	listener net.Listener
	target   string
	wg       sync.WaitGroup

	mu    sync.Mutex
	cut   bool
	conns map[net.Conn]struct{}
}

func newProxy(t *testing.T, target string) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{listener: l, target: strings.TrimPrefix(target, "https://"), conns: make(map[net.Conn]struct{})}
	p.wg.Go(p.accept)
	t.Cleanup(func() {
		_ = l.Close()
		p.cutOff(true)
		p.wg.Wait()
	})
	return p
}

func (p *proxy) accept() {
	for {
		in, err := p.listener.Accept()
		if err != nil {
			return
		}
		out, err := net.Dial("tcp", p.target)
		p.mu.Lock()
		if p.cut || err != nil {
			_ = in.Close()
			if out != nil {
				_ = out.Close()
			}
			p.mu.Unlock()
			continue
		}
		p.conns[in], p.conns[out] = struct{}{}, struct{}{}
		p.mu.Unlock()
		for from, to := range map[net.Conn]net.Conn{in: out, out: in} {
			p.wg.Go(func() {
				_, _ = io.Copy(to, from)
				_ = to.Close()
				_ = from.Close()
			})
		}
	}
}

// cutOff breaks all connections and lets no new one through, or lets them again.
func (p *proxy) cutOff(cut bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut = cut
	if cut {
		for c := range p.conns {
			_ = c.Close()
		}
		clear(p.conns)
	}
}

// useKube gives the agent the API server through a proxy.
func (w *world) useKube() *proxy {
	w.t.Helper()
	p := newProxy(w.t, cluster.URL)
	text, err := os.ReadFile(cluster.Kubeconfig)
	if err != nil {
		w.t.Fatal(err)
	}
	path := filepath.Join(w.dir, "kubeconfig")
	text = bytes.ReplaceAll(text, []byte(cluster.URL), []byte("https://"+p.listener.Addr().String()))
	if err := os.WriteFile(path, text, 0o600); err != nil {
		w.t.Fatal(err)
	}
	w.flags["kubeconfig"] = path
	return p
}

// compact is a message as text, for failures.
func compact(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		return err.Error()
	}
	return string(text)
}
