package app_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/trace/noop"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health/grpc_health_v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"

	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/internal/localkube"
	"github.com/eniplane/eniplane/internal/program"
	"github.com/eniplane/eniplane/internal/rpc"
	"github.com/eniplane/eniplane/node-syncer/ciliumnode"
	"github.com/eniplane/eniplane/node-syncer/internal/app"
)

// eventually repeats check until it returns nil or the time is over.
func eventually(t *testing.T, check func() error) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

// The program starts before the CRD exists, serves once what exists is listed,
// and stops without leaving a goroutine behind.
func TestProgram(t *testing.T) {
	cluster := localkube.ForTest(t)
	config, err := clientcmd.BuildConfigFromFlags("", cluster.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	core, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	dyn, err := dynamic.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := core.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	before := goleak.IgnoreCurrent()

	file := filepath.Join(t.TempDir(), "ports.json")
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- program.Run(ctx, app.Spec(), []string{
			"--kubeconfig=" + cluster.Kubeconfig, "--ports-file=" + file,
			"--listen=127.0.0.1:0", "--health-listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0",
		}, nil, io.Discard, io.Discard)
	}()
	var ports program.Ports
	eventually(t, func() error {
		raw, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		return json.Unmarshal(raw, &ports)
	})
	dial := func(address string) *grpc.ClientConn {
		conn, err := rpc.Dial(address, rpc.ClientConfig{}, rpc.ClientDeps{TracerProvider: noop.NewTracerProvider()})
		if err != nil {
			t.Fatal(err)
		}
		return conn
	}
	conn, probe := dial(ports.GRPC), dial(ports.Health)
	service := nodev1.NodeSyncerService_ServiceDesc.ServiceName
	health := func() grpc_health_v1.HealthCheckResponse_ServingStatus {
		resp, err := grpc_health_v1.NewHealthClient(probe).Check(t.Context(), &grpc_health_v1.HealthCheckRequest{Service: service})
		if err != nil {
			t.Fatal(err)
		}
		return resp.GetStatus()
	}
	if got := health(); got != grpc_health_v1.HealthCheckResponse_NOT_SERVING {
		t.Errorf("before the CRD: %v", got)
	}

	crd := &unstructured.Unstructured{}
	if err := yaml.Unmarshal(ciliumnode.CRD(), &crd.Object); err != nil {
		t.Fatal(err)
	}
	crds := schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
	if _, err := dyn.Resource(crds).Create(t.Context(), crd, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error {
		if got := health(); got != grpc_health_v1.HealthCheckResponse_SERVING {
			return fmt.Errorf("after the CRD: %v", got)
		}
		return nil
	})
	client := nodev1.NewNodeSyncerServiceClient(conn)
	if _, err := client.RegisterNode(t.Context(), &nodev1.RegisterNodeRequest{
		NodeName: "n", InstanceId: "i-1", InstanceType: "t3.medium", AvailabilityZone: "us-east-1a", VpcId: "vpc-1", NodeSubnetId: "subnet-1",
	}); err != nil {
		t.Fatal(err)
	}
	// What the agent calls next knows its node already.
	if _, err := client.ReportUsage(t.Context(), &nodev1.ReportUsageRequest{NodeName: "n", Sequence: 1}); err != nil {
		t.Error(err)
	}
	stream, err := client.WatchNode(t.Context(), &nodev1.WatchNodeRequest{NodeName: "n"})
	if err != nil {
		t.Fatal(err)
	}
	if resp, err := stream.Recv(); err != nil || resp.GetView().GetInstanceId() != "i-1" {
		t.Errorf("%v, %v", resp, err)
	}

	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
	_, _ = conn.Close(), probe.Close()
	goleak.VerifyNone(t, before)
}

func TestBadFlags(t *testing.T) {
	for _, args := range [][]string{
		{"--lease-namespace="},
		{"--kube-qps=0"},
		{"--kube-burst=-1"},
		{"--kubeconfig=/does/not/exist", "--listen=127.0.0.1:0", "--health-listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0"},
		{"--unheard-of"},
	} {
		var out bytes.Buffer
		err := program.Run(t.Context(), app.Spec(), args, nil, &out, &out)
		flag, _, _ := strings.Cut(args[0], "=")
		if err == nil || !strings.Contains(err.Error(), strings.TrimLeft(flag, "-")) {
			t.Errorf("%v: %v", args, err)
		}
	}
}
