// Package app puts the agent together.
package app

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/eniplane/eniplane/agent/internal/bpf"
	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
)

// Config is what the agent is told beside what every program is.
type Config struct {
	// NodeName is the Kubernetes node name; NodeUID the UID of the Node, if it is
	// not to be read from the API server.
	NodeName, NodeUID string
	// NodeSyncer, EniAllocator and IdentityService are where the services are.
	NodeSyncer, EniAllocator, IdentityService string
	// Kubeconfig is the path of a kubeconfig; empty means the pod's own account.
	// With neither there are no policies.
	Kubeconfig string
	// IMDSEndpoint is the metadata service; empty means what the SDK uses.
	IMDSEndpoint string
	// StateDir is where the agent keeps what must survive a restart.
	StateDir string
	// BootIDFile is where the kernel tells the boot id.
	BootIDFile string
	// MapPinPath is where the map is pinned; empty means below /sys/fs/bpf.
	MapPinPath string
	// MapMaxEntries is the size of a new map. MapLayout is its layout.
	MapMaxEntries uint32
	MapLayout     string
	// RestoreDeadline is how long what the map held before a restart is kept for
	// whoever wants it.
	RestoreDeadline time.Duration
	// ReuseCoolDown is how long an address rests after its release.
	ReuseCoolDown time.Duration
	// DualStack gives 0.0.0.0/0 and ::/0 the numbers of world-ipv4 and world-ipv6.
	DualStack bool

	watermarks watermarks
	eni        eniFlags
}

// watermarks are how many addresses the node wants. What is not set is not said.
type watermarks struct {
	preAllocate, minAllocate, maxAllocate, maxAboveWatermark optional[uint32]
}

// eniFlags are which interfaces the node may use. What is not set is not said.
type eniFlags struct {
	firstInterfaceIndex                                     optional[uint32]
	subnetIDs, securityGroups                               []string
	subnetTags, securityGroupTags, excludeInterfaceTags     map[string]string
	deleteOnTermination, usePrimaryAddress, disablePrefixes optional[bool]
}

func (c *Config) addFlags(fs *pflag.FlagSet) {
	host, _ := os.Hostname() // without one the flag is required
	fs.StringVar(&c.NodeName, "node-name", strings.ToLower(host), "Kubernetes name of this node")
	fs.StringVar(&c.NodeUID, "node-uid", "", "UID of this Node; empty means to read it from the API server")
	fs.StringVar(&c.NodeSyncer, "node-syncer", "", "address of node-syncer; several separated by commas")
	fs.StringVar(&c.EniAllocator, "eni-allocator", "", "address of eni-allocator; several separated by commas")
	fs.StringVar(&c.IdentityService, "identity-service", "", "address of identity-service; several separated by commas")
	fs.StringVar(&c.Kubeconfig, "kubeconfig", "", "kubeconfig of the API server; empty means the pod's own account, or no policies outside of a pod")
	fs.StringVar(&c.IMDSEndpoint, "imds-endpoint", "", "URL of the instance metadata service; empty means AWS_EC2_METADATA_SERVICE_ENDPOINT, or the instance's own")
	fs.StringVar(&c.StateDir, "state-dir", "/var/lib/eniplane", "folder for what must survive a restart")
	fs.StringVar(&c.BootIDFile, "boot-id-file", "/proc/sys/kernel/random/boot_id", "file with the kernel's boot id")
	fs.StringVar(&c.MapPinPath, "map-pin-path", "", "where the ipcache map is pinned; empty means /sys/fs/bpf/eniplane/<node>/cilium_ipcache_v2")
	fs.Uint32Var(&c.MapMaxEntries, "map-max-entries", bpf.DefaultMaxEntries, "size of a new map; one that exists keeps its own")
	fs.StringVar(&c.MapLayout, "map-layout", bpf.LayoutV2, "layout of the map: v2 (Cilium 1.18 and later)")
	fs.DurationVar(&c.RestoreDeadline, "restore-deadline", 10*time.Minute, "how long entries from before a restart are kept, at the least")
	fs.DurationVar(&c.ReuseCoolDown, "reuse-cool-down", 0, "how long an address rests before another pod gets it")
	fs.BoolVar(&c.DualStack, "dual-stack", false, "whether the datapath tells the world by family (numbers 9 and 10 instead of 2)")

	w := &c.watermarks
	fs.Var(&w.preAllocate, "pre-allocate", "addresses to keep free; absent means the default of the instance type")
	fs.Var(&w.minAllocate, "min-allocate", "addresses to have at the least; absent means no floor")
	fs.Var(&w.maxAllocate, "max-allocate", "addresses to have at the most; absent means what the instance can have")
	fs.Var(&w.maxAboveWatermark, "max-above-watermark", "addresses to allocate beyond need when allocating anyway")
	e := &c.eni
	fs.Var(&e.firstInterfaceIndex, "first-interface-index", "device index of the first interface that gives addresses; absent (which is not 0) means the allocator's default")
	fs.StringSliceVar(&e.subnetIDs, "subnet-ids", nil, "subnets of new interfaces")
	fs.StringToStringVar(&e.subnetTags, "subnet-tags", nil, "tags that subnets of new interfaces must carry")
	fs.StringSliceVar(&e.securityGroups, "security-groups", nil, "security groups of new interfaces")
	fs.StringToStringVar(&e.securityGroupTags, "security-group-tags", nil, "tags that security groups of new interfaces must carry")
	fs.StringToStringVar(&e.excludeInterfaceTags, "exclude-interface-tags", nil, "interfaces with all of these tags give no addresses")
	fs.Var(&e.deleteOnTermination, "delete-on-termination", "whether new interfaces go with the instance; absent means true")
	fs.Var(&e.usePrimaryAddress, "use-primary-address", "whether pods may use primary addresses; absent means false")
	fs.Var(&e.disablePrefixes, "disable-prefix-delegation", "whether prefixes are never assigned; absent means false")
}

func (c *Config) validate() error {
	for _, required := range []struct{ flag, value string }{
		{"node-name", c.NodeName},
		{"node-syncer", c.NodeSyncer},
		{"eni-allocator", c.EniAllocator},
		{"identity-service", c.IdentityService},
		{"state-dir", c.StateDir},
		{"boot-id-file", c.BootIDFile},
	} {
		if required.value == "" {
			return fmt.Errorf("--%s is empty", required.flag)
		}
	}
	switch {
	case strings.ContainsAny(c.NodeName, "/\x00") || len(c.NodeName) > 253:
		return fmt.Errorf("--node-name: %q is no name of a node", c.NodeName)
	case c.MapLayout == "v1":
		return errors.New("--map-layout: v1, the map of Cilium 1.17 and before, is not written yet")
	case c.MapLayout != bpf.LayoutV2:
		return fmt.Errorf("--map-layout: %q is unknown, want %s", c.MapLayout, bpf.LayoutV2)
	case c.MapMaxEntries == 0:
		return errors.New("--map-max-entries is 0")
	case c.RestoreDeadline < 0:
		return fmt.Errorf("--restore-deadline: %s is negative", c.RestoreDeadline)
	case c.ReuseCoolDown < 0:
		return fmt.Errorf("--reuse-cool-down: %s is negative", c.ReuseCoolDown)
	}
	return nil
}

func (c *Config) pinPath() string {
	if c.MapPinPath != "" {
		return c.MapPinPath
	}
	return filepath.Join("/sys/fs/bpf/eniplane", c.NodeName, "cilium_ipcache_v2")
}

func (w *watermarks) proto() *nodev1.Watermarks {
	return &nodev1.Watermarks{
		PreAllocate: w.preAllocate.value, MinAllocate: w.minAllocate.value,
		MaxAllocate: w.maxAllocate.value, MaxAboveWatermark: w.maxAboveWatermark.value,
	}
}

func (e *eniFlags) proto() *nodev1.EniSpec {
	return &nodev1.EniSpec{
		FirstInterfaceIndex: e.firstInterfaceIndex.value,
		SecurityGroups:      e.securityGroups, SecurityGroupTags: e.securityGroupTags,
		SubnetIds: e.subnetIDs, SubnetTags: e.subnetTags, ExcludeInterfaceTags: e.excludeInterfaceTags,
		DeleteOnTermination: e.deleteOnTermination.value, UsePrimaryAddress: e.usePrimaryAddress.value,
		DisablePrefixDelegation: e.disablePrefixes.value,
	}
}

// optional is a flag that may be absent, which differs from every value. The
// empty text makes it absent.
type optional[T uint32 | bool] struct {
	value *T
}

// String implements pflag.Value.
func (o *optional[T]) String() string {
	if o.value == nil {
		return ""
	}
	return fmt.Sprint(*o.value)
}

// Set implements pflag.Value.
func (o *optional[T]) Set(text string) error {
	if text == "" {
		o.value = nil
		return nil
	}
	v := new(T)
	var err error
	switch v := any(v).(type) {
	case *uint32:
		var n uint64
		n, err = strconv.ParseUint(text, 10, 32)
		*v = uint32(n)
	case *bool:
		*v, err = strconv.ParseBool(text)
	}
	if err == nil {
		o.value = v
	}
	return err
}

// Type implements pflag.Value.
func (o *optional[T]) Type() string {
	if _, ok := any(o).(*optional[bool]); ok {
		return "true|false"
	}
	return "number"
}
