package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	"github.com/spf13/pflag"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"

	"github.com/eniplane/eniplane/agent/internal/bpf"
	"github.com/eniplane/eniplane/agent/internal/checkpoint"
	"github.com/eniplane/eniplane/agent/internal/condition"
	"github.com/eniplane/eniplane/agent/internal/holdings"
	"github.com/eniplane/eniplane/agent/internal/imds"
	"github.com/eniplane/eniplane/agent/internal/ipcache"
	"github.com/eniplane/eniplane/agent/internal/kube"
	"github.com/eniplane/eniplane/agent/internal/local"
	"github.com/eniplane/eniplane/agent/internal/node"
	"github.com/eniplane/eniplane/agent/internal/programmer"
	"github.com/eniplane/eniplane/agent/internal/restore"
	"github.com/eniplane/eniplane/agent/internal/server"
	"github.com/eniplane/eniplane/agent/internal/wish"
	agentv1 "github.com/eniplane/eniplane/gen/eniplane/agent/v1"
	eniv1 "github.com/eniplane/eniplane/gen/eniplane/eni/v1"
	identityv1 "github.com/eniplane/eniplane/gen/eniplane/identity/v1"
	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/internal/program"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"
	"github.com/eniplane/eniplane/internal/telemetry"
)

// Spec returns the program.
func Spec() program.Spec {
	config := &Config{}
	return program.Spec{
		Name:  "agent",
		Short: "Gives addresses to the pods of a node and keeps the node's ipcache map",
		Defaults: rpc.ServerConfig{
			Listen: "unix:///run/eniplane/agent.sock", HealthListen: ":7441", MetricsListen: ":7442", MaxRecvBytes: 16 << 20,
		},
		AddFlags: func(fs *pflag.FlagSet) { config.addFlags(fs) },
		Validate: config.validate,
		Instance: func() string { return config.NodeName },
		New: func(ctx context.Context, env *program.Env) (func(context.Context) error, error) {
			a, err := newAgent(ctx, *config, env)
			if err != nil {
				return nil, err
			}
			return a.run, nil
		},
	}
}

// Main runs the program of this process and returns its exit code.
func Main() int { return program.Main(Spec()) }

// agent is the agent before it knows on which node it runs.
type agent struct {
	config    Config
	env       *program.Env
	logger    *slog.Logger
	tracer    trace.Tracer
	board     *condition.Board
	ipcache   ipcacheMap
	imds      *imds.Client
	kube      *kube.Client // nil without an API server
	server    *server.Server
	fatal     chan error // takes what the agent can not go on with
	syncer    *grpc.ClientConn
	allocator *grpc.ClientConn
	identity  *grpc.ClientConn
}

type ipcacheMap interface {
	programmer.Map
	Close() error
}

func newAgent(ctx context.Context, config Config, env *program.Env) (_ *agent, err error) {
	a := &agent{
		config: config, env: env,
		logger: env.Logger.With(telemetry.KeyNode, config.NodeName),
		tracer: env.TracerProvider.Tracer("github.com/eniplane/eniplane/agent"),
		board:  condition.NewBoard(time.Now),
		imds:   imds.New(config.IMDSEndpoint),
		fatal:  make(chan error, 1),
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, a.close())
		}
	}()
	if a.kube, err = a.openKube(ctx); err != nil {
		return nil, err
	}
	deps := rpc.ClientDeps{TracerProvider: env.TracerProvider, Registerer: env.Registry}
	for _, c := range []struct {
		flag, target string
		conn         **grpc.ClientConn
	}{
		{"node-syncer", config.NodeSyncer, &a.syncer},
		{"eni-allocator", config.EniAllocator, &a.allocator},
		{"identity-service", config.IdentityService, &a.identity},
	} {
		if *c.conn, err = rpc.Dial(c.target, rpc.ClientConfig{}, deps); err != nil {
			return nil, fmt.Errorf("--%s: %w", c.flag, err)
		}
	}
	if a.ipcache, err = a.openMap(ctx); err != nil {
		return nil, err
	}
	a.server = server.New(config.NodeName, a.board, a.ipcache.Info())
	agentv1.RegisterAgentServiceServer(env.Server.GRPC(), a.server)
	return a, nil
}

func (a *agent) close() error {
	var errs []error
	for _, c := range []*grpc.ClientConn{a.syncer, a.allocator, a.identity} {
		if c != nil {
			errs = append(errs, c.Close())
		}
	}
	if a.ipcache != nil {
		errs = append(errs, a.ipcache.Close())
	}
	return errors.Join(errs...)
}

// openMap opens the kernel's map. Where there can be none, or what is pinned is of
// another shape, the agent goes on with one in memory, and says so: pods still get
// their addresses.
func (a *agent) openMap(ctx context.Context) (ipcacheMap, error) {
	kernel, err := bpf.Open(bpf.Config{PinPath: a.config.pinPath(), MaxEntries: a.config.MapMaxEntries})
	r := reason.Unspecified
	switch {
	case err == nil:
		info := kernel.Info()
		a.logger.InfoContext(ctx, "map opened", "pin", info.PinPath, "layout", info.Layout, "max_entries", info.MaxEntries, "existed", info.Existed)
		if info.MaxEntries != a.config.MapMaxEntries {
			a.logger.WarnContext(ctx, "the pinned map has another size than configured", "max_entries", info.MaxEntries, "configured", a.config.MapMaxEntries)
		}
		return kernel, nil
	case errors.Is(err, bpf.ErrLayout):
		r = reason.MapLayout
	case errors.Is(err, bpf.ErrUnavailable):
		r = reason.MapInMemory
	default:
		return nil, err
	}
	a.board.Set(r, "map", "entries are kept in memory only, no datapath sees them: "+err.Error())
	a.logger.ErrorContext(ctx, "NO KERNEL MAP: entries are kept in memory only and no datapath sees them",
		telemetry.KeyReason, r.String(), telemetry.KeyError, err.Error())
	return bpf.NewMemory(a.config.MapMaxEntries), nil
}

// openKube returns a client of the API server, nil if none is configured.
func (a *agent) openKube(ctx context.Context) (*kube.Client, error) {
	config, err := kube.RESTConfig(a.config.Kubeconfig)
	if errors.Is(err, kube.ErrNotConfigured) {
		a.logger.WarnContext(ctx, "no API server is configured, so there are no policies")
		return nil, nil //nolint:nilnil // no client is an answer, told by the log
	}
	if err != nil {
		return nil, fmt.Errorf("--kubeconfig: %w", err)
	}
	return kube.NewClient(config, func(err error) { a.board.Depend(kube.Service, err) })
}

// run finds out which node this is and runs all parts until ctx ends.
func (a *agent) run(ctx context.Context) (err error) {
	defer func() { err = errors.Join(err, a.close()) }()
	me, folder, err := findSelf(ctx, a.config, a.imds, a.board, a.logger)
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	a.board.Clear(reason.NotReady, "agent")
	return a.parts(ctx, me, folder)
}

// parts builds the parts, in the order in which they need each other, and runs
// them.
func (a *agent) parts(ctx context.Context, me self, folder *checkpoint.Folder) error {
	uid := &nodeUID{agent: a, folder: folder, me: me}
	_ = load[self](ctx, folder, nodeFile, a.board, a.logger) // one of another instance is kept aside
	if err := folder.Save(nodeFile, me); err != nil {
		return err
	}
	w, prog, restoring := a.wish(ctx, me, folder)

	owners := local.New(w, load[local.Sets](ctx, folder, localFile, a.board, a.logger), func(s local.Sets) error { return folder.Save(localFile, s) })
	addresses := node.NewAddresses(node.AddressesConfig{
		NodeName: a.config.NodeName, CoolDown: a.config.ReuseCoolDown,
		Allocator: eniv1.NewEniAllocatorServiceClient(a.allocator),
		Board:     a.board, Logger: a.logger, Tracer: a.tracer,
		Save: func(s node.Saved) error { return folder.Save(addressesFile, s) },
	}, load[node.Saved](ctx, folder, addressesFile, a.board, a.logger))
	follower := node.NewFollower(node.FollowerConfig{
		Client: nodev1.NewNodeSyncerServiceClient(a.syncer), Addresses: addresses,
		Board: a.board, Logger: a.logger, NodeName: a.config.NodeName,
		Registration: func(ctx context.Context) (*nodev1.RegisterNodeRequest, error) { return a.registration(ctx, me) },
	})
	held := holdings.New(holdings.Config{
		Client: identityv1.NewIdentityServiceClient(a.identity), Wish: w, Map: prog,
		Board: a.board, Logger: a.logger, Tracer: a.tracer,
		NodeName: a.config.NodeName, BootID: me.BootID, NodeUID: uid.get,
		Declare: func(owners []ipcache.Owner) error { return folder.Save(ownersFile, owners) },
	})
	a.server.Bind(server.Parts{
		InstanceID: me.Instance.ID, Addresses: addresses, Wish: w, Programmer: prog,
		Holdings: held, Local: owners, Restore: restoring,
	})

	g, ctx := errgroup.WithContext(ctx)
	for _, run := range []func(context.Context) error{
		prog.Run, held.Run, restoring.Run, addresses.Run, follower.Follow, follower.Report,
	} {
		g.Go(func() error { return run(ctx) })
	}
	g.Go(func() error {
		select {
		case err := <-a.fatal:
			return err
		case <-ctx.Done():
			return nil
		}
	})
	if a.kube != nil {
		g.Go(func() error {
			return a.kube.WatchPolicies(ctx, sink{wish: w, board: a.board, tracer: a.tracer}, a.logger)
		})
	}
	return g.Wait()
}

// wish builds what is wanted, beginning with what the map holds, and who writes it.
func (a *agent) wish(ctx context.Context, me self, folder *checkpoint.Folder) (*wish.Wish, *programmer.Programmer, *restore.Restore) {
	world := ipcache.Config{}
	if a.config.DualStack {
		world = ipcache.Config{WorldIPv4: 9, WorldIPv6: 10}
	}
	sources := []string{local.Source}
	if a.kube != nil {
		sources = append(sources, kube.Policies)
	}
	w := wish.New(ipcache.NewCache(world), sources, load[[]ipcache.Owner](ctx, folder, ownersFile, a.board, a.logger))
	prog := programmer.New(programmer.Config{
		Map: a.ipcache, Wish: w, Board: a.board, Logger: a.logger, Tracer: a.tracer, Registerer: a.env.Registry,
	})
	entries := prog.Restored(ctx)
	owner := restore.Owner(a.config.NodeName, me.BootID)
	if len(entries) > 0 {
		w.Restore(owner, entries)
		a.logger.InfoContext(ctx, "entries of before the restart are held", "entries", len(entries), "deadline", a.config.RestoreDeadline.String())
	}
	return w, prog, restore.New(w, owner, len(entries) > 0, time.Now().Add(a.config.RestoreDeadline), a.logger)
}

// registration is what the node registers with. If the instance is known from a
// checkpoint only, the metadata service is asked once more; if it names another
// instance the agent ends, to begin anew as that one.
func (a *agent) registration(ctx context.Context, me self) (*nodev1.RegisterNodeRequest, error) {
	if now, err := a.imds.Read(ctx); err == nil {
		a.board.Depend(metadataService, nil)
		if now.ID != me.Instance.ID {
			err := fmt.Errorf("%w: %s, not %s", errOtherInstance, now.ID, me.Instance.ID)
			select {
			case a.fatal <- err:
			default:
			}
			return nil, err
		}
	}
	i := me.Instance
	r := &nodev1.RegisterNodeRequest{
		NodeName: a.config.NodeName, NodeUid: a.config.NodeUID,
		InstanceId: i.ID, InstanceType: i.Type, AvailabilityZone: i.Zone, VpcId: i.VPCID, NodeSubnetId: i.SubnetID,
		Watermarks: a.config.watermarks.proto(), Eni: a.config.eni.proto(),
	}
	if i.PrivateIP.IsValid() {
		r.Addresses = []*nodev1.NodeAddress{{Type: "InternalIP", Ip: i.PrivateIP.String()}}
	}
	return r, nil
}

// nodeUID knows the UID of the Node: as configured, as the API server says, or as
// it said before a restart.
type nodeUID struct {
	agent  *agent
	folder *checkpoint.Folder
	me     self
}

// get is called by one goroutine.
func (n *nodeUID) get(ctx context.Context) (string, error) {
	if uid := n.agent.config.NodeUID; uid != "" {
		return uid, nil
	}
	if n.agent.kube == nil {
		return "", errors.New("the UID of the Node is not known: there is no API server, so --node-uid is needed")
	}
	const patience = 3 * time.Second
	asking, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	uid, err := n.agent.kube.NodeUID(asking, n.agent.config.NodeName)
	if err != nil {
		if n.me.NodeUID != "" {
			return n.me.NodeUID, nil
		}
		return "", err
	}
	if uid != n.me.NodeUID {
		n.me.NodeUID = uid
		if err := n.folder.Save(nodeFile, n.me); err != nil {
			return "", err
		}
	}
	return uid, nil
}

// sink takes what policies want. Each change begins a trace of its own.
type sink struct {
	wish   *wish.Wish
	board  *condition.Board
	tracer trace.Tracer
}

// Replace implements kube.Sink.
func (s sink) Replace(owner ipcache.Owner, set map[netip.Prefix]ipcache.Metadata, problems []kube.Problem) {
	s.board.ClearAbout(owner.String())
	for _, p := range problems {
		s.board.Set(p.Reason, owner.String(), fmt.Sprintf("%s, %s: %s", owner, p.Field, p.Message))
	}
	_, span := s.tracer.Start(context.Background(), "policy changed")
	defer span.End()
	s.wish.Replace(owner, set, span.SpanContext())
}

// Remove implements kube.Sink.
func (s sink) Remove(owner ipcache.Owner) {
	s.board.ClearAbout(owner.String())
	_, span := s.tracer.Start(context.Background(), "policy removed")
	defer span.End()
	s.wish.Remove(owner, span.SpanContext())
}

// Listed implements kube.Sink.
func (s sink) Listed(source string) { s.wish.Listed(source) }
