package telemetry

import (
	"context"
	"io"
	"log/slog"

	"go.opentelemetry.io/otel/trace"
)

// Keys of log attributes, shared by all programs so that one search finds all.
const (
	KeyNode       = "node"
	KeyInstance   = "instance_id"
	KeyENI        = "eni"
	KeySubnet     = "subnet"
	KeyAddress    = "address"
	KeyPrefix     = "prefix"
	KeyNumber     = "number"
	KeyOwner      = "owner"
	KeySession    = "session"
	KeyReason     = "reason"
	KeyEpoch      = "epoch"
	KeyGeneration = "generation"
	KeyRevision   = "revision"
	KeyAction     = "action"
	KeyError      = "error"
)

// NewLogger returns a logger that writes one JSON object a line to w, with the
// ids of the trace and span in the context (inside the group, if the logger has
// one open). level may be changed at any time.
func NewLogger(w io.Writer, level *slog.LevelVar) *slog.Logger {
	return slog.New(traced{slog.NewJSONHandler(w, &slog.HandlerOptions{Level: level})})
}

// traced adds trace ids from the context to every record.
type traced struct{ slog.Handler }

func (h traced) Handle(ctx context.Context, record slog.Record) error {
	if span := trace.SpanContextFromContext(ctx); span.IsValid() {
		record = record.Clone()
		record.AddAttrs(slog.String("trace_id", span.TraceID().String()), slog.String("span_id", span.SpanID().String()))
	}
	return h.Handler.Handle(ctx, record)
}

func (h traced) WithAttrs(attrs []slog.Attr) slog.Handler {
	return traced{h.Handler.WithAttrs(attrs)}
}

func (h traced) WithGroup(name string) slog.Handler {
	return traced{h.Handler.WithGroup(name)}
}
