package plan

import (
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/eniplane/eniplane/agent/internal/ipcache"
	"github.com/eniplane/eniplane/internal/reason"
)

var exclusive = Range{First: 1000, Last: 9999}

func entries(numbers map[string]uint32) ipcache.Entries {
	e := make(ipcache.Entries)
	for p, n := range numbers {
		e[netip.MustParsePrefix(p)] = ipcache.Entry{Number: n}
	}
	return e
}

func upsert(pairs ...any) Upsert {
	var u Upsert
	for i := 0; i < len(pairs); i += 2 {
		u.Entries = append(u.Entries, Item{
			Prefix: netip.MustParsePrefix(pairs[i].(string)),
			Entry:  ipcache.Entry{Number: uint32(pairs[i+1].(int))},
		})
	}
	return u
}

func remove(prefixes ...string) Delete {
	var d Delete
	for _, p := range prefixes {
		d.Prefixes = append(d.Prefixes, netip.MustParsePrefix(p))
	}
	return d
}

func TestDiff(t *testing.T) {
	type m = map[string]uint32
	for _, tt := range []struct {
		name       string
		have, want m
		incomplete bool
		batch      int
		ops        []Op
		blocked    []string
	}{
		{name: "nothing"},
		{name: "equal", have: m{"10.0.0.0/8": 1000}, want: m{"10.0.0.0/8": 1000}},
		{
			name: "add", want: m{"10.0.0.0/8": 1000, "10.0.0.0/16": 1001},
			ops: []Op{upsert("10.0.0.0/8", 1000, "10.0.0.0/16", 1001)},
		},
		{
			name: "additions before removals",
			have: m{"10.0.0.0/24": 1000}, want: m{"10.0.0.0/25": 1001, "10.0.0.128/25": 1002},
			ops: []Op{upsert("10.0.0.0/25", 1001, "10.0.0.128/25", 1002), remove("10.0.0.0/24")},
		},
		{
			name: "a changed number is one write in place",
			have: m{"10.0.0.0/8": 1000}, want: m{"10.0.0.0/8": 1001},
			ops: []Op{upsert("10.0.0.0/8", 1001)},
		},
		{
			name: "a number that moves leaves the old prefix first",
			have: m{"10.0.0.0/8": 1000, "11.0.0.0/8": 1001}, want: m{"12.0.0.0/8": 1000},
			ops: []Op{remove("10.0.0.0/8"), upsert("12.0.0.0/8", 1000), remove("11.0.0.0/8")},
		},
		{
			name: "a chain moves from its end",
			have: m{"10.0.0.0/8": 1000, "11.0.0.0/8": 1001},
			want: m{"10.0.0.0/8": 1001, "11.0.0.0/8": 1002},
			ops:  []Op{upsert("11.0.0.0/8", 1002), upsert("10.0.0.0/8", 1001)},
		},
		{
			name: "a circle is broken at its first prefix",
			have: m{"10.0.0.0/8": 1000, "11.0.0.0/8": 1001},
			want: m{"10.0.0.0/8": 1001, "11.0.0.0/8": 1000},
			ops:  []Op{remove("10.0.0.0/8"), upsert("11.0.0.0/8", 1000), upsert("10.0.0.0/8", 1001)},
		},
		{
			name: "shared numbers need no order",
			have: m{"10.0.0.1/32": 5, "10.0.0.2/32": 5}, want: m{"10.0.0.3/32": 5, "10.0.0.2/32": 5},
			ops: []Op{upsert("10.0.0.3/32", 5), remove("10.0.0.1/32")},
		},
		{
			name: "nothing is deleted before a full view", incomplete: true,
			have: m{"10.0.0.0/8": 1000}, want: m{"11.0.0.0/8": 1001},
			ops:     []Op{upsert("11.0.0.0/8", 1001)},
			blocked: []string{"10.0.0.0/8"},
		},
		{
			name: "what waits for such a deletion waits, too", incomplete: true,
			have:    m{"10.0.0.0/8": 1000, "11.0.0.0/8": 1001},
			want:    m{"11.0.0.0/8": 1000, "12.0.0.0/8": 1001},
			blocked: []string{"10.0.0.0/8", "11.0.0.0/8", "12.0.0.0/8"},
		},
		{
			name: "a circle waits for a full view", incomplete: true,
			have:    m{"10.0.0.0/8": 1000, "11.0.0.0/8": 1001},
			want:    m{"10.0.0.0/8": 1001, "11.0.0.0/8": 1000},
			blocked: []string{"10.0.0.0/8", "11.0.0.0/8"},
		},
		{
			name: "batches", batch: 2,
			want: m{"10.0.0.1/32": 1001, "10.0.0.2/32": 1002, "10.0.0.3/32": 1003},
			have: m{"10.0.1.1/32": 1011, "10.0.1.2/32": 1012, "10.0.1.3/32": 1013},
			ops: []Op{
				upsert("10.0.0.1/32", 1001, "10.0.0.2/32", 1002), upsert("10.0.0.3/32", 1003),
				remove("10.0.1.1/32", "10.0.1.2/32"), remove("10.0.1.3/32"),
			},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := Diff(Input{
				Have: entries(tt.have), Want: entries(tt.want),
				Complete: !tt.incomplete, Exclusive: exclusive, BatchSize: tt.batch,
			})
			if diff := cmp.Diff(tt.ops, got.Ops, cmpopts.EquateComparable(netip.Prefix{}, netip.Addr{})); diff != "" {
				t.Errorf("ops (-want +got):\n%s", diff)
			}
			var blocked []string
			for _, p := range got.Blocked {
				blocked = append(blocked, p.String())
			}
			if !slices.Equal(blocked, tt.blocked) {
				t.Errorf("blocked: %v, want %v", blocked, tt.blocked)
			}
			if (got.Why == reason.SourceNotListed) != (len(tt.blocked) > 0) {
				t.Errorf("why: %v with %d blocked", got.Why, len(tt.blocked))
			}
		})
	}
}

// Random maps with few prefixes and numbers meet every chain and circle. The
// laws are checked after each single entry that a kernel would write.
func TestDiffLaws(t *testing.T) {
	prefixes := []netip.Prefix{}
	for _, p := range []string{"10.0.0.0/8", "10.0.0.0/16", "10.0.0.0/24", "11.0.0.0/8", "::/0", "fd00::/8", "fd00::1/128"} {
		prefixes = append(prefixes, netip.MustParsePrefix(p))
	}
	// One number per prefix at most, as in a sound map.
	table := func(t *rapid.T, name string) ipcache.Entries {
		e := make(ipcache.Entries)
		numbers := rapid.Permutation([]uint32{1000, 1001, 1002, 1003, 1004, 1005, 1006, 7}).Draw(t, name)
		for i, p := range prefixes {
			if rapid.Bool().Draw(t, name+" has "+p.String()) {
				e[p] = ipcache.Entry{Number: numbers[i], EncryptKey: rapid.Uint8Range(0, 1).Draw(t, "key")}
			}
		}
		return e
	}
	rapid.Check(t, func(t *rapid.T) {
		have, want := table(t, "have"), table(t, "want")
		in := Input{
			Have: maps.Clone(have), Want: want, Exclusive: exclusive,
			Complete: rapid.Bool().Draw(t, "complete"), BatchSize: rapid.IntRange(1, 3).Draw(t, "batch"),
		}
		p := Diff(in)
		now := maps.Clone(have)
		gone := make(map[netip.Prefix]int)
		check := func() {
			holder := make(map[uint32]netip.Prefix)
			for p, e := range now {
				if other, ok := holder[e.Number]; ok && exclusive.Contains(e.Number) {
					t.Fatalf("number %d at %s and %s", e.Number, p, other)
				}
				holder[e.Number] = p
			}
		}
		check()
		late := false
		for _, op := range p.Ops {
			switch op := op.(type) {
			case Upsert:
				if late {
					t.Fatal("an addition after a removal that nothing waited for")
				}
				for _, i := range op.Entries {
					now[i.Prefix] = i.Entry
					check()
				}
			case Delete:
				for _, q := range op.Prefixes {
					if !in.Complete {
						t.Fatalf("%s deleted before a full view", q)
					}
					if _, ok := want[q]; ok {
						gone[q]++
					} else if !takenOver(have, want, q) {
						late = true
					}
					delete(now, q)
				}
			}
		}
		if len(gone) > 0 && !circular(have, want) {
			t.Fatalf("%v was absent although wanted before and after", gone)
		}
		if in.Complete && !maps.Equal(now, want) {
			t.Fatalf("ends with %v, want %v", now, want)
		}
		if in.Complete && len(p.Blocked) > 0 {
			t.Fatalf("blocked with a full view: %v", p.Blocked)
		}
		for q, e := range want {
			if now[q] != e && !slices.Contains(p.Blocked, q) {
				t.Fatalf("%s is neither done nor blocked", q)
			}
		}
		in.Have = now
		if again := Diff(in); len(again.Ops) > 0 {
			t.Fatalf("planning again gives %v", again.Ops)
		}
	})
}

// takenOver reports whether another prefix will have q's present number.
func takenOver(have, want ipcache.Entries, q netip.Prefix) bool {
	n := have[q].Number
	for p, e := range want {
		if p != q && e.Number == n && exclusive.Contains(n) {
			return true
		}
	}
	return false
}

// circular reports whether numbers move in a circle of prefixes.
func circular(have, want ipcache.Entries) bool {
	for start := range have {
		at := start
		for range len(have) + 1 {
			n := have[at].Number
			next, ok := netip.Prefix{}, false
			for p, e := range want {
				if p != at && e.Number == n && exclusive.Contains(n) {
					next, ok = p, true
				}
			}
			if _, there := have[next]; !ok || !there {
				break
			}
			if at = next; at == start {
				return true
			}
		}
	}
	return false
}
