// Package ec2sim simulates the part of AWS that eniplane talks to: the EC2 API
// (the query protocol that every AWS SDK and the AWS CLI speak) for one account
// and region, and the metadata service of each simulated instance.
//
// A Simulator is the account with its two HTTP handlers, for use inside a
// process; a Server is a Simulator that listens on the loopback. Requests need
// not be signed, and signatures are not verified.
//
// The rules that EC2 enforces live in internal/account, the protocol in
// internal/api. Whatever shall go wrong between a client and the account
// (throttling, delays, lost answers, denied permissions) is a Middleware.
package ec2sim

import (
	"context"
	"net/http"
	"slices"
	"time"

	"github.com/eniplane/eniplane/deploy/local/ec2sim/internal/account"
	"github.com/eniplane/eniplane/deploy/local/ec2sim/internal/api"
	"github.com/eniplane/eniplane/deploy/local/ec2sim/internal/imds"
)

// The description of what an account holds at the start.
type (
	// Topology is what an account holds at the start.
	Topology = account.Topology
	// VPCSpec is a VPC of a Topology.
	VPCSpec = account.VPCSpec
	// SubnetSpec is a subnet of a Topology.
	SubnetSpec = account.SubnetSpec
	// SecurityGroupSpec is a security group of a Topology.
	SecurityGroupSpec = account.SecurityGroupSpec
	// RouteTableSpec is a route table of a Topology.
	RouteTableSpec = account.RouteTableSpec
	// InstanceSpec is an instance of a Topology, or one to launch later.
	InstanceSpec = account.InstanceSpec
)

// The state of an account. Values are copies of rows that never change; do not
// change them.
type (
	// State is everything in the account at one moment.
	State = account.Snapshot
	// Instance is a simulated instance.
	Instance = account.Instance
	// NetworkInterface is a simulated ENI.
	NetworkInterface = account.NetworkInterface
	// Attachment joins a NetworkInterface to an Instance.
	Attachment = account.Attachment
	// Subnet is a simulated subnet.
	Subnet = account.Subnet
	// VPC is a simulated VPC.
	VPC = account.VPC
	// SecurityGroup is a simulated security group.
	SecurityGroup = account.SecurityGroup
	// RouteTable is a simulated route table.
	RouteTable = account.RouteTable
	// Tag is a key and value on a resource.
	Tag = account.Tag
	// InstanceID identifies an Instance.
	InstanceID = account.InstanceID
	// ENIID identifies a NetworkInterface.
	ENIID = account.ENIID
	// SubnetID identifies a Subnet.
	SubnetID = account.SubnetID
	// InstanceState is where an Instance is in its life.
	InstanceState = account.InstanceState
)

// The states that SetInstanceState accepts.
const (
	StatePending      = account.StatePending
	StateRunning      = account.StateRunning
	StateShuttingDown = account.StateShuttingDown
	StateTerminated   = account.StateTerminated
	StateStopping     = account.StateStopping
	StateStopped      = account.StateStopped
)

// The way of a call.
type (
	// APIError is a refusal with EC2's code and message.
	APIError = account.Error
	// Call is one API call on its way to the account.
	Call = api.Call
	// Response is the answer to a Call.
	Response = api.Response
	// Handler carries out a Call.
	Handler = api.Handler
	// Middleware wraps a Handler.
	Middleware = api.Middleware
	// Calls counts calls.
	Calls = api.Calls
)

// Clock tells the time.
type Clock interface{ Now() time.Time }

// DefaultLatency is what a Server takes for a call at the least. EC2 takes many
// times longer, and the AWS SDK for Go relies on it: as soon as the head of an
// answer is there it closes the body of its request, and if net/http has not
// quite finished with that body it drops the connection, in the middle of an
// answer that is longer than its buffer.
const DefaultLatency = 3 * time.Millisecond

// Config says what to simulate. The zero value is an empty account.
type Config struct {
	// Topology is what the account holds at the start.
	Topology Topology
	// Seed determines every identifier and MAC address that is made up.
	Seed uint64
	// Clock is the simulator's time. Nil means the time of the machine.
	Clock Clock
	// Intercept, unless nil, is asked before each call is carried out, after it
	// was counted; if it answers an error, that is what the caller gets and the
	// account sees nothing. It is called concurrently.
	Intercept func(context.Context, Call) *APIError
	// Middleware wraps the account, outermost first, inside Intercept. A
	// middleware that calls next and then answers an error makes a call that
	// happened look failed.
	Middleware []Middleware

	// Listen is the address of the EC2 API. Empty means a free loopback port.
	// It is used by Start only, as are the fields that follow.
	Listen string
	// Latency is how long, in real time, a Server waits before it carries out a
	// call. Zero means DefaultLatency, a negative value none.
	Latency time.Duration
	// IMDSHost is the address, without port, at which the metadata services
	// listen, each on a free port. Empty means 127.0.0.1.
	IMDSHost string
	// OnEndpoints, unless nil, is told the endpoints whenever they changed: the
	// first time before Start returns, later before the launching or terminating
	// call is answered. Calls do not overlap.
	OnEndpoints func(Endpoints)
}

// Simulator is a simulated account without listeners.
type Simulator struct {
	acc     *account.Account
	now     func() time.Time
	counter *api.Counter
	api     *api.Server
	changed func() // called after instances came or went
}

// New makes a Simulator. It fails if the topology contradicts itself.
func New(cfg Config) (*Simulator, error) { return build(cfg) }

// build makes a Simulator whose calls pass the outer middlewares first.
func build(cfg Config, outer ...Middleware) (*Simulator, error) {
	now := time.Now
	if cfg.Clock != nil {
		now = cfg.Clock.Now
	}
	acc, err := account.New(cfg.Topology, cfg.Seed, now)
	if err != nil {
		return nil, err
	}
	s := &Simulator{acc: acc, now: now, counter: &api.Counter{}, changed: func() {}}
	chain := slices.Concat(outer, []Middleware{intercept(cfg.Intercept)}, cfg.Middleware, []Middleware{s.announce})
	s.api = api.NewServer(acc, now, s.counter, chain...)
	return s, nil
}

func intercept(f func(context.Context, Call) *APIError) Middleware {
	return func(next Handler) Handler {
		if f == nil {
			return next
		}
		return func(ctx context.Context, call Call) (Response, *APIError) {
			if err := f(ctx, call); err != nil {
				return nil, err
			}
			return next(ctx, call)
		}
	}
}

// announce tells of calls after which instances may have come or gone.
func (s *Simulator) announce(next Handler) Handler {
	return func(ctx context.Context, call Call) (Response, *APIError) {
		resp, err := next(ctx, call)
		if err == nil && (call.Action == "RunInstances" || call.Action == "TerminateInstances") {
			s.changed()
		}
		return resp, err
	}
}

// Handler serves the EC2 API at "/" and the simulator's own endpoints below
// "/_sim/".
func (s *Simulator) Handler() http.Handler { return s.routes(func() Endpoints { return Endpoints{} }) }

// IMDS serves the metadata service of an instance. It answers 404 for as long
// as there is no such instance.
func (s *Simulator) IMDS(id InstanceID) http.Handler { return imds.New(s.acc, id, s.now) }

// State returns the account as it is now.
func (s *Simulator) State() State { return s.acc.Snapshot() }

// Calls returns how many calls there were since the start or ResetCalls.
// Requests that name no known action are not counted.
func (s *Simulator) Calls() Calls { return s.counter.Calls() }

// ResetCalls sets the counters to zero.
func (s *Simulator) ResetCalls() { s.counter.Reset() }

// Check returns an error that lists every way in which the account's state
// contradicts itself. It is nil unless the simulator has a bug.
func (s *Simulator) Check() error { return s.acc.Check() }

// Launch runs one more instance, as a Topology would describe it, without an
// API call. References are ids, or names that the Topology gave.
func (s *Simulator) Launch(spec InstanceSpec) (Instance, error) {
	instance, err := s.acc.Launch(spec)
	if err == nil {
		s.changed()
	}
	return instance, err
}

// SetInstanceState moves an instance to another state without an API call, for
// instance to StateStopping, in which nothing can be attached. StateTerminated
// terminates it.
func (s *Simulator) SetInstanceState(id InstanceID, state InstanceState) error {
	if err := s.acc.SetInstanceState(id, state); err != nil {
		return err
	}
	s.changed()
	return nil
}
