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

// fakeNodes streams nothing until its client goes.
type fakeNodes struct {
	nodev1.UnimplementedNodeSyncerServiceServer
}

func (fakeNodes) WatchNode(_ *nodev1.WatchNodeRequest, s grpc.ServerStreamingServer[nodev1.WatchNodeResponse]) error {
	if err := s.Send(&nodev1.WatchNodeResponse{}); err != nil {
		return err
	}
	<-s.Context().Done()
	return s.Context().Err()
}

type running struct {
	server *rpc.Server
	ops    *fakeOps
	conn   *grpc.ClientConn
	stop   func() error
}

func start(t *testing.T, config rpc.ServerConfig, auth rpc.AuthFunc) *running {
	t.Helper()
	if config.Listen == "" {
		config.Listen = "127.0.0.1:0"
	}
	config.HealthListen, config.MetricsListen = "127.0.0.1:0", "127.0.0.1:0"
	registry := prometheus.NewRegistry()
	server, err := rpc.NewServer(config, rpc.Deps{
		Logger: slog.New(slog.NewTextHandler(io.Discard, nil)), Registerer: registry, Gatherer: registry,
		TracerProvider: noop.NewTracerProvider(), Auth: auth,
	})
	if err != nil {
		t.Fatal(err)
	}
	r := &running{server: server, ops: &fakeOps{get: func(context.Context) (*opsv1.GetConfigResponse, error) { return &opsv1.GetConfigResponse{}, nil }}}
	opsv1.RegisterOpsServiceServer(server.GRPC(), r.ops)
	nodev1.RegisterNodeSyncerServiceServer(server.GRPC(), fakeNodes{})
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
	stopped := false
	r.stop = func() error {
		if stopped {
			return nil
		}
		stopped = true
		cancel()
		return <-done
	}
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

func TestDetailsSurviveTheWire(t *testing.T) {
	r := start(t, rpc.ServerConfig{}, nil)
	r.ops.get = func(context.Context) (*opsv1.GetConfigResponse, error) {
		e := rpc.Refuse(codes.ResourceExhausted, reason.PoolEmpty, "no address").With("used", "5")
		e.RetryAfter = 3 * time.Second
		return nil, fmt.Errorf("allocate: %w", e)
	}
	_, err := opsv1.NewOpsServiceClient(r.conn).GetConfig(t.Context(), &opsv1.GetConfigRequest{})
	if got := status.Code(err); got != codes.ResourceExhausted {
		t.Fatalf("code %v, want ResourceExhausted", got)
	}
	if got := rpc.ReasonOf(err); got != reason.PoolEmpty {
		t.Errorf("reason %v", got)
	}
	if got := rpc.MetadataOf(err)["used"]; got != "5" {
		t.Errorf("metadata used = %q", got)
	}
	if after, ok := rpc.RetryAfter(err); !ok || after != 3*time.Second {
		t.Errorf("retry after %v, %v", after, ok)
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
	bare, err := grpc.NewClient(r.server.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer bare.Close() //nolint:errcheck // Nothing depends on it.
	if _, err := opsv1.NewOpsServiceClient(bare).GetConfig(context.Background(), &opsv1.GetConfigRequest{}); err != nil {
		t.Fatal(err)
	}
	if !had {
		t.Error("the handler had no deadline")
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

func TestStopIsBoundedByOpenStreams(t *testing.T) {
	r := start(t, rpc.ServerConfig{GracePeriod: 50 * time.Millisecond}, nil)
	stream, err := nodev1.NewNodeSyncerServiceClient(r.conn).WatchNode(t.Context(), &nodev1.WatchNodeRequest{NodeName: "n"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("the stream ended with %v, want an error", err)
	}
}

func TestHealthMetricsAndReflection(t *testing.T) {
	r := start(t, rpc.ServerConfig{}, nil)
	probe, err := grpc.NewClient(r.server.HealthAddr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer probe.Close() //nolint:errcheck // Nothing depends on it.
	health := healthpb.NewHealthClient(probe)
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

func TestTable(t *testing.T) {
	errGone := errors.New("gone")
	table := rpc.Table{{Err: errGone, Code: codes.NotFound, Reason: reason.NodeUnknown}}
	for _, tc := range []struct {
		name string
		err  error
		code codes.Code
		why  reason.Reason
	}{
		{"nil", nil, codes.OK, 0},
		{"sentinel", errGone, codes.NotFound, reason.NodeUnknown},
		{"wrapped sentinel", fmt.Errorf("read n: %w", errGone), codes.NotFound, reason.NodeUnknown},
		{"refusal", fmt.Errorf("x: %w", rpc.InvalidField("a", reason.PrefixInvalid, "bad")), codes.InvalidArgument, reason.PrefixInvalid},
		{"canceled", fmt.Errorf("x: %w", context.Canceled), codes.Canceled, 0},
		{"deadline", fmt.Errorf("x: %w", context.DeadlineExceeded), codes.DeadlineExceeded, 0},
		{"remote", fmt.Errorf("call: %w", rpc.Refuse(codes.Aborted, reason.Conflict, "again").GRPCStatus().Err()), codes.Aborted, reason.Conflict},
		{"unforeseen", errors.New("boom"), codes.Internal, reason.Internal},
	} {
		got := table.Status(tc.err)
		if code := status.Code(got); code != tc.code {
			t.Errorf("%s: code %v, want %v", tc.name, code, tc.code)
		}
		if why := rpc.ReasonOf(got); why != tc.why {
			t.Errorf("%s: reason %v, want %v", tc.name, why, tc.why)
		}
		if tc.err != nil && tc.why == reason.Internal && !errors.Is(got, tc.err) {
			t.Errorf("%s: the cause is lost for the log", tc.name)
		}
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
	defer conn.Close() //nolint:errcheck // Nothing depends on it.
	for range 4 {
		if _, err := opsv1.NewOpsServiceClient(conn).GetConfig(t.Context(), &opsv1.GetConfigRequest{}); err != nil {
			t.Fatal(err)
		}
	}
}
