package stack

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/eniplane/eniplane/deploy/local/internal/pins"
)

// ErrRunning says that a stack runs in the run folder.
var ErrRunning = errors.New("a stack is running")

// What a run folder holds beside the record; all but the logs goes with the
// stack.
const (
	logsFolder     = "logs"
	portsFolder    = "ports"
	dataFolder     = "data"
	kubeFolder     = "kube"
	socketsFolder  = "sock"
	topologyFile   = "topology.json"
	endpointsFile  = "ec2sim.json"
	killedDeadline = 10 * time.Second
)

// lockRun takes the run folder. The lock goes with this process, however it
// ends.
func lockRun(run string) (*os.File, error) {
	if err := os.MkdirAll(run, 0o755); err != nil {
		return nil, err
	}
	f, err := os.Open(run)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		_ = f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("%s: %w", run, ErrRunning)
		}
		return nil, fmt.Errorf("lock %s: %w", run, err)
	}
	return f, nil
}

// Down stops the stack that runs in a run folder and waits for its end, or
// removes what a crashed one left there. Where neither is, it does nothing.
func Down(ctx context.Context, run string) error {
	if _, err := os.Stat(run); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for asked := false; ; {
		lock, err := lockRun(run)
		if err == nil {
			return errors.Join(clean(run), lock.Close())
		}
		if !errors.Is(err, ErrRunning) {
			return err
		}
		if rec, readErr := ReadRecord(run); !asked && readErr == nil && rec.Supervisor.lives() {
			if err := syscall.Kill(rec.Supervisor.PID, syscall.SIGTERM); err != nil {
				return fmt.Errorf("stop process %d: %w", rec.Supervisor.PID, err)
			}
			asked = true
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", err, ctx.Err())
		case <-tick.C:
		}
	}
}

// clean removes everything that the record in a run folder speaks of, then the
// folder's own content but the logs. The caller holds the lock.
func clean(run string) error {
	rec, err := ReadRecord(run)
	if errors.Is(err, fs.ErrNotExist) {
		return removeFiles(run)
	}
	if err != nil {
		// What can not be read can not be acted on, and is in nobody's way.
		return errors.Join(removeFiles(run), os.Remove(filepath.Join(run, RecordFile)))
	}
	var errs []error
	if rec.Boot == bootID() {
		for _, p := range rec.Processes {
			errs = append(errs, killLeftover(p))
		}
		if rec.PinRoot != "" {
			errs = append(errs, pins.Clean(rec.PinRoot, rec.Mounted))
		}
	}
	if rec.Sockets != "" {
		errs = append(errs, os.RemoveAll(rec.Sockets))
	}
	errs = append(errs, removeFiles(run))
	if err := errors.Join(errs...); err != nil {
		// The record stays: the next attempt needs it.
		return fmt.Errorf("clean %s: %w", run, err)
	}
	return os.Remove(filepath.Join(run, RecordFile))
}

func killLeftover(p Process) error {
	if !p.lives() {
		return nil
	}
	if err := syscall.Kill(-p.PID, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("kill %s: %w", p.Name, err)
	}
	for deadline := time.Now().Add(killedDeadline); p.lives(); {
		if time.Now().After(deadline) {
			return fmt.Errorf("%s (process %d) does not die", p.Name, p.PID)
		}
		time.Sleep(10 * time.Millisecond)
	}
	return nil
}

func removeFiles(run string) error {
	var errs []error
	for _, name := range []string{portsFolder, dataFolder, kubeFolder, socketsFolder, topologyFile, endpointsFile} {
		errs = append(errs, os.RemoveAll(filepath.Join(run, name)))
	}
	return errors.Join(errs...)
}
