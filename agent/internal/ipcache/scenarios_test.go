package ipcache

import (
	"fmt"
	"net/netip"
	"testing"
)

func owner(kind Kind, name string) Owner {
	return Owner{Kind: kind, Namespace: "ns", Name: name, UID: "uid-" + name}
}

func set(prefixes ...string) map[netip.Prefix]Metadata {
	s := make(map[netip.Prefix]Metadata)
	for _, p := range prefixes {
		s[netip.MustParsePrefix(p)] = Metadata{}
	}
	return s
}

func (c *Cache) mustWant(t *testing.T, p string, number uint32) {
	t.Helper()
	e, ok := c.Wanted(netip.MustParsePrefix(p))
	if !ok && number != 0 || e.Number != number {
		t.Fatalf("%s: number %d (%v), want %d", p, e.Number, ok, number)
	}
}

// cilium#27210: the entry of a prefix that a policy wants went ten minutes after
// a restart, when restore gave back a reference that was not its own.
func TestB01RestoreEndsWhileAPolicyHolds(t *testing.T) {
	c := NewCache(Config{})
	p := netip.MustParsePrefix("10.0.0.0/8")
	restore, cnp := owner(KindRestore, "node-1"), owner(KindCiliumNetworkPolicy, "x")
	c.Replace(restore, map[netip.Prefix]Metadata{p: {Source: SourceRestored}})
	c.Learn(p, 1000, 0)
	c.Replace(cnp, map[netip.Prefix]Metadata{p: {Source: SourceCustomResource}})
	c.Learn(p, 1000, 7)
	c.RemoveOwner(restore)
	c.mustWant(t, "10.0.0.0/8", 1000)
	c.RemoveOwner(cnp)
	c.mustWant(t, "10.0.0.0/8", 0)
	if c.Len() != 0 {
		t.Errorf("%d records left", c.Len())
	}
}

// cilium#24502, #34715: a source that got stronger must not decide who may end
// an entry.
func TestB02B04SourceNeverDecidesDeletion(t *testing.T) {
	for _, first := range []string{"weak", "strong"} {
		t.Run(first+" goes first", func(t *testing.T) {
			c := NewCache(Config{})
			p := netip.MustParsePrefix("192.0.2.1/32")
			weak, strong := owner(KindLocal, "weak"), owner(KindCiliumNetworkPolicy, "strong")
			c.Upsert(weak, p, Metadata{Source: SourceGenerated})
			c.Upsert(strong, p, Metadata{Source: SourceCustomResource})
			c.Learn(p, 1000, 1)
			a, b := weak, strong
			if first == "strong" {
				a, b = strong, weak
			}
			c.Remove(a, p)
			c.mustWant(t, "192.0.2.1/32", 1000)
			c.Remove(b, p)
			c.mustWant(t, "192.0.2.1/32", 0)
		})
	}
}

// cilium#33120: two owners acquire and release one prefix in any order.
func TestB03EveryOrderOfTwoOwners(t *testing.T) {
	p := netip.MustParsePrefix("10.0.0.0/8")
	a, b := owner(KindLocal, "legacy"), owner(KindCiliumNetworkPolicy, "meta")
	acquire := func(o Owner) func(*Cache) { return func(c *Cache) { c.Upsert(o, p, Metadata{}) } }
	release := func(o Owner) func(*Cache) { return func(c *Cache) { c.Remove(o, p) } }
	steps := map[string]func(*Cache){"Aa": acquire(a), "Ab": acquire(b), "Ra": release(a), "Rb": release(b)}
	for _, order := range [][]string{
		{"Aa", "Ab", "Ra", "Rb"},
		{"Aa", "Ab", "Rb", "Ra"},
		{"Ab", "Aa", "Ra", "Rb"},
		{"Ab", "Aa", "Rb", "Ra"},
		{"Aa", "Ra", "Ab", "Rb"},
		{"Ab", "Rb", "Aa", "Ra"},
	} {
		t.Run(fmt.Sprint(order), func(t *testing.T) {
			c := NewCache(Config{})
			held := map[byte]bool{}
			for _, step := range order {
				steps[step](c)
				held[step[1]] = step[0] == 'A'
				c.Learn(p, 1000, 1)
				if _, ok := c.Wanted(p); ok != (held['a'] || held['b']) {
					t.Fatalf("after %s: wanted %v, holders %v", step, ok, held)
				}
			}
			if c.Len() != 0 {
				t.Errorf("%d records left", c.Len())
			}
		})
	}
}

// cilium#39176 and its three follow-ups: a counter in front of the owner set.
func TestB05AcquiringAThousandTimesIsOnce(t *testing.T) {
	c := NewCache(Config{})
	p := netip.MustParsePrefix("10.0.0.0/8")
	o, other := owner(KindCiliumNetworkPolicy, "x"), owner(KindLocal, "fqdn")
	for range 1000 {
		c.Upsert(o, p, Metadata{})
	}
	c.Upsert(other, p, Metadata{})
	c.Remove(o, p)
	if got := c.OwnersOf(p); len(got) != 1 || got[0] != other {
		t.Fatalf("owners %v", got)
	}
	c.Remove(other, p)
	if c.Len() != 0 {
		t.Errorf("%d records left", c.Len())
	}
}

// cilium#6017: releasing what is not held, also of the world prefixes.
func TestB07ReleaseWithoutAcquire(t *testing.T) {
	for _, text := range []string{"10.0.0.0/8", "0.0.0.0/0", "::/0"} {
		t.Run(text, func(t *testing.T) {
			c := NewCache(Config{})
			p := netip.MustParsePrefix(text)
			o, o2 := owner(KindLocal, "o"), owner(KindLocal, "o2")
			c.Upsert(o, p, Metadata{})
			c.Remove(o, p)
			if c.Remove(o, p) {
				t.Error("the second release changed something")
			}
			c.Upsert(o2, p, Metadata{})
			if c.Remove(o, p) || len(c.OwnersOf(p)) != 1 {
				t.Errorf("owners %v", c.OwnersOf(p))
			}
		})
	}
}

// cilium#5877: the old set of a replaced rule.
func TestB08ReplaceGivesUpTheOldSet(t *testing.T) {
	c := NewCache(Config{})
	o := owner(KindNetworkPolicy, "rule")
	c.Replace(o, set("10.0.1.0/24", "10.0.2.0/24"))
	c.Changes()
	c.Replace(o, set("10.0.2.0/24", "10.0.3.0/24"))
	changed := c.Changes()
	if len(changed) != 2 {
		t.Errorf("changed %v, want the one that went and the one that came", changed)
	}
	for p, n := range map[string]int{"10.0.1.0/24": 0, "10.0.2.0/24": 1, "10.0.3.0/24": 1} {
		if got := c.OwnersOf(netip.MustParsePrefix(p)); len(got) != n {
			t.Errorf("%s has owners %v", p, got)
		}
	}
}

// cilium#33772: a second owner that comes and goes means no write at all.
func TestB12AnotherOwnerIsNoChange(t *testing.T) {
	c := NewCache(Config{})
	a, b := owner(KindCiliumNetworkPolicy, "a"), owner(KindCiliumNetworkPolicy, "b")
	c.Replace(a, set("10.0.0.0/8"))
	c.Learn(netip.MustParsePrefix("10.0.0.0/8"), 1000, 1)
	c.Changes()
	c.Replace(b, set("10.0.0.0/8"))
	c.Learn(netip.MustParsePrefix("10.0.0.0/8"), 1000, 2)
	c.RemoveOwner(b)
	if changed := c.Changes(); len(changed) != 0 {
		t.Errorf("changed %v", changed)
	}
	c.mustWant(t, "10.0.0.0/8", 1000)
}

// cilium#35511: many owners of one prefix.
func TestB17TenThousandOwnersOfOnePrefix(t *testing.T) {
	c := NewCache(Config{})
	p := netip.MustParsePrefix("10.0.0.0/8")
	for i := range 10000 {
		c.Upsert(owner(KindNetworkPolicy, fmt.Sprint(i)), p, Metadata{})
		c.Learn(p, 1000, int64(i))
		if changed := c.Changes(); len(changed) != 0 && i > 0 {
			t.Fatalf("owner %d caused a write", i)
		}
	}
	for i := range 10000 {
		c.mustWant(t, "10.0.0.0/8", 1000)
		c.RemoveOwner(owner(KindNetworkPolicy, fmt.Sprint(i)))
	}
	c.mustWant(t, "10.0.0.0/8", 0)
}

// An object that is deleted and created again has another UID, and the late end
// of the old one must not end the new one.
func TestReCreatedOwnerIsAnother(t *testing.T) {
	c := NewCache(Config{})
	old, created := owner(KindNetworkPolicy, "x"), owner(KindNetworkPolicy, "x")
	created.UID = "another"
	c.Replace(old, set("10.0.0.0/8"))
	c.Replace(created, set("10.0.0.0/8"))
	c.RemoveOwner(old)
	if got := c.OwnersOf(netip.MustParsePrefix("10.0.0.0/8")); len(got) != 1 || got[0] != created {
		t.Errorf("owners %v", got)
	}
}

func TestWorldHasAReservedNumber(t *testing.T) {
	c := NewCache(Config{WorldIPv4: 9, WorldIPv6: 10})
	c.Replace(owner(KindNetworkPolicy, "all"), set("0.0.0.0/0", "::/0"))
	c.Learn(netip.MustParsePrefix("0.0.0.0/0"), 1000, 5)
	c.mustWant(t, "0.0.0.0/0", 9)
	c.mustWant(t, "::/0", 10)
}

func TestNumbersFollowTheRevision(t *testing.T) {
	c := NewCache(Config{})
	p := netip.MustParsePrefix("10.0.0.0/8")
	c.Replace(owner(KindNetworkPolicy, "x"), set("10.0.0.0/8"))
	c.mustWant(t, "10.0.0.0/8", 0) // nothing is wanted before it has a number
	for _, step := range []struct {
		number   uint32
		revision int64
		want     uint32
	}{
		{1000, 0, 1000}, {1001, 5, 1001}, {1002, 4, 1001}, {0, 9, 1001}, {1003, 5, 1003},
	} {
		c.Learn(p, step.number, step.revision)
		c.mustWant(t, "10.0.0.0/8", step.want)
	}
	c.Forget() // another ledger counts from another beginning
	c.mustWant(t, "10.0.0.0/8", 1003)
	c.Learn(p, 1004, 1)
	c.mustWant(t, "10.0.0.0/8", 1004)
}

func TestMetadataMergesBySourceThenOwner(t *testing.T) {
	c := NewCache(Config{})
	p := netip.MustParsePrefix("10.0.0.1/32")
	ep := func(s string) netip.Addr { return netip.MustParseAddr(s) }
	weak, strong, equal := owner(KindNode, "weak"), owner(KindNode, "strong"), owner(KindNode, "a")
	c.Upsert(weak, p, Metadata{Source: SourceKubernetes, TunnelEndpoint: ep("172.18.0.9"), EncryptKey: 3, Flags: FlagSkipTunnel})
	c.Upsert(strong, p, Metadata{Source: SourceCustomResource, TunnelEndpoint: ep("172.18.0.3")})
	c.Learn(p, 1000, 1)
	want := func(e Entry) {
		t.Helper()
		if got, _ := c.Wanted(p); got != e {
			t.Fatalf("got %+v, want %+v", got, e)
		}
	}
	want(Entry{Number: 1000, TunnelEndpoint: ep("172.18.0.3"), EncryptKey: 3, Flags: FlagSkipTunnel})
	c.Upsert(equal, p, Metadata{Source: SourceCustomResource, TunnelEndpoint: ep("172.18.0.4")})
	want(Entry{Number: 1000, TunnelEndpoint: ep("172.18.0.4"), EncryptKey: 3, Flags: FlagSkipTunnel})
	c.Remove(equal, p)
	c.Remove(strong, p)
	c.Changes()
	c.Upsert(weak, p, Metadata{Source: SourceKubernetes})
	want(Entry{Number: 1000})
	if len(c.Changes()) != 1 {
		t.Error("metadata that went is a change")
	}
}
