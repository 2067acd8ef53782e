package etcd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"syscall"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3client"
)

// ErrLocked says that another process uses the data directory.
var ErrLocked = errors.New("another process uses the data directory")

// ServerConfig is where an etcd inside this process keeps its data.
type ServerConfig struct {
	// Dir is the data directory. It is created if it is missing.
	Dir string
	// ClientPort and PeerPort are on loopback; zero takes free ones. The client
	// port is for etcdctl and backups: this process does not use it.
	ClientPort, PeerPort int
	// MaxTxnOps bounds the operations of one transaction; zero means 1,024.
	MaxTxnOps int
}

// Server is an etcd of one member inside this process.
type Server struct {
	etcd *embed.Etcd
	lock *os.File
	// Client speaks to it without a network between.
	Client *clientv3.Client
}

// Start starts an etcd on the data directory and waits until it serves. It
// returns ErrLocked if another process, or another Server, has the directory.
func Start(ctx context.Context, config ServerConfig, logger *slog.Logger) (*Server, error) {
	if config.MaxTxnOps == 0 {
		config.MaxTxnOps = 1024
	}
	if err := os.MkdirAll(config.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("create the data directory: %w", err)
	}
	lock, err := lockDir(config.Dir)
	if err != nil {
		return nil, err
	}
	e, err := startEtcd(ctx, config, logger)
	if err != nil {
		_ = lock.Close() // The lock goes with it.
		return nil, err
	}
	return &Server{etcd: e, lock: lock, Client: v3client.New(e.Server)}, nil
}

func lockDir(dir string) (*os.File, error) {
	path := filepath.Join(dir, "lock")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the data directory: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		_ = f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("%w: %s", ErrLocked, dir)
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return f, nil
}

func startEtcd(ctx context.Context, config ServerConfig, logger *slog.Logger) (*embed.Etcd, error) {
	c := embed.NewConfig()
	c.Name = "identity-service"
	c.Dir = filepath.Join(config.Dir, "etcd")
	loopback := func(port int) []url.URL {
		return []url.URL{{Scheme: "http", Host: net.JoinHostPort("127.0.0.1", strconv.Itoa(port))}}
	}
	c.ListenClientUrls, c.AdvertiseClientUrls = loopback(config.ClientPort), loopback(config.ClientPort)
	c.ListenPeerUrls, c.AdvertisePeerUrls = loopback(config.PeerPort), loopback(config.PeerPort)
	c.InitialCluster = c.InitialClusterFromName(c.Name)
	// One member hears no heartbeats but its own, so elections may be short.
	c.TickMs, c.ElectionMs = 10, 100
	c.MaxTxnOps = uint(config.MaxTxnOps)
	c.QuotaBackendBytes = 8 << 30 // The largest that etcd suggests.
	c.AutoCompactionMode, c.AutoCompactionRetention = embed.CompactorModePeriodic, "30m"
	c.Metrics = "basic"
	c.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zapTo(logger))
	e, err := embed.StartEtcd(c)
	if err != nil {
		return nil, fmt.Errorf("start etcd in %s: %w", c.Dir, err)
	}
	select {
	case <-e.Server.ReadyNotify():
		return e, nil
	case err := <-e.Err():
		e.Close()
		return nil, fmt.Errorf("start etcd in %s: %w", c.Dir, err)
	case <-ctx.Done():
		e.Close()
		return nil, fmt.Errorf("wait for etcd in %s: %w", c.Dir, ctx.Err())
	}
}

// Endpoint is the URL for clients in other processes.
func (s *Server) Endpoint() string { return "http://" + s.etcd.Clients[0].Addr().String() }

// Run returns nil when ctx ends, and an error when etcd stopped by itself.
func (s *Server) Run(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case <-s.etcd.Server.StopNotify():
		return errors.New("etcd stopped by itself")
	case err := <-s.etcd.Err():
		return fmt.Errorf("etcd stopped by itself: %w", err)
	}
}

// Close stops etcd, which writes what it has, and frees the data directory.
func (s *Server) Close() error {
	err := s.Client.Close()
	if errors.Is(err, context.Canceled) {
		err = nil
	}
	s.etcd.Close()
	return errors.Join(err, s.lock.Close())
}
