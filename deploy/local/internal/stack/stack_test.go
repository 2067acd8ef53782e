package stack

import (
	"context"
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/eniplane/eniplane/deploy/local/ec2sim"
)

// holdRun makes this test binary a supervisor that holds a run folder until it
// is asked to stop.
const holdRun = "ENIPLANE_TEST_STACK_HOLD"

func TestMain(m *testing.M) {
	if how := os.Getenv(actAs); how != "" {
		os.Exit(actProgram(how))
	}
	if run := os.Getenv(holdRun); run != "" {
		ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		defer cancel()
		lock, err := lockRun(run)
		if err != nil {
			os.Exit(1)
		}
		if _, err := newKeeper(run); err != nil {
			os.Exit(1)
		}
		<-ctx.Done()
		if clean(run) != nil || lock.Close() != nil {
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

func TestValidate(t *testing.T) {
	folders := Config{Run: "run", Bin: "bin", Base: "base"}
	good := folders
	if err := good.Validate(); err != nil {
		t.Fatal(err)
	}
	if len(good.Nodes) != 3 || !filepath.IsAbs(good.Run) || good.PinRoot != "/sys/fs/bpf/eniplane" {
		t.Errorf("defaults: %+v", good)
	}
	node := Node{Name: "a", Type: "t3.medium", Instance: "i-1", Zone: "us-east-1a"}
	for name, change := range map[string]func(*Config){
		"no run folder":   func(c *Config) { c.Run = "" },
		"no programs":     func(c *Config) { c.Bin = "" },
		"no manifests":    func(c *Config) { c.Base = "" },
		"name with slash": func(c *Config) { c.Nodes[0].Name = "../a" },
		"empty name":      func(c *Config) { c.Nodes[0].Name = "" },
		"long name":       func(c *Config) { c.Nodes[0].Name = strings.Repeat("a", 43) },
		"name twice":      func(c *Config) { c.Nodes = append(c.Nodes, c.Nodes[0]) },
		"instance twice": func(c *Config) {
			c.Nodes = append(c.Nodes, Node{Name: "b", Type: "t3.medium", Instance: "i-1", Zone: "us-east-1a"})
		},
		"zone without a subnet": func(c *Config) { c.Nodes[0].Zone = "us-east-1z" },
	} {
		t.Run(name, func(t *testing.T) {
			bad := folders
			bad.Nodes = []Node{node}
			change(&bad)
			if bad.Validate() == nil {
				t.Errorf("accepted: %+v", bad)
			}
		})
	}
}

func TestTopologyIsOneThatTheSimulatorTakes(t *testing.T) {
	sim, err := ec2sim.New(ec2sim.Config{Topology: topology(DefaultNodes(5))})
	if err != nil {
		t.Fatal(err)
	}
	state := sim.State()
	if len(state.Instances) != 5 {
		t.Errorf("%d instances, want 5", len(state.Instances))
	}
	subnets := make(map[netip.Prefix]bool)
	for _, s := range state.Subnets {
		subnets[s.CIDR] = true
	}
	if len(subnets) != len(zones) {
		t.Errorf("subnets %v, want one per zone", subnets)
	}
}

func TestProcessID(t *testing.T) {
	me := identify(os.Getpid())
	if !me.lives() {
		t.Errorf("%+v does not live, yet it runs this test", me)
	}
	other := me
	other.Started++
	if other.lives() {
		t.Error("a process that started at another time counts as the same")
	}
	if (ProcessID{}).lives() || identify(-1).lives() {
		t.Error("no process counts as one that lives")
	}
	cmd := exec.Command("/bin/true")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	id := identify(cmd.Process.Pid)
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if id.lives() {
		t.Error("an ended process counts as one that lives")
	}
}

func TestCleanRemovesWhatACrashLeft(t *testing.T) {
	run, sockets := t.TempDir(), t.TempDir()
	left := sleeper(t)
	innocent := sleeper(t)
	k, err := newKeeper(run)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range []Process{
		{Name: "left", ProcessID: identify(left.Process.Pid)},
		// Its id belongs to somebody else by now.
		{Name: "gone", ProcessID: ProcessID{PID: innocent.Process.Pid, Started: 1}},
	} {
		if err := k.setProcess(p); err != nil {
			t.Fatal(err)
		}
	}
	if err := k.update(func(r *Record) { r.Sockets = sockets }); err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{"data/agent-node-1/state.json", "kube/etcd/x", "ports/a.json", "sock/a.sock", "topology.json", "logs/agent-node-1.log"} {
		path := filepath.Join(run, f)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, nil, 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	if err := Down(t.Context(), run); err != nil {
		t.Fatal(err)
	}
	if err := left.Wait(); err == nil {
		t.Error("a process that the crash left was not killed")
	}
	if !identify(innocent.Process.Pid).lives() {
		t.Error("a process that is not the stack's was killed")
	}
	var files []string
	err = filepath.WalkDir(run, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			files = append(files, strings.TrimPrefix(path, run+"/"))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(files) != 1 || files[0] != "logs/agent-node-1.log" {
		t.Errorf("left in the run folder: %v; want the log only", files)
	}
	if _, err := os.Stat(sockets); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the folder of sockets is left: %v", err)
	}
	if err := Down(t.Context(), run); err != nil {
		t.Errorf("a second time: %v", err)
	}
}

func TestAnotherBootKillsNobody(t *testing.T) {
	run := t.TempDir()
	innocent := sleeper(t)
	k, err := newKeeper(run)
	if err != nil {
		t.Fatal(err)
	}
	if err := k.setProcess(Process{Name: "x", ProcessID: identify(innocent.Process.Pid)}); err != nil {
		t.Fatal(err)
	}
	if err := k.update(func(r *Record) { r.Boot = "another" }); err != nil {
		t.Fatal(err)
	}
	if err := clean(run); err != nil {
		t.Fatal(err)
	}
	if !identify(innocent.Process.Pid).lives() {
		t.Error("a process of this boot was killed for one of another")
	}
}

func TestUnreadableRecordIsNoObstacle(t *testing.T) {
	run := t.TempDir()
	if err := os.WriteFile(filepath.Join(run, RecordFile), []byte("{"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := clean(run); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadRecord(run); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the record is still there: %v", err)
	}
}

func TestOneStackPerFolder(t *testing.T) {
	run := t.TempDir()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), holdRun+"="+run)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill() }()
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for deadline := time.Now().Add(10 * time.Second); ; {
		if _, err := ReadRecord(run); err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("no record after 10 s")
		}
		time.Sleep(10 * time.Millisecond)
	}
	if _, err := Start(t.Context(), Config{Run: run, Bin: run, Base: run}); !errors.Is(err, ErrRunning) {
		t.Errorf("a second stack: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := Down(ctx, run); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Errorf("the stack that was asked to stop ended with %v", err)
	}
}

func sleeper(t *testing.T) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("/bin/sleep", "600")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd
}
