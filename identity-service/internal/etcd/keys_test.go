package etcd

import (
	"net/netip"
	"reflect"
	"slices"
	"sort"
	"strings"
	"testing"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"pgregory.net/rapid"

	"github.com/eniplane/eniplane/identity-service/internal/index"
	"github.com/eniplane/eniplane/identity-service/internal/ledger"
	"github.com/eniplane/eniplane/internal/prefix"
)

func somePrefix(t *rapid.T) netip.Prefix {
	b := rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "address")
	addr, bits := netip.AddrFrom16([16]byte(b)), 128
	if rapid.Bool().Draw(t, "v4") {
		addr, bits = netip.AddrFrom4([4]byte(b[:4])), 32
	}
	p, err := prefix.Canonical(netip.PrefixFrom(addr, rapid.IntRange(0, bits).Draw(t, "bits")))
	if err != nil {
		t.Skip("not foldable")
	}
	return p
}

// Keys sort as prefixes do, and say the same when read back.
func TestPrefixKeys(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		prefixes := rapid.SliceOf(rapid.Custom(somePrefix)).Draw(t, "prefixes")
		slices.SortFunc(prefixes, prefix.Compare)
		keys := make([]string, len(prefixes))
		for i, p := range prefixes {
			keys[i] = prefixKey(p)
			g := ledger.Grant{Prefix: p, Number: 7}
			got := decode(&mvccpb.KeyValue{Key: []byte(keys[i]), Value: []byte(prefixValue(g, 12)), CreateRevision: 3}, false)
			if want := (index.Prefix{Grant: g, Created: 12, Revision: 3}); got != want {
				t.Fatalf("%s: %+v, want %+v", keys[i], got, want)
			}
			got = decode(&mvccpb.KeyValue{Key: []byte(numberKey(7)), Value: []byte(numberValue(g))}, false)
			if want := (index.Number{Grant: g}); got != want {
				t.Fatalf("%+v, want %+v", got, want)
			}
		}
		if !sort.StringsAreSorted(keys) {
			t.Fatalf("keys %q of %v are not in order", keys, prefixes)
		}
	})
}

func TestRecordsReadBack(t *testing.T) {
	session := ledger.Session{
		ID: ledger.SessionIDOf("node.a", "u/1"), Node: "node.a", NodeUID: "u/1", BootID: "b", Epoch: 4, Request: "r", Body: ledger.Body("x"),
	}
	holding := ledger.Holding{
		Owner: ledger.Owner{Kind: 2, Namespace: "ns", Name: "a/b", UID: "ü"}, Set: ledger.Body("set"),
		Epoch: 4, Generation: 9, Request: "r", Body: ledger.Body("y"), Changed: 77,
	}
	id := ledger.HoldingID{Session: session.ID, Owner: holding.Owner.Key()}
	set := ledger.Set{Digest: ledger.Body("set"), Prefixes: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8")}}
	for _, tc := range []struct {
		key, value string
		want       index.Record
	}{
		{sessionKey(session.ID), encodeSession(session), index.Session{Session: session, Revision: 5}},
		{holdingKey(id), encodeHolding(holding), index.Holding{ID: id, Holding: holding, Revision: 5}},
		{chunkKey(set.Digest, 0), string(part(set, 0)), index.Chunk{Set: set.Digest, Prefixes: set.Prefixes}},
		{setMetaKey(set.Digest), encode(setMetaValue{Parts: 1, Prefixes: 2}), index.SetMeta{Set: set.Digest, Parts: 1, Prefixes: 2, Revision: 5}},
		{keyMeta, encode(metaValue{LedgerID: "l", Format: 1, First: 2, Last: 3}), index.Meta{LedgerID: "l", Range: ledger.Range{First: 2, Last: 3}, Revision: 5}},
	} {
		kv := &mvccpb.KeyValue{Key: []byte(tc.key), Value: []byte(tc.value), ModRevision: 5}
		if got := decode(kv, false); !reflect.DeepEqual(got, tc.want) {
			t.Errorf("%s: %+v, want %+v", tc.key, got, tc.want)
		}
		if _, bad := decode(&mvccpb.KeyValue{Key: []byte(tc.key)}, true).(index.Malformed); bad {
			t.Errorf("%s: a deletion cannot be understood", tc.key)
		}
	}
}

func TestMalformedRecords(t *testing.T) {
	session := ledger.SessionIDOf("a", "u")
	d := ledger.Body("x").String()
	for _, kv := range [][2]string{
		{"", ""},
		{"nonsense", "1"},
		{"x/y", "1"},
		{"p/4/0a000000/008", ""},
		{"p/4/0a000000/008", "0 1"},
		{"p/4/0a000000/008", "5"},
		{"p/4/0a000000/008", "99999999999 1"},
		{"p/4/0a000001/008", "5 1"}, // Not canonical.
		{"p/4/0A000000/008", "5 1"},
		{"p/4/0a000000/8", "5 1"},
		{"p/4/0a0000/008", "5 1"},
		{"p/6/0a000000/008", "5 1"},
		{"p/6/00000000000000000000ffff0a000000/104", "5 1"}, // Has an IPv4 form.
		{"p/4/0a000000/033", "5 1"},
		{"n/5", "10.0.0.0/8"},
		{"n/0000000000", "10.0.0.0/8"},
		{"n/0000000005", "10.0.0.0"},
		{"s/" + d + "/0", "x"},
		{"s/" + d + "/000000", "x"},
		{"s/" + d + "/meta", "x"},
		{"s/abc/meta", "{}"},
		{"ss/" + string(session), "x"},
		{"ss/" + string(session), `{"node":"b","node_uid":"u","epoch":1}`},
		{"ss/" + string(session), `{"node":"a","node_uid":"u","epoch":0}`},
		{"h/" + string(session), "{}"},
		{"h/" + string(session) + "/o", "{}"},
		{"h//o", "{}"},
	} {
		got := decode(&mvccpb.KeyValue{Key: []byte(Root + kv[0]), Value: []byte(kv[1])}, false)
		bad, is := got.(index.Malformed)
		if !is || bad.Err == nil || !strings.HasSuffix(bad.Key, kv[0]) {
			t.Errorf("%s = %q was understood as %+v", kv[0], kv[1], got)
		}
	}
}

func FuzzDecode(f *testing.F) {
	f.Add("p/4/0a000000/008", "5 1")
	f.Add("h/a/b", "{}")
	f.Add("s/"+ledger.Body("x").String()+"/000001", "\x04\x0a\x00\x00\x00\x08")
	f.Fuzz(func(t *testing.T, key, value string) {
		for _, deleted := range []bool{false, true} {
			if decode(&mvccpb.KeyValue{Key: []byte(Root + key), Value: []byte(value)}, deleted) == nil {
				t.Error("nothing at all")
			}
		}
	})
}
