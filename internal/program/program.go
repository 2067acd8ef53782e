// Package program runs one program of eniplane: configuration, telemetry, server
// and loops, in the right order up and down. What the program does does not
// belong here.
package program

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"strings"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sync/errgroup"

	opsv1 "github.com/eniplane/eniplane/gen/eniplane/ops/v1"
	"github.com/eniplane/eniplane/internal/config"
	"github.com/eniplane/eniplane/internal/rpc"
	"github.com/eniplane/eniplane/internal/telemetry"
)

// Spec is what makes one program differ from another.
type Spec struct {
	// Name is the program's name, such as "node-syncer"; Short is one line on it.
	Name, Short string
	// Defaults are the addresses on which it serves unless told otherwise.
	Defaults rpc.ServerConfig
	// AddFlags binds the program's own settings. May be nil.
	AddFlags func(*pflag.FlagSet)
	// Validate checks them once they are loaded; its error names the flag. May
	// be nil.
	Validate func() error
	// Instance tells processes of the program apart on traces. May be nil.
	Instance func() string
	// New builds the program and registers its services on env.Server.GRPC(). It
	// returns what runs beside the server until its context ends; nil if nothing
	// does. It does not wait for anything outside the process. Its context is the
	// one that the loops get: it ends after the server has stopped. The program
	// is reported as serving when New returns; a loop may say otherwise with
	// env.Server.SetServing.
	New func(ctx context.Context, env *Env) (run func(context.Context) error, err error)
}

// Env is what a program is given.
type Env struct {
	Name, Version  string
	Logger         *slog.Logger
	Registry       *prometheus.Registry
	TracerProvider trace.TracerProvider
	Server         *rpc.Server
	Config         config.Effective
}

// common are the settings that every program has beside those of the server.
type common struct {
	file, logLevel, otlpEndpoint, portsFile string
}

func (c *common) addFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.file, config.FileFlag, "", "YAML file with settings by flag name")
	fs.StringVar(&c.logLevel, "log-level", "info", "least severe level that is logged: debug, info, warn, error")
	fs.StringVar(&c.otlpEndpoint, "otlp-endpoint", "", "URL of an OTLP gRPC receiver; empty means what OTEL_* variables say, or none")
	fs.StringVar(&c.portsFile, "ports-file", "", "file to write the addresses to, as JSON, once they are taken")
}

// Main runs the program of this process until SIGINT or SIGTERM and returns its
// exit code; a second signal ends it at once.
func Main(spec Spec) int {
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	context.AfterFunc(ctx, cancel) // From then on a signal has its default effect.
	if err := Run(ctx, spec, os.Args[1:], os.Environ(), os.Stdout, os.Stderr); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %s\n", spec.Name, strings.ReplaceAll(err.Error(), "\n", "; "))
		return 1
	}
	return 0
}

// Run runs a program until ctx ends; it returns nil then. Logs go to stderr,
// help to stdout.
func Run(ctx context.Context, spec Spec, args, environ []string, stdout, stderr io.Writer) error {
	server := spec.Defaults
	var settings common
	command := &cobra.Command{
		Use:           spec.Name,
		Short:         spec.Short,
		Version:       version(),
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			effective, err := config.Load(cmd.Flags(), environ)
			if err != nil {
				return err
			}
			if err := server.Validate(); err != nil {
				return err
			}
			if spec.Validate != nil {
				if err := spec.Validate(); err != nil {
					return err
				}
			}
			return run(cmd.Context(), spec, server, settings, effective, stderr)
		},
	}
	server.AddFlags(command.Flags())
	settings.addFlags(command.Flags())
	if spec.AddFlags != nil {
		spec.AddFlags(command.Flags())
	}
	command.SetArgs(args)
	command.SetOut(stdout)
	command.SetErr(stderr)
	return command.ExecuteContext(ctx)
}

func run(ctx context.Context, spec Spec, serving rpc.ServerConfig, settings common, effective config.Effective, logs io.Writer) error {
	var level slog.LevelVar
	if err := level.UnmarshalText([]byte(settings.logLevel)); err != nil {
		return fmt.Errorf("--log-level: %w", err)
	}
	log := telemetry.NewLogger(logs, &level)

	instance := ""
	if spec.Instance != nil {
		instance = spec.Instance()
	}
	observed, err := telemetry.Start(ctx, telemetry.Config{Service: spec.Name, Version: version(), Instance: instance, OTLPEndpoint: settings.otlpEndpoint, Logger: log})
	if errors.Is(err, telemetry.ErrEndpoint) {
		return fmt.Errorf("--otlp-endpoint: %w", err)
	}
	if err != nil {
		return err
	}
	defer func() {
		// ctx is over by now; what is left gets its own time.
		flush, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Second)
		defer cancel()
		if flushErr := observed.Shutdown(flush); flushErr != nil {
			log.WarnContext(flush, "spans were lost at the stop", telemetry.KeyError, flushErr)
		}
	}()

	server, err := rpc.NewServer(serving, rpc.Deps{
		Logger: log, Registerer: observed.Registry, Gatherer: observed.Registry, TracerProvider: observed.TracerProvider,
	})
	if err != nil {
		return err
	}
	if settings.portsFile != "" {
		// What an earlier run left there must not be taken for ours. By now that
		// run is over, or it would hold its addresses.
		if err := os.Remove(settings.portsFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
			server.Close()
			return fmt.Errorf("--ports-file: %w", err)
		}
	}
	env := &Env{
		Name: spec.Name, Version: version(), Logger: log, Registry: observed.Registry,
		TracerProvider: observed.TracerProvider, Server: server, Config: effective,
	}
	opsv1.RegisterOpsServiceServer(server.GRPC(), &ops{env: env, level: &level})

	// Loops outlive the server, so that calls in flight find them running; but
	// until there are any, a stop ends what New is doing.
	loopCtx, stopLoops := context.WithCancel(context.WithoutCancel(ctx))
	defer stopLoops()
	alive := context.AfterFunc(ctx, stopLoops)
	loops, err := spec.New(loopCtx, env)
	alive()
	if err != nil {
		server.Close()
		return unlessStopped(ctx, err)
	}
	logConfig(ctx, env)
	if settings.portsFile != "" {
		if err := writePorts(settings.portsFile, server); err != nil {
			server.Close()
			return err
		}
	}

	serveCtx, stopServing := context.WithCancel(ctx)
	defer stopServing()
	// Before the loops begin: one of them may know better.
	server.SetServing("", true)
	var group errgroup.Group
	group.Go(func() error {
		defer stopLoops()
		return server.Run(serveCtx)
	})
	if loops != nil {
		group.Go(func() error {
			defer stopServing()
			return unlessStopped(loopCtx, loops(loopCtx))
		})
	}
	return group.Wait()
}

// unlessStopped returns err, or nil if all it says is that ctx was ended.
func unlessStopped(ctx context.Context, err error) error {
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

func logConfig(ctx context.Context, env *Env) {
	attrs := make([]any, 0, len(env.Config))
	for _, e := range env.Config {
		attrs = append(attrs, slog.String(e.Name, e.Value))
	}
	env.Logger.InfoContext(ctx, "starting", "program", env.Name, "version", env.Version,
		"grpc", env.Server.Addr().String(), "health", env.Server.HealthAddr().String(), "metrics", env.Server.MetricsAddr().String(),
		slog.Group("config", attrs...))
}

// Ports is what a ports file holds: where a running program serves.
type Ports struct {
	GRPC    string `json:"grpc"`
	Health  string `json:"health"`
	Metrics string `json:"metrics"`
}

// writePorts writes the file in one step, so that a reader never sees half.
func writePorts(path string, s *rpc.Server) error {
	raw, err := json.Marshal(Ports{GRPC: s.Addr().String(), Health: s.HealthAddr().String(), Metrics: s.MetricsAddr().String()})
	if err != nil {
		return fmt.Errorf("encode ports: %w", err)
	}
	tmp, err := os.CreateTemp(filepath.Dir(path), ".ports-*")
	if err != nil {
		return fmt.Errorf("--ports-file: %w", err)
	}
	_, err = tmp.Write(append(raw, '\n'))
	if err := errors.Join(err, tmp.Close()); err != nil {
		return errors.Join(fmt.Errorf("--ports-file: %w", err), os.Remove(tmp.Name()))
	}
	if err := os.Rename(tmp.Name(), path); err != nil {
		return fmt.Errorf("--ports-file: %w", err)
	}
	return nil
}

// version is the version of the main module, or of the commit it was built from.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			return s.Value
		}
	}
	return info.Main.Version
}
