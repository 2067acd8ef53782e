package program_test

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"net"
	"strings"
	"sync"
	"testing"

	collectorv1 "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	tracev1 "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"

	opsv1 "github.com/eniplane/eniplane/gen/eniplane/ops/v1"
	"github.com/eniplane/eniplane/internal/rpc"
	"github.com/eniplane/eniplane/internal/telemetry"
)

// receiver keeps the spans that it is sent.
type receiver struct {
	collectorv1.UnimplementedTraceServiceServer
	mu    sync.Mutex // guards spans
	spans map[string][]*tracev1.Span
}

func (r *receiver) Export(_ context.Context, req *collectorv1.ExportTraceServiceRequest) (*collectorv1.ExportTraceServiceResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, rs := range req.GetResourceSpans() {
		service := ""
		for _, a := range rs.GetResource().GetAttributes() {
			if a.GetKey() == "service.name" {
				service = a.GetValue().GetStringValue()
			}
		}
		for _, ss := range rs.GetScopeSpans() {
			r.spans[service] = append(r.spans[service], ss.GetSpans()...)
		}
	}
	return &collectorv1.ExportTraceServiceResponse{}, nil
}

func receive(t *testing.T) (*receiver, string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r, server, done := &receiver{spans: map[string][]*tracev1.Span{}}, grpc.NewServer(), make(chan error, 1)
	collectorv1.RegisterTraceServiceServer(server, r)
	go func() { done <- server.Serve(l) }()
	t.Cleanup(func() {
		server.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return r, "http://" + l.Addr().String()
}

// One trace crosses both processes: the caller's span is the parent of the
// server's, the log line of the call carries their trace id, and all is flushed
// when both have stopped.
func TestOneTraceFromCallerToLog(t *testing.T) {
	received, endpoint := receive(t)
	ports, logs, stop := launch(t, spec(), nil, "--otlp-endpoint="+endpoint, "--log-level=debug")
	caller, err := telemetry.Start(t.Context(), telemetry.Config{Service: "caller", OTLPEndpoint: endpoint})
	if err != nil {
		t.Fatal(err)
	}
	conn, err := rpc.Dial(ports.GRPC, rpc.ClientConfig{}, rpc.ClientDeps{TracerProvider: caller.TracerProvider})
	if err != nil {
		t.Fatal(err)
	}
	ctx, span := caller.TracerProvider.Tracer("test").Start(t.Context(), "question")
	if _, err := opsv1.NewOpsServiceClient(conn).GetConfig(ctx, &opsv1.GetConfigRequest{}); err != nil {
		t.Fatal(err)
	}
	span.End()
	if err := conn.Close(); err != nil {
		t.Error(err)
	}
	if err := caller.Shutdown(t.Context()); err != nil {
		t.Error(err)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}

	traceID := span.SpanContext().TraceID()
	received.mu.Lock()
	defer received.mu.Unlock()
	ids := map[string]bool{}
	for _, s := range received.spans["caller"] {
		ids[hex.EncodeToString(s.GetSpanId())] = true
	}
	found := false
	for _, s := range received.spans["tester"] {
		if s.GetName() == "eniplane.ops.v1.OpsService/GetConfig" {
			found = hex.EncodeToString(s.GetTraceId()) == traceID.String() && ids[hex.EncodeToString(s.GetParentSpanId())]
		}
	}
	if !found {
		t.Errorf("no span of the server below one of the caller: %v", received.spans)
	}

	logged := false
	for line := range strings.Lines(logs.String()) {
		var record map[string]any
		if err := json.Unmarshal([]byte(line), &record); err != nil {
			t.Errorf("the log has a line that is no JSON: %q", line)
			continue
		}
		logged = logged || record["grpc.method"] == "GetConfig" && record["trace_id"] == traceID.String()
	}
	if !logged {
		t.Errorf("no log line of the call with trace id %s:\n%s", traceID, logs)
	}
}
