// Package command is what the commands stack and demo share: their flags, and
// the end by a signal.
package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/pflag"

	"github.com/eniplane/eniplane/deploy/local/internal/stack"
)

// Flags are the flags of both commands.
type Flags struct {
	Run, Bin, Base, PinRoot string
	Nodes                   int
}

// Add binds the flags. Their defaults suit the folder deploy/local.
func (f *Flags) Add(fs *pflag.FlagSet) {
	fs.StringVar(&f.Run, "run", "run", "folder for logs, ports and data")
	fs.StringVar(&f.Bin, "bin", "../../bin", "folder with the built programs")
	fs.StringVar(&f.Base, "base", "../base", "folder with the Kubernetes manifests, for the rights of each program")
	fs.StringVar(&f.PinRoot, "pin-root", "/sys/fs/bpf/eniplane", "folder on the BPF file system for the agents' maps")
	fs.IntVar(&f.Nodes, "nodes", 3, "how many nodes to simulate, from 1 to 50")
}

// Config is the stack that the flags and the environment describe.
func (f *Flags) Config(progress io.Writer) (stack.Config, error) {
	if f.Nodes < 1 || f.Nodes > 50 {
		return stack.Config{}, fmt.Errorf("--nodes: %d is not between 1 and 50", f.Nodes)
	}
	cfg := stack.Config{Run: f.Run, Bin: f.Bin, Base: f.Base, PinRoot: f.PinRoot, Nodes: stack.DefaultNodes(f.Nodes), Progress: progress}
	if os.Getenv("JAEGER") == "1" {
		cfg.JaegerBinary = os.Getenv("ENIPLANE_JAEGER")
		if cfg.JaegerBinary == "" {
			return stack.Config{}, errors.New("JAEGER=1 needs the path of a Jaeger all-in-one in ENIPLANE_JAEGER")
		}
	}
	return cfg, nil
}

// Signals returns a context that ends with the first SIGINT, SIGTERM or SIGHUP.
// A second one ends the process at once; the next start then cleans up.
func Signals() (context.Context, context.CancelFunc) {
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	context.AfterFunc(ctx, cancel)
	return ctx, cancel
}

// Stop stops a stack and says so.
func Stop(s *stack.Stack, progress io.Writer) error {
	begin := time.Now()
	_, _ = fmt.Fprintln(progress, "stopping ...")
	err := s.Stop()
	if err == nil {
		_, _ = fmt.Fprintf(progress, "stopped after %.1f s; the logs are kept\n", time.Since(begin).Seconds())
	}
	return err
}
