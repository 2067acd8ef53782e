// Package stack runs eniplane on one machine: a real kube-apiserver with its
// etcd, the EC2 simulator, the three services and an agent per simulated node,
// each a process of its own on loopback. What it starts, mounts or pins it also
// takes away, in Stop or, after a crash, at the next start or by Down.
//
// What the programs do is not its business; the demo and the end-to-end tests
// look at that.
package stack

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/eniplane/eniplane/deploy/local/ec2sim"
	"github.com/eniplane/eniplane/deploy/local/internal/kube"
	"github.com/eniplane/eniplane/deploy/local/internal/pins"
	"github.com/eniplane/eniplane/deploy/local/internal/traces"
	"github.com/eniplane/eniplane/internal/child"
	"github.com/eniplane/eniplane/internal/localkube"
	"github.com/eniplane/eniplane/node-syncer/ciliumnode"
	"github.com/eniplane/eniplane/node-syncer/observer"
)

// The names of the services, which are also those of their binaries and logs.
const (
	NodeSyncer      = "node-syncer"
	EniAllocator    = "eni-allocator"
	IdentityService = "identity-service"
)

// AgentOf is the name of a node's agent.
func AgentOf(node string) string { return "agent-" + node }

// TraceSource finds the spans that the stack's programs sent.
type TraceSource interface {
	// Trace returns the spans of one trace that have arrived, in no order.
	Trace(ctx context.Context, traceID string) ([]traces.Span, error)
}

// Stack is a running local stack.
type Stack struct {
	cfg    Config
	lock   *os.File
	keep   *keeper
	super  *supervisor
	pins   *pins.Root // nil: maps in memory
	kube   *kube.Client
	traces TraceSource

	cluster *localkube.Cluster
	sim     *child.Process
	jaeger  *child.Process

	endpoints ec2sim.Endpoints

	observer *observer.Observer

	background context.Context // of goroutines: ends in Stop
	cancel     context.CancelFunc
	goroutines sync.WaitGroup

	stopOnce sync.Once
	stopErr  error
}

// Start starts a stack and returns when every program is healthy. What an
// earlier one left in the run folder after a crash is removed first. If Start
// fails, it has stopped what it started. ctx bounds the start only.
func Start(ctx context.Context, cfg Config) (*Stack, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	lock, err := lockRun(cfg.Run)
	if err != nil {
		return nil, err
	}
	s := &Stack{cfg: cfg, lock: lock}
	s.background, s.cancel = context.WithCancel(context.WithoutCancel(ctx))
	if err := s.start(ctx); err != nil {
		return nil, errors.Join(err, s.Stop())
	}
	return s, nil
}

func (s *Stack) start(ctx context.Context) error {
	if err := s.prepare(); err != nil {
		return err
	}
	begin := time.Now()
	if err := s.startTraces(ctx); err != nil {
		return err
	}
	var g errgroup.Group
	g.Go(func() error { return s.startCluster(ctx) })
	g.Go(func() error { return s.startSimulator(ctx) })
	if err := g.Wait(); err != nil {
		return err
	}
	s.say("kube-apiserver, etcd and the EC2 simulator are ready after %s", since(begin))
	if err := s.seedCluster(ctx); err != nil {
		return err
	}
	if err := s.startServices(ctx); err != nil {
		return err
	}
	s.say("the three services are healthy after %s", since(begin))
	if err := s.startAgents(ctx); err != nil {
		return err
	}
	s.say("%d agents are healthy after %s", len(s.cfg.Nodes), since(begin))
	return nil
}

// prepare makes the folders and takes the pins.
func (s *Stack) prepare() error {
	run := s.cfg.Run
	if err := clean(run); err != nil {
		return err
	}
	if err := os.RemoveAll(filepath.Join(run, logsFolder)); err != nil {
		return err
	}
	for _, name := range []string{logsFolder, portsFolder, dataFolder, socketsFolder} {
		if err := os.MkdirAll(filepath.Join(run, name), 0o755); err != nil {
			return err
		}
	}
	var err error
	if s.keep, err = newKeeper(run); err != nil {
		return err
	}
	s.super = newSupervisor(run, s.cfg.Bin, s.keep)
	root, err := pins.Open(s.cfg.PinRoot)
	if errors.Is(err, pins.ErrUnavailable) {
		s.say("NOTICE: %v. The agents keep their maps in memory: nothing is read back from a kernel.", err)
		return nil
	}
	if err != nil {
		return err
	}
	s.pins = root
	return s.keep.update(func(r *Record) { r.PinRoot, r.Mounted = root.Path(), root.Mounted() })
}

func (s *Stack) startTraces(ctx context.Context) error {
	if s.cfg.JaegerBinary != "" {
		return s.startJaeger(ctx)
	}
	receiver, err := traces.Listen()
	if err != nil {
		return err
	}
	s.goroutines.Go(func() {
		if err := receiver.Run(s.background); err != nil {
			s.super.fail(err)
		}
	})
	s.traces = receiver
	return s.keep.update(func(r *Record) { r.OTLP = receiver.Addr() })
}

func (s *Stack) startCluster(ctx context.Context) error {
	cluster, err := localkube.Start(ctx, localkube.Config{
		Dir: filepath.Join(s.cfg.Run, kubeFolder), LogDir: filepath.Join(s.cfg.Run, logsFolder),
	})
	if err != nil {
		return err
	}
	s.cluster = cluster
	for name, pid := range cluster.PIDs() {
		err := s.keep.setProcess(Process{ProcessID: identify(pid), Name: name, Log: cluster.LogPath(name)})
		if err != nil {
			return err
		}
	}
	if s.kube, err = kube.NewClient(cluster.Kubeconfig); err != nil {
		return err
	}
	return s.keep.update(func(r *Record) { r.Kubeconfig = cluster.Kubeconfig })
}

// startSimulator starts EC2 and waits for the file with its endpoints.
func (s *Stack) startSimulator(ctx context.Context) error {
	topologyPath := filepath.Join(s.cfg.Run, topologyFile)
	endpointsPath := filepath.Join(s.cfg.Run, endpointsFile)
	if err := writeTopology(topologyPath, s.cfg.Nodes); err != nil {
		return err
	}
	var err error
	s.sim, err = s.super.spawn("ec2sim", filepath.Join(s.cfg.Bin, "ec2sim"), []string{
		"--listen=" + anyPort, "--topology=" + topologyPath, "--ports-file=" + endpointsPath,
	}, environment())
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	var text []byte
	err = s.super.poll(ctx, s.sim, func() bool {
		var err error
		text, err = os.ReadFile(endpointsPath)
		return err == nil
	})
	if err != nil {
		return fmt.Errorf("ec2sim: %w", err)
	}
	if err := json.Unmarshal(text, &s.endpoints); err != nil {
		return fmt.Errorf("ec2sim: endpoints: %w", err)
	}
	return s.keep.update(func(r *Record) { r.EC2 = s.endpoints.EC2 })
}

// seedCluster creates what a cluster has before eniplane's programs start: the
// definition of CiliumNode, the Nodes, and the rights of each program.
func (s *Stack) seedCluster(ctx context.Context) error {
	files := []string{filepath.Join(s.cfg.Base, "namespace.yaml")}
	for _, account := range []string{NodeSyncer, EniAllocator, agentAccount} {
		files = append(files, filepath.Join(s.cfg.Base, account, "rbac.yaml"))
	}
	for _, f := range files {
		if err := s.kube.ApplyFile(ctx, f); err != nil {
			return err
		}
	}
	if err := s.kube.EnsureCRD(ctx, ciliumnode.CRD()); err != nil {
		return err
	}
	if err := s.startObserver(ctx); err != nil {
		return err
	}
	for _, n := range s.cfg.Nodes {
		err := s.kube.CreateNode(ctx, kube.Node{Name: n.Name, InstanceID: n.Instance, Zone: n.Zone, MaxPods: 110})
		if err != nil {
			return err
		}
	}
	return nil
}

// startObserver has every version of every CiliumNode checked, from before the
// first one.
func (s *Stack) startObserver(ctx context.Context) error {
	var err error
	if s.observer, err = observer.New(s.kube.Config); err != nil {
		return err
	}
	s.goroutines.Go(func() {
		if err := s.observer.Run(s.background); err != nil {
			s.super.fail(err)
		}
	})
	select {
	case <-s.observer.Synced():
		return nil
	case <-ctx.Done():
		return fmt.Errorf("the observer has not listed CiliumNodes: %w", ctx.Err())
	}
}

// Run waits until ctx ends, and returns nil, or until a process ends that
// nobody stopped, and returns which. It stops nothing.
func (s *Stack) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	cluster := make(chan error, 1)
	go func() { cluster <- s.cluster.Wait(ctx) }()
	select {
	case err := <-cluster:
		return err // nil if ctx ended
	case err := <-s.super.failed:
		return err
	}
}

// Kill ends one of our programs with SIGKILL, as a crash would. Its name is one
// of the constants or AgentOf a node.
func (s *Stack) Kill(name string) error {
	p, err := s.super.get(name)
	if err != nil {
		return err
	}
	s.super.expect(p.child)
	p.child.Kill()
	<-p.child.Done()
	return nil
}

// Restart starts a program again, where it listened before, and returns when it
// is healthy. A running one is stopped first.
func (s *Stack) Restart(ctx context.Context, name string) error {
	p, err := s.super.get(name)
	if err != nil {
		return err
	}
	s.super.halt(p.child)
	return s.super.start(ctx, p)
}

// Record describes the stack as it is now.
func (s *Stack) Record() Record { return s.keep.get() }

// Kube is a client of its API server.
func (s *Stack) Kube() *kube.Client { return s.kube }

// Observer judges every version of every CiliumNode that the stack's API server
// stored.
func (s *Stack) Observer() *observer.Observer { return s.observer }

// Traces finds the spans of its programs.
func (s *Stack) Traces() TraceSource { return s.traces }

// Target is where a program serves gRPC: host:port or unix:///path.
func (s *Stack) Target(name string) string {
	p, _ := s.Record().Process(name)
	return p.GRPC
}

// Stop stops agents, services, and the rest, in this order, and removes what
// the stack made but its logs. Calls after the first do nothing and return the
// same.
func (s *Stack) Stop() error {
	s.stopOnce.Do(func() { s.stopErr = s.stop() })
	return s.stopErr
}

func (s *Stack) stop() error {
	var errs []error
	if s.super != nil {
		s.stopPrograms()
	}
	s.cancel()
	s.goroutines.Wait()
	if s.cluster != nil {
		s.cluster.Stop()
	}
	if s.pins != nil {
		err := s.pins.Close()
		if err == nil {
			err = s.keep.update(func(r *Record) { r.PinRoot, r.Mounted = "", false })
		}
		errs = append(errs, err)
	}
	if s.keep != nil {
		errs = append(errs, clean(s.cfg.Run))
	}
	return errors.Join(append(errs, s.lock.Close())...)
}

// stopPrograms stops callers before those whom they call.
func (s *Stack) stopPrograms() {
	var agents, services []*child.Process
	s.super.mu.Lock()
	for name, p := range s.super.programs {
		switch name {
		case NodeSyncer, EniAllocator, IdentityService:
			services = append(services, p.child)
		default:
			agents = append(agents, p.child)
		}
	}
	s.super.mu.Unlock()
	s.super.halt(agents...)
	s.super.halt(services...)
	s.super.halt(s.sim, s.jaeger)
}

func (s *Stack) say(format string, args ...any) {
	_, _ = fmt.Fprintf(s.cfg.Progress, format+"\n", args...)
}

func since(t time.Time) string { return time.Since(t).Round(100 * time.Millisecond).String() }
