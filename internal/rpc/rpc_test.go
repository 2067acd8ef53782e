package rpc_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace/noop"
	"go.uber.org/goleak"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	reflectionv1alpha "google.golang.org/grpc/reflection/grpc_reflection_v1alpha"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	identityv1 "github.com/eniplane/eniplane/gen/eniplane/identity/v1"
	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	opsv1 "github.com/eniplane/eniplane/gen/eniplane/ops/v1"
	"github.com/eniplane/eniplane/internal/reason"
	"github.com/eniplane/eniplane/internal/rpc"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeOps answers with whatever a test sets.
type fakeOps struct {
	opsv1.UnimplementedOpsServiceServer
	get func(context.Context) (*opsv1.GetConfigResponse, error)
}

func (f *fakeOps) GetConfig(ctx context.Context, _ *opsv1.GetConfigRequest) (*opsv1.GetConfigResponse, error) {
	return f.get(ctx)
}

func (f *fakeOps) SetLogLevel(context.Context, *opsv1.SetLogLevelRequest) (*opsv1.SetLogLevelResponse, error) {
	return &opsv1.SetLogLevelResponse{}, nil
}

// fakeNodes sends one view and then waits until its context ends, or, if it is
// deaf, until it is released.
type fakeNodes struct {
	nodev1.UnimplementedNodeSyncerServiceServer
	deaf chan struct{}
}

func (f *fakeNodes) WatchNode(_ *nodev1.WatchNodeRequest, s grpc.ServerStreamingServer[nodev1.WatchNodeResponse]) error {
	if err := s.Send(&nodev1.WatchNodeResponse{}); err != nil {
		return err
	}
	if f.deaf != nil {
		<-f.deaf
		return nil
	}
	<-s.Context().Done()
	return s.Context().Err()
}

// fakeIdentities answers with whatever a test sets.
type fakeIdentities struct {
	identityv1.UnimplementedIdentityServiceServer
	set func(*identityv1.SetHoldingRequest) (*identityv1.SetHoldingResponse, error)
}

func (f *fakeIdentities) SetHolding(_ context.Context, req *identityv1.SetHoldingRequest) (*identityv1.SetHoldingResponse, error) {
	return f.set(req)
}

type running struct {
	server     *rpc.Server
	ops        *fakeOps
	nodes      *fakeNodes
	identities *fakeIdentities
	conn       *grpc.ClientConn
	begin      func()       // begins a stop
	stop       func() error // begins a stop and waits for its end
}

func start(t *testing.T, config rpc.ServerConfig, auth rpc.AuthFunc) *running {
	t.Helper()
	if config.Listen == "" {
		config.Listen = "127.0.0.1:0"
	}
	config.HealthListen, config.MetricsListen = "127.0.0.1:0", "127.0.0.1:0"
	registry := prometheus.NewRegistry()
	server, err := rpc.NewServer(config, rpc.Deps{
		Logger: slog.New(slog.DiscardHandler), Registerer: registry, Gatherer: registry,
		TracerProvider: noop.NewTracerProvider(), Auth: auth,
	})
	if err != nil {
		t.Fatal(err)
	}
	r := &running{server: server, ops: &fakeOps{get: func(context.Context) (*opsv1.GetConfigResponse, error) { return &opsv1.GetConfigResponse{}, nil }}}
	opsv1.RegisterOpsServiceServer(server.GRPC(), r.ops)
	r.nodes, r.identities = &fakeNodes{}, &fakeIdentities{}
	nodev1.RegisterNodeSyncerServiceServer(server.GRPC(), r.nodes)
	identityv1.RegisterIdentityServiceServer(server.GRPC(), r.identities)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- server.Run(ctx) }()
	server.SetServing("", true)

	target := server.Addr().String()
	if server.Addr().Network() == "unix" {
		target = "unix://" + target
	}
	r.conn, err = rpc.Dial(target, rpc.ClientConfig{}, rpc.ClientDeps{TracerProvider: noop.NewTracerProvider(), Registerer: registry})
	if err != nil {
		t.Fatal(err)
	}
	r.begin = cancel
	r.stop = sync.OnceValue(func() error { cancel(); return <-done })
	t.Cleanup(func() {
		if err := r.conn.Close(); err != nil {
			t.Error(err)
		}
		if err := r.stop(); err != nil {
			t.Error(err)
		}
	})
	return r
}

// bare returns a connection without anything that Dial adds.
func bare(t *testing.T, address string) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func TestBadRequestNamesFieldAndReason(t *testing.T) {
	r := start(t, rpc.ServerConfig{}, nil)
	_, err := opsv1.NewOpsServiceClient(r.conn).SetLogLevel(t.Context(), &opsv1.SetLogLevelRequest{})
	if got := status.Code(err); got != codes.InvalidArgument {
		t.Fatalf("code %v, want InvalidArgument", got)
	}
	if got := rpc.ReasonOf(err); got != reason.FieldInvalid {
		t.Errorf("reason %v, want FIELD_INVALID", got)
	}
	var fields []string
	for _, d := range status.Convert(err).Details() {
		if bad, ok := d.(*errdetails.BadRequest); ok {
			for _, v := range bad.GetFieldViolations() {
				fields = append(fields, v.GetField())
			}
		}
	}
	if len(fields) != 1 || fields[0] != "log_level" {
		t.Errorf("fields %q, want log_level", fields)
	}
}

func TestStreamRequestsAreValidated(t *testing.T) {
	r := start(t, rpc.ServerConfig{}, nil)
	stream, err := nodev1.NewNodeSyncerServiceClient(r.conn).WatchNode(t.Context(), &nodev1.WatchNodeRequest{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = stream.Recv()
	if got := status.Code(err); got != codes.InvalidArgument {
		t.Fatalf("code %v (%v), want InvalidArgument", got, err)
	}
}

func TestPanicIsInternalWithFixedText(t *testing.T) {
	r := start(t, rpc.ServerConfig{}, nil)
	r.ops.get = func(context.Context) (*opsv1.GetConfigResponse, error) { panic("secret of the process") }
	_, err := opsv1.NewOpsServiceClient(r.conn).GetConfig(t.Context(), &opsv1.GetConfigRequest{})
	if got := status.Code(err); got != codes.Internal {
		t.Fatalf("code %v, want Internal", got)
	}
	if got := rpc.ReasonOf(err); got != reason.Internal {
		t.Errorf("reason %v, want INTERNAL", got)
	}
	if strings.Contains(status.Convert(err).Message(), "secret") {
		t.Errorf("the message tells too much: %v", err)
	}
}

func TestUnforeseenErrorTellsNothing(t *testing.T) {
	r := start(t, rpc.ServerConfig{}, nil)
	r.ops.get = func(context.Context) (*opsv1.GetConfigResponse, error) { return nil, errors.New("password=x") }
	_, err := opsv1.NewOpsServiceClient(r.conn).GetConfig(t.Context(), &opsv1.GetConfigRequest{})
	if got := status.Code(err); got != codes.Internal || rpc.ReasonOf(err) != reason.Internal {
		t.Fatalf("got %v, want Internal with INTERNAL", err)
	}
	if strings.Contains(err.Error(), "password") {
		t.Errorf("the message tells too much: %v", err)
	}
}

func TestDefaultDeadline(t *testing.T) {
	r := start(t, rpc.ServerConfig{DefaultTimeout: time.Hour}, nil)
	var had bool
	r.ops.get = func(ctx context.Context) (*opsv1.GetConfigResponse, error) {
		_, had = ctx.Deadline()
		return &opsv1.GetConfigResponse{}, nil
	}
	// A bare connection sets no deadline of its own.
	conn := bare(t, r.server.Addr().String())
	if _, err := opsv1.NewOpsServiceClient(conn).GetConfig(context.Background(), &opsv1.GetConfigRequest{}); err != nil {
		t.Fatal(err)
	}
	if !had {
		t.Error("the handler had no deadline")
	}
}

func TestDefaultDeadlineEndsACall(t *testing.T) {
	r := start(t, rpc.ServerConfig{DefaultTimeout: 20 * time.Millisecond}, nil)
	r.ops.get = func(ctx context.Context) (*opsv1.GetConfigResponse, error) {
		<-ctx.Done()
		return nil, fmt.Errorf("wait: %w", ctx.Err())
	}
	_, err := opsv1.NewOpsServiceClient(bare(t, r.server.Addr().String())).GetConfig(context.Background(), &opsv1.GetConfigRequest{})
	if got := status.Code(err); got != codes.DeadlineExceeded {
		t.Errorf("code %v (%v), want DeadlineExceeded", got, err)
	}
}

func TestClientTimeout(t *testing.T) {
	r := start(t, rpc.ServerConfig{}, nil)
	r.ops.get = func(ctx context.Context) (*opsv1.GetConfigResponse, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	conn, err := rpc.Dial(r.server.Addr().String(), rpc.ClientConfig{Timeout: 20 * time.Millisecond}, rpc.ClientDeps{TracerProvider: noop.NewTracerProvider()})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_, err = opsv1.NewOpsServiceClient(conn).GetConfig(context.Background(), &opsv1.GetConfigRequest{})
	if got := status.Code(err); got != codes.DeadlineExceeded {
		t.Errorf("code %v (%v), want DeadlineExceeded", got, err)
	}
}

func TestUnavailableIsRetried(t *testing.T) {
	r := start(t, rpc.ServerConfig{}, nil)
	calls := 0
	r.ops.get = func(context.Context) (*opsv1.GetConfigResponse, error) {
		if calls++; calls < 3 {
			return nil, rpc.Refuse(codes.Unavailable, reason.NotReady, "not yet")
		}
		return &opsv1.GetConfigResponse{}, nil
	}
	if _, err := opsv1.NewOpsServiceClient(r.conn).GetConfig(t.Context(), &opsv1.GetConfigRequest{}); err != nil {
		t.Fatalf("after %d calls: %v", calls, err)
	}
}

// Only what is kept can be sent again: gRPC alone keeps no more than 256 KiB.
func TestLargeRequestIsRetried(t *testing.T) {
	r := start(t, rpc.ServerConfig{}, nil)
	calls := 0
	r.identities.set = func(req *identityv1.SetHoldingRequest) (*identityv1.SetHoldingResponse, error) {
		if calls++; calls < 2 {
			return nil, rpc.Refuse(codes.Unavailable, reason.NotReady, "not yet")
		}
		return &identityv1.SetHoldingResponse{Duplicates: uint32(len(req.GetPrefixes()))}, nil
	}
	req := holding(100_000)
	if size := proto.Size(req); size < 1<<20 {
		t.Fatalf("the request has %d bytes only", size)
	}
	resp, err := identityv1.NewIdentityServiceClient(r.conn).SetHolding(t.Context(), req)
	if err != nil {
		t.Fatalf("after %d calls: %v", calls, err)
	}
	if got := resp.GetDuplicates(); got != 100_000 {
		t.Errorf("%d prefixes arrived", got)
	}
}

// holding is a valid request for n prefixes.
func holding(n int) *identityv1.SetHoldingRequest {
	req := &identityv1.SetHoldingRequest{
		RequestId:  "r",
		Session:    &identityv1.Session{Id: "s", Epoch: 1},
		Owner:      &identityv1.Owner{Kind: identityv1.OwnerKind_OWNER_KIND_LOCAL, Name: "n", Uid: "u"},
		Generation: 1,
	}
	for range n {
		req.Prefixes = append(req.Prefixes, &identityv1.WantedPrefix{Prefix: "10.0.0.0/24"})
	}
	return req
}

// A server that comes back is used again soon, and by calls that were made
// while it was away.
func TestReconnects(t *testing.T) {
	first := start(t, rpc.ServerConfig{}, nil)
	address := first.server.Addr().String()
	ops := opsv1.NewOpsServiceClient(first.conn)
	if _, err := ops.GetConfig(t.Context(), &opsv1.GetConfigRequest{}); err != nil {
		t.Fatal(err)
	}
	if err := first.stop(); err != nil {
		t.Fatal(err)
	}
	if _, err := ops.GetConfig(t.Context(), &opsv1.GetConfigRequest{}); status.Code(err) != codes.Unavailable {
		t.Fatalf("without a server: %v, want UNAVAILABLE", err)
	}
	start(t, rpc.ServerConfig{Listen: address}, nil)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if _, err := ops.GetConfig(ctx, &opsv1.GetConfigRequest{}, grpc.WaitForReady(true)); err != nil {
		t.Errorf("with a server again: %v", err)
	}
}

// A hook that fails in its own way lets nobody in and gives nothing away.
func TestAuthErrorsTellNothing(t *testing.T) {
	r := start(t, rpc.ServerConfig{}, func(context.Context, string) (context.Context, error) {
		return nil, errors.New("token=x")
	})
	_, err := opsv1.NewOpsServiceClient(r.conn).GetConfig(t.Context(), &opsv1.GetConfigRequest{})
	if status.Code(err) != codes.Internal || rpc.ReasonOf(err) != reason.Internal || strings.Contains(err.Error(), "token") {
		t.Errorf("got %v, want INTERNAL with a fixed text", err)
	}
}

func TestAuthContextReachesHandlers(t *testing.T) {
	type key struct{}
	r := start(t, rpc.ServerConfig{}, func(ctx context.Context, method string) (context.Context, error) {
		return context.WithValue(ctx, key{}, method), nil
	})
	var caller any
	r.ops.get = func(ctx context.Context) (*opsv1.GetConfigResponse, error) {
		caller = ctx.Value(key{})
		return &opsv1.GetConfigResponse{}, nil
	}
	if _, err := opsv1.NewOpsServiceClient(r.conn).GetConfig(t.Context(), &opsv1.GetConfigRequest{}); err != nil {
		t.Fatal(err)
	}
	if caller != opsv1.OpsService_GetConfig_FullMethodName {
		t.Errorf("the handler saw %v", caller)
	}
}

func TestAuthRefusesBeforeAnythingElse(t *testing.T) {
	r := start(t, rpc.ServerConfig{}, func(_ context.Context, method string) (context.Context, error) {
		return nil, rpc.Refuse(codes.PermissionDenied, reason.PermissionDenied, "not %s", method)
	})
	_, err := opsv1.NewOpsServiceClient(r.conn).SetLogLevel(t.Context(), &opsv1.SetLogLevelRequest{})
	if got := status.Code(err); got != codes.PermissionDenied || rpc.ReasonOf(err) != reason.PermissionDenied {
		t.Errorf("got %v, want PERMISSION_DENIED", err)
	}
	stream, err := nodev1.NewNodeSyncerServiceClient(r.conn).WatchNode(t.Context(), &nodev1.WatchNodeRequest{NodeName: "n"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); status.Code(err) != codes.PermissionDenied {
		t.Errorf("stream: got %v, want PERMISSION_DENIED", err)
	}
}

func TestHealthMetricsAndReflection(t *testing.T) {
	r := start(t, rpc.ServerConfig{}, nil)
	health := healthpb.NewHealthClient(bare(t, r.server.HealthAddr().String()))
	for _, serving := range []bool{true, false} {
		r.server.SetServing("", serving)
		resp, err := health.Check(t.Context(), &healthpb.HealthCheckRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if got := resp.GetStatus() == healthpb.HealthCheckResponse_SERVING; got != serving {
			t.Errorf("serving: got %v, want %v", got, serving)
		}
	}

	v1, err := reflectionv1.NewServerReflectionClient(r.conn).ServerReflectionInfo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := v1.Send(&reflectionv1.ServerReflectionRequest{MessageRequest: &reflectionv1.ServerReflectionRequest_ListServices{}}); err != nil {
		t.Fatal(err)
	}
	if _, err := v1.Recv(); err != nil {
		t.Errorf("reflection v1: %v", err)
	}
	alpha, err := reflectionv1alpha.NewServerReflectionClient(r.conn).ServerReflectionInfo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := alpha.Send(&reflectionv1alpha.ServerReflectionRequest{MessageRequest: &reflectionv1alpha.ServerReflectionRequest_ListServices{}}); err != nil {
		t.Fatal(err)
	}
	if _, err := alpha.Recv(); err != nil {
		t.Errorf("reflection v1alpha: %v", err)
	}

	if _, err := opsv1.NewOpsServiceClient(r.conn).GetConfig(t.Context(), &opsv1.GetConfigRequest{}); err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Get("http://" + r.server.MetricsAddr().String() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	if err := errors.Join(err, resp.Body.Close()); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(body), `grpc_server_handled_total{grpc_code="OK",grpc_method="GetConfig"`) {
		t.Error("/metrics does not count the call")
	}
}

func TestSocketIsForItsOwnerAndReplacesAStaleOne(t *testing.T) {
	dir, err := os.MkdirTemp("", "rpc") // t.TempDir may be too long for a socket.
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	path := filepath.Join(dir, "s.sock")
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	if err != nil {
		t.Fatal(err)
	}
	stale.SetUnlinkOnClose(false)
	if err := stale.Close(); err != nil {
		t.Fatal(err)
	}
	r := start(t, rpc.ServerConfig{Listen: "unix://" + path}, nil)
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if got := info.Mode().Perm(); got != 0o600 {
		t.Errorf("mode %o, want 600", got)
	}
	if _, err := opsv1.NewOpsServiceClient(r.conn).GetConfig(t.Context(), &opsv1.GetConfigRequest{}); err != nil {
		t.Fatal(err)
	}
	// One that answers is not stale.
	registry := prometheus.NewRegistry()
	if _, err := rpc.NewServer(rpc.ServerConfig{Listen: "unix://" + path, HealthListen: "127.0.0.1:0", MetricsListen: "127.0.0.1:0"},
		rpc.Deps{Registerer: registry, Gatherer: registry, TracerProvider: noop.NewTracerProvider()}); err == nil {
		t.Error("a second server took the socket of a living one")
	}
}

func TestConfigValidation(t *testing.T) {
	good := rpc.ServerConfig{Listen: "127.0.0.1:0", HealthListen: "127.0.0.1:0", MetricsListen: "127.0.0.1:0"}
	if err := good.Validate(); err != nil {
		t.Fatal(err)
	}
	for flag, edit := range map[string]func(*rpc.ServerConfig){
		"--listen":            func(c *rpc.ServerConfig) { c.Listen = "nonsense" },
		"--health-listen":     func(c *rpc.ServerConfig) { c.HealthListen = "" },
		"--metrics-listen":    func(c *rpc.ServerConfig) { c.MetricsListen = "a:b:c" },
		"--max-request-bytes": func(c *rpc.ServerConfig) { c.MaxRecvBytes = -1 },
		"--grace-period":      func(c *rpc.ServerConfig) { c.GracePeriod = -1 },
		"--default-timeout":   func(c *rpc.ServerConfig) { c.DefaultTimeout = -1 },
	} {
		bad := good
		edit(&bad)
		if err := bad.Validate(); err == nil || !strings.Contains(err.Error(), flag) {
			t.Errorf("%s: error %v does not name it", flag, err)
		}
	}
	bad := good
	bad.Listen = "unix://"
	if err := bad.Validate(); err == nil {
		t.Error("a socket without a path was taken")
	}
}

func TestDialRefusesNonsense(t *testing.T) {
	for _, target := range []string{"", "host", "a:1,,b:2"} {
		if conn, err := rpc.Dial(target, rpc.ClientConfig{}, rpc.ClientDeps{TracerProvider: noop.NewTracerProvider()}); err == nil {
			_ = conn.Close()
			t.Errorf("Dial(%q) took it", target)
		}
	}
}

// A dead server in the list does not matter as long as one lives.
func TestDialStaticList(t *testing.T) {
	r := start(t, rpc.ServerConfig{}, nil)
	dead, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	deadAddr := dead.Addr().String()
	if err := dead.Close(); err != nil {
		t.Fatal(err)
	}
	conn, err := rpc.Dial(deadAddr+","+r.server.Addr().String(), rpc.ClientConfig{}, rpc.ClientDeps{TracerProvider: noop.NewTracerProvider()})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for range 4 {
		if _, err := opsv1.NewOpsServiceClient(conn).GetConfig(t.Context(), &opsv1.GetConfigRequest{}); err != nil {
			t.Fatal(err)
		}
	}
}
