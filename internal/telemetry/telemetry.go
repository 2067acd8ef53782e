// Package telemetry is the traces, metrics and logs of a program. What is worth
// tracing, counting or logging does not belong here.
package telemetry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	semconv "go.opentelemetry.io/otel/semconv/v1.34.0"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
)

// ErrEndpoint is returned by Start for an endpoint that is not of the form
// http://host:port or https://host:port.
var ErrEndpoint = errors.New("trace receiver is not http://host:port or https://host:port")

// Config is where telemetry goes.
type Config struct {
	// Service is the program's name on its spans.
	Service string
	// Version is the program's version on its spans.
	Version string
	// Instance tells several processes of one service apart, such as a node
	// name. Empty means that there is one.
	Instance string
	// OTLPEndpoint is the URL of an OTLP gRPC receiver, such as
	// http://127.0.0.1:4317. Empty means what the standard OTEL_EXPORTER_OTLP_*
	// variables say; if they say nothing either, nothing is traced.
	OTLPEndpoint string
	// Logger gets what goes wrong when spans are exported. Nil means that nobody
	// wants to know.
	Logger *slog.Logger
}

// Telemetry is what a program traces and counts with.
type Telemetry struct {
	// TracerProvider makes tracers; one that records nothing if no receiver is
	// configured.
	TracerProvider trace.TracerProvider
	// Registry holds the program's metrics.
	Registry *prometheus.Registry
	shutdown func(context.Context) error
}

// Start sets up telemetry. It never waits for a receiver: spans are exported in
// the background, and dropped when the receiver is away for long. It sets the
// process-wide propagator to W3C trace context and, with a receiver, the
// process-wide error handler of OpenTelemetry. The caller calls Shutdown.
// ErrEndpoint says that the endpoint is no URL.
func Start(ctx context.Context, config Config) (*Telemetry, error) {
	registry := prometheus.NewRegistry()
	for _, c := range []prometheus.Collector{collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{})} {
		if err := registry.Register(c); err != nil {
			return nil, fmt.Errorf("register runtime metrics: %w", err)
		}
	}
	otel.SetTextMapPropagator(propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{}))

	t := &Telemetry{TracerProvider: noop.NewTracerProvider(), Registry: registry, shutdown: func(context.Context) error { return nil }}
	if config.OTLPEndpoint == "" && os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT") == "" && os.Getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") == "" {
		return t, nil
	}

	var options []otlptracegrpc.Option
	if config.OTLPEndpoint != "" {
		if err := validateEndpoint(config.OTLPEndpoint); err != nil {
			return nil, err
		}
		options = append(options, otlptracegrpc.WithEndpointURL(config.OTLPEndpoint))
	}
	logger := config.Logger
	if logger == nil {
		logger = slog.New(slog.DiscardHandler)
	}
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) {
		logger.WarnContext(context.WithoutCancel(ctx), "tracing is disturbed", KeyError, err)
	}))
	exporter, err := otlptracegrpc.New(ctx, options...)
	if err != nil {
		return nil, fmt.Errorf("prepare trace exporter: %w", err)
	}
	attributes := []resource.Option{
		resource.WithAttributes(semconv.ServiceName(config.Service), semconv.ServiceVersion(config.Version)),
		resource.WithFromEnv(),
	}
	if config.Instance != "" {
		attributes = append(attributes, resource.WithAttributes(semconv.ServiceInstanceID(config.Instance)))
	}
	described, err := resource.New(ctx, attributes...)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("describe the process: %w", err), exporter.Shutdown(ctx))
	}
	// The sampler and the batch sizes follow the standard OTEL_* variables.
	provider := sdktrace.NewTracerProvider(sdktrace.WithBatcher(exporter), sdktrace.WithResource(described))
	t.TracerProvider = provider
	t.shutdown = func(ctx context.Context) error {
		// The provider gives up when ctx ends, but leaves an export running that
		// still waits for its receiver: the exporter ends that one.
		return errors.Join(provider.Shutdown(ctx), exporter.Shutdown(ctx))
	}
	return t, nil
}

// validateEndpoint refuses what the exporter would replace by its default
// without a word.
func validateEndpoint(endpoint string) error {
	u, err := url.Parse(endpoint)
	if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
		return fmt.Errorf("%w: %q", ErrEndpoint, endpoint)
	}
	return nil
}

// Shutdown flushes what is not exported yet, within ctx.
func (t *Telemetry) Shutdown(ctx context.Context) error { return t.shutdown(ctx) }
