package bpf

import (
	"encoding/hex"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/eniplane/eniplane/agent/internal/ipcache"
)

func unhex(t *testing.T, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// The bytes are those of a little-endian machine.
func TestGoldenKeys(t *testing.T) {
	for _, tt := range []struct{ prefix, key string }{
		{"10.0.0.0/8", "28 00 00 00 00 00 00 01 0a 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00"},
		{"fd00::1/128", "a0 00 00 00 00 00 00 02 fd 00 00 00 00 00 00 00 00 00 00 00 00 00 00 01"},
		{"0.0.0.0/0", "20 00 00 00 00 00 00 01 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00"},
		{"128.0.0.0/1", "21 00 00 00 00 00 00 01 80 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00"},
		{"10.0.0.185/32", "40 00 00 00 00 00 00 01 0a 00 00 b9 00 00 00 00 00 00 00 00 00 00 00 00"},
		{"::/0", "20 00 00 00 00 00 00 02 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00"},
	} {
		t.Run(tt.prefix, func(t *testing.T) {
			p := netip.MustParsePrefix(tt.prefix)
			key := EncodeKey(p)
			if want := Key(unhex(t, tt.key)); key != want {
				t.Errorf("key\n% x, want\n% x", key, want)
			}
			if got, err := DecodeKey(key); err != nil || got != p {
				t.Errorf("decoded %s, %v", got, err)
			}
		})
	}
}

func TestGoldenValues(t *testing.T) {
	addr := netip.MustParseAddr
	for _, tt := range []struct {
		name  string
		entry ipcache.Entry
		value string
	}{
		{
			"tunnel",
			ipcache.Entry{Number: 16777217, TunnelEndpoint: addr("172.18.0.3"), EncryptKey: 3},
			"01 00 00 01 ac 12 00 03 00 00 00 00 00 00 00 00 00 00 00 00 00 00 03 02",
		},
		{
			"no tunnel",
			ipcache.Entry{Number: 16777217},
			"01 00 00 01 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00",
		},
		{
			"IPv6 tunnel, skipped",
			ipcache.Entry{Number: 2, TunnelEndpoint: addr("fd00::3"), Flags: ipcache.FlagSkipTunnel},
			"02 00 00 00 fd 00 00 00 00 00 00 00 00 00 00 00 00 00 00 03 00 00 00 07",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			value := EncodeValue(tt.entry)
			if want := Value(unhex(t, tt.value)); value != want {
				t.Errorf("value\n% x, want\n% x", value, want)
			}
			if got := DecodeValue(value); got != tt.entry {
				t.Errorf("decoded %+v, want %+v", got, tt.entry)
			}
		})
	}
}

func TestForeignKeys(t *testing.T) {
	for name, key := range map[string]string{
		"another cluster": "28 00 00 00 05 00 00 01 0a 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00",
		"no family":       "28 00 00 00 00 00 00 00 0a 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00",
		"too short":       "1f 00 00 00 00 00 00 01 0a 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00",
		"too long":        "41 00 00 00 00 00 00 01 0a 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00",
		"negative":        "ff ff ff ff 00 00 00 01 0a 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00",
	} {
		t.Run(name, func(t *testing.T) {
			if p, err := DecodeKey(Key(unhex(t, key))); !errors.Is(err, ErrForeignKey) {
				t.Errorf("decoded %s, %v", p, err)
			}
		})
	}
}

func TestDecodeMasks(t *testing.T) {
	key := EncodeKey(netip.MustParsePrefix("10.1.1.0/24"))
	key[11] = 77
	if p, err := DecodeKey(key); err != nil || p.String() != "10.1.1.0/24" {
		t.Errorf("decoded %s, %v", p, err)
	}
}

func TestLayoutRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPrefix(t)
		if got, err := DecodeKey(EncodeKey(p)); err != nil || got != p {
			t.Fatalf("%s came back as %s, %v", p, got, err)
		}
		e := ipcache.Entry{
			Number:     rapid.Uint32().Draw(t, "number"),
			EncryptKey: rapid.Byte().Draw(t, "key"),
			Flags:      ipcache.Flags(rapid.Byte().Draw(t, "flags")) &^ tunnelFlags,
		}
		if rapid.Bool().Draw(t, "tunnel") {
			e.TunnelEndpoint = drawPrefix(t).Addr()
		}
		if got := DecodeValue(EncodeValue(e)); got != e {
			t.Fatalf("%+v came back as %+v", e, got)
		}
	})
}

func drawPrefix(t *rapid.T) netip.Prefix {
	// Few different bytes, so that prefixes cover one another.
	b := rapid.SliceOfN(rapid.SampledFrom([]byte{0, 1, 0x80, 0xff}), 4, 4).Draw(t, "address")
	if rapid.Bool().Draw(t, "IPv4") {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte(b)), rapid.IntRange(0, 32).Draw(t, "bits")).Masked()
	}
	a := netip.MustParseAddr("fd00::").As16()
	copy(a[12:], b)
	return netip.PrefixFrom(netip.AddrFrom16(a), rapid.IntRange(0, 128).Draw(t, "bits")).Masked()
}
