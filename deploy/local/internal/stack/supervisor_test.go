package stack

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	opsv1 "github.com/eniplane/eniplane/gen/eniplane/ops/v1"
	"github.com/eniplane/eniplane/internal/program"
	"github.com/eniplane/eniplane/internal/rpc"
)

// actAs makes this test binary a program of ours: one that serves, or one that
// ends soon.
const actAs = "TEST_STACK_ACT_AS"

func actProgram(how string) int {
	spec := program.Spec{
		Name:     "test",
		Defaults: rpc.ServerConfig{Listen: anyPort, HealthListen: anyPort, MetricsListen: anyPort},
		New: func(_ context.Context, env *program.Env) (func(context.Context) error, error) {
			env.Server.SetServing(opsv1.OpsService_ServiceDesc.ServiceName, how == "serve")
			return func(ctx context.Context) error {
				if how == "end" {
					return errors.New("had enough")
				}
				<-ctx.Done()
				return nil
			}, nil
		},
	}
	return program.Main(spec)
}

// supervise makes a supervisor whose only binary is this test.
func supervise(t *testing.T) *supervisor {
	t.Helper()
	run := t.TempDir()
	for _, folder := range []string{logsFolder, portsFolder} {
		if err := os.Mkdir(filepath.Join(run, folder), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	keep, err := newKeeper(run)
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return newSupervisor(run, filepath.Dir(self), keep)
}

func testProgram(t *testing.T, how string) *managed {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return &managed{
		name: "p", binary: filepath.Base(self), service: opsv1.OpsService_ServiceDesc.ServiceName,
		env: environment(actAs + "=" + how),
	}
}

func TestSupervisorRestartsWhereItWas(t *testing.T) {
	s, p := supervise(t), testProgram(t, "serve")
	if err := s.start(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	first, ok := s.keep.get().Process("p")
	if !ok || !first.lives() || first.GRPC == "" || first.GRPC == anyPort {
		t.Errorf("recorded: %+v", first)
	}
	s.expect(p.child)
	p.child.Kill()
	<-p.child.Done()
	if err := s.start(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	second, _ := s.keep.get().Process("p")
	if second.Ports != first.Ports || second.PID == first.PID || !second.lives() {
		t.Errorf("first %+v, second %+v", first, second)
	}
	s.halt(p.child)
	if second.lives() {
		t.Error("it still runs")
	}
	select {
	case err := <-s.failed:
		t.Errorf("a wanted end counts as a failure: %v", err)
	default:
	}
}

func TestSupervisorTellsOfAnEnd(t *testing.T) {
	s, p := supervise(t), testProgram(t, "end")
	// It may have been healthy for a moment.
	if err := s.start(t.Context(), p); err != nil && !errors.Is(err, ErrNotReady) {
		t.Fatal(err)
	}
	select {
	case err := <-s.failed:
		if !errors.Is(err, ErrNotReady) || !strings.Contains(err.Error(), "had enough") {
			t.Errorf("got %v", err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("its end was not told")
	}
}

func TestSupervisorWaitsForHealth(t *testing.T) {
	s, p := supervise(t), testProgram(t, "sulk")
	ctx, cancel := context.WithTimeout(t.Context(), 700*time.Millisecond)
	defer cancel()
	if err := s.start(ctx, p); !errors.Is(err, ErrNotReady) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	s.halt(p.child)
}
