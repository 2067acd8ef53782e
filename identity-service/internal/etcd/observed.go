package etcd

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
)

// Observed is a KV with a span and a duration for every call.
type Observed struct {
	kv      KV
	tracer  trace.Tracer
	seconds *prometheus.HistogramVec
}

// Observe decorates a KV. It registers its metric.
func Observe(kv KV, provider trace.TracerProvider, registerer prometheus.Registerer) (*Observed, error) {
	seconds := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "eniplane_identity_store_seconds",
		Help:    "Duration of calls to etcd by kind and outcome: ok, lost (a guard did not hold), error.",
		Buckets: prometheus.ExponentialBuckets(0.0001, 2, 16),
	}, []string{"call", "outcome"})
	if err := registerer.Register(seconds); err != nil {
		return nil, err
	}
	return &Observed{kv: kv, tracer: provider.Tracer("github.com/eniplane/eniplane/identity-service/internal/etcd"), seconds: seconds}, nil
}

func (o *Observed) start(ctx context.Context, call string) (context.Context, func(outcome string, err error)) {
	begin := time.Now()
	ctx, span := o.tracer.Start(ctx, "etcd "+call, trace.WithSpanKind(trace.SpanKindClient),
		trace.WithAttributes(attribute.String("db.system", "etcd")))
	return ctx, func(outcome string, err error) {
		if err != nil {
			outcome = "error"
			span.SetStatus(codes.Error, "")
			span.RecordError(err)
		}
		span.SetAttributes(attribute.String("eniplane.outcome", outcome))
		span.End()
		o.seconds.WithLabelValues(call, outcome).Observe(time.Since(begin).Seconds())
	}
}

// Get reads.
func (o *Observed) Get(ctx context.Context, key string, opts ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	ctx, end := o.start(ctx, "get")
	resp, err := o.kv.Get(ctx, key, opts...)
	end("ok", err)
	return resp, err
}

// Txn begins a transaction; its duration is that of Commit.
func (o *Observed) Txn(ctx context.Context) clientv3.Txn {
	ctx, end := o.start(ctx, "commit")
	return &observedTxn{Txn: o.kv.Txn(ctx), end: end}
}

type observedTxn struct {
	clientv3.Txn
	end func(string, error)
}

func (t *observedTxn) If(cs ...clientv3.Cmp) clientv3.Txn   { t.Txn = t.Txn.If(cs...); return t }
func (t *observedTxn) Then(ops ...clientv3.Op) clientv3.Txn { t.Txn = t.Txn.Then(ops...); return t }
func (t *observedTxn) Else(ops ...clientv3.Op) clientv3.Txn { t.Txn = t.Txn.Else(ops...); return t }

func (t *observedTxn) Commit() (*clientv3.TxnResponse, error) {
	resp, err := t.Txn.Commit()
	outcome := "ok"
	if err == nil && !resp.Succeeded {
		outcome = "lost"
	}
	t.end(outcome, err)
	return resp, err
}
