// Package demo plays one story on a running local stack and checks what it
// shows: pods get addresses, a burst of them needs a second ENI, a policy's
// CIDRs get numbers that every node programs into its kernel map, and one trace
// crosses all programs. It prints what it found, and says what did not hold.
//
// It uses the programs as others would, through their sockets and ports, and
// looks at their results by itself, in the API server and in the kernel.
package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"

	"github.com/eniplane/eniplane/deploy/local/internal/stack"
	agentv1 "github.com/eniplane/eniplane/gen/eniplane/agent/v1"
	identityv1 "github.com/eniplane/eniplane/gen/eniplane/identity/v1"
	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/internal/rpc"
	"github.com/eniplane/eniplane/internal/telemetry"
)

// ErrNotHeld says that something that the demo shows is not as it should be.
var ErrNotHeld = errors.New("not everything held")

// patience bounds how long the demo waits for anything to come about.
const patience = 20 * time.Second

// demo is one play.
type demo struct {
	stack *stack.Stack
	out   io.Writer

	tracing *telemetry.Telemetry
	tracer  trace.Tracer

	conns    []*grpc.ClientConn
	agents   map[string]agentv1.AgentServiceClient // by node
	syncer   nodev1.NodeSyncerServiceClient
	identity identityv1.IdentityServiceClient

	nodes []string
	given []given  // addresses, in the order in which they were given
	wrong []string // what did not hold
}

// given is an address that a pod got.
type given struct {
	node, pod string
	address   string
	eni       string
	traceID   string
}

// Run plays the demo on a stack with at least two nodes and prints to out. The
// error wraps ErrNotHeld if it came to its end and something did not hold.
func Run(ctx context.Context, s *stack.Stack, out io.Writer) error {
	d := &demo{stack: s, out: out, agents: make(map[string]agentv1.AgentServiceClient)}
	defer d.close(ctx)
	if err := d.connect(ctx); err != nil {
		return err
	}
	for _, step := range []func(context.Context) error{
		d.givePods, d.burst, d.applyPolicies, d.showNodes, d.showVersions, d.showPrefixes, d.showTrace,
	} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	d.showMore()
	return d.verdict()
}

// connect dials every program, with spans of the demo's own: it plays the CNI
// plugin, whose calls are the roots of traces.
func (d *demo) connect(ctx context.Context) error {
	rec := d.stack.Record()
	var err error
	d.tracing, err = telemetry.Start(ctx, telemetry.Config{Service: "demo", OTLPEndpoint: "http://" + rec.OTLP})
	if err != nil {
		return err
	}
	d.tracer = d.tracing.TracerProvider.Tracer("demo")
	dial := func(target string) (*grpc.ClientConn, error) {
		conn, err := rpc.Dial(target, rpc.ClientConfig{Timeout: patience}, rpc.ClientDeps{TracerProvider: d.tracing.TracerProvider})
		if err == nil {
			d.conns = append(d.conns, conn)
		}
		return conn, err
	}
	for _, n := range rec.Nodes {
		conn, err := dial(n.Socket)
		if err != nil {
			return err
		}
		d.agents[n.Name] = agentv1.NewAgentServiceClient(conn)
		d.nodes = append(d.nodes, n.Name)
	}
	syncer, err := dial(d.stack.Target(stack.NodeSyncer))
	if err != nil {
		return err
	}
	identity, err := dial(d.stack.Target(stack.IdentityService))
	if err != nil {
		return err
	}
	d.syncer = nodev1.NewNodeSyncerServiceClient(syncer)
	d.identity = identityv1.NewIdentityServiceClient(identity)
	return nil
}

func (d *demo) close(ctx context.Context) {
	for _, c := range d.conns {
		_ = c.Close() // nothing is in flight
	}
	if d.tracing != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
		defer cancel()
		_ = d.tracing.Shutdown(ctx) // its spans were looked at already
	}
}

// check notes what did not hold.
func (d *demo) check(held bool, format string, args ...any) {
	if !held {
		d.wrong = append(d.wrong, fmt.Sprintf(format, args...))
	}
}

func (d *demo) verdict() error {
	if len(d.wrong) == 0 {
		d.print("\nAll of the above held.\n")
		return nil
	}
	d.print("\nNOT HELD:\n")
	for _, w := range d.wrong {
		d.print("  %s\n", w)
	}
	return fmt.Errorf("%w: %s", ErrNotHeld, strings.Join(d.wrong, "; "))
}

func (d *demo) print(format string, args ...any) { _, _ = fmt.Fprintf(d.out, format, args...) }

// until asks until the answer is yes, or patience or ctx ends.
func until(ctx context.Context, held func(context.Context) (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		ok, err := held(ctx)
		if ok {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-tick.C:
		}
	}
}

// sorted returns a sorted copy without repetitions.
func sorted(s []string) []string { return slices.Compact(slices.Sorted(slices.Values(s))) }
