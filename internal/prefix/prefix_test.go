package prefix_test

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/eniplane/eniplane/internal/prefix"
)

func TestParse(t *testing.T) {
	for _, tc := range []struct {
		in, want string
		err      error
	}{
		{in: "10.0.0.0/8", want: "10.0.0.0/8"},
		{in: "10.1.2.3/8", want: "10.0.0.0/8"},
		{in: "10.0.0.1/32", want: "10.0.0.1/32"},
		{in: "0.0.0.0/0", want: "0.0.0.0/0"},
		{in: "1.2.3.4/0", want: "0.0.0.0/0"},
		{in: "::/0", want: "::/0"},
		{in: "fd00::1/64", want: "fd00::/64"},
		{in: "FD00:0:0::1/128", want: "fd00::1/128"},
		{in: "::ffff:10.1.2.3/104", want: "10.0.0.0/8"},
		{in: "::ffff:a01:203/128", want: "10.1.2.3/32"},
		{in: "::ffff:0.0.0.0/96", want: "0.0.0.0/0"},
		{in: "::ffff:0.0.0.0/95", err: prefix.ErrNotFoldable},
		{in: "::ffff:10.0.0.0/64", err: prefix.ErrNotFoldable},
		{in: "::10.0.0.0/104", want: "::a00:0/104"}, // IPv4-compatible is not IPv4-mapped.
		{in: "10.0.0.0/08", err: prefix.ErrInvalid},
		{in: "10.0.0.0/33", err: prefix.ErrInvalid},
		{in: "10.0.0.0/-1", err: prefix.ErrInvalid},
		{in: "10.0.0.0/+8", err: prefix.ErrInvalid},
		{in: "10.0.0/8", err: prefix.ErrInvalid},
		{in: "010.0.0.0/8", err: prefix.ErrInvalid},
		{in: "10.0.0.1", err: prefix.ErrInvalid},
		{in: "", err: prefix.ErrInvalid},
		{in: "/8", err: prefix.ErrInvalid},
		{in: " 10.0.0.0/8", err: prefix.ErrInvalid},
		{in: "10.0.0.0/8\n", err: prefix.ErrInvalid},
		{in: "fe80::1%eth0/64", err: prefix.ErrInvalid},
		{in: "fd00::/129", err: prefix.ErrInvalid},
		{in: "10.0.0.0/8/8", err: prefix.ErrInvalid},
		{in: strings.Repeat("1", 1<<20) + "/8", err: prefix.ErrInvalid},
	} {
		got, err := prefix.Parse(tc.in)
		if !errors.Is(err, tc.err) {
			t.Errorf("Parse(%.40q): error %v, want %v", tc.in, err, tc.err)
			continue
		}
		if err == nil && got.String() != tc.want {
			t.Errorf("Parse(%.40q) = %s, want %s", tc.in, got, tc.want)
		}
	}
}

func TestCanonicalRefusesZeroValue(t *testing.T) {
	if _, err := prefix.Canonical(netip.Prefix{}); !errors.Is(err, prefix.ErrInvalid) {
		t.Errorf("error %v, want ErrInvalid", err)
	}
	if prefix.IsWorld(netip.Prefix{}) {
		t.Error("the zero value is the world")
	}
}

func TestCompareOrdersContainersFirst(t *testing.T) {
	sorted := []string{"0.0.0.0/0", "10.0.0.0/8", "10.0.0.0/16", "10.0.1.0/24", "::/0", "fd00::/8", "fd00::/64"}
	for i, a := range sorted {
		for j, b := range sorted {
			got := prefix.Compare(netip.MustParsePrefix(a), netip.MustParsePrefix(b))
			want := 0
			if i < j {
				want = -1
			} else if i > j {
				want = 1
			}
			if got != want {
				t.Errorf("Compare(%s, %s) = %d, want %d", a, b, got, want)
			}
		}
	}
}

// Whatever Parse accepts is masked, never IPv4-mapped, and is its own canonical form.
func FuzzParse(f *testing.F) {
	for _, s := range []string{"10.1.2.3/8", "::ffff:1.2.3.4/100", "::ffff:0:0/95", "fd00::/8", "x", "0.0.0.0/0"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		p, err := prefix.Parse(s)
		if err != nil {
			if !errors.Is(err, prefix.ErrInvalid) && !errors.Is(err, prefix.ErrNotFoldable) {
				t.Fatalf("Parse(%q): foreign error %v", s, err)
			}
			return
		}
		// The world is never the result of anything but a whole family, and a
		// network keeps its size and covers the address that was written.
		given := netip.MustParsePrefix(s)
		addr, bits := given.Addr(), given.Bits()
		if addr.Is4In6() {
			addr, bits = addr.Unmap(), bits-96
		}
		if p.Bits() != bits || prefix.IsWorld(p) != (bits == 0) || !p.Contains(addr) {
			t.Fatalf("Parse(%q) = %s is another network", s, p)
		}
		if p != p.Masked() || p.Addr().Is4In6() {
			t.Fatalf("Parse(%q) = %s is not canonical", s, p)
		}
		again, err := prefix.Parse(p.String())
		if err != nil || again != p {
			t.Fatalf("Parse(%q) = %s, again: %s, %v", s, p, again, err)
		}
	})
}
