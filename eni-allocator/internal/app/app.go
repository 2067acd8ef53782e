// Package app puts eni-allocator together.
package app

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	coordination "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/klog/v2"

	eniv1 "github.com/eniplane/eniplane/gen/eniplane/eni/v1"
	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/internal/program"
	"github.com/eniplane/eniplane/internal/rpc"

	"github.com/eniplane/eniplane/eni-allocator/internal/allocator"
	"github.com/eniplane/eniplane/eni-allocator/internal/ec2"
	"github.com/eniplane/eniplane/eni-allocator/internal/lease"
	"github.com/eniplane/eniplane/eni-allocator/internal/server"
)

// Spec returns the program.
func Spec() program.Spec {
	var config Config
	return program.Spec{
		Name:  "eni-allocator",
		Short: "Keeps the pool of every node filled from EC2: the only program that changes ENIs",
		Defaults: rpc.ServerConfig{
			Listen: ":7410", HealthListen: ":7411", MetricsListen: ":7412",
			// The longest request describes a node with 256 ENIs.
			MaxRecvBytes: 16 << 20,
		},
		AddFlags: config.addFlags,
		Validate: config.validate,
		New: func(ctx context.Context, env *program.Env) (func(context.Context) error, error) {
			return build(ctx, config, env)
		},
	}
}

// Main runs the program of this process and returns its exit code.
func Main() int { return program.Main(Spec()) }

func build(ctx context.Context, config Config, env *program.Env) (func(context.Context) error, error) {
	klog.SetSlogLogger(env.Logger) // What client-go has to say becomes JSON, too.
	conn, err := rpc.Dial(config.NodeSyncer, rpc.ClientConfig{}, rpc.ClientDeps{TracerProvider: env.TracerProvider, Registerer: env.Registry})
	if err != nil {
		return nil, fmt.Errorf("--node-syncer: %w", err)
	}
	run, err := connected(ctx, config, env, conn)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return run, nil
}

// connected builds what talks to node-syncer over conn, which its loop closes.
func connected(ctx context.Context, config Config, env *program.Env, conn *grpc.ClientConn) (func(context.Context) error, error) {
	restConfig, err := config.rest()
	if err != nil {
		return nil, err
	}
	leases, err := coordination.NewForConfig(restConfig)
	if err != nil {
		return nil, fmt.Errorf("prepare the client of the API server: %w", err)
	}
	identity, err := identity()
	if err != nil {
		return nil, err
	}
	election := lease.New(leases, lease.Config{
		Namespace: config.LeaseNamespace, Identity: identity,
		Duration: config.LeaseDuration, RenewDeadline: config.LeaseDuration * 2 / 3, RetryPeriod: config.LeaseDuration * 2 / 15,
	}, env.Logger)

	var role role
	api, err := ec2.New(ctx, config.EC2, ec2.Deps{TracerProvider: env.TracerProvider, Registerer: env.Registry, Leading: role.held})
	if err != nil {
		return nil, err
	}
	alloc, err := allocator.New(allocator.Config{
		Policy: config.policy(), ResyncInterval: config.ResyncInterval, Workers: config.Workers,
	}, allocator.Deps{
		EC2: api, Syncer: nodev1.NewNodeSyncerServiceClient(conn), Logger: env.Logger,
		Tracer: env.TracerProvider.Tracer("github.com/eniplane/eniplane/eni-allocator"), Registerer: env.Registry,
	})
	if err != nil {
		api.Close()
		return nil, err
	}
	eniv1.RegisterEniAllocatorServiceServer(env.Server.GRPC(), server.New(alloc, election.Leader))
	service := eniv1.EniAllocatorService_ServiceDesc.ServiceName
	env.Server.SetServing(service, false)

	return func(ctx context.Context) error {
		defer api.Close()
		defer func() { _ = conn.Close() }() // Nothing is in flight any more.
		group, ctx := errgroup.WithContext(ctx)
		group.Go(func() error {
			return election.Run(ctx, func(ctx context.Context, term lease.Term) error {
				role.take(term)
				defer role.drop()
				return alloc.Lead(ctx, term)
			})
		})
		group.Go(func() error {
			// Once somebody leads, every replica has an answer: the leader its own,
			// the others who leads.
			for election.Leader() == "" {
				select {
				case <-ctx.Done():
					return nil
				case <-time.After(leaderPoll):
				}
			}
			env.Server.SetServing(service, true)
			return nil
		})
		return group.Wait()
	}, nil
}

// leaderPoll is how often it is looked whether somebody leads yet.
const leaderPoll = 100 * time.Millisecond

// identity names this process and no other, and says where it is.
func identity() (string, error) {
	host, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("name this process: %w", err)
	}
	return host + "_" + uuid.NewString(), nil
}

// role is the write role as EC2's client asks for it.
type role struct{ term atomic.Pointer[lease.Term] }

func (r *role) take(t lease.Term) { r.term.Store(&t) }

func (r *role) drop() { r.term.Store(nil) }

// held tells whether this process surely leads, right now.
func (r *role) held() bool {
	t := r.term.Load()
	return t != nil && t.Check() == nil
}
