package server_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace/noop"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"

	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/internal/localkube"
	"github.com/eniplane/eniplane/internal/rpc"
	"github.com/eniplane/eniplane/node-syncer/ciliumnode"
	"github.com/eniplane/eniplane/node-syncer/internal/kube"
	"github.com/eniplane/eniplane/node-syncer/internal/server"
	"github.com/eniplane/eniplane/node-syncer/internal/syncer"
	"github.com/eniplane/eniplane/node-syncer/observer"
)

var cluster *localkube.Cluster

func TestMain(m *testing.M) {
	os.Exit(localkube.Shared(m, func(c *localkube.Cluster) {
		cluster = c
		if err := installCRD(restConfig(), ciliumnode.CRD()); err != nil {
			panic(err)
		}
	}))
}

func restConfig() *rest.Config { return restConfigOf(cluster) }

func restConfigOf(c *localkube.Cluster) *rest.Config {
	config, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig)
	if err != nil {
		panic(err) // The kubeconfig is our own.
	}
	config.QPS, config.Burst = 2000, 4000
	return config
}

func installCRD(config *rest.Config, crd []byte) error {
	client, err := dynamic.NewForConfig(config)
	if err != nil {
		return err
	}
	u := &unstructured.Unstructured{}
	if err := yaml.Unmarshal(crd, &u.Object); err != nil {
		return err
	}
	crds := client.Resource(schema.GroupVersionResource{Group: apiextensionsv1.GroupName, Version: "v1", Resource: "customresourcedefinitions"})
	if _, err := crds.Create(context.Background(), u, metav1.CreateOptions{}); err != nil {
		return err
	}
	return eventually(30*time.Second, func() error {
		_, err := client.Resource(ciliumnode.GVR()).List(context.Background(), metav1.ListOptions{})
		return err
	})
}

// eventually repeats check until it returns nil or the time is over.
func eventually(limit time.Duration, check func() error) error {
	deadline := time.Now().Add(limit)
	for {
		err := check()
		if err == nil {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("not within %v: %w", limit, err)
		}
		time.Sleep(10 * time.Millisecond) // Between two looks at another process.
	}
}

// replica is one node-syncer against the real API server.
type replica struct {
	nodev1.NodeSyncerServiceClient
	faults *faults
}

// faults sits between a replica and the API server.
type faults struct {
	next http.RoundTripper
	// inject may answer a request instead of the server; errPass lets it through.
	inject atomic.Pointer[func(*http.Request) (*http.Response, error)]
}

var errPass = errors.New("let it through")

func (f *faults) RoundTrip(r *http.Request) (*http.Response, error) {
	if inject := f.inject.Load(); inject != nil {
		if resp, err := (*inject)(r); !errors.Is(err, errPass) {
			return resp, err
		}
	}
	return f.next.RoundTrip(r)
}

func (f *faults) set(inject func(*http.Request) (*http.Response, error)) {
	if inject == nil {
		f.inject.Store(nil)
		return
	}
	f.inject.Store(&inject)
}

func start(t *testing.T) *replica {
	t.Helper()
	return startAt(t, restConfig())
}

func startAt(t *testing.T, config *rest.Config) *replica {
	t.Helper()
	r := &replica{faults: &faults{}}
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { r.faults.next = next; return r.faults })
	client, err := kube.New(config, noop.NewTracerProvider())
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	store := syncer.NewStore(t.Name())
	sync := syncer.NewSyncer(client, store, syncer.Lease{Namespace: "kube-system", Name: "eniplane-eni-allocator", Annotation: "eniplane.dev/epoch"}, log)
	usage := syncer.NewUsage(client, store, log)
	registry := prometheus.NewRegistry()
	listener, err := rpc.NewServer(rpc.ServerConfig{Listen: "127.0.0.1:0", HealthListen: "127.0.0.1:0", MetricsListen: "127.0.0.1:0", GracePeriod: 100 * time.Millisecond},
		rpc.Deps{Logger: log, Registerer: registry, Gatherer: registry, TracerProvider: noop.NewTracerProvider()})
	if err != nil {
		t.Fatal(err)
	}
	nodev1.RegisterNodeSyncerServiceServer(listener.GRPC(), server.New(client, store, sync, usage))
	ctx, cancel := context.WithCancel(context.Background())
	var group errgroup.Group
	group.Go(func() error { return listener.Run(ctx) })
	group.Go(func() error { return client.Watch(ctx, store) })
	group.Go(func() error { return usage.Run(ctx) })
	conn, err := rpc.Dial(listener.Addr().String(), rpc.ClientConfig{}, rpc.ClientDeps{TracerProvider: noop.NewTracerProvider()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		r.faults.set(nil)
		_ = conn.Close()
		cancel()
		if err := group.Wait(); err != nil {
			t.Error(err)
		}
	})
	select {
	case <-store.Ready():
	case <-time.After(30 * time.Second):
		t.Fatal("the cluster was not listed within 30 s")
	}
	r.NodeSyncerServiceClient = nodev1.NewNodeSyncerServiceClient(conn)
	return r
}

func watchEverything(t *testing.T) *observer.Observer {
	t.Helper()
	o, err := observer.New(restConfig())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- o.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	<-o.Synced()
	return o
}

func core(t *testing.T) kubernetes.Interface {
	t.Helper()
	c, err := kubernetes.NewForConfig(restConfig())
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func objects(t *testing.T) dynamic.ResourceInterface {
	t.Helper()
	c, err := dynamic.NewForConfig(restConfig())
	if err != nil {
		t.Fatal(err)
	}
	return c.Resource(ciliumnode.GVR())
}

const instance = "i-00000000000000001"

// newNode creates a Kubernetes Node that is that instance and removes it, and
// its CiliumNode, at the end.
func newNode(t *testing.T, name string) *corev1.Node {
	t.Helper()
	nodes := core(t).CoreV1().Nodes()
	node, err := nodes.Create(t.Context(), &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.NodeSpec{ProviderID: "aws:///us-east-1a/" + instance},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = objects(t).Delete(context.Background(), name, metav1.DeleteOptions{})
		_ = nodes.Delete(context.Background(), name, metav1.DeleteOptions{})
	})
	return node
}

func registration(name string) *nodev1.RegisterNodeRequest {
	first, pre := uint32(0), uint32(2)
	return &nodev1.RegisterNodeRequest{
		NodeName: name, InstanceId: instance, InstanceType: "t3.medium", AvailabilityZone: "us-east-1a",
		VpcId: "vpc-1", NodeSubnetId: "subnet-1",
		Watermarks: &nodev1.Watermarks{PreAllocate: &pre}, Eni: &nodev1.EniSpec{FirstInterfaceIndex: &first},
	}
}

func register(t *testing.T, r *replica, name string) {
	t.Helper()
	if _, err := r.RegisterNode(t.Context(), registration(name)); err != nil {
		t.Fatal(err)
	}
	if err := eventually(10*time.Second, func() error {
		_, err := r.GetNode(t.Context(), &nodev1.GetNodeRequest{NodeName: name})
		return err
	}); err != nil {
		t.Fatal(err)
	}
}

func eniNumber(i int, addresses ...string) *nodev1.Eni {
	return &nodev1.Eni{
		Id: fmt.Sprintf("eni-%d", i), Ip: fmt.Sprintf("10.0.%d.4", i), Mac: fmt.Sprintf("02:00:00:00:00:%02x", i),
		AvailabilityZone: "us-east-1a", DeviceIndex: uint32(i), //nolint:gosec // Small.
		Subnet:    &nodev1.Subnet{Id: fmt.Sprintf("subnet-%d", i), Cidr: fmt.Sprintf("10.0.%d.0/24", i)},
		Vpc:       &nodev1.Vpc{Id: "vpc-1", PrimaryCidr: "10.0.0.0/16"},
		Addresses: addresses, SecurityGroups: []string{"sg-1"},
	}
}

// snapshot has ENIs 0..n-1 with the given number of addresses each, all pooled.
func snapshot(name string, epoch, generation uint64, counts ...int) *nodev1.PoolSnapshot {
	s := &nodev1.PoolSnapshot{NodeName: name, InstanceId: instance, Fence: &nodev1.Fence{Epoch: epoch, Generation: generation}}
	for i, n := range counts {
		e := eniNumber(i)
		for k := range n {
			a := fmt.Sprintf("10.0.%d.%d", i, 10+k)
			e.Addresses = append(e.Addresses, a)
			s.Pool = append(s.Pool, &nodev1.PoolAddress{Address: a, EniId: e.GetId()})
		}
		s.Enis = append(s.Enis, e)
	}
	return s
}

func publish(t *testing.T, r *replica, s *nodev1.PoolSnapshot) *nodev1.PublishPoolResponse {
	t.Helper()
	resp, err := r.PublishPool(t.Context(), &nodev1.PublishPoolRequest{Snapshot: s})
	if err != nil {
		t.Fatal(err)
	}
	return resp
}

func mustGet(t *testing.T, name string) *unstructured.Unstructured {
	t.Helper()
	u, err := objects(t).Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return u
}
