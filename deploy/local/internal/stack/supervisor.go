package stack

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/eniplane/eniplane/internal/child"
)

// ErrNotReady says that a process ended or did not become ready in time. The
// text holds the end of its log.
var ErrNotReady = errors.New("not ready")

const (
	readyTimeout = 60 * time.Second
	stopGrace    = 15 * time.Second
)

// anyPort lets the kernel choose.
const anyPort = "127.0.0.1:0"

// managed is one of our own programs, which writes a file with its ports and
// serves gRPC health.
type managed struct {
	name    string // unique in the stack, and the name of its log
	binary  string
	service string // whose health says whether it is ready; empty for the whole program's
	// ready is asked, on a connection to the program, once it is healthy. Nil
	// means that healthy is enough.
	ready  func(context.Context, *grpc.ClientConn) bool
	args   []string
	env    []string
	socket string // path of the unix socket that it listens on; empty for TCP

	ports Ports // what it listens on, once known; a restart takes the same
	child *child.Process
}

// supervisor starts processes, tells when one ends that should not, and stops
// them.
type supervisor struct {
	run  string
	bin  string
	keep *keeper

	failed chan error // the first process that ended by itself

	mu       sync.Mutex // guards the maps
	programs map[string]*managed
	expected map[*child.Process]bool // those that are being stopped
}

func newSupervisor(run, bin string, keep *keeper) *supervisor {
	return &supervisor{
		run: run, bin: bin, keep: keep,
		failed:   make(chan error, 1),
		programs: make(map[string]*managed),
		expected: make(map[*child.Process]bool),
	}
}

func (s *supervisor) logPath(name string) string {
	return filepath.Join(s.run, logsFolder, name+".log")
}

// spawn starts a process, records it and watches for its end.
func (s *supervisor) spawn(name, path string, args, env []string) (*child.Process, error) {
	p, err := child.Start(child.Config{
		Name: name, Path: path, Args: args, Env: env, Dir: s.run, Log: s.logPath(name),
	})
	if err != nil {
		return nil, err
	}
	if err := s.record(name, p.PID(), Ports{}); err != nil {
		p.Kill()
		return nil, err
	}
	go s.watch(p)
	return p, nil
}

func (s *supervisor) record(name string, pid int, ports Ports) error {
	return s.keep.setProcess(Process{ProcessID: identify(pid), Name: name, Log: s.logPath(name), Ports: ports})
}

// watch reports the end of a process that nobody stopped. It ends with the
// process, and the process ends with this one.
func (s *supervisor) watch(p *child.Process) {
	<-p.Done()
	s.mu.Lock()
	expected := s.expected[p]
	delete(s.expected, p)
	s.mu.Unlock()
	if !expected {
		s.fail(s.ended(p))
	}
}

func (s *supervisor) fail(err error) {
	select {
	case s.failed <- err:
	default: // those after the first follow from it
	}
}

func (s *supervisor) ended(p *child.Process) error {
	how := "with 0"
	if err := p.Err(); err != nil {
		how = "with " + err.Error()
	}
	return fmt.Errorf("%s ended %s: %w\n%s", p.Name(), how, ErrNotReady, tail(s.logPath(p.Name())))
}

// expect marks a process as being stopped.
func (s *supervisor) expect(p *child.Process) {
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-p.Done():
	default:
		s.expected[p] = true
	}
}

// unexpect takes expect back.
func (s *supervisor) unexpect(p *child.Process) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.expected, p)
}

// start starts one of our programs and returns when it is healthy. Again after
// kill or stop, it listens where it did before.
func (s *supervisor) start(ctx context.Context, p *managed) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	portsFile := filepath.Join(s.run, portsFolder, p.name+".json")
	if err := os.RemoveAll(portsFile); err != nil {
		return err
	}
	listen, health, metrics := anyPort, anyPort, anyPort
	if p.socket != "" {
		listen = "unix://" + p.socket
	}
	if p.ports != (Ports{}) {
		listen, health, metrics = p.ports.GRPC, p.ports.Health, p.ports.Metrics
	}
	args := append(slices.Clone(p.args),
		"--listen="+listen, "--health-listen="+health, "--metrics-listen="+metrics, "--ports-file="+portsFile)
	started, err := s.spawn(p.name, filepath.Join(s.bin, p.binary), args, p.env)
	if err != nil {
		return err
	}
	s.mu.Lock()
	p.child = started
	s.programs[p.name] = p
	s.mu.Unlock()
	if err := s.awaitHealth(ctx, p, portsFile); err != nil {
		return err
	}
	return s.record(p.name, p.child.PID(), p.ports)
}

// awaitHealth waits for the file with the ports, then for the health service to
// say SERVING.
func (s *supervisor) awaitHealth(ctx context.Context, p *managed, portsFile string) error {
	var text []byte
	err := s.poll(ctx, p.child, func() bool {
		var err error
		text, err = os.ReadFile(portsFile)
		return err == nil
	})
	if err != nil {
		return fmt.Errorf("%s: no ports: %w", p.name, err)
	}
	if err := json.Unmarshal(text, &p.ports); err != nil {
		return fmt.Errorf("%s: ports: %w", p.name, err)
	}
	if p.socket != "" {
		p.ports.GRPC = "unix://" + p.socket
	}
	conn, err := grpc.NewClient(p.ports.Health, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("%s: health: %w", p.name, err)
	}
	defer func() { _ = conn.Close() }()
	client := healthv1.NewHealthClient(conn)
	err = s.poll(ctx, p.child, func() bool {
		resp, err := client.Check(ctx, &healthv1.HealthCheckRequest{Service: p.service})
		return err == nil && resp.GetStatus() == healthv1.HealthCheckResponse_SERVING
	})
	if err != nil {
		return fmt.Errorf("%s: health: %w", p.name, err)
	}
	return s.awaitReady(ctx, p)
}

func (s *supervisor) awaitReady(ctx context.Context, p *managed) error {
	if p.ready == nil {
		return nil
	}
	conn, err := grpc.NewClient(p.ports.GRPC, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("%s: %w", p.name, err)
	}
	defer func() { _ = conn.Close() }()
	if err := s.poll(ctx, p.child, func() bool { return p.ready(ctx, conn) }); err != nil {
		return fmt.Errorf("%s: ready: %w", p.name, err)
	}
	return nil
}

// poll asks until the answer is yes, the process ends or ctx does.
func (s *supervisor) poll(ctx context.Context, p *child.Process, held func() bool) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !held() {
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w\n%s", ErrNotReady, ctx.Err(), tail(s.logPath(p.Name())))
		case <-p.Done():
			return s.ended(p)
		case <-tick.C:
		}
	}
	return nil
}

// get returns a started program.
func (s *supervisor) get(name string) (*managed, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p, ok := s.programs[name]
	if !ok {
		return nil, fmt.Errorf("no program %q in this stack", name)
	}
	return p, nil
}

// halt stops processes, all at once.
func (s *supervisor) halt(procs ...*child.Process) {
	var wg sync.WaitGroup
	for _, p := range procs {
		if p == nil {
			continue
		}
		s.expect(p)
		wg.Go(func() { p.Stop(stopGrace) })
	}
	wg.Wait()
}

// tail returns the last lines of a log.
func tail(path string) string {
	const most = 3000
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer func() { _ = f.Close() }()
	if info, err := f.Stat(); err == nil && info.Size() > most {
		_, _ = f.Seek(-most, io.SeekEnd)
	}
	b, _ := io.ReadAll(f)
	return strings.TrimSpace(string(b))
}
