// Package fake has the services that an agent calls, in memory and with knobs for
// failure, for tests and for the bench. They keep the contracts that an agent can
// notice, and nothing more.
package fake

import (
	"fmt"
	"net"
	"os"
	"sync"

	"google.golang.org/grpc"
)

// Endpoint serves gRPC on one unix socket and can go away and come back.
type Endpoint struct {
	path     string
	register func(grpc.ServiceRegistrar)

	mu     sync.Mutex // guards server
	server *grpc.Server
	done   sync.WaitGroup
}

// NewEndpoint returns an endpoint at a path of at most 100 bytes. It does not
// serve before Start.
func NewEndpoint(path string, register func(grpc.ServiceRegistrar)) *Endpoint {
	return &Endpoint{path: path, register: register}
}

// Target is what to dial.
func (e *Endpoint) Target() string { return "unix://" + e.path }

// Start serves; again after Stop.
func (e *Endpoint) Start() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.server != nil {
		return nil
	}
	if err := os.Remove(e.path); err != nil && !os.IsNotExist(err) {
		return fmt.Errorf("clear the socket: %w", err)
	}
	l, err := net.Listen("unix", e.path)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	server := grpc.NewServer(grpc.MaxRecvMsgSize(32 << 20))
	e.register(server)
	e.server = server
	e.done.Go(func() { _ = server.Serve(l) }) // ends with Stop
	return nil
}

// Stop breaks every call and serves no more.
func (e *Endpoint) Stop() {
	e.mu.Lock()
	server := e.server
	e.server = nil
	e.mu.Unlock()
	if server != nil {
		server.Stop()
	}
	e.done.Wait()
}
