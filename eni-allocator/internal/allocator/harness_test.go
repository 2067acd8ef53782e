package allocator_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
	"go.uber.org/goleak"
	"google.golang.org/grpc"

	"github.com/eniplane/eniplane/deploy/local/ec2sim"
	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"

	"github.com/eniplane/eniplane/eni-allocator/internal/allocator"
	"github.com/eniplane/eniplane/eni-allocator/internal/ec2"
	"github.com/eniplane/eniplane/eni-allocator/internal/lease"
	"github.com/eniplane/eniplane/eni-allocator/internal/plan"
	"github.com/eniplane/eniplane/eni-allocator/internal/syncertest"
)

func TestMain(m *testing.M) {
	for k, v := range map[string]string{
		"AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": "not-a-secret", "AWS_EC2_METADATA_DISABLED": "true",
		"AWS_CONFIG_FILE": os.DevNull, "AWS_SHARED_CREDENTIALS_FILE": os.DevNull,
	} {
		if err := os.Setenv(k, v); err != nil {
			panic(err)
		}
	}
	goleak.VerifyTestMain(m)
}

const (
	medium = "i-00000001" // t3.medium: 3 ENIs of 6 addresses
	tiny   = "i-00000002" // t3.micro: 2 ENIs of 2 addresses
	own    = "subnet-0000000a"
	other  = "subnet-0000000b" // same zone and route table
)

// world is a simulated account, a node-syncer, and allocators that come and go.
type world struct {
	t      *testing.T
	sim    *ec2sim.Server
	syncer syncer
	epoch  uint64
	tracer trace.TracerProvider

	mu     sync.Mutex // guards what follows
	faults []fault
	calls  []ec2sim.Call // those that change something, in the order of arrival
}

// fault is asked about each call before it is carried out, and after; an error
// is what the caller gets.
type fault struct {
	before func(ec2sim.Call) *ec2sim.APIError
	after  func(ec2sim.Call) *ec2sim.APIError
	// instead, unless nil, is given the answer of a call and returns what the
	// caller gets for it.
	instead func(ec2sim.Call, ec2sim.Response) ec2sim.Response
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, epoch: 1000, tracer: noop.NewTracerProvider()}
	prefix := netip.MustParsePrefix
	sim, err := ec2sim.Start(ec2sim.Config{
		Topology: ec2sim.Topology{
			VPCs: []ec2sim.VPCSpec{{ID: "vpc-00000001", Name: "v", CIDRs: []netip.Prefix{prefix("10.0.0.0/16"), prefix("100.64.0.0/16")}}},
			Subnets: []ec2sim.SubnetSpec{
				{ID: own, Name: "s", VPC: "v", CIDR: prefix("10.0.0.0/24"), Zone: "us-east-1a"},
				{ID: other, VPC: "v", CIDR: prefix("10.0.1.0/24"), Zone: "us-east-1a"},
				{ID: "subnet-0000000c", VPC: "v", CIDR: prefix("10.0.2.0/24"), Zone: "us-east-1b"},
			},
			SecurityGroups: []ec2sim.SecurityGroupSpec{{ID: "sg-00000001", Name: "nodes", VPC: "v"}},
			Instances: []ec2sim.InstanceSpec{
				{ID: medium, Type: "t3.medium", Subnet: "s", SecurityGroups: []string{"nodes"}},
				{ID: tiny, Type: "t3.micro", Subnet: "s", SecurityGroups: []string{"nodes"}},
			},
		},
		Middleware: []ec2sim.Middleware{w.middleware},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := sim.Check(); err != nil {
			t.Error(err)
		}
		sim.Close()
		http.DefaultClient.CloseIdleConnections()
	})
	w.sim = sim
	w.syncer = syncer{syncertest.Start(t)}
	return w
}

func (w *world) middleware(next ec2sim.Handler) ec2sim.Handler {
	return func(ctx context.Context, call ec2sim.Call) (ec2sim.Response, *ec2sim.APIError) {
		w.mu.Lock()
		if !strings.HasPrefix(call.Action, "Describe") {
			w.calls = append(w.calls, call)
		}
		faults := slices.Clone(w.faults)
		w.mu.Unlock()
		for _, f := range faults {
			if f.before != nil {
				if err := f.before(call); err != nil {
					return nil, err
				}
			}
		}
		resp, refusal := next(ctx, call)
		for _, f := range faults {
			if f.after != nil && refusal == nil {
				if err := f.after(call); err != nil {
					return nil, err
				}
			}
			if f.instead != nil && refusal == nil {
				resp = f.instead(call, resp)
			}
		}
		return resp, refusal
	}
}

func (w *world) fault(f fault) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.faults = append(w.faults, f)
}

func (w *world) heal() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.faults = nil
}

// changes returns the actions of all calls that could change something.
func (w *world) changes() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []string
	for _, c := range w.calls {
		out = append(out, c.Action)
	}
	return out
}

func count(actions []string, action string) int {
	n := 0
	for _, a := range actions {
		if a == action {
			n++
		}
	}
	return n
}

func apiError(code, message string, status int) *ec2sim.APIError {
	return &ec2sim.APIError{Code: code, Message: message, Status: status}
}

// refuseAll refuses an action.
func refuseAll(action string, err *ec2sim.APIError) fault {
	return refuseN(action, 1<<30, err)
}

// refuseN refuses an action n times.
func refuseN(action string, n int, err *ec2sim.APIError) fault {
	var mu sync.Mutex
	return fault{before: func(c ec2sim.Call) *ec2sim.APIError {
		mu.Lock()
		defer mu.Unlock()
		if c.Action != action || n == 0 {
			return nil
		}
		n--
		return err
	}}
}

// node registers a node of an instance that wants so many free addresses on all
// of its ENIs.
func (w *world) node(name, instance string, pre uint32) {
	types := map[string]string{medium: "t3.medium", tiny: "t3.micro"}
	first := uint32(0)
	w.syncer.Set(&nodev1.NodeDemand{
		NodeName: name, NodeUid: "uid-" + name, Uid: "cn-" + name, InstanceId: instance, InstanceType: types[instance],
		AvailabilityZone: "us-east-1a", VpcId: "vpc-00000001", NodeSubnetId: own,
		Eni: &nodev1.EniSpec{FirstInterfaceIndex: &first}, Watermarks: &nodev1.Watermarks{PreAllocate: &pre}, Registered: true,
	})
}

// running is an allocator that leads.
type running struct {
	*allocator.Allocator
	kill func() // ends it in the middle of whatever it does, and waits
}

func (w *world) start(edit ...func(*allocator.Config)) *running {
	w.epoch++
	return w.startTerm(lease.NewTerm(w.epoch, nil), edit...)
}

func (w *world) startTerm(term lease.Term, edit ...func(*allocator.Config)) *running {
	w.t.Helper()
	client, err := ec2.New(w.t.Context(), ec2.Config{Region: "us-east-1", Endpoint: w.sim.URL()}, ec2.Deps{TracerProvider: w.tracer})
	if err != nil {
		w.t.Fatal(err)
	}
	conn, err := rpc.Dial(w.syncer.Addr, rpc.ClientConfig{}, rpc.ClientDeps{TracerProvider: w.tracer})
	if err != nil {
		w.t.Fatal(err)
	}
	config := allocator.Config{
		Policy: plan.Policy{Cluster: "test"}, Backoff: allocator.Backoff{Initial: 10 * time.Millisecond, Max: 100 * time.Millisecond},
		Suspension: 200 * time.Millisecond, Recheck: 100 * time.Millisecond, Confirm: 2100 * time.Millisecond,
	}
	for _, e := range edit {
		e(&config)
	}
	log := slog.New(slog.DiscardHandler)
	if testing.Verbose() {
		log = slog.New(slog.NewTextHandler(w.t.Output(), nil))
	}
	a, err := allocator.New(config, allocator.Deps{EC2: client, Syncer: nodev1.NewNodeSyncerServiceClient(conn), Logger: log, Tracer: w.tracer.Tracer("allocator")})
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- a.Lead(ctx, term) }()
	var once sync.Once
	r := &running{Allocator: a, kill: func() {
		once.Do(func() {
			cancel()
			if err := <-done; err != nil {
				w.t.Error(err)
			}
			closeAll(w.t, conn, client)
		})
	}}
	w.t.Cleanup(r.kill)
	eventually(w.t, "it knows the nodes", func() bool { _, err := r.Nodes(); return err == nil })
	return r
}

func closeAll(t *testing.T, conn *grpc.ClientConn, client *ec2.Client) {
	if err := conn.Close(); err != nil {
		t.Error(err)
	}
	client.Close()
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("not in time: %s", what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// quiet waits until nothing was asked of EC2 and nothing published for a while.
func (w *world) quiet() {
	w.t.Helper()
	var last string
	since := time.Now()
	eventually(w.t, "quiet", func() bool {
		now := fmt.Sprint(w.sim.Calls().Total(), len(w.syncer.History("n")), len(w.syncer.History("m")))
		if now != last {
			last, since = now, time.Now()
		}
		return time.Since(since) > 150*time.Millisecond
	})
}

func (w *world) poolOf(name string, want int) {
	w.t.Helper()
	eventually(w.t, fmt.Sprintf("%s has a pool of %d", name, want), func() bool { return len(w.syncer.pool(name)) == want })
}

func (w *world) conditionOf(name string, want reason.Reason) *nodev1.Condition {
	w.t.Helper()
	var found *nodev1.Condition
	eventually(w.t, fmt.Sprintf("%s has condition %s", name, want), func() bool {
		for _, c := range w.syncer.published(name).GetConditions() {
			if reason.Reason(c.GetReason()) == want {
				found = c
			}
		}
		return found != nil
	})
	return found
}

// enis returns the ENIs of the account other than primary ones, and fails the
// test if one is leaked: attached to nothing, or about to outlive its instance.
func (w *world) enis() []ec2sim.NetworkInterface {
	w.t.Helper()
	var out []ec2sim.NetworkInterface
	for _, e := range w.sim.State().NetworkInterfaces {
		switch {
		case e.Attachment == nil:
			w.t.Errorf("%s is leaked: it is attached to nothing", e.ID)
		case e.Attachment.DeviceIndex == 0:
			continue
		case !e.Attachment.DeleteOnTermination:
			w.t.Errorf("%s is leaked: it will outlive %s", e.ID, e.Attachment.Instance)
		}
		out = append(out, e)
	}
	return out
}

// deleteENI deletes an ENI behind the allocator's back.
func (w *world) deleteENI(id string) {
	w.t.Helper()
	resp, err := http.Post(w.sim.URL(), "application/x-www-form-urlencoded", strings.NewReader("Action=DeleteNetworkInterface&Version=2016-11-15&NetworkInterfaceId="+id))
	if err != nil {
		w.t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		w.t.Fatal(resp.Status)
	}
}

func recorded(w *world) *spans {
	s := &spans{}
	provider := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(s))
	w.tracer = provider
	return s
}

// spans keeps the spans that ended.
type spans struct {
	mu    sync.Mutex // guards ended
	ended []sdktrace.ReadOnlySpan
}

func (s *spans) OnStart(context.Context, sdktrace.ReadWriteSpan) {}
func (s *spans) Shutdown(context.Context) error                  { return nil }
func (s *spans) ForceFlush(context.Context) error                { return nil }

func (s *spans) OnEnd(span sdktrace.ReadOnlySpan) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = append(s.ended, span)
}

// of returns the names of the spans of a trace.
func (s *spans) of(id trace.TraceID) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []string
	for _, e := range s.ended {
		if e.SpanContext().TraceID() == id {
			out = append(out, e.Name())
		}
	}
	return out
}
