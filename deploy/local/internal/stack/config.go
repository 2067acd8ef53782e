package stack

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"regexp"
	"time"

	"github.com/eniplane/eniplane/deploy/local/internal/pins"
)

// Config says what to start.
type Config struct {
	// Run is the folder for logs, ports and data. Two stacks can not share one.
	Run string
	// Bin is the folder with the built programs.
	Bin string
	// Base is the folder deploy/base of the repository: each program runs with
	// the rights that its manifests give it, and no others.
	Base string
	// Nodes are the simulated nodes. None means DefaultNodes(3).
	Nodes []Node
	// PinRoot is the folder below /sys/fs/bpf for the agents' maps, one folder
	// per node in it. Empty means /sys/fs/bpf/eniplane.
	PinRoot string
	// PreAllocate is how many addresses each node keeps free. 0 means 2.
	PreAllocate int
	// RestoreDeadline is how long a restarted agent keeps what its map held
	// before. 0 means the agent's default.
	RestoreDeadline time.Duration
	// JaegerBinary is the path of a Jaeger all-in-one, which then takes the
	// place of the built-in trace receiver. Empty means the receiver.
	JaegerBinary string
	// Progress gets a line per step. Nil means none.
	Progress io.Writer
}

// Node is one simulated node.
type Node struct {
	Name     string // of the Kubernetes Node
	Type     string // EC2 instance type
	Instance string // EC2 instance id
	Zone     string // us-east-1a or us-east-1b
}

// DefaultNodes returns n nodes of type t3.medium (3 ENIs with 6 addresses each)
// over two zones: node-1, node-2 …
func DefaultNodes(n int) []Node {
	nodes := make([]Node, n)
	for i := range nodes {
		nodes[i] = Node{
			Name:     fmt.Sprintf("node-%d", i+1),
			Type:     "t3.medium",
			Instance: fmt.Sprintf("i-0%016x", i+1),
			Zone:     zones[min(i/2, 1)],
		}
	}
	return nodes
}

var nodeName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?$`)

// Validate completes c with its defaults and says what is wrong with it.
func (c *Config) Validate() error {
	for _, folder := range []*string{&c.Run, &c.Bin, &c.Base} {
		if *folder == "" {
			return errors.New("folders for the run, the programs and the manifests are required")
		}
		var err error
		if *folder, err = filepath.Abs(*folder); err != nil {
			return err
		}
	}
	if len(c.Nodes) == 0 {
		c.Nodes = DefaultNodes(3)
	}
	seen := make(map[string]bool)
	for _, n := range c.Nodes {
		switch {
		case !nodeName.MatchString(n.Name):
			return fmt.Errorf("node %q: not a name of at most 42 lower-case letters, digits and dashes", n.Name)
		case seen[n.Name] || seen[n.Instance]:
			return fmt.Errorf("node %s: name or instance id is used twice", n.Name)
		case subnetOf(n.Zone) == "":
			return fmt.Errorf("node %s: zone %q has no subnet", n.Name, n.Zone)
		}
		seen[n.Name], seen[n.Instance] = true, true
	}
	if c.PinRoot == "" {
		c.PinRoot = filepath.Join(pins.MountPoint, "eniplane")
	}
	if c.PreAllocate == 0 {
		c.PreAllocate = 2
	}
	if c.Progress == nil {
		c.Progress = io.Discard
	}
	return nil
}
