package rpc_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace/noop"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	opsv1 "github.com/eniplane/eniplane/gen/eniplane/ops/v1"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"
)

func watch(t *testing.T, r *running) grpc.ServerStreamingClient[nodev1.WatchNodeResponse] {
	t.Helper()
	stream, err := nodev1.NewNodeSyncerServiceClient(r.conn).WatchNode(t.Context(), &nodev1.WatchNodeRequest{NodeName: "n"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	return stream
}

// While a call still runs, health checks are answered already with NOT_SERVING;
// the call then ends well.
func TestNotServingBeforeCallsEnd(t *testing.T) {
	r := start(t, rpc.ServerConfig{GracePeriod: time.Minute}, nil)
	entered, release := make(chan struct{}), make(chan struct{})
	r.ops.get = func(context.Context) (*opsv1.GetConfigResponse, error) {
		close(entered)
		<-release
		return &opsv1.GetConfigResponse{}, nil
	}
	call := make(chan error, 1)
	go func() {
		_, err := opsv1.NewOpsServiceClient(r.conn).GetConfig(context.Background(), &opsv1.GetConfigRequest{})
		call <- err
	}()
	<-entered
	health, err := healthpb.NewHealthClient(bare(t, r.server.HealthAddr().String())).Watch(t.Context(), &healthpb.HealthCheckRequest{})
	if err != nil {
		t.Fatal(err)
	}
	first, err := health.Recv()
	if err != nil || first.GetStatus() != healthpb.HealthCheckResponse_SERVING {
		t.Fatalf("before the stop: %v, %v", first, err)
	}
	r.begin()
	next, err := health.Recv()
	if err != nil || next.GetStatus() != healthpb.HealthCheckResponse_NOT_SERVING {
		t.Errorf("in the stop: %v, %v", next, err)
	}
	select {
	case err := <-call:
		t.Errorf("the call was cut off: %v", err)
	default:
	}
	close(release)
	if err := <-call; err != nil {
		t.Errorf("the call in flight: %v", err)
	}
	if err := r.stop(); err != nil {
		t.Error(err)
	}
	r.server.SetServing("", true) // Comes too late, and changes nothing.
}

// A watcher never ends by itself: it is told to, and its client to come back.
// The grace period here is longer than the test may take.
func TestStopEndsStreamsAtOnce(t *testing.T) {
	r := start(t, rpc.ServerConfig{GracePeriod: time.Hour}, nil)
	stream := watch(t, r)
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	_, err := stream.Recv()
	if status.Code(err) != codes.Unavailable || rpc.ReasonOf(err) != reason.NotReady {
		t.Errorf("the stream ended with %v, want UNAVAILABLE, NOT_READY", err)
	}
}

// A handler that does not listen is cut off when the grace period is over.
func TestStopIsBounded(t *testing.T) {
	r := start(t, rpc.ServerConfig{GracePeriod: 50 * time.Millisecond}, nil)
	r.nodes.deaf = make(chan struct{})
	defer close(r.nodes.deaf)
	stream := watch(t, r)
	begin := time.Now()
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begin); took < 50*time.Millisecond || took > 20*time.Second {
		t.Errorf("the stop took %v", took)
	}
	if _, err := stream.Recv(); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("the stream ended with %v, want an error", err)
	}
}

func TestClientThatGoesIsNoStop(t *testing.T) {
	r := start(t, rpc.ServerConfig{}, nil)
	ctx, cancel := context.WithCancel(t.Context())
	stream, err := nodev1.NewNodeSyncerServiceClient(r.conn).WatchNode(ctx, &nodev1.WatchNodeRequest{NodeName: "n"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	cancel()
	if _, err := stream.Recv(); status.Code(err) != codes.Canceled {
		t.Errorf("the stream ended with %v, want CANCELLED", err)
	}
}

func newServer(t *testing.T, config rpc.ServerConfig) (*rpc.Server, error) {
	t.Helper()
	registry := prometheus.NewRegistry()
	return rpc.NewServer(config, rpc.Deps{
		Logger: slog.New(slog.DiscardHandler), Registerer: registry, Gatherer: registry, TracerProvider: noop.NewTracerProvider(),
	})
}

// A stop may come before the server has begun to serve.
func TestStopBeforeServing(t *testing.T) {
	for range 20 {
		server, err := newServer(t, rpc.ServerConfig{Listen: "127.0.0.1:0", HealthListen: "127.0.0.1:0", MetricsListen: "127.0.0.1:0"})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		if err := server.Run(ctx); err != nil {
			t.Fatal(err)
		}
	}
}

// What Close or a failed NewServer held is free again.
func TestListenersAreReleased(t *testing.T) {
	config := rpc.ServerConfig{Listen: "127.0.0.1:0", HealthListen: "127.0.0.1:0", MetricsListen: "127.0.0.1:0"}
	first, err := newServer(t, config)
	if err != nil {
		t.Fatal(err)
	}
	config.Listen, config.HealthListen = first.Addr().String(), first.HealthAddr().String()
	first.Close()
	taken := config
	taken.MetricsListen = config.Listen // The third listener fails.
	if _, err := newServer(t, taken); err == nil {
		t.Fatal("two listeners share an address")
	}
	second, err := newServer(t, config)
	if err != nil {
		t.Fatal(err)
	}
	second.Close()
}
