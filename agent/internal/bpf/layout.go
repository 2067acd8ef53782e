package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/eniplane/eniplane/agent/internal/ipcache"
)

// Key is the key of an ipcache map, 24 bytes packed, as Cilium v1.15 and later
// lay it out (bpf/lib/eps.h): prefix length in host order, cluster id in host
// order, a zero, the family, and the address in network order.
type Key [24]byte

// Value is the value of layout v2, cilium_ipcache_v2 of Cilium v1.18 and later:
// number in host order, tunnel endpoint in network order (IPv4 in the first four
// of its bytes), two zeros, encryption key, flags.
type Value [24]byte

const (
	// staticBits are the leading bits of a key that are no address.
	staticBits = 32

	familyIPv4 = 1
	familyIPv6 = 2

	tunnelFlags = ipcache.FlagHasTunnel | ipcache.FlagIPv6Tunnel
)

// ErrForeignKey marks a key that no agent of ours writes, such as one of another
// cluster. Whoever wrote it may need it.
var ErrForeignKey = errors.New("foreign key")

// EncodeKey returns the key of a canonical prefix.
func EncodeKey(p netip.Prefix) Key {
	var k Key
	binary.NativeEndian.PutUint32(k[0:], uint32(staticBits+p.Bits()))
	if p.Addr().Is4() {
		k[7] = familyIPv4
		a := p.Addr().As4()
		copy(k[8:], a[:])
	} else {
		k[7] = familyIPv6
		a := p.Addr().As16()
		copy(k[8:], a[:])
	}
	return k
}

// DecodeKey returns the prefix of a key, masked: a map gives back host bits if
// somebody wrote them. The error is ErrForeignKey, wrapped.
func DecodeKey(k Key) (netip.Prefix, error) {
	if cluster := binary.NativeEndian.Uint16(k[4:]); cluster != 0 {
		return netip.Prefix{}, fmt.Errorf("%w: cluster %d", ErrForeignKey, cluster)
	}
	var addr netip.Addr
	switch k[7] {
	case familyIPv4:
		addr = netip.AddrFrom4([4]byte(k[8:12]))
	case familyIPv6:
		addr = netip.AddrFrom16([16]byte(k[8:24]))
	default:
		return netip.Prefix{}, fmt.Errorf("%w: family %d", ErrForeignKey, k[7])
	}
	bits := int64(binary.NativeEndian.Uint32(k[0:])) - staticBits
	if bits < 0 || bits > int64(addr.BitLen()) {
		return netip.Prefix{}, fmt.Errorf("%w: length %d", ErrForeignKey, bits)
	}
	return netip.PrefixFrom(addr, int(bits)).Masked(), nil
}

// EncodeValue returns the value of an entry. The flags about the tunnel endpoint
// follow from the endpoint: in this layout a missing one is said by a clear flag,
// not by a zero address.
func EncodeValue(e ipcache.Entry) Value {
	var v Value
	binary.NativeEndian.PutUint32(v[0:], e.Number)
	flags := e.Flags &^ tunnelFlags
	switch tunnel := e.TunnelEndpoint.Unmap(); {
	case tunnel.Is4():
		a := tunnel.As4()
		copy(v[4:], a[:])
		flags |= ipcache.FlagHasTunnel
	case tunnel.Is6():
		a := tunnel.As16()
		copy(v[4:], a[:])
		flags |= ipcache.FlagHasTunnel | ipcache.FlagIPv6Tunnel
	}
	v[22] = e.EncryptKey
	v[23] = byte(flags)
	return v
}

// DecodeValue returns the entry of a value. Encoding it again gives the value,
// unless a foreign writer set bytes that mean nothing.
func DecodeValue(v Value) ipcache.Entry {
	e := ipcache.Entry{
		Number:     binary.NativeEndian.Uint32(v[0:]),
		EncryptKey: v[22],
		Flags:      ipcache.Flags(v[23]) &^ tunnelFlags,
	}
	if flags := ipcache.Flags(v[23]); flags&ipcache.FlagHasTunnel != 0 {
		if flags&ipcache.FlagIPv6Tunnel != 0 {
			e.TunnelEndpoint = netip.AddrFrom16([16]byte(v[4:20]))
		} else {
			e.TunnelEndpoint = netip.AddrFrom4([4]byte(v[4:8]))
		}
	}
	return e
}

// FlagsOf returns all flags of an entry as the map shows them, with those that
// follow from the tunnel endpoint.
func FlagsOf(e ipcache.Entry) ipcache.Flags {
	v := EncodeValue(e)
	return ipcache.Flags(v[23])
}
