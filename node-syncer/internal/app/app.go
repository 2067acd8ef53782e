// Package app puts node-syncer together.
package app

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/internal/program"
	"github.com/eniplane/eniplane/internal/rpc"
	"github.com/eniplane/eniplane/node-syncer/internal/kube"
	"github.com/eniplane/eniplane/node-syncer/internal/server"
	"github.com/eniplane/eniplane/node-syncer/internal/syncer"
)

// Config is what node-syncer is told beside what every program is.
type Config struct {
	// Kubeconfig is the path of a kubeconfig; empty means the Pod's own account.
	Kubeconfig string
	// APIServer overrides the server's URL; empty means the kubeconfig's.
	APIServer string
	// LeaseNamespace is where the allocator keeps its Lease.
	LeaseNamespace string
	// QPS and Burst bound requests to the API server.
	QPS   float32
	Burst int
}

func (c *Config) addFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.Kubeconfig, "kubeconfig", "", "kubeconfig of the API server; empty means the Pod's own account")
	fs.StringVar(&c.APIServer, "api-server", "", "URL of the API server; empty means what the kubeconfig says")
	fs.StringVar(&c.LeaseNamespace, "lease-namespace", "kube-system", "namespace of eni-allocator's Lease")
	fs.Float32Var(&c.QPS, "kube-qps", 200, "requests a second to the API server")
	fs.IntVar(&c.Burst, "kube-burst", 400, "requests at once to the API server")
}

func (c *Config) validate() error {
	switch {
	case c.LeaseNamespace == "":
		return errors.New("--lease-namespace is empty")
	case c.QPS <= 0:
		return fmt.Errorf("--kube-qps: %v is not positive", c.QPS)
	case c.Burst <= 0:
		return fmt.Errorf("--kube-burst: %d is not positive", c.Burst)
	}
	return nil
}

func (c *Config) rest() (*rest.Config, error) {
	config, err := clientcmd.BuildConfigFromFlags(c.APIServer, c.Kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("--kubeconfig: %w", err)
	}
	config.QPS, config.Burst = c.QPS, c.Burst
	config.UserAgent = "eniplane-node-syncer"
	return config, nil
}

// Spec returns the program.
func Spec() program.Spec {
	var config Config
	return program.Spec{
		Name:  "node-syncer",
		Short: "The only writer of CiliumNode objects: no version of one is ever half-updated",
		Defaults: rpc.ServerConfig{
			Listen: ":7420", HealthListen: ":7421", MetricsListen: ":7422", MaxRecvBytes: 16 << 20,
		},
		AddFlags: config.addFlags,
		Validate: config.validate,
		New: func(ctx context.Context, env *program.Env) (func(context.Context) error, error) {
			return build(ctx, config, env)
		},
	}
}

func build(_ context.Context, config Config, env *program.Env) (func(context.Context) error, error) {
	klog.SetSlogLogger(env.Logger) // What client-go has to say becomes JSON, too.
	restConfig, err := config.rest()
	if err != nil {
		return nil, err
	}
	client, err := kube.New(restConfig, env.TracerProvider)
	if err != nil {
		return nil, err
	}
	store := syncer.NewStore(uuid.NewString())
	lease := syncer.Lease{Namespace: config.LeaseNamespace, Name: "eniplane-eni-allocator", Annotation: "eniplane.dev/epoch"}
	sync := syncer.NewSyncer(client, store, lease, env.Logger)
	usage := syncer.NewUsage(client, store, env.Logger)
	nodev1.RegisterNodeSyncerServiceServer(env.Server.GRPC(), server.New(client, store, sync, usage))
	service := nodev1.NodeSyncerService_ServiceDesc.ServiceName
	env.Server.SetServing(service, false)

	return func(ctx context.Context) error {
		group, ctx := errgroup.WithContext(ctx)
		group.Go(func() error { return client.Watch(ctx, store) })
		group.Go(func() error { return usage.Run(ctx) })
		group.Go(func() error {
			select {
			case <-store.Ready():
				env.Server.SetServing(service, true)
				env.Logger.InfoContext(ctx, "cluster listed, serving")
			case <-ctx.Done():
			}
			return nil
		})
		return group.Wait()
	}, nil
}

// Main runs the program of this process and returns its exit code.
func Main() int { return program.Main(Spec()) }
