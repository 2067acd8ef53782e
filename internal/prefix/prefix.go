// Package prefix is the only canonicalisation of CIDRs in the repository: host
// bits are masked and IPv4-mapped IPv6 prefixes are folded into IPv4, so that
// one network has one key however it was spelt. What a prefix means, and who
// holds it, does not belong here.
package prefix

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
)

var (
	// ErrInvalid is returned for a text that is no CIDR.
	ErrInvalid = errors.New("not a CIDR")
	// ErrNotFoldable is returned for an IPv4-mapped IPv6 prefix shorter than /96: it
	// covers IPv4 and other addresses, so it can be said in neither family.
	ErrNotFoldable = errors.New("IPv4-mapped prefix shorter than /96")
)

// mappedBits is where the IPv4 address begins in an IPv4-mapped one (RFC 4291,
// section 2.5.5.2).
const mappedBits = 96

// Parse returns the canonical form of a CIDR in text. The length is required:
// "10.0.0.1" is refused. Errors are ErrInvalid and ErrNotFoldable, wrapped.
func Parse(s string) (netip.Prefix, error) {
	// The longest spelling of a CIDR has 49 bytes; more is not worth echoing.
	const longest = 64
	if len(s) > longest {
		return netip.Prefix{}, fmt.Errorf("%w: %d bytes long", ErrInvalid, len(s))
	}
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("%w: %q", ErrInvalid, s)
	}
	return Canonical(p)
}

// Canonical returns the canonical form of a prefix; applied twice it changes
// nothing. Errors are ErrInvalid (the zero Prefix) and ErrNotFoldable, wrapped.
func Canonical(p netip.Prefix) (netip.Prefix, error) {
	if !p.IsValid() {
		return netip.Prefix{}, fmt.Errorf("%w: zero value", ErrInvalid)
	}
	addr, bits := p.Addr(), p.Bits()
	if addr.Is4In6() {
		if bits < mappedBits {
			return netip.Prefix{}, fmt.Errorf("%w: %s", ErrNotFoldable, p)
		}
		addr, bits = addr.Unmap(), bits-mappedBits
	}
	return netip.PrefixFrom(addr, bits).Masked(), nil
}

// IsWorld reports whether p covers a whole family: 0.0.0.0/0 or ::/0. These are
// Cilium's reserved world identities and never get a number.
func IsWorld(p netip.Prefix) bool {
	return p.IsValid() && p.Bits() == 0
}

// Compare orders canonical prefixes: IPv4 before IPv6, then by address, then the
// shorter one first, so that a prefix precedes what it contains.
func Compare(a, b netip.Prefix) int {
	return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
}
