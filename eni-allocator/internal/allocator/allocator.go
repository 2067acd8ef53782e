// Package allocator keeps the pools of all nodes filled: it follows what they
// need, reads EC2, has package plan decide, does what was decided, and publishes
// the result. What to do for one node is decided in package plan, and how EC2 is
// spoken to in package ec2.
package allocator

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"

	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"

	"github.com/eniplane/eniplane/eni-allocator/internal/ec2"
	"github.com/eniplane/eniplane/eni-allocator/internal/lease"
	"github.com/eniplane/eniplane/eni-allocator/internal/plan"
)

// What a query or an urgent demand may meet. Blocks of a node are *BlockedError.
var (
	// ErrNotLeader: another process holds the write role, or nobody yet.
	ErrNotLeader = errors.New("this replica does not lead")
	// ErrNotReady: the demand of nodes, or EC2, was not read yet.
	ErrNotReady = errors.New("not everything has been read yet")
	// ErrNodeUnknown: node-syncer knows no such node.
	ErrNodeUnknown = errors.New("no such node")
)

// BlockedError says why a node does not get what it asked for.
type BlockedError struct {
	plan.Blocked
	// RetryAfter is when it makes sense to ask again. Zero means not said.
	RetryAfter time.Duration
	// Free is how many addresses are free all the same.
	Free int
}

// Error returns reason and message.
func (e *BlockedError) Error() string { return fmt.Sprintf("%s: %s", e.Reason, e.Message) }

// Config is how an allocator works.
type Config struct {
	Policy plan.Policy
	// ResyncInterval is how often everything is read anew; zero means 10 minutes.
	ResyncInterval time.Duration
	// Workers is how many nodes are worked on at once, and how many snapshots are
	// published at once; zero means 32.
	Workers int
	// Backoff is how long to wait after a failure.
	Backoff Backoff
	// Suspension is how long an instance that EC2 calls not running is left
	// alone; zero means 1 minute.
	Suspension time.Duration
	// SkipSubnet is how long a subnet is not used after EC2 called it full; zero
	// means 2 minutes.
	SkipSubnet time.Duration
	// Recheck is how soon, at the earliest, a node that is blocked is looked at
	// again without new demand, and how often limits and subnets are read again
	// for it; zero means 1 minute.
	Recheck time.Duration
	// Confirm is how long after a doubtful reading another one begins; zero means
	// 3 seconds.
	Confirm time.Duration
}

func (c Config) withDefaults() Config {
	for _, d := range []struct {
		value    *time.Duration
		fallback time.Duration
	}{
		{&c.ResyncInterval, 10 * time.Minute},
		{&c.Suspension, time.Minute},
		{&c.SkipSubnet, 2 * time.Minute},
		{&c.Recheck, time.Minute},
		{&c.Confirm, 3 * time.Second},
	} {
		if *d.value == 0 {
			*d.value = d.fallback
		}
	}
	if c.Workers == 0 {
		c.Workers = 32
	}
	c.Backoff = c.Backoff.withDefaults()
	return c
}

// Deps are what an allocator needs from its program.
type Deps struct {
	EC2    *ec2.Client
	Syncer nodev1.NodeSyncerServiceClient
	Logger *slog.Logger
	Tracer trace.Tracer
	// Registerer may be nil: then nothing is counted.
	Registerer prometheus.Registerer
}

// Allocator acts while it leads.
type Allocator struct {
	config  Config
	deps    Deps
	metrics *metrics
	term    atomic.Pointer[term] // nil while it does not lead
}

// New returns an Allocator that does nothing yet.
func New(config Config, deps Deps) (*Allocator, error) {
	a := &Allocator{config: config.withDefaults(), deps: deps}
	m, err := newMetrics(deps.Registerer, a)
	if err != nil {
		return nil, err
	}
	a.metrics = m
	return a, nil
}

// Lead acts until ctx ends or the term must end, and returns when everything
// that acts has stopped. It starts from nothing: what a term before knew is
// read again.
func (a *Allocator) Lead(ctx context.Context, leadership lease.Term) error {
	t := newTerm(a, leadership)
	a.term.Store(t)
	defer a.term.Store(nil)
	return t.run(ctx)
}

// Node returns what is known of one node.
func (a *Allocator) Node(name string) (Status, error) {
	t := a.term.Load()
	if t == nil {
		return Status{}, ErrNotLeader
	}
	n := t.node(name)
	switch {
	case n == nil && !t.isSynced():
		return Status{}, ErrNotReady
	case n == nil:
		return Status{}, ErrNodeUnknown
	}
	return n.status(), nil
}

// Nodes returns what is known of all nodes, sorted by name.
func (a *Allocator) Nodes() ([]Status, error) {
	t := a.term.Load()
	if t == nil {
		return nil, ErrNotLeader
	}
	if !t.isSynced() {
		return nil, ErrNotReady
	}
	var out []Status
	for _, n := range t.all() {
		out = append(out, n.status())
	}
	return out, nil
}

// Plan plans for a node that exists, and does nothing.
func (a *Allocator) Plan(name string, now time.Time) (plan.Plan, error) {
	s, err := a.Node(name)
	if err != nil {
		return plan.Plan{}, err
	}
	if s.ReadAt.IsZero() {
		return plan.Plan{}, ErrNotReady
	}
	return plan.Pool(s.Reading, s.Demand, a.config.Policy, now), nil
}

// Policy is how all nodes are treated.
func (a *Allocator) Policy() plan.Policy { return a.config.Policy }

// Network returns what is known of all VPCs, sorted by id.
func (a *Allocator) Network() (plan.Network, error) {
	t := a.term.Load()
	if t == nil {
		return plan.Network{}, ErrNotLeader
	}
	if !t.isReady() {
		return plan.Network{}, ErrNotReady
	}
	return t.cache.Network(), nil
}

// Limits returns what an instance type can have. It asks EC2 if need be, within
// ctx. Limits that are not known are not Known.
func (a *Allocator) Limits(ctx context.Context, typ string) (plan.Limits, error) {
	t := a.term.Load()
	if t == nil {
		return plan.Limits{}, ErrNotLeader
	}
	if err := t.learnLimits(ctx, typ); err != nil {
		return plan.Limits{}, err
	}
	l, _ := t.cache.Limits(typ)
	return l, nil
}
