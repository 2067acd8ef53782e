package ec2sim

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// headerTimeout bounds how long a client may take to send its request line and
// headers.
const headerTimeout = 10 * time.Second

// Endpoints says where a Server listens.
type Endpoints struct {
	// EC2 is the base URL of the EC2 API: the value for AWS_ENDPOINT_URL_EC2.
	EC2 string `json:"ec2"`
	// IMDS is the base URL of each instance's metadata service: the value for
	// AWS_EC2_METADATA_SERVICE_ENDPOINT. Terminated instances have none.
	IMDS map[InstanceID]string `json:"imds"`
}

// Server is a Simulator that listens.
type Server struct {
	*Simulator
	cfg       Config
	endpoints atomic.Pointer[Endpoints] // written by the keeper only
	requests  chan chan struct{}        // asks the keeper to look at the instances
	stop      chan struct{}             // closed by Close
	closeOnce sync.Once
	failed    chan error // the first failure to listen or serve
	wg        sync.WaitGroup
}

// Start makes a Simulator and listens for it. The caller must Close the Server.
func Start(cfg Config) (*Server, error) {
	if cfg.Latency == 0 {
		cfg.Latency = DefaultLatency
	}
	sim, err := build(cfg, wait(cfg.Latency))
	if err != nil {
		return nil, err
	}
	if cfg.Listen == "" {
		cfg.Listen = "127.0.0.1:0"
	}
	if cfg.IMDSHost == "" {
		cfg.IMDSHost = "127.0.0.1"
	}
	listener, err := net.Listen("tcp", cfg.Listen)
	if err != nil {
		return nil, fmt.Errorf("listen for EC2: %w", err)
	}
	s := &Server{
		Simulator: sim, cfg: cfg, requests: make(chan chan struct{}), stop: make(chan struct{}), failed: make(chan error, 1),
	}
	s.endpoints.Store(&Endpoints{EC2: "http://" + listener.Addr().String(), IMDS: map[InstanceID]string{}})
	sim.changed = s.refresh
	s.wg.Go(s.keep)
	server := s.serve(listener, s.routes(s.Endpoints))
	s.wg.Go(func() {
		<-s.stop
		_ = server.Close() // closes the listener, which was open
	})
	if !s.ask() {
		// The keeper has not been stopped, so it has answered; what it could not
		// do is in failed.
		panic("ec2sim: keeper gone before Close")
	}
	select {
	case err := <-s.failed:
		s.Close()
		return nil, err
	default:
		return s, nil
	}
}

// wait holds calls back for a while, and gives those up whose caller has gone.
func wait(latency time.Duration) Middleware {
	return func(next Handler) Handler {
		return func(ctx context.Context, call Call) (Response, *APIError) {
			timer := time.NewTimer(latency)
			defer timer.Stop()
			select {
			case <-timer.C:
				return next(ctx, call)
			case <-ctx.Done():
				return nil, &APIError{Code: "RequestCanceled", Message: "The caller has gone.", Status: http.StatusServiceUnavailable}
			}
		}
	}
}

// URL is the base URL of the EC2 API.
func (s *Server) URL() string { return s.endpoints.Load().EC2 }

// IMDSURL is the base URL of an instance's metadata service, and "" for an
// instance that has none.
func (s *Server) IMDSURL(id InstanceID) string { return s.endpoints.Load().IMDS[id] }

// Endpoints says where the server listens now.
func (s *Server) Endpoints() Endpoints {
	e := s.endpoints.Load()
	return Endpoints{EC2: e.EC2, IMDS: maps.Clone(e.IMDS)}
}

// Wait returns when the context ends, with nil, or when a listener fails.
func (s *Server) Wait(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case err := <-s.failed:
		return err
	}
}

// Close stops listening, breaks off the requests under way and returns when
// every goroutine of the server has ended. It may be called more than once.
func (s *Server) Close() {
	s.closeOnce.Do(func() { close(s.stop) })
	s.wg.Wait()
}

// refresh brings the listeners in line with the instances.
func (s *Server) refresh() { s.ask() }

// ask has the keeper look at the instances and waits until it has. It returns
// false if the server is being closed.
func (s *Server) ask() bool {
	done := make(chan struct{})
	select {
	case s.requests <- done:
		<-done
		return true
	case <-s.stop:
		return false
	}
}

// keep owns the metadata services: one for each instance that is not
// terminated.
func (s *Server) keep() {
	servers := make(map[InstanceID]*http.Server)
	defer func() {
		for _, server := range servers {
			_ = server.Close() // closes the listener, which was open
		}
	}()
	s.reconcile(servers, true)
	for {
		select {
		case done := <-s.requests:
			s.reconcile(servers, false)
			close(done)
		case <-s.stop:
			return
		}
	}
}

func (s *Server) reconcile(servers map[InstanceID]*http.Server, first bool) {
	old := s.endpoints.Load()
	urls := make(map[InstanceID]string)
	for _, id := range s.acc.Living() {
		if servers[id] == nil {
			listener, err := net.Listen("tcp", net.JoinHostPort(s.cfg.IMDSHost, "0"))
			if err != nil {
				s.fail(fmt.Errorf("listen for the metadata service of %s: %w", id, err))
				continue
			}
			servers[id] = s.serve(listener, s.IMDS(id))
			urls[id] = "http://" + listener.Addr().String()
			continue
		}
		urls[id] = old.IMDS[id]
	}
	for id, server := range servers {
		if urls[id] == "" {
			_ = server.Close() // closes the listener, which was open
			delete(servers, id)
		}
	}
	if !first && maps.Equal(urls, old.IMDS) {
		return
	}
	s.endpoints.Store(&Endpoints{EC2: old.EC2, IMDS: urls})
	if s.cfg.OnEndpoints != nil {
		s.cfg.OnEndpoints(s.Endpoints())
	}
}

func (s *Server) serve(listener net.Listener, handler http.Handler) *http.Server {
	server := &http.Server{Handler: handler, ReadHeaderTimeout: headerTimeout}
	s.wg.Go(func() {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			s.fail(fmt.Errorf("serve %s: %w", listener.Addr(), err))
		}
	})
	return server
}

// fail keeps the first failure; those after it follow from it or repeat it.
func (s *Server) fail(err error) {
	select {
	case s.failed <- err:
	default:
	}
}
