package stack

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"

	agentv1 "github.com/eniplane/eniplane/gen/eniplane/agent/v1"
	eniv1 "github.com/eniplane/eniplane/gen/eniplane/eni/v1"
	identityv1 "github.com/eniplane/eniplane/gen/eniplane/identity/v1"
	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
)

// mapName is the name of a pinned map below its node's folder.
const mapName = "cilium_ipcache_v2"

// longestSocket keeps the path of a unix socket within what Linux takes (108
// bytes with the final zero), with some room.
const longestSocket = 100

// environment is what the programs get from the environment of the stack, which
// is next to nothing: no credentials and no settings slip in.
func environment(more ...string) []string {
	env := []string{
		// Spans are looked at right after a call; the default is 5 s.
		"OTEL_BSP_SCHEDULE_DELAY=300",
	}
	// The last one marks the processes of a run of CI.
	for _, name := range []string{"PATH", "HOME", "TMPDIR", "XDG_CACHE_HOME", "GOTRACEBACK", "GORACE", "ENIPLANE_CI_RUN"} {
		if value, ok := os.LookupEnv(name); ok {
			env = append(env, name+"="+value)
		}
	}
	return append(env, more...)
}

// common are flags that all our programs take.
func (s *Stack) common() []string {
	return []string{
		"--otlp-endpoint=http://" + s.Record().OTLP,
		// Streams never end by themselves; nobody here waits for them.
		"--grace-period=1s",
	}
}

// Namespace is the namespace of the manifests.
const Namespace = "eniplane"

// agentAccount is the ServiceAccount, and the binary, of the agents.
const agentAccount = "agent"

// kubeconfig returns the flag for a kubeconfig of a program's ServiceAccount.
func (s *Stack) kubeconfig(account string) (string, error) {
	path, err := s.cluster.KubeconfigFor("system:serviceaccount:"+Namespace+":"+account,
		"system:serviceaccounts", "system:serviceaccounts:"+Namespace, "system:authenticated")
	return "--kubeconfig=" + path, err
}

// startServices starts node-syncer and identity-service, which call none of
// ours, then eni-allocator.
func (s *Stack) startServices(ctx context.Context) error {
	syncerConfig, err := s.kubeconfig(NodeSyncer)
	if err != nil {
		return err
	}
	allocatorConfig, err := s.kubeconfig(EniAllocator)
	if err != nil {
		return err
	}
	var g errgroup.Group
	g.Go(func() error {
		return s.super.start(ctx, &managed{
			name: NodeSyncer, binary: NodeSyncer, service: nodev1.NodeSyncerService_ServiceDesc.ServiceName, env: environment(),
			args: append(s.common(), syncerConfig, "--lease-namespace="+Namespace),
		})
	})
	g.Go(func() error {
		return s.super.start(ctx, &managed{
			name: IdentityService, binary: IdentityService, service: identityv1.IdentityService_ServiceDesc.ServiceName, env: environment(),
			args: append(s.common(),
				"--data-dir="+filepath.Join(s.cfg.Run, dataFolder, IdentityService),
				"--etcd-client-port=0", "--etcd-peer-port=0",
			),
		})
	})
	if err := g.Wait(); err != nil {
		return err
	}
	return s.super.start(ctx, &managed{
		name: EniAllocator, binary: EniAllocator, service: eniv1.EniAllocatorService_ServiceDesc.ServiceName,
		args: append(s.common(), allocatorConfig,
			"--node-syncer="+s.Target(NodeSyncer),
			"--region="+Region,
			"--cluster-name=local",
			"--lease-namespace="+Namespace,
			// A killed one is followed soon.
			"--lease-duration=8s",
		),
		env: environment(
			"AWS_ENDPOINT_URL_EC2="+s.endpoints.EC2,
			"AWS_REGION="+Region,
			"AWS_ACCESS_KEY_ID=AKIDLOCALSTACK",
			"AWS_SECRET_ACCESS_KEY=not-a-secret",
			"AWS_EC2_METADATA_DISABLED=true",
		),
	})
}

// startAgents starts an agent per node, all at once.
func (s *Stack) startAgents(ctx context.Context) error {
	sockets, err := s.socketFolder()
	if err != nil {
		return err
	}
	kubeconfig, err := s.kubeconfig(agentAccount)
	if err != nil {
		return err
	}
	var programs []*managed
	for _, n := range s.cfg.Nodes {
		imds := ""
		for id, url := range s.endpoints.IMDS {
			if string(id) == n.Instance {
				imds = url
			}
		}
		if imds == "" {
			return fmt.Errorf("the simulator has no metadata service for %s of %s", n.Instance, n.Name)
		}
		rec := NodeRecord{Name: n.Name, Instance: n.Instance, Socket: "unix://" + filepath.Join(sockets, n.Name+".sock"), IMDS: imds}
		pin := filepath.Join(s.cfg.PinRoot, n.Name, mapName)
		if s.pins != nil {
			rec.Pin = pin
		}
		if err := s.keep.update(func(r *Record) { r.Nodes = append(r.Nodes, rec) }); err != nil {
			return err
		}
		programs = append(programs, s.agent(n, rec, kubeconfig, pin))
	}
	var g errgroup.Group
	for _, p := range programs {
		g.Go(func() error { return s.super.start(ctx, p) })
	}
	return g.Wait()
}

func (s *Stack) agent(n Node, rec NodeRecord, kubeconfig, pin string) *managed {
	args := append(s.common(),
		"--node-name="+n.Name,
		kubeconfig,
		"--node-syncer="+s.Target(NodeSyncer),
		"--eni-allocator="+s.Target(EniAllocator),
		"--identity-service="+s.Target(IdentityService),
		"--state-dir="+filepath.Join(s.cfg.Run, dataFolder, AgentOf(n.Name)),
		"--map-pin-path="+pin,
		"--first-interface-index=0",
		fmt.Sprintf("--pre-allocate=%d", s.cfg.PreAllocate),
	)
	if s.cfg.RestoreDeadline > 0 {
		args = append(args, "--restore-deadline="+s.cfg.RestoreDeadline.String())
	}
	return &managed{
		name: AgentOf(n.Name), binary: agentAccount, args: args, ready: hasRouter,
		socket: strings.TrimPrefix(rec.Socket, "unix://"),
		env: environment(
			"AWS_EC2_METADATA_SERVICE_ENDPOINT="+rec.IMDS,
			"AWS_REGION="+Region,
		),
	}
}

// hasRouter tells whether an agent has the first address of its pool: from then
// on everything between it and EC2 works.
func hasRouter(ctx context.Context, conn *grpc.ClientConn) bool {
	status, err := agentv1.NewAgentServiceClient(conn).GetStatus(ctx, &agentv1.GetStatusRequest{})
	return err == nil && status.GetRouterAddress() != ""
}

// socketFolder is the folder in the run folder, or a new one elsewhere if that
// path is too long for a socket.
func (s *Stack) socketFolder() (string, error) {
	folder := filepath.Join(s.cfg.Run, socketsFolder)
	longest := slices.MaxFunc(s.cfg.Nodes, func(a, b Node) int { return len(a.Name) - len(b.Name) })
	if len(filepath.Join(folder, longest.Name+".sock")) <= longestSocket {
		return folder, nil
	}
	folder, err := os.MkdirTemp("", "eniplane-")
	if err != nil {
		return "", err
	}
	return folder, s.keep.update(func(r *Record) { r.Sockets = folder })
}

// HasPins tells whether the agents' maps are in the kernel.
func (s *Stack) HasPins() bool { return s.pins != nil }
