package traces

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"time"

	collectorv1 "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	commonv1 "go.opentelemetry.io/proto/otlp/common/v1"
	tracev1 "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
)

// capacity is how many spans a Receiver keeps; older ones are forgotten.
const capacity = 100_000

// maxExport bounds one export request.
const maxExport = 16 << 20

// Receiver is an OTLP/gRPC endpoint that keeps the newest spans in memory.
type Receiver struct {
	collectorv1.UnimplementedTraceServiceServer

	listener net.Listener
	server   *grpc.Server

	mu    sync.Mutex // guards spans and next
	spans []Span     // a ring once it is full
	next  int        // where the ring is written
}

// Listen makes a Receiver that listens on a free loopback port.
func Listen() (*Receiver, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("listen for OTLP: %w", err)
	}
	r := &Receiver{listener: l, server: grpc.NewServer(grpc.MaxRecvMsgSize(maxExport))}
	collectorv1.RegisterTraceServiceServer(r.server, r)
	return r, nil
}

// Addr is host:port of the endpoint.
func (r *Receiver) Addr() string { return r.listener.Addr().String() }

// Run serves until ctx ends.
func (r *Receiver) Run(ctx context.Context) error {
	stop := context.AfterFunc(ctx, r.server.Stop)
	defer stop()
	if err := r.server.Serve(r.listener); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
		return fmt.Errorf("serve OTLP: %w", err)
	}
	return nil
}

// Export is OTLP's one call.
func (r *Receiver) Export(_ context.Context, req *collectorv1.ExportTraceServiceRequest) (*collectorv1.ExportTraceServiceResponse, error) {
	var spans []Span
	for _, resource := range req.GetResourceSpans() {
		service := attribute(resource.GetResource().GetAttributes(), "service.name")
		for _, scope := range resource.GetScopeSpans() {
			for _, s := range scope.GetSpans() {
				spans = append(spans, fromOTLP(service, s))
			}
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range spans {
		if len(r.spans) < capacity {
			r.spans = append(r.spans, s)
			continue
		}
		r.spans[r.next] = s
		r.next = (r.next + 1) % capacity
	}
	return &collectorv1.ExportTraceServiceResponse{}, nil
}

// Trace returns the spans of one trace that have arrived, in no order. A trace
// that is not known has none.
func (r *Receiver) Trace(_ context.Context, traceID string) ([]Span, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var found []Span
	for _, s := range r.spans {
		if s.TraceID == traceID {
			found = append(found, s)
		}
	}
	return found, nil
}

func fromOTLP(service string, s *tracev1.Span) Span {
	attributes := make(map[string]string, len(s.GetAttributes()))
	for _, kv := range s.GetAttributes() {
		attributes[kv.GetKey()] = text(kv.GetValue())
	}
	return Span{
		TraceID:    hex.EncodeToString(s.GetTraceId()),
		SpanID:     hex.EncodeToString(s.GetSpanId()),
		ParentID:   hex.EncodeToString(s.GetParentSpanId()),
		Service:    service,
		Name:       s.GetName(),
		Start:      unixNano(s.GetStartTimeUnixNano()),
		End:        unixNano(s.GetEndTimeUnixNano()),
		Failed:     s.GetStatus().GetCode() == tracev1.Status_STATUS_CODE_ERROR,
		Attributes: attributes,
	}
}

func unixNano(n uint64) time.Time { return time.Unix(0, int64(n)) }

func attribute(kvs []*commonv1.KeyValue, key string) string {
	for _, kv := range kvs {
		if kv.GetKey() == key {
			return text(kv.GetValue())
		}
	}
	return ""
}

func text(v *commonv1.AnyValue) string {
	switch v := v.GetValue().(type) {
	case *commonv1.AnyValue_StringValue:
		return v.StringValue
	case *commonv1.AnyValue_IntValue:
		return strconv.FormatInt(v.IntValue, 10)
	case *commonv1.AnyValue_BoolValue:
		return strconv.FormatBool(v.BoolValue)
	case *commonv1.AnyValue_DoubleValue:
		return strconv.FormatFloat(v.DoubleValue, 'g', -1, 64)
	case nil:
		return ""
	default:
		return fmt.Sprint(v)
	}
}
