package ipcache

import (
	"cmp"
	"fmt"
	"strings"
)

// Kind is what kind of thing wants prefixes. The numbers are those of
// eniplane.identity.v1.OwnerKind, so that a conversion is a cast.
type Kind uint8

// The kinds of owners.
const (
	// KindNetworkPolicy is a Kubernetes NetworkPolicy.
	KindNetworkPolicy Kind = 1
	// KindCiliumNetworkPolicy is a CiliumNetworkPolicy.
	KindCiliumNetworkPolicy Kind = 2
	// KindCiliumClusterwideNetworkPolicy is a CiliumClusterwideNetworkPolicy.
	KindCiliumClusterwideNetworkPolicy Kind = 3
	// KindCiliumCIDRGroup is a CiliumCIDRGroup.
	KindCiliumCIDRGroup Kind = 4
	// KindNode is a node.
	KindNode Kind = 5
	// KindLocal is a caller on the agent's socket.
	KindLocal Kind = 6
	// KindRestore is what the map held before the agent restarted.
	KindRestore Kind = 7
)

// String returns the short name that Cilium uses for such a resource, where it
// has one.
func (k Kind) String() string {
	switch k {
	case KindNetworkPolicy:
		return "netpol"
	case KindCiliumNetworkPolicy:
		return "cnp"
	case KindCiliumClusterwideNetworkPolicy:
		return "ccnp"
	case KindCiliumCIDRGroup:
		return "cidrgroup"
	case KindNode:
		return "node"
	case KindLocal:
		return "local"
	case KindRestore:
		return "restore"
	default:
		return fmt.Sprintf("kind-%d", uint8(k))
	}
}

// Owner is who wants a set of prefixes. All four fields together are its
// identity: an object that was deleted and created again has another UID and is
// another owner.
type Owner struct {
	// Kind is required.
	Kind Kind `json:"kind"`
	// Namespace is empty for kinds without one.
	Namespace string `json:"namespace,omitempty"`
	// Name is required.
	Name string `json:"name"`
	// UID is required; for kinds without objects it is a text that never changes.
	UID string `json:"uid"`
}

// String returns kind/namespace/name, the form of Cilium's resource ids.
func (o Owner) String() string {
	return o.Kind.String() + "/" + o.Namespace + "/" + o.Name
}

// CompareOwners orders owners by kind, namespace, name and UID.
func CompareOwners(a, b Owner) int {
	return cmp.Or(
		cmp.Compare(a.Kind, b.Kind),
		strings.Compare(a.Namespace, b.Namespace),
		strings.Compare(a.Name, b.Name),
		strings.Compare(a.UID, b.UID),
	)
}

// Source is where an owner's knowledge comes from. A greater one is stronger;
// the order is Cilium's (pkg/source). It decides which metadata wins and never
// whether an entry exists.
type Source uint8

// The sources, weak to strong.
const (
	// SourceUnspecified is the weakest.
	SourceUnspecified Source = iota
	// SourceRestored is what a map held before a restart.
	SourceRestored
	// SourceGenerated is what an agent derived itself.
	SourceGenerated
	// SourceLocalAPI is a caller on the agent's socket.
	SourceLocalAPI
	// SourceDirectory is a file read from a directory.
	SourceDirectory
	// SourceClusterMesh is another cluster.
	SourceClusterMesh
	// SourceKubernetes is a plain Kubernetes object.
	SourceKubernetes
	// SourceCustomResource is a custom resource.
	SourceCustomResource
	// SourceKVStore is a key-value store.
	SourceKVStore
	// SourceLocal is the node itself.
	SourceLocal
	// SourceKubeAPIServer is the API server's own addresses.
	SourceKubeAPIServer
)
