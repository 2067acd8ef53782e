package stack

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
)

// RecordFile is the name of the file in the run folder that describes a running
// stack, or what a crashed one left behind.
const RecordFile = "stack.json"

// Record describes a running stack: for whoever wants to look, and for whoever
// has to clean up after a crash.
type Record struct {
	// Boot is the kernel's boot id: after another boot no process and no mount
	// of this record can exist.
	Boot string `json:"boot"`
	// Supervisor is the process that started all others.
	Supervisor ProcessID `json:"supervisor"`
	// Processes are the started processes, in the order of their start.
	Processes []Process `json:"processes"`
	// Nodes are the simulated nodes.
	Nodes []NodeRecord `json:"nodes,omitempty"`
	// Kubeconfig is the path of an administrator's kubeconfig.
	Kubeconfig string `json:"kubeconfig,omitempty"`
	// EC2 is the base URL of the EC2 simulator.
	EC2 string `json:"ec2,omitempty"`
	// OTLP is host:port of the OTLP/gRPC endpoint.
	OTLP string `json:"otlp,omitempty"`
	// Jaeger is the base URL of Jaeger's query API. Empty without Jaeger.
	Jaeger string `json:"jaeger,omitempty"`
	// PinRoot is the folder with the pinned maps. Empty means that the agents
	// keep their maps in memory.
	PinRoot string `json:"pinRoot,omitempty"`
	// Mounted tells whether the stack mounted the BPF file system.
	Mounted bool `json:"mounted,omitempty"`
	// Sockets is a folder outside the run folder for the agents' sockets. Empty
	// means that they are in the run folder.
	Sockets string `json:"sockets,omitempty"`
}

// ProcessID names a process for good: ids alone are used again.
type ProcessID struct {
	PID int `json:"pid"`
	// Started is the start time in clock ticks since boot, as in /proc/PID/stat.
	Started uint64 `json:"started"`
}

// Process is one process of the stack.
type Process struct {
	ProcessID
	Name string `json:"name"`
	Log  string `json:"log"` // path
	Ports
}

// Ports says where a program of ours listens. Empty for other processes.
type Ports struct {
	GRPC    string `json:"grpc,omitempty"`    // host:port, or unix:///path
	Health  string `json:"health,omitempty"`  // host:port
	Metrics string `json:"metrics,omitempty"` // host:port
}

// NodeRecord is one simulated node.
type NodeRecord struct {
	Name     string `json:"name"`
	Instance string `json:"instance"`
	// Socket is the target of the agent: unix:///path.
	Socket string `json:"socket"`
	// Pin is the path of the node's pinned map. Empty for a map in memory.
	Pin string `json:"pin,omitempty"`
	// IMDS is the base URL of its metadata service.
	IMDS string `json:"imds"`
}

// Process returns the process of that name, and whether there is one.
func (r Record) Process(name string) (Process, bool) {
	for _, p := range r.Processes {
		if p.Name == name {
			return p, true
		}
	}
	return Process{}, false
}

// ReadRecord reads the record in a run folder. The error is os.ErrNotExist
// where no stack runs and none crashed.
func ReadRecord(run string) (Record, error) {
	text, err := os.ReadFile(filepath.Join(run, RecordFile))
	if err != nil {
		return Record{}, err
	}
	var r Record
	if err := json.Unmarshal(text, &r); err != nil {
		return Record{}, fmt.Errorf("%s: %w", filepath.Join(run, RecordFile), err)
	}
	return r, nil
}

// keeper keeps a Record and its file the same.
type keeper struct {
	run string

	mu  sync.Mutex // guards rec and the file: an older text must not replace a newer one
	rec Record
}

func newKeeper(run string) (*keeper, error) {
	k := &keeper{run: run, rec: Record{Boot: bootID(), Supervisor: identify(os.Getpid())}}
	return k, k.update(func(*Record) {})
}

// update changes the record and writes it. The file is replaced in one step.
func (k *keeper) update(change func(*Record)) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	change(&k.rec)
	text, err := json.MarshalIndent(k.rec, "", "  ")
	if err != nil {
		return err
	}
	return replaceFile(filepath.Join(k.run, RecordFile), append(text, '\n'))
}

// setProcess enters a process, in place of an earlier one of the same name.
func (k *keeper) setProcess(p Process) error {
	return k.update(func(r *Record) {
		for i := range r.Processes {
			if r.Processes[i].Name == p.Name {
				r.Processes[i] = p
				return
			}
		}
		r.Processes = append(r.Processes, p)
	})
}

// get returns a copy of the record.
func (k *keeper) get() Record {
	k.mu.Lock()
	defer k.mu.Unlock()
	r := k.rec
	r.Processes = append([]Process(nil), r.Processes...)
	r.Nodes = append([]NodeRecord(nil), r.Nodes...)
	return r
}

func replaceFile(path string, content []byte) error {
	temp, err := os.CreateTemp(filepath.Dir(path), ".new-*")
	if err != nil {
		return err
	}
	_, err = temp.Write(content)
	if err := errors.Join(err, temp.Close()); err != nil {
		return errors.Join(err, os.Remove(temp.Name()))
	}
	return os.Rename(temp.Name(), path)
}

// bootID is empty where the kernel does not tell.
func bootID() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// identify returns what names the process with an id now. Started is 0 if there
// is none.
func identify(pid int) ProcessID {
	id := ProcessID{PID: pid}
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return id
	}
	// The second field is the program's name in parentheses and may hold
	// anything; the start time is the 22nd.
	_, rest, _ := strings.Cut(string(stat[strings.LastIndexByte(string(stat), ')')+1:]), " ")
	fields := strings.Fields(rest)
	const startTime = 22 - 3
	if len(fields) > startTime && fields[0] != "Z" {
		id.Started, _ = strconv.ParseUint(fields[startTime], 10, 64)
	}
	return id
}

// lives tells whether the very process still runs.
func (p ProcessID) lives() bool {
	return p.PID > 0 && p.Started > 0 && identify(p.PID) == p
}
