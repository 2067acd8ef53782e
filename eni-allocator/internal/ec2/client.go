// Package ec2 is the edge to EC2: it asks, converts what EC2 shows to the values
// of package plan, and translates EC2's refusals to a few errors. What to ask for
// and how to react do not belong here.
package ec2

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/aws/retry"
	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/aws-sdk-go-v2/config"
	"github.com/aws/aws-sdk-go-v2/service/ec2"
	"github.com/aws/smithy-go/middleware"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/contrib/instrumentation/github.com/aws/aws-sdk-go-v2/otelaws" //nolint:staticcheck // No longer developed, and nothing else gives these spans.
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/time/rate"
)

// Config says how EC2 is reached.
type Config struct {
	// Region is the AWS region. Empty means what the SDK finds.
	Region string
	// Endpoint is the URL of the API. Empty means what the SDK finds:
	// AWS_ENDPOINT_URL_EC2, or AWS's own.
	Endpoint string
	// CallTimeout bounds one call with its retries; zero means 20 s.
	CallTimeout time.Duration
	// Rate is how many requests are sent per second at most, Burst how many at
	// once. A Rate of zero means no limit.
	Rate  float64
	Burst int
	// PageSize is how many things one answer describes at most: 5 to 1000; zero
	// means 1000.
	PageSize int32
}

// Validate tells what is wrong with c.
func (c Config) Validate() error {
	switch {
	case c.CallTimeout < 0:
		return errors.New("--ec2-timeout: must not be negative")
	case c.Rate < 0:
		return errors.New("--ec2-rate: must not be negative")
	case c.Rate > 0 && c.Burst < 1:
		return errors.New("--ec2-burst: must be at least 1")
	case c.PageSize != 0 && (c.PageSize < 5 || c.PageSize > 1000):
		return errors.New("the page size must be 5 to 1000")
	}
	return nil
}

// Deps are what a Client needs from its program.
type Deps struct {
	TracerProvider trace.TracerProvider
	// Registerer may be nil: then nothing is counted.
	Registerer prometheus.Registerer
	// Leading is asked right before each request that changes something is sent.
	// If it says no, the request is not sent and the call fails with
	// ErrNotLeading. Nil means always yes.
	Leading func() bool
}

// Client talks to EC2. It is safe for concurrent use.
type Client struct {
	api     *ec2.Client
	cfg     Config
	limiter *rate.Limiter
	seconds *prometheus.HistogramVec // nil: nothing is counted
	leading func() bool
	idle    func()
}

// New makes a Client. Credentials are found as the SDK finds them; nothing is
// asked of EC2 yet.
func New(ctx context.Context, cfg Config, deps Deps) (*Client, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.CallTimeout == 0 {
		cfg.CallTimeout = 20 * time.Second
	}
	if cfg.PageSize == 0 {
		cfg.PageSize = 1000
	}
	options := []func(*config.LoadOptions) error{config.WithHTTPClient(awshttp.NewBuildableClient())}
	if cfg.Region != "" {
		options = append(options, config.WithRegion(cfg.Region))
	}
	loaded, err := config.LoadDefaultConfig(ctx, options...)
	if err != nil {
		return nil, fmt.Errorf("configure the AWS SDK: %w", err)
	}
	if loaded.Region == "" {
		return nil, errors.New("--region: is needed where the AWS SDK finds none")
	}
	sdk, ok := loaded.HTTPClient.(*awshttp.BuildableClient)
	if !ok {
		return nil, fmt.Errorf("configure the AWS SDK: its HTTP client is a %T", loaded.HTTPClient)
	}
	httpClient, idle := newHTTPClient(sdk)
	otelaws.AppendMiddlewares(&loaded.APIOptions, otelaws.WithTracerProvider(deps.TracerProvider))

	c := &Client{cfg: cfg, limiter: rate.NewLimiter(rate.Inf, 0), leading: deps.Leading, idle: idle}
	if cfg.Rate > 0 {
		c.limiter = rate.NewLimiter(rate.Limit(cfg.Rate), cfg.Burst)
	}
	if deps.Registerer != nil {
		c.seconds = prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "eniplane_eni_ec2_call_seconds", Help: "Duration of calls to EC2 with their retries, by action and outcome.",
			Buckets: prometheus.ExponentialBuckets(0.005, 2, 13),
		}, []string{"action", "outcome"})
		if err := deps.Registerer.Register(c.seconds); err != nil {
			return nil, fmt.Errorf("register metrics: %w", err)
		}
	}
	c.api = ec2.NewFromConfig(loaded, func(o *ec2.Options) {
		o.HTTPClient = httpClient
		if cfg.Endpoint != "" {
			o.BaseEndpoint = aws.String(cfg.Endpoint)
		}
		// One limiter, ours: the SDK's own retry quota would fight with it.
		o.Retryer = retry.NewStandard(func(s *retry.StandardOptions) {
			s.MaxAttempts = 3
			s.MaxBackoff = 2 * time.Second
			s.RateLimiter = unlimited{}
		})
		o.APIOptions = append(o.APIOptions, c.perAttempt)
	})
	return c, nil
}

// Close closes idle connections.
func (c *Client) Close() { c.idle() }

// unlimited lets the SDK retry as often as its number of attempts allows.
type unlimited struct{}

func (unlimited) GetToken(context.Context, uint) (func() error, error) {
	return func() error { return nil }, nil
}

func (unlimited) AddTokens(uint) error { return nil }

// perAttempt puts the limiter, and for changes the question who leads, before
// every request that is sent, retries included.
func (c *Client) perAttempt(stack *middleware.Stack) error {
	return stack.Finalize.Insert(middleware.FinalizeMiddlewareFunc("eniplane",
		func(ctx context.Context, in middleware.FinalizeInput, next middleware.FinalizeHandler) (middleware.FinalizeOutput, middleware.Metadata, error) {
			if err := c.limiter.Wait(ctx); err != nil {
				return middleware.FinalizeOutput{}, middleware.Metadata{}, fmt.Errorf("wait for the rate limit: %w", err)
			}
			if changes(ctx) && c.leading != nil && !c.leading() {
				return middleware.FinalizeOutput{}, middleware.Metadata{}, ErrNotLeading
			}
			return next.HandleFinalize(ctx, in)
		}), "Retry", middleware.After)
}

type changing struct{}

func changes(ctx context.Context) bool {
	marked, _ := ctx.Value(changing{}).(bool)
	return marked
}

// once keeps the SDK from repeating a call whose repetition is not harmless.
func once(o *ec2.Options) { o.Retryer = aws.NopRetryer{} }

// read makes a call that changes nothing.
func read[I, O any](ctx context.Context, c *Client, action string, f func(context.Context, *I, ...func(*ec2.Options)) (*O, error), in *I) (*O, error) {
	return call(ctx, c, action, f, in)
}

// write makes a call that changes something.
func write[I, O any](ctx context.Context, c *Client, action string, f func(context.Context, *I, ...func(*ec2.Options)) (*O, error), in *I, opts ...func(*ec2.Options)) (*O, error) {
	return call(context.WithValue(ctx, changing{}, true), c, action, f, in, opts...)
}

func call[I, O any](ctx context.Context, c *Client, action string, f func(context.Context, *I, ...func(*ec2.Options)) (*O, error), in *I, opts ...func(*ec2.Options)) (*O, error) {
	bounded, cancel := context.WithTimeout(ctx, c.cfg.CallTimeout)
	defer cancel()
	began := time.Now()
	out, err := f(bounded, in, opts...)
	err = translate(ctx, action, err)
	if c.seconds != nil {
		c.seconds.WithLabelValues(action, outcome(err)).Observe(time.Since(began).Seconds())
	}
	if err != nil {
		return nil, err
	}
	return out, nil
}

// outcome is a metric label: one of few.
func outcome(err error) string {
	switch {
	case err == nil:
		return "ok"
	case errors.Is(err, ErrThrottled):
		return "throttled"
	case errors.Is(err, ErrDenied):
		return "denied"
	case errors.Is(err, ErrUnavailable):
		return "unavailable"
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded), errors.Is(err, ErrNotLeading):
		return "cancelled"
	default:
		return "refused"
	}
}
