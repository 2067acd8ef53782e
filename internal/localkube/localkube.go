// Package localkube runs a real kube-apiserver on a real etcd, on loopback, for
// tests and for the local stack. There is no controller-manager, scheduler or
// kubelet: nothing deletes what lost its owner, and Pods stay Pending.
//
// It knows Kubernetes only as two binaries and a few files; clients are made by
// the caller from Cluster.Kubeconfig.
package localkube

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/eniplane/eniplane/internal/child"
)

// ErrNoBinary is returned by Start when a binary is neither configured nor
// named by the environment nor to be had from the repository's .ci/tool.
var ErrNoBinary = errors.New("binary not found")

// ErrNotReady is returned when a server ended or did not become ready in time.
// The error text ends with the last lines of its log.
var ErrNotReady = errors.New("not ready")

// errPortTaken says that somebody took a port between its choice and its use.
var errPortTaken = errors.New("port taken")

const (
	startAttempts = 4
	readyTimeout  = 60 * time.Second
	stopGrace     = 15 * time.Second
)

// Config says where to run and what.
type Config struct {
	// Dir holds certificates, kubeconfigs, logs and etcd's data. It must be
	// empty or not exist. Empty means a new temporary folder, which Stop
	// removes.
	Dir string
	// LogDir is an existing folder for etcd.log and kube-apiserver.log. Empty
	// means Dir.
	LogDir string
	// APIServerBinary and EtcdBinary are paths. Empty means the environment's
	// ENIPLANE_KUBE_APISERVER and ENIPLANE_ETCD, and without those the pinned
	// tools of the repository that the working directory is in.
	APIServerBinary, EtcdBinary string
	// APIServerArgs are added to kube-apiserver's command line.
	APIServerArgs []string
}

// Cluster is a running API server and its store.
type Cluster struct {
	URL        string // https://127.0.0.1:port
	CAFile     string // path of the PEM file of the CA that signed the server's certificate
	Token      string // of a user in system:masters
	Kubeconfig string // path of a kubeconfig with that token
	EtcdURL    string // http://127.0.0.1:port
	Dir        string // where everything is

	cfg       Config
	temporary bool
	pki       *authority
	client    *http.Client
	ports     ports
	etcd      *child.Process
	apiserver *child.Process
}

type ports struct{ api, etcdClient, etcdPeer int }

// Start starts etcd and kube-apiserver and returns when the API server is
// ready and has created the namespaces default and kube-system (about 3 s). ctx
// bounds the start only. Both processes die with this one.
func Start(ctx context.Context, cfg Config) (*Cluster, error) {
	var err error
	if cfg.APIServerBinary, err = binary(cfg.APIServerBinary, "ENIPLANE_KUBE_APISERVER", "kube-apiserver"); err != nil {
		return nil, err
	}
	if cfg.EtcdBinary, err = binary(cfg.EtcdBinary, "ENIPLANE_ETCD", "etcd"); err != nil {
		return nil, err
	}
	c := &Cluster{cfg: cfg, Dir: cfg.Dir}
	if c.Dir == "" {
		if c.Dir, err = os.MkdirTemp("", "localkube-"); err != nil {
			return nil, err
		}
		c.temporary = true
	}
	if err := c.start(ctx); err != nil {
		c.Kill()
		return nil, err
	}
	return c, nil
}

func (c *Cluster) start(ctx context.Context) error {
	if err := c.prepare(); err != nil {
		return fmt.Errorf("prepare %s: %w", c.Dir, err)
	}
	for attempt := 1; ; attempt++ {
		err := c.tryStart(ctx)
		if err == nil {
			return nil
		}
		if !errors.Is(err, errPortTaken) || attempt == startAttempts {
			return err
		}
		c.killProcesses()
		if err := os.RemoveAll(filepath.Join(c.Dir, "etcd")); err != nil {
			return err
		}
	}
}

// prepare writes what does not depend on ports.
func (c *Cluster) prepare() error {
	if err := os.MkdirAll(c.Dir, 0o755); err != nil {
		return err
	}
	var err error
	if c.pki, err = newAuthority(); err != nil {
		return err
	}
	serverCert, serverKey, err := c.pki.server()
	if err != nil {
		return err
	}
	signKey, verifyKey, err := serviceAccountKeys()
	if err != nil {
		return err
	}
	if c.Token, err = randomToken(); err != nil {
		return err
	}
	c.CAFile = c.path("ca.crt")
	for name, content := range map[string][]byte{
		"ca.crt":        c.pki.certPEM,
		"apiserver.crt": serverCert,
		"apiserver.key": serverKey,
		"sa.key":        signKey,
		"sa.pub":        verifyKey,
		"tokens.csv":    []byte(c.Token + `,admin,admin,"system:masters"` + "\n"),
	} {
		if err := os.WriteFile(c.path(name), content, 0o600); err != nil {
			return err
		}
	}
	pool := x509.NewCertPool()
	pool.AddCert(c.pki.cert)
	c.client = &http.Client{
		Timeout: 5 * time.Second,
		Transport: &http.Transport{
			TLSClientConfig:   &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12},
			DisableKeepAlives: true,
		},
	}
	return nil
}

func (c *Cluster) tryStart(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	var err error
	if c.ports, err = freePorts(); err != nil {
		return err
	}
	c.URL = fmt.Sprintf("https://127.0.0.1:%d", c.ports.api)
	c.EtcdURL = fmt.Sprintf("http://127.0.0.1:%d", c.ports.etcdClient)
	c.Kubeconfig = c.path("kubeconfig")
	if err := os.WriteFile(c.Kubeconfig, c.tokenKubeconfig(), 0o600); err != nil {
		return err
	}
	peer := fmt.Sprintf("http://127.0.0.1:%d", c.ports.etcdPeer)
	c.etcd, err = child.Start(child.Config{
		Name: "etcd", Path: c.cfg.EtcdBinary, Log: c.LogPath("etcd"), Dir: c.Dir,
		Args: []string{
			"--name=localkube", "--data-dir=" + c.path("etcd"),
			"--listen-client-urls=" + c.EtcdURL, "--advertise-client-urls=" + c.EtcdURL,
			"--listen-peer-urls=" + peer, "--initial-advertise-peer-urls=" + peer,
			"--initial-cluster=localkube=" + peer,
			// The data does not outlive this run.
			"--unsafe-no-fsync",
		},
	})
	if err != nil {
		return err
	}
	return c.StartAPIServer(ctx)
}

// StartAPIServer starts the API server again after StopAPIServer, on the same
// port, and returns when it is ready. Start has done it once already.
func (c *Cluster) StartAPIServer(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	var err error
	c.apiserver, err = child.Start(child.Config{
		Name: "kube-apiserver", Path: c.cfg.APIServerBinary, Log: c.LogPath("kube-apiserver"), Dir: c.Dir,
		Args: append([]string{
			"--etcd-servers=" + c.EtcdURL,
			"--bind-address=127.0.0.1", "--advertise-address=127.0.0.1",
			"--secure-port=" + strconv.Itoa(c.ports.api),
			"--tls-cert-file=" + c.path("apiserver.crt"), "--tls-private-key-file=" + c.path("apiserver.key"),
			"--client-ca-file=" + c.CAFile,
			"--token-auth-file=" + c.path("tokens.csv"),
			"--service-account-issuer=https://localhost",
			"--service-account-signing-key-file=" + c.path("sa.key"),
			"--service-account-key-file=" + c.path("sa.pub"),
			"--authorization-mode=RBAC", "--allow-privileged=true",
			"--service-cluster-ip-range=10.0.0.0/24",
			// No controller would create the account that this plugin wants.
			"--disable-admission-plugins=ServiceAccount",
			"--endpoint-reconciler-type=none",
		}, c.cfg.APIServerArgs...),
	})
	if err != nil {
		return err
	}
	for _, path := range []string{"/readyz", "/api/v1/namespaces/default", "/api/v1/namespaces/kube-system"} {
		if err := c.await(ctx, path); err != nil {
			return err
		}
	}
	return nil
}

// await polls path until it answers 200, a process ends, or ctx does.
func (c *Cluster) await(ctx context.Context, path string) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		if c.answers(ctx, path) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("kube-apiserver %s: %w: %w\n%s", path, ErrNotReady, ctx.Err(), c.logTail("kube-apiserver"))
		case <-c.etcd.Done():
			return c.ended("etcd")
		case <-c.apiserver.Done():
			return c.ended("kube-apiserver")
		case <-tick.C:
		}
	}
}

func (c *Cluster) answers(ctx context.Context, path string) bool {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.URL+path, nil)
	if err != nil {
		return false
	}
	req.Header.Set("Authorization", "Bearer "+c.Token)
	resp, err := c.client.Do(req)
	if err != nil {
		return false
	}
	defer func() { _ = resp.Body.Close() }()
	_, _ = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode == http.StatusOK
}

func (c *Cluster) ended(name string) error {
	tail := c.logTail(name)
	// The only sign of it is in the log: both end with 1 whatever was wrong.
	if strings.Contains(tail, "address already in use") {
		return fmt.Errorf("%s: %w", name, errPortTaken)
	}
	return fmt.Errorf("%s ended: %w\n%s", name, ErrNotReady, tail)
}

// LogPath is the path of the log of "etcd" or "kube-apiserver".
func (c *Cluster) LogPath(name string) string {
	return filepath.Join(cmp.Or(c.cfg.LogDir, c.Dir), name+".log")
}

// logTail returns the last few kilobytes of a log.
func (c *Cluster) logTail(name string) string {
	const most = 4096
	f, err := os.Open(c.LogPath(name))
	if err != nil {
		return ""
	}
	defer func() { _ = f.Close() }()
	if info, err := f.Stat(); err == nil && info.Size() > most {
		_, _ = f.Seek(-most, io.SeekEnd)
	}
	b, _ := io.ReadAll(f)
	return string(b)
}

// Wait returns nil when ctx ends, or an error when etcd or the API server does.
// A stop counts as an end, too.
func (c *Cluster) Wait(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case <-c.etcd.Done():
		return c.ended("etcd")
	case <-c.apiserver.Done():
		return c.ended("kube-apiserver")
	}
}

// StopAPIServer stops the API server only; etcd and what it stores stay.
func (c *Cluster) StopAPIServer() {
	if c.apiserver != nil {
		c.apiserver.Stop(stopGrace)
	}
}

// Stop stops the API server, then etcd (4 to 5 s), and removes Dir if Start
// made it. It may be called more than once.
func (c *Cluster) Stop() {
	c.StopAPIServer()
	if c.etcd != nil {
		c.etcd.Stop(stopGrace)
	}
	c.removeTemporary()
}

// Kill is Stop without asking: for clusters whose data nobody will read.
func (c *Cluster) Kill() {
	c.killProcesses()
	c.removeTemporary()
}

// PIDs are the process ids by name, for whoever must find them after a crash.
func (c *Cluster) PIDs() map[string]int {
	return map[string]int{"etcd": c.etcd.PID(), "kube-apiserver": c.apiserver.PID()}
}

func (c *Cluster) killProcesses() {
	for _, p := range []*child.Process{c.apiserver, c.etcd} {
		if p != nil {
			p.Kill()
			<-p.Done()
		}
	}
}

func (c *Cluster) removeTemporary() {
	if c.temporary {
		_ = os.RemoveAll(c.Dir)
	}
}

func (c *Cluster) path(name string) string { return filepath.Join(c.Dir, name) }

// freePorts finds ports that are free now.
func freePorts() (ports, error) {
	var found [3]int
	for i := range found {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return ports{}, err
		}
		// Held until all are chosen, so that they differ.
		defer func() { _ = l.Close() }()
		addr, ok := l.Addr().(*net.TCPAddr)
		if !ok {
			return ports{}, fmt.Errorf("%v is no TCP address", l.Addr())
		}
		found[i] = addr.Port
	}
	return ports{api: found[0], etcdClient: found[1], etcdPeer: found[2]}, nil
}
