package program_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"go.opentelemetry.io/otel/trace/noop"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	opsv1 "github.com/eniplane/eniplane/gen/eniplane/ops/v1"
	"github.com/eniplane/eniplane/internal/program"
	"github.com/eniplane/eniplane/internal/rpc"
)

// buffer is a bytes.Buffer for several goroutines.
type buffer struct {
	mu sync.Mutex // guards b
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func spec() program.Spec {
	return program.Spec{
		Name: "tester", Short: "a program for tests",
		Defaults: rpc.ServerConfig{Listen: "127.0.0.1:0", HealthListen: "127.0.0.1:0", MetricsListen: "127.0.0.1:0"},
		AddFlags: func(fs *pflag.FlagSet) { fs.String("greeting", "hello", "") },
		New: func(context.Context, *program.Env) (func(context.Context) error, error) {
			return func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }, nil
		},
	}
}

// launch runs a program until its ports file is there.
func launch(t *testing.T, s program.Spec, environ []string, args ...string) (program.Ports, *buffer, func() error) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "ports.json")
	ctx, cancel := context.WithCancel(context.Background())
	logs, done := &buffer{}, make(chan error, 1)
	go func() {
		done <- program.Run(ctx, s, append(args, "--ports-file="+file), environ, logs, logs)
	}()
	stop := func() error { cancel(); return <-done }
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		raw, err := os.ReadFile(file)
		if err == nil {
			var ports program.Ports
			if err := json.Unmarshal(raw, &ports); err != nil {
				t.Fatalf("half a ports file: %q", raw)
			}
			return ports, logs, stop
		}
		select {
		case err := <-done:
			cancel()
			t.Fatalf("ended: %v\n%s", err, logs)
		default:
		}
		if time.Now().After(deadline) {
			cancel()
			t.Fatalf("no ports file\n%s", logs)
		}
	}
}

func dial(t *testing.T, target string) opsv1.OpsServiceClient {
	t.Helper()
	conn, err := rpc.Dial(target, rpc.ClientConfig{}, rpc.ClientDeps{TracerProvider: noop.NewTracerProvider()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return opsv1.NewOpsServiceClient(conn)
}

func TestStartShowConfigStop(t *testing.T) {
	ports, logs, stop := launch(t, spec(), []string{"ENIPLANE_GREETING=hi"})
	ops := dial(t, ports.GRPC)
	resp, err := ops.GetConfig(t.Context(), &opsv1.GetConfigRequest{})
	if err != nil {
		t.Fatal(err)
	}
	found := false
	for _, e := range resp.GetEntries() {
		if e.GetName() == "greeting" {
			found = e.GetValue() == "hi" && e.GetOrigin() == "environment"
		}
	}
	if !found {
		t.Errorf("GetConfig does not show the greeting: %v", resp)
	}
	set, err := ops.SetLogLevel(t.Context(), &opsv1.SetLogLevelRequest{LogLevel: opsv1.LogLevel_LOG_LEVEL_DEBUG})
	if err != nil || set.GetPrevious() != opsv1.LogLevel_LOG_LEVEL_INFO {
		t.Errorf("SetLogLevel: %v, %v", set, err)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
	if !strings.Contains(logs.String(), `"greeting":"hi"`) {
		t.Errorf("the effective configuration is not in the log:\n%s", logs)
	}
}

func TestRefusedSettings(t *testing.T) {
	for _, args := range [][]string{{"--nope"}, {"--log-level=loud"}, {"--listen=x"}, {"--otlp-endpoint=127.0.0.1:4317"}, {"word"}, {"--ports-file=/nonexistent/dir/p.json"}} {
		var out buffer
		if err := program.Run(t.Context(), spec(), args, nil, &out, &out); err == nil {
			t.Errorf("%q was taken", args)
		}
	}
}

func TestFailuresEndTheProgram(t *testing.T) {
	errBoom := errors.New("boom")
	broken := spec()
	broken.New = func(context.Context, *program.Env) (func(context.Context) error, error) { return nil, errBoom }
	var out buffer
	if err := program.Run(t.Context(), broken, nil, nil, &out, &out); !errors.Is(err, errBoom) {
		t.Errorf("New: %v", err)
	}
	dies := spec()
	dies.New = func(context.Context, *program.Env) (func(context.Context) error, error) {
		return func(context.Context) error { return errBoom }, nil
	}
	if err := program.Run(t.Context(), dies, nil, nil, &out, &out); !errors.Is(err, errBoom) {
		t.Errorf("loop: %v", err)
	}
}

// A receiver of traces that is not there delays nothing and ends nothing.
func TestUnreachableTraceReceiver(t *testing.T) {
	ports, _, stop := launch(t, spec(), nil, "--otlp-endpoint=http://127.0.0.1:1")
	if _, err := dial(t, ports.GRPC).GetConfig(t.Context(), &opsv1.GetConfigRequest{}); err != nil {
		t.Error(err)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
}

// A stop does not wait for a New that is busy.
func TestStopDuringNew(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	s := spec()
	s.New = func(ctx context.Context, _ *program.Env) (func(context.Context) error, error) {
		cancel()
		<-ctx.Done()
		return nil, fmt.Errorf("open: %w", ctx.Err())
	}
	var out buffer
	if err := program.Run(ctx, s, nil, nil, &out, &out); err != nil {
		t.Errorf("a stop is no failure: %v", err)
	}
}

// What a loop says about serving stands: the frame does not overrule it.
func TestLoopDecidesAboutServing(t *testing.T) {
	said := make(chan struct{})
	s := spec()
	s.New = func(_ context.Context, env *program.Env) (func(context.Context) error, error) {
		return func(ctx context.Context) error {
			env.Server.SetServing("", false)
			close(said)
			<-ctx.Done()
			return ctx.Err()
		}, nil
	}
	ports, _, stop := launch(t, s, nil)
	<-said
	conn, err := grpc.NewClient(ports.Health, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{})
	if err != nil || resp.GetStatus() != healthpb.HealthCheckResponse_NOT_SERVING {
		t.Errorf("health: %v, %v", resp, err)
	}
	if err := errors.Join(conn.Close(), stop()); err != nil {
		t.Error(err)
	}
}

// A ports file of an earlier run is gone before there is anything to start, and
// one of a run that failed is not left.
func TestStalePortsFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "ports.json")
	if err := os.WriteFile(file, []byte("stale"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := spec()
	errBoom := errors.New("boom")
	s.New = func(context.Context, *program.Env) (func(context.Context) error, error) { return nil, errBoom }
	var out buffer
	if err := program.Run(t.Context(), s, []string{"--ports-file=" + file}, nil, &out, &out); !errors.Is(err, errBoom) {
		t.Fatal(err)
	}
	if _, err := os.Stat(file); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the stale file: %v", err)
	}
}

func TestLoopsOutliveTheServer(t *testing.T) {
	var order []string
	s := spec()
	s.New = func(_ context.Context, env *program.Env) (func(context.Context) error, error) {
		return func(ctx context.Context) error {
			<-ctx.Done()
			conn, err := rpc.Dial(env.Server.Addr().String(), rpc.ClientConfig{Timeout: time.Second}, rpc.ClientDeps{TracerProvider: noop.NewTracerProvider()})
			if err != nil {
				return err
			}
			defer conn.Close()
			if _, err := opsv1.NewOpsServiceClient(conn).GetConfig(context.WithoutCancel(ctx), &opsv1.GetConfigRequest{}); err != nil {
				order = append(order, "server was down first")
			}
			return nil
		}, nil
	}
	_, _, stop := launch(t, s, nil)
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if len(order) != 1 {
		t.Error("the loops ended while the server still served")
	}
}
