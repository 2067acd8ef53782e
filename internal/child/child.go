// Package child starts processes that do not outlive their parent: each has a
// process group of its own, so that a terminal's Ctrl-C reaches the parent
// alone, and on Linux the kernel kills it when the parent dies, however that
// happens. What the processes are, and when they count as ready, is not its
// business.
package child

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"time"
)

// ErrNoLog is returned by Start when the log file can not be opened.
var ErrNoLog = errors.New("log file can not be opened")

// Config says what to start.
type Config struct {
	Name string   // shown in errors; the base name of Path when empty
	Path string   // the binary
	Args []string // its arguments, without the program's name
	Env  []string // its whole environment; nil means the parent's
	Dir  string   // its working directory; empty means the parent's
	Log  string   // stdout and stderr are appended to this file; empty throws them away
}

// Process is a started child. All methods may be called at any time from any
// goroutine.
type Process struct {
	name string
	cmd  *exec.Cmd
	done chan struct{}
	err  error // written before done is closed
}

// Start starts a process. Errors are those of os/exec, or wrap ErrNoLog.
func Start(c Config) (*Process, error) {
	name := c.Name
	if name == "" {
		name = filepath.Base(c.Path)
	}
	cmd := exec.Command(c.Path, c.Args...)
	cmd.Env, cmd.Dir = c.Env, c.Dir
	cmd.SysProcAttr = attributes()
	var log io.Closer
	if c.Log != "" {
		f, err := os.OpenFile(c.Log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
		if err != nil {
			return nil, fmt.Errorf("start %s: %w: %w", name, ErrNoLog, err)
		}
		log = f
		cmd.Stdout, cmd.Stderr = f, f
	}
	p := &Process{name: name, cmd: cmd, done: make(chan struct{})}
	started := make(chan error, 1)
	go p.run(started, log)
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	return p, nil
}

// run starts the process and waits for its end on one locked thread: the
// signal for a dead parent is sent when the thread that forked ends, and a
// locked one lives as long as this function.
func (p *Process) run(started chan<- error, log io.Closer) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := p.cmd.Start()
	if log != nil {
		// The child has a descriptor of its own.
		err = errors.Join(err, log.Close())
	}
	started <- err
	if err != nil {
		if p.cmd.Process != nil {
			p.Kill()
			_ = p.cmd.Wait()
		}
		close(p.done)
		return
	}
	p.err = p.cmd.Wait()
	close(p.done)
}

// Name is the name the process was started under.
func (p *Process) Name() string { return p.name }

// PID is the process id; it is also the id of the process group.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Done is closed when the process has ended and was waited for.
func (p *Process) Done() <-chan struct{} { return p.done }

// Err says how the process ended, as os/exec's Wait does; nil when it ended
// with 0 or still runs.
func (p *Process) Err() error {
	select {
	case <-p.done:
		return p.err
	default:
		return nil
	}
}

// Kill sends SIGKILL to the process and its group. It does not wait.
func (p *Process) Kill() { p.signal(syscall.SIGKILL) }

// Stop sends SIGTERM to the process, waits up to grace for its end, then kills
// it and its group, and returns once it is gone. It reports whether SIGTERM was
// enough. Stopping what has ended does nothing.
func (p *Process) Stop(grace time.Duration) bool {
	p.signal(syscall.SIGTERM)
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case <-p.done:
		return true
	case <-timer.C:
	}
	select {
	case <-p.done: // Both may have happened; then it ended by itself.
		return true
	default:
	}
	p.Kill()
	<-p.done
	return false
}

func (p *Process) signal(s syscall.Signal) {
	select {
	case <-p.done:
		// The id may belong to somebody else by now.
	default:
		_ = syscall.Kill(-p.PID(), s)
	}
}
