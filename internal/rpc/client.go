package rpc

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
)

// maxMessage bounds one answer: SetHolding takes and gives up to 16 MiB.
const maxMessage = 20 << 20

// Every RPC of eniplane is idempotent, so a call that did not get through is
// repeated as itself. Streams are reopened by whoever reads them.
const serviceConfig = `{
	"loadBalancingConfig": [{"round_robin": {}}],
	"methodConfig": [{
		"name": [{}],
		"waitForReady": false,
		"retryPolicy": {
			"maxAttempts": 4,
			"initialBackoff": "0.1s",
			"maxBackoff": "2s",
			"backoffMultiplier": 2,
			"retryableStatusCodes": ["UNAVAILABLE"]
		}
	}]
}`

// reconnect is how soon a lost server is tried again. gRPC's own limit of two
// minutes would leave a node without its services long after they are back.
var reconnect = backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 3 * time.Second}

// ClientConfig is how a program calls another one.
type ClientConfig struct {
	// Timeout bounds a unary call whose context has no deadline; zero means 10 s.
	Timeout time.Duration
}

// ClientDeps are what a client needs from its program. Registerer may be nil:
// then there are no client metrics.
type ClientDeps struct {
	TracerProvider trace.TracerProvider
	Registerer     prometheus.Registerer
}

// Dial prepares a connection to target: host:port, several of them separated by
// commas (calls go round), or unix:///path. It connects when first used, and
// again whenever it must; it never blocks. The caller closes it.
func Dial(target string, config ClientConfig, deps ClientDeps) (*grpc.ClientConn, error) {
	if config.Timeout == 0 {
		config.Timeout = 10 * time.Second
	}
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultServiceConfig(serviceConfig),
		grpc.WithStatsHandler(otelgrpc.NewClientHandler(otelgrpc.WithTracerProvider(deps.TracerProvider))),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 5 * time.Second, PermitWithoutStream: true}),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: reconnect, MinConnectTimeout: 5 * time.Second}),
		grpc.WithDefaultCallOptions(
			grpc.MaxCallRecvMsgSize(maxMessage),
			grpc.MaxCallSendMsgSize(maxMessage),
			grpc.MaxRetryRPCBufferSize(maxMessage), // What is not kept cannot be sent again.
		),
	}
	unary := []grpc.UnaryClientInterceptor{clientDeadline(config.Timeout)}
	var stream []grpc.StreamClientInterceptor
	if deps.Registerer != nil {
		metrics, err := clientMetrics(deps.Registerer)
		if err != nil {
			return nil, err
		}
		unary = append(unary, metrics.UnaryClientInterceptor())
		stream = append(stream, metrics.StreamClientInterceptor())
	}
	options = append(options, grpc.WithChainUnaryInterceptor(unary...), grpc.WithChainStreamInterceptor(stream...))

	if strings.HasPrefix(target, unixScheme) {
		return grpc.NewClient(target, options...)
	}
	var addresses []resolver.Address
	for _, a := range strings.Split(target, ",") {
		a = strings.TrimSpace(a)
		if _, _, err := net.SplitHostPort(a); err != nil {
			return nil, fmt.Errorf("address %q is not host:port: %w", a, err)
		}
		addresses = append(addresses, resolver.Address{Addr: a})
	}
	list := manual.NewBuilderWithScheme("eniplane-static")
	list.InitialState(resolver.State{Addresses: addresses})
	return grpc.NewClient(list.Scheme()+":///"+addresses[0].Addr, append(options, grpc.WithResolvers(list))...)
}

// clientMetrics registers the client metrics once per registry, however many
// connections a program has.
func clientMetrics(registerer prometheus.Registerer) (*grpcprom.ClientMetrics, error) {
	metrics := grpcprom.NewClientMetrics(grpcprom.WithClientHandlingTimeHistogram())
	err := registerer.Register(metrics)
	var already prometheus.AlreadyRegisteredError
	if errors.As(err, &already) {
		if existing, ok := already.ExistingCollector.(*grpcprom.ClientMetrics); ok {
			return existing, nil
		}
	}
	if err != nil {
		return nil, fmt.Errorf("register client metrics: %w", err)
	}
	return metrics, nil
}

func clientDeadline(d time.Duration) grpc.UnaryClientInterceptor {
	return func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		if _, ok := ctx.Deadline(); !ok {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, d)
			defer cancel()
		}
		return invoke(ctx, method, req, reply, cc, opts...)
	}
}
