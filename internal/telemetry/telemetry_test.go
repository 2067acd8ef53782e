package telemetry_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"testing"
	"time"

	"go.opentelemetry.io/otel/trace"
	"go.uber.org/goleak"

	"github.com/eniplane/eniplane/internal/telemetry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestLogsCarryTheTrace(t *testing.T) {
	var out bytes.Buffer
	var level slog.LevelVar
	log := telemetry.NewLogger(&out, &level).With("a", 1)
	span := trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2}})
	log.InfoContext(trace.ContextWithSpanContext(t.Context(), span), "hello", telemetry.KeyNode, "n")
	log.DebugContext(t.Context(), "hidden")
	var got map[string]any
	if err := json.Unmarshal(out.Bytes(), &got); err != nil {
		t.Fatalf("%v in %q", err, out.String())
	}
	if got["trace_id"] != span.TraceID().String() || got["span_id"] != span.SpanID().String() || got["node"] != "n" {
		t.Errorf("record %v", got)
	}
	out.Reset()
	log.InfoContext(t.Context(), "no span")
	if bytes.Contains(out.Bytes(), []byte("trace_id")) {
		t.Error("a trace id without a trace")
	}
}

func TestNothingIsTracedByDefault(t *testing.T) {
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "")
	t.Setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
	tel, err := telemetry.Start(t.Context(), telemetry.Config{Service: "s"})
	if err != nil {
		t.Fatal(err)
	}
	_, span := tel.TracerProvider.Tracer("t").Start(t.Context(), "x")
	if span.IsRecording() {
		t.Error("a span is recorded")
	}
	if err := tel.Shutdown(t.Context()); err != nil {
		t.Error(err)
	}
}

// A receiver that is not there delays neither a start nor a stop.
func TestUnreachableReceiverBlocksNothing(t *testing.T) {
	var out bytes.Buffer
	var level slog.LevelVar
	begin := time.Now()
	tel, err := telemetry.Start(t.Context(), telemetry.Config{
		Service: "s", OTLPEndpoint: "http://127.0.0.1:1", Logger: telemetry.NewLogger(&out, &level),
	})
	if err != nil {
		t.Fatal(err)
	}
	for range 10_000 { // More than the exporter's queue holds.
		_, span := tel.TracerProvider.Tracer("t").Start(t.Context(), "x")
		if !span.IsRecording() {
			t.Fatal("no span is recorded")
		}
		span.End()
	}
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	if err := tel.Shutdown(ctx); err == nil {
		t.Error("spans that nobody took count as exported")
	}
	if took := time.Since(begin); took > 20*time.Second {
		t.Errorf("start, spans and stop took %v", took)
	}
}

func TestEndpointsThatAreNone(t *testing.T) {
	for _, endpoint := range []string{"127.0.0.1:4317", "localhost", "http://", "grpc://h:1", "http://a b:1"} {
		if _, err := telemetry.Start(t.Context(), telemetry.Config{Service: "s", OTLPEndpoint: endpoint}); !errors.Is(err, telemetry.ErrEndpoint) {
			t.Errorf("%q: error %v, want ErrEndpoint", endpoint, err)
		}
	}
}
