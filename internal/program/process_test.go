package program_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/eniplane/eniplane/internal/program"
)

// asProgram makes this test binary the program under test: "plain", or "stuck"
// for one whose loop does not end when it is asked to.
const asProgram = "ENIPLANE_TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	kind := os.Getenv(asProgram)
	if kind == "" {
		goleak.VerifyTestMain(m)
		return
	}
	s := spec()
	if kind == "stuck" {
		s.New = func(context.Context, *program.Env) (func(context.Context) error, error) {
			return func(ctx context.Context) error {
				<-ctx.Done()
				_, _ = os.Stdout.WriteString("asked\n")
				select {}
			}, nil
		}
	}
	os.Exit(program.Main(s))
}

// process is a program in a process of its own.
type process struct {
	cmd    *exec.Cmd
	stdout *buffer
	stderr *buffer
	ports  program.Ports
}

func command(t *testing.T, kind string, args ...string) *process {
	t.Helper()
	p := &process{cmd: exec.Command(os.Args[0], args...), stdout: &buffer{}, stderr: &buffer{}}
	p.cmd.Env = []string{asProgram + "=" + kind}
	p.cmd.Stdout, p.cmd.Stderr = p.stdout, p.stderr
	return p
}

// spawn starts a program and waits until it serves.
func spawn(t *testing.T, kind string) *process {
	t.Helper()
	file := filepath.Join(t.TempDir(), "ports.json")
	p := command(t, kind, "--ports-file="+file)
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.cmd.Process.Kill() }) // Nothing happens if it has ended.
	eventually(t, "a ports file", func() bool {
		raw, err := os.ReadFile(file)
		return err == nil && json.Unmarshal(raw, &p.ports) == nil
	})
	return p
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("no %s", what)
		}
	}
}

func signal(t *testing.T, p *process, s os.Signal) {
	t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
}

func TestSignalsStopTheProcess(t *testing.T) {
	for _, s := range []os.Signal{os.Interrupt, syscall.SIGTERM} {
		p := spawn(t, "plain")
		signal(t, p, s)
		if err := p.cmd.Wait(); err != nil {
			t.Errorf("%v: %v\n%s", s, err, p.stderr)
		}
	}
}

func TestSecondSignalKills(t *testing.T) {
	p := spawn(t, "stuck")
	signal(t, p, syscall.SIGTERM)
	eventually(t, "loop that was asked to end", func() bool { return strings.Contains(p.stdout.String(), "asked") })
	signal(t, p, syscall.SIGTERM)
	err := p.cmd.Wait()
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		t.Fatalf("ended with %v, want a signal", err)
	}
	if state, ok := exit.Sys().(syscall.WaitStatus); !ok || state.Signal() != syscall.SIGTERM {
		t.Errorf("ended with %v, want SIGTERM", err)
	}
}

// A second start on a busy port says so in one line, and does not disturb the
// first.
func TestBusyPortIsOneLine(t *testing.T) {
	first := spawn(t, "plain")
	second := command(t, "plain", "--listen="+first.ports.GRPC)
	err := second.cmd.Run()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 1 {
		t.Errorf("ended with %v, want exit code 1", err)
	}
	out := second.stderr.String()
	if strings.Count(out, "\n") != 1 {
		t.Errorf("not one line: %q", out)
	}
	for _, want := range []string{"tester: ", "--listen", first.ports.GRPC, "address already in use"} {
		if !strings.Contains(out, want) {
			t.Errorf("%q does not say %q", out, want)
		}
	}
	if second.stdout.String() != "" {
		t.Errorf("stdout: %q", second.stdout)
	}
	signal(t, first, syscall.SIGTERM)
	if err := first.cmd.Wait(); err != nil {
		t.Errorf("the first: %v", err)
	}
}

func TestSeveralMistakesAreOneLine(t *testing.T) {
	p := command(t, "plain")
	p.cmd.Env = append(p.cmd.Env, "ENIPLANE_NOPE=1", "ENIPLANE_NO=1")
	if err := p.cmd.Run(); err == nil {
		t.Fatal("the mistakes were taken")
	}
	out := p.stderr.String()
	if strings.Count(out, "\n") != 1 || !strings.Contains(out, "ENIPLANE_NOPE") || !strings.Contains(out, "ENIPLANE_NO:") {
		t.Errorf("got %q, want both mistakes on one line", out)
	}
}

func TestHelpAndVersion(t *testing.T) {
	for _, arg := range []string{"--help", "--version"} {
		var stdout, stderr bytes.Buffer
		if err := program.Run(t.Context(), spec(), []string{arg}, nil, &stdout, &stderr); err != nil {
			t.Errorf("%s: %v", arg, err)
		}
		if stdout.Len() == 0 || stderr.Len() != 0 {
			t.Errorf("%s: stdout %q, stderr %q", arg, &stdout, &stderr)
		}
	}
}
