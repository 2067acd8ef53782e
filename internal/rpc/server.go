package rpc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"buf.build/go/protovalidate"
	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/logging"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/recovery"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/pflag"
	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"
)

// ServerConfig is where and how a program serves.
type ServerConfig struct {
	// Listen is host:port, or unix:///path for a socket of mode 0600. Port 0
	// takes a free one.
	Listen string
	// HealthListen is host:port of grpc.health.v1, in plain text.
	HealthListen string
	// MetricsListen is host:port of /metrics.
	MetricsListen string
	// MaxRecvBytes bounds one request; zero means 4 MiB.
	MaxRecvBytes int
	// GracePeriod is how long calls may run on after a stop; zero means 10 s.
	GracePeriod time.Duration
	// DefaultTimeout bounds a unary call that has no deadline; zero means 30 s.
	DefaultTimeout time.Duration
}

func (c *ServerConfig) withDefaults() ServerConfig {
	d := *c
	if d.MaxRecvBytes == 0 {
		d.MaxRecvBytes = 4 << 20
	}
	if d.GracePeriod == 0 {
		d.GracePeriod = 10 * time.Second
	}
	if d.DefaultTimeout == 0 {
		d.DefaultTimeout = 30 * time.Second
	}
	return d
}

// AddFlags binds the configuration to flags, with its present values as
// defaults.
func (c *ServerConfig) AddFlags(fs *pflag.FlagSet) {
	*c = c.withDefaults()
	fs.StringVar(&c.Listen, "listen", c.Listen, "address of the gRPC server: host:port, or unix:///path")
	fs.StringVar(&c.HealthListen, "health-listen", c.HealthListen, "host:port of grpc.health.v1, in plain text")
	fs.StringVar(&c.MetricsListen, "metrics-listen", c.MetricsListen, "host:port of /metrics")
	fs.IntVar(&c.MaxRecvBytes, "max-request-bytes", c.MaxRecvBytes, "largest request that is read")
	fs.DurationVar(&c.GracePeriod, "grace-period", c.GracePeriod, "how long calls may run on after a stop")
	fs.DurationVar(&c.DefaultTimeout, "default-timeout", c.DefaultTimeout, "deadline of a unary call that has none")
}

// Validate returns an error that names the flag whose value cannot work.
func (c *ServerConfig) Validate() error {
	for flag, value := range map[string]string{"listen": c.Listen, "health-listen": c.HealthListen, "metrics-listen": c.MetricsListen} {
		if flag == "listen" && strings.HasPrefix(value, unixScheme) {
			if len(value) == len(unixScheme) {
				return fmt.Errorf("--%s: %q names no path", flag, value)
			}
			continue
		}
		if _, _, err := net.SplitHostPort(value); err != nil {
			return fmt.Errorf("--%s: %q is not host:port: %w", flag, value, err)
		}
	}
	if c.MaxRecvBytes < 0 {
		return fmt.Errorf("--max-request-bytes: %d is negative", c.MaxRecvBytes)
	}
	if c.GracePeriod < 0 {
		return fmt.Errorf("--grace-period: %v is negative", c.GracePeriod)
	}
	if c.DefaultTimeout < 0 {
		return fmt.Errorf("--default-timeout: %v is negative", c.DefaultTimeout)
	}
	return nil
}

// Deps are what a server needs from its program. Auth may be nil: then every
// call is let in.
type Deps struct {
	Logger         *slog.Logger
	Registerer     prometheus.Registerer
	Gatherer       prometheus.Gatherer
	TracerProvider trace.TracerProvider
	Auth           AuthFunc
}

// Server is a gRPC server with health and metrics on ports of their own.
type Server struct {
	config  ServerConfig
	logger  *slog.Logger
	grpc    *grpc.Server
	health  *health.Server
	probe   *grpc.Server
	metrics *http.Server
	main    net.Listener
	probeL  net.Listener
	metricL net.Listener
}

const unixScheme = "unix://"

// listen opens a listener for host:port or unix:///path. A socket file that a
// dead process left is replaced; one that answers is not.
func listen(address string) (net.Listener, error) {
	path, isSocket := strings.CutPrefix(address, unixScheme)
	if !isSocket {
		return net.Listen("tcp", address)
	}
	if conn, err := net.DialTimeout("unix", path, time.Second); err == nil {
		_ = conn.Close()
		return nil, fmt.Errorf("listen on %s: another process answers there", path)
	}
	if info, err := os.Lstat(path); err == nil {
		if info.Mode()&os.ModeSocket == 0 {
			return nil, fmt.Errorf("listen on %s: the file is not a socket", path)
		}
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("remove stale socket: %w", err)
		}
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	const ownerOnly = 0o600
	if err := os.Chmod(path, ownerOnly); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// NewServer opens the three listeners and prepares a server on them; the caller
// registers services on GRPC and calls Run, which closes them. The server
// reports NOT_SERVING until SetServing.
func NewServer(config ServerConfig, deps Deps) (*Server, error) {
	if err := config.Validate(); err != nil {
		return nil, err
	}
	config = config.withDefaults()
	validator, err := protovalidate.New()
	if err != nil {
		return nil, fmt.Errorf("prepare validation: %w", err)
	}

	s := &Server{config: config, logger: deps.Logger, health: health.NewServer()}
	for _, l := range []struct {
		address string
		into    *net.Listener
	}{{config.Listen, &s.main}, {config.HealthListen, &s.probeL}, {config.MetricsListen, &s.metricL}} {
		if *l.into, err = listen(l.address); err != nil {
			s.closeListeners()
			return nil, err
		}
	}

	seconds := prometheus.ExponentialBuckets(0.0005, 2, 15)
	metrics := grpcprom.NewServerMetrics(grpcprom.WithServerHandlingTimeHistogram(grpcprom.WithHistogramBuckets(seconds)))
	if err := deps.Registerer.Register(metrics); err != nil {
		s.closeListeners()
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	logged := []logging.Option{logging.WithLogOnEvents(logging.FinishCall), logging.WithLevels(level), logging.WithDisableLoggingFields("protocol", "grpc.component", "grpc.method_type", "peer.address")}
	auth := deps.Auth
	if auth == nil {
		auth = func(ctx context.Context, _ string) (context.Context, error) { return ctx, nil }
	}
	s.grpc = grpc.NewServer(
		grpc.StatsHandler(otelgrpc.NewServerHandler(otelgrpc.WithTracerProvider(deps.TracerProvider))),
		grpc.MaxRecvMsgSize(config.MaxRecvBytes),
		grpc.MaxSendMsgSize(maxMessage),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}),
		grpc.ChainUnaryInterceptor(
			metrics.UnaryServerInterceptor(),
			logging.UnaryServerInterceptor(logger(deps.Logger), logged...),
			authUnary(auth),
			deadline(config.DefaultTimeout),
			validateUnary(validator),
			completeUnary,
			recovery.UnaryServerInterceptor(recovered(deps.Logger)),
		),
		grpc.ChainStreamInterceptor(
			metrics.StreamServerInterceptor(),
			logging.StreamServerInterceptor(logger(deps.Logger), logged...),
			authStream(auth),
			validateStream(validator),
			completeStream,
			recovery.StreamServerInterceptor(recovered(deps.Logger)),
		),
	)
	reflection.Register(s.grpc) // Both v1 and v1alpha.

	s.probe = grpc.NewServer()
	healthpb.RegisterHealthServer(s.probe, s.health)
	s.SetServing("", false)

	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(deps.Gatherer, promhttp.HandlerOpts{MaxRequestsInFlight: 16}))
	s.metrics = &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	return s, nil
}

func (s *Server) closeListeners() {
	for _, l := range []net.Listener{s.main, s.probeL, s.metricL} {
		if l != nil {
			_ = l.Close()
		}
	}
}

// GRPC is where services are registered, before Run.
func (s *Server) GRPC() grpc.ServiceRegistrar { return s.grpc }

// Addr, HealthAddr and MetricsAddr are where the server listens, with the ports
// that were taken.
func (s *Server) Addr() net.Addr { return s.main.Addr() }

// HealthAddr is where health checks are answered.
func (s *Server) HealthAddr() net.Addr { return s.probeL.Addr() }

// MetricsAddr is where /metrics is served.
func (s *Server) MetricsAddr() net.Addr { return s.metricL.Addr() }

// SetServing tells health checks whether a service serves. The empty name is
// the whole program.
func (s *Server) SetServing(service string, ok bool) {
	state := healthpb.HealthCheckResponse_NOT_SERVING
	if ok {
		state = healthpb.HealthCheckResponse_SERVING
	}
	s.health.SetServingStatus(service, state)
}

// Run serves until ctx ends, or until a listener fails. Then it reports
// NOT_SERVING, lets calls finish for the grace period, and ends the rest. It
// returns nil after a stop by ctx.
func (s *Server) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return s.grpc.Serve(s.main) })
	group.Go(func() error { return s.probe.Serve(s.probeL) })
	group.Go(func() error {
		if err := s.metrics.Serve(s.metricL); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	group.Go(func() error {
		<-ctx.Done()
		s.stop()
		return nil
	})
	return group.Wait()
}

func (s *Server) stop() {
	s.health.Shutdown()
	finished := make(chan struct{})
	go func() {
		s.grpc.GracefulStop()
		close(finished)
	}()
	grace := time.NewTimer(s.config.GracePeriod)
	defer grace.Stop()
	select {
	case <-finished:
	case <-grace.C:
		s.grpc.Stop() // Streams of watchers never end by themselves.
		<-finished
	}
	s.probe.Stop()
	_ = s.metrics.Close() // A scrape that is cut off is repeated.
}

// Close releases the listeners of a server that is never run.
func (s *Server) Close() { s.closeListeners() }
