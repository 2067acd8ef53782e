// Package e2e_test runs the built programs together, on a real kube-apiserver,
// etcd and kernel, and the simulated EC2. All tests share one stack; each uses
// names of its own, and leaves the stack as able as it found it.
package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"go.opentelemetry.io/otel/trace/noop"
	"google.golang.org/grpc"

	"github.com/eniplane/eniplane/deploy/local/internal/stack"
	agentv1 "github.com/eniplane/eniplane/gen/eniplane/agent/v1"
	eniv1 "github.com/eniplane/eniplane/gen/eniplane/eni/v1"
	identityv1 "github.com/eniplane/eniplane/gen/eniplane/identity/v1"
	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/internal/rpc"
	"github.com/eniplane/eniplane/node-syncer/ciliumnode"
)

const (
	root = "../../.." // of the repository, from this folder
	// patience bounds how long a test waits for anything to come about.
	patience = 60 * time.Second
	// restoreDeadline is how long restarted agents keep what nobody wants.
	restoreDeadline = 2 * time.Second
)

// edited is the node whose object a test edits into nonsense by hand: its
// inconsistent versions are that test's.
const edited = "node-3"

var (
	bin string // folder of the programs
	st  *stack.Stack
)

func TestMain(m *testing.M) {
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		code = 1
	}
	os.Exit(code)
}

func run(m *testing.M) (int, error) {
	temp, err := os.MkdirTemp("", "eniplane-e2e-")
	if err != nil {
		return 1, err
	}
	defer func() { _ = os.RemoveAll(temp) }()
	if bin, err = programs(temp); err != nil {
		return 1, err
	}
	cfg := stack.Config{
		Run: filepath.Join(temp, "run"), Bin: bin, Base: filepath.Join(root, "deploy/base"),
		Nodes: stack.DefaultNodes(3), RestoreDeadline: restoreDeadline,
		PinRoot:  "/sys/fs/bpf/eniplane-e2e-" + strconv.Itoa(os.Getpid()),
		Progress: os.Stderr,
	}
	if st, err = stack.Start(context.Background(), cfg); err != nil {
		return 1, err
	}
	code := m.Run()
	if code != 0 {
		keepLogs(cfg.Run)
	}
	record := st.Record()
	return code, errors.Join(verdict(), st.Stop(), nothingLeft(record, cfg.Run))
}

// programs returns the folder that make build filled, or a new one.
func programs(temp string) (string, error) {
	if folder := os.Getenv("ENIPLANE_BIN"); folder != "" {
		return folder, nil
	}
	args := []string{"build", "-o", temp + "/bin/"}
	for _, p := range []string{
		"node-syncer/cmd/node-syncer", "eni-allocator/cmd/eni-allocator", "identity-service/cmd/identity-service",
		"agent/cmd/agent", "deploy/local/ec2sim/cmd/ec2sim", "deploy/local/cmd/stack",
	} {
		args = append(args, "./"+p)
	}
	if err := os.Mkdir(filepath.Join(temp, "bin"), 0o755); err != nil {
		return "", err
	}
	cmd := exec.Command("go", args...)
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the programs: %w\n%s", err, out)
	}
	return filepath.Join(temp, "bin"), nil
}

// verdict is the observer's, on every version stored during all tests.
func verdict() error {
	o := st.Observer()
	var errs []error
	for _, f := range o.Findings() {
		if f.Node != edited {
			errs = append(errs, fmt.Errorf("version %s of CiliumNode %s is inconsistent: %v", f.Revision, f.Node, f.Violations))
		}
	}
	if n := o.Missed(); n != 0 {
		errs = append(errs, fmt.Errorf("the observer missed versions %d times", n))
	}
	versions := o.Versions()
	for _, n := range st.Record().Nodes {
		if versions[n.Name] == 0 {
			errs = append(errs, fmt.Errorf("no version of CiliumNode %s was observed", n.Name))
		}
	}
	fmt.Fprintf(os.Stderr, "observed versions of CiliumNodes: %v\n", versions)
	return errors.Join(errs...)
}

// keepLogs shows the ends of the programs' logs after a failure.
func keepLogs(run string) {
	logs, _ := filepath.Glob(filepath.Join(run, "logs", "*.log"))
	for _, path := range logs {
		switch filepath.Base(path) {
		case "etcd.log", "kube-apiserver.log", "ec2sim.log":
			continue
		}
		b, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		const most = 6000
		fmt.Fprintf(os.Stderr, "--- end of %s\n%s\n", filepath.Base(path), b[max(0, len(b)-most):])
	}
}

// nothingLeft checks that a stopped stack left no process, no pin and no file
// but logs.
func nothingLeft(rec stack.Record, run string) error {
	var errs []error
	for _, p := range rec.Processes {
		if alive(p.PID) {
			errs = append(errs, fmt.Errorf("%s (process %d) still runs", p.Name, p.PID))
		}
	}
	if rec.PinRoot != "" {
		if _, err := os.Stat(rec.PinRoot); !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, fmt.Errorf("%s is left behind: %w", rec.PinRoot, err))
		}
	}
	err := filepath.WalkDir(run, func(path string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() && filepath.Ext(path) != ".log" {
			errs = append(errs, fmt.Errorf("%s is left behind", path))
		}
		return err
	})
	return errors.Join(append(errs, err)...)
}

func alive(pid int) bool {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	return err == nil && !slices.Contains([]string{"Z", "X"}, state(string(stat)))
}

// state is the third field of /proc/PID/stat.
func state(stat string) string {
	for i := len(stat) - 1; i >= 0; i-- {
		if stat[i] == ')' && i+2 < len(stat) {
			return stat[i+2 : i+3]
		}
	}
	return ""
}

func dial(t *testing.T, target string) *grpc.ClientConn {
	t.Helper()
	conn, err := rpc.Dial(target, rpc.ClientConfig{Timeout: patience}, rpc.ClientDeps{TracerProvider: noop.NewTracerProvider()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func record(t *testing.T, node string) stack.NodeRecord {
	t.Helper()
	for _, n := range st.Record().Nodes {
		if n.Name == node {
			return n
		}
	}
	t.Fatalf("no node %s", node)
	return stack.NodeRecord{}
}

func agent(t *testing.T, node string) agentv1.AgentServiceClient {
	t.Helper()
	return agentv1.NewAgentServiceClient(dial(t, record(t, node).Socket))
}

func syncer(t *testing.T) nodev1.NodeSyncerServiceClient {
	t.Helper()
	return nodev1.NewNodeSyncerServiceClient(dial(t, st.Target(stack.NodeSyncer)))
}

func allocator(t *testing.T) eniv1.EniAllocatorServiceClient {
	t.Helper()
	return eniv1.NewEniAllocatorServiceClient(dial(t, st.Target(stack.EniAllocator)))
}

func identity(t *testing.T) identityv1.IdentityServiceClient {
	t.Helper()
	return identityv1.NewIdentityServiceClient(dial(t, st.Target(stack.IdentityService)))
}

// object reads a CiliumNode from the API server.
func object(t *testing.T, node string) *ciliumnode.CiliumNode {
	t.Helper()
	got, err := st.Kube().Dynamic.Resource(ciliumnode.GVR()).Get(t.Context(), node, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var n ciliumnode.CiliumNode
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(got.Object, &n); err != nil {
		t.Fatal(err)
	}
	return &n
}

// allocate asks a node's agent for an address.
func allocate(t *testing.T, node, owner string) *agentv1.AllocateIPResponse {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	resp, err := agent(t, node).AllocateIP(ctx, &agentv1.AllocateIPRequest{Owner: owner})
	if err != nil {
		t.Fatalf("address for %s on %s: %v", owner, node, err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		conn, err := rpc.Dial(record(t, node).Socket, rpc.ClientConfig{}, rpc.ClientDeps{TracerProvider: noop.NewTracerProvider()})
		if err != nil {
			t.Error(err)
			return
		}
		defer func() { _ = conn.Close() }()
		if _, err := agentv1.NewAgentServiceClient(conn).ReleaseIP(ctx, &agentv1.ReleaseIPRequest{Owner: owner}); err != nil {
			t.Errorf("release the address of %s on %s: %v", owner, node, err)
		}
	})
	return resp
}

// eventually waits until problem returns nothing.
func eventually(t *testing.T, what string, problem func() string) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		p := problem()
		if p == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: after %s still: %s", what, patience, p)
		}
		time.Sleep(50 * time.Millisecond)
	}
}
