package stack

import (
	"context"
	"fmt"
	"net"
	"net/http"

	"github.com/eniplane/eniplane/deploy/local/internal/traces"
)

// startJaeger starts a Jaeger all-in-one and waits until it answers queries. It
// can not tell which port it took, so its ports are chosen here; should
// somebody take one in between, it ends and is started again on others.
func (s *Stack) startJaeger(ctx context.Context) error {
	const attempts = 3
	var err error
	for range attempts {
		if err = s.tryJaeger(ctx); err == nil || ctx.Err() != nil {
			return err
		}
		s.super.halt(s.jaeger)
	}
	return err
}

func (s *Stack) tryJaeger(ctx context.Context) error {
	ports, err := freeAddresses(7)
	if err != nil {
		return err
	}
	otlp, query := ports[0], ports[1]
	s.jaeger, err = s.super.spawn("jaeger", s.cfg.JaegerBinary, []string{
		"--collector.otlp.grpc.host-port=" + otlp,
		"--query.http-server.host-port=" + query,
		"--collector.otlp.http.host-port=" + ports[2],
		"--query.grpc-server.host-port=" + ports[3],
		"--admin.http.host-port=" + ports[4],
		"--collector.grpc-server.host-port=" + ports[5],
		"--collector.http-server.host-port=" + ports[6],
		// It traces itself otherwise, to a port that nobody listens on, and waits
		// for that at its end.
	}, environment("OTEL_TRACES_SAMPLER=always_off"))
	if err != nil {
		return err
	}
	// Until it is ready, its end is an answer and no failure of the stack.
	s.super.expect(s.jaeger)
	base := "http://" + query
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	err = s.super.poll(ctx, s.jaeger, func() bool {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, base+"/api/services", nil)
		if err != nil {
			return false
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return false
		}
		return resp.Body.Close() == nil && resp.StatusCode == http.StatusOK
	})
	if err != nil {
		return fmt.Errorf("jaeger: %w", err)
	}
	s.super.unexpect(s.jaeger)
	s.traces = traces.NewJaeger(base)
	return s.keep.update(func(r *Record) { r.OTLP, r.Jaeger = otlp, base })
}

// freeAddresses finds loopback addresses that nobody listens on now.
func freeAddresses(n int) ([]string, error) {
	addresses := make([]string, n)
	for i := range addresses {
		l, err := net.Listen("tcp", anyPort)
		if err != nil {
			return nil, err
		}
		// Held until all are chosen, so that they differ.
		defer func() { _ = l.Close() }()
		addresses[i] = l.Addr().String()
	}
	return addresses, nil
}
