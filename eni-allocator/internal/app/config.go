package app

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/eniplane/eniplane/eni-allocator/internal/ec2"
	"github.com/eniplane/eniplane/eni-allocator/internal/plan"
)

// ownTags is how the tags begin that only the allocator sets.
const ownTags = "eniplane.dev/"

// Config is what eni-allocator is told beside what every program is.
type Config struct {
	// NodeSyncer is where node-syncer serves.
	NodeSyncer string
	// ClusterName is on every ENI that is made, and tells those of one cluster
	// from those of another.
	ClusterName string
	// Kubeconfig is the path of a kubeconfig; empty means the Pod's own account.
	Kubeconfig string
	// APIServer overrides the server's URL; empty means the kubeconfig's.
	APIServer string
	// LeaseNamespace is where the Lease is kept.
	LeaseNamespace string
	// LeaseDuration is how long others wait for a leader that is silent.
	LeaseDuration time.Duration
	// ResyncInterval is how often everything is read anew.
	ResyncInterval time.Duration
	// Workers is how many nodes are worked on at once.
	Workers int
	// Tags are put on every ENI that is made.
	Tags map[string]string
	// FirstInterfaceIndex is for nodes that do not say.
	FirstInterfaceIndex int
	// EC2 is how EC2 is reached.
	EC2 ec2.Config
}

// placeholder stands in the manifests for the cluster's name. Two clusters that
// left it there would take each other's ENIs for their own.
const placeholder = "CHANGE-ME"

func (c *Config) addFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.NodeSyncer, "node-syncer", "127.0.0.1:7420", "address of node-syncer: host:port, or several with commas")
	fs.StringVar(&c.ClusterName, "cluster-name", "", "name of the cluster, on every ENI that is made; required")
	fs.StringVar(&c.Kubeconfig, "kubeconfig", "", "kubeconfig of the API server; empty means the Pod's own account")
	fs.StringVar(&c.APIServer, "api-server", "", "URL of the API server; empty means what the kubeconfig says")
	fs.StringVar(&c.LeaseNamespace, "lease-namespace", "kube-system", "namespace of the Lease")
	fs.DurationVar(&c.LeaseDuration, "lease-duration", 15*time.Second, "how long others wait for a leader that is silent: whole seconds, at least 3")
	fs.DurationVar(&c.ResyncInterval, "resync-interval", 10*time.Minute, "how often everything is read anew from EC2")
	fs.IntVar(&c.Workers, "workers", 32, "nodes that are worked on at once")
	fs.StringToStringVar(&c.Tags, "eni-tags", nil, "tags of every ENI that is made, as key=value,key=value")
	fs.IntVar(&c.FirstInterfaceIndex, "default-first-interface-index", 0, "lowest device index that gives addresses, for nodes that do not say")
	fs.StringVar(&c.EC2.Region, "region", "", "AWS region; empty means what the AWS SDK finds")
	fs.StringVar(&c.EC2.Endpoint, "ec2-endpoint", "", "URL of the EC2 API; empty means what the AWS SDK finds")
	fs.DurationVar(&c.EC2.CallTimeout, "ec2-timeout", 20*time.Second, "longest time for one call to EC2 with its retries")
	fs.Float64Var(&c.EC2.Rate, "ec2-rate", 20, "requests a second to EC2; 0 means no limit")
	fs.IntVar(&c.EC2.Burst, "ec2-burst", 100, "requests at once to EC2")
}

func (c *Config) validate() error {
	switch {
	case c.NodeSyncer == "":
		return errors.New("--node-syncer: is empty")
	case c.ClusterName == "":
		return errors.New("--cluster-name: is needed, so that no other cluster's ENIs are taken for ours")
	case c.ClusterName == placeholder:
		return fmt.Errorf("--cluster-name: %s is what the manifests say where your cluster's name belongs", placeholder)
	case len(c.ClusterName) > 256:
		return fmt.Errorf("--cluster-name: %d characters are more than the 256 of a tag", len(c.ClusterName))
	case c.LeaseNamespace == "":
		return errors.New("--lease-namespace: is empty")
	case c.LeaseDuration < 3*time.Second || c.LeaseDuration%time.Second != 0:
		return fmt.Errorf("--lease-duration: %s is not whole seconds, at least 3", c.LeaseDuration)
	case c.ResyncInterval < time.Second:
		return fmt.Errorf("--resync-interval: %s is less than a second", c.ResyncInterval)
	case c.Workers < 1:
		return fmt.Errorf("--workers: %d is less than 1", c.Workers)
	case c.FirstInterfaceIndex < 0 || c.FirstInterfaceIndex > 255:
		return fmt.Errorf("--default-first-interface-index: %d is not 0 to 255", c.FirstInterfaceIndex)
	case len(c.Tags) > 40:
		return fmt.Errorf("--eni-tags: %d tags; an ENI has room for 40 beside ours", len(c.Tags))
	}
	for _, k := range slices.Sorted(maps.Keys(c.Tags)) {
		if k == "" || strings.HasPrefix(k, ownTags) || strings.HasPrefix(strings.ToLower(k), "aws:") {
			return fmt.Errorf("--eni-tags: the key %q is empty or reserved", k)
		}
	}
	return c.EC2.Validate()
}

func (c *Config) policy() plan.Policy {
	return plan.Policy{Cluster: c.ClusterName, FirstInterfaceIndex: c.FirstInterfaceIndex, Tags: c.Tags}
}

func (c *Config) rest() (*rest.Config, error) {
	config, err := clientcmd.BuildConfigFromFlags(c.APIServer, c.Kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("--kubeconfig: %w", err)
	}
	config.UserAgent = "eniplane-eni-allocator"
	return config, nil
}
