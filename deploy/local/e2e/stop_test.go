package e2e_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/eniplane/eniplane/deploy/local/internal/stack"
)

// TestEndOfTheStack starts the command stack on its own and ends it in each way
// that there is. Nothing may be left.
func TestEndOfTheStack(t *testing.T) {
	for _, tc := range []struct {
		name string
		end  func(t *testing.T, cmd *exec.Cmd, run string)
		ok   bool // whether the command ends well
	}{
		{"interrupted", func(t *testing.T, cmd *exec.Cmd, _ string) { signal(t, cmd, syscall.SIGINT) }, true},
		{"told down", func(t *testing.T, _ *exec.Cmd, run string) { down(t, run) }, true},
		{"crashed", func(t *testing.T, cmd *exec.Cmd, _ string) { signal(t, cmd, syscall.SIGKILL) }, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			run := filepath.Join(t.TempDir(), "run")
			out := filepath.Join(t.TempDir(), "out")
			f, err := os.Create(out)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = f.Close() }()
			pins := "/sys/fs/bpf/eniplane-e2e-end-" + filepath.Base(filepath.Dir(run))
			cmd := exec.Command(filepath.Join(bin, "stack"), "up", "--nodes=1", "--run="+run, "--bin="+bin,
				"--base="+filepath.Join(root, "deploy/base"), "--pin-root="+pins)
			cmd.Stdout, cmd.Stderr = f, f
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			ended := make(chan error, 1)
			go func() { ended <- cmd.Wait() }()
			t.Cleanup(func() { _ = cmd.Process.Kill() })

			var rec stack.Record
			eventually(t, "the stack is up", func() string {
				text, err := os.ReadFile(out)
				if err != nil {
					return err.Error()
				}
				if !strings.Contains(string(text), "Ctrl-C") {
					return "it has said: " + string(text)
				}
				if rec, err = stack.ReadRecord(run); err != nil {
					return err.Error()
				}
				return ""
			})
			if len(rec.Processes) != 7 {
				t.Errorf("%d processes, want 7: %v", len(rec.Processes), rec.Processes)
			}
			tc.end(t, cmd, run)
			select {
			case err := <-ended:
				if (err == nil) != tc.ok {
					t.Errorf("it ended with %v", err)
				}
			case <-time.After(patience):
				t.Fatal("it does not end")
			}
			if tc.name == "crashed" {
				eventually(t, "its processes die with it", func() string {
					for _, p := range rec.Processes {
						if alive(p.PID) {
							return p.Name + " still runs"
						}
					}
					return ""
				})
				down(t, run)
			}
			if err := nothingLeft(rec, run); err != nil {
				t.Error(err)
			}
		})
	}
}

func signal(t *testing.T, cmd *exec.Cmd, s syscall.Signal) {
	t.Helper()
	if err := cmd.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
}

func down(t *testing.T, run string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if out, err := exec.CommandContext(ctx, filepath.Join(bin, "stack"), "down", "--run="+run).CombinedOutput(); err != nil {
		t.Fatalf("down: %v\n%s", err, out)
	}
}
