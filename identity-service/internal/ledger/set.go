package ledger

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"github.com/eniplane/eniplane/internal/prefix"
)

// Set is an immutable set of canonical prefixes, named by its content. Two
// owners, or a thousand nodes, that want the same prefixes share one set.
type Set struct {
	// Digest names the set.
	Digest Digest
	// Prefixes are sorted by prefix.Compare and distinct. They are not changed.
	Prefixes []netip.Prefix
}

// NewSet returns the set of the given canonical prefixes. Duplicates count once;
// the argument is not changed. It returns ErrPrefixReserved for /0.
func NewSet(prefixes []netip.Prefix) (Set, error) {
	sorted := slices.Clone(prefixes)
	slices.SortFunc(sorted, prefix.Compare)
	sorted = slices.Compact(sorted)
	for _, p := range sorted {
		if prefix.IsWorld(p) {
			return Set{}, fmt.Errorf("%w: %s", ErrPrefixReserved, p)
		}
	}
	return Set{Digest: digestOf(sorted), Prefixes: sorted}, nil
}

func digestOf(sorted []netip.Prefix) Digest {
	h := sha256.New()
	var buffer [24]byte
	for _, p := range sorted {
		h.Write(AppendPrefix(buffer[:0], p))
	}
	return Digest(h.Sum(nil))
}

// AppendPrefix appends the binary form of a canonical prefix: a byte 4 or 6, the
// address, and a byte with the length.
func AppendPrefix(b []byte, p netip.Prefix) []byte {
	if p.Addr().Is4() {
		a := p.Addr().As4()
		b = append(append(b, 4), a[:]...)
	} else {
		a := p.Addr().As16()
		b = append(append(b, 6), a[:]...)
	}
	return append(b, byte(p.Bits()))
}

// ParsePrefixes reads what AppendPrefix wrote, several times. It returns
// ErrMalformed for anything else, non-canonical prefixes included.
func ParsePrefixes(b []byte) ([]netip.Prefix, error) {
	out := make([]netip.Prefix, 0, len(b)/6)
	for len(b) > 0 {
		size := 4
		if b[0] == 6 {
			size = 16
		}
		if (b[0] != 4 && b[0] != 6) || len(b) < size+2 {
			return nil, fmt.Errorf("%w: prefix %d of a set", ErrMalformed, len(out))
		}
		addr, _ := netip.AddrFromSlice(b[1 : 1+size])
		p := netip.PrefixFrom(addr, int(b[1+size]))
		if canonical, err := prefix.Canonical(p); err != nil || canonical != p {
			return nil, fmt.Errorf("%w: prefix %d of a set is not canonical", ErrMalformed, len(out))
		}
		out = append(out, p)
		b = b[size+2:]
	}
	return out, nil
}

// PreferenceBody returns a digest of the preferred numbers of a request, for
// telling whether two requests have the same body. wanted is in the order of the
// set.
func PreferenceBody(wanted []Wanted) Digest {
	h := sha256.New()
	var buffer [32]byte
	for _, w := range wanted {
		if w.Preferred != 0 {
			h.Write(binary.BigEndian.AppendUint32(AppendPrefix(buffer[:0], w.Prefix), uint32(w.Preferred)))
		}
	}
	return Digest(h.Sum(nil))
}
