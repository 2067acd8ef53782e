package rpc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"buf.build/go/protovalidate"
	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/logging"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/recovery"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"
)

// Deps are what a server needs from its program. Auth may be nil: then every
// call is let in. The rest is required.
type Deps struct {
	Logger         *slog.Logger
	Registerer     prometheus.Registerer
	Gatherer       prometheus.Gatherer
	TracerProvider trace.TracerProvider
	Auth           AuthFunc
}

// Server is a gRPC server with health and metrics on ports of their own.
type Server struct {
	gracePeriod  time.Duration
	grpc         *grpc.Server
	counts       *grpcprom.ServerMetrics
	health       *health.Server
	probe        *grpc.Server
	metrics      *http.Server
	grpcListener net.Listener
	probeL       net.Listener
	metricsL     net.Listener
	// stopping is over once a stop has begun; stop begins it.
	stopping context.Context
	stop     context.CancelFunc
}

// lastMoment is how long handlers may take to return once their contexts have
// been ended.
const lastMoment = time.Second

// NewServer opens the three listeners and prepares a server on them; the caller
// registers services on GRPC and calls Run, which closes them, or Close. The
// server reports NOT_SERVING until SetServing. An error of a listener names its
// flag.
func NewServer(config ServerConfig, deps Deps) (*Server, error) {
	if err := config.Validate(); err != nil {
		return nil, err
	}
	config = config.withDefaults()
	validator, err := protovalidate.New()
	if err != nil {
		return nil, fmt.Errorf("prepare validation: %w", err)
	}
	seconds := prometheus.ExponentialBuckets(0.0005, 2, 15)
	counts := grpcprom.NewServerMetrics(grpcprom.WithServerHandlingTimeHistogram(grpcprom.WithHistogramBuckets(seconds)))
	if err := deps.Registerer.Register(counts); err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}

	s := &Server{gracePeriod: config.GracePeriod, counts: counts, health: health.NewServer()}
	if err := s.listen(config); err != nil {
		deps.Registerer.Unregister(counts)
		s.Close()
		return nil, err
	}
	s.stopping, s.stop = context.WithCancel(context.Background())
	s.grpc = s.newGRPC(config, deps, validator)
	reflection.Register(s.grpc) // Both v1 and v1alpha.

	s.probe = grpc.NewServer()
	healthpb.RegisterHealthServer(s.probe, s.health)
	s.SetServing("", false)

	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(deps.Gatherer, promhttp.HandlerOpts{MaxRequestsInFlight: 16}))
	s.metrics = &http.Server{
		Handler:           mux,
		ReadHeaderTimeout: 5 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       2 * time.Minute,
		ErrorLog:          slog.NewLogLogger(deps.Logger.Handler(), slog.LevelWarn),
	}
	return s, nil
}

// newGRPC returns the server that carries the services, with the interceptors
// of all of them, outermost first.
func (s *Server) newGRPC(config ServerConfig, deps Deps, validator protovalidate.Validator) *grpc.Server {
	logged := []logging.Option{
		logging.WithLogOnEvents(logging.FinishCall),
		logging.WithLevels(level),
		logging.WithDisableLoggingFields("protocol", "grpc.component", "grpc.method_type", "peer.address"),
	}
	auth := deps.Auth
	if auth == nil {
		auth = func(ctx context.Context, _ string) (context.Context, error) { return ctx, nil }
	}
	return grpc.NewServer(
		grpc.StatsHandler(otelgrpc.NewServerHandler(otelgrpc.WithTracerProvider(deps.TracerProvider))),
		grpc.MaxRecvMsgSize(config.MaxRecvBytes),
		grpc.MaxSendMsgSize(maxMessage),
		// Clients ping every 10 s; twice as often is still no attack.
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}),
		grpc.ChainUnaryInterceptor(
			s.counts.UnaryServerInterceptor(),
			logging.UnaryServerInterceptor(logger(deps.Logger), logged...),
			completeUnary,
			authUnary(auth),
			deadline(config.DefaultTimeout),
			validateUnary(validator),
			recovery.UnaryServerInterceptor(recovered(deps.Logger)),
		),
		grpc.ChainStreamInterceptor(
			s.counts.StreamServerInterceptor(),
			logging.StreamServerInterceptor(logger(deps.Logger), logged...),
			completeStream,
			authStream(auth),
			endWith(s.stopping),
			validateStream(validator),
			recovery.StreamServerInterceptor(recovered(deps.Logger)),
		),
	)
}

func (s *Server) listen(config ServerConfig) error {
	for _, l := range []struct {
		flag, address string
		into          *net.Listener
	}{
		{"listen", config.Listen, &s.grpcListener},
		{"health-listen", config.HealthListen, &s.probeL},
		{"metrics-listen", config.MetricsListen, &s.metricsL},
	} {
		opened, err := listen(l.address)
		if err != nil {
			return fmt.Errorf("--%s: %w", l.flag, err)
		}
		*l.into = opened
	}
	return nil
}

// GRPC is where services are registered, before Run.
func (s *Server) GRPC() grpc.ServiceRegistrar { return s.grpc }

// Addr is where the services listen, with the port that was taken.
func (s *Server) Addr() net.Addr { return s.grpcListener.Addr() }

// HealthAddr is where health checks are answered, with the port that was taken.
func (s *Server) HealthAddr() net.Addr { return s.probeL.Addr() }

// MetricsAddr is where /metrics is served, with the port that was taken.
func (s *Server) MetricsAddr() net.Addr { return s.metricsL.Addr() }

// SetServing tells health checks whether a service serves. The empty name is
// the whole program. Once a stop has begun it changes nothing.
func (s *Server) SetServing(service string, ok bool) {
	state := healthpb.HealthCheckResponse_NOT_SERVING
	if ok {
		state = healthpb.HealthCheckResponse_SERVING
	}
	s.health.SetServingStatus(service, state)
}

// Run serves until ctx ends, or until a listener fails. Then it reports
// NOT_SERVING, ends the contexts of streams, which would never end by
// themselves, lets calls finish for the grace period, and cuts off the rest. It
// returns nil after a stop by ctx. It may be called once.
func (s *Server) Run(ctx context.Context) error {
	s.counts.InitializeMetrics(s.grpc) // Every RPC counts from zero.
	group, ctx := errgroup.WithContext(ctx)
	// A stop may come before a server began to serve: that is no failure.
	group.Go(func() error { return unless(grpc.ErrServerStopped, s.grpc.Serve(s.grpcListener)) })
	group.Go(func() error { return unless(grpc.ErrServerStopped, s.probe.Serve(s.probeL)) })
	group.Go(func() error { return unless(http.ErrServerClosed, s.metrics.Serve(s.metricsL)) })
	group.Go(func() error {
		<-ctx.Done()
		s.shutdown()
		return nil
	})
	return group.Wait()
}

// unless returns err, or nil if it is the expected one.
func unless(expected, err error) error {
	if errors.Is(err, expected) {
		return nil
	}
	return err
}

func (s *Server) shutdown() {
	s.health.Shutdown()
	s.stop()
	finished := make(chan struct{})
	go func() {
		s.grpc.GracefulStop()
		close(finished)
	}()
	grace := time.NewTimer(s.gracePeriod)
	defer grace.Stop()
	select {
	case <-finished:
	case <-grace.C:
		// This ends the context of every handler, and most return at once.
		// GracefulStop still waits for one that does not listen; nobody else does.
		s.grpc.Stop()
		last := time.NewTimer(lastMoment)
		defer last.Stop()
		select {
		case <-finished:
		case <-last.C:
		}
	}
	s.probe.Stop()
	_ = s.metrics.Close() // A scrape that is cut off is repeated.
}

// Close releases what a server holds that is never run.
func (s *Server) Close() {
	for _, l := range []net.Listener{s.grpcListener, s.probeL, s.metricsL} {
		if l != nil {
			_ = l.Close() // Nobody is connected yet.
		}
	}
	if s.stop != nil {
		s.stop()
	}
}
