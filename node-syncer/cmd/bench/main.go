// Command bench measures node-syncer against a bare client-go client on the same
// API server, in the same run.
package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace/noop"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"

	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/internal/bench"
	"github.com/eniplane/eniplane/internal/localkube"
	"github.com/eniplane/eniplane/internal/rpc"
	"github.com/eniplane/eniplane/node-syncer/ciliumnode"
	"github.com/eniplane/eniplane/node-syncer/internal/kube"
	"github.com/eniplane/eniplane/node-syncer/internal/server"
	"github.com/eniplane/eniplane/node-syncer/internal/syncer"
)

const (
	rounds   = 300
	instance = "i-00000000000000001"
)

func main() {
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "bench node-syncer:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	cluster, err := localkube.Start(ctx, localkube.Config{})
	if err != nil {
		return err
	}
	defer cluster.Kill()
	config, err := clientcmd.BuildConfigFromFlags("", cluster.Kubeconfig)
	if err != nil {
		return err
	}
	config.QPS, config.Burst = 5000, 5000
	if err := prepare(ctx, config); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	client, store, wait, err := serve(ctx, config)
	if err != nil {
		cancel()
		return err
	}
	err = measure(ctx, config, client, store)
	cancel()
	if stopped := wait(); err == nil {
		err = stopped
	}
	return err
}

// prepare installs the CRD and creates two Nodes and the plain client's object.
func prepare(ctx context.Context, config *rest.Config) error {
	dyn, err := dynamic.NewForConfig(config)
	if err != nil {
		return err
	}
	crd := &unstructured.Unstructured{}
	if err := yaml.Unmarshal(ciliumnode.CRD(), &crd.Object); err != nil {
		return err
	}
	crds := schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
	if _, err := dyn.Resource(crds).Create(ctx, crd, metav1.CreateOptions{}); err != nil {
		return err
	}
	plain := &unstructured.Unstructured{}
	plain.SetGroupVersionKind(ciliumnode.GVR().GroupVersion().WithKind(ciliumnode.Kind))
	plain.SetName("plain")
	if err := unstructured.SetNestedMap(plain.Object, map[string]any{}, "spec"); err != nil {
		return err
	}
	for deadline := time.Now().Add(30 * time.Second); ; {
		_, err := dyn.Resource(ciliumnode.GVR()).Create(ctx, plain, metav1.CreateOptions{})
		if err == nil {
			break
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("the CRD is not served: %w", err)
		}
		time.Sleep(50 * time.Millisecond)
	}
	core, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	_, err = core.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "synced"}}, metav1.CreateOptions{})
	return err
}

// serve starts a node-syncer in this process and returns a client of it.
func serve(ctx context.Context, config *rest.Config) (nodev1.NodeSyncerServiceClient, *syncer.Store, func() error, error) {
	tracers := noop.NewTracerProvider()
	client, err := kube.New(config, tracers)
	if err != nil {
		return nil, nil, nil, err
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))
	store := syncer.NewStore("bench")
	sync := syncer.NewSyncer(client, store, syncer.Lease{Namespace: "kube-system", Name: "eniplane-eni-allocator", Annotation: "eniplane.dev/epoch"}, log)
	registry := prometheus.NewRegistry()
	listener, err := rpc.NewServer(rpc.ServerConfig{Listen: "127.0.0.1:0", HealthListen: "127.0.0.1:0", MetricsListen: "127.0.0.1:0", GracePeriod: 100 * time.Millisecond},
		rpc.Deps{Logger: log, Registerer: registry, Gatherer: registry, TracerProvider: tracers})
	if err != nil {
		return nil, nil, nil, err
	}
	nodev1.RegisterNodeSyncerServiceServer(listener.GRPC(), server.New(client, store, sync, syncer.NewUsage(client, store, log)))
	var group errgroup.Group
	group.Go(func() error { return listener.Run(ctx) })
	group.Go(func() error { return client.Watch(ctx, store) })
	<-store.Ready()
	conn, err := rpc.Dial(listener.Addr().String(), rpc.ClientConfig{}, rpc.ClientDeps{TracerProvider: tracers})
	if err != nil {
		return nil, nil, nil, err
	}
	wait := func() error {
		_ = conn.Close() // The process ends next.
		return group.Wait()
	}
	return nodev1.NewNodeSyncerServiceClient(conn), store, wait, nil
}

// measure grows and shrinks a pool by turns. Each change takes node-syncer two
// writes (status and pool); the reference makes the same two writes as plain
// merge patches, without a precondition or a second thought.
func measure(ctx context.Context, config *rest.Config, client nodev1.NodeSyncerServiceClient, store *syncer.Store) error {
	if _, err := client.RegisterNode(ctx, &nodev1.RegisterNodeRequest{
		NodeName: "synced", InstanceId: instance, InstanceType: "m5.large", AvailabilityZone: "us-east-1a", VpcId: "vpc-1", NodeSubnetId: "subnet-1",
	}); err != nil {
		return err
	}
	dyn, err := dynamic.NewForConfig(config)
	if err != nil {
		return err
	}
	plain := dyn.Resource(ciliumnode.GVR())
	ours := func(i int) error {
		resp, err := client.PublishPool(ctx, &nodev1.PublishPoolRequest{Snapshot: snapshot(uint64(i+1), 10+10*(i%2))}) //nolint:gosec // Counts up.
		if err == nil && i > 0 && resp.GetWrites() != 2 {
			err = fmt.Errorf("round %d took %d writes", i, resp.GetWrites())
		}
		return err
	}
	reference := func(i int) error {
		status, spec := plainPatches(10 + 10*(i%2))
		if _, err := plain.Patch(ctx, "plain", types.MergePatchType, status, metav1.PatchOptions{}, "status"); err != nil {
			return err
		}
		_, err := plain.Patch(ctx, "plain", types.MergePatchType, spec, metav1.PatchOptions{})
		return err
	}
	sync, bare, err := bench.Interleave(rounds, ours, reference)
	if err != nil {
		return err
	}
	// From the call to the agent's stream is the same call plus the informer.
	watch, err := store.WatchNode("synced")
	if err != nil {
		return err
	}
	defer watch.Stop()
	toStream, three, err := bench.Interleave(rounds, func(i int) error {
		generation := uint64(rounds*2 + i + 1) //nolint:gosec // Counts up.
		if _, err := client.PublishPool(ctx, &nodev1.PublishPoolRequest{Snapshot: snapshot(generation, 10+10*(i%2))}); err != nil {
			return err
		}
		want := fmt.Sprintf("1.%d", generation)
		for {
			<-watch.Changed()
			if object, _ := watch.Next(); object != nil && object.Annotations["eniplane.dev/fence"] == want {
				return nil
			}
		}
	}, func(i int) error {
		if err := reference(i); err != nil {
			return err
		}
		_, spec := plainPatches(11)
		_, err := plain.Patch(ctx, "plain", types.MergePatchType, spec, metav1.PatchOptions{})
		return err
	})
	if err != nil {
		return err
	}
	for _, r := range []bench.Result{
		{Name: "sync-p50", Ours: bench.Percentile(sync, 50), Reference: bench.Percentile(bare, 50), Target: 1.3},
		{Name: "sync-p99", Ours: bench.Percentile(sync, 99), Reference: bench.Percentile(bare, 99), Target: 1.3},
		{Name: "publish-to-stream-p99", Ours: bench.Percentile(toStream, 99), Reference: bench.Percentile(three, 99), Target: 1.3},
	} {
		r.Service, r.Unit = "node-syncer", "us"
		if err := r.Print(os.Stdout); err != nil {
			return err
		}
	}
	return nil
}

func addresses(n int) []string {
	out := make([]string, 0, n)
	for i := range n {
		out = append(out, fmt.Sprintf("10.0.0.%d", 10+i))
	}
	return out
}

func snapshot(generation uint64, n int) *nodev1.PoolSnapshot {
	s := &nodev1.PoolSnapshot{
		NodeName: "synced", InstanceId: instance, Fence: &nodev1.Fence{Epoch: 1, Generation: generation},
		Enis: []*nodev1.Eni{{
			Id: "eni-0", Ip: "10.0.0.4", Mac: "02:00:00:00:00:00", AvailabilityZone: "us-east-1a",
			Subnet: &nodev1.Subnet{Id: "subnet-1", Cidr: "10.0.0.0/24"}, Vpc: &nodev1.Vpc{Id: "vpc-1", PrimaryCidr: "10.0.0.0/16"},
			Addresses: addresses(n), SecurityGroups: []string{"sg-1"},
		}},
	}
	for _, a := range addresses(n) {
		s.Pool = append(s.Pool, &nodev1.PoolAddress{Address: a, EniId: "eni-0"})
	}
	return s
}
