package ipcachemap

import (
	"encoding/hex"
	"errors"
	"net/netip"
	"strings"
	"testing"
)

func TestDecode(t *testing.T) {
	for _, tc := range []struct {
		name, key, value string
		prefix           string
		number           uint32
	}{
		// The keys are dumps of Cilium's map, the second value a v2 one.
		{"IPv4", "28 00 00 00 00 00 00 01 0a 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00", "01 00 00 01 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00", "10.0.0.0/8", 16777217},
		{"IPv6", "a0 00 00 00 00 00 00 02 fd 00 00 00 00 00 00 00 00 00 00 00 00 00 00 01", "01 00 00 01 ac 12 00 03 00 00 00 00 00 00 00 00 00 00 00 00 00 00 03 02", "fd00::1/128", 16777217},
		{"bits below the static part", "1f 00 00 00 00 00 00 01 0a 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00", "", "", 0},
		{"too many bits", "41 00 00 00 00 00 00 01 0a 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00", "", "", 0},
		{"no family", "28 00 00 00 00 00 00 00 0a 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00", "", "", 0},
		{"cluster id", "28 00 00 00 01 00 00 01 0a 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00", "", "", 0},
		{"host bits", "28 00 00 00 00 00 00 01 0a 01 00 00 00 00 00 00 00 00 00 00 00 00 00 00", "", "", 0},
		{"bytes behind IPv4", "40 00 00 00 00 00 00 01 0a 01 00 00 00 00 00 00 00 00 00 00 00 00 00 01", "", "", 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var e Entry
			unhex(t, e.Key[:], tc.key)
			unhex(t, e.Value[:], tc.value)
			err := e.decode()
			if tc.prefix == "" {
				if !errors.Is(err, ErrLayout) {
					t.Errorf("got %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if e.Prefix != netip.MustParsePrefix(tc.prefix) || e.Number != tc.number {
				t.Errorf("got %s %d, want %s %d", e.Prefix, e.Number, tc.prefix, tc.number)
			}
			if key := Key(e.Prefix); key != e.Key {
				t.Errorf("key of %s is %x, want %x", e.Prefix, key, e.Key)
			}
		})
	}
}

func unhex(t *testing.T, into []byte, text string) {
	t.Helper()
	b, err := hex.DecodeString(strings.ReplaceAll(text, " ", ""))
	if err != nil {
		t.Fatal(err)
	}
	copy(into, b)
}
