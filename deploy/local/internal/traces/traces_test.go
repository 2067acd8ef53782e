package traces_test

import (
	"context"
	"encoding/hex"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	collectorv1 "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	commonv1 "go.opentelemetry.io/proto/otlp/common/v1"
	resourcev1 "go.opentelemetry.io/proto/otlp/resource/v1"
	tracev1 "go.opentelemetry.io/proto/otlp/trace/v1"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/eniplane/eniplane/deploy/local/internal/traces"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestTree(t *testing.T) {
	at := func(n int) time.Time { return time.Unix(int64(n), 0) }
	span := func(id, parent string, start int) traces.Span {
		return traces.Span{SpanID: id, ParentID: parent, Start: at(start)}
	}
	for _, tc := range []struct {
		name  string
		spans []traces.Span
		want  []string
	}{
		{"empty", nil, nil},
		{"children by start", []traces.Span{span("c", "a", 3), span("b", "a", 2), span("a", "", 1)}, []string{"0a", "1b", "1c"}},
		{"below each other", []traces.Span{span("c", "b", 3), span("d", "a", 4), span("b", "a", 2), span("a", "", 1)}, []string{"0a", "1b", "2c", "1d"}},
		{"parent not there", []traces.Span{span("b", "x", 2), span("a", "", 1)}, []string{"0a", "0b"}},
		{"own parent", []traces.Span{span("a", "a", 1)}, []string{"0a"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var got []string
			for _, n := range traces.Tree(tc.spans) {
				got = append(got, fmt.Sprint(n.Depth, n.SpanID))
			}
			if d := cmp.Diff(tc.want, got); d != "" {
				t.Error(d)
			}
		})
	}
}

func TestReceiver(t *testing.T) {
	r, err := traces.Listen()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	conn, err := grpc.NewClient(r.Addr(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()

	trace := slices.Repeat([]byte{0xab}, 16)
	_, err = collectorv1.NewTraceServiceClient(conn).Export(t.Context(), &collectorv1.ExportTraceServiceRequest{
		ResourceSpans: []*tracev1.ResourceSpans{{
			Resource: &resourcev1.Resource{Attributes: []*commonv1.KeyValue{stringAttribute("service.name", "agent")}},
			ScopeSpans: []*tracev1.ScopeSpans{{Spans: []*tracev1.Span{
				{
					TraceId: trace, SpanId: []byte{1, 2, 3, 4, 5, 6, 7, 8}, ParentSpanId: []byte{8, 7, 6, 5, 4, 3, 2, 1},
					Name: "AllocateIP", StartTimeUnixNano: 1_000_000_000, EndTimeUnixNano: 2_000_000_000,
					Status: &tracev1.Status{Code: tracev1.Status_STATUS_CODE_ERROR},
					Attributes: []*commonv1.KeyValue{
						stringAttribute("rpc.system", "grpc"),
						{Key: "n", Value: &commonv1.AnyValue{Value: &commonv1.AnyValue_IntValue{IntValue: 7}}},
						{Key: "ok", Value: &commonv1.AnyValue{Value: &commonv1.AnyValue_BoolValue{BoolValue: true}}},
						{Key: "half", Value: &commonv1.AnyValue{Value: &commonv1.AnyValue_DoubleValue{DoubleValue: 0.5}}},
						{Key: "none"},
					},
				},
				{TraceId: slices.Repeat([]byte{0xcd}, 16), SpanId: []byte{1}, Name: "other"},
			}}},
		}},
	})
	if err != nil {
		t.Fatal(err)
	}
	got, err := r.Trace(t.Context(), hex.EncodeToString(trace))
	if err != nil {
		t.Fatal(err)
	}
	want := []traces.Span{{
		TraceID: "abababababababababababababababab", SpanID: "0102030405060708", ParentID: "0807060504030201",
		Service: "agent", Name: "AllocateIP", Start: time.Unix(1, 0), End: time.Unix(2, 0), Failed: true,
		Attributes: map[string]string{"rpc.system": "grpc", "n": "7", "ok": "true", "half": "0.5", "none": ""},
	}}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if got, err := r.Trace(t.Context(), "00"); err != nil || len(got) != 0 {
		t.Errorf("unknown trace: %v, %v", got, err)
	}
}

func TestReceiverForgetsTheOldest(t *testing.T) {
	r, err := traces.Listen()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := r.Run(ctx); err != nil {
		t.Fatal(err)
	}
	export := func(trace byte, n int) {
		spans := make([]*tracev1.Span, n)
		for i := range spans {
			spans[i] = &tracev1.Span{TraceId: []byte{trace}, SpanId: []byte{1}}
		}
		req := &collectorv1.ExportTraceServiceRequest{ResourceSpans: []*tracev1.ResourceSpans{{ScopeSpans: []*tracev1.ScopeSpans{{Spans: spans}}}}}
		if _, err := r.Export(t.Context(), req); err != nil {
			t.Fatal(err)
		}
	}
	count := func(trace string) int {
		spans, err := r.Trace(t.Context(), trace)
		if err != nil {
			t.Fatal(err)
		}
		return len(spans)
	}
	export(1, 10)
	export(2, 99_990)
	if got := count("01"); got != 10 {
		t.Errorf("%d of 10 kept before it is full", got)
	}
	export(3, 4)
	if got := count("01"); got != 6 {
		t.Errorf("%d of the oldest kept, want 6", got)
	}
	if got := count("03"); got != 4 {
		t.Errorf("%d of the newest kept, want 4", got)
	}
}

func TestJaeger(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/api/traces/ab":
			// Shortened from what Jaeger 1.76 answers.
			_, _ = w.Write([]byte(`{"data":[{"traceID":"ab","spans":[
				{"traceID":"ab","spanID":"01","operationName":"AllocateIP","references":[],"startTime":1000000,"duration":500,"tags":[{"key":"n","type":"int64","value":7}],"processID":"p1"},
				{"traceID":"ab","spanID":"02","operationName":"EnsureAddresses","references":[{"refType":"CHILD_OF","traceID":"ab","spanID":"01"},{"refType":"FOLLOWS_FROM","traceID":"cd","spanID":"09"}],"startTime":1000100,"duration":100,"tags":[{"key":"error","type":"bool","value":true}],"processID":"p2"}
			],"processes":{"p1":{"serviceName":"agent"},"p2":{"serviceName":"eni-allocator"}}}],"total":0,"errors":null}`))
		case "/api/traces/cd":
			http.Error(w, `{"data":null,"errors":[{"code":404,"msg":"trace not found"}]}`, http.StatusNotFound)
		default:
			http.Error(w, "no", http.StatusInternalServerError)
		}
	}))
	defer server.Close()
	defer http.DefaultClient.CloseIdleConnections()
	j := traces.NewJaeger(server.URL)

	got, err := j.Trace(t.Context(), "ab")
	if err != nil {
		t.Fatal(err)
	}
	want := []traces.Span{
		{TraceID: "ab", SpanID: "01", Service: "agent", Name: "AllocateIP", Start: time.UnixMicro(1000000), End: time.UnixMicro(1000500), Attributes: map[string]string{"n": "7"}},
		{TraceID: "ab", SpanID: "02", ParentID: "01", Service: "eni-allocator", Name: "EnsureAddresses", Start: time.UnixMicro(1000100), End: time.UnixMicro(1000200), Failed: true, Attributes: map[string]string{"error": "true"}},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if got, err := j.Trace(t.Context(), "cd"); err != nil || len(got) != 0 {
		t.Errorf("unknown trace: %v, %v", got, err)
	}
	if _, err := j.Trace(t.Context(), "ef"); err == nil {
		t.Error("no error for a server error")
	}
}

func stringAttribute(key, value string) *commonv1.KeyValue {
	return &commonv1.KeyValue{Key: key, Value: &commonv1.AnyValue{Value: &commonv1.AnyValue_StringValue{StringValue: value}}}
}
