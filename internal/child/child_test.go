package child_test

import (
	"bufio"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/eniplane/eniplane/internal/child"
)

// asParent makes this test binary a parent that starts a child, prints the
// child's id and waits to be killed.
const asParent = "ENIPLANE_TEST_CHILD_PARENT"

func TestMain(m *testing.M) {
	if os.Getenv(asParent) != "" {
		p, err := child.Start(child.Config{Path: "/bin/sleep", Args: []string{"600"}})
		if err != nil {
			os.Exit(1)
		}
		_, _ = os.Stdout.WriteString(strconv.Itoa(p.PID()) + "\n")
		<-p.Done()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func TestStopAsksFirst(t *testing.T) {
	log := filepath.Join(t.TempDir(), "log")
	p, err := child.Start(child.Config{
		Path: "/bin/sh", Log: log,
		Args: []string{"-c", `trap 'echo asked; exit 0' TERM; echo ready; while :; do sleep 0.01; done`},
	})
	if err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool { return strings.Contains(read(t, log), "ready") })
	if !p.Stop(10 * time.Second) {
		t.Error("killed, though it ends when asked")
	}
	if err := p.Err(); err != nil {
		t.Errorf("ended with %v", err)
	}
	if got := read(t, log); !strings.Contains(got, "asked") {
		t.Errorf("log is %q", got)
	}
	if !p.Stop(0) {
		t.Error("stopping what has ended is no kill")
	}
}

func TestStopKillsTheDeafAndItsGroup(t *testing.T) {
	log := filepath.Join(t.TempDir(), "log")
	p, err := child.Start(child.Config{
		Path: "/bin/sh", Log: log,
		Args: []string{"-c", `trap '' TERM; sleep 600 & echo $!; while :; do sleep 0.01; done`},
	})
	if err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool { return strings.HasSuffix(read(t, log), "\n") })
	grandchild, err := strconv.Atoi(strings.TrimSpace(read(t, log)))
	if err != nil {
		t.Fatal(err)
	}
	if p.Stop(50 * time.Millisecond) {
		t.Error("a process that ignores SIGTERM counts as stopped by it")
	}
	if p.Err() == nil {
		t.Error("no error of a killed process")
	}
	waitFor(t, func() bool { return gone(grandchild) })
}

func TestStartErrors(t *testing.T) {
	if _, err := child.Start(child.Config{Path: "/nonexistent/program"}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v", err)
	}
	_, err := child.Start(child.Config{Path: "/bin/true", Log: filepath.Join(t.TempDir(), "no", "log")})
	if !errors.Is(err, child.ErrNoLog) {
		t.Errorf("got %v", err)
	}
}

func TestChildDiesWithKilledParent(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skipf("%s tells no child of its parent's death", runtime.GOOS)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), asParent+"=1")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		t.Fatal(err)
	}
	if gone(pid) {
		t.Fatal("the child is gone while its parent lives")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	waitFor(t, func() bool { return gone(pid) })
}

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	return string(b)
}

// gone reports whether no process has the id, zombies apart: who reaps orphans
// in a container is not ours to know.
func gone(pid int) bool {
	if errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
		return true
	}
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return true
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	return strings.HasPrefix(rest, "Z")
}

func waitFor(t *testing.T, held func() bool) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for !held() {
		if time.Now().After(deadline) {
			t.Fatal("did not happen within 10 s")
		}
		time.Sleep(5 * time.Millisecond)
	}
}
