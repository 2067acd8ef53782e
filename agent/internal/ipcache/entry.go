package ipcache

import (
	"net/netip"
	"strings"
)

// Flags are the flags of an entry, bit for bit those of cilium_ipcache_v2.
type Flags uint8

// The flags that Cilium v1.18 knows, and the two of later versions.
const (
	// FlagSkipTunnel: traffic to the prefix is not encapsulated.
	FlagSkipTunnel Flags = 1 << iota
	// FlagHasTunnel: the tunnel endpoint is valid.
	FlagHasTunnel
	// FlagIPv6Tunnel: the tunnel endpoint is an IPv6 address.
	FlagIPv6Tunnel
	// FlagRemoteCluster: the prefix is in another cluster (Cilium v1.19).
	FlagRemoteCluster
	// FlagUnroutable: nothing is sent to the prefix (after v1.19).
	FlagUnroutable
)

// derivedFlags follow from the tunnel endpoint.
const derivedFlags = FlagHasTunnel | FlagIPv6Tunnel

// Names returns the names of the flags that are set as `cilium-dbg bpf ipcache
// list` prints them, in the order of the bits. None gives nil.
func (f Flags) Names() []string {
	var names []string
	for i, name := range [...]string{"skiptunnel", "hastunnel", "ipv6tunnel", "remotecluster", "unroutable"} {
		if f&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	return names
}

// String returns the names joined by commas, or "<none>".
func (f Flags) String() string {
	if f == 0 {
		return "<none>"
	}
	return strings.Join(f.Names(), ",")
}

// Entry is what the map says about a prefix.
type Entry struct {
	// Number is the security identity. 0 never stands in a map.
	Number uint32
	// TunnelEndpoint is the node behind which the prefix is. The zero Addr means
	// none.
	TunnelEndpoint netip.Addr
	// EncryptKey is the index of the encryption key. 0 means none.
	EncryptKey uint8
	// Flags tell more. Those that say whether there is a tunnel endpoint follow
	// from TunnelEndpoint and are set by the map's edge.
	Flags Flags
}

// Entries are entries by canonical prefix.
type Entries map[netip.Prefix]Entry

// Metadata is what one owner says about one prefix beyond wanting it. The zero
// value says nothing.
type Metadata struct {
	// Source ranks this owner's say among the others.
	Source Source
	// TunnelEndpoint as in Entry. The zero Addr says nothing.
	TunnelEndpoint netip.Addr
	// EncryptKey as in Entry. 0 says nothing.
	EncryptKey uint8
	// Flags as in Entry. 0 says nothing.
	Flags Flags
}

// says reports whether m can change an entry.
func (m Metadata) says() bool {
	return m.TunnelEndpoint.IsValid() || m.EncryptKey != 0 || m.Flags != 0
}
