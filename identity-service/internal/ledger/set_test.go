package ledger_test

import (
	"errors"
	"net/netip"
	"slices"
	"testing"

	"github.com/eniplane/eniplane/identity-service/internal/ledger"
)

func TestSetIsItsContent(t *testing.T) {
	a := newSet(t, "10.0.0.0/8", "2001:db8::/32", "10.0.0.0/16")
	b := newSet(t, "2001:db8::/32", "10.0.0.0/16", "10.0.0.0/8", "10.0.0.0/16")
	if a.Digest != b.Digest || !slices.Equal(a.Prefixes, b.Prefixes) {
		t.Errorf("%v and %v differ", a, b)
	}
	if want := prefixes("10.0.0.0/8", "10.0.0.0/16", "2001:db8::/32"); !slices.Equal(a.Prefixes, want) {
		t.Errorf("order %v, want %v", a.Prefixes, want)
	}
	for _, other := range [][]string{{}, {"10.0.0.0/8"}, {"10.0.0.0/8", "10.0.0.0/16"}, {"10.0.0.0/8", "10.0.0.0/16", "2001:db8::/33"}} {
		if newSet(t, other...).Digest == a.Digest {
			t.Errorf("%v has the digest of %v", other, a.Prefixes)
		}
	}
	for _, world := range []string{"0.0.0.0/0", "::/0"} {
		if _, err := ledger.NewSet(prefixes("10.0.0.0/8", world)); !errors.Is(err, ledger.ErrPrefixReserved) {
			t.Errorf("%s: %v", world, err)
		}
	}
}

func TestOwnerKeysDiffer(t *testing.T) {
	owners := []ledger.Owner{
		{Kind: 1, Namespace: "a", Name: "bc", UID: "d"},
		{Kind: 1, Namespace: "ab", Name: "c", UID: "d"},
		{Kind: 1, Namespace: "a", Name: "b", UID: "cd"},
		{Kind: 2, Namespace: "a", Name: "bc", UID: "d"},
		{Kind: 1, Name: "bc", UID: "d"},
	}
	seen := make(map[ledger.OwnerKey]ledger.Owner)
	for _, o := range owners {
		if other, is := seen[o.Key()]; is {
			t.Errorf("%+v and %+v have one key", o, other)
		}
		seen[o.Key()] = o
		if len(o.Key()) != 64 {
			t.Errorf("%+v has a key of %d", o, len(o.Key()))
		}
	}
	slices.SortFunc(owners, ledger.Owner.Compare)
	if owners[0].Namespace != "" || owners[4].Kind != 2 {
		t.Errorf("order %+v", owners)
	}
}

func FuzzParsePrefixes(f *testing.F) {
	f.Add(ledger.AppendPrefix(nil, netip.MustParsePrefix("10.0.0.0/8")))
	f.Add(ledger.AppendPrefix(nil, netip.MustParsePrefix("2001:db8::/32")))
	f.Add([]byte{4, 10, 0, 0, 1, 8})
	f.Add([]byte{6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 1, 2, 3, 4, 128})
	f.Add([]byte{5, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		read, err := ledger.ParsePrefixes(b)
		if err != nil {
			if !errors.Is(err, ledger.ErrMalformed) {
				t.Errorf("error %v", err)
			}
			return
		}
		var again []byte
		for _, p := range read {
			again = ledger.AppendPrefix(again, p)
		}
		if !slices.Equal(again, b) {
			t.Errorf("%x became %x", b, again)
		}
	})
}
