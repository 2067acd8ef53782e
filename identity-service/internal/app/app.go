// Package app puts identity-service together. Decisions do not belong here.
package app

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/pflag"
	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"

	identityv1 "github.com/eniplane/eniplane/gen/eniplane/identity/v1"
	"github.com/eniplane/eniplane/identity-service/internal/etcd"
	"github.com/eniplane/eniplane/identity-service/internal/index"
	"github.com/eniplane/eniplane/identity-service/internal/keeper"
	"github.com/eniplane/eniplane/identity-service/internal/ledger"
	"github.com/eniplane/eniplane/identity-service/internal/server"
	"github.com/eniplane/eniplane/internal/program"
	"github.com/eniplane/eniplane/internal/rpc"
)

// Config is the settings that identity-service has of its own.
type Config struct {
	// DataDir is where the embedded etcd keeps its data. It only counts without
	// Endpoints.
	DataDir string
	// Endpoints are those of an etcd cluster. None means the embedded one.
	Endpoints []string
	// CA, Cert and Key are files for TLS to Endpoints.
	CA, Cert, Key string
	// ClientPort and PeerPort are of the embedded etcd on loopback; 0 takes free
	// ones.
	ClientPort, PeerPort int
	// MaxTxnOps is what etcd allows in one transaction. Zero means 128 with
	// Endpoints, else what the embedded one is set to.
	MaxTxnOps int
	// StoreTimeout bounds one call to etcd.
	StoreTimeout time.Duration
	// First and Last are the numbers that are given out.
	First, Last uint32
	// SessionTTL is what agents are told: keepalives must come more often.
	SessionTTL time.Duration
	// History is how many changed prefixes are remembered for streams; zero means
	// index.DefaultHistory. It is not a flag.
	History int
}

const embeddedTxnOps = 1024

// AddFlags binds the settings to flags.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.DataDir, "data-dir", "identity-data", "folder of the embedded etcd; not used with --etcd-endpoints")
	fs.StringSliceVar(&c.Endpoints, "etcd-endpoints", nil, "URLs of an etcd cluster, separated by commas; none means an embedded etcd")
	fs.StringVar(&c.CA, "etcd-ca", "", "file with the CA of the etcd cluster")
	fs.StringVar(&c.Cert, "etcd-cert", "", "file with the client certificate for the etcd cluster")
	fs.StringVar(&c.Key, "etcd-key", "", "file with the key of --etcd-cert")
	fs.IntVar(&c.ClientPort, "etcd-client-port", 7433, "loopback port of the embedded etcd for etcdctl; 0 takes a free one")
	fs.IntVar(&c.PeerPort, "etcd-peer-port", 7434, "loopback port that the embedded etcd needs for itself; 0 takes a free one")
	fs.IntVar(&c.MaxTxnOps, "etcd-max-txn-ops", 0, "what etcd allows in one transaction; 0 means its default of 128, and 1024 for the embedded one")
	fs.DurationVar(&c.StoreTimeout, "etcd-timeout", 5*time.Second, "how long one call to etcd may take before the store counts as unavailable")
	fs.Uint32Var(&c.First, "first-number", uint32(ledger.DefaultFirst), "lowest number that is given out; fixed once the store was used")
	fs.Uint32Var(&c.Last, "last-number", uint32(ledger.DefaultLast), "highest number that is given out; fixed once the store was used")
	fs.DurationVar(&c.SessionTTL, "session-ttl", time.Minute, "agents must send keepalives more often than this")
}

// Validate returns an error that names the flag whose value cannot work.
func (c *Config) Validate() error {
	if err := c.numbers().Validate(); err != nil {
		return fmt.Errorf("--first-number, --last-number: %w", err)
	}
	if len(c.Endpoints) == 0 && c.DataDir == "" {
		return errors.New("--data-dir: empty, and there are no --etcd-endpoints")
	}
	for flag, port := range map[string]int{"etcd-client-port": c.ClientPort, "etcd-peer-port": c.PeerPort} {
		if port < 0 || port > 65535 {
			return fmt.Errorf("--%s: %d is no port", flag, port)
		}
	}
	if c.MaxTxnOps < 0 || (c.MaxTxnOps > 0 && c.MaxTxnOps < 16) {
		return fmt.Errorf("--etcd-max-txn-ops: %d is less than 16", c.MaxTxnOps)
	}
	if c.StoreTimeout <= 0 {
		return fmt.Errorf("--etcd-timeout: %v is not positive", c.StoreTimeout)
	}
	if (c.Cert == "") != (c.Key == "") {
		return errors.New("--etcd-cert, --etcd-key: one needs the other")
	}
	if c.Cert+c.CA != "" && len(c.Endpoints) == 0 {
		return errors.New("--etcd-ca, --etcd-cert, --etcd-key: they need --etcd-endpoints")
	}
	for _, e := range c.Endpoints {
		if strings.TrimSpace(e) == "" {
			return errors.New("--etcd-endpoints: one of them is empty")
		}
	}
	if c.SessionTTL < time.Second {
		return fmt.Errorf("--session-ttl: %v is less than 1s", c.SessionTTL)
	}
	return nil
}

func (c *Config) numbers() ledger.Range {
	return ledger.Range{First: ledger.Number(c.First), Last: ledger.Number(c.Last)}
}

// Spec returns the program.
func Spec() program.Spec {
	var config Config
	return program.Spec{
		Name:  "identity-service",
		Short: "Gives every CIDR of a cluster one number and remembers who holds it",
		Defaults: rpc.ServerConfig{
			Listen: ":7430", HealthListen: ":7431", MetricsListen: ":7432",
			MaxRecvBytes: 20 << 20,
		},
		AddFlags: config.AddFlags,
		Validate: config.Validate,
		New: func(ctx context.Context, env *program.Env) (func(context.Context) error, error) {
			s, err := Build(ctx, config, env)
			if err != nil {
				return nil, err
			}
			return s.Run, nil
		},
	}
}

// backend is an etcd, in this process or elsewhere.
type backend struct {
	client    *clientv3.Client
	embedded  *etcd.Server // nil if elsewhere
	maxTxnOps int
}

func connect(ctx context.Context, config Config, env *program.Env) (*backend, error) {
	if len(config.Endpoints) > 0 {
		client, err := etcd.Dial(etcd.ClientConfig{Endpoints: config.Endpoints, CA: config.CA, Cert: config.Cert, Key: config.Key}, env.Logger)
		if err != nil {
			return nil, err
		}
		return &backend{client: client, maxTxnOps: config.MaxTxnOps}, nil
	}
	ops := config.MaxTxnOps
	if ops == 0 {
		ops = embeddedTxnOps
	}
	e, err := etcd.Start(ctx, etcd.ServerConfig{
		Dir: config.DataDir, ClientPort: config.ClientPort, PeerPort: config.PeerPort, MaxTxnOps: ops,
	}, env.Logger)
	if err != nil {
		return nil, err
	}
	env.Logger.InfoContext(ctx, "embedded etcd serves", "dir", config.DataDir, "endpoint", e.Endpoint())
	return &backend{client: e.Client, embedded: e, maxTxnOps: ops}, nil
}

func (b *backend) close() error {
	if b.embedded != nil {
		return b.embedded.Close()
	}
	return b.client.Close()
}

// Service is the built service.
type Service struct {
	backend *backend
	store   *etcd.Store
	keeper  *keeper.Keeper
	server  *server.Server
	serving *rpc.Server
}

// Build builds the service on an etcd and registers it. Run must be called: it
// closes the etcd.
func Build(ctx context.Context, config Config, env *program.Env) (*Service, error) {
	b, err := connect(ctx, config, env)
	if err != nil {
		return nil, err
	}
	kv, err := etcd.Observe(b.client, env.TracerProvider, env.Registry)
	if err != nil {
		return nil, errors.Join(err, b.close())
	}
	x := index.New(config.History)
	store := etcd.NewStore(kv, b.client, x, etcd.Config{Range: config.numbers(), MaxTxnOps: b.maxTxnOps, Timeout: config.StoreTimeout}, env.Logger)
	k := keeper.New(store, x, time.Now, env.Logger)
	s := server.New(server.Config{SessionTTL: config.SessionTTL}, k, store, x, env.Logger)
	if err := env.Registry.Register(s.Collector()); err != nil {
		return nil, errors.Join(err, b.close())
	}
	identityv1.RegisterIdentityServiceServer(env.Server.GRPC(), s)
	return &Service{backend: b, store: store, keeper: k, server: s, serving: env.Server}, nil
}

// EtcdEndpoint is the URL of the embedded etcd; empty if there is none.
func (s *Service) EtcdEndpoint() string {
	if s.backend.embedded == nil {
		return ""
	}
	return s.backend.embedded.Endpoint()
}

// Run runs the loops until ctx ends, then closes the etcd. The gRPC server must
// have stopped by then.
func (s *Service) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return s.store.Run(ctx) })
	group.Go(func() error { return s.keeper.Run(ctx) })
	group.Go(func() error { return watchHealth(ctx, s.store, s.serving) })
	if s.backend.embedded != nil {
		group.Go(func() error { return s.backend.embedded.Run(ctx) })
	}
	err := group.Wait()
	s.server.Wait()
	return errors.Join(err, s.backend.close())
}

// watchHealth reports the service as serving while a quorum of etcd answers and
// the index keeps up with it.
func watchHealth(ctx context.Context, store *etcd.Store, srv *rpc.Server) error {
	const every = time.Second
	report := func(ok bool) {
		srv.SetServing("", ok)
		srv.SetServing(identityv1.IdentityService_ServiceDesc.ServiceName, ok)
	}
	report(false)
	pause := 10 * time.Millisecond // It takes a moment to read the store.
	for ctx.Err() == nil {
		ok := store.Barrier(ctx) == nil
		report(ok)
		if ok {
			pause = every
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
	return nil
}
